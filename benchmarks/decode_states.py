#!/usr/bin/env python3
"""What a decoded token costs behind longer and longer texts, of layers with a state and of attention: `benchmarks/decode_states.py [--tokens N]`.

CPU time a token of one text, the median of its steps, and the bytes of what is stored of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config.plan.stages import stage_specs_of_run  # noqa: E402
from megatron.core.config.settings.inference import InferenceConfig  # noqa: E402
from megatron.core.tokenizers.build import NullTokenizer  # noqa: E402
from megatron.inference.engine import Engine  # noqa: E402
from megatron.inference.requests import GenerationRequest  # noqa: E402
from megatron.inference.sampling import SamplingParams  # noqa: E402
from tests.helpers import tiny  # noqa: E402

LENGTHS = (1024, 4096, 16384)
PATTERNS = {"Mamba-2": "M-M-", "gated delta net": "G-G-", "attention": "*-*-"}


def engine_of(pattern: str) -> Engine:
    """An engine over a small network of these layers."""
    longest = LENGTHS[-1] + 128
    config = tiny.config(
        num_layers=len(pattern), hybrid_layer_pattern=pattern, hidden_size=256, num_attention_heads=4, ffn_hidden_size=512, kv_channels=64,
        mamba_num_groups=2, mamba_state_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
        position_embedding_type="none", max_position_embeddings=longest, normalization="RMSNorm",
    )  # fmt: skip
    run = tiny.run_of(config)
    (stage,) = stage_specs_of_run(run.config)
    settings = InferenceConfig(inference_max_requests=1, inference_dynamic_batching_prefix_caching=False)
    return Engine([tiny.gpt(run, stage).materialize(1).eval()], NullTokenizer(tiny.VOCABULARY), settings)


def step_times(engine: Engine, length: int, tokens: int) -> list[float]:
    """CPU seconds of each step that decodes a token behind a prompt."""
    prompt = tuple(torch.randint(0, tiny.VOCABULARY - 1, (length,)).tolist())
    times, marks = list[float](), list[float]()
    engine.submit(
        GenerationRequest(prompt, tokens, SamplingParams(temperature=0.0), ignore_eod=True),
        lambda event: marks.append(time.process_time()),
    )
    while not engine.is_idle:
        engine.step()
    times = [after - before for before, after in zip(marks, marks[1:], strict=False)]
    return times[2:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, pattern in PATTERNS.items():
        engine = engine_of(pattern)
        seen = engine.metrics()
        for length in LENGTHS:
            median = statistics.median(step_times(engine, length, args.tokens))
            stored = seen.state_bytes + seen.bytes_per_token * length
            print(
                f"{name:16} {length:6} tokens before: {1000 * median:6.2f} ms a token, {stored / 1024:9.1f} KiB stored"
            )


if __name__ == "__main__":
    main()
