#!/usr/bin/env python3
"""What of each kind of communication hides behind compute, and how long pipelines idle, beside what theory says.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --only pipeline

Ranks are processes with gloo. Compute and transport are sleeps, so that the figures do not hang on how busy a machine is: a
matmul, a layer or a stage takes its time, and what is sent counts as arrived only some time after it was sent, on a link that
carries one thing after the other. Everything between is the code that trains. Three times are compared in turn: without that
transport, with all of it waited for as soon as it begins, and as the flag has it.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.distributed import ddp
from megatron.core.distributed.ddp import DataParallel
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.overlap import OverlappedComputation
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import ParamSpec, constant_initializer, meta_parameter, set_global_param_names
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.pipeline_parallel import executor
from megatron.core.pipeline_parallel.executor import Shape
from megatron.core.pipeline_parallel.schedules import (
    Plan,
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
from megatron.core.tensor_parallel import overlapped_matmul
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.moe import GroupedMLP, MoELayer
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.world import Worlds

ROUNDS, STEP, CPU = 5, 0.04, torch.device("cpu")
DUAL_BATCH = "1f1b dual-batch"  # as --overlap-moe-expert-parallel-comm has it


@dataclass(slots=True)
class Link:
    """Carries one thing after the other. seconds: of each. at_once: the sender waits until the message has arrived."""

    seconds: float
    at_once: bool = False
    free: float = 0.0

    def late(self, works: Any) -> Any:
        """Works that were begun now, done when the link has carried what they send."""
        self.free = max(self.free, time.perf_counter()) + self.seconds
        late = Late([work for work in works if work is not None], self.free)
        if self.at_once:
            late.wait()
        return late


@dataclass(slots=True)
class Late:
    """Works that are done at a moment, and not before."""

    works: list[Any]
    ready: float

    def wait(self) -> None:
        """Wait for the works, once, and for the time."""
        works, self.works = self.works, []
        for work in works:
            work.wait()
        time.sleep(max(0.0, self.ready - time.perf_counter()))


class Courier:
    """Sends messages some time after it is asked to, in order."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.waiting = seconds, queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()

    def isend(self, tensor: Tensor, dst: int, group: Any) -> Any:
        """As torch's; done when it has been sent."""
        sent = threading.Event()
        self.waiting.put((time.perf_counter() + self.seconds, tensor, dst, group, sent))
        return sent

    def _carry(self) -> None:
        while True:
            due, tensor, dst, group, sent = self.waiting.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            dist.isend(tensor, dst=dst, group=group).wait()
            sent.set()


class Slow(torch.autograd.Function):
    """Takes its time forward and twice that backward, or where gradients of weights wait, once in each part."""

    @staticmethod
    def forward(
        context: Any, tensor: Tensor, weight: Tensor, seconds: float, wgrad_store: WeightGradStore | None
    ) -> Tensor:
        context.seconds, context.wgrad_store = seconds, wgrad_store
        context.save_for_backward(weight)
        time.sleep(seconds)
        return tensor * 1.0

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (weight,), wgrad_store = context.saved_tensors, context.wgrad_store

        def of_weight() -> tuple[Tensor]:
            time.sleep(context.seconds)
            return (torch.zeros_like(weight),)

        time.sleep(context.seconds)
        if wgrad_store is not None and wgrad_store.is_delaying:
            wgrad_store.put([weight], of_weight)
            return gradient, None, None, None
        return gradient, of_weight()[0], None, None


def timed(*runs: Callable[[], None]) -> list[float]:
    """Seconds of each on the slowest rank, the least of some rounds taken in turn: whatever else a machine does only adds."""
    samples: list[list[float]] = []
    for _ in range(ROUNDS):
        row = []
        for run in runs:
            dist.barrier()
            began = time.perf_counter()
            run()
            spent = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            row.append(spent.item())
        samples.append(row)
    return [min(times) for times in zip(*samples, strict=True)]


# Tensor ranks: pieces of the sequence beside products.


