"""Text in, text out, with the stages that training uses."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.sampling import Sampling, draw


@torch.no_grad()
def continuation(model: GPTModel, prompt: list[int], *, num_tokens: int, sampling: Sampling, stop: int | None,
                 seed: int = 0) -> Iterator[int]:
    """Tokens after a prompt, one at a time, until `num_tokens` or the token `stop`.

    model: a whole network in evaluation mode. A text longer than its positions slides out at the front.
    """
    assert prompt, "a prompt has at least one token"
    settings, device = model.build.model, model.build.mesh.device
    generator = torch.Generator(device).manual_seed(seed)
    ids = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([ids[-settings.max_position_embeddings:]], device=device)
        logits = model(ids=window)[-1, :, :settings.true_vocab_size].float()
        token = int(draw(logits, sampling, generator))
        if token == stop:
            return
        ids.append(token)
        yield token


def generate_text(model: GPTModel, tokenizer: Tokenizer, prompt: str, *, num_tokens: int, sampling: Sampling,
                  seed: int = 0) -> str:
    """The prompt and what follows it."""
    ids = tokenizer.tokenize(prompt) or [tokenizer.eod]
    new = list(continuation(model, ids, num_tokens=num_tokens, sampling=sampling, stop=tokenizer.eod, seed=seed))
    # Decoded with what stands before, since some tokenizers put a blank between tokens.
    return prompt + tokenizer.detokenize(ids + new)[len(tokenizer.detokenize(ids)):]
