"""Rules about networks of layers of several kinds."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.rules.rule import ConfigRuleInput, config_rule
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.parallel import can_exchange_heads


@config_rule("hybrid-pattern", needs_sizes=True)
def _hybrid_pattern_problems(s: ConfigRuleInput) -> Iterator[str]:
    """The pattern of a hybrid alone says what kind each layer is."""
    model = s.run.model
    hybrid = model.hybrid
    yield from model.hybrid.pattern_problems()
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
    model, hybrid = s.run.model, s.run.model.hybrid
    used = {
        "mamba": ("--mamba-num-heads", "--mamba-num-groups"),
        "gated_delta_net": ("--linear-num-value-heads", "--linear-num-key-heads"),
    }
    yield from [
        problem
        for mixer in sorted(model.stateful_mixer_kinds)
        if (problem := _mixer_head_division_problem(s, *hybrid.state_heads_and_groups(mixer), *used[mixer]))
    ]
    limits = hybrid.mamba_time_step_limit
    if limits and (len(limits) != 2 or not 0.0 <= limits[0] < limits[1]):
        given = " ".join(map(str, limits))
        yield f"--mamba-time-step-limit {given}: give the smallest and the largest, such as 0.001 inf"
    yield from _stateful_mixer_norm_problems(model)
    if model.stateful_mixer_kinds and (model.norm_after_residual or model.apply_residual_connection_post_layernorm):
        yield "layers with a state have their norm before them; leave out the flags that place norms elsewhere"


@config_rule("multipliers", needs_sizes=True)
def _mamba_beside_attention_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Mamba-2 in parallel with attention, and fixed multipliers, are for plain decoders only."""
    model = s.run.model
    given = model.multipliers.given_flags
    yield from model.multipliers.multiplier_problems()
    if model.hybrid.parallel_mamba and (
        model.architecture != "gpt"
        or model.hybrid.hybrid_layer_pattern is not None
        or model.hybrid.experimental_attention_variant
        or model.mla.multi_latent_attention
    ):
        yield (
            "--parallel-mamba puts Mamba-2 beside the attention of a GPT's layers; leave out --hybrid-layer-pattern, --experimental-attention-variant "
            "and --multi-latent-attention"
        )
    if given and (
        model.architecture != "gpt"
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


def _stateful_mixer_norm_problems(model: ModelConfig) -> Iterator[str]:
    """Yield problems of the norms of Mamba-2 and gated delta net layers."""
    for flag, epsilon in (
        ("--linear-norm-epsilon", model.hybrid.linear_norm_epsilon),
        ("--mamba-norm-epsilon", model.hybrid.mamba_norm_epsilon),
    ):
        if epsilon is not None and epsilon <= 0:
            yield f"{flag} {epsilon:g} is no positive number; choose one such as 1e-5, or leave it out"


def _mixer_head_division_problem(s: ConfigRuleInput, heads: int, groups: int, heads_flag: str, groups_flag: str) -> str:
    """Return why heads and groups of a stateful mixer cannot be divided over groups, tensor or context ranks, or ""."""
    tp = s.run.parallel.tp
    named = f"{heads_flag} {heads} and {groups_flag} {groups}"
    if heads < 1 or groups < 1 or heads % groups:
        return f"{named}: each group serves as many heads; choose a multiple, of at least 1"
    if heads % tp or groups % tp:
        return f"{named} cannot be divided over --tensor-model-parallel-size {tp}; choose a size that divides both"
    size = s.run.parallel.context_parallel_size
    if s.run.parallel.state_comm_type == "a2a" and not can_exchange_heads(size, heads // tp, groups // tp):
        return (
            f"{named}: --context-parallel-size {size} does not divide the {heads // tp} heads of a tensor rank, or not its groups; choose "
            "--state-comm-type states or auto"
        )
    return ""
