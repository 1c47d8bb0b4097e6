"""The checker as a command: its report, its JSON, its exit codes, and launchers."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
GOOD = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 --global-batch-size 32 "
    "--train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000"
)
TP8 = "--tensor-model-parallel-size 8"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.check_config")


def report(tool: ModuleType, capsys: pytest.CaptureFixture[str], words: str, code: int) -> str:
    """What the tool says when it ends with this code."""
    with pytest.raises(SystemExit) as end:
        tool.main(words.split())
    assert end.value.code == code
    return capsys.readouterr().out


def test_flags_that_keep_every_rule_are_said_to(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        f"{GOOD} --world-size 8",
        f"--world-size 8 -- {GOOD}",
        f"-- torchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt.py {GOOD}",
    ):
        assert report(tool, capsys, words, 0) == "all rules are kept on 8 ranks\n"


def test_broken_rules_come_with_their_numbers_and_what_keeps_each(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    said = report(tool, capsys, f"{GOOD} --world-size 8 {TP8} --ffn-hidden-size 100 --fp16 --bf16", 2)
    assert "2 rules are broken on 8 ranks" in said
    assert (
        "  ffn-over-tensor\n    --ffn-hidden-size 100 cannot be divided over --tensor-model-parallel-size 8; choose 96 or 104\n"
        "      try --ffn-hidden-size 100 -> 104, or --tensor-model-parallel-size 8 -> 4\n"
    ) in said
    assert "keep one\n      try leave out --fp16, or leave out --bf16\n" in said


def test_why_not_says_what_would_break_and_what_else_must_change(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    said = report(
        tool, capsys, f"{GOOD} --ffn-hidden-size 100 --world-size 8 --why-not tensor-model-parallel-size=8", 2
    )
    assert said.startswith("With tensor-model-parallel-size=8: 1 rule is broken") and "ffn-over-tensor" in said
    assert said.endswith("      try --ffn-hidden-size 100 -> 104\n")
    assert "--tensor-model-parallel-size 8 ->" not in said
    kept = report(
        tool, capsys, f"{GOOD} --world-size 8 --why-not tensor-model-parallel-size=4 --why-not sequence-parallel", 0
    )
    assert kept == "With tensor-model-parallel-size=4, sequence-parallel: all rules are kept on 8 ranks\n"


def test_why_not_can_ask_about_the_ranks_and_tells_what_was_broken_before(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    said = report(tool, capsys, f"{GOOD} --fp16 --bf16 --world-size 8 --why-not world-size=6", 2)
    assert "2 rules are broken on 6 ranks" in said and "--global-batch-size 32 is not a multiple" in said
    assert "--fp16 and --bf16 contradict each other; keep one  (broken without it, too)" in said
    assert "ranks 6" not in said, "the ranks are what was asked about"


def test_the_report_is_there_as_json(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(report(tool, capsys, f"{GOOD} --global-batch-size 30 --world-size 8 --json", 2))
    assert not found["kept"] and found["ranks"] == 8 and [one["rule"] for one in found["broken"]] == ["global-batch"]
    (edit,) = found["broken"][0]["edits"]
    assert (edit["flag"], edit["before"], edit["after"]) == ("--global-batch-size", 30, 32)
    assert edit["text"] == "--global-batch-size 30 -> 32"
    good = json.loads(report(tool, capsys, f"{GOOD} --json", 0))
    assert good["kept"] and good["broken"] == [] and good["built"] is None


def test_build_counts_what_is_built(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    said = report(
        tool, capsys, f"{GOOD} {TP8} --world-size 8 --build --true-vocab-size 1000 --make-vocab-size-divisible-by 1", 0
    )
    # By hand: vocabulary and places, eight layers of 12 h^2 + 13 h, and the last norm.
    assert f"built 8 places: 8 layers and {64 * (1000 + 32) + 8 * (12 * 64**2 + 13 * 64) + 2 * 64:,} parameters" in said
    assert "built" not in report(tool, capsys, f"{GOOD} --fp16 --bf16 --build", 2)


def test_flags_that_cannot_be_read_are_listed_with_the_broken_rules(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    said = report(tool, capsys, f"{GOOD} --fp16 --bf16 --num-leyers 3", 2)
    assert (
        "--num-leyers is not a flag; did you mean --num-layers" in said
        and "number-formats" in said
        and "leave out --fp16" in said
    )
    assert "nofile cannot be read" in report(tool, capsys, "--yaml-cfg nofile", 2)


def test_a_question_without_flags_has_a_code_of_its_own(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    report(tool, capsys, "--world-size 8", 2)


def test_a_word_before_the_command_that_is_no_option_is_refused(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        tool.main(["--tries", "3", "--", "torchrun", "pretrain_gpt.py", *GOOD.split()])
    assert end.value.code == 2 and "--tries 3 is no option of this command" in capsys.readouterr().err


def test_the_page_of_rules_is_written(tool: ModuleType, tmp_path: Path) -> None:
    tool.main(["--write-rules", str(tmp_path / "rules.md")])
    assert (tmp_path / "rules.md").read_text().startswith("# Rules between settings\n")


def test_a_launcher_hands_its_command_over() -> None:
    environment = {**os.environ, "LAUNCH": f"{sys.executable} -m megatron check-config --"}
    words = [
        "bash",
        str(ROOT / "examples/gpt3/train_gpt3_175b_distributed.sh"),
        "save",
        "board",
        "vocab",
        "merges",
        "corpus",
    ]
    done = subprocess.run(
        [*words, "--pipeline-model-parallel-size", "7"],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert (
        "--num-layers 96 cannot be divided over 7 pipeline ranks" in done.stdout
        and "      try --num-layers 96 -> 98" in done.stdout
    )
