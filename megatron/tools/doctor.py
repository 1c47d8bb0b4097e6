"""Examine the machines of a run before it is started: software, devices, kernels, links, clocks, limits, data and disks.

    python tools/doctor.py <the flags of the run>
    torchrun --nproc_per_node 8 tools/doctor.py <the flags of the run>     on all ranks that will run; so on several machines
    LAUNCH="torchrun --nproc_per_node 8 tools/doctor.py --" bash LAUNCHER  with what a launcher would start

Every row is OK, WARN or FAIL, and names the ranks it is about. Without flags, the machines alone are examined. Nothing stays
behind but an empty --save folder. Exit code: 0 no row is FAIL, 1 some are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import sys
from collections.abc import Sequence

from megatron.core.config.flags import ConfigError, from_namespace
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.kernels.startup_check import ChosenKernels, choose_kernels
from megatron.core.kernels.table import KernelRequirements
from megatron.core.parallel import collectives
from megatron.core.parallel.device import pick_device, set_current_device
from megatron.core.parallel.mesh import Mesh
from megatron.core.tokenizers.build import build_tokenizer
from megatron.tools.parser import ToolParser
from megatron.training.cli.arguments import read_flags
from megatron.training.cli.device_checks import kernel_requirements
from megatron.training.cli.preflight import fit_to_ranks, resolve_and_examine
from megatron.training.initialize import build_mesh, shut_down
from megatron.training.launch.launch_info import world_size
from megatron.trust.doctor import CheckResult, RunUnderTest, examine_all
from megatron.trust.flags.command import ENTRIES, split_command

# Stands for the network of a run whose flags are missing or broken, so that the machines can be examined all the same.
STAND_IN = (
    "--num-layers 1 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --train-iters 1 --lr 1 "
    "--mock-data"
).split()


def read_settings(words: Sequence[str], entry: str) -> tuple[RunConfig, list[CheckResult]]:
    """The config to examine, resolved; and the rows of flags that cannot be read and of rules that are broken."""
    stand_in, _ = resolve_and_examine(from_namespace(RequestedRun, read_flags(STAND_IN)), 1)
    if not words:
        return stand_in, [CheckResult("rules", "OK", "no flags given: the machines alone, with a small network")]
    try:
        args = read_flags(words, defaults=ENTRIES[entry].defaults(words), extra=ENTRIES[entry].extra)
    except ConfigError as error:
        return stand_in, [
            CheckResult("rules", "FAIL", line.strip(), "see --help of the entry script")
            for line in str(error).splitlines()
        ]
    config, broken = resolve_and_examine(from_namespace(RequestedRun, args), world_size())
    rows = [CheckResult("rules", "FAIL", problem) for problem in args.problems]
    rows += [
        CheckResult("rules", "FAIL", f"{name}: {problem}", "tools/check_config.py finds the fewest changes")
        for name, problem in broken
    ]
    _, ranks = fit_to_ranks(from_namespace(RequestedRun, args), world_size())
    if not rows and ranks < world_size():
        rows = [
            CheckResult(
                "rules",
                "WARN",
                f"--elastic: {ranks} of {world_size()} ranks would train; the machines are examined with a small network",
                f"start the doctor on {ranks} ranks for the run's own kernels, links and data",
            )
        ]
    if rows:
        return dataclasses.replace(stand_in, data=config.data, checkpoint=config.checkpoint), rows
    return config, [CheckResult("rules", "OK", f"all are kept on {world_size()} rank(s)")]


def kernels_of(config: RunConfig, need: KernelRequirements, mesh: Mesh) -> tuple[ChosenKernels, list[CheckResult]]:
    """The kernels of the run, as its start chooses them, with a row for each default that failed its trial; where a wish cannot be met, those of no
    wish, and a row that says so.
    """

    def chosen(wishes: dict[str, str]) -> ChosenKernels:
        return choose_kernels(
            config, need, mesh.device, wishes=wishes, gather=lambda rows: collectives.gather_objects(rows, mesh.world)
        )

    try:
        chosen_kernels, rows = chosen(config.model.kernel_requests), list[CheckResult]()
    except ConfigError as error:
        chosen_kernels, rows = chosen({}), [CheckResult("kernels", "FAIL", str(error))]
    return chosen_kernels, [
        *rows,
        *(
            CheckResult("kernels", "WARN", line, "test the device, its driver and triton")
            for line in chosen_kernels.failures
        ),
    ]


def build_run_under_test(
    config: RunConfig, *, whole: bool, megabytes: int, all_kernels: bool
) -> tuple[RunUnderTest, list[CheckResult]]:
    """The run on these ranks, as far as it can be examined before it is built, and what speaks against it. Joins the other ranks."""
    device = pick_device()
    set_current_device(device)
    mesh = build_mesh(config, device)
    need = kernel_requirements(config, device)
    if whole:
        try:
            size = build_tokenizer(config.tokenizer).vocab_size
            config = dataclasses.replace(config, model=config.model.with_vocabulary(size, config.parallel.tp))
        except (ConfigError, OSError):
            pass  # the check of the tokenizer tells on which ranks
    hosts = tuple(collectives.gather_objects(socket.gethostname(), mesh.world))
    chosen, rows = kernels_of(config, need, mesh)
    return RunUnderTest(config, mesh, chosen.kernels, chosen.need, hosts, whole, megabytes, all_kernels), rows


def check_table(rows: Sequence[CheckResult]) -> str:
    """The rows, and how many there are of each kind."""
    lines = []
    for row in rows:
        lines.append(f"{row.status:4}  {row.check:11}  {row.finding}")
        lines += [f"{'':19}{row.mend}"] if row.mend else []
    counts = {status: sum(row.status == status for row in rows) for status in ("OK", "WARN", "FAIL")}
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items())]) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Print the report on rank 0, and exit with its code on all."""
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--entry", choices=ENTRIES, default="pretrain_gpt.py", help="script that the flags are for")
    parser.add_argument(
        "--megabytes", type=int, default=16, help="MiB that each rank sums and writes to measure rates (default: 16)"
    )
    parser.add_argument(
        "--all-kernels", action="store_true", help="also try the kernels that this machine has and the run does not use"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options, words = parser.parse_known_args(argv)
    _, entry, words = split_command([word for word in words if word != "--"], options.entry)
    config, rows = read_settings(words, entry)
    whole = bool(words) and all(row.status == "OK" for row in rows)
    try:
        subject, kernels = build_run_under_test(
            config, whole=whole, megabytes=options.megabytes, all_kernels=options.all_kernels
        )
        rows += [*kernels, *examine_all(subject)]
        if subject.mesh.world.is_first:
            sys.stdout.write(
                json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n"
                if options.json
                else check_table(rows)
            )
    finally:
        shut_down()
    raise SystemExit(1 if any(row.status == "FAIL" for row in rows) else 0)
