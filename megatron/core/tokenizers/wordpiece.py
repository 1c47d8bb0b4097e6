"""BERT's WordPiece, from vocab.txt: one token a line, whose number is its id.

Text is cleaned of control characters, split at white space, punctuation and Chinese characters, and each word is split
into the longest pieces of the vocabulary, from left to right; pieces inside a word are written ##piece. The lower-case
kind also removes accents. A word that cannot be split is [UNK], so decoding does not restore every text. [BOS], [EOS]
and the sentinels <extra_id_k> follow the vocabulary; [EOS] ends documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.base import Tokenizer, character_to_byte_spans, hash_parts, read_flag_file_text
from megatron.core.tokenizers.engines import tokenizers_engine

NEEDED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class BertWordPieceTokenizer(Tokenizer):
    """BERT's tokenizer, in lower case or not, with `extra_ids` sentinels after the vocabulary."""

    engine = "text is encoded by tokenizers: it defines the ids"
    _tokens: list[str]

    def __init__(self, vocab_file: str | Path, *, lower_case: bool, extra_ids: int = 0) -> None:
        vocab = _parse_vocab(read_flag_file_text(vocab_file, "--vocab-file"), vocab_file)
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
    def _wordpiece_tokenizer(self) -> Any:
        """The tokenizers library's WordPiece tokenizer."""
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers

        pieces = tokenizers.Tokenizer(
            models.WordPiece(vocab=self._vocab, unk_token="[UNK]", max_input_chars_per_word=100)
        )
        pieces.normalizer = normalizers.BertNormalizer(lowercase=self.lower_case)
        pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        pieces.decoder = decoders.WordPiece(cleanup=False)
        return pieces

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The tokens in order, and whether text is converted to lower case."""
        return {
            "algorithm": "word pieces",
            "lower_case": self.lower_case,
            "tokens": hash_parts(map(str.encode, self._tokens)),
        }

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without [CLS] and [SEP]."""
        return self.encode_texts_flat([text])[0].tolist()

    def encode_texts_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, int32 [tokens], and how many each text has, int64 [texts]."""
        return tokenizers_engine(self._wordpiece_tokenizer)(texts)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the words of ids, joined from pieces and separated by spaces."""
        return self._wordpiece_tokenizer.decode(
            [token for token in map(int, ids) if 0 <= token < self.vocab_size], skip_special_tokens=False
        )

    def token_byte_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the byte range of each piece."""
        text.encode()
        return character_to_byte_spans(text, self._wordpiece_tokenizer.encode(text, add_special_tokens=False).offsets)


def _parse_vocab(text: str, path: str | Path) -> dict[str, int]:
    """Return token -> id of a vocab.txt. `ConfigError` if a token occurs twice, or one of BERT's is missing."""
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
