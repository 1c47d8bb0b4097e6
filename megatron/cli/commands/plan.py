"""Plan a run before it starts: memory of every kind of rank, time of a step, whether it fits, and what to change.

    megatron plan <the flags of the run> --world-size 1024 --gpu h100-80
    megatron plan -- torchrun --nproc_per_node 8 pretrain_gpt.py <flags>             a whole command
    LAUNCH="python -m megatron plan --" bash examples/gpt3/train_gpt3_175b_distributed.sh ...      what a launcher would start
    megatron plan <flags> --world-size 64 --search                                   the layouts that fit, the fastest first
    megatron plan --measure mine.json                                                what this machine reaches, for --hardware

The training step runs here, on one CPU, with tensors that have sizes and no data. Progress goes to stderr.
Exit code: 0 it fits, 1 it does not, its ranks would wait forever, or rules are broken, 2 the question could not be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from megatron.cli.preflight import resolve_and_examine
from megatron.cli.tool_parser import (
    ToolArgumentParser,
    add_world_size_and_entry_options,
    exit_on,
    parse_options_and_run_words,
)
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.storage import write_file
from megatron.core.tokenizers.build import expected_vocab_size
from megatron.plan.analytic_estimate import AnalyticEstimate, with_padded_vocabulary
from megatron.plan.command import ENTRIES, parse_training_command
from megatron.plan.cost import StepTime
from megatron.plan.hardware import PROFILES, Hardware, hardware_of
from megatron.plan.layer_profile import LayerProfiler
from megatron.plan.layout_search import LayerEstimator, search_layouts, seconds_until_dry_runs
from megatron.plan.planner import DryRunner, add_memory_saving_changes, estimate_run
from megatron.plan.report import (
    layout_search_report_values,
    layout_search_text,
    run_estimate_html,
    run_estimate_text,
    run_estimate_values,
)
from megatron.plan.setup import RunSetup
from megatron.plan.simulate.collective_matching import match_collectives
from megatron.plan.stage_estimate import can_profile, profiled_estimate
from megatron.plan.units import bytes_text
from megatron.rl.planned_memory import memory_parts_text


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line: (the tool's own options, the words of the run)."""
    parser = ToolArgumentParser(description=__doc__)
    add_world_size_and_entry_options(parser, ENTRIES)
    parser.add_argument("--gpu", choices=PROFILES, default="h100-80", help="kind of machine (default: h100-80)")
    parser.add_argument("--hardware", metavar="FILE", help="a profile that --measure wrote, instead of --gpu")
    parser.add_argument(
        "--true-vocab-size",
        type=int,
        help="ids of the tokenizer (default: as its files say, where they are at hand, else GPT-2's 50257)",
    )
    parser.add_argument("--search", action="store_true", help="look at all layouts, instead of the one that is given")
    parser.add_argument(
        "--plans",
        type=int,
        default=3,
        help="--search: layouts to run dry, 0: only one layer of each kind of the best ones (default: 3)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="--search, and changes that would make it fit: when to stop, by the clock (default: 120)",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as one page, with the memory and the schedule drawn"
    )
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        help="measure this machine, write its profile, and stop; under torchrun, its links too",
    )
    options, words = parse_options_and_run_words(parser, argv, without="measure")
    if options.search and options.html:
        parser.error("--html draws one plan; give it without --search")
    return options, words


def print_to_stderr(what: str) -> None:
    """Print a line of progress to standard error."""
    sys.stderr.write(f"{what}\n")


def resolve_setup_or_exit(options: argparse.Namespace, words: Sequence[str]) -> tuple[RunSetup, RunConfig]:
    """Return the setting that the words of a run ask for, and its resolved config with its vocabulary; sets options.true_vocab_size
    if it is None.

    Prints broken rules and exits with 1; with --search only words that cannot be read do that, and a config that breaks rules is
    returned without its vocabulary.
    """
    command = parse_training_command(words, ranks=options.world_size, entry=options.entry)
    broken = command.broken_rules
    # A search looks for the layout itself: only what cannot be read stops it.
    if command.setting is None or command.unread or broken and not options.search:
        print_to_stderr(
            "the rules are broken, so there is nothing to plan (megatron check-config says what to change):"
        )
        for one in broken:
            print_to_stderr(f"  {one.rule}: {one.says}")
        raise SystemExit(1)
    setting = command.setting if broken else command.setting.with_elastic_layout()
    if setting.world_size < command.setting.world_size:
        print_to_stderr(
            f"--elastic: {setting.world_size:,} of {command.setting.world_size:,} ranks train, the others stand by"
        )
    config, _ = resolve_and_examine(setting.config, setting.world_size)
    if options.true_vocab_size is None:
        options.true_vocab_size, doubt = expected_vocab_size(config.tokenizer)
        if doubt:
            print_to_stderr(
                f"{doubt}; so {options.true_vocab_size:,} ids are taken, as GPT-2 has (--true-vocab-size says another number)"
            )
    return setting, config if broken else with_padded_vocabulary(config, options.true_vocab_size)


def make_dry_runner(hardware: Hardware, *, until: float = math.inf) -> DryRunner:
    """Return the dry run function, which needs torch, with the kernels that this hardware has. until: see `dry_run`."""
    from megatron.plan.simulate.dry_run import dry_run

    return partial(dry_run, on_gpu=hardware.fused, until=until)


