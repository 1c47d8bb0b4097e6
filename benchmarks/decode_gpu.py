#!/usr/bin/env python3
"""Decoding on a GPU: tokens a second against what its memory allows, by graphs or launched kernels, blocks read in place or gathered.

    python benchmarks/decode_gpu.py                      layers of Llama 8B's shape in bf16, random weights
    python benchmarks/decode_gpu.py --computed           the bytes alone, without a GPU
    python benchmarks/decode_gpu.py --small              a small network, to see that it runs

A step reads all weights once, and the keys and values of every text. Those bytes over the rate at which this GPU copies give its least
time; a line says whether a step takes at most 1.5 times as long. Each way is timed in one process, its median step after the prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gpu import results
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.parallel.device import device_name, synchronize
from megatron.core.tokenizers.build import NullTokenizer
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams
from tests.helpers import tiny

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "max_position_embeddings": 8192,
    "seq_length": 8192,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bf16": True,
}
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 256,
    "max_position_embeddings": 256,
    "seq_length": 256,
}
WAYS: dict[str, dict[str, Any]] = {
    "graphs, blocks in place, scheduled ahead": {},
    "graphs, blocks in place": {"inference_async_scheduling": False},
    "launched, blocks in place": {"inference_dynamic_batching_num_cuda_graphs": 0},
    "graphs, gathered": {"inference_paged_attention": "gathered"},
}
GOAL = 1.5


def copy_rate(device: torch.device, gigabytes: float) -> float:
    """Bytes a second that a copy in the device's memory reads and writes, the best of 5."""
    source = torch.zeros(int(gigabytes * 2**29), dtype=torch.int16, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best


def step_bytes(weights: int, per_token: int, rows: int, keys: int) -> int:
    """Bytes that a step has to read: all weights, and the keys and values of every text."""
    return weights + rows * keys * per_token


def gathered_bytes(model: Any, rows: int, keys: int, itemsize: int) -> int:
    """Bytes that a layer moves which gathers keys and values to a power of two and repeats them for all heads: written once, read once."""
    rounded = 1 << (keys - 1).bit_length()
    groups, heads, size = model.num_query_groups, model.num_attention_heads, model.kv_channels
    return 2 * rows * rounded * size * itemsize * (2 * groups + 2 * heads)


def steps(engine: Engine, rows: int, prompt: int, new: int, words: int) -> Iterator[float]:
    """Seconds of every step in which all texts decode."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(rows):
        ids = tuple(torch.randint(0, words - 1, (prompt,), generator=generator).tolist())
        engine.submit(GenerationRequest(ids, new, SamplingParams(0.0), ignore_eod=True), lambda event: None)
    device, made = engine.mesh.device, 0
    while not engine.is_idle:
        began = time.perf_counter()
        engine.step()
        if not engine.config.inference_async_scheduling:
            synchronize(device)
        seconds, before, made = time.perf_counter() - began, made, engine.metrics().generated_tokens
        if made - before == rows:
            yield seconds


def main() -> None:
    """Measure, and print a line a way and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[32, 1, 128], help="in order; that of the goal comes first"
    )
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--computed", action="store_true", help="print the bytes and end")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.small:
        options.layers, options.batches, options.prompt, options.new = 2, [4], 32, 12
    words = 512 if options.small else 32000
    network = {**LLAMA, **(SMALL if options.small else {}), "num_layers": options.layers}
    device = torch.device("cuda")
    config = tiny.config(**network)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, padded_vocab_size=None))
    where = torch.device("cpu") if options.computed else device
    run = tiny.run_of(tiny.with_vocabulary(config, words), where)
    stages = [tiny.gpt(run, spec) for spec in stage_specs_of_run(run.config)]
    weights = sum(param.numel() * 2 for stage in stages for param in stage.parameters())
    weights -= 2 * words * run.config.model.hidden_size  # of the embedding a step reads a few rows
    model, keys = run.config.model, options.prompt + options.new
    per_layer = 2 * model.num_query_groups * model.kv_channels * 2
    for rows in options.batches:
        floor = step_bytes(weights, per_layer * options.layers, rows, keys)
        print(
            f"{rows} texts of {keys} keys: a layer has {rows * keys * per_layer / 1e9:.2f} GB of them (gathered and repeated "
            f"{gathered_bytes(model, rows, keys, 2) / 1e9:.2f} GB moved); a step {floor / 1e9:.2f} GB with {weights / 1e9:.2f} of weights"
        )
    if options.computed:
        return
    stages = [stage.materialize(7).eval() for stage in stages]
    rate = copy_rate(device, 0.01 if options.small else 4.0)
    print(f"{device_name(device)}: copies {rate / 1e12:.2f} TB/s")
    for rows in options.batches:
        floor = step_bytes(weights, per_layer * options.layers, rows, keys) / rate
        for name, way in WAYS.items():
            if results.done("decode", way=name, rows=rows):
                continue
            settings = InferenceConfig(
                inference_max_requests=rows,
                inference_max_seq_length=keys,
                inference_dynamic_batching_max_tokens=max(rows, 8192),
                inference_dynamic_batching_buffer_size_gb=None if options.small else 20.0,
                **way,
            )
            try:
                taken = median_step(stages, settings, rows, options, words)
            except Exception as error:  # noqa: BLE001 - whatever one way says, the others are measured
                results.fail("decode", {"way": name, "rows": rows}, error)
                continue
            finally:
                results.free()
            verdict = "within" if taken <= GOAL * floor else "NOT within"
            results.keep("decode", way=name, rows=rows, ms=1e3 * taken, floor_ms=1e3 * floor, ratio=taken / floor)
            print(
                f"  batch {rows:3}  {name:42} {1e3 * taken:8.2f} ms a step, {rows / taken:9.0f} tokens/s, {taken / floor:6.2f} x the bytes' "
                f"floor of {1e3 * floor:.2f} ms: {verdict} {GOAL} x",
                flush=True,
            )
    results.end()


def median_step(
    stages: list[Any], settings: InferenceConfig, rows: int, options: argparse.Namespace, words: int
) -> float:
    """Seconds of a decoding step of one way."""
    engine = Engine(stages, NullTokenizer(words - 1), settings)
    try:
        engine.capture_all_graphs(lambda message: None)
        return statistics.median(steps(engine, rows, options.prompt, options.new, words))
    finally:
        engine.close()


if __name__ == "__main__":
    main()
