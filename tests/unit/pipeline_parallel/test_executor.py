"""Real ranks walk real plans: losses and gradients are those of the model run in one piece."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from numpy import ndarray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.config.plan.layers import Placement
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.overlap import OverlappedComputation
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.pipeline_parallel.executor import Shape, run_rank_script
from megatron.core.pipeline_parallel.schedules import (
    Plan,
    forward_only_plan,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    one_f_one_b_dual_batch,
    with_reduction_actions,
    zero_bubble_h1,
    zero_bubble_v,
)
from megatron.core.pipeline_parallel.timeline import simulate_pipeline_plan
from megatron.core.pipeline_parallel.transfers import build_rank_script
from megatron.core.tensor_parallel.linear import local_linear
from megatron.core.tensor_parallel.region import TensorParallelRegion

ROWS, WIDTH = 3, 5


@dataclass
class TinyWork:
    """Residual stages of one matrix each, a different input every microbatch.

    memory: send (hidden, memory, scale) as T5 does; memory is made by stage 0, read by the odd stages and handed on by
    all, and scale is an integer. frozen: stages whose matrix is not trained. slow: sleep before some passes.
    """

    stages: int
    microbatches: int
    memory: bool = False
    frozen: tuple[int, ...] = ()
    slow: bool = False
    device: torch.device = torch.device("cpu")
    losses: dict[int, float] = field(default_factory=dict)
    events: list[tuple] = field(default_factory=list)
    gradients: list[ndarray | None] = field(default_factory=list)
    sent: list[StorageWeakRef] = field(default_factory=list)
    taken: list[StorageWeakRef] = field(default_factory=list)
    wgrad_store: WeightGradStore = field(default_factory=WeightGradStore)
    most_sent: int = 0
    most_taken: int = 0

    def __post_init__(self) -> None:
        trained = [stage not in self.frozen for stage in range(self.stages)]
        self.weights = [draw(stage, WIDTH, WIDTH).requires_grad_(trains) for stage, trains in enumerate(trained)]

    def input_specs(self, stage: int, microbatch: int) -> tuple[Shape, ...]:
        rows = ROWS + microbatch % 2
        one = ((rows, WIDTH), torch.float64)
        return (one, one, ((1,), torch.int64)) if self.memory else (one,)

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.slow and (stage * 7 + microbatch * 3) % 4 == 0:
            time.sleep(0.004)
        self.taken += [StorageWeakRef(tensor.untyped_storage()) for tensor in received]
        self.most_sent, self.most_taken = max(self.most_sent, alive(self.sent)), max(self.most_taken, alive(self.taken))
        self.events.append(("F", stage, torch.is_grad_enabled()))
        outputs = self.stage(stage, microbatch, received)
        if stage < self.stages - 1:
            self.sent.append(StorageWeakRef(outputs[0].untyped_storage()))
        else:
            self.losses[microbatch] = outputs[0].item()
        return outputs

    def stage(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The stage's mathematics."""
        if stage == 0:
            hidden = draw(100 + microbatch, ROWS + microbatch % 2, WIDTH)
            memory, scale = torch.sin(hidden @ self.weights[0]), torch.tensor([2 + microbatch])
        elif self.memory:
            hidden, memory, scale = received
        else:
            (hidden,) = received
        hidden = hidden + torch.tanh(hidden) @ self.weights[stage]
        if self.memory and stage % 2:
            hidden = hidden + memory * scale
        if stage == self.stages - 1:
            return (hidden.square().mean() / self.microbatches,)
        return (hidden, memory, scale) if self.memory else (hidden,)

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        self.events.append(("B", stage, last))

    def start_gradient_reduction(self, stage: int) -> None:
        self.events.append(("R", stage, self.weights[stage].grad is not None))


