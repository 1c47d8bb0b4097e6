"""A dry run against the same step on real tensors, against arithmetic, and against itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks.planning import MODELS, planned
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.optim import BYTES
from megatron.core.models.flops import estimate_memory_by_pipeline_rank
from megatron.core.parallel.mesh import Mesh
from megatron.plan.cost import step_cost
from megatron.plan.hardware import PROFILES
from megatron.plan.simulate.dry_run import dry_run, schedule_plan, uses_varlen_attention
from megatron.plan.simulate.trace import TOGETHER, Trace
from tests.helpers import tiny
from tests.helpers.counts import count_layer_parameters
from tests.unit.plan.real_steps import real_trace, trace_of

ROOT = Path(__file__).resolve().parents[3]
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "global_batch_size": 4,
}
CHANGES: tuple[dict[str, Any], ...] = (
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1},
    {"pipeline_model_parallel_size": 2, "pipeline_schedule": "gpipe"},
    {"context_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v", "num_layers": 4},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True},
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    {"recompute_activations": True},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
    {"num_experts": 4, "moe_router_topk": 2},
    {"num_experts": 4, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True},
    {"num_experts": 4, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
    {"num_experts": 4, "moe_expert_capacity_factor": 1.0, "moe_token_dispatcher_type": "alltoall"},
    {
        "multi_latent_attention": True,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 4,
    },
    {"architecture": "bert"},
    {"architecture": "t5", "decoder_seq_length": 8},
    {"bf16": True},
    {"fp16": True, "initial_loss_scale": 1.0},
    {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    {"group_query_attention": True, "num_query_groups": 2},
    {"swiglu": True},
    {"normalization": "RMSNorm", "position_embedding_type": "rope"},
    {"untie_embeddings_and_output_weights": True},
    {"micro_batch_size": 2},
    {"reset_attention_mask": True},
    {"calculate_per_token_loss": True},
    {"mtp_num_layers": 1},
    {"cross_entropy_fusion_impl": "linear"},
    {"optimizer": "sgd"},
    {"attention_backend": "unfused"},
    {"log_num_zeros_in_grad": True},
    {"bf16": True, "optimizer_cpu_offload": True},
    {"use_torch_fsdp2": True},
    {"use_torch_fsdp2": True, "torch_fsdp2_no_reshard_after_forward": True, "ffn_hidden_size": 33},
    {
        "num_experts": 4,
        "expert_model_parallel_size": 2,
        "moe_token_dispatcher_type": "alltoall",
        "overlap_moe_expert_parallel_comm": True,
    },
    {
        "hybrid_context_parallel": True,
        "max_seqlen_per_dp_cp_rank": 4,
        "reset_attention_mask": True,
        "calculate_per_token_loss": True,
    },
)
FSDP, HYBRID, TURNS = {"use_torch_fsdp2": True}, CHANGES[-1], CHANGES[-2]
SHARED: tuple[tuple[int, dict[str, Any]], ...] = (  # rows that no rank holds whole: of weights, and of texts
    (
        2,
        {
            **FSDP,
            "fp16": True,
            "initial_loss_scale": 1.0,
            "ffn_hidden_size": 33,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
        },
    ),
    (
        4,
        {
            **FSDP,
            "tensor_model_parallel_size": 2,
            "num_experts": 4,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    (2, {**HYBRID, "mtp_num_layers": 1, "use_distributed_optimizer": True}),
    (4, {**HYBRID, "cp_comm_type": ("allgather",), "max_seqlen_per_dp_cp_rank": 2}),
)
LORA: dict[str, Any] = {"lora_rank": 2, "lora_targets": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")}
# Labels that do not count have no logits, so that shapes follow from masks.
MASKED = {"mtp_num_layers": 1, "cross_entropy_fusion_impl": "linear", "reset_attention_mask": True}


def random_changes(seed: int, count: int) -> list[tuple[int, dict[str, Any]]]:
    """(ranks, changes) of configurations that the rules accept: each a few of CHANGES together."""
    chance, found = random.Random(seed), []
    while len(found) < count:
        ranks, changes = chance.choice((1, 2, 2, 4)), dict(SMALL)
        for change in chance.sample(CHANGES, chance.randint(1, 5)):
            changes |= change
        try:
            config = tiny.config(ranks, **changes)
            if not list(broken_rules(config, ranks)):
                found.append((ranks, changes))
        except (ConfigError, AssertionError, ZeroDivisionError):
            pass  # a layout for other ranks
    return found


def facts(trace: Trace) -> tuple[Any, ...]:
    """What a dry run must know of a rank: bytes, and everything that others take part in."""
    talks = [
        (
            event.kind,
            event.name,
            event.where,
            event.action,
            event.axis,
            event.ranks,
            event.peer,
            event.shape,
            event.received,
            event.dtype,
            event.live,
        )
        for event in trace.events
        if event.is_communication
    ]
    return trace.peak, trace.at_peak, trace.steady, trace.parameters, trace.place, talks


def real_facts(changes: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """On every rank: the facts of a real step of each configuration."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    found = []
    for change in changes:
        config = tiny.config(ranks, **change)
        mesh = Mesh.build(config.parallel, torch.device("cpu")) if ranks > 1 else Mesh.single_process()
        found.append(facts(real_trace(config, mesh)))
    return found


