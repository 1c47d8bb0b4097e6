"""Are these machines fit for this run? Every check is made by all ranks together and gives rows: OK, WARN or FAIL.

    versions devices | kernels numbers | links | clocks limits | data tokenizer checkpoints disk

A check looks on every rank and gathers what each saw, errors too, so that no rank waits for one that failed, and a row
names the ranks whose answer differs. All ranks get the same rows.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.network import unused_kernel_ops
from megatron.core.config.settings.optim import BYTES
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.data_splits import MOCK_PREFIX, plan_data_splits
from megatron.core.datasets.indexed import bin_path, idx_path
from megatron.core.datasets.storage import DataError, file_or_object_size
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, newest_iteration
from megatron.core.kernels.choice.kernel_check import TOLERANCE, try_chosen_kernels, try_usable_kernels
from megatron.core.kernels.choice.table import KernelRequirements, Kernels, kernel_request_flag
from megatron.core.models.describe import count_parameters
from megatron.core.models.flops import training_state_bytes_per_param
from megatron.core.parallel import collectives
from megatron.core.parallel.device import device_name, free_and_total_memory, synchronize
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.tokenizers.base import tokenizer_fingerprint_fields
from megatron.core.tokenizers.build import build_tokenizer
from megatron.training.hooks.run_record import code_version_record
from megatron.verify.compare.contents import bytes_with_unit_text

Status = Literal["OK", "WARN", "FAIL"]
_EXPECTED = (OSError, ConfigError, DataError, CheckpointError, ValueError, ImportError)
_MOST_SKEW = 1.0  # seconds
_LEAST_TEMPORARY, _LEAST_SHARED = 2**30, 64 * 2**20  # bytes; shared memory: for each rank of a machine
_ROUNDS, _SUMS, _MOST_NAMED = 5, 10, 8


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A row of the doctor's report. check: its subject. mend: what to do about it, if it is not OK."""

    check: str
    status: Status
    finding: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class DoctorContext:
    """A run whose machines are checked. hosts: of each rank. whole: the settings keep every rule. megabytes: how much
    each rank sends and writes where rates are measured. all_kernels: also check kernels that the run does not use.
    """

    config: RunConfig
    mesh: Mesh
    kernels: Kernels
    need: KernelRequirements
    hosts: tuple[str, ...]
    whole: bool
    megabytes: int = 16
    all_kernels: bool = False

    def problem_with_ranks_text(self, problems: Sequence[tuple[int, Any]]) -> str:
        """The first of what ranks say, (rank, message), and which ranks have something to say."""
        return f"{problems[0][1]}: on {self.ranks_with_hosts_text([rank for rank, _ in problems])}"

    def ranks_with_hosts_text(self, ranks: Sequence[int]) -> str:
        """Name ranks with their machines."""
        names = [f"{rank} ({self.hosts[rank]})" for rank in ranks[:_MOST_NAMED]] + ["..."] * (len(ranks) > _MOST_NAMED)
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(names)}"


def diagnose_all(subject: DoctorContext) -> list[DoctorFinding]:
    """Run every check and return its rows. Collective."""
    rows: list[DoctorFinding] = []
    for check in CHECKS:
        try:
            rows += check(subject)
        except CheckFailedOnRanks as error:
            name = check.__name__.removeprefix("diagnose_")
            rows.append(DoctorFinding(name, "FAIL", str(error), "the check could not be made there"))
    return rows


class CheckFailedOnRanks(Exception):
    """A check could not be made on some ranks; raised on all of them."""


def diagnose_versions(subject: DoctorContext) -> list[DoctorFinding]:
    """Return rows on whether all ranks run the same software."""
    mine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "our code": code_version_record()["sources"][:12],
    }
    seen = _call_and_gather(subject, lambda: mine)
    rows = [
        _rank_disagreement_finding(
            subject,
            "versions",
            f"{name} differs",
            [(rank, one[name]) for rank, one in seen],
            "install the same on every machine: ranks that compute or speak differently end in wrong numbers or hang",
        )
        for name in mine
        if len({one[name] for _, one in seen}) > 1
    ]
    return rows or [DoctorFinding("versions", "OK", ", ".join(f"{name} {value}" for name, value in mine.items()))]


