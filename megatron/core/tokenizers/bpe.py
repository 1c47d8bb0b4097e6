"""GPT-2's byte-level BPE, read from its two published files, without any network.

Text is cut into words (with the space before them), every word's UTF-8 bytes are written as printable characters, and
the pairs of merges.txt are joined, the earliest line first. Any text has ids, and the ids give the same text back.
`<|endoftext|>` inside a text is ordinary characters here, so that no document can forge the end of another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.core.config.flags import ConfigError

END_OF_DOCUMENT = "<|endoftext|>"


class GPT2BPETokenizer:
    """Byte-level BPE from vocab.json and merges.txt; the end of document is `<|endoftext|>`, there is no padding."""

    pad = None

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        texts = _read(vocab_file, "--vocab-file"), _read(merge_file, "--merge-file")
        vocab = _parse_vocab(texts[0], vocab_file)
        merges = _parse_merges(texts[1], merge_file, vocab, vocab_file)
        self.vocab_size = max(vocab.values()) + 1
        self.eod: int = vocab[END_OF_DOCUMENT]
        self.special_ids = (self.eod,)
        self._content = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
        # Without merges into the end of document, it is only ever reached through `eod`.
        self._bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bpe.decoder = decoders.ByteLevel()

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The kind and hashes of both files' content."""
        return {"class": type(self).__name__, "vocab": self._content[0], "merges": self._content[1]}

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._bpe.encode(_checked(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on all processors."""
        encodings = self._bpe.encode_batch_fast([_checked(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        return self._bpe.decode(list(ids), skip_special_tokens=False)


def _checked(text: str) -> str:
    """The text, if it is valid Unicode: half of a surrogate pair has no bytes. Raises `UnicodeEncodeError`."""
    text.encode()
    return text


def _read(path: str | Path, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path} is not UTF-8 text: {error}") from error


def _parse_vocab(text: str, path: str | Path) -> dict[str, int]:
    try:
        vocab = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--vocab-file {path} is not JSON: {error}") from error
    if not isinstance(vocab, dict) or not vocab or not all(type(number) is int for number in vocab.values()):
        raise ConfigError(f"--vocab-file {path} is not a JSON object of tokens and their numbers")
    if len(set(vocab.values())) != len(vocab) or min(vocab.values()) < 0:
        raise ConfigError(f"--vocab-file {path} gives one number to several tokens, or a negative number")
    if END_OF_DOCUMENT not in vocab:
        raise ConfigError(f"--vocab-file {path} has no token {END_OF_DOCUMENT}, which ends documents; add it with the "
                          f"number {max(vocab.values()) + 1}")
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys())
    if missing:
        raise ConfigError(f"--vocab-file {path} is not byte-level: {len(missing)} of the 256 bytes have no token, "
                          f"among them {missing[0]!r}")
    return vocab


def _parse_merges(text: str, path: str | Path, vocab: dict[str, int], vocab_file: str | Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(text.split("\n"), 1):
        left, _, right = line.partition(" ")
        if left in vocab and right in vocab and left + right in vocab:
            merges.append((left, right))
        elif line and not line.startswith("#version"):
            raise ConfigError(f"--merge-file {path}, line {number}: {line!r} is not two tokens of {vocab_file} that "
                              "join to a third; the two files do not belong together, or one is damaged")
    return merges
