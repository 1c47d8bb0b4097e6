"""Checkpoints that the real Megatron Core wrote: a run that goes on from them has the losses of Megatron's own continuation."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.training.arguments import read_args
from megatron.training.initialize import initialize_megatron
from megatron.training.loop import pretrain
from tests.peers.cases import CASES, LAST, RELEASES, RUN, SAVED
from tests.peers.make_fixtures import VERSION, cases_of, install, newest_version, run_case, unpack

TOLERANCE = 1e-5
# What a user gives again: the settings of training. The network, its tokenizer and the sequence length are the checkpoint's.
TRAINING = [word for name in ("micro_batch_size", "global_batch_size", "train_iters", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters",
                              "lr_decay_iters", "weight_decay", "clip_grad", "adam_beta2", "attention_dropout", "hidden_dropout",
                              "make_vocab_size_divisible_by", "split", "eval_iters", "log_interval")
            for word in (f"--{name.replace('_', '-')}", str(RUN[name]))]


def losses_of_continuation(folder: Path, *flags: str) -> dict[int, float]:
    """Iteration -> loss of a run of ours that goes on from a fixture."""
    log = folder / "ours.jsonl"
    logging.getLogger("megatron").handlers.clear()
    run = initialize_megatron(read_args([
        "--use-checkpoint-args", *flags, "--data-path", str(folder / "tokens"), *TRAINING, "--num-workers", "0", "--log-jsonl", str(log)]))
    try:
        pretrain(run, pretrain_gpt.datasets, pretrain_gpt.model, pretrain_gpt.forward_step, pretrain_gpt.samples)
    finally:
        logging.getLogger("megatron").handlers.clear()
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    return {step["iteration"]: step["losses"]["lm loss"] for step in steps if step["kind"] == "step"}


def losses_of_megatron(folder: Path) -> dict[int, float]:
    """Iteration -> loss of Megatron's own run, before and after the checkpoint."""
    return {step["iteration"]: step["loss"] for step in json.loads((folder / "losses.json").read_text())}


def demand_its_losses(ours: dict[int, float], theirs: dict[int, float]) -> None:
    """The five losses after the checkpoint are Megatron's; later ones are only if moments and counters were too."""
    compared = range(SAVED + 1, LAST + 1)
    assert [ours[step] for step in compared] == pytest.approx([theirs[step] for step in compared], abs=TOLERANCE)


WRITTEN = [(version, name) for version in (VERSION, *RELEASES) for name in cases_of(version)]


@pytest.mark.parametrize("version, name", WRITTEN, ids="-".join)
def test_a_run_goes_on_from_megatrons_checkpoint_with_megatrons_losses(version: str, name: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path, version=version)
    demand_its_losses(losses_of_continuation(folder, "--load", str(folder / "checkpoints")), losses_of_megatron(folder))


def test_checkpoint_args_are_taken_from_a_pretrained_checkpoint_and_the_run_starts_at_its_first_iteration(tmp_path: Path) -> None:
    folder = unpack("gqa", tmp_path)
    ours = losses_of_continuation(folder, "--pretrained-checkpoint", str(folder / "checkpoints"))
    assert sorted(ours) == list(range(1, LAST + 1))


@pytest.mark.parametrize("flags, expected", [([], False), (["--calculate-per-token-loss"], True), (["--finetune"], True)])
def test_the_loss_is_megatrons_mean_unless_the_command_line_says_otherwise(flags: list[str], expected: bool, tmp_path: Path) -> None:
    folder = unpack("gqa-torch", tmp_path)
    args = read_args([*TRAINING, "--use-checkpoint-args", "--load", str(folder / "checkpoints"), "--data-path", str(folder / "tokens"), *flags])
    assert (args.calculate_per_token_loss, args.seq_length, args.tokenizer_type) == (expected, RUN["seq_length"], "NullTokenizer")


@pytest.mark.nightly
@pytest.mark.parametrize("version, name", WRITTEN, ids="-".join)
def test_the_package_on_pypi_still_writes_the_fixtures(version: str, name: str, tmp_path: Path,
                                                       tmp_path_factory: pytest.TempPathFactory) -> None:
    package = install(tmp_path_factory.getbasetemp(), version)
    (tmp_path / "again").mkdir()
    run_case(name, package, tmp_path / "again")
    again, fixture = losses_of_megatron(tmp_path / "again"), losses_of_megatron(unpack(name, tmp_path, version=version))
    assert [again[step] for step in again] == pytest.approx([fixture[step] for step in again], abs=TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in CASES if "grouped" not in name])  # which needs Transformer Engine since 0.19
def test_a_run_goes_on_from_the_newest_megatron_core(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run_case(name, install(tmp_path_factory.getbasetemp(), newest_version()), tmp_path)
    demand_its_losses(losses_of_continuation(tmp_path, "--load", str(tmp_path / "checkpoints")), losses_of_megatron(tmp_path))