def diagnose_devices(subject: DoctorContext) -> list[DoctorFinding]:
    """Return rows on whether every rank has a device of its own, all are alike, and their memory is free."""
    device, host = subject.mesh.device, socket.gethostname()
    seen = _call_and_gather(subject, lambda: (host, str(device), device_name(device), free_and_total_memory(device)))
    names = Counter(one[2] for _, one in seen)
    description = f"{' and '.join(f'{count} x {name}' for name, count in names.items())} on {len({one[0] for _, one in seen})} machine(s)"
    mend = "all wait for the slowest in every step; take devices of one kind"
    rows = [DoctorFinding("devices", "WARN", description, mend)] if len(names) > 1 else []
    rows += _gpu_sharing_findings(subject, seen) if device.type == "cuda" else ()
    return rows or [DoctorFinding("devices", "OK", description)]


def _gpu_sharing_findings(subject: DoctorContext, seen: Sequence[tuple[int, Any]]) -> Iterator[DoctorFinding]:
    """What else uses the GPUs. seen: (rank, (host, device, its name, free and all memory))."""
    places = Counter(one[:2] for _, one in seen)
    if shared := [f"{host} {name}" for (host, name), count in places.items() if count > 1]:
        result = f"several ranks share {', '.join(shared)}"
        yield DoctorFinding("devices", "FAIL", result, "start as many ranks as a machine has GPUs")
    if full := [rank for rank, one in seen if one[3] is not None and one[3][0] < 0.9 * one[3][1]]:
        result = f"a tenth of the memory or more is taken on {subject.ranks_with_hosts_text(full)}"
        yield DoctorFinding("devices", "WARN", result, "end what else runs there")


def diagnose_kernel_choice(subject: DoctorContext) -> list[DoctorFinding]:
    """Return a row for each op: the kernel that serves it, and why not a better one."""
    return [
        DoctorFinding("kernels", "OK", f"{op} by {name}" + (f"; not by {why}" if why else ""))
        for op, name, why in subject.kernels.report
        if op not in unused_kernel_ops(subject.config.model)
    ]


def diagnose_kernel_accuracy(subject: DoctorContext) -> Iterator[DoctorFinding]:
    """Yield rows on whether every kernel computes what its op is defined to be, forward and backward, on every rank."""
    names = {op: name for op, name, _ in subject.kernels.report}

    def kernel_errors() -> dict[tuple[str, str], float | str]:
        run = subject.config, subject.need, subject.mesh.device
        chosen = {
            (op, names.get(op, "torch")): error for op, error in try_chosen_kernels(subject.kernels, *run).items()
        }
        return (try_usable_kernels(*run) if subject.all_kernels else {}) | chosen

    seen = _call_and_gather(subject, kernel_errors)
    limit = TOLERANCE[subject.need.dtype]
    for op, name in seen[0][1] if seen else ():
        results = [(rank, one[op, name]) for rank, one in seen]
        wrong = [(rank, result) for rank, result in results if isinstance(result, str) or result > limit]
        what = f"{op} by {name} in {str(subject.need.dtype).removeprefix('torch.')}"
        if not wrong:
            gap = max(result for _, result in results)
            yield DoctorFinding("numbers", "OK", f"{what}: within {gap:.2g} of the definition")
            continue
        worst = wrong[0][1]
        if not isinstance(worst, str):
            worst = f"off by {max(result for _, result in wrong):.2g} of the largest value"
        result = f"{what}: {worst}, {limit:g} allowed, on {subject.ranks_with_hosts_text([rank for rank, _ in wrong])}"
        mend = f"choose another than {kernel_request_flag(op, name)}, or " if op in names else ""
        yield DoctorFinding("numbers", "FAIL", result, f"{mend}test the device and its driver")


def diagnose_links(subject: DoctorContext) -> list[DoctorFinding]:
    """Return rows with latency and rate of an all-reduce over each axis of several ranks, and whether its sum is right."""
    mesh, rows, known = subject.mesh, [], set()
    for name in (field.name for field in fields(Mesh) if field.name not in ("device", "hybrid_cp", "pp_backward")):
        axis = mesh.axis(name)
        groups = {ranks for ranks in collectives.gather_objects(axis.ranks, mesh.world) if len(ranks) > 1}
        if groups and frozenset(groups) not in known:
            known.add(frozenset(groups))
            rows.append(_diagnose_axis(subject, axis))
    return rows or [DoctorFinding("links", "OK", "one rank: nothing to send")]


def diagnose_clock_skew(subject: DoctorContext) -> list[DoctorFinding]:
    """Return a row on how far the clocks of the ranks differ."""
    ticks = []
    for _ in range(_ROUNDS):
        collectives.barrier(subject.mesh.world)
        ticks.append(time.time())
    rounds = list(zip(*collectives.gather_objects(ticks, subject.mesh.world)))  # [round][rank]
    ahead = [statistics.median(times[rank] - times[0] for times in rounds) for rank in range(len(rounds[0]))]
    skew = max(ahead) - min(ahead)
    result = f"apart by {skew:.3f} s at most"
    if skew <= _MOST_SKEW:
        return [DoctorFinding("clocks", "OK", result)]
    result += f": rank {ahead.index(max(ahead))} is ahead of rank {ahead.index(min(ahead))}"
    mend = "set the clocks by NTP: logs and time limits of different machines do not fit together"
    return [DoctorFinding("clocks", "WARN", result, mend)]


