"""HuggingFaceTokenizer: a tokenizer.json, or the folder that holds it, read with the tokenizers library, without
network access.

tokenizer_config.json and special_tokens_map.json beside it name the begin, end, padding and other special tokens, and
tokenizer_config.json or chat_template.jinja holds the chat template. If neither names special tokens, well-known names
are looked up. No code that comes with a tokenizer is executed.

As in transformers, the special tokens that tokenizer.json adds around a text are added; names of special tokens inside
a text are ordinary text, as with `split_special_tokens=True`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron.core.config.flags.declare import ConfigError, raise_config_error_if
from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.tokenizers.base import (
    Tokenizer,
    add_prefix_and_suffix_ids,
    character_to_byte_spans,
    hash_parts,
    read_flag_file_text,
)
from megatron.core.tokenizers.bytelevel import BPEFromMerges, ByteLevelBPE, byte_of_character, vocab_token_to_bytes
from megatron.core.tokenizers.engines import PATTERNS, Engine, tokenizers_engine
from megatron.core.tokenizers.incremental import REPLACEMENT, clean_up_spaces, decode_pieces
from megatron.core.tokenizers.tokenizer_config import TokenizerFolderConfig, read_tokenizer_config

FLAG = "--tokenizer-model"
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bos": ("<s>", "<|begin_of_text|>", "<bos>"),
        "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]"),
        "pad": ("<pad>", "[PAD]", "<|pad|>"),
        "cls": ("<cls>", "[CLS]"),
        "sep": ("<sep>", "[SEP]"),
        "mask": ("<mask>", "[MASK]"),
    }
)
# What tokenizer.json consists of; truncation and padding are of batches that transformers makes.
_PARTS = frozenset(
    "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder model".split()
)
_DECODERS = ("ByteLevel", "WordPiece", "Metaspace", "BPEDecoder", "Replace", "ByteFallback", "Fuse", "Strip")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer defined by tokenizer.json; its end of sentence (or, if it has none, its separator) ends documents.

    added_tokens: tokens that were added to the vocabulary by hand, special or not, as the tokenizers library lists
    them.
    """

    def __init__(self, model: str | Path, *, include_special: bool = True) -> None:
        path = Path(model) / "tokenizer.json" if Path(model).is_dir() else Path(model)
        self._text = read_flag_file_text(path, FLAG)
        parsed = _parse_tokenizer_json(self._text, path)
        self._config = read_tokenizer_config(path.parent, parsed)
        self._tokenizer = _load_tokenizer_json(self._text, path)
        added = _special_added_tokens(self._tokenizer)
        _add_configured_tokens(self._tokenizer, self._config, path.parent)
        self._tokenizer.encode_special_tokens = True
        self._tokens = {number: token for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(self._tokens, default=-1) + 1
        named, extra = _ids_of_named_tokens(
            path.parent, self._config, {token: number for number, token in self._tokens.items()}, added
        )
        self.chat_template, self.tool_chat_template = self._config.chat_template, self._config.tool_chat_template
        self.bos, self.eos, self.pad = named["bos"], named["eos"], named["pad"]
        self.cls, self.sep, self.mask = named["cls"], named["sep"], named["mask"]
        end = self.sep if self.eos is None else self.eos
        if end is None:
            raise ConfigError(
                f"{FLAG} {path}: no end of document is known; name one as eos_token in tokenizer_config.json"
            )
        self.eod: int = end
        sentinels = [token for token in added if token.startswith("<extra_id_")]
        self.additional_special_tokens_ids = extra or tuple(
            added[token] for token in sorted(sentinels, key=_sentinel_number)
        )
        self.added_tokens = self._special_aware_tokenizer.get_added_tokens_decoder()
        self.special = _special_added_tokens(self._special_aware_tokenizer)
        self.names_found_in_text = frozenset(token.content for token in self.added_tokens.values())
        self.cleans_up_spaces = self._config.cleans_up_spaces
        decoders = _decoder_kinds(parsed, path)
        self._is_byte_level, self.replaces_each_byte = decoders == ["ByteLevel"], "ByteFallback" in decoders
        roles = {token for token in named.values() if token is not None}
        self.special_ids = tuple(sorted(({*added.values(), *roles, *extra} - {self.pad}) | {self.eod}))
        frame = _special_ids_around_text(self._tokenizer) if include_special else ((), ())
        self._frame_known = frame is not None
        self._prefix, self._suffix = frame or ((), ())
        self._bytes = (
            _equivalent_byte_level_bpe(parsed, self._tokenizer, _special_added_tokens(self._tokenizer))
            if self._frame_known
            else None
        )

    @cached_property
    def _engine_choice(self) -> tuple[Engine, str]:
        """The engine that encodes many texts, and a sentence on why it was chosen."""
        if self._bytes is None:
            return self._reference_engine, "text is encoded by tokenizers: it defines the ids"
        engine, reason = self._bytes.engine_and_reason
        return (lambda texts: add_prefix_and_suffix_ids(self._prefix, *engine(texts), self._suffix)), reason

    @cached_property
    def _reference_engine(self) -> Engine:
        """The engine of the tokenizers library, which defines the ids."""
        if not self._frame_known:
            return tokenizers_engine(self._tokenizer, add_special_tokens=True)
        bare = tokenizers_engine(self._tokenizer)
        return lambda texts: add_prefix_and_suffix_ids(self._prefix, *bare(texts), self._suffix)

    @cached_property
    def _special_aware_tokenizer(self) -> Any:
        """A second instance that recognizes the names of special tokens in text, those named beside tokenizer.json, too."""
        aware = _load_tokenizer_json(self._text, "tokenizer.json")
        _add_configured_tokens(aware, self._config, Path())
        present = {token.content for token in aware.get_added_tokens_decoder().values()}
        named = [*(self._config.names or {}).values(), *self._config.extra, *self._config.of_model]
        aware.add_special_tokens([token for token in dict.fromkeys(named) if token not in present])
        return aware

    @property
    def engine(self) -> str:
        """The library that encodes text, and why it was chosen."""
        return self._engine_choice[1]

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The hash of a byte-level BPE's tokens, else of the tokenizer.json; and the tokens added around a text."""
        frame = (
            {"before": json.dumps(self._prefix), "after": json.dumps(self._suffix)}
            if self._prefix or self._suffix
            else {}
        )
        if self._bytes is not None:
            return {"algorithm": "byte-level BPE", "content": self._bytes.vocabulary_hash, **frame}
        parsed = json.loads(self._text)
        content = json.dumps(
            {key: value for key, value in parsed.items() if key not in ("truncation", "padding", "version")},
            sort_keys=True,
        )
        return {
            "algorithm": "tokenizer.json",
            "content": hash_parts([content.encode()]),
            **frame,
            "framed": self._frame_known,
        }

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that tokenizer.json adds around it, unless turned off."""
        return self._reference_engine([text])[0].tolist()

    def tokenize_with_special(self, text: str) -> list[int]:
        """Return the ids of a text, in which names of special tokens become those tokens; nothing is added around it."""
        text.encode()
        return self._special_aware_tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_with_special_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return, for each text, the ids of `tokenize_with_special` and the range of characters of each."""
        for text in texts:
            text.encode()
        encodings = self._special_aware_tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def tokenize_characters(self, text: str) -> list[int]:
        """Return the ids of a text in which no name of an added token is that token."""
        text.encode()
        bare = self._tokenizer
        if bare.normalizer is not None:
            text = bare.normalizer.normalize_str(text)
        words = [(text, None)] if bare.pre_tokenizer is None else bare.pre_tokenizer.pre_tokenize_str(text)
        return [token.id for word, _ in words for token in bare.model.tokenize(word)]

    def encode_texts_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, int32 [tokens], and how many each text has, int64 [texts]."""
        return self._engine_choice[0](texts)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids; of byte tokens that are no character each is U+FFFD."""
        text = self._decode(ids)
        if self.replaces_each_byte and REPLACEMENT in text and len(ids) > 1:
            # The library gives up every character of a run of bytes when one of them belongs to none.
            return decode_pieces(self, ids)
        return clean_up_spaces(text) if self.cleans_up_spaces else text

    def piece_after(self, before: Sequence[int], token: int) -> str | bytes:
        """Return the text of a token behind others, or the bytes that it stands for."""
        if token not in self._tokens:
            return b""
        if self._is_byte_level:
            return vocab_token_to_bytes(self._tokens[token])
        byte = _byte_of_token(self._tokens[token]) if self.replaces_each_byte else None
        before_text = self._decode(before)
        if byte is not None and (byte >= 0x80 or before_text):
            return bytes([byte])
        return self._decode([*before, token])[len(before_text) :]

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text that the tokenizers library makes of ids."""
        return self._tokenizer.decode(
            [token for token in map(int, ids) if token in self._tokens], skip_special_tokens=False
        )

    def token_byte_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the byte range of each token; tokens added around a text have an empty range."""
        text.encode()
        if self._bytes is not None:
            spans = self._bytes.token_byte_spans(text)
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=not self._frame_known)
            spans = character_to_byte_spans(text, encoding.offsets)
        return [*((0, 0) for _ in self._prefix), *spans, *((0, 0) for _ in self._suffix)]


