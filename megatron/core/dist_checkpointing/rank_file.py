"""The data file of one rank: safetensors, hashed while it is written, and verified against the hashes.

    8 bytes: length of the header | header: JSON, padded with spaces | the shards' bytes, concatenated

The header contains the id of the save, the iteration and the file's name, so a file of another save can be identified.
Needs no torch: shards are passed as memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatron.core.dist_checkpointing.checkpoint_folders import xxh3_hex_digest
from megatron.core.dist_checkpointing.files import FileSystem, write_all_bytes

_SHOWN = 5  # damaged pieces of a file that are named
_AT_ONCE = 1 << 22  # bytes that are fetched and hashed


@dataclass(frozen=True, slots=True)
class HashedByteRange:
    """A byte range of a file with its expected hash. what: what it holds, for messages."""

    file: str
    start: int
    length: int
    hash: str
    what: str


def write_rank_file(files: FileSystem, path: Path, header: bytes, contents: Iterable[memoryview]) -> list[str]:
    """Write a data file durably. Returns the hashes of its header and each content, computed from memory."""
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as hasher, closing(files.create(path)) as file:
        hashes = [hasher.submit(xxh3_hex_digest, header)]
        write_all_bytes(file, memoryview(header))
        for content in contents:
            hashes.append(hasher.submit(xxh3_hex_digest, content))
            write_all_bytes(file, content)
        file.sync()
        return [result.result() for result in hashes]


def verify_ranges(
    files: FileSystem,
    folder: Path,
    ranges: Sequence[HashedByteRange],
    *,
    save: str,
    threads: int,
    maps: dict[str, memoryview] | None = None,
) -> list[str]:
    """Read byte ranges of a folder's files of the save `save`; returns a message for each problem.

    maps: name -> content of files that are mapped already; files mapped here are added.
    """
    maps = {} if maps is None else maps
    bad: list[tuple[HashedByteRange, str]] = []
    by_file: dict[str, list[HashedByteRange]] = {}
    for one in sorted(ranges, key=lambda one: (one.file, one.start)):
        by_file.setdefault(one.file, []).append(one)
    for name in list(by_file):
        try:
            maps[name] = maps[name] if name in maps else files.map(folder / name)
        except OSError as error:
            bad.append(
                (
                    by_file.pop(name)[0],
                    "is missing" if isinstance(error, FileNotFoundError) else _read_error_text(error),
                )
            )
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        good = [one for group in by_file.values() for one in group]
        bad += [
            (one, why)
            for one, why in zip(
                good, pool.map(lambda one: _byte_range_problem(files, maps[one.file], one), good), strict=True
            )
            if why
        ]
    return _damaged_file_problems(files, folder, bad, save)


def _damaged_file_problems(
    files: FileSystem, folder: Path, bad: Sequence[tuple[HashedByteRange, str]], save: str
) -> list[str]:
    """Return the problems of each file: that it belongs to another save, or its first damaged ranges."""
    problems = []
    for name in sorted({one.file for one, _ in bad}):
        mine = sorted(((one, why) for one, why in bad if one.file == name), key=lambda wrong: wrong[0].start)
        strayed = file_of_other_save_problem(files, folder, name, save=save) if mine[0][0].start == 0 else ""
        if strayed:
            problems.append(strayed)
            continue
        problems += list(dict.fromkeys(f"{folder / name} {why}" for _, why in mine[:_SHOWN]))
        if len(mine) > _SHOWN:
            problems.append(f"{folder / name} has {len(mine) - _SHOWN} more damaged pieces")
    return problems


def _byte_range_problem(files: FileSystem, content: memoryview, one: HashedByteRange) -> str:
    """Return why a range of a file is invalid, or ""."""
    result, stop = xxhash.xxh3_128(), one.start + one.length
    if stop > len(content):
        return f"is cut short: it has {len(content)} bytes"
    try:
        for place in range(one.start, stop, _AT_ONCE):
            length = min(_AT_ONCE, stop - place)
            files.prefault_range(content, place, length)
            result.update(content[place : place + length])
    except OSError as error:
        return _read_error_text(error)
    if result.hexdigest() != one.hash:
        return f"is damaged: bytes {one.start} to {stop}, {one.what}, have not the hash that they were saved with"
    return ""


def _read_error_text(error: OSError) -> str:
    return f"cannot be read: {error.strerror or error}"


def file_of_other_save_problem(files: FileSystem, folder: Path, name: str, *, save: str) -> str:
    """Return a message if a data file is of another save or under a wrong name; "" if its header does not tell."""
    try:
        with closing(files.open_for_reading(folder / name)) as file:
            start = bytearray(8)
            file.read_into(memoryview(start), 0)
            text = bytearray(min(int.from_bytes(start, "little"), files.size(folder / name)))
            file.read_into(memoryview(text), 8)
        message = json.loads(text)["__metadata__"]
        if message["save"] != save:
            return f"{folder / name} belongs to another save, of iteration {message['iteration']}: the folder mixes two checkpoints"
        if message["file"] != name:
            return f"{folder / name} is {message['file']} of the same save, under a wrong name"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        pass
    return ""
