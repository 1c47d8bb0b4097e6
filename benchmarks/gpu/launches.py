#!/usr/bin/env python3
"""Kernels that a training step launches: of a layer and microbatch, of what stands beside the layers, and of the update.

    bash tests/without_gpu/run.sh benchmarks/gpu/launches.py                    counted on the stand-in for a GPU
    bash tests/without_gpu/run.sh benchmarks/gpu/launches.py --only llama moe
    bash tests/without_gpu/run.sh benchmarks/gpu/launches.py --write            the same, into the table of docs/kernels.md

A launch is an operation of torch that computes or copies, or a Triton kernel; views and new memory are none. Networks of two and of
three layers are counted, one microbatch each, both passes: their difference is a layer's. An operation of torch may launch more than
one kernel (a sort, a norm of many tensors), so the figures are lower bounds that compare configurations; benchmarks/gpu/layers.py
counts the kernels themselves where there is a GPU. At some 5 microseconds a launch, a layer whose kernels take less waits for the host.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.optimizer.optimizer import Optimizer
from megatron.training.state.step import train_step
from tests.helpers import tiny

PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- launches -->\n", "<!-- end of launches -->"
# Operations that launch nothing: views, new memory, and what the host alone does.
VIEWS = set(
    """view t transpose permute slice split select expand unsqueeze squeeze alias detach as_strided _unsafe_view unbind empty empty_like
    new_empty empty_strided new_empty_strided _reshape_alias unfold split_with_sizes is_same_size resize_ set_ lift_fresh reshape chunk
    unflatten flatten record_stream view_as diagonal numpy_T _has_compatible_shallow_copy_type is_pinned""".split()
)
WAIT = "_local_scalar_dense"  # the host reads a number
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "bf16": True,
    "clip_grad": 1.0,
}
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 256,
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
TRITON = ("rms_norm=triton", "gated_activation=triton", "rotary_qkv=triton", "residual_norm=triton", "adamw=triton")
MAMBA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "none",
    "add_bias_linear": False,
    "hybrid_layer_pattern": "M",
    "mamba_num_groups": 2,
}
DELTA: dict[str, Any] = {
    **LLAMA,
    "experimental_attention_variant": "gated_delta_net",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
SCANS = {"kernel": (*TRITON, "causal_conv=triton", "selective_scan=triton", "delta_rule_scan=triton")}
FP8: dict[str, Any] = {**LLAMA, "fp8_format": "hybrid"}
FP8_TRITON: dict[str, Any] = {**FP8, "kernel": (*TRITON, "quantise=triton"), "cross_entropy_fusion_impl": "triton"}
EXPERTS: dict[str, Any] = {
    **LLAMA,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_grouped_gemm": True,
}
CASES: Mapping[str, dict[str, Any]] = {
    "gpt": {},
    "gpt, bias with GELU": {"kernel": ("bias_activation=triton",)},
    "gpt, biases with GELU and with the gradients of q, k, v": {
        "kernel": ("bias_activation=triton", "split_qkv=triton")
    },
    "gpt, dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama": LLAMA,
    "llama, without fused weight gradients": {**LLAMA, "gradient_accumulation_fusion": False},
    "llama, packed documents": {
        **LLAMA,
        "reset_attention_mask": True,
        "reset_position_ids": True,
        "attention_backend": "varlen",
    },
    "llama, Triton": {**LLAMA, "kernel": TRITON, "cross_entropy_fusion_impl": "triton"},
    "llama, fp8 tensorwise": {**FP8, "fp8_recipe": "tensorwise"},
    "llama, fp8 delayed": {**FP8, "fp8_recipe": "delayed"},
    "llama, fp8 blockwise": {**FP8, "fp8_recipe": "blockwise"},
    "llama, fp8 tensorwise, Triton": {**FP8_TRITON, "fp8_recipe": "tensorwise"},
    "llama, fp8 delayed, Triton": {**FP8_TRITON, "fp8_recipe": "delayed"},
    "llama, fp8 blockwise, Triton": {**FP8_TRITON, "fp8_recipe": "blockwise"},
    "Mamba-2": MAMBA,
    "Mamba-2, Triton": {**MAMBA, **SCANS},
    "gated delta net": DELTA,
    "gated delta net, Triton": {**DELTA, **SCANS},
    "experts": EXPERTS,
    "experts with biases": {**EXPERTS, "add_bias_linear": True},
    "experts with biases, added with SwiGLU": {
        **EXPERTS,
        "add_bias_linear": True,
        "kernel": ("bias_activation=triton",),
    },
}


@dataclass(frozen=True, slots=True)
class Launches:
    """Of one configuration. layer, beside: of a microbatch, by operation; update, update_layer: of the optimizer, and what a layer adds."""

    layer: collections.Counter[str]
    beside: collections.Counter[str]
    update: int
    update_layer: int
    waits: int


class Counted(TorchDispatchMode):
    """Notes every operation that touches a tensor of the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self.off and name not in VIEWS:
            leaves = tree_leaves((args, kwargs, output))
            if any(isinstance(one, torch.Tensor) and one.is_cuda for one in leaves):
                self.names.append(name)
        return output


