"""Rules about the shape of a network: positions, encoder and decoder, activations, norms, dropout, recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.flags.declare import flag_name
from megatron.core.config.plan.layers import nearest_multiples_text
from megatron.core.config.plan.network import unused_kernel_ops
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.config.vision import vision_encoder_config


@config_rule("positions", needs_sizes=True)
def _position_range_problem(s: ConfigRuleInput) -> Iterator[str]:
    """No sequence is longer than the positions that the network knows."""
    longest, length = s.run.model.max_position_embeddings, s.run.train.seq_length
    if longest < length:
        yield (
            f"--seq-length {length} is longer than --max-position-embeddings {longest}; "
            f"give at least {length} positions"
        )


@config_rule("encoder-and-decoder", needs_sizes=True)
def _encoder_decoder_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Encoder and decoder of a T5 have one depth and one length each."""
    model, train = s.run.model, s.run.train
    if model.encoder_num_layers is not None and model.encoder_num_layers != model.num_layers:
        yield (
            f"--num-layers {model.num_layers} and --encoder-num-layers {model.encoder_num_layers} both say how deep "
            "the encoder is; keep one"
        )
    if train.encoder_seq_length is not None and train.encoder_seq_length != train.seq_length:
        yield (
            f"--seq-length {train.seq_length} and --encoder-seq-length {train.encoder_seq_length} both say what the "
            "encoder reads; keep one"
        )
    yield from _decoder_length_problems(s) if model.architecture.is_encoder_decoder else ()


def _decoder_length_problems(s: ConfigRuleInput) -> Iterator[str]:
    model, train = s.run.model, s.run.train
    length, tp = train.decoder_seq_length, s.run.parallel.tp
    if model.rope.position_embedding_type == "learned_absolute" and length > model.max_position_embeddings:
        yield (
            f"--decoder-seq-length {length} is longer than --max-position-embeddings {model.max_position_embeddings}; "
            f"give at least {length} positions"
        )
    if s.run.parallel.sequence_parallel and length % tp:
        yield (
            f"--sequence-parallel cannot cut --decoder-seq-length {length} over --tensor-model-parallel-size {tp}; "
            f"choose {nearest_multiples_text(length, tp)}"
        )
    if train.seq_length < 4 or length < 4:
        yield f"--encoder-seq-length {train.seq_length} and --decoder-seq-length {length}: each must be at least 4"


@config_rule("activation")
def _multiple_activations_problem(s: ConfigRuleInput) -> str:
    """One activation function is chosen."""
    model = s.run.model
    names = ("swiglu", "quick_geglu", "squared_relu", "relu", "openai_gelu" if not model.geglu else "geglu")
    chosen = [flag_name(name) for name in names if getattr(model, name)]
    return f"{' and '.join(chosen)} each choose the activation; keep one" if len(chosen) > 1 else ""


@config_rule("relative-positions")
def _relative_bias_problem(s: ConfigRuleInput) -> str:
    """Relative positions are for T5 only, with valid numbers of buckets and distances."""
    model, rope = s.run.model, s.run.model.rope
    if rope.position_embedding_type != "relative":
        return ""
    if not model.architecture.is_encoder_decoder:
        return "--position-embedding-type relative is for pretrain_t5.py only; choose learned_absolute or rope"
    if rope.relative_attention_num_buckets < 4 or rope.relative_attention_num_buckets % 4:
        return (
            f"--relative-attention-num-buckets {rope.relative_attention_num_buckets} must be a multiple of 4: the encoder needs "
            "near and far distances in both directions"
        )
    if rope.relative_attention_max_distance <= rope.relative_attention_num_buckets // 2:
        return (
            f"--relative-attention-max-distance {rope.relative_attention_max_distance} is told apart by half of "
            f"--relative-attention-num-buckets {rope.relative_attention_num_buckets} already; choose more than half of it"
        )
    return ""


