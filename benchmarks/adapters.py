#!/usr/bin/env python3
"""Adapters on the CPU: decoding with two beside the base alone, LoRA training against PEFT on transformers' network, and DPO against TRL.

    python benchmarks/adapters.py --rounds 5

All in one process; both networks have Llama's blocks and the same weights. Decoding: 8 requests of the base, then 8 of which half have one
adapter and half another; LoRA of rank 16 on all linear layers. Training: steps of the same size, LoRA of rank 16, Adam, gradient clipping; the
losses of both must agree. DPO: steps on the same pairs of uneven lengths, with the same adapters, and their base as the reference: TRL fills
its rows up to the longest, and here pairs are packed. What is compared takes turns; a ratio is of CPU-seconds, the median over the rounds, so that a busy machine is fair to all.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads must not count as work
os.environ.setdefault("MEGATRON_DEVICE", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import datasets
import numpy as np
import peft
import tokenizers
import torch
import transformers
import trl
from tokenizers import Tokenizer

from megatron.adapters import peft as folders
from megatron.core.datasets.samplers import collate
from megatron.core.tokenizers import base
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.preference.data import ReferenceScoredBatches
from megatron.preference.dataset import PreferenceDataset, PreferenceRowSource
from megatron.preference.rows import PreferenceRowParser, parse_preference_rows
from megatron.preference.settings import PreferenceConfig
from megatron.preference.step import PreferenceStep
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.checkpoint.inference_model import GPT, load_network
from megatron.training.state.batch import Batch
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from megatron.training.state.trainer import build_trainer
from tests.helpers import tiny

LAYERS, HIDDEN, HEADS, GATED, VOCABULARY = 8, 512, 8, 1536, 8192
RANK, LENGTH, ROWS = 16, 256, 4
PAIRS, PACK = 8, 512  # of a step of DPO; tokens of a sample that several pairs share
LORA: dict[str, Any] = {"r": RANK, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
Ways = dict[str, Callable[[], Any]]


def published(folder: str) -> torch.nn.Module:
    """A random network of transformers', which is saved in the folder."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=GATED,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=512,
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    model.save_pretrained(folder)
    return model


def decoding(folder: str, batch: int, new: int) -> Ways:
    """Ways to continue the same prompts: without adapters, and with two."""
    loaded = load_network(folder, GPT, tokenizer={"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY - 1})
    engine = Engine(loaded.stages, loaded.tokenizer)
    for name in ("first", "second"):
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        made = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **LORA))
        made.save_pretrained(f"{folder}/{name}")
        engine.adapters.load(name, folders.read_peft_folder(f"{folder}/{name}", loaded.config.model))
    prompts = torch.randint(1, VOCABULARY, (batch, 32), generator=torch.Generator().manual_seed(2)).tolist()

    def way(*names: str) -> Callable[[], int]:
        def run() -> int:
            requests = [
                GenerationRequest(
                    tuple(prompt), new, SamplingParams(0.0), ignore_eod=True, adapter=names[place % len(names)]
                )
                for place, prompt in enumerate(prompts)
            ]
            return sum(len(reply.tokens) for reply in engine.run(requests))

        return run

    return {"base": way(""), "two adapters": way("first", "second")}


def run_of_ours(folder: str, **changes: Any) -> RunContext:
    """A run of ours from the network and the adapters in a folder."""
    llama = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "norm_epsilon": 1e-6,
    }
    lora = {"lora_rank": RANK, "lora_alpha": 32.0, "pretrained_checkpoint": folder, "adapter": f"{folder}/start"}
    training = {
        "lr": 1e-4,
        "min_lr": 1e-4,
        "lr_decay_style": "constant",
        "weight_decay": 0.0,
        "clip_grad": 1.0,
        "adam_beta2": 0.999,
        "train_iters": 1000,
    }
    settings = tiny.config(
        **{**llama, **lora, **training, **changes},
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=GATED,
        max_position_embeddings=512,
        padded_vocab_size=VOCABULARY,
    )
    return tiny.run_of(tiny.with_vocabulary(settings, VOCABULARY))


