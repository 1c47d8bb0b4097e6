"""What single operations of a step cost: seconds by formulas that know the sizes of the network, and nothing of what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron.core.parallel.main_grad import MainGrad
from megatron.plan.cost import estimated_event_seconds, step_cost
from megatron.plan.hardware import Hardware, NetworkLink
from megatron.plan.simulate.dry_run import dry_run
from megatron.plan.simulate.recorder import StepRecorder
from megatron.plan.simulate.trace import StepEvent, Trace
from tests.helpers import tiny

# Rates a second at which arithmetic and bytes take times of one size. A product reaches half of the peak.
PEAK = {"float32": 1e4, "bfloat16": 8e4, "float8": 16e4}
MACHINE = Hardware(
    "made",
    PEAK,
    ((1.0, 0.5),),
    (0.4, 0.2),
    memory=2.0**30,
    memory_rate=2e3,
    launch=0.25,
    node=2,
    inside=NetworkLink(500.0, 0.5),
    network=NetworkLink(100.0, 2.0),
)
TP, PP, DP = 2, 2, 2
H, N, S, B, V = 32, 4, 16, 2, 52  # hidden size, heads, sequence, micro batch, vocabulary; an MLP has 4 h


@cache
def trace_of_first_stage() -> Trace:
    """The first rank of two stages x two tensor ranks x two data-parallel ranks, in bf16 with sums of gradients in fp32."""
    sizes = {
        "num_layers": PP,
        "hidden_size": H,
        "num_attention_heads": N,
        "seq_length": S,
        "micro_batch_size": B,
        "global_batch_size": B * DP,
    }
    layout = {
        "tensor_model_parallel_size": TP,
        "pipeline_model_parallel_size": PP,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
    }
    return dry_run(
        tiny.config(TP * PP * DP, **{**tiny.BASE, **sizes, **layout, "bf16": True, "add_bias_linear": False}),
        TP * PP * DP,
    ).traces[0]


def only(kind: str, action: str, module: str = "", *, shape: tuple[int, ...] = (), axis: str = "") -> StepEvent:
    """The first event of this name, action, module, axis and shape."""
    found = [
        event
        for event in trace_of_first_stage().events
        if event.name == kind
        and event.action.startswith(action)
        and event.module.endswith(module)
        and event.axis == axis
        and shape in ((), event.shape)
    ]
    assert found, f"no {kind} of shape {shape} in {action} of {module}"
    return found[0]


def by_hand(flops: float, moved: float, rate: float = 1.0) -> float:
    """The longer of arithmetic and bytes, and a launch."""
    return max(flops / rate, moved / MACHINE.memory_rate) + MACHINE.launch


BF16, FP32 = 2, 4  # bytes
HALF = 0.5 * PEAK["bfloat16"]
PRODUCT = 2 * S * B * H * 4 * H // TP  # FLOPs of the MLP's first product
PAIRS = B * N // TP * S * S // 2  # of queries with keys that they meet
HIDDEN = S * B * H // TP  # numbers of the hidden state, under sequence parallelism
WIDE = S * B * 4 * H // TP  # numbers within the MLP
WEIGHT = H * 4 * H // TP

OPERATIONS: dict[str, tuple[Callable[[], StepEvent], float]] = {
    "product": (
        lambda: only("aten.mm", "F", "mlp.linear_fc1"),
        by_hand(PRODUCT, BF16 * (S * B * H + WEIGHT + WIDE), HALF),
    ),
    "gradient of inputs": (
        lambda: only("aten.mm", "B", shape=(S * B, 4 * H // TP)),
        by_hand(PRODUCT, BF16 * (S * B * H + WEIGHT + WIDE), HALF),
    ),
    # The factors are of bf16, so the units of bf16 do it; the sum in fp32 is read and written.
    "gradient of weights": (
        lambda: only("aten.addmm", "B", shape=(4 * H // TP, H)),
        by_hand(PRODUCT, BF16 * (S * B * H + WIDE) + FP32 * 2 * WEIGHT, HALF),
    ),
    "attention": (
        lambda: only("aten._scaled_dot_product_flash_attention_for_cpu", "F"),
        # Beside q, k, v and the result, the fp32 logarithm of a sum for each query.
        by_hand(2 * 2 * PAIRS * H // N, BF16 * 4 * HIDDEN + FP32 * B * N // TP * S, 0.4 * PEAK["bfloat16"]),
    ),
    "attention's gradient": (
        lambda: only("aten._scaled_dot_product_flash_attention_for_cpu_backward", "B"),
        by_hand(5 * 2 * PAIRS * H // N, BF16 * 8 * HIDDEN + FP32 * B * N // TP * S, 0.2 * PEAK["bfloat16"]),
    ),
    "norm": (
        lambda: only("aten.native_layer_norm", "F", "input_layernorm"),
        by_hand(0, BF16 * (2 * HIDDEN + 2 * H + 2 * S * B // TP)),
    ),
    "activation": (lambda: only("aten.gelu", "F"), by_hand(0, BF16 * 2 * WIDE)),
    "residual": (lambda: only("aten.add", "F", "layers.0"), by_hand(0, BF16 * 3 * HIDDEN)),
    "embedding": (
        lambda: only("aten.embedding", "F", "word_embeddings"),
        by_hand(0, BF16 * 2 * S * B * H),
    ),  # rows that are picked, read and written
    # Two tensor ranks share a node: half of the tensor goes over their link.
    "all-gather of tensor ranks": (
        lambda: only("all_gather", "F", "mlp.linear_fc1", axis="tp"),
        0.5 + BF16 * S * B * H / 2 / 500.0,
    ),
    "reduce-scatter of tensor ranks": (
        lambda: only("reduce_scatter", "F", "mlp.linear_fc2", axis="tp"),
        0.5 + BF16 * S * B * H / 2 / 500.0,
    ),
    "message to the next stage": (lambda: only("send", "F", axis="pp"), 2.0 + BF16 * HIDDEN / 100.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_a_step_costs_what_a_formula_of_its_sizes_says(name: str) -> None:
    event, seconds = OPERATIONS[name]
    config = tiny.config(1, **{**tiny.BASE, "bf16": True})
    assert estimated_event_seconds(event(), config, MACHINE, 0) == pytest.approx(seconds, rel=1e-9), event()


def test_sums_of_gradients_over_data_parallel_ranks_are_of_fp32() -> None:
    """All that the first stage holds, but the padding of a buffer."""
    config = tiny.config(1, **{**tiny.BASE, "bf16": True})
    trace = trace_of_first_stage()
    found = sum(
        estimated_event_seconds(event, config, MACHINE, 0) - MACHINE.network.latency
        for event in trace.events
        if event.axis == "dp_cp" and event.name == "reduce_scatter"
    )
    assert found == pytest.approx(FP32 * trace.parameters / 2 / 100.0, rel=0.05)


def test_attention_with_dropout_costs_what_it_costs_without() -> None:
    """Where a machine has a kernel for it: a CPU has none, and goes over 64 rows of scores at a time, in many operations."""
    length, rows = 512, 64
    found = []
    for dropout in (0.0, 0.1):
        config = tiny.config(
            1,
            **{
                **tiny.BASE,
                "num_layers": 1,
                "seq_length": length,
                "max_position_embeddings": length,
                "global_batch_size": 1,
                "bf16": True,
                "attention_dropout": dropout,
            },
        )
        found.append(step_cost(dry_run(config, 1), replace(MACHINE, memory_rate=1e9, launch=0.0)).time)
    plain, dropped = found
    # Rows meet whole blocks of keys: a causal square of s * s / 2 pairs has s / 64 blocks on its edge, half of each more.
    assert dropped.parts["attention"] == pytest.approx(plain.parts["attention"] * (1 + rows / length), rel=1e-6)
    assert dropped.parts["other operations"] == pytest.approx(plain.parts["other operations"], rel=0.1)


def recorded(does: Callable[[], Tensor]) -> StepEvent:
    """The matrix product that this does."""
    with StepRecorder({}) as recorder:
        does()
    (product,) = (event for event in recorder.events if event.flops)
    return product


def matrix(dtype: torch.dtype) -> Tensor:
    """64 x 64 numbers without data."""
    return torch.empty(64, 64, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "name, does, rate",
    [
        ("fp32", lambda: matrix(torch.float32) @ matrix(torch.float32), 0.5 * PEAK["float32"]),
        ("bf16", lambda: matrix(torch.bfloat16) @ matrix(torch.bfloat16), HALF),
        (
            "bf16 into fp32",
            lambda: MainGrad(matrix(torch.float32), mixed_dtype_addmm=True).add_product(
                matrix(torch.bfloat16), matrix(torch.bfloat16)
            ),
            HALF,
        ),
        (
            "fp32 into fp32",
            lambda: MainGrad(matrix(torch.float32)).add_product(matrix(torch.float32), matrix(torch.float32)),
            0.5 * PEAK["float32"],
        ),
        (
            "fp8 into bf16",
            lambda: torch._scaled_mm(
                matrix(torch.float8_e4m3fn),
                matrix(torch.float8_e4m3fn).t(),
                scale_a=torch.empty((), device="meta"),
                scale_b=torch.empty((), device="meta"),
                out_dtype=torch.bfloat16,
            ),
            0.5 * PEAK["float8"],
        ),
    ],
)
@pytest.mark.parametrize("run_format", [{}, {"bf16": True}], ids=["fp32 run", "bf16 run"])
def test_a_product_runs_at_the_rate_of_its_factors_whatever_it_is_summed_in(
    name: str, does: Callable[[], Tensor], rate: float, run_format: dict[str, bool]
) -> None:
    config = tiny.config(1, **{**tiny.BASE, **run_format})
    quick = replace(MACHINE, memory_rate=1e30, launch=0.0)
    assert estimated_event_seconds(recorded(does), config, quick, 0) == pytest.approx(2 * 64**3 / rate), name
