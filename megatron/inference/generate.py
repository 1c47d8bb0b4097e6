"""Text in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.incremental import IncrementalDecoder
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams


class GenerationFailed(Exception):
    """The engine ended a request with an error; the message says why."""


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize a prompt; an empty one becomes the end-of-document token."""
    return tokenizer.tokenize(text) or [tokenizer.eod]


def generate_continuation(
    engine: Engine,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    sampling: SamplingParams,
    ends: bool = True,
    seed: int = 0,
) -> list[int]:
    """Return the tokens after a prompt, at most `num_tokens`. ends: the end-of-document token ends it, and is not
    included. A text longer than the positions loses its beginning, and is prefilled for every token. Raises
    `GenerationFailed`.
    """
    ids, new = list(prompt), list[int]()
    while len(new) < num_tokens:
        window = ids[-engine.max_length :]
        count = min(num_tokens - len(new), engine.max_length - len(window) + 1)
        (reply,) = engine.run(
            [GenerationRequest(tuple(window), count, sampling, seed, first_draw=len(new), ignore_eod=not ends)]
        )
        if reply.reason == "error":
            raise GenerationFailed(reply.problem)
        ids += reply.ids
        new += reply.ids
        if reply.reason == "stop":
            break
    return new


def generate_texts(
    engine: Engine, prompts: Sequence[str], *, num_tokens: int, sampling: SamplingParams, seed: int = 0
) -> list[str]:
    """Return each prompt with its continuation, decoded together where they fit. Raises `GenerationFailed`."""
    tokenizer = engine.tokenizer
    prompts_ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    fits = [len(ids) + num_tokens - 1 <= engine.max_length for ids in prompts_ids]
    requests = [
        GenerationRequest(tuple(ids), num_tokens, sampling, seed)
        for ids, fit in zip(prompts_ids, fits, strict=True)
        if fit and num_tokens
    ]
    together = iter(engine.run(requests))
    texts = []
    for prompt, ids, fit in zip(prompts, prompts_ids, fits, strict=True):
        if fit and num_tokens:
            reply = next(together)
            if reply.reason == "error":
                raise GenerationFailed(reply.problem)
            texts.append(prompt + reply.text)
        else:
            new = generate_continuation(engine, ids, num_tokens=num_tokens, sampling=sampling, seed=seed)
            texts.append(prompt + decode_following(tokenizer, ids, new))
    return texts


def decode_following(tokenizer: Tokenizer, ids: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of new ids behind others, since some tokenizers put a space between tokens."""
    decoder = IncrementalDecoder(tokenizer, ids)
    return "".join([*map(decoder.add, new), decoder.finish()])