def _norm_placement_problem(model: ModelConfig) -> str:
    """Return which flags place norms in ways that exclude each other, or ""."""
    if model.norm_after_residual and model.apply_residual_connection_post_layernorm:
        return (
            "--norm-after-residual and --apply-residual-connection-post-layernorm place the norms differently; keep one"
        )
    if model.norm_after_residual and model.fp32_residual_connection:
        return "--fp32-residual-connection has no residual to keep under --norm-after-residual, which norms it; drop one of them"
    if model.sandwich_norm and (model.norm_after_residual or model.apply_residual_connection_post_layernorm):
        return (
            "--sandwich-norm has a norm before and behind each sublayer, and --norm-after-residual or "
            "--apply-residual-connection-post-layernorm place them differently; keep one"
        )
    if model.norm_after_sublayer and (
        model.sandwich_norm or model.norm_after_residual or model.apply_residual_connection_post_layernorm
    ):
        return (
            "--norm-after-sublayer has one norm, behind each sublayer; --sandwich-norm, --norm-after-residual and "
            "--apply-residual-connection-post-layernorm place norms elsewhere; keep one"
        )
    return ""


@config_rule("norms")
def _norm_problem(s: ConfigRuleInput) -> str:
    """Norms have one placement, which the network supports."""
    model = s.run.model
    if problem := _norm_placement_problem(model):
        return problem
    if model.kernels.requested_kernels.get("residual_norm", "apart") != "apart" and (
        not model.has_plain_pre_norm or {"layernorm", "mlp", "moe"} & set(s.run.recompute.recompute_modules or ())
    ):
        return "--kernel residual_norm=triton sums and norms at once, and here the sum is another, or one of them is recomputed; leave it out"
    if model.softmax_scale is not None and model.softmax_scale <= 0:
        return f"--softmax-scale {model.softmax_scale:g} must be above 0"
    return ""


@config_rule("dropout")
def _dropout_range_problem(s: ConfigRuleInput) -> str:
    """A dropout rate is at least 0 and below 1."""
    wrong = [
        f"{flag_name(name)} {getattr(s.run.model, name)}"
        for name in ("hidden_dropout", "attention_dropout")
        if not 0.0 <= getattr(s.run.model, name) < 1.0
    ]
    return f"{', '.join(wrong)}: a share from 0 up to, but not, 1" if wrong else ""


@config_rule("recompute")
def _recompute_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Recomputation has a method and valid numbers, and what it cuts is whole."""
    choice = s.run.recompute
    if choice.recompute_granularity == "full" and choice.recompute_method is None:
        yield "--recompute-granularity full needs --recompute-method uniform or block"
    if choice.recompute_num_layers is not None and choice.recompute_num_layers < 1:
        yield f"--recompute-num-layers {choice.recompute_num_layers} must be at least 1"
    if choice.distribute_saved_activations and s.run.parallel.sequence_parallel:
        yield "--distribute-saved-activations has nothing to cut under --sequence-parallel; drop one of them"


@config_rule("kernels")
def _kernel_choice_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Kernels that are requested by name exist."""
    kernels = s.run.model.kernels
    yield from (unknown := list(kernels.kernel_flag_problems(compiles=s.run.compilation.compile)))
    for word in () if unknown else kernels.kernel:
        if reason := _why_kernel_unused(s.run, word.partition("=")[0]):
            yield f"--kernel {word}: {reason}; leave it out"


def _why_kernel_unused(run: RunConfig, op: str) -> str:
    """Return why a run does not use a kernel of the operation `op`, or ""."""
    model, low, sees = run.model, run.precision.low, bool(run.model.vision.vision_model_type)
    idle = unused_kernel_ops(model)
    if sees:  # the norm of what the encoder gives is a LayerNorm
        idle = idle & unused_kernel_ops(vision_encoder_config(model)) - {"layer_norm"}
    projects = sees and model.vision.vision_projection_type == "mlp" and model.vision.vision_projection_bias
    if op in idle:
        return "no part of this network asks for that operation"
    reasons = {
        "bias_activation": "no MLP here has a bias just before its activation"
        if not (model.can_fuse_mlp_bias or projects or (sees and vision_encoder_config(model).can_fuse_mlp_bias))
        else "",
        "split_qkv": "no layer here takes the fused projection apart without rotating queries and keys"
        if not (model.splits_qkv_unrotated or (sees and vision_encoder_config(model).splits_qkv_unrotated))
        else "",
        "low_linear": "" if low.recipe_name else "for --fp8-format only",
        "quantise": "" if low.recipe_name else "for --fp8-format only",
        "adamw": "" if run.optimizer.elementwise_optimizer == "adam" else "no weight is updated by Adam",
    }
    return reasons.get(op, "")
