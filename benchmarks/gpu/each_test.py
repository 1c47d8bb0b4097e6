"""A plugin of pytest for the calls on a GPU: what each test came to is written at once, what has passed is left out when the step is done again.

    python -m pytest -p benchmarks.gpu.each_test ...         with BENCHMARK_RESULTS, BENCHMARK_STEP: its name (calls.py sets both)

A test that takes longer than BENCHMARK_TEST_SECONDS (150) ends its process, also where a kernel hangs; where it was is in hung.txt.
pytest-xdist starts another process and goes on.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

from benchmarks.gpu import results

KNOWN = "BENCHMARK_LINES"  # of the file when the run began: processes that start later leave out the same tests


def pytest_configure(config: pytest.Config) -> None:
    """The first process of a run says what is known."""
    if not hasattr(config, "workerinput"):
        os.environ[KNOWN] = str(len(results.read(results.path())))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed."""
    outcomes = results.outcomes(
        results.read(results.path())[: int(os.environ[KNOWN])], os.environ.get("BENCHMARK_STEP", "")
    )
    passed = [item for item in items if outcomes.get(item.nodeid) == "passed"]
    config.hook.pytest_deselected(items=passed)
    items[:] = [item for item in items if item not in passed]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the process if a test takes too long."""
    file = results.path()
    seconds = float(os.environ.get("BENCHMARK_TEST_SECONDS", "150"))
    if file is None:
        return (yield)
    with (file.parent / "hung.txt").open("a") as stream:
        faulthandler.dump_traceback_later(seconds, exit=True, file=stream)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


class Written:
    """Writes outcomes, in the process to which all are told."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A line a test, and one more if it fails while it is taken down."""
        if report.when in ("setup", "teardown") and report.passed:
            return
        why = {"why": report.longreprtext[-1500:]} if report.failed else {}
        step = os.environ.get("BENCHMARK_STEP", "")
        results.keep(
            "test", step=step, test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), **why
        )
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid}: {(report.longreprtext.strip().splitlines() or [''])[-1]}")


def pytest_sessionstart(session: pytest.Session) -> None:
    """In the first process, all outcomes are written."""
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Written(session.config))
