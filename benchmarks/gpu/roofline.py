#!/usr/bin/env python3
"""What a training step should take on a GPU, computed from the bytes and operations of the kernels that are launched.

    python benchmarks/gpu/roofline.py             a table of GPT 1.3B and layers of Llama 8B on an H100 and an H200
    python benchmarks/gpu/roofline.py --write     the same, into docs/benchmarks.md, beside what is wanted

Matmuls and attention run at stated rates (what such kernels reach at these sizes), all else at a share of the memory's rate. What is
measured is compared with this: where they differ by more than 5 points of MFU there is a reason to be found.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- roofline -->\n", "<!-- end of roofline -->"
PEAK = 989.0  # TFLOP/s in bf16 of an H100 and an H200
BEHIND = 5.0  # points of MFU that a measurement may differ without a reason
OTHER = 1.5  # ms of a microbatch: embedding, masks, clipping
MICROBATCHES = 8  # of a step, over which the update is spread


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a machine. memory: TB/s that its maker states, and the share of it that kernels reach; the others in TFLOP/s."""

    name: str
    memory: float
    matmul: float
    share: float = 0.87
    attention: float = 520.0
    attention_backward: float = 430.0
    fp8_matmul: float = 1050.0
    transpose: float = 0.6  # TB/s of a copy in another order by a plain kernel

    def ms(self, count: float) -> float:
        """Milliseconds in which so many bytes move."""
        return count / (self.memory * self.share * 1e12) * 1e3


MACHINES = (Rates("H100", 3.35, 680.0), Rates("H200", 4.8, 690.0))


@dataclass(frozen=True, slots=True)
class Network:
    """Sizes of a network, a microbatch of b sequences of s tokens. groups: width of all keys; gated: Llama's layers, else GPT's."""

    name: str
    layers: int
    h: int
    f: int
    groups: int
    s: int
    b: int
    gated: bool
    v: int = 50304

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.s * self.b

    @property
    def weights(self) -> int:
        """Matrix elements of a layer."""
        return self.h * (self.h + 2 * self.groups) + self.h * self.h + (3 if self.gated else 2) * self.h * self.f

    @property
    def attention(self) -> float:
        """TFLOP of the forward pass of a layer's attention, over the causal half."""
        return 2 * self.s * self.s * self.h * self.b / 1e12

    @property
    def tflop(self) -> float:
        """Of a microbatch, both passes."""
        layers = self.layers * (6 * self.weights * self.tokens / 1e12 + 3 * self.attention)
        return layers + 6 * self.v * self.h * self.tokens / 1e12

    def bytes_apart(self) -> int:
        """Bytes of a layer outside of its matmuls and attention, kernel by kernel as they are launched one by one."""
        unit, keys = 2 * self.h * self.tokens, (self.h + 2 * self.groups) * self.tokens
        norms_and_sums = (4 + 6 + 10 + 6) * unit  # norms forward, residual sums, norms backward, sums of gradients
        if not self.gated:
            return norms_and_sums + 6 * unit + (8 + 12 + 9) * unit  # gradients of qkv joined; GELU, bias gradients
        rotary = 52 * 2 * (self.h + self.groups) * self.tokens  # 7 + 8 kernels in fp32, for queries and for keys
        return norms_and_sums + 4 * keys + rotary + 36 * self.f * self.tokens

    def bytes_joined(self, *, compiled: bool) -> int:
        """The same where kernels are joined: by torch's compiler, or the Triton kernels that are a GPU's defaults (norms and sums apart)."""
        unit, keys = 2 * self.h * self.tokens, (self.h + 2 * self.groups) * self.tokens
        if not self.gated:  # biases of the MLP and of qkv are summed as their gradients are written
            return 44 * unit if compiled else self.bytes_apart() - (4 + 3) * unit
        rotary = 8 * (self.h + self.groups) * self.tokens
        return (17 if compiled else 26) * unit + rotary + 4 * keys + 16 * self.f * self.tokens

    def bytes_of_loss(self, *, in_blocks: bool) -> int:
        """Bytes of the loss: all logits in fp32, or blocks of them by Triton with the words' gradients in fp32."""
        if not in_blocks:
            return 46 * self.v * self.tokens
        return 8 * self.v * self.tokens + 8 * self.v * self.h * 12 + 12 * self.v * self.h


