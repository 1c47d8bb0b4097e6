"""SentencePiece models, in Megatron's three kinds.

GPTSentencePieceTokenizer   the model's pieces; its </s> ends documents
Llama2Tokenizer             the same, with the model's <s> before every text
SentencePieceTokenizer      with <CLS>, <SEP>, <EOD>, <MASK>, and if the model lacks them <PAD>, <BOS> and <EOS>, and the sentinels
                            <extra_id_k>, with ids after the model's pieces unless the model has them; <EOD> ends documents

Text is normalized by the model, so decoding may not restore it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.base import (
    Tokenizer,
    add_prefix_and_suffix_ids,
    character_to_byte_spans,
    flatten_ids,
    hash_parts,
    read_flag_file_bytes,
    tokenize_around_special,
)
from megatron.core.tokenizers.engines import num_usable_processors

ADDED = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece tokenizer. kind: `bare`, `begun` (<s> before a text) or `named` (with named special tokens)."""

    engine = "text is encoded by sentencepiece: it defines the ids"
    replaces_each_byte = True
    _tokens: list[str]

    def __init__(
        self, model: str | Path, kind: Literal["bare", "begun", "named"] = "bare", *, extra_ids: int = 0
    ) -> None:
        content = read_flag_file_bytes(model, "--tokenizer-model")
        self._model = pieces = _load_sentencepiece_model(content, model)
        self._tokens = [pieces.id_to_piece(number) for number in range(len(pieces))]
        self._prefix: tuple[int, ...] = ()
        self._identity = {"model": hash_parts([content]), "kind": kind}
        numbers = {"pad": pieces.pad_id(), "bos": pieces.bos_id(), "eos": pieces.eos_id()}
        ends = {name: number for name, number in numbers.items() if number >= 0}
        special = {self._tokens[number]: number for number in range(len(pieces)) if pieces.is_control(number)}
        sentinels = [f"<extra_id_{number}>" for number in range(extra_ids)]
        if kind == "named":
            missing = {name: f"<{name.upper()}>" for name in numbers if name not in ends}
            special |= self._add_special_tokens([*ADDED, *missing.values(), *sentinels])
            ends |= {name: special[token] for name, token in missing.items()}
        if kind == "begun":
            if "bos" not in ends:
                raise ConfigError(
                    f"--tokenizer-model {model} has no begin of text, which Llama2Tokenizer puts before every "
                    "text; choose GPTSentencePieceTokenizer"
                )
            self._prefix = (ends["bos"],)
        self.special = special
        self.vocab_size = len(self._tokens)
        self.bos, self.eos, self.pad = ends.get("bos"), ends.get("eos"), ends.get("pad")
        self.cls, self.sep, self.mask = special.get("<CLS>"), special.get("<SEP>"), special.get("<MASK>")
        eod = special["<EOD>"] if kind == "named" else self.eos
        if eod is None:
            raise ConfigError(
                f"--tokenizer-model {model} has no end of text, which ends documents; choose "
                "SentencePieceTokenizer, which adds one"
            )
        self.eod = eod
        self.additional_special_tokens_ids = tuple(map(special.__getitem__, sentinels))
        self.special_ids = tuple(sorted(set(special.values()) - {self.pad}))

    def _add_special_tokens(self, tokens: Sequence[str]) -> dict[str, int]:
        """Return the ids of special tokens; those that the model lacks are appended to the vocabulary."""
        numbers = {token: number for number, token in enumerate(self._tokens)}
        added = {token: numbers.setdefault(token, len(numbers)) for token in tokens}
        self._tokens = list(numbers)
        return added

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The model's content, and the tokens that are added to it."""
        return {"algorithm": "sentencepiece", **self._identity}

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text; for Llama2Tokenizer with <s> before it."""
        return [*self._prefix, *self._encode_plain(text)]

    def tokenize_with_special(self, text: str) -> list[int]:
        """Return the ids of a text, in which names of special tokens become those tokens; nothing is added before it."""
        return tokenize_around_special(text, self.special, self._encode_plain)

    def encode_texts_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, int32 [tokens], and how many each text has, int64 [texts]."""
        content = [text.encode() for text in texts]
        return add_prefix_and_suffix_ids(
            self._prefix, *flatten_ids(self._model.encode(content, num_threads=num_usable_processors())), ()
        )

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids; added tokens appear by name, and only the first piece of the model loses its space."""
        parts: list[str] = []
        before: list[int] = []
        for part in self._split_ids_at_added_tokens(map(int, ids)):
            parts.append(part if isinstance(part, str) else self._decode_after(before, part))
            if not isinstance(part, str):
                before = [self._anchor] if parts[-1] else [*before, *part]
        return "".join(parts)

    def piece_after(self, before: Sequence[int], token: int) -> str | bytes:
        """Return the text of a piece behind others, or the byte that it stands for."""
        if not 0 <= token < self.vocab_size:
            return b""
        if token >= len(self._model):
            return self._tokens[token]
        if self._model.is_byte(token):
            return bytes([int(self._tokens[token][3:5], 16)])
        return self._decode_after([one for one in before if 0 <= one < len(self._model)], [token])

    def stands_for_text(self, token: int) -> bool:
        """Return whether an id is a piece of the model with text: added tokens do not keep a space behind them."""
        return 0 <= token < len(self._model) and bool(self._model.decode([token]))

    @cached_property
    def _anchor(self) -> int:
        """A piece with text, which stands for whatever text precedes."""
        model = self._model
        return next(
            number
            for number in range(len(model))
            if not (model.is_control(number) or model.is_byte(number) or model.is_unknown(number))
            and model.decode([number])
        )

    def _decode_after(self, before: list[int], ids: list[int]) -> str:
        """Return the text of the model's ids as it is behind others of the model."""
        return self._model.decode([*before, *ids])[len(self._model.decode(before)) :]

    def _split_ids_at_added_tokens(self, ids: Any) -> list[str | list[int]]:
        """Return runs of the model's ids, and the names of added tokens between them; ids without a token are skipped."""
        runs: list[str | list[int]] = []
        for token in ids:
            if 0 <= token < len(self._model):
                if runs and isinstance(last := runs[-1], list):
                    last.append(token)
                else:
                    runs.append([token])
            elif 0 <= token < self.vocab_size:
                runs.append(self._tokens[token])
        return runs

    def token_byte_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the byte range of each piece; <s> before a text has an empty range."""
        text.encode()
        offsets = self._model.encode(text, out_type="offset_mapping")["offsets"] if text else []
        return [*((0, 0) for _ in self._prefix), *character_to_byte_spans(text, offsets)]

    def _encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text, with nothing added before it."""
        return self._model.encode(text.encode())


def _load_sentencepiece_model(content: bytes, model: str | Path) -> Any:
    """Return the SentencePiece processor of a model file's content. `ConfigError` if it is invalid."""
    import sentencepiece

    if not content:
        raise ConfigError(f"--tokenizer-model {model} is empty")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise ConfigError(f"--tokenizer-model {model} is not a SentencePiece model, or is damaged: {error}") from error
