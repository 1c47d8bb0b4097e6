"""lm-evaluation-harness's model `megatron`: any GPT-like checkpoint, in one process or under a layout.

    lm_eval --model megatron --model_args load=runs/quickstart/checkpoints --tasks lambada_openai
    torchrun --nproc_per_node 4 -m megatron.evaluation.harness --model megatron --tasks hellaswag --batch_size auto \\
        --model_args load=FOLDER,tensor_model_parallel_size=2,pipeline_model_parallel_size=2

`lm_eval` finds the model where this package is installed (plugin.py). Under a launcher, `main` hands the command line over to it
unchanged, ends all ranks when one fails, and lets the first report. A programme of your own imports this module before
`lm_eval.simple_evaluate`. Everything that lm_eval can be told works. What --model_args understands is `LmEvalModelArgs`, and the
tokenizer's settings by the names of their flags (`tokenizer_type=...`) for a checkpoint that says nothing of its tokenizer.
Every rank is asked every request, and the data ranks share them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.datasets.special_tokens import count_ids_around_text
from megatron.core.datasets.templates import ChatTemplate
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import Tokenizer, hash_parts, tokenizer_fingerprint_fields
from megatron.evaluation.likelihood import (
    EvaluationBatchLimits,
    GenerationPrompt,
    Ids,
    LoglikelihoodRequest,
    continuation_loglikelihoods,
    generate_without_kv_cache,
)
from megatron.inference.sampling import SamplingParams
from megatron.training.checkpoint.inference_model import GPT, load_network
from megatron.training.entry import guarded_entry_point
from megatron.training.launch.launch_info import read_launch_info, world_size

AUTO_TOKENS = 16384  # of a batch, when its size is chosen here
_NUMBERS_OF_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_WITHOUT_EFFECT: tuple[tuple[str, Any], ...] = (("num_beams", 1), ("repetition_penalty", 1.0), ("length_penalty", 1.0))


@dataclass(frozen=True, slots=True)
class LmEvalModelArgs:
    """The settings in `--model_args`.

    load: a run's --save, a Hugging Face folder, or one of Megatron's. ckpt_step: iteration; None: the newest.
    data_parallel_size: must be what the other two sizes leave. dtype: auto, float32, bfloat16, float16 or float64.
    max_length: positions of an input; None: all that the network has. max_gen_toks: most new tokens where a task does
    not say. seed: of sampling. batch_size, max_batch_size, device: as in lm_eval; batch_size
    auto: at most 16384 tokens. device cuda:0, lm_eval's default, means each rank's GPU, or the CPU if there is none.
    """

    load: str
    ckpt_step: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    data_parallel_size: int | None = None
    dtype: str = "auto"
    max_length: int | None = None
    max_gen_toks: int = 256
    seed: int = 1234
    batch_size: int | str = 1
    max_batch_size: int | None = None
    device: str | None = None

    @property
    def batch_limits(self) -> EvaluationBatchLimits:
        """The limits of a batch. Raises `ConfigError` for an invalid batch_size."""
        word, _, _ = str(self.batch_size).partition(":")
        if word == "auto":
            return EvaluationBatchLimits(self.max_batch_size or 1024, AUTO_TOKENS)
        if not word.isdecimal() or int(word) < 1:
            raise ConfigError(f"batch_size {self.batch_size} is neither auto nor a number from 1 on")
        return EvaluationBatchLimits(int(word))

    @property
    def explicit_device(self) -> torch.device | None:
        """The device that the user chose; None: the rank chooses. Raises `ConfigError` for one GPU for several ranks."""
        if self.device in (None, "cuda", "cuda:0"):
            return None
        if self.device.startswith("cuda") and world_size() > 1:
            raise ConfigError(
                f"device {self.device}: {world_size()} ranks would share it; leave it out, and each takes the GPU of its number"
            )
        return torch.device(self.device)

    @property
    def parallel_config(self) -> ParallelConfig:
        """The layout. Raises `ConfigError` if data_parallel_size does not fit the number of ranks."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        left = parallel.data_parallel_size(world_size())
        if self.data_parallel_size not in (None, left):
            raise ConfigError(
                f"data_parallel_size {self.data_parallel_size}: {world_size()} ranks of tensor {tp} x pipeline {pp} "
                f"leave {left}; start {tp * pp * self.data_parallel_size} ranks, or leave it out"
            )
        return parallel


