"""Check that a layout computes what one rank computes: the config made small, trained both ways in fp64, and compared.

    megatron check-parity <the flags of the run> --world-size 8
    megatron check-parity -- torchrun --nproc_per_node 8 pretrain_gpt.py <flags>     a whole command
    LAUNCH="python -m megatron check-parity --" bash examples/gpt3/train_gpt3_175b_distributed.sh ...     what a launcher would start

Exit code: 0 both compute the same step, 1 they do not (or the layout does not run), 2 the question could not be read.
docs/parity.md says what is made smaller, and how.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from megatron.cli.tool_parser import (
    ToolArgumentParser,
    add_world_size_and_entry_options,
    exit_on,
    parse_options_and_run_words,
)
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.run import RunConfig
from megatron.plan.command import ENTRIES, parse_training_command
from megatron.verify.parity.proxy_config import ProxyConfig, make_proxy_config


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line: (the tool's own options, the words of the run)."""
    parser = ToolArgumentParser(description=__doc__)
    add_world_size_and_entry_options(parser, ENTRIES)
    parser.add_argument(
        "--most-ranks", type=int, default=8, help="ranks to start here at most (default: 8); what does not fit is said"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=300.0,
        help="seconds after which ranks that have not come back are stopped (default: 300)",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    return parse_options_and_run_words(parser, argv)


def proxy_config_of_command(options: argparse.Namespace, words: Sequence[str]) -> ProxyConfig:
    """Return the proxy config of a command; `ConfigError` if it breaks rules or cannot be made small."""
    command = parse_training_command(words, ranks=options.world_size, entry=options.entry)
    broken = command.broken_rules
    if broken or command.setting is None:
        lines = ["these flags would not start; megatron check-config says what to change"]
        raise ConfigError("\n".join([*lines, *(f"  {one.says}" for one in broken)]))
    setting, config = command.setting.resolve_elastic_layout()
    small = make_proxy_config(config, setting.world_size, most_ranks=options.most_ranks)
    return replace(small, finetuning=command.finetuning)


def run_parity_check_for_report(small: ProxyConfig, limit: float) -> dict[str, Any]:
    """Run the proxy config both ways and return how the runs differ, as plain values. limit: seconds."""
    from megatron.verify.parity.serial_comparison import (
        run_layout_parity_check,  # needs torch, which no other answer waits for
    )

    result = run_layout_parity_check(small, limit)
    if isinstance(result, str):
        return {
            "same": False,
            "failed": result,
            "compared": 0,
            "counts": {},
            "tolerance": None,
            "start": None,
            "problems": [],
            "largest": [],
        }
    counts = {kind: sum(one.kind == kind for one in result.checked) for kind in ("loss", "norm", "gradient", "weight")}
    return {
        "same": result.is_within_tolerance,
        "failed": None,
        "compared": result.compared,
        "counts": counts,
        "tolerance": result.tolerance,
        "start": None if result.is_within_tolerance or result.start is None else asdict(result.start),
        "problems": [_difference_as_json_values(one) for one in result.differences_above_tolerance],
        "largest": [_difference_as_json_values(one) for one in result.largest_differences()],
    }


def _difference_as_json_values(one: Any) -> dict[str, Any]:
    """Return a difference as plain values, an infinite gap as None."""
    return {**asdict(one), "gap": one.gap if math.isfinite(one.gap) else None}


def layout_text(config: RunConfig, ranks: int) -> str:
    """Describe the parallel sizes above 1."""
    parallel = config.parallel
    sizes = {
        "tensor": parallel.tp,
        "context": parallel.context_parallel_size,
        "pipeline": parallel.pp,
        "data": parallel.data_parallel_size(ranks),
    }
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    experts = f", experts over {parallel.expert_model_parallel_size}" if parallel.expert_model_parallel_size > 1 else ""
    return f"{' x '.join(words) or 'no axis'} = {ranks} rank{'s' * (ranks > 1)}{experts}"


def _parity_difference_lines(result: dict[str, Any]) -> list[str]:
    """Return lines on where the runs begin to differ, what differs, and the largest differences."""
    lines: list[str] = []
    if result["start"] is not None:
        start = result["start"]
        during = start["during"] + " pass" * (start["during"] in ("forward", "backward"))
        lines += [
            "",
            f"it begins in the {during}" + (f", at {start['module']}" if start["module"] else "") + ":",
            f"    {start['says']}",
        ]
    if result["problems"]:
        lines += ["", f"{len(result['problems'])} differ by more than {result['tolerance']:g}, the first of them:"]
        lines += [f"    {one['kind']} {one['name']} of {one['when']}: {one['says']}" for one in result["problems"][:10]]
    if result["largest"]:
        lines += ["", "largest differences, relative"]
        lines += [
            f"    {one['kind']:9} {one['name'] + ' of ' + one['when']:70} {'inf' if one['gap'] is None else format(one['gap'], '.2g')}"
            for one in result["largest"]
        ]
    return lines


def layout_parity_report_lines(small: ProxyConfig, result: dict[str, Any], seconds: float) -> list[str]:
    """Return the lines of the report. result: of `run_parity_check_for_report`; seconds: that it took."""
    model = small.config.model
    layers = model.num_layers + (model.decoder_num_layers or 0)
    lines = [
        f"every layout computes the same step: {'yes' if result['same'] else 'no'}",
        "",
        f"one rank against {layout_text(small.config, small.world_size)}; {layers} layers of width {model.hidden_size}, 2 steps in fp64, "
        f"{seconds:.0f} s",
    ]
    if result["failed"] is not None:
        lines += ["the layout does not run:", *(f"    {line}" for line in result["failed"].splitlines())]
    else:
        counts = result["counts"]
        lines.append(
            f"compared: {counts['loss']} losses, {counts['norm']} gradient norms, {counts['gradient']} gradients and "
            f"{counts['weight']} weights; {result['compared']} pieces of activations"
        )
    lines += _parity_difference_lines(result)
    smaller, lost = [one for one in small.changes if not one.lost], [one for one in small.changes if one.lost]
    lines += ["", "made smaller", *(f"    {one}" for one in smaller)] if smaller else []
    lines += ["", "not compared", *(f"    {one}" for one in lost)] if lost else []
    return lines


def main(argv: list[str] | None = None) -> None:
    """Print the report, and exit with its code."""
    options, words = parse_arguments(sys.argv[1:] if argv is None else argv)
    began = time.monotonic()
    with exit_on(ConfigError, code=2):
        small = proxy_config_of_command(options, words)
    sys.stderr.write(f"one rank against {layout_text(small.config, small.world_size)} ...\n")
    result = run_parity_check_for_report(small, options.limit)
    seconds = time.monotonic() - began
    if options.json:
        changes = [
            {"flag": one.name, **{key: value for key, value in asdict(one).items() if key != "name"}}
            for one in small.changes
        ]
        report = {
            **result,
            "ranks": small.world_size,
            "layout": layout_text(small.config, small.world_size),
            "seconds": round(seconds, 1),
            "changes": changes,
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(layout_parity_report_lines(small, result, seconds)) + "\n")
    raise SystemExit(0 if result["same"] else 1)
