"""Text generation on a GPU: captured steps, the paged kernel and scheduling ahead, against launched steps and against the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron.adapters import serving
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.kernels.ops import paged
from megatron.core.tokenizers.build import NullTokenizer
from megatron.inference import sampled_tokens
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationReply
from tests.gpu.test_waits import no_wait
from tests.helpers import tiny
from tests.unit.inference.serving import BASE, KINDS, greedy, prompts
from tests.unit.kernels.test_paged import CASES, draw

pytestmark = pytest.mark.gpu

GRAPHS = {"inference_dynamic_batching_num_cuda_graphs": None}
PLAIN = {
    "inference_dynamic_batching_num_cuda_graphs": 0,
    "inference_paged_attention": "gathered",
    "inference_async_scheduling": False,
}


def engine_on(device: str, network: dict[str, Any], **settings: Any) -> Engine:
    """An engine over values drawn on the CPU."""
    changes = {**BASE, **network, "fp64": False, "use_cpu_initialization": True}
    run = tiny.run_of(tiny.config(1, **changes), torch.device(device))
    stages = [
        tiny.gpt(run, spec).materialize(7, draw_on=torch.device("cpu")).eval()
        for spec in stage_specs_of_run(run.config)
    ]
    return Engine(stages, NullTokenizer(tiny.VOCABULARY), InferenceConfig(inference_max_requests=5, **settings))


def replies(device: str, network: dict[str, Any], **settings: Any) -> list[GenerationReply]:
    """Greedy continuations of random prompts, scored."""
    engine = engine_on(device, network, **settings)
    if settings == GRAPHS:
        assert engine.runner.networks[0].captured_graphs is not None, "captured wherever it can be"
    texts = prompts(6, longest=20)
    return engine.run([greedy(text, 4 + 2 * number, logprobs=True) for number, text in enumerate(texts)])


def same(found: list[GenerationReply], expected: list[GenerationReply]) -> None:
    assert [reply.ids for reply in found] == [reply.ids for reply in expected]
    for one, other in zip(found, expected, strict=True):
        mine, theirs = ([token.logprob for token in reply.tokens] for reply in (one, other))
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "kind", ["rope", "grouped", "window", "sinks and windows", "latent", "caps and gates", "yarn", "experts"]
)
def test_captured_steps_say_what_launched_ones_and_the_cpu_say(kind: str) -> None:
    network = {**KINDS[kind], **({"moe_grouped_gemm": True} if "num_experts" in KINDS[kind] else {})}
    plain = replies("cpu", network)
    same(replies("cuda", network, **GRAPHS), plain)
    same(replies("cuda", network, **PLAIN), plain)
    same(replies("cuda", network, **{**PLAIN, **GRAPHS}), plain)


def test_a_step_is_launched_without_waiting_for_the_one_before() -> None:
    engine = engine_on("cuda", KINDS["grouped"])
    engine.capture_all_graphs(lambda _: None)
    for text in prompts(3):
        engine.submit(greedy(text, 12), lambda event: None)
    for _ in range(3):
        engine.step()
    assert engine._in_flight is not None, "the next step was launched before the tokens of this one were known"
    graphs = engine.runner.networks[0].captured_graphs
    assert graphs is not None and len(graphs._kept) == 4  # 1, 2, 4 and 8 rows
    for shape, graph in graphs._kept.items():
        graphs._kept[shape] = replace(graph, repeat=partial(unnoticed, graph.repeat))
    with HostReads() as reads:
        following = engine._launch_step()
    assert following is not None and not reads.found, reads.found


def test_a_step_of_launched_kernels_waits_for_nothing_either() -> None:
    settings = {"inference_dynamic_batching_num_cuda_graphs": 0, "inference_paged_attention": "gathered"}
    engine = engine_on("cuda", KINDS["grouped"], **settings)
    for text in prompts(3):
        engine.submit(greedy(text, 12), lambda event: None)
    for _ in range(3):
        engine.step()
    assert engine._in_flight is not None
    with no_wait(), HostReads() as reads:
        following = engine._launch_step()
    assert following is not None and not reads.found, reads.found


@pytest.mark.parametrize(
    "upload", [serving._upload_adapter_numbers, sampled_tokens._upload_indices], ids=["adapters", "rows"]
)
def test_numbers_go_to_the_device_without_a_wait(upload: Callable[[list[int], torch.device], torch.Tensor]) -> None:
    with no_wait(), HostReads() as reads:
        there = upload([3, 1, 2], torch.device("cuda"))
    assert there.is_cuda and there.tolist() == [3, 1, 2] and not reads.found, reads.found


def unnoticed(repeat: Callable[[], None]) -> None:
    """The stand-in repeats a graph by operations of the host."""
    with _disable_current_modes():
        repeat()


class HostReads(TorchDispatchMode):
    """Notes what a GPU's stream would have to be waited for: values that are read, and copies from and to pageable memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = str(operation), kwargs or {}
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if "_local_scalar_dense" in name and tensors[0].is_cuda:
            self.found.append(name)
        if "copy_" in name and len({one.device.type for one in tensors}) > 1:
            waits = [one for one in tensors if one.device.type == "cpu" and not one.is_pinned()]
            self.found += [f"{name} of pageable memory"] * bool(waits)
        if "_to_copy" in name:
            target = torch.device(kwargs.get("device") or tensors[0].device)
            near = tensors[0].device.type != "cpu" or tensors[0].is_pinned()
            if target.type != tensors[0].device.type and not (near and kwargs.get("non_blocking")):
                self.found.append(f"{name} to {target}")
        return operation(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_the_paged_kernel_computes_its_definition(name: str, dtype: torch.dtype) -> None:
    # Imported here, since who imports triton decides whether it is interpreted.
    triton_paged = pytest.importorskip("megatron.core.kernels.triton.paged", reason="triton is not installed")
    q, k, v, where, window, scores = draw(name, dtype)
    there = replace(where, tables=where.tables.cuda(), lengths=where.lengths.cuda())
    on_gpu = replace(scores, sink=None if scores.sink is None else scores.sink.cuda())
    latent = v.data_ptr() == k.data_ptr()
    near_k = k.cuda()
    near_v = near_k[..., : v.shape[2]] if latent else v.cuda()
    found = triton_paged.paged_attention(q.cuda(), near_k, near_v, there, window=window, scores=on_gpu)
    expected = paged.paged_attention(q.double(), k.double(), v.double(), where, window=window, scores=scores)
    assert (found.cpu().double() - expected).abs().max() <= paged.TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("kind", ["grouped", "experts"])
def test_requests_that_end_join_and_wait_say_the_same_when_steps_are_scheduled_ahead(kind: str) -> None:
    network = {**KINDS[kind], **({"moe_grouped_gemm": True} if kind == "experts" else {})}
    same(replies("cuda", network), replies("cuda", network, inference_async_scheduling=False))
