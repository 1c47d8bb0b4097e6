#!/usr/bin/env python3
"""How fast experts are: the grouped matmul against the loop, layers of experts against the dense layer of equal FLOPs, and
what sending tokens costs: `python benchmarks/experts.py [--ranks 2]`; on a GPU the layers are those of published networks.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.gpu import results
from megatron.core.config.plan.layers import LayerPlan
from megatron.core.kernels.ops import grouped, reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.models.flops import active_matrix_params
from megatron.core.parallel.device import device_name, disable_malloc_trim, pick_device, synchronize
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.dispatch import ExpertInputs, PendingTokenDispatch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.router import ExpertRouting
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.world import Worlds

REPEATS = 7
# rows, experts, inputs, outputs
SHAPES = ((1024, 8, 256, 512), (4096, 8, 512, 1024), (1024, 64, 256, 128), (256, 64, 128, 64), (64, 64, 128, 64))
GPU_SHAPES = ((8192, 8, 4096, 14336), (32768, 128, 2048, 1536), (32768, 256, 7168, 2048))
LLAMA: dict[str, Any] = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "seq_length": 512,
    "max_position_embeddings": 512,
    "moe_grouped_gemm": True,
}
# Layers like those of Mixtral (few experts, wide) and of DeepSeek-V3 (many, narrow, and a shared one), small and as published.
LAYERS: dict[str, dict[str, Any]] = {
    "like Mixtral": {"hidden_size": 256, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 896},
    "like DeepSeek": {
        "hidden_size": 256,
        "num_experts": 32,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 128,
        "moe_shared_expert_intermediate_size": 128,
    },
}
GPU_LAYERS: dict[str, dict[str, Any]] = {
    "Mixtral 8x7B": {"hidden_size": 4096, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 14336},
    "Qwen3-30B-A3B": {"hidden_size": 2048, "num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768},
    "DeepSeek-V2-Lite": {
        "hidden_size": 2048,
        "num_experts": 64,
        "moe_router_topk": 6,
        "moe_ffn_hidden_size": 1408,
        "moe_shared_expert_intermediate_size": 2816,
    },
}


def seconds(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """The median time of each, in turns, after a round that warms up."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(REPEATS + 1):
        for run, taken in zip(runs, times, strict=True):
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            if turn:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def forward_and_backward(call: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], None]:
    """Both passes, with the gradients of the inputs."""

    def run() -> None:
        for tensor in inputs:
            tensor.grad = None
        output = call()
        output.backward(torch.ones_like(output))

    return run


def matmuls(device: torch.device, dtype: torch.dtype) -> None:
    """The grouped matmul against the loop."""
    calls = {"loop": reference.grouped_linear, "grouped": grouped.grouped_linear}
    if device.type == "cuda" and dtype == torch.bfloat16:
        calls["torch"] = grouped.grouped_linear_by_grouped_mm
    for rows, experts, inputs, outputs in GPU_SHAPES if device.type == "cuda" else SHAPES:
        random = torch.Generator(device).manual_seed(1)  # billions of numbers on a GPU
        x = torch.randn(rows, inputs, generator=random, device=device, dtype=dtype).requires_grad_()
        weight = torch.randn(experts, outputs, inputs, generator=random, device=device, dtype=dtype).requires_grad_()
        odds = torch.rand(experts, generator=random, device=device) + 0.2
        chosen = torch.multinomial(odds, rows, replacement=True, generator=random)
        counts = torch.bincount(chosen, minlength=experts)
        loop, *others = seconds(
            [forward_and_backward(lambda call=call: call(x, weight, counts), [x, weight]) for call in calls.values()],
            device,
        )
        lines = [
            f"{name} {took * 1e3:.2f} ms, {loop / took:.2f} times as fast"
            for name, took in zip(list(calls)[1:], others, strict=True)
        ]
        print(
            f"  {rows} rows over {experts} experts {inputs} -> {outputs}, {dtype}: loop {loop * 1e3:.2f} ms; "
            + "; ".join(lines),
            flush=True,
        )


