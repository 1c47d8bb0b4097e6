"""Steps that are bad: judged by all ranks alike, told with their evidence, repeated from it, and left behind exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megatron.cli.commands.replay import main
from megatron.core.dist_checkpointing.checkpoint_folders import checkpoints_to_try
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.parallel.boxes import Box
from megatron.core.parallel.spec import param_spec_of
from megatron.plan.simulate.providers import PROVIDERS
from megatron.training.health.bad_steps import BadStepError, StepHistory, StepValidator
from megatron.training.state.batch import Batch, LossFunction
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from megatron.verify.compare.replay import replay_failure_dump
from tests.helpers import tiny
from tests.helpers.programme import trained, write_tokens
from tests.helpers.training import held_weights
from tests.helpers.world import Worlds

TINY_PROVIDERS = {"gpt": (tiny.gpt, tiny.forward_step)}


def spoiling(iteration: int, spoil: Callable[[GPTModel, Tensor], Tensor]) -> Callable[..., tuple[Tensor, LossFunction]]:
    """Megatron's forward step, which in one iteration hands its output through `spoil`, the first time that it comes by."""
    done: list[int] = []

    def forward_step(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[Tensor, LossFunction]:
        output, loss = pretrain_gpt.forward_step(run, batches, stage)
        if stage.training and run.progress.iteration + 1 == iteration and len(done) < 4:  # its four microbatches
            done.append(1)
            output = spoil(stage, output)
        return output, loss

    return forward_step


def not_a_number(stage: GPTModel, output: Tensor) -> Tensor:
    """A loss that is NaN."""
    return output * math.nan


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights in the newest checkpoint of a folder."""
    saved = open_native_checkpoint(checkpoints_to_try(folder)[0].folder)
    return {
        name: saved.read(name, Box((0,) * len(found.shape), tuple(found.shape))).clone()
        for name, found in saved.formats.items()
        if name.startswith(("model.", "optimizer."))
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether all bits are the same."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("action, dropout", [("skip", "0"), ("rollback", "0.1")])
def test_a_run_that_leaves_a_bad_step_behind_ends_as_if_its_data_had_never_been_there(
    tmp_path: Path, action: str, dropout: str
) -> None:
    flags = [
        "--train-iters",
        "6",
        "--save-interval",
        "2",
        "--hidden-dropout",
        dropout,
        "--attention-dropout",
        dropout,
        *write_tokens(tmp_path / "text"),
    ]
    hurt = trained(
        [*flags, "--save", str(tmp_path / "a"), "--on-bad-step", action], forward_step=spoiling(4, not_a_number)
    )
    spared = trained([*flags, "--save", str(tmp_path / "b"), "--iterations-to-skip", "4"])
    assert hurt.progress.consumed_train_samples == spared.progress.consumed_train_samples == 24
    assert hurt.progress.skipped_train_samples == spared.progress.skipped_train_samples == 4
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    events = [json.loads(line) for line in (tmp_path / "a" / "run_log.jsonl").read_text().splitlines()]
    assert ["bad step"] == [event["event"] for event in events if event["event"] == "bad step"]


def test_a_run_that_stops_says_what_is_bad_and_where_the_evidence_is(tmp_path: Path) -> None:
    with pytest.raises(BadStepError) as error:
        trained(
            ["--train-iters", "6", "--on-bad-step", "stop", "--error-dir", str(tmp_path), "--mock-data"],
            forward_step=spoiling(3, not_a_number),
        )
    said = str(error.value)
    assert (
        "iteration 3 is bad: lm loss is nan" in said
        and str(tmp_path / "step-00000003") in said
        and "loss and gradients of rank 0" in said
    )
    facts = json.loads((tmp_path / "step-00000003" / "step.json").read_text())
    assert facts["progress"]["consumed_train_samples"] == 8 and all(
        row["gradient_not_finite"] for row in facts["parameters"].values()
    )
    read = torch.load(tmp_path / "step-00000003" / "data-00000-00.pt", weights_only=True)
    assert [microbatch["samples"] for microbatch in read["microbatches"]] == [[8], [9], [10], [11]]


def test_more_bad_steps_than_allowed_stop_a_run(tmp_path: Path) -> None:
    def often(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[Tensor, LossFunction]:
        output, loss = pretrain_gpt.forward_step(run, batches, stage)
        return output * math.nan, loss

    with pytest.raises(BadStepError, match="it is the 3th bad step, and --max-bad-steps is 2"):
        trained(
            ["--train-iters", "6", "--on-bad-step", "skip", "--max-bad-steps", "2", "--mock-data"], forward_step=often
        )


def test_unusual_losses_and_norms_are_told_from_usual_ones() -> None:
    memory = StepHistory(finite=True, spikes=True, large=True)
    random = torch.Generator().manual_seed(1)
    for step in range(60):
        noise = float(torch.randn((), generator=random))
        assert memory.find_problem({"lm loss": 3.0 - 0.005 * step + 0.02 * noise}, 1.0 + 0.2 * noise) == ""
    assert "the loss is 4" in memory.find_problem({"lm loss": 4.0}, 1.0)
    assert "the gradient norm is 40" in memory.find_problem({"lm loss": 2.7}, 40.0)
    assert "lm loss is nan" in memory.find_problem({"lm loss": math.nan}, 1.0)
    assert "gradient norm is inf" in memory.find_problem({"lm loss": 2.7}, math.inf)
    assert memory.find_problem({"lm loss": 2.7}, 1.2) == "", "what was bad is not remembered"
    assert StepHistory(finite=True, spikes=True, large=True).find_problem({"lm loss": 4.0}, 40.0) == "", (
        "at the start, nothing is unusual"
    )


def judged(
    folder: str, changes: dict[str, Any], plant: str
) -> tuple[str, list[tuple[float, float]], float, bool, list[int]]:
    """On every rank: a good step, then one that is judged bad, by its numbers or because the test says so."""
    size = torch.distributed.get_world_size()
    settings = tiny.config(size, error_dir=folder, on_bad_step="skip", failure_dump_weights=True, **changes)
    trainer = tiny.trainer_of(tiny.run_of(settings))
    mesh = trainer.run.mesh
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    validator = StepValidator(settings)
    trainer.add_hook(validator)
    if plant == "weight":
        for stage in trainer.stages:
            for param in stage.parameters():
                if param_spec_of(param).name == "decoder.layers.1.mlp.linear_fc2.weight":
                    param.data.view(-1)[0] = math.nan
    elif plant == "scan":
        for stage in trainer.stages:
            for param in stage.parameters():
                if param_spec_of(param).name == "decoder.layers.1.mixer.D":
                    param.data.fill_(3e38)  # finite, and what the scan makes of it is not
    elif plant == "gradient":
        param = next(
            param
            for stage in trainer.stages
            for param in stage.parameters()
            if "linear_fc1.bias" in param_spec_of(param).name
        )
        if mesh.world.rank == 1:
            param.register_hook(lambda gradient: gradient * math.inf)
    else:
        validator.memory.find_problem = lambda losses, norm: "planted"  # type: ignore[method-assign]
    before = [value.clone() for _, _, _, value in held_weights(trainer)]
    step = train_step(trainer, tiny.short_run_batches(trainer.run, 1))
    for parallel in trainer.parallels:
        parallel.finish_gather()
    after = [value for _, _, _, value in held_weights(trainer)]
    pairs = [tuple(collectives.all_reduce(pair.double(), mesh.world).tolist()) for pair in step.losses.values()]
    kept = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
    return validator.problem, pairs, float(step.grad_norm), bool(step.skipped) and kept, [trainer.progress.iteration]


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True},
        {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
        {"hidden_dropout": 0.2, "attention_dropout": 0.1},
    ],
    ids=["tensor and data, ZeRO", "pipeline and context", "data, with dropout"],
)
def test_a_replay_gives_the_numbers_of_the_run(world: Worlds, tmp_path: Path, changes: dict[str, Any]) -> None:
    results = world(4).run(judged, str(tmp_path), changes, "nothing")
    problem, pairs, norm, kept, _ = results[0]
    assert problem.startswith("planted") and all(result[0] == problem and result[3] for result in results)
    found = replay_failure_dump(tmp_path / "step-00000002", TINY_PROVIDERS)
    total, count = pairs[0]
    assert found.losses["lm loss"] == pytest.approx(total / count, rel=1e-6)
    assert found.norm == pytest.approx(norm, rel=1e-5)
    assert found.conclusion.startswith("nothing of it happens here")
    facts = json.loads((tmp_path / "step-00000002" / "step.json").read_text())
    squares = sum(row["gradient_norm"] ** 2 for row in facts["parameters"].values())
    assert math.sqrt(squares) == pytest.approx(norm, rel=1e-5), "the table counts every element once"


def test_a_replay_finds_the_module_and_the_run_the_rank(
    world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"tensor_model_parallel_size": 1, "use_distributed_optimizer": True}
    results = world(2).run(judged, str(tmp_path / "weight"), changes, "weight")
    assert all(
        "lm loss is nan" in result[0]
        and "weights that are not finite: decoder.layers.1.mlp.linear_fc2.weight" in result[0]
        for result in results
    ), results[0][0]
    found = replay_failure_dump(tmp_path / "weight" / "step-00000002", TINY_PROVIDERS)
    assert (
        found.first["output"].where == "decoder.layers.1.mlp.linear_fc2"
        and "its weight is not sound" in found.first["output"].cause
    )
    assert found.first["output"].when == "forward of stage 0, microbatch 0"
    assert main([str(tmp_path / "weight" / "step-00000002"), "--modules", "2"]) == 0
    assert (
        "conclusion: weights were not finite before the step: decoder.layers.1.mlp.linear_fc2.weight"
        in capsys.readouterr().out
    )
    results = world(2).run(judged, str(tmp_path / "gradient"), changes, "gradient")
    assert all("first not finite in the gradients of rank 1 on node" in result[0] for result in results), results[0][0]
    assert main([str(tmp_path / "gradient" / "step-00000002")]) == 1, "on another machine nothing happens"
    assert "nothing of it happens here" in capsys.readouterr().out


def test_a_replay_names_the_mixer_whose_scan_is_not_finite(world: Worlds, tmp_path: Path) -> None:
    sizes = {"mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 6}
    changes = {"num_layers": None, "hybrid_layer_pattern": "*M-", "tensor_model_parallel_size": 2, **sizes}
    results = world(2).run(judged, str(tmp_path), changes, "scan")
    assert all("lm loss is nan" in result[0] for result in results), results[0][0]
    first = replay_failure_dump(tmp_path / "step-00000002", TINY_PROVIDERS).first["output"]
    assert first.where == "decoder.layers.1.mixer.norm"
    assert "what goes in is not sound" in first.cause and "decoder.layers.1.mixer computes it" in first.cause


def test_evidence_that_finds_no_room_is_told_and_ends_no_run(world: Worlds, tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "random-00001.pt").symlink_to("/dev/full")
    results = world(2).run(judged, str(tmp_path), {}, "nothing")
    assert all("the evidence could not be written to" in result[0] and "rank 1: " in result[0] for result in results), (
        results[0][0]
    )


def test_a_folder_that_is_no_failure_dump_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is no failure dump of a bad step" in capsys.readouterr().err
    assert PROVIDERS.keys() == {"gpt", "bert", "t5", "vit"}


def test_a_judged_run_keeps_every_bit(tmp_path: Path) -> None:
    flags = ["--train-iters", "4", "--save-interval", "4", *write_tokens(tmp_path / "text")]
    trained([*flags, "--save", str(tmp_path / "a")])
    trained(
        [
            *flags,
            "--save",
            str(tmp_path / "b"),
            "--on-bad-step",
            "stop",
            "--check-for-spiky-loss",
            "--check-for-large-grads",
            "--log-straggler",
            "--check-weight-hash-across-dp-replicas-interval",
            "1",
            "--log-interval",
            "1",
        ]
    )
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
