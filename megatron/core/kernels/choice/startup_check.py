"""The kernels of a run, after a trial of the defaults that are to be tried on every machine.

    select_kernels                the formula, for what was not tried
    select_kernels_with_trials    the same, where a default kernel fits: each is compiled and compared with its op's definition on a small
                                  input, forward and backward (`kernel_check.py`); one that fails is named, and the next candidate taken

A kernel that is asked for by name is not tried here, and never replaced; `megatron doctor` tries all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megatron.core.config.settings.run import RunConfig
from megatron.core.kernels.choice.table import (
    CANDIDATES,
    KernelCandidate,
    KernelRequirements,
    Kernels,
    kernel_request_flag,
    select_kernels,
)

Checks = list[tuple[str, str, str]]  # (op, name, problem or "")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels of a run, the requirements they were chosen for, and a warning line for each default kernel that
    failed its trial.
    """

    kernels: Kernels
    need: KernelRequirements
    failures: tuple[str, ...] = ()


def select_kernels_with_trials(
    config: RunConfig,
    need: KernelRequirements,
    device: torch.device,
    *,
    wishes: dict[str, str] | None = None,
    gather: Callable[[Checks], list[Checks]] = lambda checks: [checks],
    candidates: tuple[KernelCandidate, ...] = CANDIDATES,
) -> KernelChoice:
    """Choose the kernels of a run as `select_kernels` does, but take defaults that are to be tried only if they pass a
    trial on this device.

    wishes: op -> kernel name, "auto", or "" for ops not needed; None: as the config says. gather: takes this rank's
    trial results and returns those of all ranks, so that all ranks choose the same. Raises `ConfigError` if a requested
    kernel cannot be used.
    """
    wishes = config.model.all_requested_kernels if wishes is None else wishes
    checks = dict[tuple[str, str], str]()
    for op, name, problem in (
        one for rank in gather(try_default_kernels(config, need, device, wishes, candidates)) for one in rank
    ):
        checks[op, name] = checks.get((op, name)) or problem
    need = replace(need, checks=tuple((*names, problem) for names, problem in checks.items()))
    kernels = select_kernels(need, wishes, candidates)
    taken = {op: name for op, name, _ in kernels.report}
    failures = (
        f"WARNING: {kernel_request_flag(op, name)} is no default here, {op} is by {taken[op]}: {problem}"
        for op, name, problem in need.checks
        if problem
    )
    return KernelChoice(kernels, need, tuple(failures))


def try_default_kernels(
    config: RunConfig,
    need: KernelRequirements,
    device: torch.device,
    wishes: dict[str, str],
    candidates: tuple[KernelCandidate, ...],
) -> Checks:
    """Try every kernel of this run that is a default if it passes its trial. Return (op, kernel name, problem) for each
    one tried; problem: why it failed, "" if it passed.
    """
    waiting = [
        one
        for one in candidates
        if one.checked
        and wishes.get(one.op, "auto") == "auto"
        and not one.unsupported_reason(need)
        and not one.unasked(need)
    ]
    if not waiting:
        return []
    # Small inputs for every op, which most machines with a CPU alone never need.
    from megatron.core.kernels.choice import kernel_check

    trials, limit, checks = (
        {trial.op: trial for trial in kernel_check.trials_for_ops_of_run(config, need)},
        kernel_check.TOLERANCE[need.dtype],
        [],
    )
    for one in waiting:
        if one.op in trials:
            error = kernel_check.trial_error_or_exception(trials[one.op], one, device, need)
            if isinstance(error, str):
                problem = f"its trial failed, {error}"
            else:
                problem = "" if error <= limit else f"it was off by {error:.2g} of the largest value, {limit:g} allowed"
            checks.append((one.op, one.name, problem))
    return checks
