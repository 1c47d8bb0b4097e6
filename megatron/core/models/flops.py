"""Model FLOPs and memory of a network, from its config.

Model FLOPs are those of the mathematics of one training step, without recomputation: a matrix element costs 2 per token in the
forward pass and 4 in the backward pass, less where parameters are frozen (`gradient_flow.py`). Two ways to count attention
scores are in use, and every number states its own, here with nothing frozen:

    square   each query sees all s keys                        12 * s * (query width) a token and layer
    causal   each query sees half of them on average             6 * s * (query width), or less where a window hides keys

Queries of an encoder and of cross attention see all keys: both counts are the first there.

Memory is an estimate for one rank: weights, gradients and optimizer state exactly; activations as the tensors
that the backward pass of each layer needs. Temporaries and the allocator's waste come on top.

Letters: s sequence, b micro batch, h hidden, f feed-forward, q and k query and key widths, v padded vocabulary, t tensor
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal

from megatron.core.config.mixers.table import MIXERS, attention_of, mixer_beside_attention
from megatron.core.config.plan.layers import LayerPlan, StageSpec, all_layer_plans, network_layer_plans
from megatron.core.config.plan.linear_layers import EXPERTS, linear_shapes_of_layer
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.optim import BYTES
from megatron.core.config.settings.run import RunConfig
from megatron.core.config.vision import vision_encoder_config
from megatron.core.models.describe import RankParameterCounts, WeightShardCounts, count_rank_parameters
from megatron.core.models.gradient_flow import gradient_flow

if TYPE_CHECKING:
    from megatron.core.optimizer.rule import UpdateRule

AttentionCount = Literal["causal", "square"]
# Of a code, an 8-bit scale for 64 of them, and a mean and a step for 256 scales (adapters/quantized_base.py).
QUANTIZED_BYTES = {name: bits / 8 + 1 / 64 + 8 / (64 * 256) for name, bits in (("nf4", 4), ("int8", 8))}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a rank: weights and optimizer state, activations at a step's peak, temporaries of the update.

    parameters: their number; trained: of those that the run trains. update: fp32 copies of half-precision gradients,
    allocated after the activations are freed.
    """

    parameters: int
    trained: int
    weights_and_optimizer: float
    activations: float
    update: float = 0.0

    @property
    def total(self) -> float:
        """Bytes at the peak of a step."""
        return self.weights_and_optimizer + max(self.activations, self.update)


def flops_per_token(model: ModelConfig, seq_length: int, count: AttentionCount = "causal") -> float:
    """Return the forward and backward FLOPs of one token in a sequence of `seq_length` tokens. count: see the module."""
    flow, plans = gradient_flow(model), all_layer_plans(model)
    layers = sum(
        one.matrices + one.passes * sum(mixer.forward_flops_per_token(model, keys) for mixer in plan.mixers)
        for one, plan, keys in zip(
            flow.layers, plans, _mean_visible_keys_by_layer(model, seq_length, count), strict=True
        )
    )
    return layers + flow.head + flow.ahead


def flops_per_sample(
    model: ModelConfig, seq_length: int, count: AttentionCount = "causal", *, decoder_length: int | None = None
) -> float:
    """Return the forward and backward FLOPs of one sample: a sequence of `seq_length` tokens, with one image if the
    network reads images; for T5, with its `decoder_length` target tokens; for a vision transformer, an image.
    """
    if model.architecture.classifies_images:
        return flops_per_image(model)
    if not model.architecture.is_encoder_decoder:
        return seq_length * flops_per_token(model, seq_length, count) + flops_per_image(model) * model.has_vision
    assert decoder_length is not None, "a decoder has a length of its own"
    s, t, q, total = seq_length, decoder_length, model.query_projection_width, 0.0
    flow = gradient_flow(model)
    for one, plan in zip(flow.layers, network_layer_plans(model), strict=True):
        if not plan.has_cross_attention:
            total += s * (one.matrices + one.passes * 4 * s * q)
            continue
        scores = one.passes * 4 * t * q * (0.5 if count == "causal" else 1.0) + one.cross_passes * 4 * s * q
        total += t * (one.matrices + scores) + s * one.memory_matrices
    return total + t * flow.head


