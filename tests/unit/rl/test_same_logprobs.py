"""Texts are generated with the log-probabilities with which they are trained: 1e-10 in fp64, 1e-5 in fp32, however either is done."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest

from megatron.core.parallel import collectives
from megatron.core.transformer import router
from megatron.inference.engine import Engine
from megatron.rl import rollouts
from megatron.rl.environments.base import Problem
from megatron.training.state.step import train_step
from tests.helpers.policy import PACKED, RL, EvenIds, trainer_of
from tests.helpers.world import Worlds
from tests.unit.rl.test_policy import LLAMA, MOE

LIMITS = {False: 1e-5, True: 1e-10}
SAMPLING = {"rl_default_temperature": 0.7, "rl_default_top_p": 0.9}
LONG: dict[str, Any] = {"max_position_embeddings": 64, "seq_length": 64}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp 2": (2, LLAMA, {"tensor_model_parallel_size": 2}),
    "pp 2": (2, LLAMA, {"pipeline_model_parallel_size": 2}),
    "ep 2": (2, MOE, {"expert_model_parallel_size": 2}),
}


class LongPrompts(EvenIds):
    """Prompts of 40 ids, which fill blocks of the cache and take several passes to read."""

    def problem(self, number: int) -> Problem:
        """As the base class says."""
        return Problem(" ".join(str((number + place) % 48) for place in range(40)))


def largest_difference(
    rl_changes: dict[str, Any], changes: dict[str, Any], engine: dict[str, Any]
) -> tuple[float, dict[str, int]]:
    """On every rank: the largest mean difference of two rounds, and what the engines counted. engine: changed settings."""
    trainer, data = trainer_of(dataclasses.replace(RL, **rl_changes), **LONG, lr=3e-2, **changes)
    data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=LongPrompts()),)
    engines: list[Engine] = []

    class Changed(Engine):
        """An engine with other settings."""

        def __init__(self, stages: Any, tokenizer: Any, config: Any, **more: Any) -> None:
            super().__init__(stages, tokenizer, dataclasses.replace(config, **engine), **more)
            engines.append(self)

    differences = []
    with patch.object(rollouts, "Engine", Changed):
        for _ in range(2):
            pair = train_step(trainer, data).losses["generation logprob difference"].double()
            total, count = collectives.all_reduce(pair, trainer.run.mesh.world).tolist()
            differences.append(total / count)
    counts = engines[0].metrics()
    return max(differences), {"cached": counts.cached_tokens, "steps": counts.steps, "preempted": counts.preempted}


@pytest.mark.parametrize(
    "fp64, packed",
    [
        pytest.param(False, False, id="fp32 rows"),
        pytest.param(True, True, id="fp64 packed"),
        pytest.param(True, False, id="fp64 rows", marks=pytest.mark.nightly),
        pytest.param(False, True, id="fp32 packed", marks=pytest.mark.nightly),
    ],
)
def test_shared_prefixes_and_prompts_in_chunks_change_no_log_probability(fp64: bool, packed: bool) -> None:
    chunks = {"inference_dynamic_batching_max_tokens": 24}
    changes = {**LLAMA, "fp64": fp64}
    difference, counts = largest_difference({**SAMPLING, "rl_use_sequence_packing": packed}, changes, chunks)
    assert difference < LIMITS[fp64] and counts["cached"] > 0 and counts["steps"] > 12, (difference, counts)


def test_the_check_sees_a_temperature_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, data = trainer_of(dataclasses.replace(RL, **SAMPLING), **LLAMA)
    data.prepare_step(16)
    data.step.rl = RL
    total, count = train_step(trainer, data).losses["generation logprob difference"].tolist()
    assert total / count > 1e-3


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.nightly) for name in LAYOUTS])
def test_layouts_change_no_log_probability(world: Worlds, layout: str) -> None:
    ranks, network, changes = LAYOUTS[layout]
    for fp64 in (False, True):
        results = world(ranks).run(largest_difference, SAMPLING, {**network, **changes, "fp64": fp64}, {})
        assert results[0][0] < LIMITS[fp64], results[0]


REPLAY: dict[str, Any] = {**MOE, "moe_enable_routing_replay": True}


def differences_of_other_routers(changes: dict[str, Any], rl: dict[str, Any]) -> float:
    """On every rank: how far log-probabilities differ when the routers of training would choose other experts than those of generation."""
    trainer, data = trainer_of(dataclasses.replace(RL, **rl), **changes)
    chosen = router.choose_expert_indices
    data.prepare_step(16)
    assert data.rollouts is not None
    with patch.object(router, "choose_expert_indices", lambda scores, *rest: chosen(-scores, *rest)):
        pair = train_step(trainer, data).losses["generation logprob difference"].double()
    total, count = collectives.all_reduce(pair, trainer.run.mesh.world).tolist()
    return total / count


@pytest.mark.parametrize("rl", [{}, {"rl_use_sequence_packing": True}], ids=["rows", "packed"])
def test_training_uses_the_experts_that_generation_chose(rl: dict[str, Any]) -> None:
    changes = PACKED if rl else {}
    assert differences_of_other_routers({**REPLAY, **changes}, rl) < 1e-12
    assert differences_of_other_routers({**MOE, **changes}, rl) > 1e-3, "without replay they differ"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        {"expert_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
    ],
    ids=str,
)
def test_experts_are_replayed_under_every_layout(world: Worlds, layout: dict[str, Any]) -> None:
    assert world(2).run(differences_of_other_routers, {**REPLAY, **layout}, {})[0] < 1e-12


def test_paused_rollouts_keep_the_experts_of_their_beginning() -> None:
    rl = {"rl_generation_lag": 1, "rl_partial_rollouts": True, "rl_max_inflight_requests": 20}
    trainer, data = trainer_of(dataclasses.replace(RL, **rl), **REPLAY)
    for _ in range(3):
        train_step(trainer, data)
        assert data.rollouts is not None
        assert all(len(one.rollout.routes) == len(one.rollout.ids) - 1 for one in data.rollouts)
