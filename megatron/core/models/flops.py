"""Model FLOPs and memory of a network, from its config.

Model FLOPs are what the mathematics needs for one training step, so they do not grow with recomputation: a matrix
element costs 2 in the forward pass and 4 in the backward pass. Attention's scores are counted in two ways that both are
in use, and every number says which one it is:

    square   each query meets all s keys                        12 * s * (query width) a token and layer
    causal   each query meets half of them, the work there is    6 * s * (query width), or less where a window hides keys

An encoder's queries, and those of cross attention, meet all keys: there both counts are the first.

Memory is an estimate of what a rank must hold: weights, gradients and optimizer state exactly; activations as the tensors
that the backward pass of each layer needs. Temporaries and the allocator's waste come on top.

Letters: s sequence, b micro batch, h hidden, f feed-forward, q and k query and key widths, v padded vocabulary, t tensor
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.plan import LayerPlan, StageSpec, layer_rows
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.models.describe import Split, rank_parameters

AttentionCount = Literal["causal", "square"]
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
NARROW = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2 + 4 / 128,
    "fp8": 1 + 4 / 128,
}  # of optimizer state, with a scale for every 128 numbers


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank must hold: between steps, of activations at the peak of a step, and of what the update takes.

    update: fp32 copies of gradients that are not, made when the last activations are gone.
    """

    parameters: int
    weights_and_optimizer: float
    activations: float
    update: float = 0.0

    @property
    def total(self) -> float:
        """All bytes at the peak of a step."""
        return self.weights_and_optimizer + max(self.activations, self.update)


def flops_per_token(model: ModelConfig, seq_length: int, count: AttentionCount = "causal") -> float:
    """Forward and backward FLOPs of one token in a sequence of `seq_length` tokens."""
    h, v, depths = model.hidden_size, model.padded_vocab_size, model.mtp.mtp_num_layers or 0
    scores = [6 * sum(_head_widths(model)) * met for met in _keys_met(model, seq_length, count)]
    transform = h * h if model.architecture == "bert" else 0
    layers = sum(6 * _layer_matrices(model, mlp) for mlp in _mlps(model)) + sum(scores)
    return layers + 6 * (transform + h * v) + depths * 6 * (2 * h * h + h * v)


def flops_per_sample(
    model: ModelConfig, seq_length: int, count: AttentionCount = "causal", *, decoder_length: int | None = None
) -> float:
    """Forward and backward FLOPs of one sequence; of T5 of one text and the `decoder_length` tokens made of it."""
    if model.architecture != "t5":
        return seq_length * flops_per_token(model, seq_length, count)
    assert decoder_length is not None, "a decoder has a length of its own"
    h, q, k, s, t = model.hidden_size, model.query_size, model.key_size, seq_length, decoder_length
    encoder = s * (6 * _layer_matrices(model) + 12 * s * q)
    own = t * (6 * _layer_matrices(model) + 12 * t * q * (0.5 if count == "causal" else 1.0))
    cross = 6 * (t * 2 * h * q + s * 2 * h * k) + 12 * t * s * q
    return (
        model.encoder_num_layers * encoder
        + model.decoder_num_layers * (own + cross)
        + t * 6 * h * model.padded_vocab_size
    )


def weight_bytes(config: RunConfig, data_parallel_size: int = 1) -> float:
    """Bytes of a weight on a rank, between steps: in the format of the run, and under FSDP2 its share of one in fp32."""
    size = BYTES[config.precision.dtype]
    return max(4, size) / data_parallel_size if config.parallel.use_torch_fsdp2 else size


def state_bytes(config: RunConfig, data_parallel_size: int = 1) -> float:
    """Bytes of weight, gradient and optimizer state per parameter of a rank that is trained, between steps.

    Weights and gradients lie on every data-parallel rank; the distributed optimizer cuts the rest, which for half
    precision includes an fp32 copy of the weights. FSDP2 cuts all of it, and has fp32 weights and gradients only; what is whole
    while it works is not counted. Nor is what the update takes (`update_bytes`).
    """
    weight, gradient = BYTES[config.precision.dtype], BYTES[config.precision.gradient_dtype]
    if config.parallel.use_torch_fsdp2:
        return (2 * max(4, weight) + kept_bytes(config)) / data_parallel_size
    return (
        weight
        + gradient
        + kept_bytes(config) / (data_parallel_size if config.parallel.use_distributed_optimizer else 1)
    )


