"""Rules about attention, latent attention, positions and multi-token prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.core.config.flags.declare import ConfigError, flag_name
from megatron.core.config.plan.layers import network_layer_plans, parse_pipeline_layout
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule
from megatron.core.config.settings.model import ModelConfig


@config_rule("layer-patterns", needs_sizes=True)
def layer_frequency_problems(s: ConfigRuleInput) -> Iterator[str]:
    """A pattern that says which layers have a property can be parsed."""
    model = s.run.model
    try:
        network_layer_plans(model)
    except ConfigError as error:
        yield str(error)


def _qk_norm_problems(model: ModelConfig) -> Iterator[str]:
    """Yield problems of query and key norms, and of QK-clip beside them."""
    normed = [flag_name(name) for name in ("qk_layernorm", "qk_l2_norm") if getattr(model, name)]
    if (
        model.qk_clip and normed and not model.mla.multi_latent_attention
    ):  # whose norms stand before the matrices that shrink
        yield f"--qk-clip shrinks weights whose size {' and '.join(normed)} takes away again; keep one of them"


@config_rule("attention", needs_sizes=True)
def attention_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Variants of attention have valid values and can be combined."""
    model = s.run.model
    for name in ("attention_logit_softcap", "final_logit_softcap", "qk_clip_threshold", "activation_func_clamp_value"):
        value = getattr(model, name)
        if value is not None and value <= 0:
            yield f"{flag_name(name)} {value:g} must be above 0"
    if not 0 <= model.qk_clip_alpha <= 1:
        yield f"--qk-clip-alpha {model.qk_clip_alpha:g} is a share, from 0 to 1"
    yield from _qk_norm_problems(model)


def _rope_scaling_problems(model: ModelConfig, *, yarn: bool) -> Iterator[str]:
    """Yield problems of the flags that make and scale rotary frequencies. yarn: whether YaRN is in use."""
    rope = model.rope
    for name in ("rotary_base", "rotary_base_local"):
        if (base := getattr(rope, name)) is not None and not 0 < base < math.inf:
            yield f"{flag_name(name)} {base:g} must be a number above 0"
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


@config_rule("latent-attention")
def mla_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Multi-head latent attention has valid sizes, positions that it can rotate, and is there where it is recomputed."""
    mla, rope = s.run.model.mla, s.run.model.rope
    if not mla.multi_latent_attention:
        if "mla_up_proj" in (s.run.recompute.recompute_modules or ()):
            yield "--recompute-modules mla_up_proj: nothing has latents; add --multi-latent-attention or leave it out"
        return
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    small = [f"{flag_name(name)} {size}" for name in sizes if (size := getattr(mla, name)) is not None and size < 1]
    if small:
        yield f"{', '.join(small)}: each must be at least 1"
    if rope.position_embedding_type in ("mrope", "relative"):
        yield (
            f"--multi-latent-attention rotates a part of its heads by one position a token, and --position-embedding-type "
            f"{rope.position_embedding_type} does not fit beside it; choose rope or yarn"
        )


@config_rule("multi-token-prediction")
def mtp_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Multi-token prediction has layers, and sequences that are long enough."""
    run = s.run
    mtp, length = run.model.mtp, run.train.seq_length
    depths, layout = mtp.mtp_num_layers, run.parallel.pipeline_model_parallel_layout
    letters = _layout_letters(layout or "")
    if letters and letters.count("m") != (depths or 0):
        yield (
            f"--pipeline-model-parallel-layout {layout} has {letters.count('m')} m, but --mtp-num-layers is "
            f"{depths or 'not given'}"
        )
    if depths is None:
        return
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
