#!/usr/bin/env python3
"""Compile every Triton kernel of the project to machine code of a Hopper (sm_90), as training launches it; no GPU is needed.

    python benchmarks/gpu/triton_to_sm90.py             a line a kernel and size: registers, spills, shared memory, widths of loads
    python benchmarks/gpu/triton_to_sm90.py --only norm

The kernels are found, not listed: each candidate of the kernel table that is Triton's is called, and what it launches is compiled
instead of run, with the types, sizes, alignments and warps of the launch. A file with kernels of which none was launched, or a
candidate without a case here, is an error, and so are a kernel that does not compile and one that spills more than SPILLS bytes a thread
(or what MORE_SPILLS allows it).
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as every version up to 3.9 has it
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron.core.kernels.choice.table import CANDIDATES
from megatron.core.kernels.low_precision.fp8 import E4M3, E5M2, QuantizeTransposeKernels
from megatron.core.kernels.ops.adamw import AdamStepSettings, AdamTensors
from megatron.core.kernels.ops.linear_loss import VocabularyShard, blockwise_linear_cross_entropy
from megatron.core.kernels.ops.mask import AttentionScoreModifiers
from megatron.core.kernels.ops.paged import CacheBlockTables
from megatron.core.kernels.ops.reference import GatedActivationOptions

SPILLS = 0  # bytes a thread of spilled registers that a kernel may have
# The state of a head, the products of a chunk and their factors are more than 255 registers of 128 threads.
BY_TRITON_3_6 = {
    "triton_scan_forward._selective_scan_kernel": 480,
    "triton_scan_forward._delta_rule_scan_kernel": 1112,
    "triton_scan_forward._invert_chunk_systems_kernel": 1496,
}
MORE_SPILLS = {
    "triton_scan_forward._selective_scan_kernel": 176,
    "triton_scan_forward._delta_rule_scan_kernel": 1000,
    "triton_scan_gradients._selective_backward_kernel": 160,
    "triton_scan_gradients._delta_rule_backward_kernel": 800,
    **(BY_TRITON_3_6 if triton.__version__.startswith("3.6.") else {}),
}
TARGET = GPUTarget("cuda", 90, 32)
Case = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one set of sizes. spills: bytes of the stack; loads: bytes of each width at which global memory is read."""

    kernel: str
    case: str
    warps: int
    registers: int
    spills: int
    shared: int
    loads: tuple[int, ...]

    def line(self) -> str:
        """The row that is printed."""
        return (
            f"{self.kernel:33} {self.case:34} warps {self.warps:2}  registers {self.registers:3}  spills {self.spills:3} bytes  "
            f"shared {self.shared:6}  loads of {', '.join(map(str, self.loads))} bytes"
        )


class Hopper:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return TARGET

    def get_current_device(self) -> int:
        """Its number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Where kernels would be launched."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors of the calls are."""
        return torch.device("cpu")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A leaf of any numbers, since nothing is computed."""
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def both_passes(outputs: Tensor | tuple[Tensor, ...]) -> None:
    """The backward pass of what was called."""
    given = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(given, [torch.zeros_like(one) for one in given])


def normed(size: int, *, centred: bool) -> Case:
    """A norm of some rows."""
    return lambda op: both_passes(op(draw(8, size), *(draw(size) for _ in range(1 + centred)), 1e-5))


def gated(name: str, gating: GatedActivationOptions) -> Case:
    """A gated activation of Llama's width."""
    return lambda op: both_passes(op(draw(8, 2 * 14336), name, gating))


def biased(name: str, gating: GatedActivationOptions | None = None, *, experts: int = 0) -> Case:
    """A bias and an activation of GPT 1.3B's width, or a gated one of gpt-oss's; or one bias of each expert."""
    size = 8192 if gating is None else 2 * 2880
    counts = torch.tensor([80] + [0] * (experts - 1)) if experts else None
    bias = draw(experts, size) if experts else draw(size)
    return lambda op: both_passes(op(draw(80, size), bias, name, gating, counts))