def _load_tokenizer_json(text: str, path: str | Path) -> Any:
    """Return the tokenizers library's tokenizer of a tokenizer.json. `ConfigError` if it is invalid."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare exceptions
        raise ConfigError(f"{FLAG} {path} is not a tokenizer.json, or is damaged: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _decoder_kinds(parsed: Mapping[str, Any], path: str | Path) -> list[str]:
    """Return the types of the decoders of a tokenizer.json, in order. `ConfigError` for those whose text cannot be told
    token by token: what is already there would change with what follows.
    """
    decoder = parsed.get("decoder") or {"type": "Sequence", "decoders": []}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [str(step["type"]) for step in steps]
    joined = next((place for place, kind in enumerate(kinds) if kind in ("Fuse", "ByteLevel")), len(kinds))
    late = [step for step in steps[joined + 1 :] if step["type"] != "Strip" or step.get("stop") or "Fuse" not in kinds]
    unknown = [kind for kind in kinds if kind not in _DECODERS]
    if unknown or late or "ByteLevel" in kinds[1:]:
        raise ConfigError(
            f"{FLAG} {path}: the decoder {' + '.join(kinds)} is not built here; "
            "ByteLevel, WordPiece, Metaspace, BPEDecoder, and Replace, ByteFallback, Fuse, Strip in this order are"
        )
    return kinds


def _byte_of_token(token: str) -> int | None:
    """Return the byte that a token such as <0xE2> stands for, or None."""
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return int(match[1], 16) if match else None


def _sentinel_number(sentinel: str) -> int:
    digits = "".join(letter for letter in sentinel if letter.isdigit())
    return int(digits) if digits else 0


def _parse_tokenizer_json(text: str, path: str | Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json. `ConfigError` for parts that nobody here knows, or that draw at random."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} {path} is not a tokenizer.json, or is damaged: {error}") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise ConfigError(f"{FLAG} {path} is not a tokenizer.json: it has no model")
    keys = ForeignMapping(parsed, harmless=_PARTS)
    if parsed["model"].get("dropout"):
        keys.problems.append(f"model.dropout: {parsed['model']['dropout']!r} encodes a text otherwise each time")
    raise_config_error_if(f"{FLAG} {path}: {problem}" for problem in keys.all_problems())
    return parsed


def _special_added_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the special tokens that were added to a vocabulary: name -> id."""
    tokens = tokenizer.get_added_tokens_decoder()
    return {token.content: number for number, token in tokens.items() if token.special}