NETWORKS = (
    Network("GPT 1.3B", 24, 2048, 8192, 2048, 2048, 8, gated=False),
    Network("8 layers of Llama 8B", 8, 4096, 14336, 1024, 4096, 4, gated=True),
)


@dataclass(frozen=True, slots=True)
class Expected:
    """What is computed for one way to train a network: milliseconds of a microbatch and TFLOP/s over the causal half."""

    network: str
    way: str
    ms: float
    tflops: float

    @property
    def mfu(self) -> float:
        """Percent of the peak."""
        return 100 * self.tflops / PEAK


def expected(network: Network, rates: Rates) -> Iterator[Expected]:
    """A line for each way to train."""
    matmuls = 6 * network.weights * network.tokens / 1e12 / rates.matmul * 1e3
    attention = 1e3 * network.attention * (1 / rates.attention + 2.5 / rates.attention_backward)
    head = 6 * network.v * network.h * network.tokens / 1e12 / rates.matmul * 1e3
    parameters = network.layers * network.weights + network.v * network.h * (2 if network.gated else 1)
    joined, compiled = (network.bytes_joined(compiled=one) for one in (False, True))
    for way, layer, in_blocks, adamw in (
        ("torch's formulas", network.bytes_apart(), False, 38),
        ("a GPU's default kernels", joined, False, 30),
        ("the same, Triton loss", joined, True, 30),
        ("--compile", compiled, False, 30),
        ("--compile, Triton loss", compiled, True, 30),
    ):
        update = rates.ms(adamw * parameters) / MICROBATCHES
        layers = network.layers * (matmuls + attention + rates.ms(layer))
        ms = layers + head + rates.ms(network.bytes_of_loss(in_blocks=in_blocks)) + update + OTHER
        yield Expected(network.name, way, ms, network.tflop / ms * 1e3)


def fp8_layer(network: Network, rates: Rates) -> dict[str, float]:
    """Milliseconds of a layer's three matmuls in bf16 and fp8, and of rounding: by plain kernels, and with each tensor read once."""
    inputs = (3 * network.h + network.f) * network.tokens
    gradients = (network.h + 2 * network.groups + 2 * network.h + 2 * network.f) * network.tokens
    work = 6 * network.weights * network.tokens / 1e12
    return {
        "products in bf16": work / rates.matmul * 1e3,
        "products in fp8": work / rates.fp8_matmul * 1e3,
        "rounding by plain kernels": rates.ms(33 * (inputs + gradients + 2 * network.weights)),
        "transposed copies by plain kernels": 2
        * (inputs + gradients + network.weights)
        / (rates.transpose * 1e12)
        * 1e3,
        "rounding, both orders in one kernel": rates.ms(6 * (inputs + gradients) + 5 * network.weights),
    }


def table() -> str:
    """The table of docs/benchmarks.md."""
    lines = ["| network | how | computed H100: ms, TFLOP/s, MFU | computed H200 | measured |", "|---|---|---|---|---|"]
    for network in NETWORKS:
        for rows in zip(*(expected(network, machine) for machine in MACHINES), strict=True):
            cells = (f"{one.ms:.1f}, {one.tflops:.0f}, {one.mfu:.1f} %" for one in rows)
            lines.append(f"| {network.name} | {rows[0].way} | {' | '.join(cells)} | not measured |")
    lines += [
        "",
        "| a Llama layer in fp8 (tensorwise), 16,384 tokens | computed H100, ms | computed H200, ms | measured |",
    ]
    lines += ["|---|---|---|---|"]
    for (name, slow), fast in zip(
        fp8_layer(NETWORKS[1], MACHINES[0]).items(), fp8_layer(NETWORKS[1], MACHINES[1]).values(), strict=True
    ):
        lines.append(f"| {name} | {slow:.1f} | {fast:.1f} | not measured |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print, and write the table if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the table of docs/benchmarks.md")
    options = parser.parse_args()
    print(table(), end="")
    if options.write:
        before, _, after = re.split(f"{re.escape(BEGIN)}|{re.escape(END)}", PAGE.read_text())
        PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