def draw(seed: int, *shape: int) -> Tensor:
    """Fixed random numbers of about unit size per row."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def alive(references: list[StorageWeakRef]) -> int:
    """How many of the tensors still hold memory."""
    return sum(not reference.expired() for reference in references)


def work_for(plan: Plan, options: dict) -> TinyWork:
    """As many stages and microbatches as the plan has."""
    actions = [action for row in plan for action in row]
    return TinyWork(1 + max(a.stage for a in actions), 1 + max(a.microbatch for a in actions), **options)


def walk(plan: Plan, overlap: bool, options: dict, dual_batch_overlap: bool = False) -> TinyWork:
    """Run on one rank; its work afterwards, with the gradients as arrays."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    work = work_for(plan, options)
    ranks = tuple(range(size))
    groups = {name: dist.new_group(list(ranks)) if size > 1 else None for name in "FB"}
    overlap = OverlappedComputation(work.wgrad_store)
    axis, backward_axis = (Axis(name, size, rank, ranks, group, overlap=overlap) for name, group in groups.items())
    run_rank_script(
        build_rank_script(plan, rank, overlap=overlap, dual_batch_overlap=dual_batch_overlap),
        work=work,
        axis=axis,
        backward_axis=backward_axis,
    )
    left = alive(work.sent + work.taken)
    assert left == 0, f"{left} activations outlive the plan"
    work.gradients = [None if weight.grad is None else weight.grad.numpy() for weight in work.weights]
    work.weights, work.sent, work.taken = [], [], []
    return work


def serial(work: TinyWork) -> dict[int, float]:
    """The whole network in one graph; leaves the gradients in the weights."""
    losses = {}
    for microbatch in range(work.microbatches):
        passed: tuple[Tensor, ...] = ()
        for stage in range(work.stages):
            passed = work.stage(stage, microbatch, passed)
        passed[0].backward()
        losses[microbatch] = passed[0].item()
    return losses


def compare(plan: Plan, works: list[TinyWork], options: dict) -> None:
    """Losses of the last stage and gradients of all stages, rank by rank, with those of the network in one piece."""
    reference = work_for(plan, options)
    losses = {microbatch: loss for work in works for microbatch, loss in work.losses.items()}
    assert losses == pytest.approx(serial(reference), abs=1e-12)
    for rank, row in enumerate(plan):
        for stage in {action.stage for action in row}:
            mine, theirs = works[rank].gradients[stage], reference.weights[stage].grad
            assert (mine is None) == (theirs is None) == (stage in reference.frozen), f"stage {stage}"
            if mine is not None:
                error = float(abs(mine - theirs.numpy()).max())
                assert error < 1e-12, f"gradient of stage {stage} is off by {error}"


PLANS = {
    "gpipe on 2": gpipe(2, 5),
    "1f1b on 2": one_f_one_b(2, 5),
    "1f1b on 3, fewer microbatches than ranks": one_f_one_b(3, 2),
    "1f1b on 4": one_f_one_b(4, 6),
    "gpipe with chunks": gpipe(2, 3, vpp=2),
    "zero bubble on 2": zero_bubble_h1(2, 5),
    "zero bubble on 4": zero_bubble_h1(4, 6),
    "zero bubble on 3, fewer microbatches than ranks": zero_bubble_h1(3, 2),
    "there and back on 2": zero_bubble_v(2, 5),
    "there and back on 4": zero_bubble_v(4, 9),
    "there and back on 3, fewer microbatches than ranks": zero_bubble_v(3, 2),
    "interleaved 2x2": interleaved_1f1b(2, 2, 4, 2),
    "interleaved 2x2, group of 3": interleaved_1f1b(2, 2, 5, 3),
    "interleaved 3x3": interleaved_1f1b(3, 3, 6, 3),
    "interleaved 4x2": interleaved_1f1b(4, 2, 8, 4),
    "interleaved 4x2, group of 5": interleaved_1f1b(4, 2, 9, 5),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_losses_and_gradients_are_those_of_one_piece(world, name: str, memory: bool, overlap: bool) -> None:
    plan, options = PLANS[name], {"memory": memory}
    compare(plan, world(len(plan)).run(walk, plan, overlap, options), options)


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_of_uneven_speed_give_the_same(world, overlap: bool) -> None:
    plan = interleaved_1f1b(4, 2, 8, 4)
    compare(plan, world(4).run(walk, plan, overlap, {"slow": True}), {})


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pp", [2, 4])
def test_passes_that_are_done_together_give_the_same(world, pp: int, overlap: bool) -> None:
    plan, options = with_reduction_actions(one_f_one_b_dual_batch(pp, 7)), {"slow": True}
    compare(plan, world(pp).run(walk, plan, overlap, options, True), options)


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (3,)])
def test_gradients_pass_through_frozen_stages_and_end_there(world, frozen: tuple[int, ...]) -> None:
    plan, options = one_f_one_b(4, 3), {"frozen": frozen}
    compare(plan, world(4).run(walk, plan, True, options), options)


