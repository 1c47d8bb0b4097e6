"""A run and `megatron check-config` say the same of a command line, whatever it is: random ones are put to both."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.cli.arguments import WHERE_TO_LOOK, make_parser, parse_args
from megatron.cli.commands import check_config
from megatron.cli.preflight import problems_of_config_error
from megatron.core.config.flags.declare import ConfigError
from megatron.plan.command import ENTRIES

ROOT = Path(__file__).resolve().parents[3]
BASE = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 4 --lr 1e-3".split()
BYTES = "--tokenizer-type ByteTokenizer --mock-data".split()
ENCODER = "--tokenizer-type BertWordPieceLowerCase --mock-data --vocab-file vocab.txt".split()
# What rules beside those between settings speak of; the parser's own flags come on top.
PIECES = tuple(
    words.split()
    for words in (
        "--tokenizer-type NullTokenizer",
        "--tokenizer-type NullTokenizer --vocab-size 0",
        "--tokenizer-type NullTokenizer --vocab-size 40",
        "--tokenizer-type WordPiece",
        "--tokenizer-type GPT2BPETokenizer --vocab-file nowhere.json",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model vocab.txt",
        "--tokenizer-type TikTokenizer --tokenizer-model vocab.txt",
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model vocab.txt",
        "--vocab-extra-ids -1",
        "--padded-vocab-size 8",
        "--padded-vocab-size 300",
        "--tiktoken-pattern v1",
        "--attention-backend flash --attention-logit-softcap 50",
        "--attention-backend flash",
        "--attention-backend flex",
        "--attention-backend unfused --attention-logit-softcap 50",
        "--transformer-impl local",
        "--cuda-graph-impl local",
        "--fp8-format hybrid",
        "--compile",
        "--no-mock-data --data-path nowhere",
        "--no-mock-data --data-path 0.5 nowhere 0.5",
        "--no-mock-data --data-args-path nowhere",
        "--sft --no-mock-data --data-path vocab.txt",
        "--save vocab.txt/save",
        "--save here",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--num-experts 4",
        "--expert-tensor-parallel-size 2",
        "--distributed-backend nccl",
        "--bf16",
        "--fp16 --bf16",
        "--elastic --global-batch-size 8",
        "--load nowhere",
        "--not-a-flag",
    )
)


def drawn(seed: int) -> tuple[str, int, list[str]]:
    """(entry, ranks, flags) of a random command line."""
    rng = random.Random(seed)
    entry = rng.choice(("pretrain_gpt.py", "pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py"))
    words = [*BASE, *(BYTES if entry == "pretrain_gpt.py" else ENCODER)]
    actions = [action for action in make_parser()._actions if "--help" not in action.option_strings]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        words += rng.choice(PIECES)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        words += spelled(rng.choice(actions), rng)
    return entry, rng.choice((1, 1, 2, 4, 6)), words


def spelled(action: argparse.Action, rng: random.Random) -> list[str]:
    """A flag of the parser with values of its kind, at the edges and beyond, or of none."""
    flag = rng.choice(action.option_strings)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return [flag]
    pool = (
        [*map(str, action.choices)]
        if action.choices
        else {int: ["-1", "0", "1", "2", "3", "64", "1021"], float: ["-0.5", "0", "0.1", "1", "2.5", "nan", "inf"]}.get(
            action.type, ["", "nowhere", "vocab.txt", "8"]
        )
    )
    return [
        flag,
        *(
            rng.choice([*pool, "odd"] if rng.random() < 0.1 else pool)
            for _ in range(1 if action.nargs is None else rng.choice((1, 1, 2)))
        ),
    ]


def of_the_run(entry: str, ranks: int, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """(exit code, lines) of the run's own start, up to where ranks join."""
    for name, value in (("WORLD_SIZE", str(ranks)), ("RANK", "0"), ("LOCAL_RANK", "0"), ("MEGATRON_DEVICE", "cpu")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MEGATRON_STAND_BY", raising=False)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            parse_args(list(words), defaults=ENTRIES[entry].defaults(words), world_size=ranks, reads_data="datasets")
        except SystemExit as end:
            text, _, rest = stderr.getvalue().partition(f"\n{WHERE_TO_LOOK}\n")
            assert not rest, rest
            return int(end.code or 0), problems_of_config_error(
                ConfigError(text.removeprefix("ConfigError: ").strip("\n"))
            )
    return 0, []


def of_the_tool(entry: str, ranks: int, words: Sequence[str]) -> tuple[int, list[str]]:
    """(exit code, lines) of the tool."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout, pytest.raises(SystemExit) as end:
        check_config.main(["--world-size", str(ranks), "--json", "--", "torchrun", entry, *words])
    return int(end.value.code or 0), [one["says"] for one in json.loads(stdout.getvalue())["broken"]]


def compare(seeds: range, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both answers to random command lines."""
    monkeypatch.chdir(folder)
    (folder / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b")) + "\n")
    different, codes = [], []
    for seed in seeds:
        entry, ranks, words = drawn(seed)
        tool, run = of_the_tool(entry, ranks, words), of_the_run(entry, ranks, words, monkeypatch)
        codes.append(run[0])
        if tool != run:
            different.append(
                f"seed {seed}: {entry} on {ranks}: {' '.join(words[len(BASE) :])}\n  the tool {tool}\n  the run  {run}"
            )
    assert not different, "\n".join(different)
    assert len(codes) < 20 or {0, 2} == {*codes} and min(codes.count(0), codes.count(2)) > len(codes) // 10


def test_the_checker_and_the_run_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(range(40), tmp_path, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 3000, 500))
def test_the_checker_and_the_run_say_the_same_of_many(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(range(first, first + 500), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--attention-backend flash --attention-logit-softcap 50 --tokenizer-type ByteTokenizer --mock-data",
            "--attention-backend flash cannot be used",
        ),
        (
            "--tokenizer-type HuggingFaceTokenizer --mock-data",
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model; give it",
        ),
        ("--tokenizer-type ByteTokenizer --data-path nowhere", "nowhere.bin cannot be opened"),
        (
            "--tokenizer-type ByteTokenizer --mock-data --freeze nowhere nowhere",
            "--freeze nowhere matches no parameter",
        ),
    ],
)
def test_what_only_a_kernel_a_tokenizer_or_a_file_refuses_is_refused_by_both(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tool = of_the_tool("pretrain_gpt.py", 1, [*BASE, *words.split()])
    assert tool == of_the_run("pretrain_gpt.py", 1, [*BASE, *words.split()], monkeypatch)
    assert tool[0] == 2 and any(line.startswith(message) for line in tool[1]), tool


@pytest.mark.parametrize(
    "entry, words, message",
    [
        ("pretrain_bert.py", BYTES, "BERT needs [CLS], [SEP], [MASK]"),
        ("pretrain_t5.py", [*BYTES, "--decoder-seq-length", "8"], "T5 needs begin of text"),
        (
            "pretrain_vision_classify.py",
            "--mock-data --img-h 8 --img-w 8 --patch-dim 4 --num-classes 3".split(),
            "--mock-data: an image classifier reads a folder",
        ),
        (
            "pretrain_gpt.py",
            [*BYTES, "--fim-data", "--fim-rate", "0.5"],
            "--fim-prefix-token '<fim_prefix>' is not one",
        ),
    ],
)
def test_a_tokenizer_without_the_tokens_that_samples_need_is_refused_by_both(
    entry: str, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        *(BASE if "vision" not in entry else [word for word in BASE if word not in ("--seq-length", "16")]),
        *words,
    ]
    tool = of_the_tool(entry, 1, words)
    assert tool == of_the_run(entry, 1, words, monkeypatch)
    assert tool[0] == 2 and any(line.startswith(message) for line in tool[1]), tool


@pytest.mark.parametrize("script", [*ENTRIES, "tasks/main.py"])
def test_every_entry_script_asks_before_it_starts(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *BASE,
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        *(["--task", "LAMBADA", "--valid-data", "x", "--load", "y"] if "/" in script else ["--mock-data"]),
    ]
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr().err.count("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model; give it") == 1


@pytest.mark.parametrize("script", ["pretrain_hybrid.py", "pretrain_mamba.py"])
def test_scripts_of_hybrids_refuse_a_network_whose_layers_have_no_state(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "no flag says which layers have a state: give --hybrid-layer-pattern (MMMM for Mamba-2 in all of --num-layers 4)"
    monkeypatch.setattr(sys, "argv", [script, *BASE, *BYTES])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 2 and message in capsys.readouterr().err
    code, lines = of_the_tool(script, 1, [*BASE, *BYTES])
    assert code == 2 and any(line.startswith(message) for line in lines), lines
    small = ["--mamba-head-dim", "8", "--mamba-num-groups", "2"]
    for told in (
        "--hybrid-layer-pattern MMMM",
        "--hybrid-attention-ratio 0.25",
        "--experimental-attention-variant gdn",
    ):
        assert of_the_tool(script, 1, [*BASE, *BYTES, *small, *told.split()]) == (0, [])


def test_a_launcher_shows_a_refusal_once(tmp_path: Path) -> None:
    words = [*BASE, *BYTES, "--attention-backend", "flash"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            str(ROOT / "pretrain_gpt.py"),
            *words,
        ],
        cwd=tmp_path,
        env={**os.environ, "MEGATRON_DEVICE": "cpu"},
        text=True,
        capture_output=True,
        timeout=300,
    )
    shown = done.stdout + done.stderr
    assert done.returncode != 0 and shown.count("--attention-backend flash cannot be used") == 1, shown
    assert "exitcode  : 2" in shown, shown
