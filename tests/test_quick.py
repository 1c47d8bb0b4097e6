"""`--quick` leaves out tests, but no feature of the parity table and no package of the unit tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import PurePath

from tests import quick
from tests.parity import half_rows
from tests.parity.table import LAYOUT_WORDS, MODELS, NUMBERED_WORDS, read_layout


def test_every_word_of_the_table_and_every_format_stands_in_a_quick_row() -> None:
    rows = quick.covering(quick.ALL_ROWS)
    words = {word for layout, *_ in rows for word in layout.split()}
    assert set(LAYOUT_WORDS) - words == set(), "switches of no quick row"
    sizes = {re.sub(r"(?<==).*|\d+$", "", word) for word in words - set(LAYOUT_WORDS)}
    assert {*NUMBERED_WORDS, "dp"} - sizes == set(), "sizes of no quick row"
    assert set(MODELS) - {model for _, model, *_ in rows} == set(), "networks of no quick row"
    assert {flag for *_, flags in half_rows.ROWS for flag in flags} - {
        flag for row in rows for flag in row[2:]
    } == set()


def test_quick_rows_are_few_and_mostly_of_two_ranks() -> None:
    rows = quick.covering(quick.ALL_ROWS)
    assert len(set(rows)) == len(rows) <= len(MODELS) + len(LAYOUT_WORDS)
    assert sum(read_layout(layout)[0] for layout, *_ in rows) < 4 * len(rows)


def test_one_file_of_every_package_of_unit_tests_is_quick() -> None:
    missing = [file for file in quick.FILES if not (quick.ROOT / file).is_file()]
    assert not missing, f"tests/quick.py names files that are not there: {missing}"
    packages = {path.parent.relative_to(quick.ROOT).as_posix() for path in (quick.ROOT / quick.UNIT).rglob("test_*.py")}
    named = [PurePath(file).parent.as_posix() for file in quick.FILES if file.startswith(quick.UNIT)]
    assert sorted(named) == sorted(packages)


def test_the_option_chooses_files_and_rows() -> None:
    command = [sys.executable, "-m", "pytest", "--quick", "--collect-only", "-n0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/parity", "tests/unit/models"], cwd=quick.ROOT, capture_output=True, text=True, check=True
    )
    found = done.stdout.splitlines()
    assert {line.split("::")[0] for line in found if "::" in line} == {
        "tests/parity/test_layouts.py",
        "tests/unit/models/test_gpt.py",
    }
    table = [line for line in found if "test_a_row_of_the_table" in line or "test_half_precision" in line]
    assert len(table) == len(quick.covering(quick.ALL_ROWS))
