"""Continue every prompt of a file: JSON lines in, JSON lines out, in the same order.

    megatron generate --load runs/quickstart/checkpoints --input prompts.jsonl --output answers.jsonl

A line holds a "prompt" (text), or "ids". What else it says wins over the command line: num_tokens, temperature, top_k, top_p,
min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, stop (texts), logprobs (how many of the likeliest tokens to name; 0: only the token's own).
To a network that reads images a line says {"messages": [{"role": "user", "content": "<image> What is it?"}], "images": [PATH, ...]}.
Line n of the output answers line n of the input; a line that cannot be served is answered with an "error", and the exit code is 1.

Of a T5, the prompt is what the encoder reads, with the end of text behind it (ids are read as they are), and the answer what the
decoder writes.

A run that was interrupted goes on where its output ends, and tries again what failed; each line of the output has a key of the
line, the checkpoint and the options that it answers. What no line and no option says is as the folder's generation_config.json
says. Under torchrun, the ranks share the network as the sizes say.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from megatron.cli.tool_parser import (
    ToolArgumentParser,
    add_checkpoint_options,
    add_dtype,
    add_parallel_size_options,
    add_sampling_options,
    fill_sampling_defaults,
    num_tokens_or_default,
)
from megatron.core.config.flags.declare import ConfigError, add_config_arguments, config_from_namespace
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.datasets.images import ImageError, read_image_bytes
from megatron.core.datasets.indexed import DataError
from megatron.core.families.hf_folder import is_hf_checkpoint
from megatron.core.models.t5 import T5Model
from megatron.core.tokenizers.base import read_flag_file_text
from megatron.inference.answer_file import (
    KEY,
    LineKey,
    append_lines,
    checkpoint_identity,
    count_finished_lines,
    enumerate_nonblank_lines,
    failed_lines,
    line_key,
    replace_lines,
)
from megatron.inference.encoder_decoder import EncoderDecoderEngine
from megatron.inference.engine import Engine
from megatron.inference.generate import prompt_ids
from megatron.inference.image_prompts import ImagePromptWriter
from megatron.inference.requests import GenerationEvent, GenerationReply, GenerationRequest, TokenLogprob
from megatron.inference.sampling import SamplingParams
from megatron.inference.step_input import PromptImages
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.checkpoint.inference_model import (
    GPT,
    InferenceModel,
    ModelKind,
    infer_checkpoint_architecture,
    load_network,
    read_request_defaults,
)
from megatron.training.entry import guarded_entry_point

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
KINDS: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "ids": (list,),
    "messages": (list,),
    "images": (list,),
    "num_tokens": (int,),
    "seed": (int,),
    "stop": (list,),
    "logprobs": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
}
AHEAD = 4  # times the requests that are decoded together: how far lines are read before the first of them is answered


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ToolArgumentParser(description=__doc__, allow_abbrev=True)
    what = add_checkpoint_options(parser, "what")
    what.add_argument(
        "--draft",
        metavar="FOLDER",
        help="a smaller network with the same tokenizer, for --num-speculative-tokens "
        "(default: the network's own layers of multi-token prediction)",
    )
    what.add_argument("--input", required=True, metavar="FILE", help="prompts, a JSON object a line")
    what.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="answers, a JSON object a line; begun by an earlier run: gone on with",
    )
    add_dtype(what)
    add_parallel_size_options(what, SIZES)
    how = parser.add_argument_group("how, where a line does not say")
    add_sampling_options(how, "line n draws with seed + n")
    how.add_argument(
        "--min-p", type=float, metavar="P", help="no token less likely than P of the likeliest (default: 0)"
    )
    how.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="make tokens of the text less likely (default: 1, no)"
    )
    for name in ("presence", "frequency"):
        how.add_argument(
            f"--{name}-penalty",
            type=float,
            metavar="X",
            help=f"make new tokens less likely, {'once' if name == 'presence' else 'each time'} (default: 0, no)",
        )
    add_config_arguments(parser, InferenceConfig)
    return parser.parse_args(argv)


def load_engine(given: argparse.Namespace) -> Engine | EncoderDecoderEngine:
    """Load the networks of the command line; return this rank's engine. `ConfigError`, `CheckpointError`."""
    parallel = ParallelConfig(**{name: getattr(given, name) for name in SIZES})
    config = config_from_namespace(InferenceConfig, given)
    fill_sampling_defaults(given, read_request_defaults(given.load, given.generation_config, step=given.ckpt_step))
    if infer_checkpoint_architecture(open_checkpoint(given.load, given.ckpt_step)) == "t5":
        if given.draft:
            raise ConfigError("a T5 is decoded without drafts; leave out --draft")
        t5 = load_network(
            given.load, ModelKind("t5", T5Model), step=given.ckpt_step, parallel=parallel, dtype=given.dtype
        )
        return EncoderDecoderEngine(t5.stages, t5.tokenizer, config, start=decoder_start_token(t5))
    loaded = load_network(given.load, GPT, step=given.ckpt_step, parallel=parallel, dtype=given.dtype)
    draft = load_network(given.draft, GPT, parallel=parallel, dtype=given.dtype).stages if given.draft else ()
    engine = Engine(loaded.stages, loaded.tokenizer, config, draft=draft)
    if loaded.config.model.has_vision:
        engine.image_prompts = ImagePromptWriter.from_model(loaded.config.model, loaded.tokenizer, loaded.data_settings)
    return engine


