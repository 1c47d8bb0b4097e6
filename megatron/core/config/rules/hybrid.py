"""Rules about networks of layers of several kinds."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.mixers.table import MIXERS, recurrent_mixers
from megatron.core.config.plan.pattern import pattern_problems
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule


@config_rule("hybrid-pattern", needs_sizes=True)
def _hybrid_pattern_problems(s: ConfigRuleInput) -> Iterator[str]:
    """The pattern of a hybrid alone says what kind each layer is."""
    model = s.run.model
    hybrid = model.hybrid
    yield from pattern_problems(hybrid)
    if not (min(hybrid.attention_and_mlp_ratios) >= 0 and sum(hybrid.attention_and_mlp_ratios) <= 1):
        yield (
            f"--hybrid-attention-ratio {hybrid.attention_and_mlp_ratios[0]:g} and --hybrid-mlp-ratio {hybrid.attention_and_mlp_ratios[1]:g} are shares of --num-layers, from 0 on and "
            "together at most 1; write --hybrid-layer-pattern"
        )
    if hybrid.hybrid_layer_pattern is None:
        return
    symbols = hybrid.layer_symbols + "".join(hybrid.mtp_patterns)
    if model.num_layers != len(hybrid.layer_symbols):
        yield f"--num-layers {model.num_layers} and the {len(hybrid.layer_symbols)} symbols of --hybrid-layer-pattern are two numbers; leave --num-layers out"
    if ("E" in symbols) != bool(model.moe.num_experts):
        yield "E in --hybrid-layer-pattern and --num-experts go together; give both or neither"
    if ("+" in symbols) != model.mla.multi_latent_attention:
        yield "+ in --hybrid-layer-pattern and --multi-latent-attention go together; give both or neither"
    yield from _pattern_separator_problems(s)


def _pattern_separator_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Yield problems of the separators / (MTP depths) and | (pipeline stages) of a hybrid pattern."""
    hybrid, parallel = s.run.model.hybrid, s.run.parallel
    depths = s.run.model.mtp.mtp_num_layers or 0
    if depths != len(hybrid.mtp_patterns):
        yield (
            f"--mtp-num-layers {depths} and the {len(hybrid.mtp_patterns)} depths of --hybrid-layer-pattern are two numbers; write a / with the layers of a "
            "depth for each, and leave --mtp-num-layers out"
        )
    if parallel.pp > 1 and hybrid.pipeline_layout_text not in (None, parallel.pipeline_model_parallel_layout):
        yield ("| in --hybrid-layer-pattern and --pipeline-model-parallel-layout both cut the layers; keep one")


@config_rule("states", needs_sizes=True)
def _state_size_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Heads of Mamba-2 and gated delta net layers form whole groups, which divide over the tensor ranks."""
    model = s.run.model
    for name in sorted(MIXERS):
        yield from MIXERS[name].problems(s.run)
    if recurrent_mixers(model) and (model.norm_after_residual or model.apply_residual_connection_post_layernorm):
        yield "layers with a state have their norm before them; leave out the flags that place norms elsewhere"


@config_rule("multipliers", needs_sizes=True)
def _mamba_beside_attention_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Mamba-2 in parallel with attention, and fixed multipliers, are for plain decoders only."""
    model = s.run.model
    given = model.multipliers.given_flags
    yield from model.multipliers.multiplier_problems()
    if model.hybrid.parallel_mamba and (
        not model.architecture.is_decoder_only
        or model.hybrid.hybrid_layer_pattern is not None
        or model.hybrid.experimental_attention_variant
        or model.mla.multi_latent_attention
    ):
        yield (
            "--parallel-mamba puts Mamba-2 beside the attention of a GPT's layers; leave out --hybrid-layer-pattern, --experimental-attention-variant "
            "and --multi-latent-attention"
        )
    if given and (
        not model.architecture.is_decoder_only
        or model.has_vision
        or model.add_bias_linear
        or model.add_qkv_bias
        or model.moe.num_experts
        or model.mla.multi_latent_attention
        or not model.has_gated_mlp
    ):
        yield (
            f"{', '.join(given)}: factors are for GPTs with gated MLPs and plain attention (--swiglu --disable-bias-linear), without experts, latent "
            "attention and images; leave them out"
        )
