"""Times of events, actions and steps: against sums by hand, rings played message by message, and clocks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.parallel.mesh import Axis
from megatron.core.pipeline_parallel.executor import Shape, run_rank_script
from megatron.core.pipeline_parallel.schedules import (
    Action,
    num_plan_stages,
    pipeline_training_plan,
    with_reduction_actions,
)
from megatron.core.pipeline_parallel.transfers import build_rank_script
from megatron.plan.cost import FORWARD, estimated_event_seconds, rank_time, step_cost, tensor_bytes_of_event
from megatron.plan.hardware import (
    PROFILES,
    NetworkLink,
    collective_seconds,
    hardware_from_json,
    hardware_of,
    interpolate_share,
)
from megatron.plan.simulate.dry_run import dry_run
from megatron.plan.simulate.trace import StepEvent
from tests.helpers import tiny
from tests.helpers.world import World
from tests.unit.plan.hand_made import PLAIN, config_of, op, run_of, summed


def passes(action: Action, place: int) -> Sequence[StepEvent]:
    """One second forward, two backward."""
    return [op({"F": 1, "B": 2}[action.op], str(action))] if action.op in "FB" else []


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_ring_takes_the_sum_of_its_steps(n: int) -> None:
    link, moved = NetworkLink(rate=1e9, latency=1e-6), 64e6
    machine = replace(PLAIN, inside=link)
    # Each of n - 1 steps passes one n-th on; a sum that all get goes round twice.
    once = sum(link.latency + moved / n / link.rate for _ in range(n - 1))
    assert collective_seconds("all_gather", moved, range(n), machine) == pytest.approx(once)
    assert collective_seconds("reduce_scatter", moved, range(n), machine) == pytest.approx(once)
    assert collective_seconds("all_reduce", moved, range(n), machine) == pytest.approx(2 * once)


def test_a_small_sum_of_many_ranks_takes_the_tree() -> None:
    machine = replace(PLAIN, inside=NetworkLink(1e9, 1e-3), node=64)
    assert collective_seconds("all_reduce", 8, range(64), machine) == pytest.approx(
        2 * 6 * 1e-3, rel=1e-3
    )  # not 2 * 63


def test_a_ring_between_nodes_uses_the_ports_of_all_its_ranks_on_a_node() -> None:
    machine = replace(PLAIN, node=4, inside=NetworkLink(100.0, 0.0), network=NetworkLink(10.0, 0.0))
    assert machine.slowest_link(range(4)).rate == 100.0
    assert machine.slowest_link((0, 4)).rate == 10.0
    assert machine.slowest_link(range(8)).rate == 40.0  # four ports
    assert (
        replace(machine, network=NetworkLink(50.0, 0.0)).slowest_link(range(8)).rate == 100.0
    )  # and no more than inside


def test_an_exchange_sends_what_is_for_other_nodes_through_its_own_port() -> None:
    machine = replace(PLAIN, node=2, inside=NetworkLink(1e6, 0.0), network=NetworkLink(1.0, 0.0))
    # Rank 0 of 4 sends a quarter to itself, one to its neighbour and two to the other node.
    assert collective_seconds("all_to_all", 8, range(4), machine) == pytest.approx(2 * 8 / 4)
    assert collective_seconds("all_to_all", 8, range(2), machine) == pytest.approx(8 / 2 / 1e6)


def test_an_operation_takes_the_longer_of_arithmetic_and_bytes() -> None:
    config, machine = config_of(), replace(PLAIN, memory_rate=10.0, launch=0.5)
    event = op(7, "F0.0")
    assert estimated_event_seconds(replace(event, moved=10), config, machine, 0) == 7.5
    assert estimated_event_seconds(replace(event, moved=200), config, machine, 0) == 20.5
    assert estimated_event_seconds(replace(event, flops=0, moved=0), config, machine, 0) == 0  # a view
    assert estimated_event_seconds(replace(event, name="aten.empty", flops=0), config, machine, 0) == 0


def test_attention_of_a_decoder_meets_half_of_the_keys() -> None:
    config, shape = config_of(), (2, 4, 32, 16)
    forward = StepEvent(
        "op", "aten._scaled_dot_product_flash_attention_for_cpu", action="F0.0", moved=1, shape=shape, dtype="float32"
    )
    # Scores and their sums with values: 2 FLOPs for each of s * s / 2 pairs and each of d numbers, twice.
    by_hand = 2 * (2 * 2 * 4 * 32 * 32 / 2 * 16)
    assert estimated_event_seconds(forward, config, PLAIN, 0) == by_hand
    counted = replace(forward, name="aten._scaled_dot_product_flash_attention", flops=2 * int(by_hand))
    assert estimated_event_seconds(counted, config, PLAIN, 0) == by_hand


def test_attention_in_parts_is_timed_as_the_fused_kernel_of_a_machine_that_has_one() -> None:
    config = config_of()
    machine = replace(PLAIN, attention=(0.5, 0.25), launch=1.0, memory_rate=1.0)
    product = StepEvent("op", "aten.bmm", "", "F0.0", flops=400, moved=7, dtype="float32", role="attention")
    mask = StepEvent("op", "aten.mul", "", "F0.0", moved=1000, dtype="float32", role="attention")
    assert [
        estimated_event_seconds(event, config, machine, 0) for event in (product, mask, replace(product, action="B0.0"))
    ] == [400.0, 0.0, 800.0]
    assert estimated_event_seconds(mask, config, replace(machine, fused=False), 0) == 1001.0
    # In the number format of the run, in whatever the CPU multiplied.
    assert (
        estimated_event_seconds(
            product, config_of("--bf16"), replace(machine, peak={"float32": 1.0, "bfloat16": 8.0}), 0
        )
        == 50.0
    )


def test_products_of_8_bits_run_at_the_rate_that_the_machine_has_for_them() -> None:
    """Through the linear layers of a dry run: all their arithmetic, and none of the passes that emulate it."""
    machine = replace(PLAIN, peak={"float32": 1.0, "bfloat16": 2.0, "float8": 16.0})
    small = {
        "num_layers": 1,
        "hidden_size": 16,
        "seq_length": 8,
        "global_batch_size": 1,
        "bf16": True,
        "add_bias_linear": False,
        "fp8_format": "hybrid",
        "fp8_recipe": "tensorwise",
    }
    found = {}
    for emulated in (False, True):
        config = tiny.config(1, **{**tiny.BASE, **small, "fp8_emulation": emulated})
        run = dry_run(config, 1)
        found[emulated] = step_cost(run, machine).time.parts["matrix products"]
    h, s = 16, 8
    # Of a layer: q, k, v, what attention gives, and an MLP of 4 h; forward, and the gradients of inputs and weights.
    few = 3 * 2 * s * (4 * h * h + 8 * h * h)
    assert found[True] - found[False] == pytest.approx(few / 1.0 - few / 16.0)
    assert (
        step_cost(run, replace(machine, peak={"float32": 1.0, "bfloat16": 2.0})).time.parts["matrix products"]
        == found[True]
    )


def test_shares_lie_straight_between_the_points_of_a_table() -> None:
    points = ((1e6, 0.2), (1e8, 0.6))
    assert [interpolate_share(points, size) for size in (1.0, 1e6, 1e7, 1e8, 1e12)] == pytest.approx(
        [0.2, 0.2, 0.4, 0.6, 0.6]
    )


@pytest.mark.parametrize("pp, microbatches", [(1, 8), (2, 8), (4, 8)])
def test_a_step_of_even_stages_takes_what_the_formula_of_1f1b_says(pp: int, microbatches: int) -> None:
    config = config_of(f"--pipeline-model-parallel-size {pp}", pp)
    found = step_cost(run_of(config, pp, passes), PLAIN)
    assert found.time.seconds == (microbatches + pp - 1) * 3
    assert found.time.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))


@pytest.mark.parametrize("pp, microbatches", [(1, 8), (2, 8), (4, 8)])
def test_networks_that_are_asked_before_a_step_take_their_forward_passes(pp: int, microbatches: int) -> None:
    run = run_of(config_of(f"--pipeline-model-parallel-size {pp}", pp), pp, passes)
    alone, asked = (step_cost(run, PLAIN, passes=count).time for count in (0, 3))
    assert asked.seconds == alone.seconds + 3 * (microbatches + pp - 1)
    assert asked.parts == {**alone.parts, FORWARD: 3.0 * (microbatches + pp - 1)}
    assert asked.tokens == pytest.approx(alone.tokens * alone.seconds / asked.seconds)


def test_the_slowest_stage_sets_the_pace() -> None:
    config = config_of("--pipeline-model-parallel-size 2", 2)

    def uneven(action: Action, place: int) -> Sequence[StepEvent]:
        return [op({"F": 1, "B": 2}[action.op] * (1 + 4 * place), str(action))] if action.op in "FB" else []

    # Rank 1 begins when rank 0 has done one forward pass, is never idle, and rank 0 ends one backward pass later.
    assert step_cost(run_of(config, 2, uneven), PLAIN).time.seconds == 1 + 8 * 15 + 2


def test_gathers_and_sums_of_fsdp2_run_beside_the_layers_and_only_what_is_longer_shows() -> None:
    config, machine = (
        config_of("--use-torch-fsdp2 --global-batch-size 4", 2),
        replace(PLAIN, inside=NetworkLink(1.0, 0.0)),
    )

    def shared(action: Action, place: int) -> Sequence[StepEvent]:
        gathers = [
            summed(2 * seconds, "", "dp_cp", (0, 1), "all_gather")
            for seconds in {"F": (4, 4), "B": (6, 6)}.get(action.op, ())
        ]
        return [*gathers, *(op({"F": 20, "B": 10}[action.op], str(action)) for _ in gathers[:1])]

    found = step_cost(run_of(config, 2, shared), machine)
    # Half of what is gathered comes over the link of a byte a second: 8 s hide behind 20, and of 12 there show 2.
    assert found.time.seconds == 2 * (20 + 12) and found.time.parts["gathers and sums of FSDP2"] == 2 * 2
    assert found.traffic["dp_cp"] == 2 * 2 * (4 + 4 + 6 + 6)


def test_a_rank_with_fewer_microbatches_of_its_own_is_idle_in_the_others() -> None:
    config = config_of(
        "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 16 --reset-attention-mask --calculate-per-token-loss", 2
    )
    run = run_of(config, 2, passes)
    (full,) = run.traces
    few = [replace(event, flops=2 * event.flops) for event in full.events if event.action.endswith(".0")]
    assert len(full.events) == 8 and len(few) == 2
    assert step_cost(replace(run, traces=(full, replace(full, rank=1, events=tuple(few)))), PLAIN).time.seconds == 4 * (
        1 + 2
    )


def test_a_short_recording_stands_for_the_whole_step() -> None:
    config = config_of("--pipeline-model-parallel-size 2 --global-batch-size 32", 2)

    def talks(action: Action, place: int) -> Sequence[StepEvent]:
        return [*passes(action, place), *([summed(400, "", "tp", (0, 1), "all_reduce")] if action.op == "F" else [])]

    whole, short = (step_cost(run_of(config, 2, talks, recorded=count), PLAIN) for count in (None, 4))
    assert short.time.seconds == whole.time.seconds == (32 + 1) * 3
    assert short.traffic == whole.traffic == {"tp": 32 * 400}
    assert sum(whole.time.parts.values()) == pytest.approx(whole.time.seconds)


@pytest.mark.parametrize("moved, late", [(40, 0.0), (400, 2 * 10 - 2.0)])
def test_sums_of_gradients_run_beside_the_last_backward_pass(moved: int, late: float) -> None:
    """Two sums are begun after the first of the last backward pass's three seconds; each takes bytes / 2 / 20 seconds."""
    config, machine = (
        config_of("--use-distributed-optimizer --overlap-grad-reduce --global-batch-size 4", 2),
        replace(PLAIN, inside=NetworkLink(20.0, 0.0)),
    )

    def does(action: Action, place: int) -> Sequence[StepEvent]:
        if action.op == "F":
            return [op(1, "")]
        if action.op == "B":
            begun = [summed(moved, ""), summed(moved, "")] if action.microbatch == 1 else []
            return [op(1, ""), *begun, op(2, "")]
        return []

    # 4 s a microbatch; without anything late the step ends with its last backward pass.
    assert step_cost(run_of(config, 2, does), machine).time.seconds == pytest.approx(2 * 4 + late)