def flops_per_image(model: ModelConfig) -> float:
    """Return the FLOPs of encoding and projecting an image, 0 without vision."""
    if not model.architecture.classifies_images and not model.has_vision:
        return 0.0
    vision, encoder, flow = model.vision, vision_encoder_config(model), gradient_flow(model)
    tokens, patches = vision.num_encoder_tokens, vision.patch_grid[0] * vision.patch_grid[1]
    layers = sum(one.matrices + one.passes * 4 * tokens * encoder.query_projection_width for one in flow.encoder)
    rest = flow.head if model.architecture.classifies_images else vision.num_image_embeddings * flow.projector
    return patches * flow.patches + tokens * layers + rest


def frozen_weight_bytes(config: RunConfig, frozen: RankParameterCounts) -> float:
    """Return the bytes of a rank's frozen weights; those of layers quantized with --lora-base-quantization."""
    size = BYTES[config.precision.param_dtype_name]
    of_layers = QUANTIZED_BYTES.get(config.model.adapter.lora_base_quantization, size)
    return of_layers * frozen.layers + size * frozen.rest


def _num_optimizer_shards(config: RunConfig, data_parallel_size: int) -> int:
    """Return over how many of the data-parallel ranks the optimizer state is sharded."""
    sharded = config.parallel.use_distributed_optimizer or config.parallel.use_torch_fsdp2
    return data_parallel_size if sharded else 1


def training_state_bytes_per_param(config: RunConfig, data_parallel_size: int = 1) -> float:
    """Return the bytes of weights, gradients and optimizer state per parameter of a rank, between steps.

    Every data-parallel rank holds weights and gradients; the distributed optimizer shards the rest, which for half
    precision includes fp32 main weights. FSDP2 shards everything, in fp32; gathered layers are not counted, nor are
    temporaries (`update_temporaries_per_parameter`).
    """
    weight, gradient = BYTES[config.precision.param_dtype_name], BYTES[config.precision.gradient_dtype_name]
    if config.parallel.use_torch_fsdp2:
        return (2 * max(4, weight) + owned_bytes_per_parameter(config)) / data_parallel_size
    return weight + gradient + owned_bytes_per_parameter(config) / _num_optimizer_shards(config, data_parallel_size)


def owned_bytes_per_parameter(config: RunConfig) -> float:
    """Return the bytes of main weights and moments per parameter on its owner; Muon, SOAP, Adafactor: per matrix element.

    State that --optimizer-cpu-offload moves to the CPU is included.
    """
    rule = _update_rule(config, 0)
    has_master = BYTES[config.precision.param_dtype_name] < 4 and not config.parallel.use_torch_fsdp2
    return 4.0 * (has_master and rule.uses_main_weights) + rule.state_bytes_per_element(config, *_matrix_sizes(config))


def _matrix_sizes(config: RunConfig, *, experts: bool = False) -> tuple[float, int]:
    """Return (sides, tensor_ranks) of the layers' matrices without those of experts, or of these alone, for update rules."""
    split = WeightShardCounts.from_parallel(config.parallel)
    return _mean_sides(config.model, experts), split.widths if experts else split.tensor


@lru_cache(maxsize=64)
def _mean_sides(model: ModelConfig, experts: bool) -> float:
    """Return m/n + n/m of matrices m x n, on average over their elements; parts of fused ones by themselves."""
    elements = squares = 0
    for plan in network_layer_plans(model):
        for path, shape in linear_shapes_of_layer(model, plan).items():
            if path.startswith(EXPERTS[1:]) == experts:
                elements += sum(rows * shape.inputs for _, rows in shape.parts)
                squares += sum(rows**2 + shape.inputs**2 for _, rows in shape.parts)
    return squares / elements if elements else 2.0


