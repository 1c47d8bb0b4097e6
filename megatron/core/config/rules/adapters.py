"""Rules about adapters and frozen weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.core.config.adapters import ALL_LINEAR, PROJECTIONS, layers_matching_target, rank_and_alpha_of_lora_target
from megatron.core.config.mixers.mixer import LinearShape
from megatron.core.config.plan.layers import LayerPlan, network_layer_plans
from megatron.core.config.plan.linear_layers import EXPERTS
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig


@config_rule("adapter-numbers")
def _adapter_setting_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Settings of adapters have valid values."""
    config = s.run.model.adapter
    if not config.has_adapters:
        return
    if (config.lora_rank or 0) < 1:
        yield f"--lora-rank {config.lora_rank} is not a positive number"
    if not 0.0 <= config.lora_dropout < 1.0:
        yield f"--lora-dropout {config.lora_dropout} must lie in [0, 1)"
    if s.run.optimizer.lora_plus_ratio <= 0.0:
        yield f"--lora-plus-ratio {s.run.optimizer.lora_plus_ratio} is not a positive number"
    if not config.lora_targets:
        yield "--lora-targets names nothing; leave it out for all linear layers"


@config_rule("adapter-start")
def _missing_adapter_base_problem(s: ConfigRuleInput) -> Iterator[str]:
    """Adapters that a run starts from have a base network."""
    folder, checkpoint = s.run.checkpoint.adapter, s.run.checkpoint
    if folder is not None and checkpoint.pretrained_checkpoint is None and checkpoint.load is None:
        yield f"--adapter {folder} belongs to the weights of a base; give them with --pretrained-checkpoint"


@config_rule("adapter-targets", needs_sizes=True)
def _lora_target_problems(s: ConfigRuleInput) -> str:
    """Every adapter target names a linear layer of the network, and the adapter's rank fits its sizes."""
    model, problems = s.run.model, list[str]()
    config = model.adapter
    if not config.has_adapters or (config.lora_rank or 0) < 1:
        return ""
    broken = [target for target in config.lora_targets if rank_and_alpha_of_lora_target(config, target)[0] < 1]
    if broken:
        return f"--lora-targets {' '.join(broken)}: write NAME, NAME=RANK or NAME=RANK:ALPHA, a rank being 1 or more"
    rows = network_layer_plans(model)
    kinds: dict[str, set[bool]] = {}
    for target in config.lora_targets:
        chosen = layers_matching_target(model, rows, target)
        problems += (
            _single_target_problems(config, target, chosen) if chosen else [_no_target_text(model, rows, target)]
        )
        for linear, part, shape in chosen:
            if len(shape.parts) > 1:
                kinds.setdefault(linear, set()).add(part == "")
    both = [linear for linear, choices in kinds.items() if len(choices) > 1]
    if both:
        problems.append(
            f"--lora-targets adapt {both[0]} as one matrix and its parts by themselves; keep either the matrix or the parts"
        )
    return "\n  ".join(dict.fromkeys(problems))


def _no_target_text(model: ModelConfig, rows: Iterable[LayerPlan], target: str) -> str:
    """Say that a target names nothing, and what names this network has: projections, and our matrices."""
    linears = layers_matching_target(model, rows, ALL_LINEAR)
    matrices = [linear.rpartition(".")[2] for linear, _, _ in linears]
    projections = [PROJECTIONS.get((matrix, part)) for matrix, (_, part, _) in zip(matrices, linears, strict=True)]
    names = dict.fromkeys(name for name in (ALL_LINEAR, *projections, *matrices) if name)
    return f"--lora-targets {target} names no linear layer of this network; choose of {', '.join(names)} or patterns of full names"


def _single_target_problems(
    config: AdapterConfig, target: str, chosen: list[tuple[str, str, LinearShape]]
) -> Iterator[str]:
    """Yield what is wrong with one target. chosen: (linear layer, part, shape) of everything that it names."""
    rank = rank_and_alpha_of_lora_target(config, target)[0]
    most, name = min(
        (min(shape.inputs, shape.row_offset_and_count_of_part(part)[1]), f"{linear}.{part}".rstrip("."))
        for linear, part, shape in chosen
    )
    if rank > most:
        yield f"--lora-rank {rank} does not fit {name}, a matrix of rank {most} at most; choose up to {most}, or {target}={most} in --lora-targets"
    if any(f".{linear}".find(EXPERTS) >= 0 for linear, _, _ in chosen) and (config.dora or config.lora_dropout):
        flag = "--dora" if config.dora else f"--lora-dropout {config.lora_dropout}"
        yield f"{flag} and adapters of experts ({target}) do not go together; name other --lora-targets, or drop it"


@config_rule("adapter-fit", needs_sizes=True)
def _adapter_conflict_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Nothing else changes weights that adapters freeze."""
    run = s.run
    config = run.model.adapter
    if not config.has_adapters and not config.freeze:
        return
    what = "--lora-rank" if config.has_adapters else "--freeze"
    if run.model.qk_clip:
        yield f"--qk-clip scales weights that {what} freezes; drop one of them"
    if not config.has_adapters:
        return
    if config.lora_base_quantization != "none" and run.precision.low.recipe_name:
        yield (
            f"--lora-base-quantization {config.lora_base_quantization} holds weights in 4 or 8 bits by blocks, and --fp8-format and --fp4-format "
            "round them again in others; drop one of them"
        )
    if run.checkpoint.export_hf is not None:
        yield "--export-hf writes whole networks, and checkpoints of a run with --lora-rank hold adapters; leave it out"
    if run.optimizer.updates_whole_matrices:
        yield (
            f"--optimizer {run.optimizer.update_rules[0]} updates whole matrices, and adapters are factors of matrices; choose adam"
        )
    if (
        run.model.moe.num_experts
        and run.model.moe.moe_router_enable_expert_bias
        and run.model.moe.moe_router_bias_update_rate
    ):
        yield "--moe-router-enable-expert-bias moves the bias of experts, which --lora-rank freezes; give --moe-router-bias-update-rate 0"
    if run.model.moe.moe_use_upcycling:
        yield "--moe-use-upcycling makes experts of a dense network, and --lora-rank freezes them; drop one of them"