def stepper(params: list[torch.nn.Parameter]) -> Callable[[torch.Tensor], float]:
    """The rest of a step of theirs, from its loss on: backward pass, clipping, Adam. Returns the loss."""
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.0, fused=True)

    def step(loss: torch.Tensor) -> float:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def training(model: torch.nn.Module, folder: str) -> Ways:
    """A training step of ours, and one of PEFT's, from the same adapters on the same rows."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA)).train()
    adapted.save_pretrained(f"{folder}/start")
    finish = stepper([param for param in adapted.parameters() if param.requires_grad])
    trainer = tiny.trainer_of(run_of_ours(folder, seq_length=LENGTH, micro_batch_size=ROWS, global_batch_size=ROWS))
    Checkpointer(trainer).resume()
    rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    x, y, mask = rows[:, :-1], rows[:, 1:].contiguous(), torch.ones(ROWS, LENGTH)

    def ours() -> float:
        total, count = (
            train_step(trainer, iter((Batch(tokens=x, labels=y, loss_mask=mask),))).losses["lm loss"].tolist()
        )
        return total / count

    def theirs() -> float:
        logits = adapted(input_ids=x).logits
        return finish(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()))

    return {"PEFT": theirs, "ours": ours}


def preference(folder: str) -> Ways:
    """A step of DPO of ours, and one of TRL's, from the same adapters on the same pairs. `training` has written the adapters."""
    random = np.random.default_rng(4)

    def text(low: int, high: int) -> str:
        return " ".join(map(str, random.integers(1, VOCABULARY - 1, random.integers(low, high))))

    pairs = [{"prompt": text(16, 48), "chosen": " " + text(8, 96), "rejected": " " + text(8, 96)} for _ in range(PAIRS)]
    model = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(folder), f"{folder}/start", is_trainable=True
    )
    settings = trl.DPOConfig(
        output_dir=f"{folder}/trl", per_device_train_batch_size=PAIRS, use_cpu=True, bf16=False, report_to=[],
        gradient_checkpointing=False,
    )  # fmt: skip
    given = {"train_dataset": datasets.Dataset.from_list(pairs), "processing_class": word_tokenizer()}
    their_trainer = trl.DPOTrainer(model, args=settings, **given)
    their_batch = next(iter(their_trainer.get_train_dataloader()))
    policy = their_trainer.model.train()
    finish = stepper([param for param in policy.parameters() if param.requires_grad])

    rows, _ = parse_preference_rows(
        [json.dumps(pair).encode() for pair in pairs], PreferenceRowParser(Words(), "chatml")
    )  # type: ignore[arg-type]
    source = PreferenceRowSource("rows", tuple(rows))
    packed = PreferenceDataset(source, range(PAIRS), length=PACK, num_samples=None, seed=0, split="train")
    samples = [packed[index] for index in range(len(packed))]
    batch = Batch.from_arrays(collate(samples), torch.device("cpu"), positions=True)
    config = PreferenceConfig()
    flags = {"reset_attention_mask": True, "reset_position_ids": True, "calculate_per_token_loss": True}
    size = {"seq_length": PACK, "micro_batch_size": len(samples), "global_batch_size": len(samples)}
    trainer = build_trainer(run_of_ours(folder, **flags, **size), tiny.gpt, PreferenceStep(config))
    Checkpointer(trainer).resume()

    def ours() -> float:
        data = ReferenceScoredBatches(trainer, iter((batch,)), None, config)  # type: ignore[arg-type]
        total, count = train_step(trainer, data).losses["preference loss"].tolist()
        return total / count

    def theirs() -> float:
        return finish(their_trainer.compute_loss(policy, their_batch))

    return {"TRL": theirs, "ours": ours}


class Words(base.Tokenizer):
    """A tokenizer of numbers, for our reader."""

    eod = VOCABULARY - 1

    def tokenize(self, text: str) -> list[int]:
        """Ids."""
        return [int(word) for word in text.split()]


def word_tokenizer() -> Any:
    """The same tokenizer for TRL."""
    end = VOCABULARY - 1
    words = {"<pad>": 0, **{str(number): number for number in range(1, end)}, "<eos>": end}
    made = Tokenizer(tokenizers.models.WordLevel(words, "<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def in_turn(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of each way, round by round; the first round warms up."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in sorted(ways, reverse=turn % 2 == 1):
            began = time.process_time()
            ways[name]()
            spent[name] += [time.process_time() - began] if turn else []
    return spent


def main() -> None:
    """Measure and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8, help="requests that are decoded together")
    parser.add_argument("--new", type=int, default=64, help="tokens of each")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        model = published(folder)
        ways = decoding(folder, options.batch, options.new)
        steps, dpo = training(model, folder), preference(folder)
    print(f"{LAYERS} layers of {HIDDEN}, fp32, LoRA of rank {RANK} on all linear layers, {options.threads} threads")
    spent, tokens = in_turn(ways, options.rounds), options.batch * options.new
    for name, seconds in spent.items():
        ratio = statistics.median(a / b for a, b in zip(spent["base"], seconds, strict=True))
        print(
            f"  decoding {name:13} {tokens / statistics.median(seconds):7.1f} tokens/CPU-s, {ratio:.2f} of the base's rate"
        )
    for what, both, size, unit in (("training", steps, ROWS * LENGTH, "tokens"), ("DPO", dpo, PAIRS, "pairs")):
        spent, (peer, _) = in_turn(both, options.rounds), both
        for name, seconds in spent.items():
            ratio = statistics.median(a / b for a, b in zip(spent[peer], seconds, strict=True))
            rate = size / statistics.median(seconds)
            print(f"  {what:8} {name:13} {rate:7.1f} {unit}/CPU-s, {ratio:.2f} of {peer}'s rate")
        first, second = (way() for way in both.values())
        print(f"  losses after {options.rounds + 1} steps: {first:.4f} and {second:.4f}")


if __name__ == "__main__":
    main()