def compare(world: Any, cases: list[tuple[int, dict[str, Any]]]) -> None:
    """Every rank of every configuration, dry and real."""
    for ranks in sorted({ranks for ranks, _ in cases}):
        changes = [change for size, change in cases if size == ranks]
        real = world(ranks).run(real_facts, changes, timeout=3600.0)
        for index, change in enumerate(changes):
            # The real step runs on a CPU, where a bf16 product is made before it is added to an fp32 gradient.
            with patch("megatron.plan.simulate.dry_run.enable_mixed_dtype_addmm"):
                dry = dry_run(tiny.config(ranks, **change), ranks, range(ranks), whole=True)
            for rank, trace in enumerate(dry.traces):
                for expected, found in zip(real[rank][index], facts(trace), strict=True):
                    assert found == expected, f"rank {rank} of {ranks} with {change}"


def test_what_a_dry_run_counts_is_what_real_tensors_hold_byte_for_byte(world):
    lora = (2, {**SMALL, **LORA, "bf16": True, "tensor_model_parallel_size": 2, "sequence_parallel": True})
    compare(world, [*random_changes(seed=3, count=3), (2, {**SMALL, **MASKED}), lora])


@pytest.mark.parametrize(
    "shared", [SHARED[0:3:2], pytest.param(SHARED[1::2], marks=pytest.mark.nightly)], ids=["two", "four"]
)
def test_shares_of_weights_and_of_documents_are_counted_byte_for_byte(world, shared):
    compare(world, [(ranks, {**SMALL, **changes}) for ranks, changes in shared])


def test_state_in_the_memory_of_the_host_takes_nothing_of_the_device():
    small = {**SMALL, "hidden_size": 128, "max_position_embeddings": 64, "add_bias_linear": False, "bf16": True}
    (plain,) = dry_run(tiny.with_vocabulary(tiny.config(1, **small), 512), 1).traces
    (away,) = dry_run(
        tiny.with_vocabulary(tiny.config(1, **small, optimizer_cpu_offload=True, optimizer_offload_fraction=0.75), 512),
        1,
    ).traces
    assert plain.steady.optimizer == 12 * plain.parameters, "a master and two moments"
    assert (
        away.steady.optimizer == 0.25 * plain.steady.optimizer
        and plain.peak - away.peak >= 0.74 * plain.steady.optimizer
    )
    assert (away.steady.weights, away.steady.gradients) == (plain.steady.weights, plain.steady.gradients)


def test_activations_in_the_memory_of_the_host_take_nothing_of_the_device(world):
    small = {**SMALL, "num_layers": 4, "seq_length": 32, "max_position_embeddings": 32}
    layers = {**small, "cpu_offloading_num_layers": 3, "min_offloaded_tensor_size": 1}
    modules = {
        **small,
        "fine_grained_activation_offloading": True,
        "offload_modules": ("core_attn", "attn_proj"),
        "min_offloaded_tensor_size": 16,
    }
    compare(world, [(1, layers), (1, modules)])
    plain, away = (dry_run(tiny.config(1, **changes), 1).traces[0] for changes in (small, layers))
    assert away.at_peak.activations < plain.at_peak.activations / 10


