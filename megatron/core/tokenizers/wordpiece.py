"""BERT's word pieces, from vocab.txt: one token a line, its number is its id.

Text is cleaned of control characters, white space and punctuation and every Chinese character stand alone, and each
word is taken apart into the longest pieces of the vocabulary, from its begin on; pieces inside a word are written
##piece. The lower-case kind also takes accents away. A word that cannot be taken apart is [UNK], so ids do not give
every text back. [BOS], [EOS] and the sentinels <extra_id_k> follow the vocabulary; [EOS] ends documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.config.flags import ConfigError
from megatron.core.tokenizers.base import SpecialTokens, byte_spans, digest, marked, read_text
from megatron.core.tokenizers.engines import Engine, tokenizers_engine

NEEDED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class BertWordPieceTokenizer(SpecialTokens):
    """BERT's tokenizer, in lower case or not, with `extra_ids` sentinels after the vocabulary."""

    engine = "text is encoded by tokenizers: it defines the ids"

    def __init__(self, vocab_file: str | Path, *, lower_case: bool, extra_ids: int = 0) -> None:
        vocab = _parse(read_text(vocab_file, "--vocab-file"), vocab_file)
        self.lower_case = lower_case
        sentinels = [f"<extra_id_{number}>" for number in range(extra_ids)]
        for token in ("[BOS]", "[EOS]", *sentinels):
            vocab.setdefault(token, len(vocab))
        self._tokens = list(vocab)
        self.vocab_size = len(vocab)
        self.pad, self.cls, self.sep, self.mask = (vocab[name] for name in ("[PAD]", "[CLS]", "[SEP]", "[MASK]"))
        self.bos, self.eos = vocab["[BOS]"], vocab["[EOS]"]
        self.eod = self.eos
        self.additional_special_tokens_ids = tuple(vocab[token] for token in sentinels)
        self.special = {name: vocab[name] for name in (*NEEDED, "[BOS]", "[EOS]", *sentinels)}
        self.special_ids = tuple(sorted(set(self.special.values()) - {self.pad}))
        self._vocab = vocab

    @cached_property
    def _pieces(self) -> Any:
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers

        pieces = tokenizers.Tokenizer(
            models.WordPiece(vocab=self._vocab, unk_token="[UNK]", max_input_chars_per_word=100)
        )
        pieces.normalizer = normalizers.BertNormalizer(lowercase=self.lower_case)
        pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        pieces.decoder = decoders.WordPiece(cleanup=False)
        return pieces

    @cached_property
    def _encode(self) -> Engine:
        return tokenizers_engine(self._pieces)

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The tokens in order, and whether text is put in lower case."""
        return {
            "algorithm": "word pieces",
            "lower_case": self.lower_case,
            "tokens": digest(map(str.encode, self._tokens)),
        }

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without [CLS] and [SEP]."""
        return self._encode([text])[0].tolist()

    def tokenize_marked(self, text: str) -> list[int]:
        """The ids of a text, [CLS], [SEP] and the other names in brackets being those tokens."""
        return marked(text, self.special, self.tokenize)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts, and how many each has."""
        return self._encode(texts)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The pieces of some ids, joined to words with a space between."""
        return self._pieces.decode(
            [token for token in map(int, ids) if 0 <= token < self.vocab_size], skip_special_tokens=False
        )

    def id_to_token(self, token: int) -> str:
        """How vocab.txt writes an id."""
        return self._tokens[token]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where the bytes that each piece stands for begin and end."""
        text.encode()
        return byte_spans(text, self._pieces.encode(text, add_special_tokens=False).offsets)


def _parse(text: str, path: str | Path) -> dict[str, int]:
    lines = text.removesuffix("\n").split("\n")
    tokens = [line.rstrip("\r") for line in lines]
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if vocab[token] != number)
        raise ConfigError(f"--vocab-file {path} has the token {twice!r} on several lines")
    missing = [name for name in NEEDED if name not in vocab]
    if missing:
        raise ConfigError(
            f"--vocab-file {path} is not a vocabulary of BERT, or is cut short: it has no {', '.join(missing)}"
        )
    return vocab
