"""The run log of a run: what it was given and what became of it, one JSON object a line, only ever appended to.

    start    settings and where each comes from, code, machines, data, tokenizer: a run that resumes writes another one
    layout   the ranks are divided otherwise than at the start before
    loaded, steps, validation, skip, checkpoint    how it went; `steps` holds every step since the line before
    end      why it ended, the first reason; without one it was killed

A line is one write of the operating system, so that a process that dies leaves whole lines, or a torn one that readers
pass over and that the next line does not join. A run log that cannot be written is told once and ends no run. Needs no
torch, so that tools which read it answer at once.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "run_log.jsonl"  # in --save, unless --run-log names another place
FORMER_FILE = "ledger.jsonl"  # its name before; a run that has one goes on with it


def to_json_value(value: Any) -> Any:
    """Convert a value for JSON: None entries of mappings are dropped, infinity and NaN become "inf", "-inf" and "nan"."""
    if isinstance(value, Mapping):
        return {key: to_json_value(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [to_json_value(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class LogFile:
    """Appends whole lines to a file. A failure to write is warned of once; the next line tries again."""

    def __init__(self, path: Path, name: str) -> None:
        """name: what it is to the user."""
        self.path, self._name, self._told = path, name, False

    def add(self, line: str, *, durable: bool = False) -> None:
        """Append a line, which must end with a newline. durable: wait until it has reached the disk."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _write_appended_line(self.path, line.encode(), durable=durable)
        except OSError as error:  # a full disk ends no run
            if not self._told:
                self._told = True
                logging.getLogger("megatron").warning(
                    f"WARNING: {self._name} {self.path} cannot be written: {error.strerror or error}; the run goes on"
                )


@dataclass(slots=True)
class RunLog:
    """Appends events to a JSON-lines file; with path None it does nothing, as on all ranks but the first."""

    path: Path | None = None
    _file: LogFile | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)

    @property
    def is_enabled(self) -> bool:
        """Whether what is added goes anywhere."""
        return self.path is not None

    def add(self, event: str, **fields: Any) -> None:
        """Append one event. Fields that are None are left out. Only the first "end" event is written."""
        if self.path is None or (event == "end" and self._ended):
            return
        self._ended = self._ended or event == "end"
        self._file = self._file or LogFile(self.path, "the run log")
        line = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **to_json_value(fields)}
        self._file.add(json.dumps(line, allow_nan=False) + "\n", durable=event != "steps")


def read_run_log_events(path: str | Path) -> list[dict[str, Any]]:
    """Return all events of a run log file, or of the one in this folder. Torn lines are skipped. Raises `OSError`."""
    place = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if place.is_fifo():
        raise OSError(errno.EINVAL, "it is a pipe", str(place))
    events = []
    for line in place.read_bytes().splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # torn by the end of a process
            continue
        if isinstance(event, dict) and "event" in event:
            events.append(event)
    return events


def _write_appended_line(path: Path, line: bytes, *, durable: bool) -> None:
    """Append to a file in one write, on a line of its own. A full pipe raises `OSError` instead of blocking."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        size = os.fstat(file).st_size
        content = (b"\n" if size > 0 and os.pread(file, 1, size - 1) != b"\n" else b"") + line
        if os.write(file, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if durable:
            os.fsync(file)
    finally:
        os.close(file)
