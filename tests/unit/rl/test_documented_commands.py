"""The commands of docs/rl.md and the examples of RL and DPO that take minutes or several ranks, started once as written, with small sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks
from tests.unit.rl.test_train_rl import NETWORK, environments, run

pytestmark = pytest.mark.nightly
SMALL = {
    "--grpo-prompts-per-step": "4",
    "--grpo-group-size": "2",
    "--rl-max-new-tokens": "4",
    "--seq-length": "16",
    "--train-iters": "2",
}
NOT_RUN = [
    block for block in blocks((ROOT / "docs" / "rl.md").read_text()) if block.left_out and "torchrun" in block.text
]


def small(words: str) -> str:
    """The words with small sizes in the place of the page's."""
    for name, value in SMALL.items():
        words = re.sub(rf"{name} \S+", f"{name} {value}", words)
    return words


@pytest.mark.parametrize("block", [pytest.param(one, id=one.left_out) for one in NOT_RUN if "Ray" not in one.left_out])
def test_a_command_of_the_page_trains(block: object, tmp_path: Path) -> None:
    text = block.text.replace("\\\n", " ")  # type: ignore[attr-defined]
    ranks, words = re.search(r"torchrun --nproc_per_node (\d+) train_rl.py (.*)", text).groups()  # type: ignore[union-attr]
    environments(tmp_path)
    made = run(tmp_path, "pretrain_gpt.py", f"{NETWORK} --train-iters 1 --mock-data --eval-iters 0 --save base")
    assert made.returncode == 0, made.stderr
    given = f"{NETWORK} --micro-batch-size 1 --train-iters 2 --grpo-prompts-per-step 4 --rl-max-new-tokens 4 --grpo-iterations 1"
    given += " --langrl-env-config environments.yaml --grpo-kl-beta 0"
    words = small(words.replace("...", given))
    done = run(tmp_path, "train_rl.py", words, ranks=int(ranks))
    assert done.returncode == 0 and "round 1: reward" in done.stdout, done.stdout + done.stderr


SIZES = {
    "examples/rl/run.sh": (
        {"--train-iters 300": "--train-iters 2", "--train-iters 500": "--train-iters 2", "20000": "200"},
        2,
    ),
    "examples/dpo/run.sh": ({"--train-iters 150": "--train-iters 2", "--train-iters 30": "--train-iters 2"}, 1),
}


@pytest.mark.parametrize("script", SIZES)
def test_an_example_comes_to_its_end(script: str, tmp_path: Path) -> None:
    for name in ROOT.iterdir():
        if name.name not in (".git", "runs", "examples", ".pytest_cache"):
            (tmp_path / name.name).symlink_to(name)
    sizes, ranks = SIZES[script]
    for folder in (ROOT / "examples").iterdir():
        (tmp_path / "examples").mkdir(exist_ok=True)
        if folder.name != script.split("/")[1]:
            (tmp_path / "examples" / folder.name).symlink_to(folder)
    for file in (ROOT / script).parent.iterdir():
        text = file.read_text()
        for old, new in sizes.items() if file.name == "run.sh" else ():
            assert old in text, f"{script} has other sizes than this test knows"
            text = text.replace(old, new)
        place = tmp_path / "examples" / script.split("/")[1] / file.name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    done = subprocess.run(
        ["bash", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "MEGATRON_DEVICE": "cpu",
            "GPUS_PER_NODE": str(ranks),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        },
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )
    end = "the policy has not learned" if "rl" in script else 'answers that begin with "Good morning"'
    assert end in done.stdout + done.stderr, done.stdout + done.stderr
