"""TikTokenizer: a byte-level BPE from a file of ranks, in either of two forms.

JSON (Megatron's): a list of {"rank": r, "token_bytes": base64, "token_str": text}, the 256 bytes first. The ids below
--tiktoken-num-special-tokens are special tokens, the ids from there on are the ranks.

    ids   0 <unk>  1 <s>  2 </s>  3 <mask>  4 <pad>  5 <cls>  6 <sep>  7 <SPECIAL_7> ...   num_special + rank

Plain (tiktoken's own): a line of base64 and rank for each token; the id is the rank, and the special tokens take the first
ids that are free. Unless named otherwise they are `<|endoftext|>`, in the published cl100k_base and o200k_base at its own id,
and of Llama 3 `<|begin_of_text|>` and `<|end_of_text|>`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.base import Tokenizer, read_flag_file_bytes, read_flag_file_json
from megatron.core.tokenizers.bytelevel import BPEFromMergeRanks, ByteLevelBPE
from megatron.core.tokenizers.engines import PUBLISHED, MergeRanks

FLAG = "--tokenizer-model"
NEEDED = ("<unk>", "<s>", "</s>")
NAMED = (*NEEDED, "<mask>", "<pad>", "<cls>", "<sep>")
PLAIN_END = "<|endoftext|>"
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>")
ENDS = ("</s>", PLAIN_END, LLAMA3[1])
# Pattern -> tokens of the published file, and the id of its end, which is not the first that is free.
PUBLISHED_ENDS = MappingProxyType({"cl100k": (100_256, 100_257), "o200k": (199_998, 199_999)})
# Beginnings of the names of published files, and how they cut text.
PATTERN_OF = MappingProxyType({"r50k_base": "gpt2", "gpt2": "gpt2", "cl100k_base": "cl100k", "o200k_base": "o200k"})
DEFAULT_VOCAB_SIZE = 2**17
DEFAULT_NUM_SPECIAL = 1000


class TikTokenizer(ByteLevelBPE, Tokenizer):
    """Byte-level BPE from a rank file; the first of `ENDS` that it contains ends a document."""

    def __init__(
        self,
        model: str | Path,
        pattern: str | None,
        *,
        vocab_size: int | None = None,
        num_special: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        pattern = pattern or _default_split_pattern(model)
        if str(model).endswith(".json"):
            tokens, ids, special = _parse_json_merge_ranks(model, vocab_size, num_special, names)
        else:
            tokens, ids, special = _parse_plain_merge_ranks(model, pattern, vocab_size, num_special, names)
        self.vocab_size = max([*ids, *special.values()]) + 1
        self.bos, self.mask = special.get("<s>", special.get(LLAMA3[0])), special.get("<mask>")
        self.pad, self.cls, self.sep = special.get("<pad>"), special.get("<cls>"), special.get("<sep>")
        ends = [special[name] for name in ENDS if name in special]
        if not ends:
            raise ConfigError(
                f"--tokenizer-special-tokens {' '.join(special)} has none of {', '.join(ENDS)}, which end documents"
            )
        self.eos = self.eod = ends[0]
        self.special_ids = tuple(sorted(set(special.values()) - {self.pad}))
        # The single bytes come first, in the order of their value: their ranks among each other change nothing.
        ordered = sorted(
            range(len(tokens)), key=lambda rank: (0, tokens[rank][0]) if len(tokens[rank]) == 1 else (1, rank)
        )
        ranks = MergeRanks(
            tuple(tokens[rank] for rank in ordered),
            tuple(ids[rank] for rank in ordered),
            PUBLISHED.get(pattern, pattern),
        )
        vocab = dict(zip(ids, tokens)) | {number: name.encode() for name, number in special.items()}
        super().__init__(BPEFromMergeRanks(ranks), vocab, special)

    def id_to_token(self, token: int) -> str:
        """Return the text of an id, with U+FFFD for incomplete characters."""
        return self.vocab[token].decode(errors="replace")


Layout = tuple[list[bytes], list[int], dict[str, int]]


def _default_split_pattern(model: str | Path) -> str:
    """Return the splitting pattern that a rank file's name stands for. `ConfigError` if it stands for none."""
    name = Path(model).name
    if name.endswith(".json"):
        return "v2"
    for beginning, pattern in PATTERN_OF.items():
        if name.startswith(beginning):
            return pattern
    raise ConfigError(f"{FLAG} {model} does not say how text is cut into words; add --tiktoken-pattern")


