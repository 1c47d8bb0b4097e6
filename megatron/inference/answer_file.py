"""The output of `megatron generate` while it grows: which of its lines answer the input, and which are written anew.

A line holds a key of what it answers: the line of the input, the checkpoint and the options. One that answers something else is
no answer, whatever it looks like; one that holds an error is tried again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.storage import atomic_file, errors_name_file
from megatron.core.tokenizers.base import hash_parts

KEY = "key"  # of the output's objects
_KEY_LENGTH = 16  # hex digits
_SAMPLES, _SAMPLE_BYTES = 1024, 2**14  # of each file of a checkpoint, spread over it; smaller files are read whole

LineKey = Callable[[int, str], str]


def enumerate_nonblank_lines(file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of a file's lines that are not blank; numbers from 0, blank lines not counted."""
    return enumerate(line for line in file if line.strip())


def line_key(options: Mapping[str, Any], checkpoint: str) -> LineKey:
    """Return a function that gives the key of a numbered input line. options: those that answers depend on; checkpoint: its
    identity.
    """
    common = json.dumps(options, sort_keys=True).encode()

    def key(number: int, line: str) -> str:
        try:
            content = json.dumps(json.loads(line), sort_keys=True)
        except (ValueError, RecursionError):
            content = line
        parts = [checkpoint.encode(), common, b"%d" % number, content.encode("utf-8", "surrogatepass")]
        return hash_parts(parts)[:_KEY_LENGTH]

    return key


def checkpoint_identity(where: str | Path) -> str:
    """Return a hash of a checkpoint's files: their names and sizes, and samples of their content, wherever they lie."""
    folder = Path(where)
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]
    return hash_parts(part for path in files if path.is_file() for part in _file_samples(path, folder))


def _file_samples(path: Path, folder: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield str(path.relative_to(folder)).encode()
    yield b"%d" % size
    whole = size <= _SAMPLES * _SAMPLE_BYTES
    with path.open("rb") as file:
        if whole:
            yield file.read()
        for place in () if whole else [(size - _SAMPLE_BYTES) * part // (_SAMPLES - 1) for part in range(_SAMPLES)]:
            file.seek(place)
            yield file.read(_SAMPLE_BYTES)


def count_finished_lines(output: Path, lines: Iterator[tuple[int, str]], key: LineKey | None = None) -> int:
    """Return how many whole lines `output` has, truncating a part of one. `ConfigError` if they answer other lines, or are
    of another key.
    """
    if not output.exists():
        return 0
    whole = number = 0
    with output.open("rb") as file:
        for number, answer in enumerate(file):
            if not answer.endswith(b"\n"):
                break
            place, line = next(lines, (number, ""))
            if not _is_answer_to_input_line(line, answer, "" if key is None else key(place, line)):
                raise ConfigError(
                    f"line {number + 1} of {output} is no answer to that line of the input by this checkpoint and these options; "
                    "give another --output, or delete it"
                )
            whole += len(answer)
            number += 1
    with output.open("rb+") as file:
        file.truncate(whole)
    return number


def failed_lines(output: Path, lines: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the (number, input line) of which `output`, whose lines all are finished, holds an error."""
    if not output.exists():
        return []
    with output.open("rb") as file:
        return [line for line, answer in zip(lines, file) if "error" in _object_or_empty(answer)]


def replace_lines(output: Path, changed: Mapping[int, dict[str, Any]]) -> None:
    """Write the output anew with other objects at these line numbers, atomically."""
    with output.open("rb") as file, atomic_file(output) as new:
        new.writelines(
            _line_of(changed[number]).encode() if number in changed else line for number, line in enumerate(file)
        )


def append_lines(output: Path, answers: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Append objects as they come, each at once; yield them."""
    with errors_name_file(output), output.open("a", encoding="utf-8", newline="\n") as file:
        for answer in answers:
            file.write(_line_of(answer))
            file.flush()
            yield answer
        os.fsync(file.fileno())


def _line_of(answer: dict[str, Any]) -> str:
    """Return an object as a line; in ASCII where it holds half of a surrogate pair, which no file can as it is."""
    line = json.dumps(answer, ensure_ascii=False)
    return (line if _is_encodable(line) else json.dumps(answer)) + "\n"


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_answer_to_input_line(line: str, answer: bytes, key: str) -> bool:
    """Whether a line of the output answers one of the input; a line without a key, of an earlier version, by what both say."""
    request, fields = _object_or_empty(line), _object_or_empty(answer)
    if "error" in fields:
        return bool(line)  # it is tried again
    if KEY in fields:
        return bool(fields[KEY] == key)
    names = ("prompt", "id")
    return any(name in request for name in names) and all(request.get(name) == fields.get(name) for name in names)


def _object_or_empty(line: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