def _add_configured_tokens(tokenizer: Any, config: TokenizerFolderConfig, folder: Path) -> None:
    """Add the tokens that tokenizer_config.json lists, or give them its flags. `ConfigError` if one would get another id."""
    import tokenizers

    for number, fields in config.added:
        token = tokenizers.AddedToken(**fields)
        if len(fields) == 1 and tokenizer.token_to_id(token.content) is not None:
            continue  # an older file, without flags
        if not any(repr(token) == repr(present) for present in tokenizer.get_added_tokens_decoder().values()):
            tokenizer.add_tokens([token])
        if number is not None and tokenizer.token_to_id(token.content) != number:
            raise ConfigError(
                f"{FLAG} {folder}: {token.content!r} has the id {number} in tokenizer_config.json or added_tokens.json, and by "
                f"tokenizer.json {tokenizer.token_to_id(token.content)}; the files do not belong together"
            )


def _ids_of_named_tokens(
    folder: Path, config: TokenizerFolderConfig, numbers: Mapping[str, int], added: Mapping[str, int]
) -> tuple[dict[str, int | None], tuple[int, ...]]:
    """Return the ids of the named special tokens (None if missing), and of additional ones. numbers: token -> id. added:
    special tokens of tokenizer.json. `ConfigError` for a named token without an id.
    """

    def token_id(token: str, key: str) -> int:
        if token not in numbers:
            raise ConfigError(
                f"{FLAG} {folder}: tokenizer_config.json or special_tokens_map.json names {token!r} as {key}, "
                "but tokenizer.json has no such token"
            )
        return numbers[token]

    if config.names is None:
        named = {role: next((added[token] for token in usual if token in added), None) for role, usual in NAMES.items()}
    else:
        ids = {role: token_id(token, f"{role}_token") for role, token in config.names.items()}
        named = {role: ids.get(role) for role in NAMES}
    for token in config.of_model:
        token_id(token, "a special token")
    return named, tuple(token_id(token, "a special token") for token in config.extra)


