"""Rendering of chat templates within bounds of memory and time: a process of its own renders (`template_worker.py`).

A template comes with a published tokenizer, so it is data. Jinja's sandbox keeps it from the program's objects, but not from
filling the memory or running for ever: nearly every method of a text can do that. What bounds all of them is the operating
system: the process may take MOST_BYTES, is ended after MOST_SECONDS, and is started again for the next rendering.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from megatron.core.datasets import template_worker

MOST_SECONDS = 60.0  # of the renderings of one conversation
_PROGRAM = "import runpy, sys; sys.path[:] = {path!r}; runpy.run_path({file!r}, run_name='__main__')"
_LIBRARY_PATHS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # all that the process sees of the environment
_LIMITS = {
    "memory": f"it needs more than {template_worker.MOST_BYTES >> 20} MiB of memory",
    "text": f"it makes a text of more than {template_worker.MOST_CHARACTERS} characters",
}


class RenderLimitError(Exception):
    """A template does not end within the bounds."""


class InvalidTemplateError(Exception):
    """A text is no Jinja template."""


class RenderError(str):
    """Why a template does not take a conversation."""


class TemplateProcess:
    """A process that renders templates, started when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        atexit.register(self.close)

    def render(
        self, template: str, contexts: Sequence[Mapping[str, Any]], *, now: str | None = None
    ) -> tuple[bool, list[str | RenderError]]:
        """Render a template with several sets of variables.

        now: ISO time that `strftime_now` says; None: the clock's. Returns whether the template marks answers, and the text of
        each or why there is none. `InvalidTemplateError`; `RenderLimitError` where a bound is met.
        """
        reply = self._ask({"template": template, "contexts": contexts, "now": now})
        if "no_template" in reply:
            raise InvalidTemplateError(reply["no_template"])
        if "limit" in reply:
            self.close()  # what filled the memory may still fill it
            raise RenderLimitError(_LIMITS[reply["limit"]])
        results = [one["text"] if "text" in one else RenderError(one["problem"]) for one in reply["results"]]
        return reply["marks_answers"], results

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        """Return the process's reply. `RenderLimitError` if it ends, or does not answer in time."""
        body = json.dumps(request).encode()
        with self._lock:
            process = self._running_process()
            assert process.stdin is not None and process.stdout is not None, "both are pipes"
            try:
                return _exchange(process.stdin.fileno(), process.stdout.fileno(), body, time.monotonic() + MOST_SECONDS)
            except TimeoutError:
                self.close()
                raise RenderLimitError(
                    f"it takes more than {MOST_SECONDS:.0f} seconds; does a loop in it not end?"
                ) from None
            except (BrokenPipeError, EOFError):
                self.close()
                raise RenderLimitError(f"{_LIMITS['memory']}, or ends the process that renders it") from None
            except BaseException:  # an interrupt: the next reply would be that of this request
                self.close()
                raise

    def _running_process(self) -> subprocess.Popen[bytes]:
        """Return the process, started if there is none of this process's own."""
        if self._owner != os.getpid():  # forked: the parent's process answers the parent
            self._process, self._owner = None, os.getpid()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM.format(path=sys.path, file=template_worker.__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _LIBRARY_PATHS if name in os.environ},
            )
            assert self._process.stdin is not None, "it is a pipe"
            os.set_blocking(self._process.stdin.fileno(), False)
        return self._process


@cache
def template_process() -> TemplateProcess:
    """The process that renders the templates of this process."""
    return TemplateProcess()


def _exchange(writes: int, reads: int, body: bytes, end: float) -> Any:
    """Write a message to one pipe and return the message from the other. `TimeoutError` at the time `end`."""
    unsent = memoryview(len(body).to_bytes(8, "little") + body)
    received = bytearray()
    ready = select.poll()
    ready.register(reads, select.POLLIN)
    ready.register(writes, select.POLLOUT)
    while len(received) < 8 or len(received) < 8 + int.from_bytes(received[:8], "little"):
        pipes = {pipe for pipe, _ in ready.poll(max(0.0, 1000 * (end - time.monotonic())))}
        if not pipes:
            raise TimeoutError
        if writes in pipes:
            unsent = unsent[os.write(writes, unsent[: 1 << 16]) :]
            if not unsent:
                ready.unregister(writes)
        if reads in pipes:
            part = os.read(reads, 1 << 20)
            if not part:
                raise EOFError
            received += part
    return json.loads(received[8:])
