"""The loss whose logits are never all there, against torch's cross entropy of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.kernels.ops import linear_loss
from megatron.core.kernels.ops.linear_loss import VocabularyShard, blockwise_linear_cross_entropy
from megatron.core.parallel.mesh import Axis
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.helpers.world import Worlds
from tests.unit.tensor_parallel import ranks

T, H, V, PADDED = 23, 6, 21, 24


@pytest.fixture(params=[512, 5], ids=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens at once, or five at a time."""
    monkeypatch.setattr(linear_loss, "_FEWEST", request.param)


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    drawn = [ranks.data("states", T, H), ranks.data("words", PADDED, H), ranks.data("biases", PADDED)]
    found = [one.to(dtype).requires_grad_() for one in drawn]
    return found[0], found[1], found[2] if bias else None


def targets(ignored: bool = False) -> Tensor:
    found = (ranks.data("targets", T) * 10).long().remainder(V)
    return found.masked_fill(torch.arange(T) % 3 == 0, -1) if ignored else found


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, softcap: float | None) -> Tensor:
    logits = F.linear(x, weight, bias)[:, :V]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, wanted, reduction="none", ignore_index=-1)


def outcome(losses: Tensor, weights: Tensor, given: list[Tensor]) -> list[Tensor]:
    return [losses.detach(), *torch.autograd.grad((losses * weights.to(losses.dtype)).sum(), given)]


WEIGHTS = {"the sum": torch.ones(T), "the mean": torch.full((T,), 1 / T), "each its own": torch.linspace(0.0, 2.0, T)}


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients_are_those_of_all_logits(
    blocks: None, dtype: torch.dtype, tolerance: float, ignored: bool, softcap: float | None, bias: bool
) -> None:
    words = VocabularyShard(0, V, softcap, lambda stated: stated)
    for weights in WEIGHTS.values():
        given = [one for one in inputs(dtype, bias=bias) if one is not None]
        exact = [one.detach().double().requires_grad_() for one in given]
        found = outcome(
            blockwise_linear_cross_entropy(*given[:2], given[2] if bias else None, targets(ignored), words),
            weights,
            given,
        )
        expected = outcome(by_torch(*exact[:2], exact[2] if bias else None, targets(ignored), softcap), weights, exact)
        assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_a_second_backward_pass_over_the_same_losses_is_exact_too() -> None:
    given = list(inputs())
    losses = blockwise_linear_cross_entropy(*given, targets(), VocabularyShard(0, V, None, lambda stated: stated))
    expected = torch.autograd.grad(by_torch(*given, targets(), None).mean() * 3, given)
    for _ in range(2):
        for a, b in zip(torch.autograd.grad(losses.mean() * 3, given, retain_graph=True), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_nothing_is_learned_where_no_token_counts_or_nothing_asks_for_it() -> None:
    x, weight, bias = inputs()
    words = VocabularyShard(0, V, None, lambda stated: stated)
    losses = blockwise_linear_cross_entropy(x, weight, bias, torch.full((T,), -1), words)
    assert not losses.any() and not any(one.any() for one in torch.autograd.grad(losses.sum(), (x, weight, bias)))
    frozen = blockwise_linear_cross_entropy(x, weight.detach(), None, targets(), words)
    torch.testing.assert_close(
        torch.autograd.grad(frozen.sum(), x)[0],
        torch.autograd.grad(by_torch(x, weight, None, targets(), None).sum(), x)[0],
        rtol=1e-12,
        atol=1e-12,
    )
    with torch.no_grad():
        torch.testing.assert_close(
            blockwise_linear_cross_entropy(x, weight, bias, targets(), words),
            by_torch(x, weight, bias, targets(), None),
        )


def test_logits_far_from_zero_and_far_apart_are_exact() -> None:
    x, weight = (
        torch.tensor([[1.0], [1.0]], requires_grad=True),
        torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True),
    )
    losses = blockwise_linear_cross_entropy(
        x, weight, None, torch.tensor([1, 0]), VocabularyShard(0, 3, None, lambda stated: stated)
    )
    losses.sum().backward()
    assert losses.tolist() == [2e4, 0.0] and torch.equal(weight.grad, torch.tensor([[1.0], [-1.0], [0.0]]))
    assert torch.equal(x.grad, torch.tensor([[2e4], [0.0]]))


