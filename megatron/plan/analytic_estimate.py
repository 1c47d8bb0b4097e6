"""Estimate time and memory of a layout by closed formulas, a thousand times faster than a dry run, to rank many layouts.

Memory is `estimate_memory_by_pipeline_rank` of models/flops.py, without temporaries: a lower bound, so what it rejects cannot fit. Time is that of the layers' matrix
products, attention, element-wise operations, collectives and messages, at the rates of hardware.py. All layers count as equal, and the
pipeline fills and drains once:

    step = (microbatches + (p-1)/v) x (slowest stage, forward and backward) + exposed gradient reduction + update

In the code, `mats` are the FLOPs of a layer's products and `met` those of its attention, of one microbatch on one rank, forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.optim import BYTES
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.models.flops import (
    estimate_memory_by_pipeline_rank,
    flops_per_image,
    flops_per_sample,
    flops_per_token,
    owned_bytes_per_parameter,
)
from megatron.plan.cost import FORWARD, StepTime, step_time_from_seconds
from megatron.plan.hardware import Hardware, collective_seconds

# Element-wise passes of one layer's forward pass: widths of the hidden state that are read or written for each token, outside and
# inside of the region that tensor ranks share; and its kernels.
OUTSIDE, INSIDE, KERNELS = 10, 12, 30
LOGITS = 13  # passes over the fp32 logits in loss and gradient
UPDATE_KERNELS = 20


@dataclass(frozen=True, slots=True)
class AnalyticEstimate:
    """Estimated memory and time. needs: bytes of the fullest rank; position: its pipeline rank. time: of a step."""

    needs: float
    position: int
    time: StepTime


def with_padded_vocabulary(config: RunConfig, true_vocab_size: int) -> RunConfig:
    """Return the config with its vocabulary padded as in a run."""
    return replace(config, model=config.model.with_vocabulary(true_vocab_size, config.parallel.tp))


def num_microbatches(config: RunConfig, world_size: int) -> int:
    """Return the number of microbatches of one step on each data-parallel rank."""
    train = config.train
    return max(1, train.global_batch_size // (train.micro_batch_size * config.parallel.data_parallel_size(world_size)))


def rank0_groups(config: RunConfig, world_size: int) -> Mapping[str, range]:
    """Return rank 0's group on each axis, as `axis_rank_groups`, without computing all other groups."""
    parallel = config.parallel
    tp, cp, pp, ep = parallel.tp, parallel.context_parallel_size, parallel.pp, parallel.expert_model_parallel_size
    etp, dp = parallel.expert_tensor_parallel_size or tp, parallel.data_parallel_size(world_size)
    across = parallel.use_tp_pp_dp_mapping
    data = tp * cp * (pp if across else 1)
    line = tp * cp * (1 if across else dp)
    sizes = {
        "tp": range(tp),
        "cp": range(0, tp * cp, tp),
        "dp": range(0, data * dp, data),
        "pp": range(0, line * pp, line),
        "ep": range(0, etp * ep, etp),
    }
    return sizes | {"dp_cp": range(0, tp * cp * dp, tp) if not across or cp == 1 and pp == 1 else sizes["dp"]}


def analytic_estimate(
    config: RunConfig, world_size: int, hardware: Hardware, stages: Sequence[StageSpec], *, passes: int = 0
) -> AnalyticEstimate:
    """Estimate time and memory of a layout. config: resolved, with its vocabulary. stages: of its pipeline
    (`stage_specs_of_run`). passes: forward passes without gradients, as in `step_cost`.
    """
    count = num_microbatches(config, world_size)
    dp = config.parallel.data_parallel_size(world_size)
    held = estimate_memory_by_pipeline_rank(config, stages, data_parallel_size=dp, num_microbatches=count)
    position = max(range(len(held)), key=lambda place: held[place].total)
    forward, again, parts = _layer_seconds(config, world_size, hardware, sum(len(stage.layers) for stage in stages))
    ends = _output_layer_seconds(config, hardware)
    both = [
        _stage_pass_seconds(config, [stage for stage in stages if stage.rank == place], forward, again, ends)
        for place in range(config.parallel.pp)
    ]
    slowest, chunks = max(both), len(stages) // config.parallel.pp
    # Where gradients of weights wait: by the schedules' own formulas, with a third of a pass for each of its three parts.
    fill = (config.parallel.pp - 1) / {"zb-h1": 3, "zb-v": 6}.get(config.parallel.pipeline_schedule, chunks)
    busiest = [stage for stage in stages if stage.rank == both.index(slowest)]
    ahead = _stage_pass_seconds(config, busiest, forward, 0.0, ends) / 3
    late, update = reduction_and_update_seconds(
        config, world_size, hardware, trained=max(one.trained for one in held), forward=ahead, backward=slowest - ahead
    )
    extra = passes * (count + (config.parallel.pp - 1) / chunks) * ahead
    seconds = (count + fill) * slowest + late + update
    layers = sum(len(stage.layers) for stage in busiest)
    share = {name: count * layers * part for name, part in parts.items() if part}
    share |= {
        "output and loss": count * slowest - sum(share.values()),
        "update": update,
        "waiting": fill * slowest + late,
        **({FORWARD: extra} if passes else {}),
    }
    time = step_time_from_seconds(
        config, world_size, hardware, seconds=seconds + extra, bubble=fill / (count + fill), parts=share
    )
    return AnalyticEstimate(held[position].total, position, time)


