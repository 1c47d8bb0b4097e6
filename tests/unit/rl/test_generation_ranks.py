"""Rollouts on ranks of their own: the same training as where one set of ranks does both, at every lag and across resumes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.core.parallel.mesh import SplitMeshJob
from megatron.core.tokenizers.build import NullTokenizer
from megatron.rl import refit
from megatron.rl.arguments import parse_rl_args
from megatron.rl.environments.config import read_environments
from megatron.rl.generation_ranks import ignore_end_signals, run_generation_rank
from megatron.rl.policy_data import PolicyData
from megatron.rl.policy_step import PolicyForwardStep, policy_model_provider
from megatron.rl.settings import RLConfig, generation_run_config
from megatron.training import initialize
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.state.step import train_step
from megatron.training.state.trainer import build_trainer
from tests.helpers import tiny
from tests.helpers.policy import BASE, RL, _mean, train_policy_here
from tests.helpers.training import held_weights
from tests.helpers.world import RankFailed, Worlds
from tests.unit.rl.test_policy import LLAMA, compare
from tests.unit.rl.test_train_rl import NETWORK, POLICY

VERIFY: dict[str, Any] = {"rl_verify_model_weights_swap": True}
LAGS: dict[str, dict[str, Any]] = {
    "in turn": {},
    "a round ahead": {"rl_generation_lag": 1},
    "two rounds ahead, twice": {"rl_generation_lag": 2, "grpo_iterations": 2},
}
PARTIAL: dict[str, Any] = {
    "rl_generation_ranks": 1,
    "rl_generation_lag": 2,
    "rl_partial_rollouts": True,
    "rl_max_inflight_requests": 20,
}


def train_or_generate_here(
    rl_changes: dict[str, Any], changes: dict[str, Any], steps: int, saves: tuple[int, ...] = (), plants: str = ""
) -> Any:
    """On every rank of a job: train a policy, as `train_policy_here` does, or generate for it. None from the ranks that generate.

    saves: iterations after which a checkpoint is made. plants: a parameter that the refit leaves out.
    """
    rl = dataclasses.replace(RL, **rl_changes)
    training = dist.get_world_size() - rl.rl_generation_ranks
    config = tiny.config(training, **{**BASE, **changes})
    generating = generation_run_config(config, rl.inference_parallel_sizes)
    job = SplitMeshJob.build(config.parallel, generating.parallel, tiny.DEVICE, last_ranks=rl.rl_generation_ranks)
    mine = config if dist.get_rank() < training else generating
    with patch.object(tiny.Mesh, "build", lambda parallel, device: job.mesh):
        run = dataclasses.replace(tiny.run_of(mine), tokenizer=NullTokenizer(tiny.VOCABULARY - 1))
    send = refit._exchange_transfers
    left_out = (
        []
        if not plants
        else [
            patch.object(
                refit,
                "_exchange_transfers",
                lambda group, *rest: send([one for one in group if one.name != plants], *rest),
            )
        ]
    )
    for one in left_out:
        one.start()
    try:
        if dist.get_rank() >= training:
            return run_generation_rank(run, rl, job, read_environments(str(rl.langrl_env_config)))
        return train_here(rl, run, job, steps, saves)
    finally:
        for one in left_out:
            one.stop()


def train_here(rl: RLConfig, run: Any, job: SplitMeshJob, steps: int, saves: tuple[int, ...]) -> Any:
    """What the ranks that train do."""
    trainer = build_trainer(run, policy_model_provider(rl), PolicyForwardStep(rl))
    data = PolicyData(trainer, rl, job)
    checkpoint = Checkpointer(trainer)
    if run.config.checkpoint.load:
        checkpoint.resume()
    figures, norms = [], []
    while run.progress.iteration < steps:
        step = train_step(trainer, data)
        figures.append({name: _mean(pair, trainer) for name, pair in step.losses.items()})
        norms.append(float(step.grad_norm or 0.0))
        if run.progress.iteration in saves:
            checkpoint.save()
            shutil.copytree(str(rl.rl_rollout_bank_dir), f"{rl.rl_rollout_bank_dir} then")  # as if the job ended here
    assert data.rollouts is not None
    held, rollouts = held_weights(trainer), [one.rollout for one in data.rollouts]
    data.end_generation_ranks()
    return figures, norms, held, rollouts


def check(
    world: Worlds, ranks: int, rl: dict[str, Any], changes: dict[str, Any], layout: dict[str, Any], steps: int
) -> None:
    """The split job trains as one rank does that generates itself."""
    results = [
        one for one in world(ranks).run(train_or_generate_here, {**VERIFY, **rl}, {**changes, **layout}, steps) if one
    ]
    assert len(results) == ranks - rl["rl_generation_ranks"]
    plain = {name: value for name, value in rl.items() if "inference" not in name and name != "rl_generation_ranks"}
    serial = train_policy_here(plain, changes, steps)
    compare(serial, (*results[0][:2], [held for one in results for held in one[2]], results[0][3]))
    assert [one.versions for one in results[0][3]] == [one.versions for one in serial[3]]


@pytest.mark.parametrize(
    "lag",
    [
        "a round ahead",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in ("in turn", "two rounds ahead, twice")),
    ],
)
def test_ranks_of_their_own_generate_the_same_rollouts(world: Worlds, lag: str) -> None:
    check(world, 2, {"rl_generation_ranks": 1, **LAGS[lag]}, LLAMA, {}, 4)


def test_partial_rollouts_a_round_ahead_are_those_that_are_played_whole(world: Worlds) -> None:
    """Nothing is paused where all that is played is of the next round."""
    partial = {**PARTIAL, "rl_generation_lag": 1}
    whole = {"rl_generation_lag": 1}
    results = world(2).run(train_or_generate_here, partial, LLAMA, 4)
    compare(train_policy_here(whole, LLAMA, 4), results[0])


@pytest.mark.nightly
def test_paused_rollouts_are_the_same_for_one_rank_that_trains_and_for_two(world: Worlds) -> None:
    changes = {**LLAMA, "lr": 3e-2}
    (one, _) = world(2).run(train_or_generate_here, PARTIAL, changes, 5)
    *two, _ = world(3).run(
        train_or_generate_here,
        {**PARTIAL, "rl_inference_tensor_model_parallel_size": 1},
        {**changes, "tensor_model_parallel_size": 2},
        5,
    )
    compare(one, (*two[0][:2], [held for rank in two for held in rank[2]], two[0][3]))
    versions = [{version for version in rollout.versions if version >= 0} for rollout in one[3]]
    assert any(len(each) > 1 for each in versions), "some were paused"
    assert all(2 <= version <= 4 for each in versions for version in each), "none is older than the lag"


@pytest.mark.nightly
def test_two_ranks_that_train_are_refitted_into_two_that_generate(world: Worlds) -> None:
    rl = {"rl_generation_ranks": 2, "rl_generation_lag": 1}
    check(world, 4, {**rl, "rl_inference_tensor_model_parallel_size": 1}, LLAMA, {"tensor_model_parallel_size": 2}, 3)
    tp2 = {"rl_inference_tensor_model_parallel_size": 2, "rl_inference_pipeline_model_parallel_size": 1}
    check(world, 4, {**rl, **tp2}, {}, {"pipeline_model_parallel_size": 2}, 3)


@pytest.mark.nightly
def test_tensor_2_x_pipeline_2_is_refitted_into_data_4(world: Worlds) -> None:
    sizes = {"rl_inference_tensor_model_parallel_size": 1, "rl_inference_pipeline_model_parallel_size": 1}
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    check(world, 8, {"rl_generation_ranks": 4, "rl_generation_lag": 1, **sizes}, {}, layout, 3)


def test_a_rank_that_generates_is_no_spare_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is beyond those that WORLD_SIZE counts, which are the ranks that train."""
    monkeypatch.setattr(initialize, "wait_as_spare_rank", lambda place: pytest.fail("it waits for a job to end"))
    for name, value in {"RANK": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    words = f"{NETWORK} {POLICY} --train-iters 1 --grpo-kl-beta 0 --langrl-env-config x --rl-generation-ranks 1"
    checked, _ = parse_rl_args(words.split(), world_size=3, speaks=True)
    initialize._hold_spare_ranks(checked.ranks)


def test_a_rank_that_generates_goes_on_at_a_signal_for_those_that_train_to_save() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ignore_end_signals(tiny.config(1).train)
        for number in before:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_weight_that_is_left_out_is_found_by_both_sides(world: Worlds) -> None:
    with pytest.raises(RankFailed, match="did not copy all of them"):
        world(2).run(
            train_or_generate_here,
            {**VERIFY, "rl_generation_ranks": 1},
            LLAMA,
            2,
            plants="decoder.layers.1.mlp.linear_fc2.weight",
        )


@pytest.mark.parametrize(
    "rl, saved",
    [
        ({"rl_generation_ranks": 1, "rl_generation_lag": 1}, 2),
        pytest.param({**PARTIAL, "grpo_iterations": 2}, 5, marks=pytest.mark.nightly),
        pytest.param({**PARTIAL, "grpo_iterations": 2}, 4, marks=pytest.mark.nightly),
    ],
    ids=["ahead", "partial, within a round", "partial, between rounds"],
)
def test_a_checkpoint_has_what_was_generated_meanwhile(
    world: Worlds, tmp_path: Path, rl: dict[str, Any], saved: int
) -> None:
    """Of no --save-interval: for whatever reason it is made, as at a signal."""
    changes = {**LLAMA, "save": str(tmp_path / "save")}
    bank = {"rl_rollout_bank_dir": str(tmp_path / "bank")}
    (whole, _) = world(2).run(train_or_generate_here, {**rl, **bank}, changes, saved + 3, saves=(saved,))
    bank["rl_rollout_bank_dir"] = str(tmp_path / "bank then")
    changes["load"] = str(tmp_path / "save")
    (resumed, _) = world(2).run(train_or_generate_here, {**rl, **bank}, changes, saved + 3)
    assert [one.ids for one in resumed[3]] == [one.ids for one in whole[3]]
    assert all(torch.equal(a, b) for (*_, a), (*_, b) in zip(whole[2], resumed[2], strict=True))
