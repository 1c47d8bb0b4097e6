"""The comparison as a command: its report, its JSON and its exit codes. docs/parity.md runs it on several ranks."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron.verify.parity import serial_comparison
from megatron.verify.parity.local_ranks import RankFailed
from tests.parity.defects import planted

ROOT = Path(__file__).resolve().parents[3]
FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 --global-batch-size 32 "
    "--train-iters 10 --lr 1e-3 --mock-data --bf16 --recompute-granularity full --recompute-method uniform"
)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.check_parity")


def report(tool: ModuleType, capsys: pytest.CaptureFixture[str], words: str, code: int) -> tuple[str, str]:
    """What the tool says, and what it says beside that, when it ends with this code."""
    with pytest.raises(SystemExit) as end:
        tool.main(words.split())
    assert end.value.code == code
    return tuple(capsys.readouterr())


def test_a_config_that_computes_the_same_is_said_to_and_what_was_shrunk(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    said, _ = report(tool, capsys, FLAGS, 0)
    assert said.startswith("every layout computes the same step: yes\n")
    assert "one rank against no axis = 1 rank; 2 layers of width 32" in said and "2 gradient norms" in said
    assert "    --num-layers 8 -> 2\n" in said and "--bf16 True -> False" in said and "not compared" not in said
    found = json.loads(report(tool, capsys, f"{FLAGS} --json", 0)[0])
    assert found["same"] and found["start"] is None and found["problems"] == [] and found["compared"] > 50
    assert found["counts"]["gradient"] == found["counts"]["weight"] > 0
    assert {"flag": "num_layers", "before": 8, "after": 2, "why": "", "lost": False} in found["changes"]


def test_a_layout_that_computes_something_else_says_where_it_begins(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with planted("recomputation draws other dropout"):
        said, _ = report(tool, capsys, f"{FLAGS} --hidden-dropout 0.1", 1)
    assert said.startswith("every layout computes the same step: no\n")
    assert "it begins in the forward pass, at embedding.dropout:\n" in said, "the second microbatch draws other numbers"
    assert (
        "the input of embedding.dropout, just before it, agrees" in said
        and "differ by more than 1e-10, the first of them:" in said
    )


def test_a_layout_that_does_not_run_is_said_with_the_rank(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankFailed("rank 1 of 2: ValueError: of its own")

    monkeypatch.setattr(serial_comparison, "run_on_local_ranks", fail)
    said, _ = report(tool, capsys, FLAGS, 1)
    assert "step: no" in said and "the layout does not run:\n    rank 1 of 2: ValueError: of its own" in said
    assert json.loads(report(tool, capsys, f"--json {FLAGS}", 1)[0])["failed"] == "rank 1 of 2: ValueError: of its own"


def test_a_question_that_cannot_be_read_ends_with_two(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    said, beside = report(
        tool, capsys, f"-- torchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS} --tensor-model-parallel-size 3", 2
    )
    assert said == "" and "megatron check-config says what to change" in beside
    assert "2 ranks are not a multiple of --tensor-model-parallel-size 3" in beside
    assert "--no-such-flag is not a flag" in report(tool, capsys, f"{FLAGS} --no-such-flag", 2)[1]
    assert report(tool, capsys, "", 2)[1].endswith("give the flags of a run\n--help says what each option takes\n")


def test_a_refusal_does_not_wait_for_torch() -> None:
    code = (
        "import sys; sys.argv = ['megatron', 'check-parity', '--num-layers', '0']; from megatron.cli.verbs import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["2", "False"], done.stdout + done.stderr