def _layer_seconds(
    config: RunConfig, world_size: int, hardware: Hardware, layers: int
) -> tuple[float, float, dict[str, float]]:
    """Return seconds of an average layer for one microbatch: (forward and backward, recomputation, all of it by part)."""
    model, parallel, train = config.model, config.parallel, config.train
    size, dtype, at = (
        BYTES[config.precision.param_dtype_name],
        config.precision.param_dtype_name,
        rank0_groups(config, world_size),
    )
    cp, tp, h = parallel.context_parallel_size, parallel.tp, model.hidden_size
    tokens = train.micro_batch_size * train.seq_length / cp
    mats, met = (
        flops * train.micro_batch_size / 3 / layers / cp / tp for flops in _total_layer_and_attention_flops(config)
    )
    experts = max(1, (model.moe.num_experts or 1) // parallel.expert_model_parallel_size)
    products = 4 if experts == 1 else 4 + 2 * experts
    arithmetic = products * hardware.matmul_seconds(mats / products, dtype)
    attention = hardware.attention_seconds(met, dtype, backward=False)
    back = hardware.attention_seconds(2.5 * met, dtype, backward=True)
    saved = tp if parallel.sequence_parallel else 1
    passes = size * h * tokens * (OUTSIDE / saved + INSIDE / tp) / hardware.memory_rate + KERNELS * hardware.launch
    whole = size * tokens * h
    tensor = 2 * collective_seconds("all_reduce", whole, at["tp"], hardware)
    context = collective_seconds(
        "all_gather", 2 * size * tokens * cp * model.key_projection_width / tp, at["cp"], hardware
    )
    rows = whole / saved * (model.moe.moe_router_topk if model.moe.num_experts else 0)
    expert = 2 * collective_seconds("all_to_all", rows, at["ep"], hardware)
    ahead = arithmetic + attention + passes + tensor + context + expert
    parts = {
        "matrix products": 3 * arithmetic,
        "attention": attention + back,
        "other operations": 3 * passes,
        "tp collectives": 2 * tensor,
        "cp collectives": 3 * context,
        "ep collectives": 2 * expert,
    }
    # Selective recomputation runs a kernel of the layer twice; of all that it can name, attention is what Megatron names first.
    granularity = config.recompute.recompute_granularity
    again = ahead if granularity == "full" else attention if granularity == "selective" else 0.0
    return sum(parts.values()), again, parts | {"computed again": again}


def _total_layer_and_attention_flops(config: RunConfig) -> tuple[float, float]:
    """Return the FLOPs of all layers for one sample, forward and backward: (products, attention)."""
    model, train = config.model, config.train
    length = train.seq_length
    if model.architecture.classifies_images:
        return flops_per_image(model), 0.0
    if model.architecture.is_encoder_decoder:
        whole = flops_per_sample(model, length, "causal", decoder_length=train.decoder_seq_length)
        return whole - _output_layer_flops(config), 0.0
    whole, products = length * flops_per_token(model, length, "causal"), length * flops_per_token(model, 1, "causal")
    return products - _output_layer_flops(config), whole - products


def _output_layer_flops(config: RunConfig) -> float:
    """Return the FLOPs of the output layer for one sample."""
    return (
        6
        * config.model.hidden_size
        * config.model.padded_vocab_size
        * (config.train.decoder_seq_length or config.train.seq_length)
    )


def _output_layer_seconds(config: RunConfig, hardware: Hardware) -> float:
    """Return seconds of the output layer and the loss for one microbatch: three products, and passes over fp32 logits."""
    parallel, train = config.parallel, config.train
    share = train.micro_batch_size / parallel.tp / parallel.context_parallel_size
    logits = 4 * config.model.padded_vocab_size * train.seq_length * share
    return (
        3 * hardware.matmul_seconds(_output_layer_flops(config) / 3 * share, config.precision.param_dtype_name)
        + LOGITS * logits / hardware.memory_rate
    )


def _stage_pass_seconds(config: RunConfig, stages: list[StageSpec], layer: float, again: float, head: float) -> float:
    """Return seconds of a pipeline rank's forward and backward pass of one microbatch."""
    layers = sum(len(stage.layers) for stage in stages)
    repeated = layers
    if config.recompute.recompute_method == "block":
        repeated = min(layers, len(stages) * (config.recompute.recompute_num_layers or 1))
    return layers * layer + repeated * again + head * any(stage.has_output for stage in stages)


def reduction_and_update_seconds(
    config: RunConfig, world_size: int, hardware: Hardware, *, trained: int, forward: float, backward: float
) -> tuple[float, float]:
    """Return seconds of (gradient reduction that is not overlapped, update and all-gather of new weights that are not).

    trained: parameters of this rank that have gradients. forward, backward: seconds of a rank's passes of one microbatch.
    """
    parallel, ranks = config.parallel, rank0_groups(config, world_size)["dp_cp"]
    weight, gradient = BYTES[config.precision.param_dtype_name], BYTES[config.precision.gradient_dtype_name]
    tied = _tied_embedding_seconds(config, world_size, hardware)
    if parallel.use_torch_fsdp2:  # which sums and gathers within the passes
        return 0.0, tied + _update_seconds(config, hardware, trained / len(ranks), trained / len(ranks))
    sharded, buckets = parallel.use_distributed_optimizer, _num_buckets(parallel, trained, len(ranks))
    summed, gathered = (
        buckets * collective_seconds(name, trained / buckets * size, ranks, hardware)
        for name, size in (("reduce_scatter" if sharded else "all_reduce", gradient), ("all_gather", weight))
    )
    gathered *= sharded
    if parallel.overlap_grad_reduce:  # the last bucket is complete when the pass ends
        summed = max(summed / buckets, summed - backward * (1 - 1 / buckets))
    if parallel.overlap_param_gather:
        gathered = gathered / buckets + max(0.0, gathered * (1 - 1 / buckets) - forward)
    owned = trained / (len(ranks) if sharded else 1)
    return summed, tied + gathered + _update_seconds(config, hardware, trained, owned)


def _tied_embedding_seconds(config: RunConfig, world_size: int, hardware: Hardware) -> float:
    """Return the seconds in which the first and the last stage sum the gradients of an embedding that both have."""
    model, line = config.model, rank0_groups(config, world_size)["pp"]
    if model.untie_embeddings_and_output_weights or len(line) == 1 or model.architecture.classifies_images:
        return 0.0
    moved = model.padded_vocab_size * model.hidden_size / config.parallel.tp
    moved *= BYTES[config.precision.gradient_dtype_name]
    return collective_seconds("all_reduce", moved, (line[0], line[-1]), hardware)


def _num_buckets(parallel: ParallelConfig, trained: int, ranks: int) -> int:
    """Return the number of buckets whose gradients are reduced by themselves."""
    if parallel.ddp_num_buckets is not None:
        return parallel.ddp_num_buckets
    if parallel.ddp_bucket_size is None and not (parallel.overlap_grad_reduce or parallel.overlap_param_gather):
        return 1
    return max(1, round(trained / (parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * ranks))))


def _update_seconds(config: RunConfig, hardware: Hardware, trained: float, owned: float) -> float:
    """Return the seconds in which gradients are zeroed, and norm, clipping, update and cast pass over what a rank owns of them."""
    weight, gradient = BYTES[config.precision.param_dtype_name], BYTES[config.precision.gradient_dtype_name]
    passes = gradient + owned_bytes_per_parameter(config) + 4  # the norm; the update's state and its fp32 gradient
    passes += gradient + 4 if gradient < 4 else 0  # the copy that is that gradient
    passes += 4 + weight if weight < 4 else weight  # the cast of the master; or the weight itself
    return (2 * gradient * trained + passes * owned) / hardware.memory_rate + UPDATE_KERNELS * hardware.launch