def kept_bytes(config: RunConfig) -> float:
    """Bytes of main weights and moments per parameter that a rank owns; with Muon or Adafactor, per element of a large matrix.

    What --optimizer-cpu-offload moves is counted as well: it is there, in another memory.
    """
    precision, rule, weight = config.precision, config.optimizer, BYTES[config.precision.dtype]
    has_master = weight < 4 and not config.parallel.use_torch_fsdp2
    if precision.use_precision_aware_optimizer:
        master = NARROW["fp16"] if precision.main_params_dtype == "fp16" else 2 if precision.bf16 else 4
        return master * has_master + NARROW[precision.exp_avg_dtype] + NARROW[precision.exp_avg_sq_dtype]
    moments = {"adam": 2, "lion": 1, "adafactor": 0, "sgd": int(rule.sgd_momentum > 0)}[rule.elementwise]
    return max(4, weight) * ((1 if rule.is_muon else moments) + has_master)


def update_bytes(config: RunConfig, data_parallel_size: int = 1) -> float:
    """Bytes per parameter of a rank that are there during the update only: half-precision gradients in the format of the main weights.

    Megatron keeps them from step to step; its published table counts them as state (20, or 4 + 16/d, for fp16).
    """
    if (
        config.parallel.use_torch_fsdp2
        or BYTES[config.precision.gradient_dtype] >= 4
        or config.precision.use_precision_aware_optimizer
    ):
        return 0.0
    return 4 / (data_parallel_size if config.parallel.use_distributed_optimizer else 1)


def away_bytes(config: RunConfig, data_parallel_size: int = 1) -> float:
    """Bytes of `state_bytes` that --optimizer-cpu-offload keeps in the CPU's memory instead."""
    if not config.optimizer.optimizer_cpu_offload:
        return 0.0
    cut = config.parallel.use_distributed_optimizer or config.parallel.use_torch_fsdp2
    return config.optimizer.optimizer_offload_fraction * kept_bytes(config) / (data_parallel_size if cut else 1)


