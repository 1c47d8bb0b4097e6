"""What a network in training says after some prompts, so that one can read what it has learnt.

All ranks that hold the network ask it together, between two steps. No parameter and no random stream is touched, and what is kept
of the texts lives no longer than the call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from megatron.core.config.flags import ConfigError, refuse
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.datasets.images import ImageError, read_bytes
from megatron.core.datasets.indexed import DataError
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import Tokenizer, read_text
from megatron.inference.engine import Engine
from megatron.inference.generate import prompt_ids
from megatron.inference.image_prompts import ImagePrompts
from megatron.inference.requests import Ids, Request
from megatron.inference.sampling import Sampling
from megatron.inference.step_input import PromptImages

_TOGETHER = 32  # prompts decoded at once by each copy of the network


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts with their ids, and how they are continued. The n-th draws with seed + n.

    images, references: of each, where the prompts are questions about images; the right answers.
    """

    texts: tuple[str, ...]
    ids: tuple[Ids, ...]
    num_tokens: int
    sampling: Sampling
    seed: int
    images: tuple[PromptImages | None, ...] = ()
    references: tuple[tuple[str, ...], ...] = ()

    def accuracy(self, answers: Sequence[str]) -> tuple[int, int]:
        """How many answers are one of their references, up to case and space at the ends, and how many have some."""
        scored = [pair for pair in zip(answers, self.references) if pair[1]]
        right = sum(answer.strip().lower() in [one.strip().lower() for one in given] for answer, given in scored)
        return right, len(scored)


def read_questions(
    path: str,
    written: ImagePrompts,
    folder: str | None,
    *,
    num_tokens: int,
    positions: int,
    temperature: float,
    seed: int,
) -> Prompts:
    """The lines of --eval-generate of a network that reads images: {"messages": ..., "images": [paths], "references": [answers]}.

    folder: that paths begin at, if not that of the file. Raises `ConfigError` for what cannot be answered.
    """
    folder = folder or os.path.dirname(os.path.abspath(path))
    texts: list[str] = []
    prompts: list[tuple[Ids, PromptImages]] = []
    references: list[tuple[str, ...]] = []
    for place, line in enumerate(read_text(path, "--eval-generate").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            files = [read_bytes(os.path.join(folder, name), written.options) for name in row.get("images", [])]
            prompts.append(written.write(row["messages"], files))
            texts.append(str(row["messages"][-1]["content"]))
            references.append(tuple(map(str, row.get("references", []))))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, DataError, ImageError) as error:
            raise ConfigError(
                f"--eval-generate {path} line {place} is no question about images: {type(error).__name__}: {error}"
            ) from None
        if len(prompts[-1][0]) + num_tokens > positions:
            raise ConfigError(
                f"--eval-generate {path} line {place}: {len(prompts[-1][0])} tokens with images and --eval-generate-tokens {num_tokens} "
                f"are more than the {positions} positions of the network; shorten the line or ask for fewer"
            )
    if not prompts:
        raise ConfigError(f"--eval-generate {path} has no questions; write one a line")
    ids, images = zip(*prompts, strict=True)
    in_prompts = tuple(one if len(one.images) else None for one in images)
    return Prompts(tuple(texts), ids, num_tokens, Sampling(temperature), seed, in_prompts, tuple(references))


def read_prompts(
    path: str, tokenizer: Tokenizer, *, num_tokens: int, positions: int, temperature: float, seed: int
) -> Prompts:
    """The lines of --eval-generate that are not empty. Raises `ConfigError` for what cannot be continued.

    positions: of the network, into which a prompt and its continuation must fit.
    """
    lines = [
        (place, line)
        for place, line in enumerate(read_text(path, "--eval-generate").splitlines(), start=1)
        if line.strip()
    ]
    if not lines:
        raise ConfigError(f"--eval-generate {path} has no prompts; write one a line")
    ids = [_encode_prompt(tokenizer, line, f"--eval-generate {path} line {place}") for place, line in lines]
    refuse(
        f"--eval-generate {path} line {place}: {len(prompt)} tokens and --eval-generate-tokens {num_tokens} are more than the {positions} "
        "positions of the network; shorten the line or ask for fewer"
        for (place, _), prompt in zip(lines, ids, strict=True)
        if len(prompt) + num_tokens > positions
    )
    return Prompts(tuple(line for _, line in lines), tuple(ids), num_tokens, Sampling(temperature), seed)


def _encode_prompt(tokenizer: Tokenizer, text: str, where: str) -> Ids:
    try:
        return tuple(prompt_ids(tokenizer, text))
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error


def continuations(stages: Sequence[GPTModel], tokenizer: Tokenizer, prompts: Prompts) -> list[str]:
    """What follows each prompt, on every rank alike. stages: this rank's, in evaluation mode. All ranks call this together."""
    mesh = stages[0].build.mesh
    each = min(_TOGETHER, -(-len(prompts.ids) // mesh.dp.size))
    length = max(2, max(map(len, prompts.ids)) + prompts.num_tokens)
    engine = Engine(stages, tokenizer, InferenceConfig(inference_max_requests=each, inference_max_seq_length=length))
    if not mesh.world.is_first:
        engine.follow()
        return collectives.broadcast_object(None, mesh.world)
    replies = engine.run(
        Request(ids, prompts.num_tokens, prompts.sampling, prompts.seed + place, images=images)
        for place, (ids, images) in enumerate(zip_longest(prompts.ids, prompts.images))
    )
    engine.close()
    texts = [f"({reply.problem})" if reply.reason == "error" else reply.text for reply in replies]
    return collectives.broadcast_object(texts, mesh.world)
