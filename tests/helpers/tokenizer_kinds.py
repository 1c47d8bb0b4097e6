"""A tokenizer of every kind, and ids to decode with it: of texts, and of nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from tests.helpers.architecture import ROOT

DATA = ROOT / "examples" / "data"
SHARED = ROOT.parent / "shared" / "data" / "tokenizers"
EMOJI = "\U0001fae0"
TEXTS = (
    "the state",
    "\u00e9t\u00e9",
    "\u4f60\u597d",
    f"{EMOJI}\U0001f680a{EMOJI}",
    " a  b",
    "\n\nx:",
    "don't stop , he 's .",
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["\u2581", "\u2581a", "a", "b", "\u2581the", "##c", "'", "s", ".", ",", "\u2581'", "d</w>", "\ufffd", "\u4f60"]


def built(decoder: Any, *, byte_tokens: bool = False, added: tuple[str, ...] = ("<x y>", "\u00fcx")) -> Library:
    """A tokenizer of the tokenizers library with such a decoder, whose pieces are of all kinds."""
    names = ["<unk>", "<s>", "</s>", *(BYTES if byte_tokens else []), *PIECES]
    library = Library(models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=byte_tokens))
    library.normalizer = normalizers.Replace(" ", "\u2581")
    if decoder is not None:
        library.decoder = decoder
    library.add_special_tokens(["<s>", "</s>"])
    library.add_tokens(list(added))
    return library


def byte_level() -> Library:
    """Every byte is a token."""
    library = Library(models.BPE({letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    library.add_tokens(["<x y>", "\u00fcx"])
    return library


def llama_decoder(*last: Any) -> Any:
    """The decoder that converted SentencePiece models have."""
    return decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last])


LIBRARIES: dict[str, Callable[[], Library]] = {
    "byte level": byte_level,
    "llama": lambda: built(llama_decoder(decoders.Strip(" ", 1, 0)), byte_tokens=True),
    "gemma": lambda: built(llama_decoder(), byte_tokens=True),
    "metaspace": lambda: built(decoders.Metaspace()),
    "word pieces": lambda: built(decoders.WordPiece()),
    "word pieces as they are": lambda: built(decoders.WordPiece(cleanup=False)),
    "end of word": lambda: built(decoders.BPEDecoder()),
    "no decoder": lambda: built(None),
}
FILES: dict[str, dict[str, Any]] = {
    "GPT2BPETokenizer": {"vocab_file": DATA / "demo-vocab.json", "merge_file": DATA / "demo-merges.txt"},
    "ByteTokenizer": {},
    "NullTokenizer": {"vocab_size": 1000},
    "BertWordPieceLowerCase": {"vocab_file": SHARED / "demo-trained/bert_style_8k-vocab.txt"},
    "GPTSentencePieceTokenizer": {"tokenizer_model": SHARED / "mistral-v1-spm32k/tokenizer.model"},
    "Llama2Tokenizer": {"tokenizer_model": SHARED / "demo-trained/llama_bpe_8k.model"},
    "SentencePieceTokenizer": {"tokenizer_model": SHARED / "demo-trained/t5_unigram_8k.model", "vocab_extra_ids": 3},
    "TikTokenizer": {"tokenizer_model": SHARED / "tiktoken/r50k_base.tiktoken"},
    "HuggingFaceTokenizer": {"tokenizer_model": SHARED / "bert-uncased"},
}
KINDS = [*LIBRARIES, *(f"{name}, cleaned" for name in ("metaspace", "word pieces")), *FILES]


@cache
def tokenizer_of(kind: str, folder: Path) -> Tokenizer:
    """A tokenizer of each kind; those of files that are not here are skipped."""
    name, _, cleaned = kind.partition(", ")
    if name in LIBRARIES:
        folder = folder / kind.replace(" ", "-")
        folder.mkdir()
        LIBRARIES[name]().save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"eos_token": "</s>"}
        if cleaned:
            config |= {
                "clean_up_tokenization_spaces": True,
                "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
            }
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return HuggingFaceTokenizer(folder)
    given = {flag: value if isinstance(value, int) else str(value) for flag, value in FILES[kind].items()}
    if not all(Path(value).exists() for value in given.values() if isinstance(value, str)):
        pytest.skip("the published tokenizer is not here")
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **given))


def id_sequences(tokenizer: Tokenizer, count: int) -> Iterator[list[int]]:
    """Ids of any kind: of texts, cut anywhere; of tokens that are bytes or special; of all, and of none."""
    draw = random.Random(count)
    texts = [tokenizer.tokenize("7 4" if type(tokenizer).__name__ == "NullTokenizer" else text) for text in TEXTS]
    first_ids = min(300, tokenizer.vocab_size)  # bytes and special tokens, in most vocabularies
    special = [*tokenizer.special_ids, *tokenizer.special.values()]
    for _ in range(count):
        ids: list[int] = []
        while draw.random() < 0.8 and len(ids) < 40:
            text = draw.choice(texts)
            start = draw.randrange(len(text) + 1)
            ids += draw.choice(
                (
                    text[start : draw.randrange(start, len(text) + 1)],
                    [draw.randrange(first_ids) for _ in range(draw.randrange(6))],
                    [draw.randrange(tokenizer.vocab_size + 2) for _ in range(draw.randrange(4))],
                    draw.sample(special, 1),
                )
            )
        yield ids
