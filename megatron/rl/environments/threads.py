"""Functions that may take long, beside the loop that generates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


async def run_in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a daemon thread and await its result; the thread is abandoned if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def resolve_future(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def run_and_resolve_future() -> None:
        result, problem = None, None
        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001 - it is raised again where it is awaited
            problem = error
        try:
            loop.call_soon_threadsafe(resolve_future, result, problem)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=run_and_resolve_future, daemon=True, name="environment").start()
    return await future