def test_a_ring_that_draws_a_seed_for_its_dropout_is_run_dry(world):
    compare(world, [(2, {**SMALL, "context_parallel_size": 2, "attention_dropout": 0.1})])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_hundreds_of_configurations_hold_what_their_dry_run_counts(world, seed):
    compare(world, random_changes(seed=100 + seed, count=30))


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"bf16": True, "use_distributed_optimizer": True},
        {"bf16": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        {"fp16": True, "initial_loss_scale": 1.0},
        {"fp16": True, "initial_loss_scale": 1.0, "use_distributed_optimizer": True},
        {"num_experts": 4, "expert_model_parallel_size": 2, "bf16": True, "tensor_model_parallel_size": 2},
    ],
)
def test_weights_gradients_and_optimizer_are_those_of_the_closed_formula(changes):
    # Every tensor is a multiple of the alignment, so that buffers have no padding.
    config = tiny.config(
        4, **{**SMALL, "hidden_size": 128, "max_position_embeddings": 64, "add_bias_linear": False, **changes}
    )
    config = tiny.with_vocabulary(config, 512)
    dry = dry_run(config, 4)
    copies = config.parallel.data_parallel_size(4)
    expected = estimate_memory_by_pipeline_rank(
        config, stage_specs_of_run(config), data_parallel_size=copies, num_microbatches=dry.whole_microbatches
    )
    for trace in dry.traces:
        held, formula = trace.steady, expected[trace.place["pp"]]
        assert trace.parameters == formula.parameters
        assert held.weights == formula.parameters * BYTES[config.precision.param_dtype_name]
        assert held.gradients == formula.parameters * BYTES[config.precision.gradient_dtype_name]
        assert held.weights + held.gradients + held.optimizer == formula.weights_and_optimizer
        update = max(event.live for event in trace.events if event.action == "optimizer") - trace.steady.total
        assert formula.update <= update < formula.update + 2**15, (
            "beside fp32 copies of gradients, there are texts and a few numbers"
        )


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"use_distributed_optimizer": True},
        {"num_experts": 4, "expert_model_parallel_size": 2, "moe_ffn_hidden_size": 256},
    ],
)
def test_a_run_with_adapters_keeps_state_of_what_is_trained_alone(layout):
    small = {**SMALL, "hidden_size": 128, "max_position_embeddings": 64, "add_bias_linear": False, "bf16": True}
    whole, few = (tiny.with_vocabulary(tiny.config(4, **{**small, **layout, **changes}), 512) for changes in ({}, LORA))
    (before, after), expected = (dry_run(config, 4) for config in (whole, few)), {}
    for config in (few, whole):
        copies = config.parallel.data_parallel_size(4)
        expected[config] = estimate_memory_by_pipeline_rank(
            config, stage_specs_of_run(config), data_parallel_size=copies, num_microbatches=1
        )
    for full, trace in zip(before.traces, after.traces, strict=True):
        held, formula = trace.steady, expected[few][trace.place["pp"]]
        assert held.optimizer < full.steady.optimizer / 10 and held.gradients < full.steady.gradients / 10
        assert held.weights == 2 * trace.parameters == 2 * formula.parameters
        assert held.weights + held.gradients + held.optimizer == pytest.approx(formula.weights_and_optimizer, rel=0.02)


def test_fsdp2_holds_its_share_of_everything_and_gathers_as_often_as_microbatches_ask():
    config = tiny.with_vocabulary(tiny.config(4, **{**SMALL, **FSDP, "hidden_size": 128, "bf16": True}), 512)
    dry = dry_run(config, 4)
    (formula,) = estimate_memory_by_pipeline_rank(
        config, stage_specs_of_run(config), data_parallel_size=4, num_microbatches=1
    )
    found = step_cost(dry, PROFILES["cpu"])
    layers = 2 * count_layer_parameters(config.model)
    rest = formula.parameters - layers
    for trace in dry.traces:
        held = trace.steady
        assert (
            held.weights + held.gradients + held.optimizer == formula.weights_and_optimizer
            and trace.parameters == formula.parameters / 4
        )
        gathered = trace.at_peak.weights - held.weights
        assert BYTES["bfloat16"] * rest <= gathered <= BYTES["bfloat16"] * (rest + layers), (
            "while they are whole, layers are weights"
        )
    # Layers twice in half precision and their gradients once in fp32; the rest once each.
    assert found.traffic["dp_cp"] == 2 * (2 * layers + rest) + 4 * (layers + rest)


