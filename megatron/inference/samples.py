"""What a network in training says after some prompts, so that one can read what it has learnt.

All ranks that hold the network ask it together, between two steps. No parameter and no random stream is touched, and what is kept
of the texts lives no longer than the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.config.flags import ConfigError, refuse
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.tokenizers.base import Tokenizer, read_text
from megatron.inference.engine import Engine
from megatron.inference.generate import prompt_ids
from megatron.inference.requests import Ids, Request
from megatron.inference.sampling import Sampling

_TOGETHER = 32  # prompts decoded at once by each copy of the network


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts with their ids, and how they are continued. The n-th draws with seed + n."""

    texts: tuple[str, ...]
    ids: tuple[Ids, ...]
    num_tokens: int
    sampling: Sampling
    seed: int


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
        Request(ids, prompts.num_tokens, prompts.sampling, prompts.seed + place)
        for place, ids in enumerate(prompts.ids)
    )
    engine.close()
    texts = [f"({reply.problem})" if reply.reason == "error" else reply.text for reply in replies]
    return collectives.broadcast_object(texts, mesh.world)