def layer_of(
    changes: dict[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    build: LayerBuildContext | None = None,
    dense: int | None = None,
) -> Any:
    """A layer with experts, or a dense one of this width."""
    settings = tiny.config(**{**LLAMA, "num_attention_heads": 1, **changes})
    if build is None:
        build = dataclasses.replace(tiny.run_of(settings, device).layer_build_context, dtype=dtype)
    layer = MoELayer(build, LayerPlan(0, mlp="moe")) if dense is None else MLP(build, width=dense)
    set_global_param_names(layer)
    materialize_parameters(layer, build.mesh, 1)
    return layer


def layers(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    """Layers of experts against the dense layer in which a token meets as many matrix elements."""
    for name, changes in (GPU_LAYERS if device.type == "cuda" else LAYERS).items():
        if results.done("experts", name=name, dtype=str(dtype)):
            continue
        try:
            layer_beside_dense(name, changes, device, dtype, tokens)
        except RuntimeError as error:  # no memory for it, say: the others are measured
            results.fail("experts", {"name": name, "dtype": str(dtype)}, error)
        results.free()


def layer_beside_dense(
    name: str, changes: dict[str, Any], device: torch.device, dtype: torch.dtype, tokens: int
) -> None:
    """One network's layer of experts beside its dense layer."""
    model = tiny.config(**{**LLAMA, "num_attention_heads": 1, **changes}).model
    elements = active_matrix_params(model, LayerPlan(0, "none", mlp="moe"))
    width = elements // (3 * model.hidden_size)
    x = torch.randn(tokens, 1, model.hidden_size, device=device, dtype=dtype).requires_grad_()
    experts, dense = (layer_of(changes, device=device, dtype=dtype, dense=wide) for wide in (None, width))
    times = seconds(
        [
            forward_and_backward(
                lambda layer=layer: layer(x, ForwardContext(AttentionMaskSpec())), [x, *layer.parameters()]
            )
            for layer in (experts, dense)
        ],
        device,
    )
    speed = [6e-12 * tokens * elements / took for took in times]
    print(
        f"  {name}, {tokens} tokens, {dtype}: {speed[0]:.3f} TFLOP/s; a dense layer of equal FLOPs {speed[1]:.3f}: "
        f"{speed[0] / speed[1]:.2f} of it",
        flush=True,
    )
    results.keep("experts", name=name, dtype=str(dtype), ratio=speed[0] / speed[1])


def travel(changes: dict[str, Any], ranks: int, dispatcher: str, tokens: int) -> tuple[float, float]:
    """On every rank: seconds of a layer, and of its experts alone on the rows that they had."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    settings = tiny.config(
        ranks,
        **{
            **LLAMA,
            "num_attention_heads": 1,
            **changes,
            "moe_token_dispatcher_type": dispatcher,
            "expert_model_parallel_size": ranks,
        },
    )
    layer = layer_of(changes, device=device, dtype=torch.float32, build=tiny.run_of(settings).layer_build_context)
    x = torch.randn(tokens, 1, settings.model.hidden_size).requires_grad_()
    rows = layer.dispatcher.dispatch(
        x.detach().flatten(0, 1), layer.router(x.detach(), ForwardContext(AttentionMaskSpec())), None
    ).wait()
    rows = dataclasses.replace(rows, tokens=rows.tokens.detach().requires_grad_(), weights=rows.weights.detach())
    whole, alone = seconds(
        [
            forward_and_backward(lambda: layer(x, ForwardContext(AttentionMaskSpec())), [x, *layer.parameters()]),
            forward_and_backward(lambda: layer.experts(rows), [rows.tokens, *layer.experts.parameters()]),
        ],
        device,
    )
    return whole, alone


class Stay:
    """A dispatcher whose rows are where they belong: as many for each expert, and neither sorted nor sent."""

    def __init__(self, here: int) -> None:
        self.here = here

    def dispatch(self, tokens: Tensor, routing: ExpertRouting, capacity: int | None) -> PendingTokenDispatch:
        """As the protocol says."""
        each = routing.experts.numel() // self.here
        rows = ExpertInputs(
            tokens.repeat(routing.experts.shape[1], 1), routing.weights.t().reshape(-1), torch.full((self.here,), each)
        )
        return PendingTokenDispatch(lambda: rows, permutation=None, handle=routing.experts.shape)

    def combine(self, outputs: Tensor, dispatched: PendingTokenDispatch) -> Tensor:
        """As the protocol says."""
        tokens, choices = dispatched.handle
        return outputs.view(choices, tokens, -1).sum(0)


def steps(changes: dict[str, Any], ranks: int, dispatcher: str, stays: bool) -> float:
    """On every rank: seconds of a training step of a small network, of which every layer has experts."""
    torch.set_num_threads(1)
    network = {
        **LLAMA,
        "num_layers": 4,
        "num_attention_heads": 4,
        "micro_batch_size": 2,
        "global_batch_size": 4 * ranks,
        "vocab_size": 2048,
        "moe_router_force_load_balancing": True,
        "moe_token_dispatcher_type": dispatcher,
        "expert_model_parallel_size": ranks,
    }
    run = tiny.run_of(tiny.config(ranks, **{**network, **changes}))
    trainer = tiny.trainer_of(run)
    for layer in (part for stage in trainer.stages for part in stage.modules() if isinstance(part, MoELayer) and stays):
        layer.dispatcher = Stay(run.config.model.moe.num_experts // ranks)
    return seconds([lambda: train_step(trainer, tiny.short_run_batches(run, 0))], run.mesh.device)[0]


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks that share the experts, on the CPU (default: 2)")
    options = parser.parse_args()
    device = pick_device()
    disable_malloc_trim(device)  # as initialize_megatron does
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(f"on {device_name(device)}, torch {torch.__version__}; forward and backward, medians of {REPEATS}")
    for dtype in (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16):
        layers(device, dtype, 8192 if device.type == "cuda" else 1024)
        matmuls(device, dtype)
    if device.type == "cuda":
        results.end()
    worlds = Worlds()
    for name, changes in LAYERS.items():
        for dispatcher in ("allgather", "alltoall"):
            measured = worlds(options.ranks).run(travel, changes, options.ranks, dispatcher, 1024)
            whole, alone = (max(times) for times in zip(*measured, strict=True))
            print(
                f"  {name} over {options.ranks} ranks, {dispatcher}: layer {whole * 1e3:.1f} ms, experts alone {alone * 1e3:.1f} ms: routing and "
                f"sending take {1 - alone / whole:.0%}",
                flush=True,
            )
            whole, free = (
                max(worlds(options.ranks).run(steps, changes, options.ranks, dispatcher, stays))
                for stays in (False, True)
            )
            print(
                f"    of a network of four such layers: a training step {whole * 1e3:.0f} ms, {free * 1e3:.0f} ms were the rows where they "
                f"belong: sorting and sending take {1 - free / whole:.0%}",
                flush=True,
            )
    worlds.stop()


if __name__ == "__main__":
    main()
