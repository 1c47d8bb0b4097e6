"""Rules about latent attention and multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.flags import ConfigError, flag_name
from megatron.core.config.plan import parse_pipeline_layout
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule, non_default_flags
from megatron.core.config.settings.model import PositionConfig
from megatron.core.config.settings.run import RunConfig


def _mla_rope_problems(rope: PositionConfig) -> Iterator[str]:
    """Yield the rotary settings that latent attention does not support."""
    if rope.position_embedding_type in ("mrope", "relative"):
        yield (
            f"--multi-latent-attention rotates a part of its heads by one position a token, and --position-embedding-type "
            f"{rope.position_embedding_type} does not fit beside it; choose rope or yarn"
        )
    if rope.rotary_interleaved:
        yield "--multi-latent-attention rotates neighbouring channels together as it is; leave --rotary-interleaved out"
    names = ("use_rope_scaling", "rotary_seq_len_interpolation_factor")
    if stretched := [flag_name(name) for name in names if getattr(rope, name)]:
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
    """Latent attention has sizes and rotations, and nothing that it replaces."""
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
    """Multi-token prediction has layers, and tokens to predict."""
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
