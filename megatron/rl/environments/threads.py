"""Functions that may take long, beside the loop that generates."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_STRAY_SECONDS = 3.0  # for tasks that are cancelled to end


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


def run_leaving_strays(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own and return its result, as `asyncio.run`. What others left running is cancelled and
    waited for some seconds at most, and threads are not: one that goes on would hold up the run for ever.
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(work)
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            _, strays = loop.run_until_complete(asyncio.wait(left, timeout=_STRAY_SECONDS))
            for stray in strays:  # never deleted: that would close it, which it may not survive either
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(stray))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()