def diagnose_system_limits(subject: DoctorContext) -> Iterator[DoctorFinding]:
    """Yield rows on open files, shared memory and temporary space on every machine."""
    mesh, host = subject.mesh, socket.gethostname()

    def own_system_limits() -> tuple[str, int, int | None, int]:
        shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None
        return (
            host,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            shared,
            shutil.disk_usage(tempfile.gettempdir()).free,
        )

    seen = _call_and_gather(subject, own_system_limits)
    each = Counter(one[0] for _, one in seen)
    files = 256 + 8 * mesh.world.size + 2 * len(_dataset_prefixes(subject.config))
    needs = (
        ("open files", 1, lambda one: files, "raise `ulimit -n`", str),
        (
            "shared memory",
            2,
            lambda one: _LEAST_SHARED * each[one[0]],
            "give the container more (--shm-size), for NCCL's sake",
            bytes_with_unit_text,
        ),
        (
            f"space in {tempfile.gettempdir()}",
            3,
            lambda one: _LEAST_TEMPORARY,
            "empty it, or let TMPDIR name another folder",
            bytes_with_unit_text,
        ),
    )
    for name, place, least, mend, explanation in needs:
        values = [(rank, one[place], least(one)) for rank, one in seen if one[place] is not None]
        low = [rank for rank, there, needed in values if there < needed and there != resource.RLIM_INFINITY]
        if values:
            lowest = min(there for _, there, _ in values)
            below = f", below {explanation(values[0][2])} on {subject.ranks_with_hosts_text(low)}" if low else ""
            result = f"{name}: {explanation(lowest)}{below}"
            yield DoctorFinding("limits", "WARN" if low else "OK", result, mend if low else "")


def diagnose_same_data_files(subject: DoctorContext) -> Iterator[DoctorFinding]:
    """Yield rows on whether every rank sees the same data files."""
    prefixes = _dataset_prefixes(subject.config)
    if not prefixes:
        yield DoctorFinding("data", "OK", "none asked for")
        return

    def local_data_file_sizes() -> dict[str, int | str]:
        hashes: dict[str, int | str] = {}
        for path in (
            path
            for prefix in prefixes
            for path in ((prefix,) if Path(prefix).is_file() else (bin_path(prefix), idx_path(prefix)))
        ):
            try:
                hashes[path] = file_or_object_size(path)
            except _EXPECTED as error:
                hashes[path] = str(error)
        return hashes

    seen = _call_and_gather(subject, local_data_file_sizes)
    good = True
    for path in dict.fromkeys(path for _, one in seen for path in one):
        sizes = [(rank, one.get(path, "not looked for: here the prefix is a file of its own")) for rank, one in seen]
        lost = [(rank, size) for rank, size in sizes if isinstance(size, str)]
        differ = not lost and len({size for _, size in sizes}) > 1
        good = good and not lost and not differ
        if lost:
            mend = "mount the folder there, under the same path"
            yield DoctorFinding("data", "FAIL", subject.problem_with_ranks_text(lost), mend)
        elif differ:
            mend = "bring the same files to all machines"
            yield _rank_disagreement_finding(subject, "data", f"bytes of {path} differ", sizes, mend)
    if good:
        yield DoctorFinding("data", "OK", f"{len(seen[0][1])} files, on every rank")


def diagnose_same_tokenizer(subject: DoctorContext) -> list[DoctorFinding]:
    """Return a row on whether every rank reads the same tokenizer."""
    if not subject.whole:
        return []
    return _diagnose_agreement(
        subject,
        "tokenizer",
        lambda: tokenizer_fingerprint_fields(build_tokenizer(subject.config.tokenizer))["hash"],
        lambda hash: f"hash {hash[:12]}, on every rank",
        "bring the same tokenizer files to all machines",
    )


def diagnose_shared_checkpoints(subject: DoctorContext) -> list[DoctorFinding]:
    """Return rows on whether every rank sees the same checkpoint to load, and one folder to save into."""
    requested, rows = subject.config.checkpoint, []
    load = requested.load
    if load:
        rows = _diagnose_agreement(
            subject,
            "checkpoints",
            lambda: newest_iteration(load, requested.ckpt_step),
            lambda iteration: (
                f"--load {requested.load}: "
                + ("none of ours yet" if iteration is None else f"newest is of iteration {iteration}")
            ),
            "mount the folder on all machines, under the same path",
        )
    if requested.save:
        rows += _diagnose_shared_folder(subject, Path(requested.save))
    return rows


