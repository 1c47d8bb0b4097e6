"""Rules about attention, latent attention, positions and multi-token prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.core.config.flags.declare import ConfigError, flag_name
from megatron.core.config.plan.layers import network_layer_plans, parse_pipeline_layout
from megatron.core.config.plan.network import YARN
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule, non_default_flags
from megatron.core.config.settings.model import ModelConfig, PositionConfig
from megatron.core.config.settings.run import RunConfig

_VARIANT_SWITCHES = ("attention_output_gate", "qk_l2_norm", "qk_clip")
_STRETCHING = ("use_rope_scaling", "rotary_seq_len_interpolation_factor")


@config_rule("layer-patterns", needs_sizes=True)
def layer_frequency_problems(s: ConfigRuleInput) -> Iterator[str]:
    """A pattern that says which layers have a property can be parsed, and the property is enabled."""
    model = s.run.model
    try:
        network_layer_plans(model)
    except ConfigError as error:
        yield str(error)
    if model.window_attn_skip_freq is not None and model.window_size is None:
        yield "--window-attn-skip-freq chooses layers without a window, and there is none; give --window-size"
    if model.rope.no_rope_freq is not None and not model.uses_rotary:
        yield (
            f"--no-rope-freq chooses layers without rotations, and --position-embedding-type "
            f"{model.rope.position_embedding_type} has none; leave it out"
        )


def _qk_norm_problems(model: ModelConfig) -> Iterator[str]:
    """Yield problems of query and key norms, and of QK-clip beside them."""
    normed = [flag_name(name) for name in ("qk_layernorm", "qk_l2_norm") if getattr(model, name)]
    if (
        model.qk_clip and normed and not model.mla.multi_latent_attention
    ):  # whose norms stand before the matrices that shrink
        yield f"--qk-clip shrinks weights whose size {' and '.join(normed)} takes away again; keep one of them"
    if model.qk_layernorm_across_heads and (
        not model.qk_layernorm or model.mla.multi_latent_attention or model.normalization != "RMSNorm"
    ):
        yield (
            "--qk-layernorm-across-heads is a way to do --qk-layernorm with --normalization RMSNorm, and not for "
            "--multi-latent-attention; give both, or leave it out"
        )
    if not model.qk_clip and (model.qk_clip_threshold, model.qk_clip_alpha) != (100.0, 0.5):
        yield "--qk-clip-threshold and --qk-clip-alpha are for --qk-clip only; add it"


@config_rule("attention", needs_sizes=True)
def attention_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Variants of attention and of the gated MLP have valid values and can be combined."""
    model = s.run.model
    for name in ("attention_logit_softcap", "final_logit_softcap", "qk_clip_threshold", "activation_func_clamp_value"):
        value = getattr(model, name)
        if value is not None and value <= 0:
            yield f"{flag_name(name)} {value:g} must be above 0"
    if not 0 <= model.qk_clip_alpha <= 1:
        yield f"--qk-clip-alpha {model.qk_clip_alpha:g} is a share, from 0 to 1"
    yield from _qk_norm_problems(model)
    if not model.has_gated_mlp and (model.activation_func_clamp_value is not None or model.glu_linear_offset):
        yield (
            "--activation-func-clamp-value and --glu-linear-offset are for gated MLPs only; add --swiglu, --geglu or "
            "--quick-geglu"
        )
    given = non_default_flags(
        model, ("window_size", "softmax_type", "attention_logit_softcap", "final_logit_softcap", *_VARIANT_SWITCHES)
    )
    if given and model.architecture == "t5":
        yield f"{', '.join(given)}: not for an encoder and a decoder; leave out"
    unknown = [name for name in given if name in ("--softmax-type", "--attention-output-gate", "--qk-l2-norm")]
    if unknown and model.mla.multi_latent_attention:
        yield f"{', '.join(unknown)}: not for --multi-latent-attention; leave out"


def _rope_scaling_problems(model: ModelConfig, *, yarn: bool) -> Iterator[str]:
    """Yield problems of the flags that scale rotary frequencies. yarn: whether YaRN is in use."""
    rope = model.rope
    if not yarn and (given := non_default_flags(rope, YARN)):
        yield f"{', '.join(given)}: for yarn only; add --rope-type yarn or leave out"
    other = non_default_flags(rope, _STRETCHING)
    if other and yarn and not model.mla.multi_latent_attention:  # which has a rule of its own
        yield f"{' and '.join(other)} and yarn each stretch the rotations; keep one (--rope-type rope is without yarn)"
    if rope.rotary_scaling_factor < 1:
        yield f"--rotary-scaling-factor {rope.rotary_scaling_factor:g} must be at least 1"
    if yarn and not 0 < rope.yarn_beta_slow <= rope.yarn_beta_fast:
        yield f"--yarn-beta-slow {rope.yarn_beta_slow:g} must be above 0 and not above --yarn-beta-fast {rope.yarn_beta_fast:g}"


