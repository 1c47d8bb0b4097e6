from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parallel.mesh import Axis
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.helpers.world import Worlds
from tests.unit.tensor_parallel import ranks
from tests.unit.tensor_parallel.ranks import B, S, V, data


def expected(padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """torch's cross entropy over the true vocabulary, in fp64, of logits rounded to `dtype`."""
    logits = (4 * data("logits", S, B, padded)).to(dtype).double().requires_grad_()
    targets = (data("targets", S, B) * 10).long().remainder(V)
    losses = F.cross_entropy(logits[..., :V].reshape(-1, V), targets.reshape(-1), reduction="none").view(S, B)
    (losses * data("weights", S, B)).sum().backward()
    return losses.detach(), logits.grad


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("tp, padded", [(1, V), (1, 24), (2, 24), (4, 24), (4, 64)])
def test_loss_and_gradient_are_torchs_over_the_true_vocabulary(
    world: Worlds, tp: int, padded: int, dtype: torch.dtype, tolerance: float
) -> None:
    results = [ranks.run_loss(1, padded, dtype)] if tp == 1 else world(tp).run(ranks.run_loss, tp, padded, dtype)
    losses, gradient = expected(padded, dtype)
    for found, _ in results:
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        # Losses are summed in fp32 even for logits of half precision, so they are as exact as the logits allow.
        torch.testing.assert_close(found.double(), losses, rtol=min(tolerance, 1e-5), atol=min(tolerance, 1e-5))
    whole = torch.cat([piece for _, piece in results], dim=-1)
    assert whole.dtype == dtype
    torch.testing.assert_close(whole.double(), gradient, rtol=tolerance, atol=tolerance)
    assert (whole[..., V:] == 0).all(), "padded columns take no part"


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits * 1.0, torch.tensor([[1]]), Axis("tp"), 3)
    losses.sum().backward()
    assert losses.item() == pytest.approx(2e4) and torch.equal(logits.grad, torch.tensor([[[1.0, -1.0, 0.0]]]))


def test_more_rows_than_one_block_make_no_difference() -> None:
    logits = torch.randn(50, 3, 7, dtype=torch.float64)
    targets = torch.randint(0, 7, (50, 3))
    found = vocab_parallel_cross_entropy(logits.clone(), targets, Axis("tp"), 7)
    torch.testing.assert_close(
        found, F.cross_entropy(logits.view(-1, 7), targets.view(-1), reduction="none").view(50, 3)
    )