def diagnose_disk(subject: DoctorContext) -> list[DoctorFinding]:
    """Return a row on how fast all ranks together write into --save, and whether two checkpoints fit there."""
    folder = subject.config.checkpoint.save
    if folder is None:
        return []
    path, content = Path(folder) / f"doctor-{uuid.uuid4().hex}", bytes(2**20)

    def time_test_write() -> float:
        since = time.perf_counter()
        try:
            with open(path, "wb", buffering=0) as file:
                for _ in range(subject.megabytes):
                    file.write(content)
                os.fsync(file.fileno())
            return time.perf_counter() - since
        finally:
            path.unlink(missing_ok=True)

    collectives.barrier(subject.mesh.world)
    seen, problems = _values_and_errors_of_all_ranks(subject, time_test_write)
    if problems:
        result = f"--save {folder} cannot be written: {subject.problem_with_ranks_text(problems)}"
        return [DoctorFinding("disk", "FAIL", result, "let every rank write there: each saves its part")]
    rate = subject.megabytes * 2**20 * len(seen) / max(seconds for _, seconds in seen)
    free = shutil.disk_usage(folder).free
    result, mend = (
        f"{bytes_with_unit_text(rate)}/s from {len(seen)} rank(s), {bytes_with_unit_text(free)} free in --save",
        "",
    )
    status: Literal["OK", "WARN", "FAIL"] = "OK"
    if subject.whole and subject.config.model.padded_vocab_size:
        size = count_parameters(subject.config.model).total * (
            training_state_bytes_per_param(subject.config) - BYTES[subject.config.precision.gradient_dtype_name]
        )
        result += f"; a checkpoint takes about {bytes_with_unit_text(size)} and {size / rate:.0f} s"
        if free < 2 * size:
            status = "FAIL" if free < size else "WARN"
            mend = "two must fit, since the old one is kept until the new one is whole; see --save-keep-last"
    return [DoctorFinding("disk", status, result, mend)]


CHECKS: tuple[Callable[[DoctorContext], Iterable[DoctorFinding]], ...] = (
    diagnose_versions,
    diagnose_devices,
    diagnose_kernel_choice,
    diagnose_kernel_accuracy,
    diagnose_links,
    diagnose_clock_skew,
    diagnose_system_limits,
    diagnose_same_data_files,
    diagnose_same_tokenizer,
    diagnose_shared_checkpoints,
    diagnose_disk,
)


def _values_and_errors_of_all_ranks(
    subject: DoctorContext, look: Callable[[], Any]
) -> tuple[list[tuple[int, Any]], list[tuple[int, str]]]:
    """Call `look` on every rank and gather ([(rank, value)], [(rank, problem)] of expected errors). Collective."""
    value, problem = None, ""
    try:
        value = look()
    except _EXPECTED as error:
        problem = str(error) or type(error).__name__
    answers = list(enumerate(collectives.gather_objects((value, problem), subject.mesh.world)))
    return [(rank, value) for rank, (value, problem) in answers if not problem], [
        (rank, problem) for rank, (_, problem) in answers if problem
    ]


def _call_and_gather(subject: DoctorContext, look: Callable[[], Any]) -> list[tuple[int, Any]]:
    """Call `look` on every rank and return [(rank, value)]; `CheckFailedOnRanks` if one failed. Collective."""
    seen, problems = _values_and_errors_of_all_ranks(subject, look)
    if problems:
        raise CheckFailedOnRanks(subject.problem_with_ranks_text(problems))
    return seen


def _diagnose_agreement(
    subject: DoctorContext, check: str, look: Callable[[], Any], describe: Callable[[Any], str], mend: str
) -> list[DoctorFinding]:
    """Return a row on whether `look` gives the same value on all ranks. describe: value -> finding. Collective."""
    seen, problems = _values_and_errors_of_all_ranks(subject, look)
    if problems:
        return [DoctorFinding(check, "FAIL", subject.problem_with_ranks_text(problems), mend)]
    if len({value for _, value in seen}) > 1:
        described = [(rank, describe(value)) for rank, value in seen]
        return [_rank_disagreement_finding(subject, check, "ranks see different ones", described, mend)]
    return [DoctorFinding(check, "OK", describe(seen[0][1]))]