@pytest.mark.parametrize("changes", [{}, pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.nightly)])
def test_two_passes_in_turns_are_counted_byte_for_byte_each_as_what_it_is(world, changes):
    changes = {**SMALL, **TURNS, **changes, "global_batch_size": 8}
    ranks = 2 * changes.get("pipeline_model_parallel_size", 1)
    compare(world, [(ranks, changes)])
    config = tiny.config(ranks, **{**changes, "global_batch_size": 16})
    short, whole = dry_run(config, ranks), dry_run(config, ranks, whole=True)
    assert short.num_microbatches < whole.num_microbatches
    for few, all_ in zip(short.traces, whole.traces, strict=True):
        assert (few.peak, few.at_peak) == (all_.peak, all_.at_peak)
        together = {
            action
            for event in all_.events
            if event.kind == "action" and TOGETHER in event.name
            for action in event.name.split(TOGETHER)
        }
        assert together and {event.action for event in all_.events if event.axis == "ep"} >= together, (
            "both passes send tokens"
        )


def test_ranks_with_other_shares_of_the_documents_are_of_other_kinds_even_where_a_rank_has_nobody_to_share_with():
    config = tiny.config(
        3, **{**SMALL, **HYBRID, "seq_length": 8, "global_batch_size": 3, "max_seqlen_per_dp_cp_rank": 8}
    )
    dry = dry_run(config, 3)  # three rows, of one document each: none needs more than one rank
    assert dry.stands_for == ((0, 1, 2),) and dry.whole_microbatches == 1
    config = tiny.config(3, **{**SMALL, **HYBRID, "global_batch_size": 3})
    dry = dry_run(config, 3)  # documents of 8, 4 and 4, and 8: two ranks share the long ones
    passes = [sum(event.kind == "action" and event.name[0] == "F" for event in trace.events) for trace in dry.traces]
    assert dry.stands_for == ((2,), (0,), (1,)) and passes == [2, 2, 2] and dry.whole_microbatches == 2
    assert any(event.axis == "block2" for event in trace_of(dry, 0).events) and not any(
        event.axis == "block2" for event in trace_of(dry, 2).events
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1},
        {"num_layers": 4, "pipeline_schedule": "zb-v"},
        pytest.param({"pipeline_schedule": "zb-h1"}, marks=pytest.mark.nightly),
        {"pipeline_model_parallel_size": 1, "context_parallel_size": 2},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
)
def test_a_dry_run_that_is_cut_short_finds_the_peak_of_the_whole_step(changes):
    config = tiny.config(2, **{**SMALL, "pipeline_model_parallel_size": 2, "global_batch_size": 16, **changes})
    short, whole = dry_run(config, 2), dry_run(config, 2, whole=True)
    assert short.num_microbatches < whole.num_microbatches == short.whole_microbatches
    for few, all_ in zip(short.traces, whole.traces, strict=True):
        assert (few.peak, few.at_peak) == (all_.peak, all_.at_peak)


def test_events_name_lines_of_the_tree_and_the_actions_of_the_schedule():
    dry = dry_run(tiny.config(2, **SMALL, pipeline_model_parallel_size=2), 2)
    plan = schedule_plan(dry.config, dry.num_microbatches)
    for place, trace in enumerate(dry.traces):
        actions = [event.name for event in trace.events if event.kind == "action" and event.name[0] in "FBR"]
        assert actions == [str(action) for action in plan[place]]
        for event in trace.events:
            if event.kind != "action":
                file, line = event.where.split(":")
                assert 0 < int(line) <= len((ROOT / file).read_text().splitlines()), event.where
        assert trace.event_at_peak.live == max(event.live for event in trace.events)
        products = [
            event for event in trace.events if event.name in ("aten.mm", "aten.addmm") and event.action == "F0.0"
        ]
        assert all(event.module.startswith("decoder.layers.0.") or place for event in products)


