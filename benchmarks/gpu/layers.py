#!/usr/bin/env python3
"""Whole training steps of a few layers on a GPU, in every way that flags know: time, MFU, host time, kernels, and a profile of each.

    python benchmarks/gpu/layers.py                              all ways
    python benchmarks/gpu/layers.py --only gpt "llama, compiled"
    python benchmarks/gpu/layers.py --small                      small layers, to see that it runs; on the stand-in for a GPU, too

Four layers of GPT 1.3B and two of Llama 8B, two microbatches a step. busy: the share of a step in which the GPU computes; where it is
below 0.95 and the host's time is near the step's, launches are too slow (CUDA graphs or --compile help). The kernels of one step, by
name and time, go into profiles.txt beside the results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import results
from benchmarks.gpu.roofline import PEAK
from benchmarks.gpu.timing import timed
from megatron.core.models.flops import flops_per_sample
from megatron.training.accelerate.compile import LayerCompiler
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny

GPT: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "micro_batch_size": 8,
    "num_layers": 4,
}
LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "micro_batch_size": 4,
    "num_layers": 2,
}
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "micro_batch_size": 1,
    "num_layers": 1,
}
TRITON = ("rms_norm=triton", "gated_activation=triton", "rotary_qkv=triton", "residual_norm=triton")
BLOCKS = {"cross_entropy_fusion_impl": "triton"}
FP8: dict[str, Any] = {**LLAMA, "fp8_format": "hybrid"}
IS_STAND_IN = torch.version.cuda is None  # which has no kernels to record, and compiles nothing
# In the order of their value, as time may end.
WAYS: Mapping[str, dict[str, Any]] = {
    "gpt": GPT,
    "llama": LLAMA,
    "llama, compiled, Triton loss": {**LLAMA, "compile": True, **BLOCKS},
    "llama, fp8 tensorwise": {**FP8, "fp8_recipe": "tensorwise"},
    "gpt, compiled": {**GPT, "compile": True},
    "llama, Triton and loss": {**LLAMA, "kernel": TRITON, **BLOCKS},
    "llama, fp8 blockwise": {**FP8, "fp8_recipe": "blockwise"},
    "gpt, Triton loss": {**GPT, **BLOCKS},
    "llama, compiled": {**LLAMA, "compile": True},
    "llama, fp8 delayed": {**FP8, "fp8_recipe": "delayed"},
    "llama, Triton": {**LLAMA, "kernel": TRITON},
}


def trainer_of(changes: Mapping[str, Any], *, small: bool) -> Trainer:
    """A trainer of bf16, with AdamW and clipping, of GPT-2's vocabulary."""
    sizes = {**changes, **SMALL} if small else dict(changes)
    if small and "ffn_hidden_size" in sizes:
        sizes |= {"ffn_hidden_size": 256, "num_query_groups": 2}
    settings = {
        "bf16": True,
        "global_batch_size": 2 * sizes["micro_batch_size"],
        "init_method_std": 0.02,
        "lr": 1e-4,
        "min_lr": 1e-5,
        "clip_grad": 1.0,
        "make_vocab_size_divisible_by": 128,
    }
    config = tiny.config(**settings, **sizes)
    config = replace(config, model=replace(config.model, padded_vocab_size=None))
    config = tiny.with_vocabulary(config, 512 if small else 50257)
    trainer = tiny.trainer_of(tiny.run_of(config, torch.device("cuda")))
    if config.compilation.compile:
        LayerCompiler(trainer)
    return trainer


def profiled(step: Any, name: str) -> tuple[int, float]:
    """(kernels, seconds in which the GPU computed) of one call, whose table is appended to profiles.txt."""
    with profile(activities=[ProfilerActivity.CPU, *(() if IS_STAND_IN else (ProfilerActivity.CUDA,))]) as recorded:
        step()
        torch.cuda.synchronize()
    table = recorded.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90)
    file = results.path()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with (file.parent / "profiles.txt").open("a") as stream:
            stream.write(f"===== {name}\n{table}\n")
    kernels = [one for one in recorded.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    return len(kernels), sum(one.device_time for one in kernels) / 1e6


def measure(name: str, *, small: bool) -> None:
    """Write the figures of one way, and those of its profile."""
    began = time.perf_counter()
    trainer = trainer_of(WAYS[name], small=small)
    config, iteration = trainer.run.config, iter(range(10**6))

    def step() -> None:
        train_step(trainer, tiny.short_run_batches(trainer.run, next(iteration)))

    for _ in range(1 if small else 3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    result = timed(step, torch.device("cuda"), calls=1 if small else 4, rounds=1, warm=0)
    peak = torch.cuda.max_memory_allocated() / 1e9
    work = flops_per_sample(config.model, config.train.seq_length, "causal") * config.train.global_batch_size / 1e12
    figures = {
        "step_s": result.device,
        "host_s": result.host,
        "tflops": work / result.device,
        "mfu": 100 * work / result.device / PEAK,
        "peak_gb": peak,
        "start_s": start,
    }
    results.add("layer", way=name, **figures)

    def kernels() -> dict[str, Any]:
        count, busy = profiled(step, name)
        return {"kernels": count, "busy": busy / result.device}

    results.attempt("profile", {"way": name}, kernels)


def main() -> None:
    """Measure what is asked for, and skip what the results have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("it needs a GPU, or the stand-in: bash tests/without_gpu/run.sh benchmarks/gpu/layers.py --small")
    for name in options.only:
        if not results.done("layer", way=name) or not results.done("profile", way=name):
            try:
                measure(name, small=options.small)
            except Exception as error:  # noqa: BLE001 - whatever one way says, the others are measured
                results.fail("layer", {"way": name}, error)
            torch._dynamo.reset()
            results.free()
    results.end()


if __name__ == "__main__":
    main()
