"""What goes into the run log: what a run was given, how it went, and why it ended."""

from __future__ import annotations

import hashlib
import platform
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from megatron import __version__
from megatron.core.config.flags.declare import ConfigError, config_to_flat_dict
from megatron.core.config.settings.run import LogConfig, RunConfig
from megatron.core.datasets import sidecar
from megatron.core.datasets.data_splits import MOCK_PREFIX, plan_data_splits
from megatron.core.datasets.indexed import bin_path, idx_path
from megatron.core.datasets.storage import DataError, is_remote_path, stat_remote_object
from megatron.core.parallel import collectives
from megatron.core.parallel.device import device_name
from megatron.core.parallel.mesh import Mesh
from megatron.core.tokenizers.base import tokenizer_fingerprint_fields
from megatron.training.health.failures import annotate_errors
from megatron.training.health.watchdog import HangDetector
from megatron.training.launch.launch_info import recorded_environment_variables
from megatron.training.report.metrics import ResolvedStepMetrics
from megatron.training.report.run_log import FILE, FORMER_FILE, RunLog, read_run_log_events, to_json_value
from megatron.training.state.run import RunContext

ROOT = Path(__file__).resolve().parents[3]
_END_BYTES = 2**20  # hashed at both ends of a data file whose writer left no checksum
_COLUMNS = ("learning_rate", "batch_size", "consumed_samples", "grad_norm", "loss_scale", "skipped")


def run_log_path(log: LogConfig, save: str | None) -> Path | None:
    """Return the path of a run's log: --run-log, else in --save; None without either."""
    if log.run_log or not save:
        return Path(log.run_log) if log.run_log else None
    former = Path(save) / FORMER_FILE
    return former if former.exists() else Path(save) / FILE


@contextmanager
def record_run_start_and_error(run: RunContext) -> Iterator[None]:
    """Write what the run was given into the run log and, if an exception leaves the block, the error. Collective."""
    machines = collectives.gather_objects((socket.gethostname(), device_name(run.mesh.device)), run.mesh.world)
    if run.run_log.is_enabled:
        _record_run_start(run, machines)
    try:
        yield
    except BaseException as error:
        run.run_log.add("end", reason=f"{type(error).__name__}: {error}", iteration=run.progress.iteration, failed=True)
        raise


@contextmanager
def supervised(run: RunContext) -> Iterator[None]:
    """Within: the run log says how the run began and failed, a hang is noticed, and errors say where they happened."""
    with record_run_start_and_error(run), HangDetector(run), annotate_errors(run):
        yield


def add_steps_to_run_log(run_log: RunLog, steps: Sequence[ResolvedStepMetrics]) -> None:
    """Write all numbers of resolved steps into the run log at full precision, a list for each, without MoE metrics."""
    if not steps or not run_log.is_enabled:
        return
    names = dict.fromkeys(name for step in steps for name in step.losses if not name.startswith("moe/"))
    columns = {name: [getattr(step, name) for step in steps] for name in _COLUMNS}
    run_log.add(
        "steps",
        iterations=[step.iteration for step in steps],
        losses={name: [step.losses.get(name) for step in steps] for name in names},
        **{name: values for name, values in columns.items() if any(value is not None for value in values)},
    )


def parallel_layout_sizes(config: RunConfig, mesh: Mesh) -> dict[str, int]:
    """Return the sizes of the parallel axes and the micro batch, by name."""
    axes = (mesh.world, mesh.tp, mesh.pp, mesh.cp, mesh.dp, mesh.ep)
    names = ("ranks", "tensor", "pipeline", "context", "data", "expert")
    sizes = {name: axis.size for name, axis in zip(names, axes, strict=True)}
    return {**sizes, "micro batch": config.train.micro_batch_size or 0}


def _record_run_start(run: RunContext, machines: Sequence[tuple[str, str]]) -> None:
    """Write the start event (settings, code, environment, data, tokenizer), and a layout event if the layout changed."""
    assert run.run_log.path is not None, "a run log that is kept has a path"
    try:
        before = [event for event in read_run_log_events(run.run_log.path) if event["event"] == "start"]
    except OSError:
        before = []
    layout = parallel_layout_sizes(run.config, run.mesh)
    settings, origins = _settings_and_origins(run)
    run.run_log.add(
        "start",
        number=len(before) + 1,
        layout=layout,
        settings=settings,
        origins=origins,
        messages=list(run.notes),
        code=code_version_record(),
        environment=environment_record(machines),
        kernels={op: name for op, name, _ in run.kernels.report},
        data=data_files_record(run.config),
        tokenizer=tokenizer_fingerprint_fields(run.tokenizer),
    )
    if before and before[-1].get("layout") != layout:
        run.run_log.add("layout", before=before[-1].get("layout"), after=layout)


def _settings_and_origins(run: RunContext) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (every setting as the run uses it, where each that is not our default comes from)."""
    settings, origins = config_to_flat_dict(run.config), {}
    for name, value in settings.items():
        requested = run.given.get(name, value)
        if (list(requested) if isinstance(requested, tuple) else requested) != value:
            origins[name] = "derived"
        elif name in run.origins:
            origins[name] = run.origins[name]
    return {name: value for name, value in settings.items() if value is not None}, origins


def code_version_record() -> dict[str, Any]:
    """Return version, git commit and hash of all Python sources (`sources`, which works without git too)."""
    content = hashlib.sha256()
    for path in sorted([*ROOT.glob("*.py"), *(ROOT / "megatron").rglob("*.py")]):
        content.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    commit = _git_output("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    changed = None if commit is None else _git_output("status", "--porcelain", "--untracked-files=no")
    facts = {"sources": content.hexdigest(), "version": __version__, "commit": commit}
    return to_json_value({**facts, "changed": None if changed is None else bool(changed)})


def _git_output(*words: str) -> str | None:
    """Run git and return its output; None if it fails or takes too long."""
    try:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment_record(machines: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return versions, hosts, devices and environment variables. machines: (host, device) of every rank."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "hosts": dict(Counter(host for host, _ in machines)),
        "devices": dict(Counter(device for _, device in machines)),
        "variables": recorded_environment_variables(),
    }


def data_files_record(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return size and checksums of each dataset's files, by prefix; without a sidecar, hashes of the files' ends."""
    try:
        prefixes = dict.fromkeys(
            prefix for plan in plan_data_splits(config.data) if plan for prefix in plan.blend.prefixes
        )
    except ConfigError as error:  # a script with data of its own
        return {"": {"problem": str(error)}}
    return {prefix: _dataset_record(prefix) for prefix in prefixes if prefix != MOCK_PREFIX}


def _dataset_record(prefix: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    try:
        for path in (bin_path(prefix), idx_path(prefix)) if not Path(prefix).is_file() else (prefix,):
            if is_remote_path(path):
                there = stat_remote_object(path)
                facts[Path(path).suffix] = {"bytes": there.size, "version": there.version}
            else:
                with open(path, "rb") as file:
                    content = xxhash.xxh3_128(file.read(_END_BYTES))
                    size = file.seek(0, 2)
                    file.seek(max(0, size - _END_BYTES))
                    content.update(file.read())
                facts[Path(path).suffix] = {"bytes": size, "ends": content.hexdigest()}
        known = None if Path(prefix).is_file() else sidecar.read_sidecar(prefix)
    except (OSError, DataError) as error:
        return facts | {"problem": str(error)}
    return facts | ({"checksums": dict(known.checksums), "tokens": known.tokens} if known else {})
