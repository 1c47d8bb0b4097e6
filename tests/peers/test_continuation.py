"""Checkpoints that the real Megatron Core wrote: a run that goes on from them has the losses of Megatron's own continuation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core.parallel.boxes import whole_box
from megatron.megatron_lm.checkpoint.open import open_megatron_checkpoint
from megatron.megatron_lm.checkpoint.source import MegatronSource
from tests.helpers.flags import parse_args_or_raise
from tests.peers.cases import CASES, LAST, RELEASES, RUN, SAVED
from tests.peers.make_fixtures import VERSION, cases_of, install, newest_version, run_case, unpack
from tests.peers.ours import logged_steps

TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-6  # of losses; of norms of gradients, relative
ANOTHER_BALANCE = {
    ("0.12.3", "ep2-distributed")
}  # until 0.12 the balancing loss counted the choices that the expert bias had changed
# What a user gives again: the settings of training. The network, its tokenizer and the sequence length are the checkpoint's.
TRAINING = [
    word
    for name in (
        "micro_batch_size",
        "global_batch_size",
        "train_iters",
        "lr",
        "min_lr",
        "lr_decay_style",
        "lr_warmup_iters",
        "lr_decay_iters",
        "weight_decay",
        "clip_grad",
        "adam_beta2",
        "attention_dropout",
        "hidden_dropout",
        "make_vocab_size_divisible_by",
        "split",
        "eval_iters",
        "log_interval",
    )
    for word in (f"--{name.replace('_', '-')}", str(RUN[name]))
]


Steps = dict[int, tuple[float, float]]  # iteration -> loss, norm of the gradient


def steps_of_continuation(folder: Path, *flags: str) -> Steps:
    """Those of a run of ours that goes on from a fixture."""
    words = ["--use-checkpoint-args", *flags, "--data-path", str(folder / "tokens"), *TRAINING, "--num-workers", "0"]
    steps = logged_steps(words, folder / "ours.jsonl")
    return {step["iteration"]: (step["losses"]["lm loss"], step["grad_norm"]) for step in steps}


def steps_of_megatron(folder: Path) -> Steps:
    """Those of Megatron's own run, before and after the checkpoint."""
    return {
        step["iteration"]: (step["loss"], step["grad_norm"])
        for step in json.loads((folder / "losses.json").read_text())
    }


def demand_its_steps(ours: Steps, theirs: Steps, *, loss: float = TOLERANCE, norm: float = NORM_TOLERANCE) -> None:
    """The five steps after the checkpoint are Megatron's; later ones are only if moments and counters were too.

    The loss of the next token does not depend on layers that predict further ahead; the norm of the gradient does.
    """
    compared = range(SAVED + 1, LAST + 1)
    assert [ours[step][0] for step in compared] == pytest.approx([theirs[step][0] for step in compared], abs=loss)
    assert [ours[step][1] for step in compared] == pytest.approx([theirs[step][1] for step in compared], rel=norm)


ROUNDED = {name for name, case in CASES.items() if "bf16" in case.given}
WRITTEN = [(version, name) for version in (VERSION, *RELEASES) for name in cases_of(version)]


@pytest.mark.parametrize(
    "version, name", [pytest.param(*one, id="-".join(one)) for one in WRITTEN if one[1] not in ROUNDED]
)
def test_a_run_goes_on_from_megatrons_checkpoint_with_megatrons_losses(version: str, name: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path, version=version)
    norm = 1e-4 if (version, name) in ANOTHER_BALANCE else NORM_TOLERANCE
    demand_its_steps(
        steps_of_continuation(folder, "--load", str(folder / "checkpoints")), steps_of_megatron(folder), norm=norm
    )


