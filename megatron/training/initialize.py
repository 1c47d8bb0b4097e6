"""initialize_megatron(args) -> Run: everything that happens once, before a model is built.

The order matters: settings are checked, the tokenizer is read and the save folder tried before any rank waits for
another, so that a mistake costs a second and not a time-out.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.config.flags import ConfigError, from_namespace, refuse
from megatron.core.config.settings.parallel import exchanges_heads
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.dist_checkpointing.store import check_writable
from megatron.core.kernels.low_precision import recipes
from megatron.core.kernels.startup_check import choose_kernels
from megatron.core.parallel import collectives
from megatron.core.parallel.device import (
    backend_of,
    device_name,
    keep_freed_memory,
    pick_device,
    set_current_device,
    synchronize,
)
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.tokenizers.base import Tokenizer
from megatron.training import global_vars
from megatron.training.cli.device_checks import kernel_requirements
from megatron.training.cli.preflight import fit_to_ranks, preflight
from megatron.training.launch.elastic import layout_change
from megatron.training.launch.launch_info import read_launch_info, world_size
from megatron.training.launch.rendezvous import join_ranks, missing_store_warning
from megatron.training.launch.spare_ranks import stand_by, tell_done
from megatron.training.report.run_log import RunLog
from megatron.training.report.run_record import run_log_path
from megatron.training.report.timers import Timers
from megatron.training.run import Run

MeshOf = Callable[[RunConfig, torch.device], tuple[Mesh, RunConfig]]


def initialize_megatron(args: argparse.Namespace, mesh_of: MeshOf | None = None) -> Run:
    """Join the other ranks and build what every provider needs. mesh_of: makes the mesh of this rank, and its config, where not all
    ranks are one mesh.

    Prints what is wrong and exits with code 2 when settings cannot be used; one rank speaks for all.
    """
    try:
        config, tokenizer = _resolve_settings(args)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"ConfigError: {error}\n")
        raise SystemExit(2) from None
    log = _make_logger(config)
    device = pick_device()
    set_current_device(device)
    keep_freed_memory(device)
    _set_deterministic(config)
    mesh, config = (build_mesh(config, device), config) if mesh_of is None else mesh_of(config, device)
    chosen = choose_kernels(
        config,
        kernel_requirements(config, device),
        device,
        gather=lambda rows: collectives.gather_objects(rows, mesh.world),
    )
    streams = RandomStreams.build(mesh, config.train.seed, per_data_rank=config.train.data_parallel_random_init)
    run = Run(
        args=args,
        config=config,
        mesh=mesh,
        kernels=chosen.kernels,
        tokenizer=tokenizer,
        streams=streams,
        timers=_make_timers(config, mesh),
        log=log,
        run_log=_run_log(config, mesh),
    )
    global_vars.set_run(run)
    parallel_state.set_mesh(mesh)
    lines = (*getattr(args, "messages", ()), *chosen.failures)
    for message in (*lines, *filter(None, [missing_store_warning(read_launch_info())])):
        run.print_rank_0(message)
    _startup_table(run)
    return run


def shut_down() -> None:
    """Leave the process group, and let ranks go that stand by."""
    waiting = int(os.environ.get("MEGATRON_STAND_BY", "0"))
    if waiting and read_launch_info().rank == 0:
        tell_done(read_launch_info(), waiting)
    if dist.is_initialized():
        dist.destroy_process_group()


def _resolve_settings(args: argparse.Namespace) -> tuple[RunConfig, Tokenizer]:
    """The checked config with its vocabulary, and the tokenizer."""
    checked = preflight(from_namespace(RequestedRun, args), world_size())
    refuse(line for _, line in checked.problems)
    assert checked.tokenizer is not None, "a run whose tokenizer cannot be read is refused"
    args.messages = list(dict.fromkeys([*getattr(args, "messages", ()), *checked.notes]))
    config = checked.config
    _ranks_that_train(args)
    if config.checkpoint.save and os.environ.get("RANK", "0") == "0":
        check_writable(config.checkpoint.save)
    return config, checked.tokenizer


def _ranks_that_train(args: argparse.Namespace) -> int:
    """How many ranks the layout has a place for. With --elastic, the others stand by and end here, and it is said what changed."""
    given, place = from_namespace(RequestedRun, args), read_launch_info()
    chosen, ranks = fit_to_ranks(given, place.size)
    if line := layout_change(given.parallel, chosen.parallel, world_size=place.size, ranks=ranks):
        args.messages = [*getattr(args, "messages", ()), line]
    if ranks == place.size:
        return ranks
    if place.rank >= ranks:
        stand_by(place)
        raise SystemExit(0)
    os.environ.update(WORLD_SIZE=str(ranks), MEGATRON_STAND_BY=str(place.size - ranks))
    return ranks


class Console(logging.StreamHandler):
    """A stream of lines, where a line that finds no room on the disk is lost without a word: there is no other place to say it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """See `logging.Handler`."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _make_logger(config: RunConfig) -> logging.Logger:
    """Lines go to standard output as they are."""
    log = logging.getLogger("megatron")
    if not log.handlers:
        handler = Console(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(config.log.logging_level or logging.INFO)
    if os.environ.get("RANK", "0") != "0":  # what the library has to say is the same on every rank
        logging.getLogger("megatron.core").setLevel(logging.WARNING)
    return log


def _set_deterministic(config: RunConfig) -> None:
    if config.train.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Else every new tensor is filled, though nothing reads what was not written.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - a property unknown to type checkers


def build_mesh(config: RunConfig, device: torch.device) -> Mesh:
    """The mesh of all ranks; without a launcher, of this process alone."""
    if "WORLD_SIZE" not in os.environ:
        return Mesh.single_process(device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    join_ranks(
        backend_of(device, config.parallel.distributed_backend),
        read_launch_info(),
        timedelta(minutes=config.parallel.distributed_timeout_minutes),
        device if device.type == "cuda" else None,
    )
    return Mesh.build(config.parallel, device)


def _run_log(config: RunConfig, mesh: Mesh) -> RunLog:
    speaks = mesh.world.is_first and mesh.world.ranks[0] == 0
    return RunLog(run_log_path(config.log, config.checkpoint.save) if speaks else None)


def _make_timers(config: RunConfig, mesh: Mesh) -> Timers:
    return Timers(
        level=config.log.timing_log_level,
        option=config.log.timing_log_option,
        synchronize=lambda: synchronize(mesh.device),
        barrier=lambda: collectives.barrier(mesh.world),
        gather=lambda row: collectives.gather_objects(list(row), mesh.world),
        barrier_with_level_1=config.log.barrier_with_level_1_timing,
    )


def _report_states_over_context_ranks(run: Run) -> None:
    """Print how layers with a state see sequences that are cut over context ranks, and why."""
    parallel, hybrid = run.config.parallel, run.config.model.hybrid
    size, ways = parallel.context_parallel_size, []
    for mixer in sorted(run.config.model.state_mixers) if size > 1 else ():
        heads, groups = (count // parallel.tp for count in hybrid.heads_and_groups(mixer))
        divides = exchanges_heads(size, heads, groups)
        way = "states" if parallel.state_comm_type == "states" or not divides else "a2a"
        why = "" if divides else f", since they do not divide {heads} heads in {groups} groups"
        ways.append(f"{mixer} by {way}{why}")
    if ways:
        run.print_rank_0(
            f"states over {size} context ranks: {', '.join(ways)} (--state-comm-type {parallel.state_comm_type})"
        )


def _startup_table(run: Run) -> None:
    """The table of what was chosen, once."""
    mesh, config = run.mesh, run.config
    axes = " x ".join(
        f"{name} {getattr(mesh, axis).size}" for axis, name in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"))
    )
    extras = [
        word
        for word, on in (
            ("sequence parallel", config.parallel.sequence_parallel),
            ("distributed optimizer", config.parallel.use_distributed_optimizer),
            ("FSDP2", config.parallel.use_torch_fsdp2),
        )
        if on
    ]
    run.print_rank_0(
        f"mesh: {mesh.world.size} ranks on {device_name(mesh.device)} = {axes}"
        + "".join(f", {word}" for word in extras)
    )
    run.print_rank_0(
        f"format: {config.precision.dtype}, gradients in {config.precision.gradient_dtype}; vocabulary "
        f"{config.model.true_vocab_size} padded to {config.model.padded_vocab_size}"
    )
    run.print_rank_0(
        "loss of a step: its sum over all tokens by their number; Megatron's default, the mean of the micro batches' means, is "
        "--no-calculate-per-token-loss"
        if config.train.calculate_per_token_loss
        else "loss of a step: the mean of the micro batches' means, as Megatron's (--no-calculate-per-token-loss)"
    )
    run.print_rank_0(
        "kernels: "
        + ", ".join(
            f"{op} by {name}" + (f" (not {why})" if why else "")
            for op, name, why in run.kernels.report
            if op not in config.model.idle_kernels
        )
    )
    _report_states_over_context_ranks(run)
    if (recipe := recipes.recipe_of(config.precision.low, mesh.device)) is not None:
        ends = (config.precision.low.num_layers_at_start_in_bf16, config.precision.low.num_layers_at_end_in_bf16)
        run.print_rank_0(
            f"matrices: {recipe.forward.name}, gradients {recipe.backward.name}, {recipe.name}, "
            f"{'native' if recipe.native else 'emulated: rounded, then multiplied in fp32'}"
            + (
                f"; the first {ends[0]} and last {ends[1]} layers in {config.precision.dtype}"
                if config.precision.low.first_last_layers_bf16
                else ""
            )
        )
    moe = config.model.moe
    if moe.num_experts:
        kind: str = moe.moe_token_dispatcher_type
        if kind == "flex":
            kind = "alltoall" if run.kernels.moe_flex_dispatcher is None else "DeepEP"
        run.print_rank_0(
            f"experts: {moe.num_experts} a layer over {mesh.ep.size} ranks, each cut over {mesh.etp.size} and held by {mesh.edp.size}; "
            f"tokens are sent by {kind}"
        )