def _special_ids_around_text(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the ids that are added before and after every text; None if they depend on the text."""
    common: set[tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    for text in ("a", "two words"):
        bare, whole = tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.encode(text).ids
        frames = {
            (tuple(whole[:first]), tuple(whole[first + len(bare) :]))
            for first in range(len(whole) - len(bare) + 1)
            if whole[first : first + len(bare)] == bare
        }
        common = frames if common is None else common & frames
    return common.pop() if common is not None and len(common) == 1 else None


def _equivalent_byte_level_bpe(
    parsed: Mapping[str, Any], tokenizer: Any, special: Mapping[str, int]
) -> ByteLevelBPE | None:
    """Return the equivalent byte-level BPE if the tokenizer is nothing more than that, else None."""
    model, pattern = parsed["model"], _split_pattern(parsed.get("pre_tokenizer"))
    if pattern is None or not _is_plain_bpe(parsed):
        return None
    halves = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    merges = [(left, right) for left, right in halves]
    reached = byte_of_character().keys() | {left + right for left, right in merges}
    unreached = {token: number for token, number in model["vocab"].items() if token not in reached}
    source = BPEFromMerges(
        tokenizer, model["vocab"], merges, pattern=pattern, whole_words=bool(model.get("ignore_merges"))
    )
    vocab = {number: vocab_token_to_bytes(token) for token, number in model["vocab"].items()}
    return ByteLevelBPE(
        source, vocab | {number: token.encode() for token, number in special.items()}, {**unreached, **special}
    )


def _is_plain_bpe(parsed: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json, after splitting a text into words, does nothing but merge pairs of bytes."""
    model = parsed["model"]
    extras = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk")
    return (
        model.get("type") == "BPE"
        and parsed.get("normalizer") is None
        and not any(model.get(key) for key in extras)
        and all(token["special"] for token in parsed.get("added_tokens", ()))
        and byte_of_character().keys() <= model["vocab"].keys()
    )


def _split_pattern(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """Return the splitting pattern, as in `MergeRanks`, of a pre-tokenizer that splits by one expression; else None."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(steps) > 2:
        return None
    if len(steps) == 1:
        return "gpt2" if last.get("use_regex", True) else None
    first, isolates = steps[0], {"type": "Split", "behavior": "Isolated"}
    if not isolates.items() <= first.items() or first.get("invert") or last.get("use_regex", True):
        return None
    expression = (first.get("pattern") or {}).get("Regex")
    return next((name for name, known in PATTERNS.items() if known == expression), expression)