def test_sums_that_are_begun_at_the_end_are_waited_for() -> None:
    config, machine = (
        config_of("--use-distributed-optimizer --global-batch-size 4", 2),
        replace(PLAIN, inside=NetworkLink(20.0, 0.0)),
    )

    def does(action: Action, place: int) -> Sequence[StepEvent]:
        return passes(action, place) if action.op in "FB" else [summed(400, "")]

    assert step_cost(run_of(config, 2, does), machine).time.seconds == pytest.approx(2 * 3 + 10)


def test_phases_behind_the_schedule_are_added_once() -> None:
    config = config_of("--pipeline-model-parallel-size 2", 2)
    found = step_cost(
        run_of(config, 2, passes, after=lambda place: [op(5 + place, "optimizer"), op(100, "setup")]), PLAIN
    )
    assert found.time.seconds == 9 * 3 + 6 and found.time.parts["update"] in (5, 6)


def test_gathers_of_weights_hide_behind_the_first_forward_pass() -> None:
    words = "--use-distributed-optimizer --overlap-grad-reduce --global-batch-size 4"
    machine = replace(PLAIN, inside=NetworkLink(20.0, 0.0))

    def gathers(place: int) -> Sequence[StepEvent]:
        return [summed(40, "optimizer", name="all_gather")] * 3  # a second each

    hidden = step_cost(run_of(config_of(f"{words} --overlap-param-gather", 2), 2, passes, after=gathers), machine)
    shown = step_cost(run_of(config_of(words, 2), 2, passes, after=gathers), machine)
    assert shown.time.seconds == 2 * 3 + 3
    assert (
        hidden.time.seconds == 2 * 3 + 1 + 1
    )  # the first, and of the two others what a forward pass of one second leaves