def make_layer_estimator(hardware: Hardware, passes: int, *, until: float) -> LayerEstimator:
    """Return the function that estimates a layout from dry runs of its layers, which need torch. passes: see `step_cost`;
    until: see `dry_run`.
    """
    from megatron.plan.simulate.one_microbatch import layer_runner

    profiler = LayerProfiler(hardware, layer_runner(on_gpu=hardware.fused, until=until))

    def estimate_from_layers(config: RunConfig, world_size: int) -> AnalyticEstimate | None:
        if not can_profile(config):
            return None
        return profiled_estimate(config, world_size, profiler, stage_specs_of_run(config), passes=passes)

    return estimate_from_layers


def search_and_print_layouts(options: argparse.Namespace, setting: RunSetup, hardware: Hardware) -> int:
    """Search and print the layouts that fit; return the exit code."""
    started = time.monotonic()
    dry_run = make_dry_runner(hardware, until=started + options.seconds) if options.plans else None
    until_dry_runs = started + seconds_until_dry_runs(options.seconds, options.plans)

    def peak_and_step_time(config: RunConfig, world_size: int) -> tuple[int, StepTime]:
        assert dry_run is not None, "a search without dry runs plans nothing"
        planned = estimate_run(config, world_size, hardware, dry_run, passes=setting.passes)
        return planned.run.worst_trace.peak, planned.cost.time

    with tqdm(file=sys.stderr, leave=False, disable=not sys.stderr.isatty()) as bar:

        def update_progress_bar(done: int, whole: int, what: str) -> None:
            bar.total, bar.n = whole, done
            bar.set_description(what)

        ranking = search_layouts(
            setting,
            hardware,
            true_vocab_size=options.true_vocab_size,
            planner=peak_and_step_time if options.plans else None,
            estimator=make_layer_estimator(hardware, setting.passes, until=until_dry_runs),
            plans=options.plans,
            seconds=options.seconds,
            progress=update_progress_bar,
        )
    flags = [one.layout.changed_flags_text(setting) for one in ranking.fits]
    sys.stdout.write(
        json.dumps(layout_search_report_values(ranking, flags), indent=2) + "\n"
        if options.json
        else layout_search_text(ranking, flags)
    )
    return 0 if ranking.fits else 1


def estimate_and_print_run(
    options: argparse.Namespace, setting: RunSetup, config: RunConfig, hardware: Hardware, command: Sequence[str]
) -> int:
    """Simulate a step of one layout and print its plan, with changes that save memory if it does not fit; also write
    the page of --html. command: the whole command line, shown in the page, and read again for the memory beside
    training. Returns the exit code: 0 if every rank's memory suffices, what it holds beside training included, and no
    rank would wait forever; else 1.
    """
    dry_run = make_dry_runner(hardware)
    print_to_stderr(f"running one step dry on {setting.world_size:,} ranks")
    planned = estimate_run(config, setting.world_size, hardware, dry_run, passes=setting.passes)
    planned = replace(planned, matching=match_collectives(planned.run))
    if not planned.fits_in_memory:
        print_to_stderr(f"it does not fit (after {planned.seconds:.1f} s); trying changes")
        planned = add_memory_saving_changes(
            planned, setting, dry_run, true_vocab_size=options.true_vocab_size, seconds=options.seconds
        )
    if options.html:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        write_file(options.html, run_estimate_html(planned, command))
        print_to_stderr(f"written: {options.html}")
    read = parse_training_command(parse_arguments(command[2:])[1], ranks=options.world_size, entry=options.entry)
    beside = read.beside(config, setting.world_size)
    whole, budget = planned.run.worst_trace.peak + sum(beside.values()), hardware.usable_bytes()
    trouble = read.memory(config, setting.world_size, budget)  # also of ranks that do not train
    lines = [
        f"beside that a rank holds: {memory_parts_text(beside)}; {bytes_text(whole)} of {bytes_text(budget)} in all"
    ]
    apart = read.apart(config, setting.world_size)
    lines = lines * bool(beside) + [
        f"a rank that only generates holds: {memory_parts_text(apart)}; {bytes_text(sum(apart.values()))} of {bytes_text(budget)} in all"
    ] * bool(apart)
    facts = run_estimate_values(planned) | {
        name: dict(parts) for name, parts in (("beside", beside), ("generating", apart)) if parts
    }
    sys.stdout.write(
        json.dumps(facts, indent=2) + "\n"
        if options.json
        else "\n".join([run_estimate_text(planned).rstrip("\n"), *lines, *[trouble] * bool(trouble), ""])
    )
    return 0 if planned.fits_in_memory and planned.no_rank_deadlocks and whole <= budget and not trouble else 1


def measure_and_write_hardware(path: Path) -> None:
    """Measure this machine, and write its profile (on the first rank)."""
    from megatron.plan.measure import measure_hardware

    hardware = measure_hardware(say=print_to_stderr)
    if hardware is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(asdict(replace(hardware, name=path.stem)), indent=2) + "\n")
        print_to_stderr(f"written: {path}")


def main(argv: list[str] | None = None) -> None:
    """Print the plan or search; exit with its code."""
    argv = sys.argv[1:] if argv is None else argv
    options, words = parse_arguments(argv)
    if options.measure:
        measure_and_write_hardware(options.measure)
        return
    with exit_on(ConfigError, code=2):
        hardware = hardware_of(options.hardware or options.gpu)
    setting, config = resolve_setup_or_exit(options, words)
    code = (
        search_and_print_layouts(options, setting, hardware)
        if options.search
        else estimate_and_print_run(options, setting, config, hardware, ["megatron", "plan", *argv])
    )
    raise SystemExit(code)