def rank_memory(
    config: RunConfig, stages: Sequence[StageSpec], *, data_parallel_size: int, num_microbatches: int
) -> tuple[RankMemory, ...]:
    """What the ranks of each pipeline position hold; `stages` are those of all positions."""
    parallel, stages_memory = config.parallel, []
    for position in range(parallel.pp):
        local_stages = [stage for stage in stages if stage.rank == position]
        split, copies = Split.of(parallel), parallel.context_parallel_size * data_parallel_size
        held, trained = (rank_parameters(config.model, local_stages, split, trained=one) for one in (False, True))
        alike = max(1, copies * parallel.tp // (split.experts * split.widths))  # ranks with the same experts
        state, update, away, frozen = (
            (those.total - those.experts) * count(config, copies) + those.experts * count(config, alike)
            for count, those in (
                (state_bytes, trained),
                (update_bytes, trained),
                (away_bytes, trained),
                (weight_bytes, held - trained),
            )
        )
        state += frozen
        if config.optimizer.is_muon and config.optimizer.elementwise == "adam":  # what is no matrix has two moments
            cut = parallel.use_distributed_optimizer or parallel.use_torch_fsdp2
            state += trained.rest * max(4, BYTES[config.precision.dtype]) / (copies if cut else 1)
        stages_memory.append(
            RankMemory(
                held.total, state - away, _activation_bytes(config, local_stages, position, num_microbatches), update
            )
        )
    return tuple(stages_memory)


def layer_activation_bytes(config: RunConfig, *, recomputes: bool = True, mlp: str = "dense") -> float:
    """Bytes per token that the backward pass of one layer needs on a rank.

    recomputes: False leaves out what --recompute-granularity full changes, as for layers that it does not reach. mlp: dense
    or moe, with even loads.
    """
    model, t = config.model, config.parallel.tp
    size, h, s = BYTES[config.precision.dtype], model.hidden_size, config.train.seq_length
    q, k, f = model.query_size // t, _key_size(model, t), model.ffn_hidden_size // t
    recompute = config.recompute
    saved_cut = t if config.parallel.sequence_parallel else 1
    if recomputes and recompute.recompute_granularity == "full":
        return size * h / (t if recompute.distribute_saved_activations else saved_cut)
    again = _recomputed_modules(config)
    between = 2 * size * h + (2 * h if model.hidden_dropout > 0 else 0)  # inputs of both norms, two dropout masks
    between += 0 if "layernorm" in again else 2 * size * h  # their outputs: the inputs of both sublayers
    attention = _latent_bytes(config) if model.mla.multi_latent_attention else size * (q + 2 * k + q)
    if model.attention_backend in ("unfused", "local") and "core_attn" not in again:
        attention += model.num_attention_heads // t * s * (size + (size + 1 if model.attention_dropout > 0 else 0))
    mlp_bytes: float = 0 if "mlp" in again else size * f * (3 if model.gated else 2)
    if mlp == "moe":
        mlp_bytes = size * _kept_numbers(model, Split.of(config.parallel), again)
    return between / saved_cut + attention + mlp_bytes


def _recomputed_modules(config: RunConfig) -> frozenset[str]:
    """What --recompute-granularity selective computes again in the backward pass."""
    selective = config.recompute.recompute_granularity == "selective"
    return frozenset(config.recompute.recompute_modules or ()) if selective else frozenset()


def _latent_bytes(config: RunConfig) -> float:
    """Bytes per token that the backward pass of latent attention needs on a rank, beside its input."""
    mla, t, again = config.model.mla, config.parallel.tp, set(config.recompute.recompute_modules or ())
    latents = ((mla.q_lora_rank or 0) + mla.kv_lora_rank) * (
        2 if config.model.qk_layernorm else 1
    )  # before and after their norms
    # Values are a part of what keys are made of, and keep it alive.
    query, query_bytes = (width // t for width in _head_widths(config.model))
    made = 2 * query + config.model.num_attention_heads // t * (mla.qk_head_dim + mla.v_head_dim)
    saved = (
        latents / (t if config.parallel.sequence_parallel else 1)
        + query_bytes
        + (0 if "mla_up_proj" in again else made)
    )
    return BYTES[config.precision.dtype] * saved


def _activation_bytes(
    config: RunConfig, local_stages: Sequence[StageSpec], position: int, num_microbatches: int
) -> float:
    """Activations at the peak of a step on a rank at this pipeline position."""
    model, parallel, train = config.model, config.parallel, config.train
    tokens, t = train.seq_length * train.micro_batch_size // parallel.context_parallel_size, parallel.tp
    saved_cut = t if parallel.sequence_parallel else 1
    alive = _chunks_alive(config, position, len(local_stages), num_microbatches)
    chunk, at_work = _chunk_bytes(config, local_stages)
    held = alive * chunk + at_work
    if any(stage.has_embedding for stage in local_stages):
        held += alive / len(local_stages) * (8 + (model.hidden_size / saved_cut if model.hidden_dropout > 0 else 0))
    depths = model.mtp.mtp_num_layers or 0
    if depths and any(stage.has_mtp for stage in local_stages):
        joined = (
            4 * BYTES[config.precision.dtype] * model.hidden_size / saved_cut
        )  # both norms' inputs, and what they made
        held += alive / len(local_stages) * depths * (layer_activation_bytes(config) + joined)
    if any(stage.has_output for stage in local_stages):
        held += 4 * (1 + depths) * model.hidden_size / saved_cut + _logit_bytes(model, t, tokens, 1 + depths)
    return held * tokens


def _chunk_bytes(config: RunConfig, own: Sequence[StageSpec]) -> tuple[float, float]:
    """Bytes per token of a chunk's layers between forward and backward, and of what is recomputed at one time."""
    plans = [plan for stage in own for plan in stage.layers]
    layers = sum(_weight(config, plan) for plan in plans) / len(own)
    if config.recompute.recompute_granularity != "full":
        return layers * layer_activation_bytes(config), 0.0
    group = config.recompute.recompute_num_layers or 1
    most = max((plan.mlp for plan in plans), default="dense")  # "moe" if any layer is
    input_bytes, whole = layer_activation_bytes(config), layer_activation_bytes(config, recomputes=False, mlp=most)
    if config.recompute.recompute_method == "block":
        again = min(group, layers)
        return again * input_bytes + (layers - again) * layer_activation_bytes(config, recomputes=False), whole
    return math.ceil(layers / group) * input_bytes, min(group, layers) * whole


def _logit_bytes(model: ModelConfig, t: int, tokens: int, heads: int) -> float:
    """Bytes per token of the logits in fp32, or of a block of them and what it takes in their stead: a gradient of the words a head."""
    words = model.padded_vocab_size / t
    if model.kernels.cross_entropy_fusion_impl != "linear":
        return 4 * heads * words
    return 4 * words * (min(1.0, max(512 / tokens, 1 / 8)) + heads * model.hidden_size / tokens)


def _weight(config: RunConfig, plan: LayerPlan) -> float:
    """How much a layer keeps, in dense layers of --seq-length tokens without cross attention, which counts as half a layer."""
    train = config.train
    if plan.mlp == "moe":
        return layer_activation_bytes(config, mlp="moe") / layer_activation_bytes(config)
    return 1.5 * (train.decoder_seq_length or train.seq_length) / train.seq_length if plan.cross else 1.0


def _chunks_alive(config: RunConfig, position: int, chunks: int, num_microbatches: int) -> int:
    """Forward passes of one chunk whose backward pass is still to come, at most, at this pipeline position."""
    parallel = config.parallel
    if parallel.pipeline_schedule == "gpipe":
        return num_microbatches * chunks
    if parallel.splits_backward:
        return chunks * min(num_microbatches, parallel.pp)
    if chunks == 1:
        return min(num_microbatches, (parallel.pp - position) * (2 if parallel.overlap_moe_expert_parallel_comm else 1))
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pp
    return min(num_microbatches * chunks, 2 * (parallel.pp - position - 1) + (chunks - 1) * group + 1)


def _mlps(model: ModelConfig) -> list[str]:
    """The kind of MLP of every layer that a token passes, those of multi-token prediction included, which are like the last."""
    kinds = [plan.mlp for plan in layer_rows(model)]
    return kinds + kinds[-1:] * (model.mtp.mtp_num_layers or 0)


def _keys_met(model: ModelConfig, length: int, count: AttentionCount) -> list[float]:
    """How many keys a query meets on average, for every layer that a token passes. Only the causal count knows windows."""
    windows = [plan.window for plan in layer_rows(model)]
    windows += windows[-1:] * (model.mtp.mtp_num_layers or 0)
    if count == "square" or model.architecture != "gpt":
        return [float(length)] * len(windows)
    lefts = [length if window is None or window[0] < 0 else window[0] for window in windows]
    return [
        min(length / 2, left + 1 - left * (left + 1) / (2 * length)) if left < length else length / 2 for left in lefts
    ]


def _layer_matrices(model: ModelConfig, mlp: str = "dense") -> int:
    """Elements of the matrices that a token meets in one layer, cross attention left out."""
    if mlp == "moe":
        return _attention_matrices(model) + used_matrices(model)
    return _attention_matrices(model) + _mlp(model, model.ffn_hidden_size)


def _mlp(model: ModelConfig, width: int) -> int:
    """Elements of the matrices of an MLP."""
    return model.hidden_size * width * (3 if model.gated else 2)


def used_matrices(model: ModelConfig) -> int:
    """Elements of the matrices that a token meets: its experts', the shared one's and the router's."""
    moe, h = model.moe, model.hidden_size
    shared = _mlp(model, moe.moe_shared_expert_intermediate_size or 0) + (h if moe.moe_shared_expert_gate else 0)
    return moe.moe_router_topk * _mlp(model, moe.expert_width) + shared + h * moe.experts


def _kept_numbers(model: ModelConfig, split: Split, again: frozenset[str]) -> float:
    """Numbers per token that the backward pass of router and experts keeps on a rank when loads are even.

    again: what is recomputed. A row of an expert keeps its input, what the first matrix makes of it (2f if gated), and
    what stands between that and the input of the second, that included.
    """
    moe = model.moe
    if "moe" in again:
        return 0.0
    made, between = (2, 3) if model.gated else (1, 2)
    width = moe.expert_width / split.widths
    row = model.hidden_size + width * (made + (0 if "moe_act" in again else between))
    shared = (moe.moe_shared_expert_intermediate_size or 0) / split.tensor * (made + between - 1)
    return moe.moe_router_topk * split.widths / split.tensor * row + (0.0 if "shared_experts" in again else shared)


def _head_widths(model: ModelConfig) -> tuple[int, int]:
    """Width of all query heads together, and of what they bring home."""
    mla, heads = model.mla, model.num_attention_heads
    if not mla.multi_latent_attention:
        return model.query_size, model.query_size
    return heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim), heads * mla.v_head_dim


def _attention_matrices(model: ModelConfig) -> int:
    """Elements of the matrices around one attention."""
    h, mla, (q, v) = model.hidden_size, model.mla, _head_widths(model)
    if not mla.multi_latent_attention:
        return h * (q * (2 if model.attention_output_gate else 1) + 2 * model.key_size) + v * h
    rank, pairs = mla.kv_lora_rank, model.num_attention_heads * (mla.qk_head_dim + mla.v_head_dim)
    queries = h * q if mla.q_lora_rank is None else h * mla.q_lora_rank + mla.q_lora_rank * q
    return queries + h * (rank + mla.qk_pos_emb_head_dim) + rank * pairs + v * h


def _key_size(model: ModelConfig, tensor_size: int) -> int:
    """Key width on one tensor rank; ranks that outnumber the key heads share them, each holding one."""
    return max(model.key_size // tensor_size, model.kv_channels)