@pytest.mark.parametrize(
    "overlap, batch, seconds",
    [
        ("", 1, 8),
        (
            "--no-overlap-p2p-communication",
            1,
            8,
        ),  # one microbatch: its four passes and two messages, one after the other
        ("", 8, 35),
        ("--no-overlap-p2p-communication", 8, 1 + 8 * (1 + 1 + 2 + 1) + 2),
    ],
)  # rank 1 takes, runs both ways and sends
def test_messages_delay_the_next_stage_or_stop_both(overlap: str, batch: int, seconds: float) -> None:
    config = config_of(f"--pipeline-model-parallel-size 2 --global-batch-size {batch} {overlap}", 2)

    def sends(action: Action, place: int) -> Sequence[StepEvent]:
        kind = "send" if (action.op == "F") == (place == 0) else "receive"
        talk = StepEvent(kind, kind, moved=8, axis="pp", ranks=(0, 1), peer=1 - place, shape=(2,), dtype="float32")
        return [*passes(action, place), talk] if action.op in "FB" else []

    found = step_cost(run_of(config, 2, sends), replace(PLAIN, inside=NetworkLink(8.0, 0.0)))
    assert found.time.seconds == seconds
    assert found.traffic == {"pp": 16 * batch}


def test_a_step_at_the_peak_has_an_mfu_of_one() -> None:
    config = config_of()
    model, train = config.model, config.train
    h, layers, length = model.hidden_size, model.num_layers, train.seq_length
    a_token = 6 * (layers * 12 * h * h + h * model.padded_vocab_size)
    causal, square = (8 * length * (a_token + 12 * layers * h * length * met) for met in (0.5, 1.0))

    def does(action: Action, place: int) -> Sequence[StepEvent]:
        return [op(causal / 16, "")] if action.op in "FB" else []

    time_ = step_cost(run_of(config, 1, does), PLAIN).time
    assert time_.mfu == pytest.approx(1.0) and time_.mfu_square == pytest.approx(square / causal)
    assert time_.tokens == pytest.approx(8 * length / causal)


