"""Fixtures and marks for the whole suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import quick
from tests.helpers.world import Worlds

# Lines that tests want said at the end of the run.
NOTES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="for work in between: what tests/quick.py chooses, minutes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --quick most files are not even read."""
    if config.getoption("--quick") and collection_path.name.startswith("test_"):
        return collection_path.relative_to(quick.ROOT).as_posix() not in quick.FILES
    return None


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        os.environ.setdefault(
            "TRITON_INTERPRET", "1"
        )  # asked when triton is first imported, which parts of torch do, too
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell has what it starts in the background ignore Ctrl-C, and programs that tests interrupt would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[NOTES] = []
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: more than a few seconds")
    config.addinivalue_line(
        "markers", "nightly: takes many minutes in all; runs only when it is asked for with -m nightly"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        rows = quick.covering(quick.ALL_ROWS)
        config.hook.pytest_deselected(items=[item for item in items if not quick.is_quick(item, rows)])
        items[:] = [item for item in items if quick.is_quick(item, rows)]
    if "nightly" not in config.getoption("-m"):
        skip = pytest.mark.skip(reason="runs with -m nightly")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(skip)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for note in config.stash[NOTES]:
        terminalreporter.write_line(note)


@pytest.fixture(scope="session")
def world() -> Iterator[Worlds]:
    """Pools of gloo ranks: world(4).run(function, ...)."""
    worlds = Worlds()
    yield worlds
    worlds.stop()


@pytest.fixture(autouse=True)
def one_thread_and_one_seed() -> None:
    """Every test starts alike."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """No test leaves a handler behind: a later one, or the run itself, would die of it in silence."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    assert after == before, f"the test changed the handlers of {[str(n) for n in numbers]} from {before} to {after}"