def split_model_and_tokenizer_args(given: Mapping[str, Any]) -> tuple[LmEvalModelArgs, dict[str, Any]]:
    """Split `--model_args` into settings and the tokenizer's. `ConfigError` for unknown names or without load."""
    mine, theirs = ({field.name for field in dataclasses.fields(kind)} for kind in (LmEvalModelArgs, TokenizerConfig))
    strangers = [name for name in given if name not in mine | theirs]
    if strangers or not given.get("load"):
        problem = f"--model_args has {', '.join(strangers)}" if strangers else "--model_args has no load=FOLDER"
        raise ConfigError(
            f"{problem}; the model megatron takes {', '.join(sorted(mine))}, and the tokenizer's "
            f"{', '.join(sorted(theirs))}"
        )
    return LmEvalModelArgs(**{name: given[name] for name in given if name in mine}), {
        name: given[name] for name in given if name in theirs
    }


@register_model("megatron")
class MegatronLM(TemplateLM):
    """A checkpoint as a model of lm-evaluation-harness. All ranks hold it, and get the same requests."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.settings, tokenizer = split_model_and_tokenizer_args(given)
        self._size = self.settings.batch_limits
        self.loaded = load_network(
            self.settings.load,
            GPT,
            step=self.settings.ckpt_step,
            parallel=self.settings.parallel_config,
            dtype=self.settings.dtype,
            tokenizer=tokenizer,
            device=self.settings.explicit_device,
        )
        self._device = self.loaded.mesh.device
        positions = self.loaded.config.model.max_position_embeddings
        self.max_length = positions if self.settings.max_length is None else self.settings.max_length
        learned = self.loaded.config.model.rope.position_embedding_type == "learned_absolute"
        if self.max_length < 1 or learned and self.max_length > positions:
            raise ConfigError(f"max_length {self.max_length} is not between 1 and the network's {positions} positions")
        before, behind = count_ids_around_text(self.megatron_tokenizer)
        framed = self.megatron_tokenizer.tokenize("1")
        self._before, self._behind = framed[:before], framed[len(framed) - behind :]

    @property
    def megatron_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. (`tokenizer` is transformers' own to lm_eval.)"""
        return self.loaded.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self.megatron_tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context: begin of text, else end of document."""
        return self.megatron_tokenizer.eod if self.megatron_tokenizer.bos is None else self.megatron_tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text; names of special tokens become those tokens.

        add_special_tokens: add what the tokenizer puts around a text; None: unless the text begins with the prefix.
        """
        ids = self.megatron_tokenizer.tokenize_with_special(string)
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.megatron_tokenizer.id_to_token(self.prefix_token_id))
        return [*self._before, *ids, *self._behind] if add_special_tokens else ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-likelihood of the continuation after its context, whether it is the greedy one) of each request."""
        self._refuse_different_requests(requests)
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of `max_length`; every token is predicted once."""
        self._refuse_different_requests(requests)
        owners, windows = [], []
        for number, request in enumerate(requests):
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                owners.append(number)
                windows.append(LoglikelihoodRequest(*map(tuple, make_disjoint_window(pair))))
        totals = [0.0] * len(requests)
        for number, answer in zip(owners, self._loglikelihoods(windows), strict=True):
            totals[number] += answer[0]
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, cut at the first of its stop texts."""
        self._refuse_different_requests(requests)
        prompts = [self._generation_request(number, *request.args) for number, request in enumerate(requests)]
        texts = generate_without_kv_cache(self.loaded, [prompt for prompt, _ in prompts], size=self._size)
        return [
            cut_at_stop(self._decode_without_special_tokens(new), until)
            for new, (_, until) in zip(texts, prompts, strict=True)
        ]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as text by the tokenizer's template. `ConfigError` if it has none."""
        text = self.megatron_tokenizer.chat_template
        if text is None:
            raise ConfigError("the tokenizer has no chat template; give one by chat_template=FILE in --model_args")
        bos, eos = (
            "" if token is None else self.megatron_tokenizer.id_to_token(token)
            for token in (self.megatron_tokenizer.bos, self.megatron_tokenizer.eos)
        )
        return ChatTemplate(text, bos=bos, eos=eos, marks=(), now=None).render(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the tokenizer's template for lm_eval's records, or None."""
        return self.megatron_tokenizer.chat_template if chat_template else None

    @cached_property
    def tokenizer_name(self) -> str:
        """A hash that identifies the tokenizer in lm_eval's caches."""
        return str(tokenizer_fingerprint_fields(self.megatron_tokenizer)["hash"])

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm_eval writes beside its results: checkpoint, dtype and layout."""
        parallel = self.loaded.config.parallel
        return {
            "checkpoint": self.loaded.source.where,
            "model_dtype": self.loaded.config.precision.param_dtype_name,
            "layout": {"tensor": parallel.tp, "pipeline": parallel.pp, "data": self.loaded.mesh.dp.size},
        }

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy) of (text, context ids, continuation ids); the text is not used."""
        return self._loglikelihoods(
            [LoglikelihoodRequest(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        )

    def _loglikelihoods(self, requests: Sequence[LoglikelihoodRequest]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy) by request. `ConfigError` if a continuation exceeds `max_length`."""
        long = [len(request.continuation) for request in requests if len(request.continuation) > self.max_length]
        if long:
            raise ConfigError(
                f"a continuation of {max(long)} tokens does not fit into the network's {self.max_length} positions"
            )
        answers = continuation_loglikelihoods(self.loaded.stages, requests, max_length=self.max_length, size=self._size)
        return [(answer.loglikelihood, answer.greedy) for answer in answers]

    def _generation_request(
        self, number: int, context: str, given: Mapping[str, Any]
    ) -> tuple[GenerationPrompt, list[str]]:
        """Return a request's prompt, cut at its start to fit, and stop texts. `ConfigError` if no context fits."""
        until, num_tokens, sampling = sampling_from_gen_kwargs(given, self.settings.max_gen_toks)
        room = self.max_length - num_tokens
        if room < 1:
            raise ConfigError(
                f"{num_tokens} new tokens leave no room for a context in the network's {self.max_length} positions; lower "
                "max_gen_toks, by --gen_kwargs or in --model_args"
            )
        ids: Ids = tuple((self.tok_encode(context) or [self.prefix_token_id])[-room:])
        ended: Callable[[list[int]], bool] = lambda new: any(
            word in self._decode_without_special_tokens(new) for word in until
        )
        return GenerationPrompt(ids, num_tokens, ended, sampling, self.settings.seed + number), until

    def _decode_without_special_tokens(self, new: Sequence[int]) -> str:
        """Decode new ids without special tokens."""
        tokenizer = self.megatron_tokenizer
        special = {*tokenizer.special.values(), tokenizer.eod, *tokenizer.end_ids}
        return tokenizer.detokenize([token for token in new if token not in special])

    def _refuse_different_requests(self, requests: Sequence[Instance]) -> None:
        """Raise `ConfigError` if the ranks have different requests, which would deadlock. Collective."""
        mine = hash_parts(repr(request.args).encode() for request in requests)
        if len(set(collectives.gather_objects(mine, self.loaded.mesh.world))) > 1:
            raise ConfigError(
                "the ranks are asked different requests; with --use_cache, remove caches of an earlier run that did not "
                "end"
            )


def sampling_from_gen_kwargs(given: Mapping[str, Any], most: int) -> tuple[list[str], int, SamplingParams]:
    """Return (stop texts, most new tokens, sampling) of a task's `gen_kwargs`; greedy unless do_sample is true.

    most: the default number of new tokens. `ConfigError` for unknown settings.
    """
    known = {"until", *_NUMBERS_OF_TOKENS, "do_sample", "temperature", "top_k", "top_p"}
    unknown = [
        f"{name}={value}" for name, value in given.items() if not (name in known or (name, value) in _WITHOUT_EFFECT)
    ]
    if unknown:
        raise ConfigError(
            f"generation asks for {', '.join(unknown)}, which the model megatron "
            f"does not know; it takes until, {', '.join(_NUMBERS_OF_TOKENS)}, do_sample, temperature, top_k and top_p"
        )
    until = given.get("until") or []
    numbers = [given[name] for name in _NUMBERS_OF_TOKENS if given.get(name) is not None]
    sampling = _parse_gen_kwargs_sampling(given) if given.get("do_sample") else SamplingParams(0.0)
    ends = [until] if isinstance(until, str) else [word for word in until if word]
    return ends, int(numbers[0]) if numbers else most, sampling


def _parse_gen_kwargs_sampling(given: Mapping[str, Any]) -> SamplingParams:
    temperature = 1.0 if given.get("temperature") is None else float(given["temperature"])
    return SamplingParams(temperature, int(given.get("top_k") or 0), float(given.get("top_p") or 0.0))


def cut_at_stop(text: str, until: Sequence[str]) -> str:
    """Return the text before the first occurrence of a stop text."""
    for word in until:
        text = text.split(word)[0]
    return text


@guarded_entry_point
def main() -> None:
    """Run lm_eval's command line on all ranks; ranks after the first report nothing."""
    if read_launch_info().rank == 0:
        cli_evaluate()
        return
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        cli_evaluate()


if __name__ == "__main__":
    main()
