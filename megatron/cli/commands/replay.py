"""Repeat a bad step from its failure dump on the CPU, and report the first value that is not finite.

    megatron replay checkpoints/faults/step-00000120
    megatron replay DUMP --weights checkpoints/iter_0000119     take the weights from there
    megatron replay DUMP --large 1e4                            values from here on count as trouble, too

A run leaves failure dumps with --on-bad-step; with --failure-dump-weights they hold the weights, and the replay is exact.
Exit code: 0 the trouble is found, 1 nothing of it happens here, 2 the failure dump cannot be repeated.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.plan.simulate.providers import PROVIDERS
from megatron.training.launch.launch_info import install_interrupt_excepthook
from megatron.verify.compare.replay import FailureReplayResult, replay_failure_dump


def replay_report_lines(replayed: FailureReplayResult, most: int) -> Iterator[str]:
    """Yield the lines of the report. most: number of modules with the largest outputs to list."""
    facts = replayed.facts
    yield f"iteration {facts['iteration']} of {facts['world_size']} ranks: {facts['problem']}"
    yield from (f"note: {note}" for note in replayed.notes)
    yield f"{'':24}{'in the run':>16}{'here':>16}"
    for name in {**facts["losses"], **replayed.losses}:
        yield f"{name:24}{facts['losses'].get(name, math.nan):16.6e}{replayed.losses.get(name, math.nan):16.6e}"
    yield f"{'gradient norm':24}{facts['gradient_norm']:16.6e}{replayed.norm:16.6e}"
    yield from (f"first bad {what}: {sight}" for what, sight in replayed.first.items())
    if replayed.bad_gradients:
        more = len(replayed.bad_gradients) - 4
        yield f"gradients that are not finite: {', '.join(replayed.bad_gradients[:4])}" + (
            f" and {more} more" if more > 0 else ""
        )
    order = sorted(
        replayed.largest,
        key=lambda name: -replayed.largest[name] if math.isfinite(replayed.largest[name]) else -math.inf,
    )
    yield from (f"largest output of {name or 'the whole network'}: {replayed.largest[name]:g}" for name in order[:most])
    yield f"conclusion: {replayed.conclusion}"


def main(argv: Sequence[str] | None = None) -> int:
    """Replay the step and print the report. Return the exit code."""
    install_interrupt_excepthook()
    parser = ToolArgumentParser(description=__doc__)
    parser.add_argument("dump", type=Path, help="folder of a bad step")
    parser.add_argument(
        "--weights", type=Path, help="checkpoint to start from, instead of the one in the failure dump or named by it"
    )
    parser.add_argument("--large", type=float, default=math.inf, help="absolute values above this count as trouble")
    parser.add_argument(
        "--modules", type=int, default=0, help="list so many modules with the largest outputs (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args(argv)
    try:
        replayed = replay_failure_dump(options.dump, PROVIDERS, weights=options.weights, bound=options.large)
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    if options.json:
        report = {
            "iteration": replayed.facts["iteration"],
            "conclusion": replayed.conclusion,
            "notes": replayed.notes,
            "losses": replayed.losses,
            "gradient_norm": replayed.norm,
            "first": {what: str(sight) for what, sight in replayed.first.items()},
            "gradients_not_finite": replayed.bad_gradients,
            "weights_not_finite": replayed.bad_weights,
            "largest": replayed.largest,
        }
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(replay_report_lines(replayed, options.modules)) + "\n")
    return 0 if replayed.first or replayed.bad_gradients or replayed.bad_weights else 1
