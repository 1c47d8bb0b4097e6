from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.external import import_problem
from megatron.core.kernels.external.deep_ep import DeepEP, deep_ep_unsupported_reason
from megatron.core.kernels.ops.requirements import KernelRequirements
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.dispatch import (
    AllGatherTokenDispatcher,
    AllToAllTokenDispatcher,
    FlexTokenDispatcher,
    TokenDispatcher,
    make_token_dispatcher,
    permutation_by_expert,
    permute_routing_weights,
    permute_tokens,
    unpermute_tokens,
)
from megatron.core.transformer.router import ExpertRouting
from tests.helpers import deep_ep_stand_in
from tests.helpers.world import Worlds
from tests.unit.parallel.ranks import mesh_of

EXPERTS, CHOICES, TOKENS, WIDTH = 8, 2, 12, 3


def choices(kind: str, rank: int = 0) -> Tensor:
    """The experts of a rank's tokens, [t, k], in ways that real routers fall into."""
    random = torch.Generator().manual_seed(17 + rank)
    if kind == "balanced":
        return (torch.arange(TOKENS * CHOICES) % EXPERTS).view(TOKENS, CHOICES)
    if kind == "one hot expert":
        return torch.tensor([[5, 2]]).repeat(TOKENS, 1)
    if kind == "one hot rank":
        return torch.tensor([[1, 0]]).repeat(TOKENS, 1)
    if kind == "an expert without tokens":
        return torch.stack([torch.randperm(EXPERTS - 1, generator=random)[:CHOICES] for _ in range(TOKENS)])
    if kind == "bursts":
        return torch.stack([(torch.arange(CHOICES) + place // 4 + rank) % EXPERTS for place in range(TOKENS)])
    return torch.stack([torch.randperm(EXPERTS, generator=random)[:CHOICES] for _ in range(TOKENS)])


KINDS = ("balanced", "one hot expert", "one hot rank", "an expert without tokens", "bursts", "random")


def routing_of(kind: str, rank: int, *, drops: bool) -> ExpertRouting:
    random = torch.Generator().manual_seed(91 + rank)
    weights = torch.rand((TOKENS, CHOICES), dtype=torch.float64, generator=random)
    kept = torch.rand((TOKENS, CHOICES), generator=random) < 0.6 if drops else None
    weights = weights if kept is None else weights * kept
    return ExpertRouting(weights.requires_grad_(), choices(kind, rank), kept)


def tokens_of(rank: int) -> Tensor:
    return torch.randn(
        (TOKENS, WIDTH), dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    ).requires_grad_()


def say(tokens: Tensor, expert: Tensor) -> Tensor:
    """What an expert makes of a row: not linear, and unlike the others. Half of it, were it cut in two."""
    return torch.tanh(tokens * (expert[..., None] + 1.0)) + expert[..., None]


def expected(kind: str, rank: int, *, drops: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of a rank's tokens, and the gradients of tokens and weights, from the formula."""
    routing, tokens = routing_of(kind, rank, drops=drops), tokens_of(rank)
    kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
    said = say(tokens[:, None].expand(-1, CHOICES, -1), routing.experts.double())
    output = (said * (routing.weights * kept)[..., None]).sum(1)
    (output * target_of(rank)).sum().backward()
    return output.detach(), tokens.grad, routing.weights.grad * kept


def target_of(rank: int) -> Tensor:
    return torch.randn((TOKENS, WIDTH), dtype=torch.float64, generator=torch.Generator().manual_seed(1000 + rank))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("first, here", [(0, EXPERTS), (2, 3)])
def test_an_order_sorts_choices_by_expert_and_then_by_token(kind: str, drops: bool, first: int, here: int) -> None:
    routing = routing_of(kind, 0, drops=drops)
    wanted = sorted(
        (expert - first, token * CHOICES + place)
        for token, row in enumerate(routing.experts.tolist())
        for place, expert in enumerate(row)
        if first <= expert < first + here and (routing.kept is None or routing.kept[token, place])
    )
    order = permutation_by_expert(routing.experts, routing.kept, here, first=first)
    assert order.choices.tolist() == [choice for _, choice in wanted]
    assert order.counts.tolist() == [sum(expert == own for expert, _ in wanted) for own in range(here)]
    rows = {choice: row for row, (_, choice) in enumerate(wanted)}
    assert order.places.flatten().tolist() == [rows.get(choice, len(wanted)) for choice in range(TOKENS * CHOICES)]


@pytest.mark.parametrize("kind", KINDS)
def test_with_room_every_expert_has_as_many_rows_and_the_empty_ones_are_zero(kind: str) -> None:
    routing, capacity = routing_of(kind, 0, drops=False), TOKENS
    order = permutation_by_expert(routing.experts, None, EXPERTS, capacity=capacity)
    rows, weights = permute_tokens(tokens_of(0), order), permute_routing_weights(routing.weights, order)
    assert order.counts.tolist() == [capacity] * EXPERTS and len(rows) == capacity * EXPERTS
    for expert in range(EXPERTS):
        true = (routing.experts == expert).nonzero()
        own = slice(expert * capacity, (expert + 1) * capacity)
        assert torch.equal(rows[own][: len(true)], tokens_of(0)[true[:, 0]]) and not rows[own][len(true) :].any()
        assert (
            torch.equal(weights[own][: len(true)], routing.weights[true[:, 0], true[:, 1]])
            and not weights[own][len(true) :].any()
        )


@pytest.mark.parametrize("capacity", [None, TOKENS])
def test_spreading_and_collecting_have_each_others_gradients(capacity: int | None) -> None:
    routing = routing_of("random", 0, drops=True)
    order = permutation_by_expert(routing.experts, routing.kept, EXPERTS, capacity=capacity)
    rows = torch.randn((len(order.choices), WIDTH), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute_tokens(x, order), tokens_of(0))
    assert torch.autograd.gradcheck(lambda x: unpermute_tokens(x, order), rows)
    assert torch.autograd.gradcheck(lambda x: permute_routing_weights(x, order), routing.weights)


def through(
    dispatcher: TokenDispatcher, first: int, share: float, kind: str, *, rank: int, drops: bool, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens to their experts and back: output, and the gradients of tokens and weights."""
    tokens, routing = tokens_of(rank), routing_of(kind, rank, drops=drops)
    dispatched = dispatcher.dispatch(tokens, routing, capacity)
    rows = dispatched.wait()
    owners = first + torch.arange(len(rows.counts)).repeat_interleave(rows.counts)
    output = dispatcher.combine(share * say(rows.tokens, owners.double()) * rows.weights[:, None], dispatched)
    (output * target_of(rank)).sum().backward()
    kept = 1.0 if routing.kept is None else routing.kept
    return output.detach(), tokens.grad, routing.weights.grad * kept


def on_a_rank(
    kind: str, dispatcher: str, sizes: dict[str, Any], drops: bool, capacity: int | None
) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    mesh = mesh_of(**sizes)
    chosen = make_token_dispatcher(dispatcher, EXPERTS, mesh)
    assert (
        type(chosen)
        is {
            "allgather": AllGatherTokenDispatcher,
            "alltoall": AllToAllTokenDispatcher,
            "flex": AllToAllTokenDispatcher,
        }[dispatcher]
    )
    first = EXPERTS // mesh.ep.size * mesh.ep.rank
    return mesh.world.rank, through(
        chosen, first, 1.0 / mesh.etp.size, kind, rank=mesh.world.rank, drops=drops, capacity=capacity
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drops, capacity", [(False, None), (True, None), (True, TOKENS)])
def test_alone_a_token_gets_the_weighed_sum_of_its_experts(kind: str, drops: bool, capacity: int | None) -> None:
    alone = make_token_dispatcher("alltoall", EXPERTS, Mesh.single_process())
    for value, true in zip(
        through(alone, 0, 1.0, kind, rank=0, drops=drops, capacity=capacity),
        expected(kind, 0, drops=drops),
        strict=True,
    ):
        torch.testing.assert_close(value, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("drops, capacity", [(False, None), (True, TOKENS)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("sizes", [{"ep": 4, "etp": 1}, {"ep": 2, "etp": 2}, {"ep": 1, "etp": 2}], ids=str)
def test_a_token_gets_the_same_from_experts_that_are_elsewhere(
    world: Worlds, sizes: dict[str, int], dispatcher: str, kind: str, drops: bool, capacity: int | None
) -> None:
    mesh = {"expert_model_parallel_size": sizes["ep"], "expert_tensor_parallel_size": sizes["etp"]}
    for rank, found in world(4).run(on_a_rank, kind, dispatcher, mesh, drops, capacity):
        for value, true in zip(found, expected(kind, rank, drops=drops), strict=True):
            torch.testing.assert_close(value, true, rtol=1e-12, atol=1e-12)


def by_library_on_a_rank(kind: str, drops: bool, capacity: int | None) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    mesh = mesh_of(expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    sys.modules["deep_ep"] = deep_ep_stand_in
    try:
        chosen = make_token_dispatcher("flex", EXPERTS, mesh, Kernels(moe_flex_dispatcher=DeepEP))
        assert isinstance(chosen, FlexTokenDispatcher)
        return mesh.world.rank, through(
            chosen, EXPERTS // 4 * mesh.ep.rank, 1.0, kind, rank=mesh.world.rank, drops=drops, capacity=capacity
        )
    finally:
        del sys.modules["deep_ep"]


@pytest.mark.parametrize("drops, capacity", [(False, None), (True, None), (True, TOKENS)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_library_that_sends_each_token_once_brings_the_same(
    world: Worlds, kind: str, drops: bool, capacity: int | None
) -> None:
    for rank, found in world(4).run(by_library_on_a_rank, kind, drops, capacity):
        # The library's weights are fp32.
        for value, true in zip(found, expected(kind, rank, drops=drops), strict=True):
            torch.testing.assert_close(value, true, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"device": "cpu"}, "for GPUs"),
        ({}, "not installed"),
        ({"dtype": torch.float16}, "bf16 only"),
        ({"experts_cut": True}, "--expert-tensor-parallel-size 1"),
        ({"overlapped_experts": True}, "--moe-shared-expert-overlap"),
        ({}, "importing it fails: ImportError: undefined symbol"),
        ({}, ""),
    ],
)
def test_the_library_says_why_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    fits = KernelRequirements(device="cuda", dtype=torch.bfloat16)
    broken = words if "importing" in words else ""
    monkeypatch.setattr("megatron.core.kernels.external.deep_ep.is_deep_ep_installed", lambda: words != "not installed")
    monkeypatch.setattr("megatron.core.kernels.external.deep_ep.import_problem", lambda _: broken)
    reason = deep_ep_unsupported_reason(replace(fits, **changes))
    assert words in reason and bool(words) == bool(reason)


def test_a_package_that_is_installed_and_broken_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "compiled_for_another_torch.py").write_text("raise ImportError('undefined symbol: x\\nand more')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_problem("compiled_for_another_torch") == (
        "compiled_for_another_torch is installed, but importing it fails: ImportError: undefined symbol: x"
    )
    assert import_problem("json") == ""
