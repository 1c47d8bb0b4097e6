"""What a network in training says after some prompts, so that one can read what it has learnt.

All ranks that hold the network ask it together, between two steps. No parameter and no random stream is touched, and what is kept
of the texts lives no longer than the call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from megatron.core.config.flags.declare import ConfigError, raise_config_error_if
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.datasets.images import ImageError, read_image_bytes
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.storage import split_text_lines
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import Tokenizer, read_flag_file_text
from megatron.inference.engine import Engine
from megatron.inference.generate import prompt_ids
from megatron.inference.image_prompts import ImagePromptWriter
from megatron.inference.requests import GenerationRequest, Ids
from megatron.inference.sampling import SamplingParams
from megatron.inference.step_input import PromptImages

_TOGETHER = 32  # prompts decoded at once by each copy of the network


@dataclass(frozen=True, slots=True)
class EvaluationPrompts:
    """Prompts with their ids, and how to continue them. The n-th is sampled with seed + n. images, references: of each,
    for questions about images; references are the right answers. stop_ids, stop_words: either ends a text.
    """

    texts: tuple[str, ...]
    ids: tuple[Ids, ...]
    num_tokens: int
    sampling: SamplingParams
    seed: int
    images: tuple[PromptImages | None, ...] = ()
    references: tuple[tuple[str, ...], ...] = ()
    stop_ids: Ids = ()
    stop_words: tuple[str, ...] = ()

    def count_exact_matches(self, answers: Sequence[str]) -> tuple[int, int]:
        """Return (number of answers equal to a reference but for case and outer space, number with references)."""
        scored = [pair for pair in zip(answers, self.references) if pair[1]]
        right = sum(answer.strip().lower() in [one.strip().lower() for one in given] for answer, given in scored)
        return right, len(scored)


def read_image_questions(
    path: str,
    written: ImagePromptWriter,
    folder: str | None,
    *,
    num_tokens: int,
    positions: int,
    temperature: float,
    seed: int,
) -> EvaluationPrompts:
    """Read --eval-generate for a network with images: lines {"messages": ..., "images": [paths], "references":
    [answers]}. folder: that image paths are relative to, if not the file's. positions: of the network. Raises
    `ConfigError` for a line that cannot be used.
    """
    folder = folder or os.path.dirname(os.path.abspath(path))
    texts: list[str] = []
    prompts: list[tuple[Ids, PromptImages]] = []
    references: list[tuple[str, ...]] = []
    for where, line in _lines_with_location(path, "questions"):
        with _errors_with_location(where):
            row = json.loads(line)
            messages, names = row["messages"], row.get("images", [])
            texts.append(str(messages[-1]["content"]))
            references.append(tuple(map(str, row.get("references", []))))
        prompts.append(
            encode_image_question(messages, names, written, folder, where=where, positions=positions - num_tokens)
        )
    ids, images = zip(*prompts, strict=True)
    in_prompts = tuple(one if len(one.images) else None for one in images)
    return EvaluationPrompts(
        tuple(texts), ids, num_tokens, SamplingParams(temperature), seed, in_prompts, tuple(references)
    )


def encode_image_question(
    messages: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    written: ImagePromptWriter,
    folder: str,
    *,
    where: str,
    positions: int,
) -> tuple[Ids, PromptImages]:
    """Return the ids of a question about images, and its images. names: of files in `folder`. positions: most ids.
    Raises `ConfigError` that begins with `where` for what cannot be used.
    """
    with _errors_with_location(where):
        files = [read_image_bytes(os.path.join(folder, name), written.options) for name in names]
        ids, images = written.encode_prompt(messages, files)
    if len(ids) > positions:
        raise ConfigError(
            f"{where}: its {len(ids)} tokens with images are more than the {positions} positions that the network has beside the "
            "answer; shorten it or ask for a shorter answer"
        )
    return ids, images


@contextmanager
def _errors_with_location(where: str) -> Iterator[None]:
    """Turn errors within into a `ConfigError` that begins with `where`."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, DataError, ImageError) as error:
        raise ConfigError(f"{where} is no question about images: {type(error).__name__}: {error}") from None