@pytest.mark.parametrize("name", [name for name in CASES if name in ROUNDED])
def test_masters_in_fp32_of_weights_in_bf16_are_read_and_the_losses_agree_as_bf16_does(
    name: str, tmp_path: Path
) -> None:
    folder = unpack(name, tmp_path)
    source = open_megatron_checkpoint(folder / "checkpoints")
    for one in [
        one for one in source.formats if one.startswith("model.") and source.formats[one].dtype == torch.bfloat16
    ]:
        weight, master = (
            source.read(whose, whole_box(source.formats[one].shape))
            for whose in (one, one.replace("model.", "optimizer.master.", 1))
        )
        assert (
            master.dtype == torch.float32
            and torch.equal(master.to(torch.bfloat16), weight)
            and not torch.equal(master, weight.float())
        ), one
    ours = steps_of_continuation(folder, "--load", str(folder / "checkpoints"), "--bf16")
    demand_its_steps(ours, steps_of_megatron(folder), loss=2e-3, norm=2e-2)


@pytest.fixture(scope="module")
def names_of_deepseek(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """All tensors of a checkpoint with every kind of layer: weights, and what Adam keeps."""
    return sorted(
        open_megatron_checkpoint(unpack("deepseek", tmp_path_factory.mktemp("names")) / "checkpoints").formats
    )


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=() if part < 2 else pytest.mark.nightly) for part in range(24)]
)
def test_a_tensor_with_two_rows_exchanged_changes_the_losses(
    part: int, names_of_deepseek: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = unpack("deepseek", tmp_path), MegatronSource.read
    theirs = steps_of_megatron(folder)
    for name in names_of_deepseek[part::24]:
        monkeypatch.setattr(
            MegatronSource,
            "read",
            lambda self, asked, box, name=name: (
                read(self, asked, box).roll(1, 0) if asked == name else read(self, asked, box)
            ),
        )
        ours = steps_of_continuation(folder, "--load", str(folder / "checkpoints"))
        (folder / "ours.jsonl").unlink()
        with pytest.raises(AssertionError, match="comparison failed"):
            demand_its_steps(ours, theirs)
            pytest.fail(f"nobody sees that rows of {name} are others")


def test_checkpoint_args_are_taken_from_a_pretrained_checkpoint_and_the_run_starts_at_its_first_iteration(
    tmp_path: Path,
) -> None:
    folder = unpack("gqa", tmp_path)
    ours = steps_of_continuation(folder, "--pretrained-checkpoint", str(folder / "checkpoints"))
    assert sorted(ours) == list(range(1, LAST + 1))


@pytest.mark.parametrize(
    "flags, expected", [([], False), (["--calculate-per-token-loss"], True), (["--finetune"], True)]
)
def test_the_loss_is_megatrons_mean_unless_the_command_line_says_otherwise(
    flags: list[str], expected: bool, tmp_path: Path
) -> None:
    folder = unpack("gqa-torch", tmp_path)
    args = parse_args_or_raise(
        [
            *TRAINING,
            "--use-checkpoint-args",
            "--load",
            str(folder / "checkpoints"),
            "--data-path",
            str(folder / "tokens"),
            *flags,
        ]
    )
    assert (args.calculate_per_token_loss, args.seq_length, args.tokenizer_type) == (
        expected,
        RUN["seq_length"],
        "NullTokenizer",
    )


@pytest.mark.nightly
@pytest.mark.parametrize("version, name", [pytest.param(*one, id="-".join(one)) for one in WRITTEN])
def test_the_package_on_pypi_still_writes_the_fixtures(
    version: str, name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    package = install(tmp_path_factory.getbasetemp(), version)
    (tmp_path / "again").mkdir()
    run_case(name, package, tmp_path / "again")
    again, fixture = steps_of_megatron(tmp_path / "again"), steps_of_megatron(unpack(name, tmp_path, version=version))
    assert [again[step] for step in again] == [pytest.approx(fixture[step], abs=TOLERANCE) for step in again]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name in CASES if "grouped" not in name and "hybrid" not in name and name not in ROUNDED]
)  # need Transformer Engine since 0.19
def test_a_run_goes_on_from_the_newest_megatron_core(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_case(name, install(tmp_path_factory.getbasetemp(), newest_version()), tmp_path)
    demand_its_steps(
        steps_of_continuation(tmp_path, "--load", str(tmp_path / "checkpoints")), steps_of_megatron(tmp_path)
    )