def _parse_json_merge_ranks(
    model: str | Path, vocab_size: int | None, num_special: int | None, names: Sequence[str] | None
) -> Layout:
    """Read Megatron's JSON rank file: return the bytes of each rank, the id of each, and special tokens by name."""
    content = read_flag_file_json(model, FLAG)
    keys = {"rank", "token_bytes"}
    if not isinstance(content, list) or not all(isinstance(row, dict) and keys <= row.keys() for row in content):
        raise ConfigError(f"{FLAG} {model} is not a list of objects with rank and token_bytes")
    num_special = DEFAULT_NUM_SPECIAL if num_special is None else num_special
    special = _named_and_filler_token_ids(NAMED if names is None else tuple(names), num_special)
    size = min(DEFAULT_VOCAB_SIZE, len(content) + num_special) if vocab_size is None else vocab_size
    if not num_special + 256 <= size <= len(content) + num_special:
        raise ConfigError(
            f"--vocab-size {size} is {num_special} special tokens, the 256 bytes and at most all "
            f"{len(content)} ranks of {model}: give {num_special + 256} to {len(content) + num_special}"
        )
    rows = content[: size - num_special]
    tokens = _decode_base64_tokens([(row["token_bytes"], row["rank"]) for row in rows], model)
    return tokens, [num_special + rank for rank in range(len(tokens))], special


def _named_and_filler_token_ids(names: Sequence[str], num_special: int) -> dict[str, int]:
    """Return name -> id of `num_special` special tokens in Megatron's format: the named ones, then fillers."""
    if len(set(names)) != len(names) or not set(NEEDED) <= set(names) or len(names) > num_special:
        raise ConfigError(
            f"--tokenizer-special-tokens {' '.join(names)}: they differ from each other, contain "
            f"{', '.join(NEEDED)}, and are at most --tiktoken-num-special-tokens {num_special}"
        )
    filled = [*names, *(f"<SPECIAL_{number}>" for number in range(len(names), num_special))]
    special = {name: number for number, name in enumerate(filled)}
    if len(special) != num_special:
        raise ConfigError(f"--tokenizer-special-tokens {' '.join(names)} names a filler such as {filled[-1]}")
    return special


def _parse_plain_merge_ranks(
    model: str | Path, pattern: str, vocab_size: int | None, num_special: int | None, names: Sequence[str] | None
) -> Layout:
    """Read a rank file in tiktoken's format: return the bytes of each rank, the id of each, and special tokens by name.

    `ConfigError` if vocab_size or num_special is given: they are for JSON rank files. names: None for the built-in ones.
    """
    for flag, value in (("--vocab-size", vocab_size), ("--tiktoken-num-special-tokens", num_special)):
        if value is not None:
            raise ConfigError(f"{flag} {value} is for JSON rank files; leave it out for {model}")
    rows = _read_plain_ranks(model)
    ranks = [rank for rank, _ in rows]
    tokens = _decode_base64_tokens([(token, place) for place, (_, token) in enumerate(rows)], model)
    count, end = PUBLISHED_ENDS.get(pattern, (None, 0))
    if names is None and len(rows) == count and end not in ranks:
        return tokens, ranks, {PLAIN_END: end}
    names = names if names is not None else LLAMA3 if pattern == "llama3" else (PLAIN_END,)
    free = sorted({*range(len(rows) + len(names))} - {*ranks})
    return tokens, ranks, dict(zip(names, free))


def _read_plain_ranks(model: str | Path) -> list[tuple[int, bytes]]:
    """Return (rank, base64) of each line of tiktoken's format, in the order of the ranks, which must differ."""
    rows: list[tuple[int, bytes]] = []
    for number, line in enumerate(read_flag_file_bytes(model, FLAG).splitlines(), 1):
        words = line.split()
        if words and (len(words) != 2 or not words[1].isdigit()):
            raise ConfigError(f"{FLAG} {model}, line {number}, is not base64 and a rank: {line[:60]!r}")
        rows += [(int(words[1]), words[0])] if words else []
    rows.sort()
    if len(dict(rows)) != len(rows) or rows and rows[-1][0] >= 2**31:
        raise ConfigError(f"{FLAG} {model} gives one rank to several tokens, or a rank beyond 2^31")
    return rows


def _decode_base64_tokens(rows: Sequence[tuple[Any, object]], model: str | Path) -> list[bytes]:
    """Decode (base64, rank) rows, in order, to bytes. `ConfigError` for gaps, duplicates or a missing single byte."""
    tokens = []
    for place, (text, rank) in enumerate(rows):
        try:
            tokens.append(base64.b64decode(text, validate=True))
        except (binascii.Error, TypeError, ValueError) as error:
            raise ConfigError(f"{FLAG} {model}: token {place} is not base64: {error}") from error
        if rank != place or not tokens[-1]:
            raise ConfigError(
                f"{FLAG} {model}: token {place} has rank {rank} and {len(tokens[-1])} bytes; ranks count up "
                "from 0, and no token is empty"
            )
    if len(set(tokens)) != len(tokens):
        raise ConfigError(f"{FLAG} {model} has one token at several ranks")
    missing = {bytes([byte]) for byte in range(256)} - set(tokens)
    if missing:
        raise ConfigError(
            f"{FLAG} {model} is not byte-level, or is cut short: {len(missing)} of the 256 bytes have no rank"
        )
    return tokens