def tensor_here(delay: float) -> tuple[list[float], float]:
    """A product whose input is gathered, and one that is summed. A product of a piece takes STEP."""
    size = dist.get_world_size()
    axis = Mesh.build(ParallelConfig(tensor_model_parallel_size=size), CPU).tp
    x, matrix = torch.zeros(4, 1, 8), torch.zeros(8, 8)

    def run(link: Link | None) -> None:
        def start_shift(arriving: Tensor, tensor: Tensor, axis: Axis) -> list[Any]:
            works = collectives.start_ring_shift(arriving, tensor, axis)
            return works if link is None else [link.late(works)]

        with (
            patch.object(
                overlapped_matmul,
                "collectives",
                SimpleNamespace(**{**vars(collectives), "start_ring_shift": start_shift}),
            ),
            patch.object(overlapped_matmul, "_matmul_into", lambda *_: time.sleep(STEP)),
        ):
            whole = overlapped_matmul.all_gather_matmul(x, matrix, None, axis)[0]
            overlapped_matmul.matmul_reduce_scatter(whole, matrix, axis)

    seconds = timed(lambda: run(None), lambda: run(Link(delay, at_once=True)), lambda: run(Link(delay)))
    return seconds, seconds[0] + 2 * (size - 1) * max(0.0, delay - STEP)


# Data ranks: gradients beside the backward pass, parameters beside the forward pass.