def test_bytes_are_those_of_the_shape() -> None:
    tensors = [
        torch.empty(3, 5, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8)
    ]
    for tensor in tensors:
        event = StepEvent(
            "collective", "all_reduce", shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
        )
        assert tensor_bytes_of_event(event) == tensor.numel() * tensor.element_size()


def test_a_profile_survives_its_file(tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(PROFILES["gb200"])))
    assert hardware_of(str(path)) == PROFILES["gb200"]


@pytest.mark.parametrize(
    "spoiled, says",
    [
        ({"memory": -1.0}, "above 0"),
        ({"matmul": [[1e9, 0.5], [1e6, 0.2]]}, "must rise"),
        ({"peak": {"bfloat16": 1e12}}, "float32"),
        ({"more": 1}, "these differ: more"),
        ({"inside": {"rate": 1}}, "latency"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(spoiled: dict, says: str, tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**asdict(PROFILES["cpu"]), **spoiled}))
    with pytest.raises(ConfigError, match=says):
        hardware_of(str(path))


def test_a_name_that_is_neither_profile_nor_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="h100-80"):
        hardware_of("h101")


def test_profiles_can_be_what_they_say() -> None:
    for machine in PROFILES.values():
        assert hardware_from_json(asdict(machine)) == machine
        assert all(share <= 1.0 for _, share in machine.matmul) and machine.network.rate <= machine.inside.rate


