"""examples/minimal_loop.py: it learns, and prints the same losses under every layout."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.helpers.world import Worlds

ROOT = Path(__file__).resolve().parents[3]
STEPS = 4
DRIVER = """
import sys
sys.path.insert(0, {root!r})
from tests.unit.cli.test_minimal_loop import printed
sys.stdout.write(printed({constants!r}))
"""


def printed(constants: dict[str, object]) -> str:
    """What the example prints with other constants at its top."""
    spec = importlib.util.spec_from_file_location("minimal_loop", ROOT / "examples" / "minimal_loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert constants.keys() <= vars(module).keys(), "the example's constants have other names now"
    vars(module).update(constants, STEPS=STEPS)
    with redirect_stdout(io.StringIO()) as text:
        module.main()
    return text.getvalue()


def numbers(text: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    found = re.findall(r"^step +(\d+)  loss ([\d.]+)  grad norm ([\d.]+)$", text, re.MULTILINE)
    assert [int(step) for step, _, _ in found] == list(range(1, STEPS + 1)), text
    return [(float(loss), float(norm)) for _, loss, norm in found]


@pytest.fixture(scope="module")
def serial() -> list[tuple[float, float]]:
    """The example as it stands, but shorter."""
    return numbers(printed({}))


def expect_same(found: list[tuple[float, float]], serial: list[tuple[float, float]]) -> None:
    """Equal but for the last digit that is printed."""
    for (loss, norm), (loss_alone, norm_alone) in zip(found, serial, strict=True):
        assert loss == pytest.approx(loss_alone, abs=2e-4) and norm == pytest.approx(norm_alone, abs=3e-3)


def test_the_example_learns(serial: list[tuple[float, float]]) -> None:
    assert abs(serial[0][0] - 5.55) < 0.1, "ln 257 is where an untrained model of bytes begins"
    assert serial[-1][0] < serial[0][0] - 0.3


@pytest.mark.parametrize(
    "constants", [{"TENSOR": 2}, {"PIPELINE": 2, "SHARDED": False}, {}], ids=["tensor", "pipeline", "sharded-data"]
)
def test_two_ranks_print_the_losses_of_one(
    world: Worlds, serial: list[tuple[float, float]], constants: dict[str, object]
) -> None:
    first, second = world(2).run(printed, constants)
    expect_same(numbers(first), serial)
    assert second == "", "only the first rank prints"


@pytest.mark.nightly
def test_torchrun_starts_it_and_it_prints_the_same(serial: list[tuple[float, float]], tmp_path: Path) -> None:
    script = tmp_path / "edited.py"
    script.write_text(DRIVER.format(root=str(ROOT), constants={"TENSOR": 2}))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            "localhost:0",
            str(script),
        ],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    expect_same(numbers(done.stdout), serial)
