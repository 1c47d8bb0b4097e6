"""A headless Chromium, driven by its DevTools protocol over two pipes: no driver, no web socket, no package.

with browser() as page:
    page.open("http://127.0.0.1:5000/")
    page.type("Once"); page.press("Enter", control=True)
    page.until("document.title === 'done'")
    page.asked                                     # every address that was asked for
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--remote-debugging-pipe",
)


def program() -> str | None:
    """Where Chromium is, if it is there."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. Events are read by a thread, so that nothing waits for a reader."""

    def __init__(self, reading: int, writing: int) -> None:
        self._writing, self._numbers = writing, 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._news = threading.Condition()
        self._ended = False
        self.asked: list[str] = []
        self.problems: list[str] = []
        threading.Thread(target=self._listen, args=(reading,), daemon=True).start()
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command and its answer."""
        self._numbers += 1
        session = {"sessionId": self._session} if self._session else {}
        message = json.dumps({"id": self._numbers, "method": method, "params": parameters, **session}).encode() + b"\0"
        while message:
            message = message[os.write(self._writing, message) :]
        with self._news:
            assert self._news.wait_for(lambda: self._numbers in self._answers or self._ended, 60), (
                f"{method} is not answered"
            )
            answer = self._answers.pop(self._numbers, {"error": "the browser has ended"})
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, address: str) -> None:
        """Load a page."""
        self.send("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """The value of an expression."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 300.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.ask(f"Boolean({expression})"):
            assert time.monotonic() < end, (
                f"it did not come to pass: {expression}; the page: {self.ask('document.body.innerText')}"
            )
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, control: bool = False) -> None:
        """A key, down and up."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=KEYS[key],
                modifiers=2 if control else 0,
            )

    def point_at(self, element: str) -> None:
        """Move the mouse over the middle of an element, given as an expression."""
        x, y = self.ask(
            f"(() => {{ const at = ({element}).getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]; }})()"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, element: str) -> None:
        """With the mouse."""
        self.point_at(element)
        x, y = self.ask(
            f"(() => {{ const at = ({element}).getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]; }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int) -> None:
        """As a phone would be."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=True)

    def picture(self, path: str) -> None:
        """Write what is seen as a PNG."""
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def _listen(self, reading: int) -> None:
        with open(reading, "rb", closefd=False) as file:
            left = b""
            while part := file.read1(65536):
                *whole, left = (left + part).split(b"\0")
                for message in map(json.loads, whole):
                    self._hear(message)
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _hear(self, message: dict[str, Any]) -> None:
        with self._news:
            if "id" in message:
                self._answers[message["id"]] = message
            elif message["method"] == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
            elif message["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]["exceptionDetails"]))
            self._news.notify_all()


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with one page, and a profile of its own that is thrown away."""
    # Chromium reads commands from 3 and answers to 4; pipes far above cannot be overwritten on their way there.
    pipes = [*os.pipe(), *os.pipe()]
    commands, ours, answers, theirs = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 100) for end in pipes)
    for end in pipes:
        os.close(end)
    with tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$0" "$@" 3<&{commands} 4>&{theirs} {commands}<&- {theirs}>&-',
                str(program()),
                *FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(commands, theirs),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(theirs)
        try:
            yield Page(answers, ours)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(ours)
            os.close(answers)
