"""A small T5 of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WORDS = 50
KINDS: dict[str, dict[str, Any]] = {
    "first": {"feed_forward_proj": "relu"},
    "later": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


def published(folder: Path, kind: str) -> Any:
    """The model, with more layers in its encoder, which also lies in the folder, with a tokenizer of numbers."""
    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_decoder_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        n_positions=64,
        pad_token_id=0,
        eos_token_id=WORDS - 1,
        decoder_start_token_id=0,
        **KINDS[kind],
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # opinions strong enough that texts differ
            parameter.mul_(0.4 if "shared" in name else 3.0)
    model.save_pretrained(folder)
    numbers = tokenizers.Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    numbers.add_special_tokens(["0", str(WORDS - 1)])
    numbers.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": str(WORDS - 1), "pad_token": "0"}))
    return model