@dataclass
class Sleeper:
    """Stages that sleep instead of computing. seconds: of a forward pass of each stage; a backward pass takes twice as long."""

    seconds: tuple[float, ...]
    device: torch.device = torch.device("cpu")
    late: list[float] = field(default_factory=list)

    def input_specs(self, stage: int, microbatch: int) -> tuple[Shape, ...]:
        return (((1,), torch.float64),)

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        time.sleep(self.seconds[stage])
        whole = received[0] if received else torch.ones(1, dtype=torch.float64, requires_grad=True)
        return (
            (_SlowBackward.apply(whole, 2 * self.seconds[stage]).sum(),)
            if stage == len(self.seconds) - 1
            else (_SlowBackward.apply(whole, 2 * self.seconds[stage]),)
        )

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        pass

    def start_gradient_reduction(self, stage: int) -> None:
        pass


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return tensor * 1.0

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


def sleep_through(pp: int, chunks: int, microbatches: int, seconds: tuple[float, ...], rounds: int) -> float:
    """Seconds of a step of sleeping stages, on the slowest rank; the best of some rounds."""
    plan, best = with_reduction_actions(pipeline_training_plan(pp, chunks, microbatches)), float("inf")
    assert num_plan_stages(plan) == len(seconds), "every stage has its time"
    rank, ranks = dist.get_rank(), tuple(range(pp))
    axis, backward_axis = (Axis(name, pp, rank, ranks, dist.new_group(list(ranks))) for name in ("pp", "pp_backward"))
    steps = build_rank_script(plan, rank)
    for _ in range(rounds):
        dist.barrier()
        begun = time.perf_counter()
        run_rank_script(steps, work=Sleeper(seconds), axis=axis, backward_axis=backward_axis)
        spent = torch.tensor([time.perf_counter() - begun])
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        best = min(best, spent.item())
    return best


@pytest.mark.nightly
@pytest.mark.parametrize("chunks, seconds", [(1, (0.02, 0.03)), (2, (0.01, 0.02, 0.02, 0.01))])
def test_the_prediction_is_within_a_tenth_of_real_ranks_that_sleep(
    world, chunks: int, seconds: tuple[float, ...]
) -> None:
    ranks: World = world(2)
    real = ranks.run(sleep_through, 2, chunks, 8, seconds, 4)[0]
    words = f"--pipeline-model-parallel-size 2 --global-batch-size 8 {'--num-virtual-stages-per-pipeline-rank 2' * (chunks > 1)}"
    thousandths = replace(PLAIN, peak={"float32": 1000.0})

    def does(action: Action, place: int) -> Sequence[StepEvent]:
        return [op(1000 * seconds[action.stage] * {"F": 1, "B": 2}[action.op], "")] if action.op in "FB" else []

    predicted = step_cost(run_of(config_of(words, 2), 2, does), thousandths).time.seconds
    assert abs(real / predicted - 1) < 0.10, f"{real:.4f} s on real ranks, {predicted:.4f} s predicted"


def test_actions_that_come_in_turn_are_counted_each_once() -> None:
    config = config_of()
    events = (op(1, "F0.0"), op(1, "F0.1"), op(1, "F0.0"))
    trace = replace(run_of(config, 1, passes).traces[0], events=events)
    assert rank_time(trace, config, PLAIN).spent["F0"].seconds_per_action == 1.5
