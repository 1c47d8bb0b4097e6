"""PREFIX.json beside a .bin/.idx pair: what the pair itself cannot say.

    {"format": "indexed dataset sidecar", "version": 1,
     "documents": 3, "sequences": 3, "tokens": 1200, "dtype": "uint16", "level": "document", "shard": null,
     "tokenizer": {"kind": "GPT2BPETokenizer", "hash": "...", "vocab_size": 50257, "eod": 50256},
     "checksums": {"bin": "xxh3_128:...", "idx": "xxh3_128:..."}}

It is optional: pairs that other programmes wrote have none, and are read like all others. A JSON file of that name with
another content is not a sidecar and is left alone. Keys that this reader does not know are ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.core.datasets.storage import DataError, read_start_if_exists

FORMAT = "indexed dataset sidecar"
VERSION = 1
MOST_BYTES = 2**20
COUNTS = ("documents", "sequences", "tokens")
CHECKSUM = "xxh3_128"

Fingerprint = Mapping[str, str | int]  # of a tokenizer: kind, hash, vocab_size, eod


@dataclass(frozen=True, slots=True)
class DatasetSidecar:
    """Facts about a pair.

    tokenizer: the fingerprint of what made the ids. level: what a sequence is. shard: (i, n) when the pair is part i of
    n of a corpus, counted from 0. checksums: "xxh3_128:hex" of the whole files, by the keys "bin" and "idx".
    """

    documents: int
    sequences: int
    tokens: int
    dtype: str
    tokenizer: Fingerprint | None = None
    level: Literal["document", "sentence"] = "document"
    shard: tuple[int, int] | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)


def sidecar_path(prefix: str | Path) -> str:
    """The file beside the pair."""
    return f"{prefix}.json"


def read_sidecar(prefix: str | Path) -> DatasetSidecar | None:
    """Read the sidecar of a pair, local or remote; None if it has none. `DataError` for a damaged one."""
    content = _read_sidecar_json(prefix)
    if content is None:
        return None
    path = sidecar_path(prefix)
    problem = _sidecar_content_problem(content)
    if problem:
        raise DataError(
            f"{path} {problem}; write the pair again, or remove the file to use the pair without its checks"
        )
    known = {name.name: content[name.name] for name in dataclasses.fields(DatasetSidecar) if name.name in content}
    if known.get("shard") is not None:
        known["shard"] = tuple(known["shard"])
    return DatasetSidecar(**known)


def _read_sidecar_json(prefix: str | Path) -> dict[str, Any] | None:
    """The JSON object of a sidecar; None where there is no file, or another sort of JSON object."""
    path = sidecar_path(prefix)
    raw = read_start_if_exists(path, MOST_BYTES)
    if raw is None:
        return None
    try:
        content = json.loads(raw) if len(raw) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise DataError(
            f"{path} stands where a pair has its sidecar, but is not one JSON object; when it is damaged, "
            "write the pair again or remove it; when it belongs to something else, move it away"
        )
    return content if content.get("format") == FORMAT else None


def _sidecar_content_problem(content: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the content of a sidecar, to follow its path in a message; None if nothing."""
    if content.get("version") != VERSION:
        return f"has version {content.get('version')!r}; this reader knows version {VERSION}"
    for name in COUNTS:
        if type(content.get(name)) is not int or content[name] < 0:
            return f"has {name} {content.get(name)!r}, not a count"
    if not isinstance(content.get("dtype"), str):
        return f"has dtype {content.get('dtype')!r}, not the name of a type"
    if content.get("level", "document") not in ("document", "sentence"):
        return f"has level {content['level']!r}, neither document nor sentence"
    shard = content.get("shard")
    if shard is not None and not _is_shard_index_and_count(shard):
        return f"has shard {shard!r}, not [i, n] with 0 <= i < n"
    tokenizer = content.get("tokenizer")
    if tokenizer is not None and not (isinstance(tokenizer, dict) and isinstance(tokenizer.get("hash"), str)):
        return f"has tokenizer {tokenizer!r}, without a hash"
    sums = content.get("checksums", {})
    if not (isinstance(sums, dict) and all(isinstance(value, str) for value in sums.values())):
        return f"has checksums {sums!r}, not one text a file"
    return None


def _is_shard_index_and_count(value: object) -> bool:
    """Return whether a value is a list [i, n] with 0 <= i < n."""
    return isinstance(value, list) and [*map(type, value)] == [int, int] and 0 <= value[0] < value[1]


def encode_sidecar(sidecar: DatasetSidecar) -> bytes:
    """Return the bytes of a sidecar file."""
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(sidecar)}
    return (json.dumps(content, indent=1) + "\n").encode()


def check_sidecar_path_free(prefix: str | Path) -> None:
    """Raise `DataError` when writing the sidecar of `prefix` would overwrite a file that is not one."""
    path = sidecar_path(prefix)
    raw = read_start_if_exists(path, MOST_BYTES)
    if raw and FORMAT.encode() not in raw:  # a damaged sidecar may be replaced
        raise DataError(
            f"{path} is in the way: a pair has its sidecar there, and this file is something else; choose "
            "another prefix, or move the file away"
        )


def check_dataset_tokenizer(prefix: str | Path, fingerprint: Fingerprint) -> None:
    """Raise `DataError` when the sidecar says that another tokenizer made the ids; a pair without one passes."""
    sidecar = read_sidecar(prefix)
    if sidecar is None or sidecar.tokenizer is None or sidecar.tokenizer["hash"] == fingerprint["hash"]:
        return
    raise DataError(
        f"{prefix} was written with {describe_tokenizer(sidecar.tokenizer)}, but the tokenizer given is "
        f"{describe_tokenizer(fingerprint)}; give the tokenizer of the data, or write the data again"
    )


def describe_tokenizer(fingerprint: Fingerprint) -> str:
    """A tokenizer in a few words: kind, vocabulary, end of document, and the beginning of its hash."""
    return (
        f"{fingerprint.get('kind', 'a tokenizer')} (vocabulary {fingerprint.get('vocab_size', 'unknown')}, end of "
        f"document {fingerprint.get('eod', 'unknown')}, hash {str(fingerprint['hash'])[:12]})"
    )


def sidecar_mismatches(
    prefix: str, facts: DatasetSidecar, measured: Mapping[str, object], checksums: Mapping[str, str]
) -> list[str]:
    """Return a sentence for each fact of a sidecar that the pair contradicts; empty if they agree.

    measured: documents, sequences, tokens and dtype of the pair. checksums: hex xxh3_128 of its files, by "bin" and
    "idx".
    """
    path = sidecar_path(prefix)
    problems = [
        f"{path} says {name} {getattr(facts, name)}, but the pair has {value}"
        for name, value in measured.items()
        if getattr(facts, name) != value
    ]
    for ending, value in checksums.items():
        recorded = facts.checksums.get(ending)
        if recorded is not None and recorded.startswith(f"{CHECKSUM}:") and recorded != f"{CHECKSUM}:{value}":
            problems.append(f"{prefix}.{ending} has the checksum {CHECKSUM}:{value}, but was written with {recorded}")
    return problems
