#!/usr/bin/env python3
"""Sampling of rollouts on the CPU: our engine against transformers' `generate`, as TRL's GRPOTrainer calls it, in turn in one process.

    python benchmarks/rollouts.py 10m --prompts 4 --group 16 --new 256 --end 0.02

Both have the same weights (fp32, GPT-2's shape) and sample from the same distribution (temperature 1): groups of answers to each prompt, which end by
themselves after a number of tokens that varies, as answers do: with probability --end after each. Ours also gives the log-probability of each token.
Counted are the tokens of the answers, up to their ends, for each CPU-second; the ratio is taken round by round, so that a busy machine is fair to both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads must not count as work
os.environ.setdefault("MEGATRON_DEVICE", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from benchmarks.decode import SIZES
from megatron.core.config.settings.inference import InferenceConfig
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.training.checkpoint.inference_model import GPT, load_network


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--end", type=float, default=0.02, help="share of the vocabulary that ends an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Measure, and print a line for each way."""
    options = read_options()
    torch.set_num_threads(options.threads)
    layers, hidden, heads, words = SIZES[options.size]
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=words, n_positions=1024, n_embd=hidden, n_layer=layers, n_head=heads, bos_token_id=0, eos_token_id=0
    )
    theirs = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        loaded = load_network(folder, GPT, tokenizer={"tokenizer_type": "NullTokenizer", "vocab_size": words})
    ends = list(range(max(1, round(options.end * words))))
    count = options.prompts * options.group

    def ours(prompts: list[list[int]], seed: int) -> list[int]:
        engine = Engine(loaded.stages, loaded.tokenizer, InferenceConfig(inference_max_requests=min(64, count)))
        requests = [
            GenerationRequest(
                tuple(prompt),
                options.new,
                SamplingParams(1.0),
                seed=seed * count + place,
                stop_ids=tuple(ends),
                logprobs=True,
            )
            for place, prompt in enumerate(prompts)
        ]
        replies = engine.run(requests)
        engine.close()
        return [len(reply.tokens) + (reply.end is not None) for reply in replies]

    def published(prompts: list[list[int]], seed: int) -> list[int]:
        torch.manual_seed(seed)
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            whole = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=options.new,
                do_sample=True,
                top_k=0,
                temperature=1.0,
                eos_token_id=ends,
                pad_token_id=0,
            )
        answers = whole[:, ids.shape[1] :]
        is_end = answers < len(ends)
        first = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, answers.shape[1])
        return first.tolist()

    ways = {"ours": ours, "transformers": published}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    lengths: list[int] = []
    for turn in range(options.rounds + 1):
        generator = torch.Generator().manual_seed(turn)
        base = torch.randint(len(ends), words, (options.prompts, options.prompt), generator=generator).tolist()
        prompts = [prompt for prompt in base for _ in range(options.group)]
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            began = time.process_time()
            sizes = ways[name](prompts, turn)
            spent = time.process_time() - began
            if turn:  # the first round warms up
                rates[name].append(sum(sizes) / spent)
                lengths += sizes
    print(
        f"{options.size}, fp32, {options.prompts} prompts of {options.prompt} tokens, {options.group} answers each of at most {options.new}, "
        f"{statistics.mean(lengths):.1f} on average; {options.threads} threads"
    )
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], values, strict=True))
        print(f"  {name:13} {statistics.median(values):8.1f} tokens/CPU-s   ours: {ratio:.2f} x")


if __name__ == "__main__":
    main()
