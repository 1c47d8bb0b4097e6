#!/usr/bin/env python3
"""Mamba-2's mixer and the gated delta net, forward and backward, beside transformers' CPU form: `benchmarks/mixers.py [--length N] [--compile]`.

CPU seconds of one thread, the median of runs that take turns; bytes that are kept for the backward pass; with --compile also compiled.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config.mixers.gated_delta_net import DeltaNetSizes  # noqa: E402
from megatron.core.config.mixers.mamba import MambaSizes  # noqa: E402
from megatron.core.kernels.ops.mask import AttentionMaskSpec  # noqa: E402
from megatron.core.parallel.rng import materialize_parameters  # noqa: E402
from megatron.core.parallel.spec import set_global_param_names  # noqa: E402
from megatron.core.transformer.context.forward_context import ForwardContext  # noqa: E402
from megatron.core.transformer.mixers.gated_delta_net import GatedDeltaNet  # noqa: E402
from megatron.core.transformer.mixers.mamba import MambaMixer  # noqa: E402
from tests.helpers import tiny  # noqa: E402

HIDDEN, HEADS, SIZE, GROUPS, STATE, KEY_HEADS = 256, 8, 64, 2, 64, 4


def ours() -> dict[str, nn.Module]:
    """Our mixers, with drawn weights."""
    run = tiny.run_of(tiny.config(1, hidden_size=HIDDEN, normalization="RMSNorm"))
    mixers = {
        "mamba": MambaMixer(
            run.layer_build_context, MambaSizes(HEADS, SIZE, GROUPS, STATE, step_limits=(0.001, float("inf")))
        ),
        "gated delta net": GatedDeltaNet(run.layer_build_context, DeltaNetSizes(KEY_HEADS, HEADS, SIZE, SIZE)),
    }
    for mixer in mixers.values():
        set_global_param_names(mixer)
        materialize_parameters(mixer, run.mesh, seed=1)
    return mixers


def theirs() -> dict[str, nn.Module]:
    """transformers' mixers of the same sizes."""
    from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    mamba = nemotron.NemotronHConfig(
        hidden_size=HIDDEN, mamba_num_heads=HEADS, mamba_head_dim=SIZE, n_groups=GROUPS, ssm_state_size=STATE, chunk_size=128,
        layers_block_type=["mamba"], num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    delta = qwen.Qwen3NextConfig(
        hidden_size=HIDDEN, linear_num_key_heads=KEY_HEADS, linear_num_value_heads=HEADS, linear_key_head_dim=SIZE,
        linear_value_head_dim=SIZE, num_hidden_layers=1,
    )  # fmt: skip
    return {"mamba": nemotron.NemotronHMamba2Mixer(mamba, 0), "gated delta net": qwen.Qwen3NextGatedDeltaNet(delta, 0)}


def seconds(call: Callable[[Tensor], Tensor], params: Iterable[nn.Parameter], length: int) -> float:
    """CPU seconds of a forward and a backward pass."""
    x = torch.randn(length, 1, HIDDEN).requires_grad_()
    started = time.process_time()
    torch.autograd.grad(call(x).sum(), [x, *params])
    return time.process_time() - started


def kept(call: Callable[[Tensor], Tensor], length: int) -> int:
    """Bytes of the storages that a forward pass keeps for the backward pass."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = call(torch.randn(length, 1, HIDDEN).requires_grad_())
    return sum(storage.nbytes() for storage in storages.values())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    context, others = ForwardContext(AttentionMaskSpec()), theirs()
    for name, mixer in ours().items():
        ways: dict[str, tuple[Any, nn.Module]] = {
            "transformers": (lambda x, other=others[name]: other(x.transpose(0, 1)), others[name]),
            "ours": (lambda x, mixer=mixer: mixer(x, context), mixer),
        }
        if args.compile:
            ways["compiled"] = (torch.compile(ways["ours"][0], fullgraph=True, dynamic=False), mixer)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.repeats + 2):
            for way, (call, module) in ways.items():
                times[way].append(seconds(call, list(module.parameters()), args.length))
        medians = {way: statistics.median(each[2:]) for way, each in times.items()}
        for way, median in medians.items():
            memory = f", keeps {kept(ways[way][0], args.length) / 2**20:6.1f} MiB" if way != "compiled" else ""
            ratio = f"{medians['transformers'] / median:5.2f} x transformers"
            print(f"{name:16} {way:13} {1000 * median:7.1f} ms of CPU, {ratio}{memory}")


if __name__ == "__main__":
    main()
