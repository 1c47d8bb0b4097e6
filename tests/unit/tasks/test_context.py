"""What is wrong with a task's flags is said before ranks join."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers.architecture import ROOT

BASE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --valid-data x".split()
BYTES = ["--tokenizer-type", "ByteTokenizer"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("--task LAMBADA --load y --context-parallel-size 2", "leave out --context-parallel-size"),
        ("--task MNLI --load y", "this task needs a tokenizer with the tokens cls, sep, pad"),
        ("--task MNLI --epochs 1 --lr 1e-3", "--epochs 1 of --task MNLI need --train-data"),
        ("--task RACE", "--task RACE without --epochs evaluates a finetuned model"),
    ],
)
def test_a_task_is_refused_by_its_flags(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tasks/main.py", *BASE, *BYTES, *words.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "tasks" / "main.py"), run_name="__main__")
    assert end.value.code == 2 and message in capsys.readouterr().err