def _update_rule(config: RunConfig, index: int) -> type[UpdateRule]:
    # Imported here: help and refusals of the tools that estimate memory do not wait for torch.
    from megatron.core.optimizer.optimizer import update_rule_named

    return update_rule_named(config.optimizer.update_rules[index], config.precision)


def update_temporaries_per_parameter(config: RunConfig, data_parallel_size: int = 1) -> float:
    """Return the bytes per parameter of a rank during the update only: fp32 copies of half-precision gradients.

    Megatron keeps them from step to step; its published table counts them as state (20, or 4 + 16/d, for fp16).
    """
    if (
        config.parallel.use_torch_fsdp2
        and data_parallel_size > 1
        or BYTES[config.precision.gradient_dtype_name] >= 4
        or config.precision.use_precision_aware_optimizer
    ):
        return 0.0
    return 4 / _num_optimizer_shards(config, data_parallel_size)


def offloaded_bytes_per_parameter(config: RunConfig, data_parallel_size: int = 1) -> float:
    """Return the part of `state_bytes`, per parameter of a rank, that --optimizer-cpu-offload keeps in CPU memory."""
    if not config.optimizer.optimizer_cpu_offload:
        return 0.0
    offloaded = config.optimizer.optimizer_offload_fraction * owned_bytes_per_parameter(config)
    return offloaded / _num_optimizer_shards(config, data_parallel_size)


