#!/usr/bin/env python3
"""Decoding on the CPU: our engine against transformers' `generate` and a plain loop with a cache, in turn in one process.

    python benchmarks/decode.py 124m --batches 1 8 32 --rounds 3

All have the same weights (fp32, GPT-2's shape), read the same prompts and must say the same. Prefill is the prompt and the first
token; decode is every token after it. At the end twice as many requests come at once as are decoded together. The ratio is of CPU-seconds, round by round, so that a busy machine is fair to all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads must not count as work
os.environ.setdefault("MEGATRON_DEVICE", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from megatron.core.config.settings.inference import InferenceConfig
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.training.checkpoint.inference_model import GPT, load_network

SIZES = {"10m": (6, 256, 8, 8192), "124m": (12, 768, 12, 50257)}
Ids = list[list[int]]
Peer = Callable[[Ids, int], Ids]


def peers(size: str, folder: str) -> tuple[dict[str, Peer], Engine]:
    """Each way to continue prompts."""
    layers, hidden, heads, words = SIZES[size]
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=words,
        n_positions=1024,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").eval()
    theirs.save_pretrained(folder)
    theirs.generation_config.eos_token_id = None
    loaded = load_network(folder, GPT, tokenizer={"tokenizer_type": "NullTokenizer", "vocab_size": words})
    engine = Engine(loaded.stages, loaded.tokenizer, InferenceConfig(inference_dynamic_batching_prefix_caching=False))

    def ours(prompts: Ids, count: int) -> Ids:
        requests = [GenerationRequest(tuple(prompt), count, SamplingParams(0.0), ignore_eod=True) for prompt in prompts]
        return [list(reply.ids) for reply in engine.run(requests)]

    def published(prompts: Ids, count: int) -> Ids:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            whole = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        return whole[:, ids.shape[1] :].tolist()

    def plain(prompts: Ids, count: int) -> Ids:
        ids, past, new = torch.tensor(prompts), None, []
        with torch.inference_mode():
            for _ in range(count):
                output = theirs(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
                past, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
                new.append(ids)
        return torch.cat(new, dim=1).tolist()

    return {"ours": ours, "transformers": published, "plain loop": plain}, engine


def load(engine: Engine, words: int, options: argparse.Namespace) -> str:
    """How long the first token takes when twice as many requests come at once as are decoded together."""
    count = 2 * engine.config.inference_max_requests
    prompts = torch.randint(1, words - 1, (count, options.prompt), generator=torch.Generator().manual_seed(3)).tolist()
    began = time.perf_counter()
    replies = engine.run(
        [GenerationRequest(tuple(prompt), options.new, SamplingParams(0.0), ignore_eod=True) for prompt in prompts]
    )
    wall = time.perf_counter() - began
    first = sorted(reply.first for reply in replies if reply.first is not None)
    places = {"1 of 4": count // 4, "half": count // 2, "3 of 4": 3 * count // 4, "all": count}
    percentiles = ", ".join(f"{first[place - 1]:.2f} s ({name})" for name, place in places.items())
    return f"  {count} requests at once: first token after {percentiles}; {count * options.new / wall:.1f} new tokens/s"


def main() -> None:
    """Measure and print one line an implementation and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to add")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        ways, engine = peers(options.size, folder)
    layers, hidden, _, words = SIZES[options.size]
    print(
        f"{options.size}, fp32, prompts of {options.prompt} tokens, {options.new} new ones, {options.threads} threads; "
        f"{engine.metrics().bytes_per_token} bytes of keys and values a token, in theory 2 x {layers} x {hidden} x 4 = {8 * layers * hidden}"
    )
    for batch in options.batches:
        prompts = torch.randint(
            1, words - 1, (batch, options.prompt), generator=torch.Generator().manual_seed(2)
        ).tolist()
        spent: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in ways}
        answers: dict[str, Ids] = {}
        for turn in range(options.rounds + 1):
            names = list(ways)
            for name in names[turn % 3 :] + names[: turn % 3]:
                times = []
                for count in (1, options.new):
                    began = time.process_time()
                    answers[name] = ways[name](prompts, count)
                    times.append(time.process_time() - began)
                if turn:  # the first round warms up
                    spent[name]["prefill"].append(times[0])
                    spent[name]["decode"].append(times[1] - times[0])
        assert answers["ours"] == answers["transformers"] == answers["plain loop"], "they do not say the same"
        for name, parts in spent.items():
            tokens = {"prefill": batch * options.prompt, "decode": batch * (options.new - 1)}
            lines = []
            for part, seconds in parts.items():
                ratio = statistics.median(a / b for a, b in zip(seconds, spent["ours"][part], strict=True))
                lines.append(
                    f"{part} {tokens[part] / statistics.median(seconds):8.1f} tokens/CPU-s, {ratio:5.2f} x ours"
                )
            print(f"  batch {batch:3}  {name:13} {'   '.join(lines)}", flush=True)
    print(load(engine, words, options))


if __name__ == "__main__":
    main()