def rotated(size: int, *, interleaved: bool) -> Case:
    """Rotation of 32 heads."""

    def call(op: Any) -> None:
        both_passes(op(draw(8, 2, 32, size), torch.zeros(8, 1, 1, size), torch.zeros(8, 1, 1, size), interleaved))

    return call


def rotated_qkv(counts: tuple[int, ...], size: int, turned: int, *, interleaved: bool) -> Case:
    """Rotation of the queries and keys of a fused projection."""

    def call(op: Any) -> None:
        table = torch.zeros(8, 1, 1, turned)
        both_passes(op(draw(8, 2, sum(counts), size), counts, table, table, interleaved))

    return call


def split(counts: tuple[int, ...], size: int, *, bias: bool) -> Case:
    """The heads of a fused projection, whose gradients are joined."""
    return lambda op: both_passes(op(draw(8, 2, sum(counts), size), counts, draw(sum(counts) * size) if bias else None))


def permuted(choices: int) -> Case:
    """Rows to experts, each token to so many."""

    def call(op: Any) -> None:
        order = torch.arange(8 * choices)
        both_passes(op(draw(8, 4096), (order // choices)[:, None], order.view(8, choices), False, False))
        both_passes(op(draw(8 * choices, 4096), order.view(8, choices), (order // choices)[:, None], False, False))

    return call


def paged(heads: int, groups: int, sizes: tuple[int, int], queries: int = 1, **how: Any) -> Case:
    """Attention over a paged cache of texts of 2,112 keys. sizes: of keys and values."""
    dtype = how.pop("dtype", torch.bfloat16)

    def call(op: Any) -> None:
        blocks = CacheBlockTables(
            torch.zeros(4, 132, dtype=torch.int32), torch.full((4,), 2112, dtype=torch.int32), 16, 2112
        )
        keys = torch.zeros(64, groups, sizes[0], dtype=dtype)
        values = keys[..., : sizes[1]] if sizes[1] < sizes[0] else torch.zeros(64, groups, sizes[1], dtype=dtype)
        op(torch.zeros(4, queries, heads, sizes[0], dtype=dtype), keys, values, blocks, **how)

    return call


def convolved(*, bias: bool, documents: bool) -> Case:
    """Mamba's convolution over the last four tokens."""

    def call(op: Any) -> None:
        segments = torch.zeros(1, 64, dtype=torch.long) if documents else None
        both_passes(op(draw(64, 1, 256), draw(256, 4), draw(256) if bias else None, segments))

    return call


def scanned(name: str) -> Case:
    """Mamba-2's scan with heads and states of Nemotron-H 8B, or the gated delta rule with those of Qwen3-Next."""

    def call(op: Any) -> None:
        segments, fp32 = torch.zeros(1, 64, dtype=torch.long), torch.float32
        if name == "selective":
            x, dt, a = draw(64, 1, 2, 64), draw(64, 1, 2, dtype=fp32), draw(2, dtype=fp32)
            both_passes(op(x, dt, a, draw(64, 1, 1, 128), draw(64, 1, 1, 128), segments=segments))
        else:
            q, k, v = draw(64, 1, 2, 128), draw(64, 1, 2, 128), draw(64, 1, 2, 128)
            both_passes(op(q, k, v, draw(64, 1, 2, dtype=fp32), draw(64, 1, 2, dtype=fp32), segments=segments))

    return call


def loss(words: int, valid: int) -> Case:
    """The loss of tokens in blocks. valid: words that are not padding."""

    def call(op: Any) -> None:
        shard = VocabularyShard(0, valid, None, lambda stated: stated)
        targets = torch.zeros(16, dtype=torch.long)
        both_passes(blockwise_linear_cross_entropy(draw(16, 64), draw(words, 64), None, targets, shard, fused=True))

    return call


def quantised(block: tuple[int, int] | None, *, delayed: bool = False) -> Case:
    """A matrix in both orders. block: None: one scale; delayed: made for a history of largest values."""

    def call(op: QuantizeTransposeKernels) -> None:
        x = draw(4096, 4096)
        if block is not None:
            op.quantize_per_block(x, E4M3, block)
        elif delayed:
            op.quantize_per_tensor(x, E5M2, torch.ones(16), seen=torch.zeros(()))
        else:
            op.quantize_per_tensor(x, E4M3, op.largest_of(x))

    return call


def updated(weight: torch.dtype | None) -> Case:
    """An update of a large and a small parameter whose weights have another format, or none of their own."""

    def call(op: Any) -> None:
        held = [
            AdamTensors(
                *(torch.zeros(size) for _ in range(4)), None if weight is None else torch.zeros(size, dtype=weight)
            )
            for size in (4096, 33)
        ]
        op(held, torch.ones((), dtype=torch.float64), AdamStepSettings(1e-3, 0.1, 0.9, 0.95, 1e-8, 1))

    return call


# Op of the kernel table -> what its Triton kernel is called with: the sizes of GPT 1.3B, Llama 8B and 70B, and odd ones.
CASES: Mapping[str, Mapping[str, Case]] = {
    "rms_norm": {
        **{f"rms {size}": normed(size, centred=False) for size in (128, 4096, 8192, 12288)},
        "rms 200, no weight": lambda op: both_passes(op(draw(8, 200), None, 1e-5)),
    },
    "layer_norm": {f"layer norm {size}": normed(size, centred=True) for size in (2048, 5120, 12288)},
    "residual_norm": {
        "sum, layer norm 2048": lambda op: both_passes(op(draw(8, 2048), draw(8, 2048), draw(2048), draw(2048), 1e-5)),
        "sum, rms 4096": lambda op: both_passes(op(draw(8, 4096), draw(8, 4096), draw(4096), None, 1e-5)),
    },
    "gated_activation": {
        **{name: gated(name, GatedActivationOptions()) for name in ("silu", "gelu", "gelu_tanh", "quick_gelu")},
        "quick_gelu, clamp, offset": gated("quick_gelu", GatedActivationOptions(7.0, 1.0)),
    },
    "bias_activation": {
        **{f"bias, {name}": biased(name) for name in ("gelu", "gelu_tanh", "squared_relu")},
        "bias, silu, gated": biased("silu", GatedActivationOptions()),
        "bias, quick_gelu, clamp, offset": biased("quick_gelu", GatedActivationOptions(7.0, 1.0)),
        "biases of 128 experts, gated": biased("quick_gelu", GatedActivationOptions(7.0, 1.0), experts=128),
    },
    "rotary": {
        **{f"rotary {size}": rotated(size, interleaved=False) for size in (64, 96, 128)},
        "rotary 128, interleaved": rotated(128, interleaved=True),
    },
    "rotary_qkv": {
        "Llama 8B": rotated_qkv((32, 8, 8), 128, 128, interleaved=False),
        "heads of 64": rotated_qkv((16, 16, 16), 64, 64, interleaved=False),
        "heads of 96": rotated_qkv((32, 32, 32), 96, 96, interleaved=False),
        "a quarter, gate": rotated_qkv((16, 16, 2, 2), 256, 64, interleaved=False),
        "interleaved": rotated_qkv((32, 8, 8), 128, 128, interleaved=True),
    },
    "split_qkv": {
        "GPT 1.3B": split((16, 16, 16), 128, bias=True),
        "heads of 64": split((12, 12, 12), 64, bias=True),
        "heads of 96, no bias": split((32, 8, 8), 96, bias=False),
        "gate": split((16, 16, 2, 2), 256, bias=True),
    },
    "permute": {f"{choices} choices": permuted(choices) for choices in (1, 2, 8)},
    "cross_entropy": {"50304 words": loss(50304, 50304), "50257 words": loss(50304, 50257)},
    "causal_conv": {
        "taps": convolved(bias=False, documents=False),
        "taps, bias, documents": convolved(bias=True, documents=True),
    },
    "selective_scan": {"Nemotron-H 8B": scanned("selective")},
    "delta_rule_scan": {"Qwen3-Next": scanned("delta")},
    "quantise": {
        "one scale": quantised(None),
        "delayed": quantised(None, delayed=True),
        **{f"blocks of {rows} x {size}": quantised((rows, size)) for rows, size in ((1, 32), (1, 128), (128, 128))},
    },
    "adamw": {
        "weights in bf16": updated(torch.bfloat16),
        "weights in fp16": updated(torch.float16),
        "weights in fp32": updated(None),
    },
    "paged_attention": {
        "Llama 8B decodes": paged(32, 8, (128, 128)),
        "Llama 8B reads a prompt": paged(32, 8, (128, 128), 512),
        "heads of 64, window": paged(64, 8, (64, 64), window=128),
        "heads of 96": paged(32, 32, (96, 96)),
        "heads of 256, window, cap": paged(
            16, 8, (256, 256), window=4096, scores=AttentionScoreModifiers(softcap=50.0)
        ),
        "latent": paged(128, 1, (576, 512)),
        "fp32": paged(32, 8, (128, 128), dtype=torch.float32),
    },
}


def kernels_of(folder: Path = ROOT / "megatron") -> dict[str, str]:
    """Every Triton kernel that is launched somewhere in the project: `file stem.name` -> file."""
    launched = {}
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        if "@triton.jit" not in text:
            continue
        tree = ast.parse(text)
        made = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list)
        }
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Subscript) and isinstance(called.value, ast.Name) and called.value.id in made:
                launched[f"{file.stem}.{called.value.id}"] = str(file.relative_to(ROOT))
    return launched


@contextmanager
def compiled_instead_of_launched(result: Callable[[str, Any], None]) -> Iterator[None]:
    """Triton compiles for TARGET, and launches nothing. found: called with a kernel's name and what was made of it."""
    run, active = JITFunction.run, driver._active

    def compile_only(self: JITFunction, *given: Any, **how: Any) -> None:
        result(f"{self.module.rpartition('.')[2]}.{self.__name__}", run(self, *given, **{**how, "warmup": True}))

    driver.set_active(Hopper())
    setattr(JITFunction, "run", compile_only)  # noqa: B010 - a method that is replaced
    try:
        yield
    finally:
        setattr(JITFunction, "run", run)  # noqa: B010
        driver._active = active


def usage(machine_code: bytes) -> tuple[int, int]:
    """(registers, bytes of the stack) of a kernel. Triton puts nothing on the stack but registers that were spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        message = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"{name}:(\d+)", message)[0]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def widths(text: str) -> tuple[int, ...]:
    """Bytes of the loads from global memory in a kernel's PTX, the widest first."""
    plain = re.findall(r"ld\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[busf](\d+)", text)
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x[0-9a-f]+|\d+)", text)
    sizes = {int(many or 1) * int(bits) // 8 for many, bits in plain} | {int(size, 0) for size in copies}
    return tuple(sorted(sizes, reverse=True))


def main() -> int:
    """Compile and print; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kernels or cases with this in their name")
    options = parser.parse_args()
    problems, seen, names = list[str](), set[str](), set[str]()
    label = ""

    def show(name: str, kernel: Any) -> None:
        names.add(name)
        if kernel.hash in seen or options.only not in f"{name} {label}":
            return
        seen.add(kernel.hash)
        registers, spills = usage(kernel.asm["cubin"])
        made = Compiled(
            name, label, kernel.metadata.num_warps, registers, spills, kernel.metadata.shared, widths(kernel.asm["ptx"])
        )
        print(made.line(), flush=True)
        if spills > (allowed := MORE_SPILLS.get(name, SPILLS)):
            problems.append(f"{name} ({label}) spills {spills} bytes; {allowed} are allowed")

    with compiled_instead_of_launched(show):
        for candidate in CANDIDATES:
            if candidate.name == "triton" and candidate.op not in CASES:
                problems.append(f"{candidate.op} has a Triton kernel and no case in {Path(__file__).name}")
            for label, case in CASES.get(candidate.op, {}).items() if candidate.name == "triton" else ():
                try:
                    case(candidate.loaded_kernel)
                except Exception as error:  # noqa: BLE001 - whatever the compiler says
                    problems.append(f"{candidate.op} ({label}): {type(error).__name__}: {str(error)[:500]}")
    problems += [
        f"{name} of {file} was launched by no case" for name, file in kernels_of().items() if name not in names
    ]
    print(f"{len(seen)} compiled for sm_{TARGET.arch}, {len(names)} kernels", flush=True)
    print("\n".join(problems) or "all compile, none spills more than it may")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
