"""finetune.py as a user starts it: every task from a checkpoint, resumed within an epoch, with a cache of the reference, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed import DataError
from megatron.core.parallel.boxes import whole_box
from megatron.evaluation.reward_model import RewardModel
from megatron.preference.reference_cache import _write_reference_cache, read_reference_cache, reference_cache_path
from megatron.training.checkpoint.formats import open_checkpoint

ROOT = Path(__file__).resolve().parents[3]
NETWORK = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --tokenizer-type "
    "ByteTokenizer --position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 32 --disable-bias-linear "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant --log-interval 1 --eval-iters 0"
)
IDENTITY = {"answers": "a", "tokenizer": "t", "reference": "r", "task": "kto"}


def run(folder: Path, script: str, words: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the checkout, or the command `megatron`, and return what it said."""
    program = ["-m", script] if script == "megatron" else [str(ROOT / script)]
    return subprocess.run(
        [sys.executable, *program, *words.split()],
        cwd=folder,
        env={**os.environ, "MEGATRON_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The log of a run that ended well."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def write_rows(folder: Path, *, answer: str = "yes") -> None:
    """Forty pairs, and forty judged answers."""
    pairs = [{"prompt": f"{n}?", "chosen": answer + "y" * (n % 5), "rejected": "no" + "o" * (n % 3)} for n in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    judged = [
        {"prompt": pair["prompt"], "completion": pair["chosen" if n % 2 else "rejected"], "label": bool(n % 2)}
        for n, pair in enumerate(pairs)
    ]
    (folder / "judged.jsonl").write_text("\n".join(map(json.dumps, judged)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows and a base."""
    folder = tmp_path_factory.mktemp("finetune")
    write_rows(folder)
    said(
        run(
            folder,
            "pretrain_gpt.py",
            f"{NETWORK} --train-iters 1 --mock-data --save base --attention-dropout 0 --hidden-dropout 0",
        )
    )
    return folder


def words_of(task: str, save: str) -> str:
    """What a run of a task is started with; half of the rows in an epoch are pairs or answers of their own samples."""
    rows = "judged" if task == "kto" else "pairs"
    return (
        f"--finetune-task {task} {NETWORK} --pretrained-checkpoint base --save {save} --load {save} --data-path {rows}.jsonl "
        "--split 100,0,0 --no-finetune-packing"
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What the last checkpoint of a run holds."""
    source = open_checkpoint(str(folder))
    return {
        name: source.read(name, whole_box(one.shape))
        for name, one in source.formats.items()
        if name.startswith("model.")
    }


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["dpo", "kto", "reward"])
def test_a_run_that_was_stopped_within_an_epoch_goes_on_bit_for_bit(place: Path, task: str) -> None:
    whole = said(run(place, "finetune.py", f"{words_of(task, task + '-whole')} --finetune-epochs 0.6"))
    assert "40 samples an epoch, 4 a step: 6 iterations" in whole and "preference loss" in whole
    said(
        run(
            place,
            "finetune.py",
            f"{words_of(task, task + '-parts')} --finetune-epochs 0.6 --exit-interval 3 --save-interval 3",
        )
    )
    rest = said(run(place, "finetune.py", f"{words_of(task, task + '-parts')} --finetune-epochs 0.6"))
    assert "iteration        4/" in rest and "iteration        3/" not in rest
    expected, found = weights(place / f"{task}-whole"), weights(place / f"{task}-parts")
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert ("model.score.weight" in found) == (task == "reward")
    if task == "reward":
        values = RewardModel.load(str(place / "reward-parts")).score(["1?yes", "1?no"])
        assert len(set(values)) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_a_cache_gives_the_same_run_and_is_refused_when_it_is_stale(place: Path, task: str) -> None:
    said(run(place, "finetune.py", f"{words_of(task, task + '-asked')} --train-iters 3"))
    cached = f"{words_of(task, task + '-cached')} --train-iters 3 --preference-reference-cache cache-{task}"
    assert "of 40 rows of" in said(run(place, "finetune.py", cached))
    expected, found = weights(place / f"{task}-asked"), weights(place / f"{task}-cached")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6, msg=name)
    write_rows(place, answer="yea")
    try:
        refused = run(place, "finetune.py", cached.replace("-cached", "-refused"))
    finally:
        write_rows(place)
    assert refused.returncode != 0
    assert "is stale: it was made with other answers" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    "name, reason",
    [
        ("answers", "other answers"),
        ("tokenizer", "another tokenizer"),
        ("reference", "another reference network"),
        ("task", "another task"),
    ],
)
def test_a_stale_cache_is_refused_with_what_differs(tmp_path: Path, name: str, reason: str) -> None:
    file = reference_cache_path(tmp_path, "rows.jsonl")
    assert read_reference_cache(file, IDENTITY) is None
    _write_reference_cache(file, np.zeros((3, 2)), IDENTITY)
    assert read_reference_cache(file, IDENTITY) is not None
    with pytest.raises(DataError, match=f"is stale: it was made with {reason} .* remove it, or give another"):
        read_reference_cache(file, {**IDENTITY, name: "x"})


def test_a_damaged_cache_is_refused(tmp_path: Path) -> None:
    file = reference_cache_path(tmp_path, "rows.jsonl")
    _write_reference_cache(file, np.zeros((3, 2)), IDENTITY)
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DataError, match="cannot be read: .*; remove it"):
        read_reference_cache(file, IDENTITY)
