"""initialize_megatron(checked) -> Run: everything that happens once, before a model is built.

The order matters: settings were checked and the tokenizer was read (cli/preflight.py), and the save folder is tried before any
rank waits for another, so that a mistake costs a second and not a time-out.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.config.flags.declare import ConfigError, raise_config_error_if
from megatron.core.config.mixers.table import recurrent_mixers
from megatron.core.config.plan.network import unused_kernel_ops
from megatron.core.config.settings.parallel import can_exchange_heads
from megatron.core.config.settings.run import RunConfig
from megatron.core.dist_checkpointing.checkpoint_folders import check_save_folder_writable
from megatron.core.kernels.choice.run_requirements import kernel_requirements
from megatron.core.kernels.choice.startup_check import select_kernels_with_trials
from megatron.core.kernels.low_precision import recipes
from megatron.core.parallel import collectives
from megatron.core.parallel.device import device_name, disable_malloc_trim, pick_device, set_current_device, synchronize
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.training import global_vars
from megatron.training.checked_run import CheckedRun
from megatron.training.hooks.run_record import run_log_path
from megatron.training.launch.elastic import elastic_layout_change_text
from megatron.training.launch.launch_info import read_launch_info, world_size
from megatron.training.launch.rendezvous import (
    init_default_process_group,
    missing_launcher_store_warning,
    release_spare_ranks,
    wait_as_spare_rank,
)
from megatron.training.report.run_log import RunLog
from megatron.training.report.timers import Timers
from megatron.training.state.run import RunContext

MeshOf = Callable[[RunConfig, torch.device], tuple[Mesh, RunConfig]]


def initialize_megatron(checked: CheckedRun, mesh_of: MeshOf | None = None) -> RunContext:
    """Join the other ranks, and return the run that every provider receives; exit with code 2, one rank saying why, if
    it cannot start. mesh_of: makes mesh and config, where not all ranks are one mesh.
    """
    try:
        _require_startable(checked)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"ConfigError: {error}\n")
        raise SystemExit(2) from None
    config, tokenizer = checked.config, checked.tokenizer
    assert tokenizer is not None, "a run whose tokenizer cannot be read is refused"
    layout_change = elastic_layout_change_text(*checked.layouts, world_size=checked.world_size, ranks=checked.ranks)
    log = _make_console_logger(config)
    device = pick_device()
    set_current_device(device)
    disable_malloc_trim(device)
    _set_deterministic(config)
    mesh, config = (build_mesh(config, device), config) if mesh_of is None else mesh_of(config, device)
    chosen = select_kernels_with_trials(
        config,
        kernel_requirements(config, device),
        device,
        gather=lambda rows: collectives.gather_objects(rows, mesh.world),
    )
    streams = RandomStreams.build(mesh, config.train.seed, per_data_rank=config.train.data_parallel_random_init)
    run = RunContext(
        given=checked.given,
        origins=checked.origins,
        notes=(*checked.notes, *filter(None, [layout_change])),
        config=config,
        mesh=mesh,
        kernels=chosen.kernels,
        tokenizer=tokenizer,
        streams=streams,
        timers=_make_timers(config, mesh),
        log=log,
        run_log=_make_run_log(config, mesh),
    )
    global_vars.set_global_run(run)
    parallel_state.install_mesh(mesh)
    for message in filter(None, (*run.notes, *chosen.failures, missing_launcher_store_warning(read_launch_info()))):
        run.print_rank_0(message)
    _print_startup_summary(run)
    return run


def leave_process_group() -> None:
    """Destroy the process group; the first rank also tells waiting spare ranks to end."""
    waiting = int(os.environ.get("MEGATRON_STAND_BY", "0"))
    if waiting and read_launch_info().rank == 0:
        release_spare_ranks(read_launch_info(), waiting)
    if dist.is_initialized():
        dist.destroy_process_group()


def _require_startable(checked: CheckedRun) -> None:
    """Raise `ConfigError` if the run cannot start. With --elastic, a spare rank waits here for the others and exits."""
    # Batches and layout follow from the number of ranks: with another, the config would be wrong without a word.
    assert checked.world_size == world_size(), f"checked for {checked.world_size} ranks, started on {world_size()}"
    raise_config_error_if(line for _, line in checked.problems)
    _hold_spare_ranks(checked.ranks)
    if checked.config.checkpoint.save and os.environ.get("RANK", "0") == "0":
        check_save_folder_writable(checked.config.checkpoint.save)


def _hold_spare_ranks(ranks: int) -> None:
    """With --elastic, a rank beyond the `ranks` that train waits for them and exits here."""
    place = read_launch_info()
    if ranks == place.size:  # ranks beyond these, if any, are of another mesh (--rl-generation-ranks)
        return
    if place.rank >= ranks:
        wait_as_spare_rank(place)
        raise SystemExit(0)
    os.environ.update(WORLD_SIZE=str(ranks), MEGATRON_STAND_BY=str(place.size - ranks))


class ConsoleHandler(logging.StreamHandler):
    """Log handler that ignores a line that cannot be written (disk full), as there is nowhere else to report it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Ignore an `OSError`; handle others as `logging.Handler` does."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _make_console_logger(config: RunConfig) -> logging.Logger:
    """Return the logger "megatron", which prints messages to standard output without a prefix."""
    log = logging.getLogger("megatron")
    if not log.handlers:
        handler = ConsoleHandler(sys.stdout)
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
    """Join all ranks and return their mesh; without a launcher, a mesh of this process alone."""
    if "WORLD_SIZE" not in os.environ:
        return Mesh.single_process(device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    init_default_process_group(config.parallel, read_launch_info(), device)
    return Mesh.build(config.parallel, device)


def _make_run_log(config: RunConfig, mesh: Mesh) -> RunLog:
    """Return the run log; only the first rank of all writes."""
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


def _print_recurrent_cp_method(run: RunContext) -> None:
    """Print by which method layers with a recurrent state process sequences sharded over context ranks, and why."""
    parallel, model = run.config.parallel, run.config.model
    size, ways = parallel.context_parallel_size, []
    for mixer in recurrent_mixers(model) if size > 1 else ():
        counts = mixer.counts(model)
        heads, groups = counts.heads // parallel.tp, counts.groups // parallel.tp
        divides = can_exchange_heads(size, heads, groups)
        way = "states" if parallel.state_comm_type == "states" or not divides else "a2a"
        why = "" if divides else f", since they do not divide {heads} heads in {groups} groups"
        ways.append(f"{mixer.name} by {way}{why}")
    if ways:
        run.print_rank_0(
            f"states over {size} context ranks: {', '.join(ways)} (--state-comm-type {parallel.state_comm_type})"
        )


def _print_low_precision(run: RunContext) -> None:
    """Say in which formats matrices are multiplied, where they have 8 or 4 bits."""
    config = run.config
    if (recipe := recipes.low_precision_recipe_of(config.precision.low, run.mesh.device)) is not None:
        ends = (config.precision.low.num_layers_at_start_in_bf16, config.precision.low.num_layers_at_end_in_bf16)
        run.print_rank_0(
            f"matrices: {recipe.forward.name}, gradients {recipe.backward.name}, {recipe.name}, "
            f"{'native' if recipe.native else 'emulated: rounded, then multiplied in fp32'}"
            + (
                f"; the first {ends[0]} and last {ends[1]} layers in {config.precision.param_dtype_name}"
                if config.precision.low.first_last_layers_bf16
                else ""
            )
            + (
                "; --tp-comm-overlap overlaps none of them, since they are scaled as a whole"
                if config.parallel.tp_comm_overlap
                else ""
            )
        )


def _print_startup_summary(run: RunContext) -> None:
    """Print mesh, formats, kernels and other choices, once at start."""
    mesh, config = run.mesh, run.config
    axes = " x ".join(
        f"{name} {getattr(mesh, axis).size}" for axis, name in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"))
    )
    extras = {
        "sequence parallel": config.parallel.sequence_parallel,
        "distributed optimizer": config.parallel.use_distributed_optimizer,
        "FSDP2": config.parallel.use_torch_fsdp2,
    }
    listed = ", ".join([axes, *(word for word, on in extras.items() if on)])
    run.print_rank_0(f"mesh: {mesh.world.size} ranks on {device_name(mesh.device)} = {listed}")
    run.print_rank_0(
        f"format: {config.precision.param_dtype_name}, gradients in {config.precision.gradient_dtype_name}; vocabulary "
        f"{config.model.true_vocab_size} padded to {config.model.padded_vocab_size}"
    )
    run.print_rank_0(
        "loss of a step: its sum over all tokens by their number; Megatron's default, the mean of the micro batches' means, is "
        "--no-calculate-per-token-loss"
        if config.train.calculate_per_token_loss
        else "loss of a step: the mean of the micro batches' means, as Megatron's (--no-calculate-per-token-loss)"
    )
    idle = unused_kernel_ops(config.model)
    rows = (row for row in run.kernels.report if row[0] not in idle)
    kernels = ", ".join(f"{op} by {name}{f' (not {why})' if why else ''}" for op, name, why in rows)
    run.print_rank_0(f"kernels: {kernels}")
    _print_recurrent_cp_method(run)
    _print_low_precision(run)
    moe = config.model.moe
    if moe.num_experts:
        kind: str = moe.moe_token_dispatcher_type
        if kind == "flex":
            kind = "alltoall" if run.kernels.moe_flex_dispatcher is None else "DeepEP"
        run.print_rank_0(
            f"experts: {moe.num_experts} a layer over {mesh.ep.size} ranks, each cut over {mesh.etp.size} and held by {mesh.edp.size}; "
            f"tokens are sent by {kind}"
        )
