"""The peers of the training benchmark: a plain PyTorch GPT, transformers' GPT-2, and ours, each as loss(x, y) -> scalar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """A GPT-2 shape, and one step's batch."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.length * self.batch

    @property
    def flops(self) -> float:
        """FLOPs of one step, attention counted over the causal half."""
        matrices = self.layers * 12 * self.hidden**2 + self.vocabulary * self.hidden
        return self.tokens * (6 * matrices + 6 * self.layers * self.hidden * self.length)


SIZES = {
    "10m": Size(layers=6, hidden=256, heads=4, vocabulary=20096, length=256, batch=8),
    "tiny": Size(layers=6, hidden=384, heads=6, vocabulary=50304, length=256, batch=8),
    "124m": Size(layers=12, hidden=768, heads=12, vocabulary=50304, length=512, batch=4),
}


class PlainBlock(nn.Module):
    """A GPT-2 block as one writes it in an afternoon."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, h]."""
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 in plain PyTorch: SDPA and a tied head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.hidden), nn.Embedding(size.length, size.hidden)
        self.blocks = nn.ModuleList(PlainBlock(size.hidden, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [b, s]. Returns the mean loss."""
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def plain(size: Size) -> Callable[[Tensor, Tensor], float]:
    """One step of the plain loop."""
    return _torch_step(PlainGPT(size))


def transformers_gpt2(size: Size) -> Callable[[Tensor, Tensor], float]:
    """One step of transformers' GPT-2 in the same loop."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=size.vocabulary, n_positions=size.length, n_embd=size.hidden, n_layer=size.layers,
                        n_head=size.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = GPT2LMHeadModel(config)
    return _torch_step(model, lambda x, y: model(input_ids=x, labels=y).loss)


def _torch_step(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor] | None = None) -> Callable[[Tensor, Tensor], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = (loss_of or model)(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ours(size: Size) -> Callable[[Tensor, Tensor], float]:
    """One whole training step of ours: reduce, clip, schedule and counters included."""
    from megatron.training.batch import Batch
    from megatron.training.step import train_step
    from tests.helpers import tiny

    settings = tiny.config(
        num_layers=size.layers, hidden_size=size.hidden, num_attention_heads=size.heads, seq_length=size.length,
        max_position_embeddings=size.length, micro_batch_size=size.batch, global_batch_size=size.batch, openai_gelu=True,
        init_method_std=0.02, lr=1e-4, min_lr=1e-4, lr_decay_style="constant", padded_vocab_size=size.vocabulary,
        train_iters=1000)
    settings = tiny.with_vocabulary(settings, size.vocabulary)
    trainer = tiny.trainer_of(tiny.run_of(settings))
    mask = torch.ones(size.batch, size.length)

    def step(x: Tensor, y: Tensor) -> float:
        total, count = train_step(trainer, iter((Batch(tokens=x, labels=y, loss_mask=mask),))).losses["lm loss"].tolist()
        return total / count

    return step


PEERS = {"plain": plain, "transformers": transformers_gpt2, "ours": ours}