def test_in_fp16_the_shares_of_rare_words_do_not_vanish_before_they_are_scaled() -> None:
    x, weight = (torch.tensor(rows, dtype=torch.float16, requires_grad=True) for rows in ([[1.0]], [[0.0], [-18.0]]))
    losses = blockwise_linear_cross_entropy(
        x, weight, None, torch.tensor([0]), VocabularyShard(0, 2, None, lambda stated: stated)
    )
    (losses * 65536).sum().backward()
    assert weight.grad[1].item() == pytest.approx(65536 * math.exp(-18.0), rel=2e-3)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp, padded", [(2, 24), (4, 64)])
def test_ranks_that_share_the_vocabulary_find_what_one_finds(
    world: Worlds, tp: int, padded: int, sequence_parallel: bool
) -> None:
    """With 64 rows on 4 ranks, two ranks hold padding alone."""
    for ignored in (False, True):
        alone, whole, matrix, bias = ranks.run_linear_loss(1, padded, False, ignored)
        results = world(tp).run(ranks.run_linear_loss, tp, padded, sequence_parallel, ignored)
        for losses, states, _, _ in results:
            torch.testing.assert_close(losses, alone, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(states, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            torch.cat([result[2] for result in results])[: ranks.V], matrix[: ranks.V], rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(
            torch.cat([result[3] for result in results])[: ranks.V], bias[: ranks.V], rtol=1e-12, atol=1e-12
        )


class Largest(TorchDispatchMode):
    """The most elements that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            self.found = max(self.found, one.numel() if isinstance(one, Tensor) else 0)
        return made


@pytest.mark.parametrize("weights", ["alike", "unlike"])
def test_no_tensor_is_as_large_as_the_logits_of_more_than_an_eighth_of_the_tokens(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_loss, "_FEWEST", 1)
    tokens, words = 400, 300
    x, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(words, 4, requires_grad=True)
    with Largest() as largest:
        losses = blockwise_linear_cross_entropy(
            x,
            weight,
            None,
            torch.zeros(tokens, dtype=torch.long),
            VocabularyShard(0, words, None, lambda stated: stated),
        )
        (losses if weights == "alike" else losses * torch.rand(tokens)).sum().backward()
    assert largest.found == tokens * words // 8
    with Largest() as whole:
        vocab_parallel_cross_entropy(
            F.linear(x, weight)[:, None], torch.zeros(tokens, 1, dtype=torch.long), Axis("tp"), words
        ).sum().backward()
    assert whole.found == tokens * words


def settings() -> Iterator[Any]:
    """Networks whose heads differ."""
    yield pytest.param({}, id="gpt")
    yield pytest.param(
        {"untie_embeddings_and_output_weights": True, "final_logit_softcap": 0.3}, id="untied and capped"
    )
    yield pytest.param({"mtp_num_layers": 2}, id="tokens ahead")
    yield pytest.param({"architecture": "bert"}, id="bert")
    yield pytest.param({"architecture": "t5", "decoder_seq_length": 8, "scale_tied_logits": True}, id="t5")


@pytest.mark.parametrize("changes", list(settings()))
def test_training_goes_as_with_all_logits(changes: dict[str, Any]) -> None:
    rows = {
        impl: train_on(
            tiny.trainer_of(tiny.run_of(tiny.config(fp64=True, cross_entropy_fusion_impl=impl, **changes))), 3
        )
        for impl in ("native", "linear")
    }
    for mine, theirs in zip(*(row[:2] for row in rows.values()), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


def test_auto_takes_it_on_cpus_and_says_why_not_elsewhere() -> None:
    assert select_kernels(KernelRequirements()).cross_entropy is blockwise_linear_cross_entropy
    report = {
        op: (name, why)
        for op, name, why in select_kernels(KernelRequirements(device="cuda", dtype=torch.bfloat16)).report
    }
    assert report["cross_entropy"] == (
        "native",
        "linear: not measured against native on GPUs; asked for, it saves the memory of the logits",
    )
    assert select_kernels(KernelRequirements(dtype=torch.float16)).cross_entropy is None
    fused = select_kernels(KernelRequirements(device="cuda"), {"cross_entropy": "linear"}).cross_entropy
    assert fused is blockwise_linear_cross_entropy and not isinstance(fused, partial)
