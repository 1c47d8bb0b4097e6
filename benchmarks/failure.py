#!/usr/bin/env python3
"""How soon all ranks of a run have ended after one of them failed: the promise is ten seconds.

    python benchmarks/failure.py --rounds 3

Three ranks train; in the second iteration one raises, is killed, is stopped, or sleeps. The clock runs from there to the end of the last
rank that can end; of a hang, that it is one must be seen first, which takes the time after which it counts as one and a look. The cases are those of tests/faults, which hold what is said of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults.ranks import Case, finished, started

HANG = 6.0  # seconds without progress that are a hang, here
PROMISE, LOOK = 10.0, 5.0
CASES = (
    Case("raise", "backward", rank=2, layout="tensor"),
    Case("raise", "optimizer"),
    Case("kill", "optimizer"),
    Case("kill", "forward", layout="pipeline"),
    Case("stop", "reduce", hang=HANG),
    Case("sleep", "data", rank=2, layout="pipeline", hang=HANG),
)


def main() -> int:
    """Measure and print one line a case; 1 if the promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds, passed = parser.parse_args().rounds, True
    for case in CASES:
        seconds = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                (outcome,) = finished(started(case, Path(folder)))
            seconds.append(outcome.seconds)
        limit = PROMISE + case.notice + LOOK * (case.notice > 0)
        passed = passed and max(seconds) < limit
        print(
            f"  {case.how + ' in ' + case.phase:20} {case.layout:9} {statistics.median(seconds):5.1f} s ({min(seconds):.1f} .. {max(seconds):.1f}), "
            f"promised {limit:.0f}: {'kept' if max(seconds) < limit else 'BROKEN'}",
            flush=True,
        )
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