def estimate_memory_by_pipeline_rank(
    config: RunConfig, stages: Sequence[StageSpec], *, data_parallel_size: int, num_microbatches: int
) -> tuple[RankMemory, ...]:
    """Estimate the memory of a rank at each pipeline position, in order. stages: those of all positions."""
    parallel, stages_memory = config.parallel, []
    split, replicas = WeightShardCounts.from_parallel(parallel), parallel.context_parallel_size * data_parallel_size
    if replicas == 1:  # no run shards weights over one rank
        config = replace(config, parallel=replace(parallel, use_torch_fsdp2=False))
    for position in range(parallel.pp):
        local_stages = [stage for stage in stages if stage.rank == position]
        held, trained = (count_rank_parameters(config.model, local_stages, split, trained=one) for one in (False, True))
        # ranks with the same experts
        expert_replicas = max(1, replicas * parallel.tp // (split.experts * split.widths))
        state, update, offloaded = (
            (those.total - those.experts) * count(config, replicas) + those.experts * count(config, expert_replicas)
            for count, those in (
                (training_state_bytes_per_param, trained),
                (update_temporaries_per_parameter, trained),
                (offloaded_bytes_per_parameter, trained),
            )
        )
        state += frozen_weight_bytes(config, held - trained)
        # Matrices of experts are divided over other ranks, and other parameters than matrices may have another rule.
        of_matrices, of_experts, of_rest = (
            _update_rule(config, at).state_bytes_per_element(config, *_matrix_sizes(config, experts=experts))
            for at, experts in ((0, False), (0, True), (-1, False))
        )
        state += trained.experts * (of_experts - of_matrices) / _num_optimizer_shards(config, expert_replicas)
        state += trained.rest * (of_rest - of_matrices) / _num_optimizer_shards(config, replicas)
        stages_memory.append(
            RankMemory(
                held.total,
                trained.total,
                state - offloaded,
                _peak_activation_bytes(config, local_stages, position, num_microbatches),
                update,
            )
        )
    return tuple(stages_memory)


def layer_activation_bytes_per_token(
    config: RunConfig, *, recomputes: bool = True, mlp: str = "dense", mixer: str | None = None
) -> float:
    """Return the bytes per token that a rank saves for the backward pass of one layer.

    recomputes: False ignores full recomputation, as for layers that it does not cover. mlp: dense, moe (with even
    expert loads) or none. mixer: a row of `MIXERS`, or none; left out: the network's attention.
    """
    model, t = config.model, config.parallel.tp
    size, h = BYTES[config.precision.param_dtype_name], model.hidden_size
    f, recompute = model.ffn_hidden_size // t, config.recompute
    sequence_shards = t if config.parallel.sequence_parallel else 1
    if recomputes and recompute.recompute_granularity == "full":
        return size * h / (t if recompute.distribute_saved_activations else sequence_shards)
    recomputed = recompute.selected_modules
    layer_inputs = 2 * size * h + (2 * h if model.hidden_dropout > 0 else 0)  # inputs of both norms, two dropout masks
    layer_inputs += 0 if "layernorm" in recomputed else 2 * size * h  # their outputs: the inputs of both sublayers
    mlp_bytes: float = 0 if mlp == "none" or "mlp" in recomputed else size * f * (3 if model.has_gated_mlp else 2)
    if mlp == "moe":
        mlp_bytes = size * _moe_activation_elements(model, WeightShardCounts.from_parallel(config.parallel), recomputed)
    halves = (mixer != "none") + (mlp != "none")  # each with its norm
    # A mixer beside attention is in every layer, and adds its own tensors.
    kinds = (attention_of(model).name if mixer is None else mixer, mixer_beside_attention(model))
    mixed = sum(MIXERS[name].saved_bytes_per_token(config) for name in kinds if name != "none")
    return layer_inputs * halves / 2 / sequence_shards + mixed + mlp_bytes


def _peak_activation_bytes(
    config: RunConfig, local_stages: Sequence[StageSpec], position: int, num_microbatches: int
) -> float:
    """Return the bytes of activations at the peak of a step on a rank at this pipeline position."""
    model, parallel, train = config.model, config.parallel, config.train
    tokens, t = train.seq_length * train.micro_batch_size // parallel.context_parallel_size, parallel.tp
    sequence_shards = t if parallel.sequence_parallel else 1
    chunks_alive = _max_chunks_in_flight(config, position, len(local_stages), num_microbatches)
    chunk, recomputed = _chunk_activation_bytes_per_token(config, local_stages)
    per_token = chunks_alive * chunk + recomputed
    if any(stage.has_embedding for stage in local_stages):
        per_token += (
            chunks_alive
            / len(local_stages)
            * (8 + (model.hidden_size / sequence_shards if model.hidden_dropout > 0 else 0))
        )
    depths = model.mtp.mtp_num_layers or 0
    if depths and any(stage.has_mtp for stage in local_stages):
        # both norms' inputs, and what they made
        mtp_inputs = 4 * BYTES[config.precision.param_dtype_name] * model.hidden_size / sequence_shards
        per_token += chunks_alive / len(local_stages) * depths * (layer_activation_bytes_per_token(config) + mtp_inputs)
    if any(stage.has_output for stage in local_stages):
        per_token += 4 * (1 + depths) * model.hidden_size / sequence_shards + _logit_bytes_per_token(
            model, t, tokens, 1 + depths
        )
    return per_token * tokens


def _chunk_activation_bytes_per_token(config: RunConfig, local_stages: Sequence[StageSpec]) -> tuple[float, float]:
    """Return two numbers of bytes per token: what a chunk's layers keep between forward and backward, and what the
    layers that are being recomputed together need on top.
    """
    plans = [plan for stage in local_stages for plan in stage.layers]
    layers = sum(_relative_layer_memory(config, plan) for plan in plans) / len(local_stages)
    if config.recompute.recompute_granularity != "full":
        return layers * layer_activation_bytes_per_token(config), 0.0
    group = config.recompute.recompute_num_layers or 1
    input_bytes = layer_activation_bytes_per_token(config)
    without = partial(layer_activation_bytes_per_token, config, recomputes=False)
    full_layer = max((without(mlp=plan.mlp, mixer=plan.mixer) for plan in plans), default=0.0)
    if config.recompute.recompute_method == "block":
        recomputed_layers = min(group, layers)
        return recomputed_layers * input_bytes + (layers - recomputed_layers) * without(), full_layer
    return math.ceil(layers / group) * input_bytes, min(group, layers) * full_layer


def _logit_bytes_per_token(model: ModelConfig, t: int, tokens: int, heads: int) -> float:
    """Return the bytes per token of fp32 logits; with the linear loss, of a block of them and weight gradients.

    t: tensor ranks; heads: output heads, one and one for each MTP depth.
    """
    words = 1 if model.reward_head else model.padded_vocab_size / t
    if model.kernels.cross_entropy_fusion_impl != "linear":
        return 4 * heads * words
    return 4 * words * (min(1.0, max(512 / tokens, 1 / 8)) + heads * model.hidden_size / tokens)


def _relative_layer_memory(config: RunConfig, plan: LayerPlan) -> float:
    """Activation memory of a layer in units of one dense layer of --seq-length tokens; cross attention counts 0.5."""
    train = config.train
    if plan.mlp == "none" or not plan.has_attention:
        return layer_activation_bytes_per_token(
            config, mlp=plan.mlp, mixer=plan.mixer
        ) / layer_activation_bytes_per_token(config)
    if plan.mlp == "moe":
        return layer_activation_bytes_per_token(config, mlp="moe") / layer_activation_bytes_per_token(config)
    return 1.5 * (train.decoder_seq_length or train.seq_length) / train.seq_length if plan.has_cross_attention else 1.0


def _max_chunks_in_flight(config: RunConfig, position: int, chunks: int, num_microbatches: int) -> int:
    """Return how many forward passes of model chunks at most await their backward pass at this pipeline position."""
    parallel = config.parallel
    if parallel.pipeline_schedule == "gpipe":
        return num_microbatches * chunks
    if parallel.splits_backward:
        return chunks * min(num_microbatches, parallel.pp)
    if chunks == 1:
        return min(num_microbatches, (parallel.pp - position) * (2 if parallel.overlap_moe_expert_parallel_comm else 1))
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pp
    return min(num_microbatches * chunks, 2 * (parallel.pp - position - 1) + (chunks - 1) * group + 1)


def active_matrix_params(model: ModelConfig, plan: LayerPlan) -> int:
    """Return the elements of a layer's weight matrices that a token uses: of experts the top-k, and the router."""
    moe = model.moe
    elements = sum(
        shape.inputs * shape.outputs * (moe.moe_router_topk if EXPERTS in f".{name}" else 1)
        for name, shape in linear_shapes_of_layer(model, plan).items()
    )
    routed = plan.mlp == "moe"
    return elements + (model.hidden_size * (moe.num_experts_or_zero + moe.moe_shared_expert_gate) if routed else 0)


def _mean_visible_keys_by_layer(model: ModelConfig, length: int, count: AttentionCount) -> list[float]:
    """Return the average number of keys that a query sees, for every layer. Only the causal count considers windows."""
    windows = [plan.window for plan in all_layer_plans(model)]
    if count == "square" or not model.architecture.is_decoder_only:
        return [float(length)] * len(windows)
    lefts = [length if window is None or window[0] < 0 else window[0] for window in windows]
    return [
        min(length / 2, left + 1 - left * (left + 1) / (2 * length)) if left < length else length / 2 for left in lefts
    ]


def _moe_activation_elements(model: ModelConfig, split: WeightShardCounts, recomputed: frozenset[str]) -> float:
    """Return how many elements per token a rank saves for the backward pass of router and experts, with even loads.

    recomputed: modules that are recomputed. A row of an expert saves its input, the output of the first matrix (2f if
    gated), and the activations between that and the second matrix, including its input.
    """
    moe = model.moe
    if "moe" in recomputed:
        return 0.0
    made, between = (2, 3) if model.has_gated_mlp else (1, 2)
    width = moe.expert_width / split.widths
    row = model.hidden_size + width * (made + (0 if "moe_act" in recomputed else between))
    shared = (moe.moe_shared_expert_intermediate_size or 0) / split.tensor * (made + between - 1)
    return moe.moe_router_topk * split.widths / split.tensor * row + (0.0 if "shared_experts" in recomputed else shared)
