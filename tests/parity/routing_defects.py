"""Mistakes around the choice of experts and its balance, for the table of `defects.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel.mesh import Axis
from megatron.core.transformer import router
from megatron.core.transformer.context.forward_context import ForwardContext, MicrobatchContext
from megatron.core.transformer.router import TopKRouter
from megatron.training.state.batch import Batch
from megatron.training.state.step import StepWork
from tests.parity.defect import Defect, collectives_with

_share, _size, _evened, _mean_weight, _after_step = (
    router.local_balancing_loss,
    router.local_router_z_loss,
    router.sinkhorn,
    StepWork._layer_loss_weight,
    TopKRouter.after_step,
)


def _kept(tensor: Tensor, *_: Any) -> Tensor:
    return tensor


def _mean_over_own_tokens(scores: Tensor, chosen: Tensor, *, num_tokens: Tensor, is_token: Tensor | None) -> Tensor:
    own = torch.full_like(num_tokens, len(scores) // len(chosen))
    return _share(scores, chosen, num_tokens=own, is_token=is_token)


def _size_over_own_tokens(scores: Tensor, *, num_tokens: Tensor, is_token: Tensor | None) -> Tensor:
    return _size(scores, num_tokens=torch.full_like(num_tokens, len(scores)), is_token=is_token)


def _count_own_tokens(self: TopKRouter, scores: Tensor, num_sequences: int, is_token: Tensor | None) -> Tensor:
    assert is_token is not None, "the row has padding"
    return is_token.view(-1, num_sequences).sum(0).to(scores.dtype)


def _mask_of_the_first_piece(self: TopKRouter, x: Tensor, context: ForwardContext, fill: int) -> Tensor | None:
    mask = context.token_mask
    return None if mask is None else mask[: len(x)].flatten()


def _every_place_a_token_on_later_stages(self: ForwardContext) -> Tensor | None:
    microbatch = self.microbatch_context
    mask = None if microbatch is None else microbatch.token_masks.get("padding_mask")
    return mask if dist.get_rank() == 0 else None


def _without_the_number_of_data_ranks(self: StepWork, batch: Batch) -> float | Tensor:
    return _mean_weight(self, batch) * self.trainer.run.mesh.dp.size


def _every_microbatch_alike(self: StepWork, batch: Batch) -> float | Tensor:
    return self._scale / (self.num_microbatches * self.trainer.run.mesh.dp.size)


def _without_the_division_of_the_collective(self: StepWork, batch: Batch) -> float | Tensor:
    return _mean_weight(self, batch) / self.trainer.run.mesh.dp_cp.size


def _every_time(self: MicrobatchContext, key: object, make: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return make()


def _a_step_of_one_layer(routers: Sequence[TopKRouter], *, stepped: bool) -> None:
    _after_step(routers[:1], stepped=stepped)


ROUTING: tuple[Defect, ...] = (
    Defect(
        "every rank's balancing loss is a mean of its own tokens",
        (("tp2 sp", "moe-balanced"), ("cp2", "moe-balanced")),
        ((router, "local_balancing_loss", _mean_over_own_tokens),),
    ),
    Defect(
        "every rank's z-loss is a mean of its own tokens",
        (("tp2 sp", "moe-balanced"), ("cp2", "moe-balanced")),
        ((router, "local_router_z_loss", _size_over_own_tokens),),
    ),
    Defect(
        "a rank knows only its own choices",
        (("tp2 sp", "moe-balanced"), ("cp2", "moe-balanced"), ("ep4 dp4", "moe-no-aux")),
        ((router, "collectives", collectives_with(all_reduce=_kept)),),
    ),
    Defect(
        "tokens that are not padding are counted on each rank alone",
        (("tp2 sp ep2 dp2", "moe-sft"), ("cp2 ep2", "moe-sft")),
        ((TopKRouter, "_count_tokens", _count_own_tokens),),
    ),
    Defect(
        "every tensor rank takes the first piece of the mask of padding",
        (("tp2 sp ep2 dp2", "moe-sft"), ("tp2 ep2 etp1 dp2 alltoall", "moe-sft")),
        ((TopKRouter, "_token_mask", _mask_of_the_first_piece),),
    ),
    Defect(
        "padding is left out on the first rank only",
        (("pp4", "moe-sft"), ("dp2", "moe-sft")),
        ((ForwardContext, "token_mask", property(_every_place_a_token_on_later_stages)),),
    ),
    Defect(
        "balancing losses count once a data rank",
        (("ep2 dp2 alltoall", "moe-balanced"), ("pp2 ep2 dp2", "moe-balanced")),
        ((StepWork, "_layer_loss_weight", _without_the_number_of_data_ranks),),
    ),
    Defect(
        "balancing losses of short microbatches count as much as those of long ones",
        (("pp2 ep2 dp2", "moe-balanced"), ("tp2 sp", "moe-balanced")),
        ((StepWork, "_layer_loss_weight", _every_microbatch_alike),),
    ),
    Defect(
        "balancing losses forget that the collective divides",
        (("ep2 dp2 average", "moe-mean"),),
        ((StepWork, "_layer_loss_weight", _without_the_division_of_the_collective),),
    ),
    Defect(
        "a recomputed pass counts its choices again",
        (("recompute-uniform tp2 sp pp2", "moe-global"),),
        ((MicrobatchContext, "compute_once", _every_time),),
    ),
    Defect(
        "the counts of a step are kept for the next",
        (("tp2 sp pp2", "moe-global"), ("ep4 dp4", "moe-no-aux")),
        ((TopKRouter, "after_step", staticmethod(_a_step_of_one_layer)),),
    ),
    Defect(
        "each rank evens out its own tokens",
        (("tp2 sp ep2 etp1", "moe-sinkhorn"), ("cp2", "moe-sinkhorn")),
        ((router, "sinkhorn", lambda scores, axis: _evened(scores, Axis("alone"))),),
    ),
    Defect(
        "forced balance goes by the place of a token on its rank",
        (("tp2 sp ep2 dp2", "moe-forced"),),
        ((router, "collectives", collectives_with(local_chunk=lambda tensor, axis: tensor.chunk(axis.size)[0])),),
    ),
)
