"""The evidence of a bad step: a folder with all that is needed to look at it and to repeat it elsewhere.

    FAULTS/step-00000120/
        step.json              what was bad, the whole config, counters before the step, losses, and of each parameter the
                               norms of gradient and weight and how many of their elements are not finite
        data-00003-00.pt       the microbatches of data rank 3, context rank 0: samples' numbers and all their arrays; and the
                               rank that read them
        random-00005.pt        the random streams of rank 5 when the step began
        weights/               with --failure-dump-weights, the weights before the step, as a checkpoint

Without weights, step.json names the checkpoint that lies closest before the step. `megatron replay` reads it all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.flags.declare import config_to_flat_dict
from megatron.core.dist_checkpointing.checkpoint_folders import SavedRunConfig, scan_checkpoint_folder
from megatron.core.dist_checkpointing.saver import CheckpointSaver, SavePolicy
from megatron.core.optimizer.clip import gradient_ranges_counted_once, without_tied_duplicates
from megatron.core.parallel import collectives
from megatron.training.checkpoint.run_state import weights_of
from megatron.training.state.batch import Batch
from megatron.training.state.step import StepWork
from megatron.training.state.trainer import Trainer

STEP, WEIGHTS = "step.json", "weights"


def dumped_batch_file_name(data_rank: int, context_rank: int) -> str:
    """Return the name of the file with the microbatches that these ranks read."""
    return f"data-{data_rank:05d}-{context_rank:02d}.pt"


def dumped_rng_file_name(rank: int) -> str:
    """Return the name of the file with the random streams of a rank."""
    return f"random-{rank:05d}.pt"


def write_failure_dump(
    folder: Path,
    work: StepWork,
    problem: str,
    *,
    losses: Mapping[str, float],
    norm: float,
    streams: Mapping[str, Tensor],
) -> str:
    """Write the failure dump of the step that `work` has just run, before its update. Collective.
    Return in words where it is and the worst parameters. Gradients must be reduced and finalized. norm: a scalar;
    streams: states of random generators, uint8 [bytes]. What cannot be written is reported and raises nothing.
    """
    trainer, mesh = work.trainer, work.trainer.run.mesh
    target = folder / f"step-{trainer.progress.iteration + 1:08d}"
    table, worst = weight_and_gradient_norms(work)
    failure = ""
    try:
        target.mkdir(parents=True, exist_ok=True)
        torch.save(dict(streams), target / dumped_rng_file_name(mesh.world.rank))
        if mesh.tp.is_first and mesh.pp.is_first:
            batches = [_dumpable_batch(batch) for batch in work.taken_microbatches]
            read = {"rank": mesh.world.rank, "microbatches": batches}
            torch.save(read, target / dumped_batch_file_name(mesh.dp.rank, mesh.cp.rank))
        if mesh.world.is_first:
            record = _bad_step_record(work, problem, losses, norm) | {"parameters": table}
            (target / STEP).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except (OSError, RuntimeError) as error:  # torch.save's on a full disk is the latter
        failure = f"rank {mesh.world.rank}: {error}"
    failures = list(filter(None, collectives.gather_objects(failure, mesh.world)))
    if not failures and trainer.run.config.faults.failure_dump_weights:
        failures = _save_weights(trainer, target)
    message = f"the evidence is in {target}"
    if failures:
        message = f"the evidence could not be written to {target}: {failures[0]}"
    return f"{worst}; {message}" if worst else message


def weight_and_gradient_norms(work: StepWork) -> tuple[dict[str, dict[str, float]], str]:
    """Return (parameter name -> norms of gradient and weight and numbers of their non-finite elements, non-finite ones
    in words). Collective; the same on all ranks.
    """
    trainer, mesh = work.trainer, work.trainer.run.mesh
    factor = float(work.remaining_gradient_scale()) / trainer.optimizer.scaler.scale
    measures: dict[str, list[float]] = {}
    for segment in without_tied_duplicates(trainer.optimizer.segments):
        row = measures.setdefault(segment.name, [0.0, 0, 0.0, 0])
        for low, high in gradient_ranges_counted_once(segment, mesh):
            for place, values in ((0, segment.grad[low:high].double() * factor), (2, segment.data[low:high].double())):
                row[place] += float(values.square().nansum())
                row[place + 1] += int((~values.isfinite()).sum())
    whole: dict[str, list[float]] = {}
    for rows in collectives.gather_objects(measures, mesh.world):
        for name, row in rows.items():
            whole[name] = [a + b for a, b in zip(whole.get(name, (0.0, 0, 0.0, 0)), row, strict=True)]
    keys = ("gradient_norm", "gradient_not_finite", "weight_norm", "weight_not_finite")
    table = {
        name: dict(zip(keys, (math.sqrt(row[0]), row[1], math.sqrt(row[2]), row[3]), strict=True))
        for name, row in sorted(whole.items())
    }
    words = []
    for what in ("weight", "gradient"):
        if bad := [name for name, row in table.items() if row[f"{what}_not_finite"]]:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            words.append(f"{what}s that are not finite: {', '.join(bad[:3])}{more}")
    return table, "; ".join(words)


def _bad_step_record(work: StepWork, problem: str, losses: Mapping[str, float], norm: float) -> dict[str, Any]:
    """Return what step.json says of the step: problem, losses, counters, nearest checkpoint, config."""
    trainer, config = work.trainer, work.trainer.run.config
    here = config.checkpoint.save or config.checkpoint.load
    steps = scan_checkpoint_folder(here).steps if here else ()
    earlier = [step for step in steps if step.iteration <= trainer.progress.iteration]
    newest = max(earlier, key=lambda step: step.iteration, default=None)
    return {
        "iteration": trainer.progress.iteration + 1,
        "problem": problem,
        "losses": dict(losses),
        "gradient_norm": norm,
        "loss_scale": trainer.optimizer.scaler.scale,
        "world_size": trainer.run.mesh.world.size,
        "microbatches": work.own_microbatches,
        "progress": asdict(trainer.progress),
        "checkpoint": None if newest is None else {"folder": str(newest.folder), "iteration": newest.iteration},
        "config": config_to_flat_dict(config),
    }


def _dumpable_batch(batch: Batch) -> dict[str, Any]:
    """Return a microbatch as plain values and CPU tensors."""
    arrays: dict[str, Any] = {
        "samples": list(batch.samples) if batch.samples is not None else None,
        "extras": {name: rows.cpu() for name, rows in batch.extras.items()},
    }
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return arrays | {
        name: rows.cpu() for name, rows in tensors.items() if isinstance(rows, Tensor) and name != "hidden"
    }


def _save_weights(trainer: Trainer, target: Path) -> list[str]:
    """Save the weights as a checkpoint in `target`; return the problems. Collective."""
    mesh = trainer.run.mesh
    state = {name: placed for name, placed in weights_of(trainer, rounded=True).items() if not placed.receivers}
    state["run.progress"] = asdict(trainer.progress)
    saver = CheckpointSaver(str(target / WEIGHTS), mesh.world, rules=SavePolicy(), device=mesh.device)
    saver.start(
        state, trainer.progress.iteration, SavedRunConfig(config_to_flat_dict(trainer.run.config), mesh.world.size)
    )
    outcome = saver.finish()
    return [] if outcome is None else list(outcome.problems)
