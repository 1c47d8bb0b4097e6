"""The same answers under every layout as in one process."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.tokenizers.build import NullTokenizer
from megatron.inference import cuda_graphs
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationReply, GenerationRequest
from megatron.inference.sampling import SamplingParams
from tests.helpers import repeats, tiny
from tests.helpers.world import Worlds
from tests.unit.inference.serving import EXPERTS, HYBRID, LATENT, prompts, stages_on

SETTINGS = {
    "inference_dynamic_batching_block_size": 4,
    "inference_dynamic_batching_max_tokens": 16,
    "inference_max_requests": 4,
}
NETWORK = {"num_layers": 4, "init_method_std": 0.3}
# The attention of a stand-in for a GPU sums in fp32.
TOLERANCE = 1e-9 if os.environ.get("MEGATRON_TEST_DEVICE", "cpu") == "cpu" else 1e-5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2 vpp2": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "dp2": (2, {}),
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2 dp2 tied": (4, {"tensor_model_parallel_size": 2, "untie_embeddings_and_output_weights": False}),
    "tp4 two groups": (4, {"tensor_model_parallel_size": 4, "group_query_attention": True, "num_query_groups": 2}),
    "tp2 latent": (2, {"tensor_model_parallel_size": 2, **LATENT}),
    "tp2 sp latent": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, **LATENT}),
    "ep2": (2, {"expert_model_parallel_size": 2, "moe_grouped_gemm": True, **EXPERTS}),
    "ep2 alltoall": (2, {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall", **EXPERTS}),
    "tp2 experts": (2, {"tensor_model_parallel_size": 2, "moe_grouped_gemm": True, **EXPERTS}),
    "tp2 ep2 pp2": (
        8,
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            **EXPERTS,
        },
    ),
    "pp2 ahead": (2, {"pipeline_model_parallel_size": 2, "mtp_num_layers": 1}),
    "tp2 dp2 ahead": (4, {"tensor_model_parallel_size": 2, "mtp_num_layers": 2}),
    "tp2 states": (2, {"tensor_model_parallel_size": 2, **HYBRID}),
    "pp2 states": (2, {"pipeline_model_parallel_size": 2, **HYBRID}),
    "tp2 sp pp2 states": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2, **HYBRID},
    ),
    "ep2 states": (2, {"expert_model_parallel_size": 2, **HYBRID, "hybrid_layer_pattern": "ME*G", **EXPERTS}),
    "pp2 dp2 tied": (4, {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": False}),
}


def requests() -> list[GenerationRequest]:
    """Greedy and warm ones, some scored, some long enough to be read in pieces."""
    asked = []
    for number, text in enumerate(prompts(9, longest=24)):
        sampling = SamplingParams(0.0) if number % 2 else SamplingParams(0.9, top_p=0.9, repetition_penalty=1.1)
        asked.append(
            GenerationRequest(
                text,
                6 + number,
                sampling,
                seed=number,
                ignore_eod=number != 3,
                logprobs=True,
                top_logprobs=2 * (number == 4),
                prompt_logprobs=number % 3 == 0,
            )
        )
    return asked


def answered(changes: dict[str, Any], guesses: int = 0) -> list[GenerationReply] | None:
    """The replies, on the first rank."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    stages = stages_on(size, **{**NETWORK, **changes})
    draft = stages_on(size, seed=8, **{**NETWORK, **changes}) if guesses and "mtp_num_layers" not in changes else []
    engine = Engine(
        stages, NullTokenizer(tiny.VOCABULARY), InferenceConfig(**SETTINGS, num_speculative_tokens=guesses), draft=draft
    )
    if not engine.mesh.world.is_first:
        engine.run_as_follower()
        return None
    engine.heartbeat()
    replies = engine.run(requests())
    assert engine.metrics().blocks_used == 0
    if engine.mesh.device.type == "cuda" and not cuda_graphs.graph_capture_obstacle(stages):
        graphs = engine.runner.networks[0].captured_graphs
        assert graphs is not None and (len(graphs._kept) or guesses), "steps are captured wherever they can be"
    engine.close()
    return replies


LAYOUT = ("_parallel_size", "_per_pipeline_rank", "sequence_parallel", "_dispatcher_type")


@cache
def serial(name: str) -> list[GenerationReply]:
    """The replies of one process for the network of a layout."""
    replies = answered({setting: value for setting, value in LAYOUTS[name][1].items() if not setting.endswith(LAYOUT)})
    assert replies is not None and len({token for reply in replies for token in reply.ids}) > 10
    return replies


def same(found: list[GenerationReply], expected: list[GenerationReply]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.ids, one.reason, one.text) == (other.ids, other.reason, other.text)
        for said, right in zip((*one.prompt, *one.tokens), (*other.prompt, *other.tokens), strict=True):
            assert said.logprob == pytest.approx(right.logprob, abs=TOLERANCE)
            assert [number for number, _ in said.top] == [number for number, _ in right.top]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_answers_do_not_depend_on_the_layout(world: Worlds, name: str) -> None:
    size, changes = LAYOUTS[name]
    found = world(size).run(answered, changes)
    assert found[1:] == [None] * (size - 1)
    same(found[0], serial(name))


@pytest.mark.parametrize("name", ["tp2", "pp2", "pp2 ahead", "tp2 dp2 ahead"])
def test_a_draft_changes_no_answer_under_a_layout(world: Worlds, name: str) -> None:
    size, changes = LAYOUTS[name]
    same(world(size).run(answered, changes, changes.get("mtp_num_layers", 2))[0], serial(name))


def captured(changes: dict[str, Any]) -> tuple[list[GenerationReply] | None, int]:
    """The replies, on the first rank, of steps that are captured where they can be; and how many shapes were."""
    shapes, old = list[tuple[int, int]](), cuda_graphs.DecodingGraphs.capture_graph

    def noting(self: cuda_graphs.DecodingGraphs, shape: tuple[int, int]) -> None:
        shapes.append(shape)
        self._record = repeats.record
        old(self, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "graph_capture_obstacle", lambda stages: "")
        patch.setattr(cuda_graphs.DecodingGraphs, "capture_graph", noting)
        patch.setattr(cuda_graphs, "_FEWEST_KEYS", 64)
        return answered(changes), len(shapes)


@pytest.mark.parametrize(
    "name",
    [
        "tp2",
        "tp2 experts",
        "ep2",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp2 sp latent", "tp2 dp2 tied")),
    ],
)
def test_captured_steps_over_ranks_say_what_one_process_says(world: Worlds, name: str) -> None:
    size, changes = LAYOUTS[name]
    found = world(size).run(captured, changes)
    assert all(count >= 2 for _, count in found), found
    same(found[0][0], serial(name))
