"""Recorded steps say what steps that are run say. A stand-in repeats operations as a CUDA graph does: with the tensors they had."""

from __future__ import annotations

import threading
import time

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.kernels.ops import paged
from megatron.inference import cuda_graphs, engine_setup
from megatron.inference.requests import GenerationEvent, GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.inference.service import EngineService
from tests.helpers import repeats
from tests.unit.inference.serving import KINDS, engine_of, greedy, network, prompts, slowly, stages_on


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Steps are recorded by the stand-in; the shapes, as they are recorded."""
    shapes: list[tuple[int, int]] = []
    old = cuda_graphs.DecodingGraphs.capture_graph

    def noting(self: cuda_graphs.DecodingGraphs, shape: tuple[int, int]) -> None:
        shapes.append(shape)
        self._record = repeats.record
        old(self, shape)

    monkeypatch.setattr(cuda_graphs.DecodingGraphs, "capture_graph", noting)
    monkeypatch.setattr(cuda_graphs, "graph_capture_obstacle", lambda _: "")
    monkeypatch.setattr(cuda_graphs, "_FEWEST_KEYS", 16)
    return shapes


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_are_the_recomputation_of_the_whole_text(recorded: list[tuple[int, int]], kind: str) -> None:
    changes = {"moe_grouped_gemm": True} if "num_experts" in KINDS[kind] else {}
    model, texts = stages_on(1, **KINDS[kind], **changes)[0], prompts(7)
    replies = engine_of(model, together=5, block=3).run(
        [greedy(text, 8 + 3 * number) for number, text in enumerate(texts)]
    )
    for number, (text, reply) in enumerate(zip(texts, replies, strict=True)):
        assert list(reply.ids) == slowly(model, text, 8 + 3 * number)[0]
    assert {rows for rows, _ in recorded} >= {1, 4, 8} and len({keys for _, keys in recorded}) > 1
    assert len(recorded) == len(set(recorded)) < sum(len(reply.ids) for reply in replies) / 4, (
        "each shape is recorded once"
    )


def test_drawn_tokens_and_scores_are_the_same_recorded_or_not(recorded: list[tuple[int, int]]) -> None:
    model = network()
    asked = [
        GenerationRequest(
            text,
            14,
            SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2),
            seed=number,
            ignore_eod=True,
            logprobs=True,
            top_logprobs=2,
        )
        for number, text in enumerate(prompts(4))
    ]
    plain = engine_of(model, inference_dynamic_batching_num_cuda_graphs=0).run(asked)
    assert not recorded
    found = engine_of(model).run(asked)
    assert recorded and [reply.ids for reply in found] == [reply.ids for reply in plain]
    for ours, theirs in zip(found, plain, strict=True):
        assert [token.logprob for token in ours.tokens] == pytest.approx(
            [token.logprob for token in theirs.tokens], abs=1e-9
        )


def test_the_shape_longest_unused_is_recorded_anew(recorded: list[tuple[int, int]]) -> None:
    engine_ = engine_of(network(), inference_dynamic_batching_num_cuda_graphs=1)
    for count in (1, 2, 1):
        texts = prompts(count, shortest=3, longest=3)
        assert [list(reply.ids) for reply in engine_.run([greedy(text, 4) for text in texts])] == [
            slowly(network(), text, 4)[0] for text in texts
        ]
    assert [rows for rows, _ in recorded] == [1, 2, 1]


@pytest.mark.parametrize("kind", ["rope", "sinks and windows", "latent", "caps and gates"])
def test_tables_of_blocks_need_one_graph_for_each_number_of_rows(
    recorded: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(engine_setup, "choose_paged_attention", lambda build, config: paged.paged_attention)
    engine, texts, messages = engine_of(network(kind), together=5, block=3), prompts(7), list[str]()
    engine.capture_all_graphs(messages.append)
    assert recorded == [(rows, 66) for rows in (8, 4, 2, 1)], "tables for the longest text"
    assert messages[1] == "CUDA graphs: 2 of 4 shapes of a step are captured"
    replies = engine.run([greedy(text, 8 + 3 * number) for number, text in enumerate(texts)])
    for number, (text, reply) in enumerate(zip(texts, replies, strict=True)):
        assert list(reply.ids) == slowly(network(kind), text, 8 + 3 * number)[0]
    assert len(recorded) == 4


def test_no_request_waits_for_a_capture(recorded: list[tuple[int, int]]) -> None:
    texts, during, ended = prompts(3, shortest=3, longest=3), list[int](), threading.Semaphore(0)

    def listen(event: GenerationEvent) -> None:
        during.append(len(recorded))
        if event.reply is not None:
            ended.release()

    service = EngineService(engine_of(network()))
    for text in texts:
        service.submit(greedy(text, 6), listen)
    with service:
        for _ in texts:
            assert ended.acquire(timeout=60)
        first = service.submit_and_wait_all([greedy(text, 6) for text in texts])
        while service.engine.runner.num_uncaptured_shapes():
            time.sleep(0.01)
        captured = len(recorded)
        again = service.submit_and_wait_all([greedy(text, 6) for text in texts])
    assert max(during) == 0 < captured, "captured when nobody waits"
    for replies in (first, again):
        assert [list(reply.ids) for reply in replies] == [slowly(network(), text, 6)[0] for text in texts]


def test_steps_over_pipeline_stages_or_without_a_gpu_are_not_recorded() -> None:
    assert cuda_graphs.graph_capture_obstacle([network()]) == "there is no GPU"
    with pytest.raises(
        ConfigError, match="--inference-dynamic-batching-num-cuda-graphs 4 cannot be had: there is no GPU; leave it out"
    ):
        engine_of(network(), inference_dynamic_batching_num_cuda_graphs=4)
    assert engine_of(network()).runner.networks[0].captured_graphs is None
    assert "too small" in " ".join(InferenceConfig(inference_dynamic_batching_num_cuda_graphs=-1).problems())