def test_matrix_products_are_counted_as_the_model_counts_them():
    config = tiny.config(
        1, **SMALL, add_bias_linear=False, attention_backend="unfused", untie_embeddings_and_output_weights=True
    )
    trace = dry_run(config, 1).traces[0]
    passes = sum(event.kind == "action" and event.name[0] == "F" for event in trace.events)
    h, s, v = 16, 8, config.model.padded_vocab_size
    matrices = 2 * (4 * h * h + 8 * h * h) + v * h
    products = 6 * s * matrices + 2 * 12 * s * s * h  # two layers: scores and their use, forward and backward
    assert sum(event.flops for event in trace.events) == passes * products


def test_tokens_choose_experts_in_turn_so_that_all_ranks_get_as_many():
    config = tiny.config(
        2, **SMALL, num_experts=4, moe_router_topk=2, expert_model_parallel_size=2, moe_token_dispatcher_type="alltoall"
    )
    for trace in dry_run(config, 2).traces:
        rows = [event for event in trace.events if event.name == "all_to_all"]
        assert rows and all(event.shape == event.received for event in rows)
        assert {event.shape[0] for event in rows} == {8 * 2}


def forwards_waiting(trace: Trace) -> int:
    """Return how many forward passes at the peak still waited for their backward pass."""
    passes = [
        name[0]
        for event in trace.events[: trace.peak_event + 1]
        if event.kind == "action"
        for name in event.name.split(TOGETHER)
        if name[0] in "FB"
    ]
    return passes.count("F") - passes.count("B") + (passes[-1:] == ["B"])


def test_the_first_stage_is_worst_by_the_activations_of_its_waiting_forward_passes():
    config = tiny.config(
        4, **{**SMALL, "num_layers": 4, "pipeline_model_parallel_size": 4, "global_batch_size": 8, "hidden_size": 64}
    )
    dry = dry_run(config, 4)
    assert dry.worst_trace.place["pp"] == 0
    assert [forwards_waiting(trace) for trace in dry.traces] == [4, 3, 2, 1]


def test_ranks_of_a_stage_share_a_trace_and_every_rank_has_one():
    config = tiny.config(
        64,
        **{
            **SMALL,
            "num_layers": 4,
            "pipeline_model_parallel_size": 4,
            "tensor_model_parallel_size": 4,
            "global_batch_size": 8,
        },
    )
    dry = dry_run(config, 64)
    assert sorted(rank for ranks in dry.stands_for for rank in ranks) == list(range(64))
    assert all(
        trace_of(dry, rank).place["pp"] == trace_of(dry, ranks[0]).place["pp"]
        for ranks in dry.stands_for
        for rank in ranks
    )
    assert not dist.is_initialized()


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_a_thousand_ranks_are_planned_in_a_gigabyte(name):
    found = planned(name)
    assert found.stages == 16 and found.megabytes < 1024, f"{found.megabytes:.0f} MB"
    assert 5 < found.peak < 141, f"a peak of {found.peak:.1f} GiB fits no GPU"


def test_a_plan_for_gpus_counts_documents_without_a_mask_where_their_kernel_takes_none():
    length = 256
    small = {**SMALL, "seq_length": length, "max_position_embeddings": length, "bf16": True, "attention_dropout": 0.0}
    packed = {**small, "reset_attention_mask": True, "reset_position_ids": True}
    peaks = [
        dry_run(tiny.config(1, **changes), 1, on_gpu=on_gpu).traces[0].peak
        for changes, on_gpu in ((small, True), (packed, True), (packed, False))
    ]
    assert peaks[0] <= peaks[1] < peaks[0] + 64 * length, "document numbers and positions of tokens, and no mask"
    assert peaks[2] > peaks[1] + length * length, "a mask, and more"
    for changes in ({"bf16": False}, {"attention_backend": "fused"}, {"window_size": "8,0"}):
        assert not uses_varlen_attention(tiny.config(1, **{**packed, **changes})), changes