class Layers(nn.Module):
    """Layers of one number each, of which each takes its time."""

    def __init__(self, mesh: Mesh, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Slept(mesh) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """x, after all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


class Slept(nn.Module):
    """A layer of one number that takes STEP."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.weight = meta_parameter(ParamSpec((64,), constant_initializer(0.0), "vector"), mesh, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x."""
        return Slow.apply(x, self.weight, STEP, None)


def data_here(delay: float, count: int, what: str) -> tuple[list[float], float]:
    """A step of `count` layers, each with a bucket of its own, whose sum or gather takes so long."""
    mesh = Mesh.build(ParallelConfig(), CPU)

    def wrapped(overlaps: bool) -> DataParallel:
        network = Layers(mesh, count)
        set_global_param_names(network)
        materialize_parameters(network, mesh, 1)
        return DataParallel(
            network,
            mesh,
            grad_dtype=torch.float32,
            sharded=True,
            bucket_size=64,
            average=False,
            overlap_reduce=overlaps and what == "reduce",
            overlap_gather=overlaps and what == "gather",
        )

    def run(parallel: DataParallel, link: Link | None) -> None:
        starts = {"reduce": "start_reduce_scatter", "gather": "start_all_gather"}[what]

        def start(*arguments: Any) -> Any:
            work = getattr(collectives, starts)(*arguments)
            return work if link is None else link.late([work])

        with patch.object(ddp, "collectives", SimpleNamespace(**{**vars(collectives), starts: start})):
            parallel.zero_gradients()
            if what == "gather":
                parallel.start_gather()
            parallel.before_last_backward()
            parallel.module(torch.zeros(1, requires_grad=True)).sum().backward()
            parallel.start_reduction()
            parallel.finish_reduction()

    plain, overlapped = wrapped(False), wrapped(True)
    seconds = timed(lambda: run(plain, None), lambda: run(plain, Link(delay)), lambda: run(overlapped, Link(delay)))
    # The last sum begins with the last gradient, and the first gather is waited for; a layer takes two steps back, one ahead.
    return seconds, seconds[0] + delay + (count - 1) * max(0.0, delay - (2 * STEP if what == "reduce" else STEP))


# Expert ranks: the shared expert while tokens travel.


def expert_here(delay: float) -> tuple[list[float], float]:
    """A forward pass of a layer with experts, whose shared one takes STEP."""
    layers = []
    for overlaps in (False, True):
        run = tiny.run_of(
            tiny.config(
                dist.get_world_size(),
                num_experts=4,
                expert_model_parallel_size=dist.get_world_size(),
                moe_token_dispatcher_type="alltoall",
                moe_shared_expert_intermediate_size=16,
                moe_shared_expert_overlap=overlaps,
            )
        )
        layers.append(
            next(
                part for stage in tiny.trainer_of(run).stages for part in stage.modules() if isinstance(part, MoELayer)
            )
        )

    def go(layer: MoELayer, link: Link | None) -> None:
        begin, shared = collectives.start_all_to_all, MoELayer._shared_experts_output

        def start_exchange(tensor: Tensor, *sizes: Any) -> tuple[Tensor, Any]:
            coming, work = begin(tensor, *sizes)
            there = link is not None and tensor.shape[-1] > 1 and not returning
            if tensor.shape[-1] > 1:
                returning.append(True)
            return coming, link.reduce_deferred([work]) if there else work

        def slept(self: MoELayer, *arguments: Any) -> Tensor | None:
            time.sleep(STEP)
            return shared(self, *arguments)

        returning: list[bool] = []  # only the way to the experts is delayed: on the way back nothing is left to do
        with (
            patch.object(collectives, "start_all_to_all", start_exchange),
            patch.object(MoELayer, "_shared_experts_output", slept),
            torch.no_grad(),
        ):
            layer(torch.ones(8, 1, 32), ForwardContext(AttentionMaskSpec()))

    plain, overlapped = layers
    seconds = timed(lambda: go(plain, None), lambda: go(plain, Link(delay)), lambda: go(overlapped, Link(delay)))
    return seconds, seconds[0] + max(0.0, delay - STEP)


def passes_here(delay: float, flag: str) -> tuple[list[float], float]:
    """Steps of a network whose attention and experts each take STEP forward and twice that backward; with dual-batch overlap, or with
    gradients of weights that wait, and without."""
    layers, size = 2, dist.get_world_size()
    trainers = [
        tiny.trainer_of(
            tiny.run_of(
                tiny.config(
                    size,
                    num_layers=layers,
                    num_experts=4,
                    expert_model_parallel_size=size,
                    moe_token_dispatcher_type="alltoall",
                    **{flag: on},
                )
            )
        )
        for on in (False, True)
    ]
    experts, layer, begin = GroupedMLP.forward, MoELayer.forward, collectives.start_all_to_all

    def slow(x: Tensor, wgrad_store: WeightGradStore | None) -> Tensor:
        return Slow.apply(x, torch.zeros(1, requires_grad=True), STEP, wgrad_store)

    def slow_experts(self: GroupedMLP, rows: Any) -> Tensor:
        return slow(experts(self, rows), self.build.wgrad_store)

    def after_attention(self: MoELayer, x: Tensor, *others: Any) -> Any:
        return layer(self, slow(x, self.build.wgrad_store), *others)

    def go(trainer: Trainer, link: Link | None) -> None:
        def start_exchange(tensor: Tensor, *sizes: Any) -> tuple[Tensor, Any]:
            coming, work = begin(tensor, *sizes)
            return coming, work if link is None or tensor.shape[-1] == 1 else link.late([work])

        with (
            patch.object(collectives, "start_all_to_all", start_exchange),
            patch.object(GroupedMLP, "forward", slow_experts),
            patch.object(MoELayer, "forward", after_attention),
        ):
            train_step(trainer, tiny.short_run_batches(trainer.run, 0))

    plain, other = trainers
    seconds = timed(lambda: go(plain, None), lambda: go(plain, Link(delay)), lambda: go(other, Link(delay)))
    # The first forward and the last backward pass have no other beside them; the others hide as much as they compute.
    pairs = plain.batches.final_batch_size // plain.batches.unit - 1
    if flag == "overlap_moe_expert_parallel_comm":
        return seconds, seconds[0] + 4 * layers * delay + pairs * layers * max(0.0, 4 * delay - 6 * STEP)
    # In all backward passes but the last, weights hide a way each, but for those before the first layer's experts.
    return seconds, seconds[0] + (pairs + 1) * 4 * layers * delay - pairs * (2 * layers - 1) * min(delay, STEP)


# Pipelines: messages beside passes, and the bubble.


@dataclass(slots=True)
class Sleeper:
    """Stages that sleep. times: (forward, of which a backward pass takes twice as much) of each."""

    seconds: float
    stages: int
    wgrad_store: WeightGradStore
    device: torch.device = CPU

    def input_specs(self, stage: int, microbatch: int) -> tuple[Shape, ...]:
        """A number."""
        return (((1,), torch.float32),)

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Sleep."""
        x = received[0] if received else torch.ones(1, requires_grad=True)
        weight = torch.zeros(1, requires_grad=True)
        out = Slow.apply(x, weight, self.seconds, self.wgrad_store)
        return (out.sum(),) if stage == self.stages - 1 else (out,)

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        """Nothing."""

    def reduce(self, stage: int) -> None:
        """Nothing."""


@contextmanager
def messages_by(courier: Courier | None) -> Iterator[None]:
    """The executor's messages carried late."""
    if courier is None:
        yield
        return
    with patch.object(executor, "dist", SimpleNamespace(**{**vars(dist), "isend": courier.isend})):
        yield


def schedules(pp: int, m: int) -> dict[str, Plan]:
    """Every schedule that there is, on so many ranks."""
    return {
        "gpipe": gpipe(pp, m),
        "1f1b": one_f_one_b(pp, m),
        DUAL_BATCH: one_f_one_b_dual_batch(pp, m),
        "zb-h1": zero_bubble_h1(pp, m),
        "interleaved 2": interleaved_1f1b(pp, 2, m, pp),
        "zb-v": zero_bubble_v(pp, m),
    }


def seconds_of(plan: Plan, step: float) -> float:
    """Of one stage's forward pass: a rank's share of the layers takes `step`, in however many chunks."""
    return step * len(plan) / (1 + max(action.stage for row in plan for action in row))


def pipeline_here(m: int, delay: float) -> dict[str, list[float]]:
    """Seconds of every schedule: without transport; and with it, blocking and overlapped."""
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = tuple(range(size))
    overlap = OverlappedComputation()
    axis, backward_axis = (
        Axis(name, size, rank, ranks, dist.new_group(list(ranks)), overlap=overlap) for name in ("pp", "pp_backward")
    )
    courier, seconds = Courier(delay), {}
    for name, plan in schedules(size, m).items():
        whole, wgrad_store = with_reduction_actions(plan), overlap.wgrad_store
        work = Sleeper(seconds_of(plan, STEP), 1 + max(action.stage for row in plan for action in row), wgrad_store)

        def go(overlaps: bool, carrier: Courier | None) -> None:
            with messages_by(carrier):
                executor.run_rank_script(
                    build_rank_script(whole, rank, overlap=overlaps, dual_batch_overlap=name == DUAL_BATCH),
                    work=work,
                    axis=axis,
                    backward_axis=backward_axis,
                )

        seconds[name] = timed(lambda: go(True, None), lambda: go(False, courier), lambda: go(True, courier))
    return seconds


def show(name: str, row: list[float], ideal: float) -> None:
    """One line: how much is hidden of what could be."""
    alone, at_once, overlapped = row
    hidden, possible = ((at_once - seconds) / (at_once - alone) for seconds in (overlapped, ideal))
    print(
        f"  {name:43} alone {1000 * alone:5.0f} ms, waited for {1000 * at_once:5.0f} ms, overlapped {1000 * overlapped:5.0f} ms "
        f"(at best {1000 * ideal:.0f}): {hidden:4.0%} is hidden, at best {possible:.0%}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("tensor", "data", "expert", "pipeline"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args()
    worlds, n = Worlds(), options.ranks
    try:
        print(
            f"{n} ranks, a piece of work takes {1000 * STEP:g} ms, the least of {ROUNDS} rounds; transport is 0.5, 1 and 2 times as long"
        )
        for share in (0.5, 1.0, 2.0):
            delay = share * STEP
            if options.only in (None, "tensor"):
                show(f"--tp-comm-overlap, {1000 * delay:g} ms", *worlds(n).run(tensor_here, delay)[0])
            if options.only in (None, "data"):
                show(f"--overlap-grad-reduce, {1000 * delay:g} ms", *worlds(n).run(data_here, delay, 6, "reduce")[0])
                show(f"--overlap-param-gather, {1000 * delay:g} ms", *worlds(n).run(data_here, delay, 6, "gather")[0])
            if options.only in (None, "expert"):
                show(f"--moe-shared-expert-overlap, {1000 * delay:g} ms", *worlds(2).run(expert_here, delay)[0])
                show(
                    f"--overlap-moe-expert-parallel-comm, {1000 * delay:g} ms",
                    *worlds(2).run(passes_here, delay, "overlap_moe_expert_parallel_comm")[0],
                )
                show(
                    f"--delay-wgrad-compute, {1000 * delay:g} ms",
                    *worlds(2).run(passes_here, delay, "delay_wgrad_compute")[0],
                )
        if options.only in (None, "pipeline"):
            m, delay = options.microbatches, STEP / 4
            print(
                f"pipelines of {n} ranks, {m} microbatches, forward, backward and weights {1000 * STEP:g} ms each on a rank's layers"
            )
            measured = worlds(n).run(pipeline_here, m, delay, timeout=600.0)[0]
            for name, plan in schedules(n, m).items():
                step = seconds_of(plan, STEP)
                theory, late = (
                    simulate_pipeline_plan(
                        plan,
                        forward=step,
                        backward=2 * step,
                        weight=step,
                        message=message,
                        dual_batch_overlap=name == DUAL_BATCH,
                    )
                    for message in (0.0, delay)
                )
                alone, at_once, overlapped = measured[name]
                busy, span = 3 * m * STEP, max(row[-1] for row in late.end)
                print(
                    f"  {name:14} bubble {1 - busy / alone:6.1%} (theory {theory.bubble:6.1%}); with messages of {1000 * delay:g} ms: in turn "
                    f"{1000 * at_once:5.0f} ms, overlapped {1000 * overlapped:5.0f} ms (theory {1000 * span:.0f})"
                )
    finally:
        worlds.stop()


if __name__ == "__main__":
    main()