def decoder_start_token(loaded: InferenceModel) -> int:
    """Return the token a T5's decoded text begins with: of a Hugging Face folder, else bos. `ConfigError` if none."""
    where, tokenizer = loaded.source.where, loaded.tokenizer
    message = (
        json.loads(read_flag_file_text(Path(where) / "config.json", "--load")).get("decoder_start_token_id")
        if is_hf_checkpoint(where)
        else tokenizer.bos
    )
    if type(message) is not int:
        raise ConfigError(
            f"neither {where} nor its tokenizer says what a decoder's text begins with; give a folder whose config.json has a "
            "decoder_start_token_id"
        )
    return message


def parse_request_line(
    line: str, number: int, given: argparse.Namespace, engine: Engine | EncoderDecoderEngine
) -> GenerationRequest:
    """Return the request of an input line; `ConfigError` says what is wrong with it. number: added to the seed."""
    fields, images = _parse_json_request_line(line), None
    prompt: Sequence[int]
    try:
        if "messages" in fields:
            prompt, images = encode_image_chat_prompt(engine, fields["messages"], fields.get("images", []))
        else:
            prompt = tokenize_prompt(engine, fields["prompt"]) if "prompt" in fields else fields["ids"]
    except (ValueError, DataError, ImageError) as error:
        raise ConfigError(f"the prompt cannot be read: {error}") from None
    settings = {name: fields.get(name, getattr(given, name)) for name in SAMPLING}
    sampling = SamplingParams(**{name: value for name, value in settings.items() if value is not None})
    return GenerationRequest(
        tuple(prompt),
        num_tokens_or_default(given, fields.get("num_tokens"), engine.max_length - len(prompt) + 1),
        sampling,
        fields.get("seed", given.seed + number),
        stop_words=tuple(fields.get("stop", given.stop_words)),
        logprobs="logprobs" in fields,
        top_logprobs=fields.get("logprobs", 0),
        images=images,
    )


def encode_image_chat_prompt(
    engine: Engine | EncoderDecoderEngine, messages: list[Any], paths: list[Any]
) -> tuple[tuple[int, ...], PromptImages]:
    """Return the ids of a conversation with images, and the images. paths: of image files."""
    prompts = engine.image_prompts if isinstance(engine, Engine) else None
    if prompts is None:
        raise ConfigError("the network reads no images; give a prompt")
    return prompts.encode_prompt(messages, [read_image_bytes(str(path), prompts.options) for path in paths])


def _parse_json_request_line(line: str) -> dict[str, Any]:
    """Return the JSON object of a line; `ConfigError` if it is none, or a value has a wrong type."""
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"the line is not JSON: {error}") from None
    if not isinstance(fields, dict) or sum(name in fields for name in ("prompt", "ids", "messages")) != 1:
        raise ConfigError("a line is a JSON object with a prompt or with ids, or with messages")
    for name, value in fields.items():
        if name in KINDS and (not isinstance(value, KINDS[name]) or isinstance(value, bool)):
            types = " or ".join(kind.__name__ for kind in KINDS[name])
            raise ConfigError(f"{name} is {value!r}; it must be of the type {types}")
    ids, stop = fields.get("ids", []), fields.get("stop", [])
    if any(type(token) is not int for token in ids) or any(type(word) is not str for word in stop):
        raise ConfigError("ids are whole numbers, and stop holds texts")
    return fields


def tokenize_prompt(engine: Engine | EncoderDecoderEngine, text: str) -> list[int]:
    """Return the ids of a prompt, with the end of text for a T5."""
    tokenizer = engine.tokenizer
    if isinstance(engine, Engine):
        return prompt_ids(tokenizer, text)
    return [*tokenizer.tokenize(text), tokenizer.eod if tokenizer.eos is None else tokenizer.eos]