def _rank_disagreement_finding(
    subject: DoctorContext, check: str, what: str, values: Sequence[tuple[int, Any]], mend: str
) -> DoctorFinding:
    """Return a FAIL row that says which ranks have which value."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    each = "; ".join(f"{value} on {subject.ranks_with_hosts_text(those)}" for value, those in ranks.items())
    return DoctorFinding(check, "FAIL", f"{what}: {each}", mend)


def _diagnose_axis(subject: DoctorContext, axis: Axis) -> DoctorFinding:
    """Return the row of one axis: latency and rate of an all-reduce, and whether its sum is right. Collective."""
    mesh, size = subject.mesh, axis.size
    word = torch.full((1,), float(axis.rank + 1), device=mesh.device)
    right = collectives.all_reduce(word.clone(), axis).item() == size * (size + 1) / 2
    latency = _measure_all_reduce_seconds(subject, axis, word, _SUMS)
    block = torch.zeros(subject.megabytes * 2**18, device=mesh.device)
    seconds = _measure_all_reduce_seconds(subject, axis, block, 2)
    answers = collectives.gather_objects((axis.ranks, right, latency, seconds), mesh.world)
    many = [answer for answer in answers if len(answer[0]) > 1]
    moved = block.numel() * 4 * 2 * (1 - 1 / max(len(answer[0]) for answer in many))  # by each rank, in a ring
    slowest, fastest = (choice(many, key=lambda answer: answer[3]) for choice in (max, min))
    result = (
        f"{axis.name}, {len(many[0][0])} ranks: {statistics.median(answer[2] for answer in many) * 1e6:.0f} us a sum, "
        f"{bytes_with_unit_text(moved / slowest[3])}/s"
    )
    wrong = sorted({ranks for ranks, right, _, _ in many if not right})
    if wrong:
        result = f"{axis.name}: the sum over {subject.ranks_with_hosts_text(wrong[0])} is wrong"
        return DoctorFinding("links", "FAIL", result, "test the network and its driver")
    if slowest[3] > 2 * fastest[3]:
        result += f" among {subject.ranks_with_hosts_text(slowest[0])}, {bytes_with_unit_text(moved / fastest[3])}/s among {subject.ranks_with_hosts_text(fastest[0])}"
        return DoctorFinding("links", "WARN", result, "look at the cables, switches and NCCL settings of the slow ones")
    return DoctorFinding("links", "OK", result)


def _measure_all_reduce_seconds(subject: DoctorContext, axis: Axis, tensor: torch.Tensor, times: int) -> float:
    """Return the seconds of one all-reduce of a tensor over an axis, mean of `times`."""
    collectives.all_reduce(tensor.clone(), axis)
    target = tensor.clone()
    synchronize(subject.mesh.device)
    collectives.barrier(subject.mesh.world)
    since = time.perf_counter()
    for _ in range(times):
        collectives.all_reduce(target, axis)
    synchronize(subject.mesh.device)
    return (time.perf_counter() - since) / times


def _diagnose_shared_folder(subject: DoctorContext, folder: Path) -> list[DoctorFinding]:
    """Return a row on whether what the first rank writes into a folder is seen by all. Collective."""
    mark = collectives.broadcast_object(folder / f"doctor-{uuid.uuid4().hex}", subject.mesh.world)

    def touch_marker_file() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if subject.mesh.world.is_first:
            mark.touch()

    _, problems = _values_and_errors_of_all_ranks(subject, touch_marker_file)
    seen, _ = _values_and_errors_of_all_ranks(subject, mark.exists)
    collectives.barrier(subject.mesh.world)
    if subject.mesh.world.is_first:
        mark.unlink(missing_ok=True)
    blind = [rank for rank, there in seen if not there]
    mend = "give --save a folder that all machines share and may write"
    if problems:
        return [
            DoctorFinding("checkpoints", "FAIL", f"--save {folder}: {subject.problem_with_ranks_text(problems)}", mend)
        ]
    if blind:
        result = f"--save {folder}: what rank 0 writes is not seen by {subject.ranks_with_hosts_text(blind)}"
        return [DoctorFinding("checkpoints", "FAIL", result, mend)]
    return [DoctorFinding("checkpoints", "OK", f"--save {folder}: one folder for all ranks")]


def _dataset_prefixes(config: RunConfig) -> list[str]:
    """Return the prefixes of the datasets that the run reads; empty if the settings break rules."""
    try:
        prefixes = dict.fromkeys(
            prefix for plan in plan_data_splits(config.data) if plan for prefix in plan.blend.prefixes
        )
    except ConfigError:  # the rules tell
        return []
    return [prefix for prefix in prefixes if prefix != MOCK_PREFIX]