def read_prompts(
    path: str,
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    positions: int,
    temperature: float,
    seed: int,
    template: str | None = None,
) -> EvaluationPrompts:
    """Read --eval-generate: one prompt a line, empty ones left out. Raises `ConfigError` for a line that cannot be
    used. positions: of the network, into which a prompt and its continuation must fit. template: chat template (as for
    `ConversationEncoder`) of lines that are objects with "messages"; None: all lines are text.
    """
    encoder, lines = None, _lines_with_location(path, "prompts")
    if template is not None and any(_is_json_object_line(line) for _, line in lines):
        try:
            encoder = ConversationEncoder(tokenizer, template)
        except ConfigError as error:
            where = next(where for where, line in lines if _is_json_object_line(line))
            raise ConfigError(f"{where} is a conversation: {error}") from error
    stop_ids, stop_words = ((), ()) if encoder is None else encoder.answer_end_ids_and_texts()
    prompts = [_encode_prompt_line(line, where, tokenizer, encoder) for where, line in lines]
    raise_config_error_if(
        f"{where}: {len(ids)} tokens and --eval-generate-tokens {num_tokens} are more than the {positions} "
        "positions of the network; shorten the line or ask for fewer"
        for (where, _), (_, ids) in zip(lines, prompts, strict=True)
        if len(ids) + num_tokens > positions
    )
    texts, ids = zip(*prompts, strict=True)
    return EvaluationPrompts(
        texts, ids, num_tokens, SamplingParams(temperature), seed, stop_ids=stop_ids, stop_words=stop_words
    )


def _lines_with_location(path: str, noun: str) -> list[tuple[str, str]]:
    """Return (location for messages, line) of the lines that are not blank; `ConfigError` that misses `noun` if none is."""
    text = read_flag_file_text(path, "--eval-generate")
    lines = enumerate(split_text_lines(text.removeprefix("\ufeff")), 1)
    numbered = [(f"--eval-generate {path} line {n}", line) for n, line in lines if line.strip()]
    if not numbered:
        raise ConfigError(f"--eval-generate {path} has no {noun}; write one a line")
    return numbered


def _is_json_object_line(line: str) -> bool:
    return line.lstrip().startswith("{")


def _encode_prompt_line(
    line: str, where: str, tokenizer: Tokenizer, encoder: ConversationEncoder | None
) -> tuple[str, Ids]:
    """Return (text to show, ids) of a line; `ConfigError` if it is neither text nor, with an encoder, a conversation."""
    try:
        if encoder is None or not _is_json_object_line(line):
            return line, tuple(prompt_ids(tokenizer, line))
        row = json.loads(line)
        messages, variables = row["messages"], row.get("chat_template_kwargs") or {}
        return str(messages[-1]["content"]), tuple(encoder.encode_prompt(messages, row.get("tools"), variables))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, DataError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error


def generate_continuation_texts(
    stages: Sequence[GPTModel], tokenizer: Tokenizer, prompts: EvaluationPrompts
) -> list[str]:
    """Continue each prompt, the same on every rank. stages: this rank's, in evaluation mode. Collective."""
    mesh = stages[0].build.mesh
    each = min(_TOGETHER, -(-len(prompts.ids) // mesh.dp.size))
    length = max(2, max(map(len, prompts.ids)) + prompts.num_tokens)
    engine = Engine(stages, tokenizer, InferenceConfig(inference_max_requests=each, inference_max_seq_length=length))
    if not mesh.world.is_first:
        engine.run_as_follower()
        return collectives.broadcast_object(None, mesh.world)
    replies = engine.run(
        GenerationRequest(
            ids,
            prompts.num_tokens,
            prompts.sampling,
            prompts.seed + place,
            stop_ids=prompts.stop_ids,
            stop_words=prompts.stop_words,
            images=images,
        )
        for place, (ids, images) in enumerate(zip_longest(prompts.ids, prompts.images))
    )
    engine.close()
    texts = [f"({reply.problem})" if reply.reason == "error" else reply.text for reply in replies]
    return collectives.broadcast_object(texts, mesh.world)