def kernels_of_a_gpu() -> tuple[torch.library.Library, ...]:
    """Operations that are one kernel on a GPU, and that the stand-in, which has no kernels, would take apart. Kept as long as it is held."""
    library = torch.library.Library("aten", "IMPL")

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None, epsilon: float | None) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)

    def rms_norm_backward(
        dy: Tensor, x: Tensor, shape: Any, scale: Tensor, weight: Tensor | None, mask: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)

    library.impl("_fused_rms_norm", rms_norm, "CUDA")
    library.impl("_fused_rms_norm_backward", rms_norm_backward, "CUDA")
    library.impl("silu_backward", lambda dy, x: torch.empty_like(x), "CUDA")

    def varlen(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), *(q.new_empty(0, dtype=one) for one in (torch.float32, torch.uint64))

    def varlen_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    import torch.nn.attention.varlen as own  # in the place of which the stand-in has a formula

    own.varlen_attn = inspect.unwrap(own.varlen_attn)
    packed = torch.library.Library("torch_attn", "IMPL")
    packed.impl("_varlen_attn", varlen, "CUDA")
    packed.impl("_varlen_attn_backward", varlen_backward, "CUDA")
    return library, packed


@contextmanager
def triton_counted(counted: Counted) -> Iterator[None]:
    """Triton's launches are counted too, and not what its interpreter does for them."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    runs = {kind: kind.run for kind in (InterpretedFunction, JITFunction)}

    def counting(kind: Any) -> Any:
        def run(self: Any, *given: Any, **how: Any) -> Any:
            counted.names.append(f"triton {self.__name__}")
            counted.off = True
            try:
                return runs[kind](self, *given, **how)
            finally:
                counted.off = False

        return run

    for kind in runs:
        kind.run = counting(kind)
    try:
        yield
    finally:
        for kind, run in runs.items():
            kind.run = run


def step_of(changes: Mapping[str, Any], layers: int) -> tuple[list[str], list[str]]:
    """Operations of the second step of a network: (of its passes, of the update)."""
    pattern = (
        {"hybrid_layer_pattern": changes["hybrid_layer_pattern"] * layers} if "hybrid_layer_pattern" in changes else {}
    )
    config = tiny.config(**{**SIZES, "num_layers": layers, **changes, **pattern})
    trainer = tiny.trainer_of(tiny.run_of(config, torch.device("cuda")))
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    batches = list(tiny.short_run_batches(trainer.run, 1))
    counted, marks, update = Counted(), list[int](), Optimizer.step

    def step(self: Optimizer, *given: Any, **how: Any) -> Any:
        marks.append(len(counted.names))
        result = update(self, *given, **how)
        marks.append(len(counted.names))
        return result

    setattr(Optimizer, "step", step)  # noqa: B010 - a method that is replaced
    try:
        with triton_counted(counted), counted:
            train_step(trainer, iter(batches))
    finally:
        setattr(Optimizer, "step", update)  # noqa: B010
    before, after = marks
    return counted.names[:before], counted.names[before:after]


def launches(changes: Mapping[str, Any]) -> Launches:
    """Those of a configuration."""
    (two, update_two), (three, update_three) = (step_of(changes, layers) for layers in (2, 3))
    few, more = collections.Counter(two), collections.Counter(three)
    waits = few.pop(WAIT, 0)
    more.pop(WAIT, 0)
    layer = more - few
    beside = few - layer - layer
    return Launches(layer, beside, len(update_two), len(update_three) - len(update_two), waits)


def row(name: str, result: Launches) -> str:
    """One row of the table."""
    most = ", ".join(f"{count} {op}" for op, count in result.layer.most_common(4))
    return (
        f"| {name} | {result.layer.total()} | {result.beside.total()} | {result.update} + {result.update_layer} a layer | "
        f"{result.waits} | {most} |"
    )


def with_rows(page: str, rows: Mapping[str, str]) -> str:
    """The page with these rows in the place of those of the same names; others are left as they are."""
    before, table, after = re.split(f"{re.escape(BEGIN)}|{re.escape(END)}", page)
    head, kept = table.splitlines()[:2], {line.split("|")[1].strip(): line for line in table.splitlines()[2:]}
    kept = {name: line for name, line in {**kept, **rows}.items() if name in CASES}
    ordered = [kept[name] for name in CASES if name in kept]
    return before + BEGIN + "\n".join((*head, *ordered)) + "\n" + END + after


def main() -> None:
    """Count, print, and write the table if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--write", action="store_true", help="renew the table of docs/kernels.md")
    parser.add_argument("--all", action="store_true", help="print every operation of a layer")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: run it on the stand-in, bash tests/without_gpu/run.sh benchmarks/gpu/launches.py")
    library = None if torch.version.cuda else kernels_of_a_gpu()
    rows = {}
    for name in options.only:
        result = launches(CASES[name])
        rows[name] = row(name, result)
        print(rows[name], flush=True)
        if options.all:
            print(
                "  layer:",
                dict(result.layer.most_common()),
                "\n  beside:",
                dict(result.beside.most_common()),
                flush=True,
            )
    del library
    if options.write:
        PAGE.write_text(with_rows(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
