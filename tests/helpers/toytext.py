"""A small byte-level tokenizer with tokens for conversations and for filling in the middle, written as a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer

MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    "<fim_pad>",
    "<cut>",
)
MERGES = (("a", "b"), ("ab", "c"), ("o", "n"), ("\u0120", "t"), ("S", "o"))


def package_tokenizer(marks: tuple[str, ...] = MARKS) -> Any:
    """The tokenizer, as the package `tokenizers` knows it. Bytes come first, then merges, then marks."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [left + right for left, right in MERGES]
    bpe = tokenizers.Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=list(MERGES))
    )
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(marks))
    return bpe


def toy_tokenizer(
    folder: Path, marks: tuple[str, ...] = MARKS, *, eos: str = "<|endoftext|>", **config: str
) -> HuggingFaceTokenizer:
    """The same, written to a folder and read by ours. config: more of tokenizer_config.json, as bos_token."""
    folder.mkdir(parents=True, exist_ok=True)
    package_tokenizer(marks).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, **config}))
    return HuggingFaceTokenizer(folder)
