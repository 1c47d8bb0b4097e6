"""The layout tool: its tables against the parts that a run would build, and its refusals."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from megatron.core.config.plan.layers import partition_into_stages, uniform_layer_plans
from megatron.core.models.gpt import GPTModel
from tests.helpers import tiny

ROOT = Path(__file__).resolve().parents[3]
SHAPE = "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --make-vocab-size-divisible-by 4".split()


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.show_layout")


def shown(tool: ModuleType, capsys: pytest.CaptureFixture[str], options: str, flags: str = "") -> str:
    """What the tool prints."""
    tool.main([*options.split(), "--", *SHAPE, *flags.split()])
    return capsys.readouterr().out


def refusal(tool: ModuleType, capsys: pytest.CaptureFixture[str], options: str, flags: str) -> str:
    """What the tool says when it exits with 2."""
    with pytest.raises(SystemExit) as caught:
        tool.main([*options.split(), "--", *SHAPE, *flags.split()])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_groups_are_megatrons(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(
        tool,
        capsys,
        "--world-size 8",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8",
    )
    rows = dict(re.findall(r"^  (\w+): +(.+)$", text, re.MULTILINE))
    # tensor innermost, then data, then pipeline
    assert rows["tensor"] == "0 1  2 3  4 5  6 7"
    assert rows["data"] == "0 2  1 3  4 6  5 7"
    assert rows["pipeline"] == "0 4  1 5  2 6  3 7"


def test_an_axis_of_one_rank_is_left_out(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(tool, capsys, "--world-size 2", "--global-batch-size 4")
    assert "  data:           0 1\n" in text and "tensor:" not in text and "pipeline:" not in text


def test_parameters_are_those_that_the_stages_build(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(
        tool,
        capsys,
        f"--world-size 2 --true-vocab-size {tiny.VOCABULARY}",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4",
    )
    run = tiny.run_of(tiny.config(1, num_layers=8, num_attention_heads=4))
    built = [0, 0]
    for stage in partition_into_stages(uniform_layer_plans(8), pp=2, vpp=2):
        built[stage.rank] += sum(param.numel() for param in GPTModel(stage, run.layer_build_context).parameters())
    found = re.findall(r"^  (\d) +((?:E )?\d-\d \| \d-\d(?: L)?) +([\d,]+)", text, re.MULTILINE)
    assert [(rank, layers) for rank, layers, _ in found] == [("0", "E 0-1 | 4-5"), ("1", "2-3 | 6-7 L")]
    assert [int(count.replace(",", "")) for *_, count in found] == built


def test_the_network_of_gpt3_has_its_size(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    h, layers, s, vocabulary = 12288, 96, 2048, 51200
    tool.main(
        [
            "--world-size",
            "128",
            "--",
            *f"--num-layers {layers} --hidden-size {h} --num-attention-heads 96 --seq-length {s} "
            "--micro-batch-size 1 --global-batch-size 1536 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16".split(),
        ]
    )
    total = layers * (12 * h * h + 13 * h) + (vocabulary + s) * h + 2 * h
    assert f"{total:,} parameters, vocabulary padded to 51,200" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, ranks, chunks, microbatches",
    [
        ("--pipeline-model-parallel-size 2", 2, 1, 8),
        ("--pipeline-model-parallel-size 4", 4, 1, 8),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", 4, 2, 8),
    ],
)
def test_the_bubble_is_that_of_the_theory(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], flags: str, ranks: int, chunks: int, microbatches: int
) -> None:
    text = shown(tool, capsys, f"--world-size {ranks}", f"{flags} --global-batch-size {microbatches}")
    bubble = (ranks - 1) / (chunks * microbatches + ranks - 1)
    assert f"{microbatches} microbatches a step over {ranks * chunks} stages, bubble {bubble:.1%}" in text
    drawn = [line for line in text.splitlines() if re.match(r"r\d ", line)]
    assert len(drawn) == ranks and all(str(microbatches - 1) in line for line in drawn)


def test_the_schedule_can_be_drawn(tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "schedule.svg"
    shown(tool, capsys, f"--world-size 2 --picture {picture}", "--pipeline-model-parallel-size 2 --global-batch-size 4")
    text = picture.read_text()
    assert "<svg" in text and 'id="F1.3"' in text


def test_layouts_that_cannot_be_are_refused_with_every_reason(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal(
        tool,
        capsys,
        "--world-size 12",
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 3 --global-batch-size 8",
    )
    for words in (
        "12 ranks are not a multiple of",
        "--num-attention-heads 4 cannot be divided",
        "--num-layers 8 cannot be divided over 3",
    ):
        assert words in text, text


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--num-leyers 3", "--num-leyers is not a flag; did you mean --num-layers"),
        ("--tensor-model-parallel-size 0", "each must be at least 1"),
        ("--micro-batch-size 0", "each must be at least 1"),
    ],
)
def test_mistakes_are_named(tool: ModuleType, capsys: pytest.CaptureFixture[str], flags: str, words: str) -> None:
    assert words in refusal(tool, capsys, "--world-size 4", flags)


def test_what_is_missing_is_named(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--world-size", "2", "--", "--num-layers", "2"])
    assert (
        "--hidden-size, --num-attention-heads, --seq-length, --micro-batch-size must be given"
        in capsys.readouterr().err
    )


def test_the_groups_of_experts_and_what_a_token_uses_are_shown(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(
        tool,
        capsys,
        "--world-size 4",
        "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --expert-model-parallel-size 2",
    )
    assert "experts:        0 1  2 3" in said and "expert data:    0 2  1 3" in said
    total, active = (
        int(number.replace(",", ""))
        for number in re.search(r"([\d,]+) parameters, ([\d,]+) of them used by a token", said).groups()
    )
    assert total - active == 8 * 3 * (2 * 32 * 128 + 128 + 32)  # layers, idle experts, an expert
    assert "experts:" not in shown(tool, capsys, "--world-size 4")
