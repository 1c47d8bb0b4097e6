"""Show a layout before anything runs: groups of ranks, stages, parameters and bytes of each rank, and the schedule.

megatron show-layout --world-size 8 --picture schedule.svg -- <the flags of the run>
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from megatron.cli.arguments import parse_args_unchecked
from megatron.cli.tool_parser import ToolArgumentParser, exit_on
from megatron.core.config.flags.declare import ConfigError, config_from_namespace, raise_config_error_if
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.rules.engine import NEEDS, RULES
from megatron.core.config.rules.rule import ConfigRuleInput
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.datasets.storage import atomic_file
from megatron.core.models.describe import count_active_parameters, count_parameters
from megatron.core.models.flops import estimate_memory_by_pipeline_rank
from megatron.core.parallel.grid import axis_rank_groups
from megatron.core.pipeline_parallel.schedules import num_plan_stages, pipeline_plan_of_run
from megatron.core.pipeline_parallel.timeline import draw_text_timeline, simulate_pipeline_plan
from megatron.core.tokenizers.build import expected_vocab_size
from megatron.plan.analytic_estimate import num_microbatches, with_padded_vocabulary
from megatron.plan.units import bytes_text

CAN_DRAW = importlib.util.find_spec("matplotlib") is not None
if CAN_DRAW:
    from megatron.core.pipeline_parallel.picture import draw_pipeline_timeline

WIDEST = 160


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, RunConfig]:
    """Return (the tool's own options, the resolved config of the run). `ConfigError` if rules are broken."""
    parser = ToolArgumentParser(description=__doc__, allow_abbrev=True)
    parser.add_argument("--world-size", type=int, default=1, help="ranks that will run (default: 1)")
    parser.add_argument(
        "--true-vocab-size",
        type=int,
        help="ids of the tokenizer (default: as its files say, where they are at hand, else GPT-2's 50257)",
    )
    parser.add_argument("--picture", type=Path, help="draw the schedule into this .png or .svg file")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="-- and the flags of the run")
    options = parser.parse_args(argv)
    flags = options.flags[1:] if options.flags[:1] == ["--"] else options.flags
    args = parse_args_unchecked(flags)
    if options.picture and not CAN_DRAW:
        args.problems.append("--picture needs the package matplotlib, which is not installed: pip install matplotlib")
    raise_config_error_if(args.problems)
    config = config_from_namespace(RequestedRun, args).resolve(options.world_size)
    for rules in (NEEDS, RULES):  # the others speak of data, rates and durations, which a layout does without
        raise_config_error_if(
            message for rule in rules if (message := rule.problem_message(ConfigRuleInput(config, options.world_size)))
        )
    if options.true_vocab_size is None:
        options.true_vocab_size, _ = expected_vocab_size(config.tokenizer)
    return options, config


def axis_rank_groups_table(config: RunConfig, world_size: int) -> list[str]:
    """Return lines with the groups of every axis that has more than one rank."""
    lines = [f"{world_size} ranks"]
    axes = [("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"), ("embed", "tied embedding")]
    if config.model.moe.num_experts:
        axes += [("ep", "experts"), ("etp", "expert tensor"), ("edp", "expert data")]
    for name, title in axes:
        groups = axis_rank_groups(config.parallel, world_size)[name]
        if max(len(group) for group in groups) > 1:
            first_groups = "  ".join(" ".join(map(str, group)) for group in groups[:8])
            lines.append(f"  {title + ':':16}{first_groups}{'  ...' if len(groups) > 8 else ''}")
    return lines


def stage_table(config: RunConfig, true_vocab_size: int, world_size: int, num_microbatches: int) -> list[str]:
    """Return lines with layers, parameters and memory of each pipeline rank."""
    config = with_padded_vocabulary(config, true_vocab_size)
    model, stages = config.model, stage_specs_of_run(config)
    memory = estimate_memory_by_pipeline_rank(
        config,
        stages,
        data_parallel_size=config.parallel.data_parallel_size(world_size),
        num_microbatches=num_microbatches,
    )
    active = f", {count_active_parameters(model):,} of them used by a token" if model.moe.num_experts else ""
    lines = [
        f"{count_parameters(model).total:,} parameters{active}, vocabulary padded to {model.padded_vocab_size:,}",
        f"  {'pipeline rank':14}{'layers':28}{'parameters':>16}{'weights+optimizer':>20}{'activations':>14}",
    ]
    for rank, held in enumerate(memory):
        stages_of_rank = [stage for stage in stages if stage.rank == rank]
        depths = model.mtp.mtp_num_layers or 0
        layers = " | ".join(
            ("E " if s.has_embedding else "")
            + _range_text([p.index for p in s.layers])
            + (" " + "m" * depths if s.has_mtp and depths else "")
            + (" L" if s.has_output else "")
            for s in stages_of_rank
        )
        lines.append(
            f"  {rank:<14}{layers:28}{held.parameters:>16,}{bytes_text(held.weights_and_optimizer):>20}"
            f"{bytes_text(held.activations):>14}"
        )
    return lines


def main(argv: list[str] | None = None) -> None:
    """Print the tables and the schedule."""
    with exit_on(ConfigError, code=2):
        options, config = parse_arguments(argv)
        lines = axis_rank_groups_table(config, options.world_size)
        count = num_microbatches(config, options.world_size)
        plan = pipeline_plan_of_run(config, count)
        lines += ["", *stage_table(config, options.true_vocab_size, options.world_size, count)]
    timeline = simulate_pipeline_plan(plan)
    lines += [
        "",
        f"{count} microbatches a step over {num_plan_stages(plan)} stages, bubble {timeline.bubble:.1%}, at most "
        f"{max(timeline.peak)} microbatches alive on a rank",
    ]
    drawn = draw_text_timeline(plan, timeline).splitlines()
    lines += [line[:WIDEST] + (" ..." if len(line) > WIDEST else "") for line in drawn]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.picture:
        with exit_on(OSError), atomic_file(options.picture) as file:
            draw_pipeline_timeline(plan, timeline, file, options.picture.suffix[1:])
        sys.stdout.write(f"drawn: {options.picture}\n")


def _range_text(indices: list[int]) -> str:
    return "-" if not indices else str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"
