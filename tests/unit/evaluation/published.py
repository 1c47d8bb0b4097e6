"""Folders of tiny published models, made by transformers, each with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.helpers.architecture import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LENGTH = 24  # positions of the models: short, so that texts are cut
DATA = ROOT / "examples/data"


def byte_level(folder: Path) -> Any:
    """GPT-2's kind of tokenizer with the demo vocabulary; begin and end are one token."""
    vocabulary = json.loads((DATA / "demo-vocab.json").read_text(encoding="utf-8"))
    lines = (DATA / "demo-merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split()) for line in lines if not line.startswith("#version")]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    return fast


def with_begin(folder: Path) -> Any:
    """The same with <s> put before every text, as Llama's."""
    fast = byte_level(folder)
    made = fast.backend_tokenizer
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(folder)
    return fast


def write(kind: str, folder: Path) -> Any:
    """Write a tiny gpt2 or llama with random weights, peaked enough to have opinions. Returns transformers' model."""
    torch.manual_seed(3)
    tokenizer = byte_level(folder) if kind == "gpt2" else with_begin(folder)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.3}
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=len(tokenizer), n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, **ends
            )
        )
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=LENGTH,
                tie_word_embeddings=False,
                **ends,
            )
        )
    model.eval().save_pretrained(folder)
    return model
