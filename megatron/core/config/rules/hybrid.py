"""Rules about networks of layers of several kinds; each function returns what is wrong and how to mend it, a line each."""

from __future__ import annotations

from megatron.core.config.rules.rule import Rule, Setting


def _pattern(s: Setting) -> str:
    model, parallel = s.run.model, s.run.parallel
    hybrid, problems = model.hybrid, list(model.hybrid.problems())
    if hybrid.hybrid_layer_pattern is None:
        return ""
    if model.architecture != "gpt":
        problems.append("--hybrid-layer-pattern is for language models of one decoder; leave it out")
    if model.num_layers != len(hybrid.symbols):
        problems.append(
            f"--num-layers {model.num_layers} and the {len(hybrid.symbols)} symbols of --hybrid-layer-pattern are two numbers; leave --num-layers out"
        )
    if hybrid.experimental_attention_variant or model.moe.moe_layer_freq != "1":
        problems.append(
            "--hybrid-layer-pattern says what every layer is; leave out --experimental-attention-variant and --moe-layer-freq"
        )
    if ("E" in hybrid.symbols) != bool(model.moe.num_experts):
        problems.append("E in --hybrid-layer-pattern and --num-experts go together; give both or neither")
    if ("+" in hybrid.symbols) != model.mla.multi_latent_attention:
        problems.append("+ in --hybrid-layer-pattern and --multi-latent-attention go together; give both or neither")
    if model.mtp.mtp_num_layers:
        problems.append("--mtp-num-layers: layers of multi-token prediction of hybrids are not built; leave it out")
    if hybrid.layout is not None and parallel.pipeline_model_parallel_layout is not None:
        problems.append(
            "| in --hybrid-layer-pattern and --pipeline-model-parallel-layout both cut the layers; keep one"
        )
    return "\n  ".join(problems)


def _sizes(s: Setting) -> str:
    model, hybrid = s.run.model, s.run.model.hybrid
    used = {
        "mamba": (hybrid.mamba_num_heads or 0, hybrid.mamba_num_groups, "--mamba-num-heads", "--mamba-num-groups"),
        "gated_delta_net": (
            hybrid.linear_num_value_heads,
            hybrid.linear_num_key_heads,
            "--linear-num-value-heads",
            "--linear-num-key-heads",
        ),
    }
    problems = [problem for mixer in sorted(model.state_mixers) if (problem := _undivided(s, *used[mixer]))]
    limits = hybrid.mamba_time_step_limit
    if limits and (len(limits) != 2 or not 0.0 <= limits[0] < limits[1]):
        problems.append(f"--mamba-time-step-limit {limits}: give the smallest and the largest, such as 0.001 inf")
    if hybrid.linear_attention_freq is not None and hybrid.experimental_attention_variant is None:
        problems.append("--linear-attention-freq is for --experimental-attention-variant only; add it or leave out")
    if model.state_mixers and (model.norm_after_residual or model.apply_residual_connection_post_layernorm):
        problems.append(
            "layers with a state have their norm before them; leave out the flags that place norms elsewhere"
        )
    return "\n  ".join(problems)


def _undivided(s: Setting, heads: int, groups: int, heads_flag: str, groups_flag: str) -> str:
    """Why heads and their groups cannot be divided."""
    tp, cp = s.run.parallel.tp, s.run.parallel.context_parallel_size
    named = f"{heads_flag} {heads} and {groups_flag} {groups}"
    if heads < 1 or groups < 1 or heads % groups:
        return f"{named}: each group serves as many heads; choose a multiple, of at least 1"
    if heads % tp or groups % tp:
        return f"{named} cannot be divided over --tensor-model-parallel-size {tp}; choose a size that divides both"
    if heads // tp % cp or (groups // tp % cp and cp % (groups // tp)):
        return (
            f"{named} cannot be divided over --context-parallel-size {cp} of each tensor rank; choose a size that divides the heads, "
            "and divides the groups or is divided by them"
        )
    return ""


RULES = (
    Rule("hybrid-pattern", _pattern, "the symbols of a hybrid say all that its layers are"),
    Rule("states", _sizes, "heads of layers with a state come in whole groups, which the ranks can divide"),
)