def reply_as_output(line: str, reply: GenerationReply) -> dict[str, Any]:
    """Return the output object for an input line and its reply."""
    request = json.loads(line)
    answer = {name: request[name] for name in ("id", "prompt") if name in request}
    if reply.reason == "error":
        return {**answer, "error": reply.problem}
    answer |= {"text": reply.text, "ids": list(reply.ids), "reason": reply.reason, "seed": reply.seed}
    return (
        {**answer, "logprobs": [_logprobs_as_output(token) for token in reply.tokens]}
        if "logprobs" in request
        else answer
    )


def _logprobs_as_output(token: TokenLogprob) -> dict[str, Any]:
    return {"logprob": token.logprob, "top": [[number, score] for number, score in token.top]}


def output_of_failed_line(line: str, problem: str) -> dict[str, Any]:
    """Return the output object for an input line that cannot be served."""
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        value = {}
    request = value if isinstance(value, dict) else {}
    return {**{name: request[name] for name in ("id", "prompt") if name in request}, "error": problem}


def generate_outputs_in_order(
    engine: Engine | EncoderDecoderEngine, lines: Iterator[tuple[int, str]], given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the output objects of the lines, in order; only a limited number of lines is held at once."""
    replies: dict[int, dict[str, Any]] = {}
    requests: dict[int, tuple[int, str]] = {}
    config, order, end = engine.config, deque[int](), False
    most = min(
        AHEAD * config.inference_max_requests, config.inference_max_requests + config.inference_max_waiting_requests
    )

    def store_reply_as_output(event: GenerationEvent) -> None:
        if event.reply is not None:
            number, line = requests.pop(event.ticket)
            replies[number] = reply_as_output(line, event.reply)

    while not end or requests or replies:
        while not end and len(requests) + len(replies) < most:
            following = next(lines, None)
            if following is None:
                end = True
                break
            number, line = following
            order.append(number)
            try:
                requests[engine.submit(parse_request_line(line, number, given, engine), store_reply_as_output)] = (
                    following
                )
            except ConfigError as error:
                replies[number] = output_of_failed_line(
                    line, " ".join(part.strip() for part in str(error).splitlines()[1:]) or str(error)
                )
        engine.step()
        while order and order[0] in replies:
            yield replies.pop(order.popleft())


def line_key_of_run(given: argparse.Namespace) -> LineKey:
    """Return the key of input lines, by the checkpoint and the options that answers depend on."""
    names = (*SAMPLING, "num_tokens", "most_tokens", "seed", "dtype", "stop_words")
    options = {name: getattr(given, name) for name in names}
    return line_key(options, checkpoint_identity(open_checkpoint(given.load, given.ckpt_step).where))


def write_missing_answers(engine: Engine | EncoderDecoderEngine, given: argparse.Namespace) -> int:
    """On the first rank: answer the lines that have no output yet, and again those that failed. Return the number of those
    that could not be served, and of which the output did not say so before.
    """
    output, key = Path(given.output), line_key_of_run(given)
    with open_input(given) as file:
        before = count_finished_lines(output, enumerate_nonblank_lines(file), key)
    with open_input(given) as file:
        again = failed_lines(output, enumerate_nonblank_lines(file))
    changed = {
        number: {**answer, KEY: key(number, line)}
        for (number, line), answer in zip(again, generate_outputs_in_order(engine, iter(again), given), strict=True)
    }
    if mended := {number: answer for number, answer in changed.items() if "error" not in answer}:
        replace_lines(output, mended)
    with open_input(given) as file:
        keys = deque[str]()

        def read_missing_lines() -> Iterator[tuple[int, str]]:
            for number, line in enumerate_nonblank_lines(file):
                if number >= before:
                    keys.append(key(number, line))
                    yield number, line

        answers = (
            {**answer, KEY: keys.popleft()} for answer in generate_outputs_in_order(engine, read_missing_lines(), given)
        )
        failed = 0
        bar = tqdm(append_lines(output, answers), desc="answers", initial=before, unit="line", disable=None)
        for answer in bar:
            failed += "error" in answer
            bar.set_postfix(tokens_per_second=round(engine.metrics().tokens_per_second), refresh=False)
    return failed


def open_input(given: argparse.Namespace) -> TextIO:
    """Open the file of prompts."""
    return open(given.input, encoding="utf-8-sig", newline="\n")


@guarded_entry_point
def main() -> None:
    """Load the engine and answer all lines; exit with 1 if some could not be served."""
    given = parse_arguments()
    logging.basicConfig(level=logging.WARNING)
    for path in (given.input, Path(given.output).parent):
        if not Path(path).exists():
            raise ConfigError(f"{path} is not there")
    engine = load_engine(given)
    if not engine.mesh.world.is_first:
        engine.run_as_follower()
        return
    failed = write_missing_answers(engine, given)
    engine.close()
    if failed:
        sys.stderr.write(f"{failed} lines could not be served; each says why in {given.output}\n")
        raise SystemExit(1)
