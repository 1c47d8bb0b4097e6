#!/usr/bin/env python3
"""A plain compiled loop: what one writes in an afternoon with torch.compile, SDPA, autocast and fused AdamW. The peer of train_gpu.py.

    python benchmarks/plain_loop.py --layers 24 --hidden 2048 --heads 16 --length 2048 --micro-batch 8 --batch 64 --seconds 60

Prints a JSON line after each optimizer step from the third on: the seconds of all of them so far.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A layer of GPT-2's kind, or with `gated` of Llama's."""

    def __init__(self, hidden: int, heads: int, groups: int, ffn: int, *, gated: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.gated = heads, groups, hidden // heads, gated
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(hidden), norm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * groups) * self.size, bias=not gated)
        self.out, self.down = nn.Linear(hidden, hidden, bias=not gated), nn.Linear(ffn, hidden, bias=not gated)
        self.up = nn.Linear(hidden, 2 * ffn if gated else ffn, bias=not gated)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [b, s, h]; cos, sin: [s, d], read by Llama's kind."""
        b, s, h = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, s, -1, self.size)
            .transpose(1, 2)
            .split([self.heads, self.groups, self.groups], dim=1)
        )
        if self.gated:
            q, k = (
                t * cos + torch.cat((-t[..., self.size // 2 :], t[..., : self.size // 2]), dim=-1) * sin for t in (q, k)
            )
        mixed = F.scaled_dot_product_attention(
            q, k, v.to(q.dtype), is_causal=True, enable_gqa=self.groups != self.heads
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        wide = self.up(self.norm2(x))
        if self.gated:
            gate, up = wide.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(wide, approximate="tanh"))


class Plain(nn.Module):
    """Token ids to a mean loss."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        size = options.hidden // options.heads
        self.tokens, self.places = (
            nn.Embedding(options.vocabulary, options.hidden),
            nn.Embedding(options.length, options.hidden),
        )
        self.blocks = nn.ModuleList(
            Block(
                options.hidden,
                options.heads,
                options.groups or options.heads,
                options.ffn or 4 * options.hidden,
                gated=options.gated,
            )
            for _ in range(options.layers)
        )
        self.norm = nn.RMSNorm(options.hidden) if options.gated else nn.LayerNorm(options.hidden)
        self.head = nn.Linear(options.hidden, options.vocabulary, bias=False)
        self.gated = options.gated
        if not options.gated:
            self.head.weight = self.tokens.weight
        turns = torch.arange(options.length)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", torch.cat((turns, turns), dim=-1).cos())
        self.register_buffer("sin", torch.cat((turns, turns), dim=-1).sin())
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [b, s]."""
        hidden = self.tokens(x) if self.gated else self.tokens(x) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def main() -> None:
    """Train on random ids for so many seconds, and say how long each step took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("layers", 24),
        ("hidden", 2048),
        ("heads", 16),
        ("groups", 0),
        ("ffn", 0),
        ("length", 2048),
        ("micro-batch", 8),
        ("batch", 128),
        ("vocabulary", 50304),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--gated", action="store_true", help="Llama's layers: RMSNorm, SwiGLU, rotations, an output layer of its own"
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    model = Plain(options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    run = model if options.eager else torch.compile(model)
    cast = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
    passes = max(1, options.batch // options.micro_batch)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < options.seconds:
        start = time.perf_counter()
        for _ in range(passes):
            x, y = (
                torch.randint(0, options.vocabulary, (options.micro_batch, options.length), device=device)
                for _ in range(2)
            )
            with cast:
                loss = run(x, y) / passes
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.detach())
        times.append(time.perf_counter() - start)
        if len(times) > 2:
            print(json.dumps({"seconds": times[2:]}), flush=True)


if __name__ == "__main__":
    main()
