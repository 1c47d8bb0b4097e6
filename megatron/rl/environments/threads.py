"""Functions that may take long, beside the loop that generates."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class _CallAbandoned(BaseException):
    """Raised in a thread whose result nobody waits for any more. No `Exception`, which environments may catch."""


async def run_in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a daemon thread and await its result, or what it raises. If the caller is cancelled the thread is
    ended at the next line of Python that it runs: one that never returns would take time from all that follow.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def resolve_future(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def run_and_resolve_future() -> None:
        with suppress(_CallAbandoned):
            result: Any = None
            problem: BaseException | None = None
            try:
                result = function(*args)
            except _CallAbandoned:
                return
            except StopIteration as error:  # which no future takes
                problem = RuntimeError(f"StopIteration: {error}")
            except BaseException as error:  # noqa: BLE001 - it is raised again where it is awaited
                problem = error
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(resolve_future, result, problem)

    thread = threading.Thread(target=run_and_resolve_future, daemon=True, name="environment")
    thread.start()
    try:
        return await future
    finally:
        if not future.done() or future.cancelled():
            _end_thread(thread)


def _end_thread(thread: threading.Thread) -> None:
    """Raise `_CallAbandoned` in a thread, if it still runs."""
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_CallAbandoned))