@pytest.mark.parametrize("plan", [one_f_one_b(1, 3), interleaved_1f1b(1, 3, 4, 2)])
@pytest.mark.parametrize("memory", [False, True])
def test_one_rank_needs_no_process_group(plan: Plan, memory: bool) -> None:
    options = {"memory": memory}
    compare(plan, [walk(plan, True, options)], options)


@pytest.mark.parametrize("placement", ["wrap", "v"])
def test_evaluation_runs_every_stage_without_gradients(world, placement: Placement) -> None:
    plan, options = forward_only_plan(2, 2, 5, placement), {"memory": True}
    works = world(2).run(walk, plan, True, options)
    assert works[1 if placement == "wrap" else 0].losses == pytest.approx(serial(work_for(plan, options)), abs=1e-12)
    for rank, work in enumerate(works):
        assert work.events == [("F", action.stage, False) for action in plan[rank]]


def test_the_caller_hears_of_each_last_backward_and_each_reduction(world) -> None:
    plan = with_reduction_actions(interleaved_1f1b(2, 2, 4, 2))
    for rank, work in enumerate(world(2).run(walk, plan, True, {})):
        for stage in (rank, rank + 2):
            heard = [event for event in work.events if event[1] == stage and event[0] != "F"]
            assert heard == [("B", stage, False)] * 3 + [("B", stage, True), ("R", stage, True)]
        assert [event[:2] for event in work.events] == [(action.op, action.stage) for action in plan[rank]]


@pytest.mark.parametrize("plan", [gpipe(2, 8), one_f_one_b(2, 8), one_f_one_b(4, 8), interleaved_1f1b(2, 2, 8, 2)])
def test_outputs_go_once_sent_and_inputs_once_their_backward_is_done(world, plan: Plan) -> None:
    peak = simulate_pipeline_plan(plan).peak
    for rank, work in enumerate(world(len(plan)).run(walk, plan, True, {})):
        assert work.most_sent <= 1, f"rank {rank} still holds {work.most_sent} outputs that it has sent"
        assert work.most_taken <= peak[rank], f"rank {rank} holds {work.most_taken} inputs, the plan says {peak[rank]}"


def test_a_script_for_another_rank_is_refused() -> None:
    with pytest.raises(AssertionError, match="the script is for rank 1 of 2, this is rank 0 of 1"):
        run_rank_script(
            build_rank_script(one_f_one_b(2, 2), 1),
            work=TinyWork(2, 2),
            axis=Axis("pp"),
            backward_axis=Axis("pp_backward"),
        )


class Waits(torch.autograd.Function):
    """Waits for other ranks on the way back, and notes whether the gradient of a weight has come meanwhile."""

    @staticmethod
    def forward(context, hidden: Tensor, axis: Axis, weight: Tensor, came: list[bool]) -> Tensor:
        context.others = axis, weight, came
        return hidden * 1.0

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        axis, weight, came = context.others
        before = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        collectives.all_reduce(gradient, axis)
        came.append(weight.grad is not None and not torch.equal(weight.grad, before))
        return gradient, None, None, None


@dataclass
class DelayedWork(TinyWork):
    """A layer, a wait for others on the way back, and another layer."""

    came: list[bool] = field(default_factory=list)
    axis: Axis = field(default_factory=lambda: Axis("ep"))

    def stage(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        region = TensorParallelRegion(self.axis, wgrad_store=self.axis.overlap.wgrad_store)
        hidden = local_linear(draw(100 + microbatch, ROWS, WIDTH), self.weights[0], None, region)
        hidden = local_linear(
            Waits.apply(torch.tanh(hidden), self.axis, self.weights[1], self.came), self.weights[1], None, region
        )
        return (hidden.square().mean() / self.microbatches,)


@pytest.mark.parametrize("delays, came", [(False, [False, False, False]), (True, [True, True, False])])
def test_gradients_of_weights_wait_until_a_backward_pass_waits_for_others_but_not_in_the_last(
    delays: bool, came: list[bool]
) -> None:
    work, plain = DelayedWork(1, 3), DelayedWork(1, 3)
    for each in (work, plain):
        each.weights = [draw(stage, WIDTH, WIDTH).requires_grad_() for stage in range(2)]
    axis = replace(work.axis, name="pp")
    run_rank_script(build_rank_script(one_f_one_b(1, 3), 0), work=work, axis=axis, backward_axis=axis, delays=delays)
    assert work.came == came, "in the wait of each pass"
    assert [last for what, _, last in work.events if what == "B"] == [False, False, True]
    serial(plain)
    for mine, theirs in zip(work.weights, plain.weights, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
