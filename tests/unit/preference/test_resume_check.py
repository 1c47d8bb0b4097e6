"""megatron checkpoint resume-check certifies runs of finetune.py: weights, optimizer, counters, and which evaluation was the best."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from megatron.cli.commands.checkpoint import resume_check
from megatron.core.dist_checkpointing.checkpoint_folders import iteration_of_best_link
from megatron.preference.arguments import parse_preference_args
from megatron.preference.data import (
    ReferenceScoredBatches,
    make_finetune_dataset_kind,
    preference_data_provider,
    with_epoch_iterations,
)
from megatron.preference.step import PreferenceStep
from megatron.training.initialize import initialize_megatron
from megatron.training.loop import pretrain
from pretrain_gpt import datasets_provider, model_provider
from tests.helpers.architecture import ROOT
from tests.unit.cli.test_checkpoint_resume_check import RanksHere
from tests.unit.preference.test_finetune_command import NETWORK, run, said, words_of, write_rows

STEPS = 2
EVALUATED = (
    "--train-iters 4 --split 80,20,0 --full-validation --eval-interval 1 --save-best loss --data-cache-path cache"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows and a base."""
    folder = tmp_path_factory.mktemp("resumed")
    write_rows(folder)
    still = "--train-iters 1 --mock-data --save base --attention-dropout 0 --hidden-dropout 0"
    said(run(folder, "pretrain_gpt.py", f"{NETWORK} {still}"))
    return folder


def words(task: str, base: Path) -> list[str]:
    """What the entry script is given; folders of checkpoints are the tool's."""
    given = words_of(task, "unused").replace("--save unused --load unused", "").replace("--split 100,0,0", EVALUATED)
    return [
        str(base / word) if word in ("base", "pairs.jsonl", "judged.jsonl", "cache") else word for word in given.split()
    ]


class FinetunedHere(RanksHere):
    """A run of finetune.py in this process, to its end."""

    def __init__(self, command: Sequence[str], count: int, output: Path) -> None:
        self.failure = ""
        checked, preference = parse_preference_args(command[2:], world_size=1, speaks=True)
        logging.getLogger("megatron").handlers.clear()
        started = initialize_megatron(checked)
        kind = make_finetune_dataset_kind(started, preference)
        pretrain(
            with_epoch_iterations(started, preference, kind),
            datasets_provider,
            model_provider,
            PreferenceStep(preference),
            data_of=preference_data_provider(preference, kind),
        )
        logging.getLogger("megatron").handlers.clear()


def test_a_resumed_run_of_kto_is_certified_and_one_that_reads_other_answers_is_not(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resume_check, "RankProcesses", FinetunedHere)
    check = partial(
        resume_check.run_resume_check,
        resume_check.ResumeCheckPlan(ROOT / "finetune.py", tuple(words("kto", base)), 1, STEPS, tmp_path),
    )
    assert check([]) and "bit for bit" in capsys.readouterr().out
    assert iteration_of_best_link(tmp_path / "straight") == iteration_of_best_link(tmp_path / "killed") is not None
    begin = ReferenceScoredBatches.prepare_step

    def one_late(self: ReferenceScoredBatches, count: int) -> int:
        trainer = self._trainer
        if (
            trainer.stages[0].training
            and trainer.progress.iteration == STEPS
            and not trainer.run.config.checkpoint.load
        ):
            next(self._inner)
        return begin(self, count)

    for folder in ("straight", "killed"):
        (tmp_path / folder).rename(tmp_path / f"first-{folder}")
    monkeypatch.setattr(ReferenceScoredBatches, "prepare_step", one_late)
    assert not check([]) and "DIFFER" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("more", ["", "--lora-rank 2", "--preference-reference-cache cache"])
@pytest.mark.parametrize("task", ["dpo", "kto", "reward"])
def test_a_killed_run_of_two_ranks_goes_on_bit_for_bit(base: Path, tmp_path: Path, task: str, more: str) -> None:
    if task == "reward" and more:
        more = "--lora-rank 2 --lora-modules-to-save score.weight" if "lora" in more else "--reward-centre 0.01"
    more = more.replace(" cache", f" {tmp_path / 'reference'}")
    tool = f"--steps {STEPS} --nproc 2 --entry {ROOT / 'finetune.py'} --workdir {tmp_path / 'work'}"
    out = said(run(base, "megatron", " ".join(["checkpoint resume-check", tool, *words(task, base), more])))
    assert "bit for bit" in out
    assert (
        iteration_of_best_link(tmp_path / "work" / "straight")
        == iteration_of_best_link(tmp_path / "work" / "killed")
        is not None
    )