@config_rule("rotations", needs_sizes=True)
def rotary_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Rotary embeddings are scaled by one method, with valid values."""
    model, rope = s.run.model, s.run.model.rope
    yarn = model.uses_rotary and rope.is_yarn
    if rope.rope_type == "yarn" and not yarn:
        yield f"--rope-type yarn rotates, and --position-embedding-type {rope.position_embedding_type} does not; choose rope"
    if rope.position_embedding_type == "yarn" and not yarn:
        yield f"--position-embedding-type yarn and --rope-type {rope.rope_type} contradict each other; keep one"
    yield from _rope_scaling_problems(model, yarn=yarn)
    share = (
        rope.rotary_percent if math.isfinite(rope.rotary_percent) else 0.0
    )  # the rule of head sizes speaks of any other
    pairs, section = int(model.head_size_before_rotary_percent * share) // 2, rope.mrope_section
    if rope.position_embedding_type == "mrope" and (
        section is None or len(section) % 3 or min(section) < 0 or sum(section) != pairs
    ):
        given = "nothing" if section is None else " ".join(map(str, section))
        yield f"--mrope-section {given} must give three numbers that add up to the {pairs} pairs of a head"
    if rope.position_embedding_type != "mrope" and section is not None:
        yield "--mrope-section is for --position-embedding-type mrope only; leave it out"


def _mla_rope_problems(rope: PositionConfig) -> Iterator[str]:
    """Yield the rotary settings that latent attention does not support."""
    if rope.position_embedding_type in ("mrope", "relative"):
        yield (
            f"--multi-latent-attention rotates a part of its heads by one position a token, and --position-embedding-type "
            f"{rope.position_embedding_type} does not fit beside it; choose rope or yarn"
        )
    if rope.rotary_interleaved:
        yield "--multi-latent-attention rotates neighbouring channels together as it is; leave --rotary-interleaved out"
    if stretched := non_default_flags(rope, _STRETCHING):
        yield (
            f"{', '.join(stretched)}: Megatron's latent attention passes over it; stretch its rotations by "
            "--rope-type yarn --rotary-scaling-factor, or leave it out"
        )


def _unused_mla_flags_problem(run: RunConfig) -> Iterator[str]:
    """Yield problems of latent-attention flags without --multi-latent-attention."""
    if given := non_default_flags(run.model.mla):
        yield f"{', '.join(given)}: for --multi-latent-attention only; add it or leave out"
    if "mla_up_proj" in (run.recompute.recompute_modules or ()):
        yield "--recompute-modules mla_up_proj: nothing has latents; add --multi-latent-attention or leave it out"


@config_rule("latent-attention")
def mla_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Multi-head latent attention has its sizes and rotary embeddings, and no setting of attention that it replaces."""
    run = s.run
    model, mla, rope = run.model, run.model.mla, run.model.rope
    if not mla.multi_latent_attention:
        yield from _unused_mla_flags_problem(run)
        return
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    small = [f"{flag_name(name)} {size}" for name in sizes if (size := getattr(mla, name)) is not None and size < 1]
    if small:
        yield f"{', '.join(small)}: each must be at least 1"
    if model.architecture != "gpt":
        yield "--multi-latent-attention is for pretrain_gpt.py only; leave it out"
    if model.group_query_attention:
        yield (
            "--multi-latent-attention makes a key and a value for every head, and --group-query-attention shares them; "
            "keep one"
        )
    yield from _mla_rope_problems(rope)
    if model.add_qkv_bias:
        yield "--add-qkv-bias has no place under --multi-latent-attention, whose latents have none; leave it out"


@config_rule("multi-token-prediction")
def mtp_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Multi-token prediction has layers, and sequences that are long enough."""
    run = s.run
    model, mtp, length = run.model, run.model.mtp, run.train.seq_length
    depths, layout = mtp.mtp_num_layers, run.parallel.pipeline_model_parallel_layout
    letters = _layout_letters(layout or "")
    if letters and letters.count("m") != (depths or 0):
        yield (
            f"--pipeline-model-parallel-layout {layout} has {letters.count('m')} m, but --mtp-num-layers is "
            f"{depths or 'not given'}"
        )
    if depths is None:
        if given := non_default_flags(mtp):
            yield f"{', '.join(given)}: nothing is predicted ahead; give --mtp-num-layers or leave out"
        return
    if model.architecture != "gpt":
        yield f"--mtp-num-layers {depths} is for pretrain_gpt.py only; leave it out"
    if depths < 1:
        yield f"--mtp-num-layers {depths} must be at least 1; leave it out to predict the next token only"
    if length is not None and depths >= length > 0:
        yield f"--mtp-num-layers {depths} looks beyond a sequence of --seq-length {length}; choose at most {length - 1}"
    if mtp.mtp_loss_scaling_factor < 0:
        yield f"--mtp-loss-scaling-factor {mtp.mtp_loss_scaling_factor:g} is a weight, and at least 0"


def _layout_letters(layout: str) -> str:
    """Return all letters of a pipeline layout; "" if it cannot be parsed, which another rule reports."""
    try:
        return "".join(parse_pipeline_layout(layout))
    except ConfigError:
        return ""
