"""Examine the machines of a run before it starts: software, devices, kernels, links, clocks, limits, data and disks.

    megatron doctor <the flags of the run>
    torchrun --nproc_per_node 8 -m megatron doctor <the flags of the run>     on all ranks that will run; so on several machines
    LAUNCH="torchrun --nproc_per_node 8 -m megatron doctor --" bash LAUNCHER  with what a launcher would start

Every row is OK, WARN or FAIL, and names the ranks it is about. Without flags, the machines alone are examined. Nothing stays
behind but an empty --save folder. Exit code: 0 no row is FAIL, 1 some are.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from collections.abc import Sequence

from megatron.cli.arguments import parse_args_unchecked
from megatron.cli.preflight import fit_elastic_layout, resolve_and_examine
from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.config.flags.declare import ConfigError, config_from_namespace
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.kernels.choice.run_requirements import kernel_requirements
from megatron.core.kernels.choice.startup_check import KernelChoice, select_kernels_with_trials
from megatron.core.kernels.choice.table import KernelRequirements
from megatron.core.parallel import collectives
from megatron.core.parallel.device import pick_device, set_current_device
from megatron.core.parallel.mesh import Mesh
from megatron.core.tokenizers.build import build_tokenizer
from megatron.plan.command import ENTRIES, split_launch_command
from megatron.training.initialize import build_mesh, leave_process_group
from megatron.training.launch.launch_info import world_size
from megatron.verify.doctor import DoctorContext, DoctorFinding, diagnose_all

# Stands for the network of a run whose flags are missing or broken, so that the machines can be examined all the same.
STAND_IN = (
    "--num-layers 1 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --train-iters 1 --lr 1 "
    "--mock-data"
).split()


def parse_config_to_diagnose(words: Sequence[str], entry: str) -> tuple[RunConfig, list[DoctorFinding]]:
    """Return (the config to check, rows on unreadable flags and broken rules); without valid flags a small stand-in."""
    stand_in, _ = resolve_and_examine(config_from_namespace(RequestedRun, parse_args_unchecked(STAND_IN)), 1)
    if not words:
        return stand_in, [DoctorFinding("rules", "OK", "no flags given: the machines alone, with a small network")]
    try:
        args = parse_args_unchecked(words, defaults=ENTRIES[entry].defaults(words), extra=ENTRIES[entry].extra)
    except ConfigError as error:
        return stand_in, [
            DoctorFinding("rules", "FAIL", line.strip(), "see --help of the entry script")
            for line in str(error).splitlines()
        ]
    config, broken = resolve_and_examine(config_from_namespace(RequestedRun, args), world_size())
    rows = [DoctorFinding("rules", "FAIL", problem) for problem in args.problems]
    rows += [
        DoctorFinding("rules", "FAIL", f"{name}: {problem}", "megatron check-config says what would keep it")
        for name, problem in broken
    ]
    _, ranks = fit_elastic_layout(config_from_namespace(RequestedRun, args), world_size())
    if not rows and ranks < world_size():
        rows = [
            DoctorFinding(
                "rules",
                "WARN",
                f"--elastic: {ranks} of {world_size()} ranks would train; the machines are examined with a small network",
                f"start the doctor on {ranks} ranks for the run's own kernels, links and data",
            )
        ]
    if rows:
        return dataclasses.replace(stand_in, data=config.data, checkpoint=config.checkpoint), rows
    return config, [DoctorFinding("rules", "OK", f"all are kept on {world_size()} rank(s)")]


def choose_kernels_with_findings(
    config: RunConfig, need: KernelRequirements, mesh: Mesh
) -> tuple[KernelChoice, list[DoctorFinding]]:
    """Choose the run's kernels as its start does. Return them, with a row for each default that failed its trial; if a
    requested kernel cannot be used, those chosen without requests and a FAIL row.
    """

    def choose_requested_kernels(wishes: dict[str, str]) -> KernelChoice:
        return select_kernels_with_trials(
            config, need, mesh.device, wishes=wishes, gather=lambda rows: collectives.gather_objects(rows, mesh.world)
        )

    try:
        chosen_kernels, rows = choose_requested_kernels(config.model.all_requested_kernels), list[DoctorFinding]()
    except ConfigError as error:
        chosen_kernels, rows = choose_requested_kernels({}), [DoctorFinding("kernels", "FAIL", str(error))]
    return chosen_kernels, [
        *rows,
        *(
            DoctorFinding("kernels", "WARN", line, "test the device, its driver and triton")
            for line in chosen_kernels.failures
        ),
    ]


def build_doctor_context(
    config: RunConfig, *, whole: bool, megabytes: int, all_kernels: bool
) -> tuple[DoctorContext, list[DoctorFinding]]:
    """Join the other ranks; return what is checked on them, and rows on kernels. whole: settings keep every rule."""
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
    chosen, rows = choose_kernels_with_findings(config, need, mesh)
    return DoctorContext(config, mesh, chosen.kernels, chosen.need, hosts, whole, megabytes, all_kernels), rows


def findings_table_text(rows: Sequence[DoctorFinding]) -> str:
    """Return the rows as text, and the number of each status."""
    lines = []
    for row in rows:
        lines.append(f"{row.status:4}  {row.check:11}  {row.finding}")
        lines += [f"{'':19}{row.mend}"] if row.mend else []
    counts = {status: sum(row.status == status for row in rows) for status in ("OK", "WARN", "FAIL")}
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items())]) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Print the report on rank 0; exit with 1 on all ranks if a row is FAIL."""
    parser = ToolArgumentParser(description=__doc__)
    parser.add_argument("--entry", choices=ENTRIES, default="pretrain_gpt.py", help="script that the flags are for")
    parser.add_argument(
        "--megabytes", type=int, default=16, help="MiB that each rank sums and writes to measure rates (default: 16)"
    )
    parser.add_argument(
        "--all-kernels", action="store_true", help="also try the kernels that this machine has and the run does not use"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options, words = parser.parse_known_args(argv)
    _, entry, words = split_launch_command([word for word in words if word != "--"], options.entry)
    config, rows = parse_config_to_diagnose(words, entry)
    whole = bool(words) and all(row.status == "OK" for row in rows)
    try:
        subject, kernels = build_doctor_context(
            config, whole=whole, megabytes=options.megabytes, all_kernels=options.all_kernels
        )
        rows += [*kernels, *diagnose_all(subject)]
        if subject.mesh.world.is_first:
            sys.stdout.write(
                json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n"
                if options.json
                else findings_table_text(rows)
            )
    finally:
        leave_process_group()
    raise SystemExit(1 if any(row.status == "FAIL" for row in rows) else 0)
