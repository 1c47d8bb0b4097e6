"""How far a run of Megatron had come, and how many updates its optimizer has made: counters of any of its formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.families.megatron.pickles import attributes_of_inert


def parameter_of_state_name(name: str) -> str:
    """Return the parameter that a name in a saved state, model.<parameter> or optimizer.<slot>.<parameter>, refers to."""
    return name.split(".", 2)[2] if name.startswith("optimizer.") else name.removeprefix("model.")


def saved_training_counters(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters that a run resumes from, as far as they are known; {} without iteration or samples.

    common: what a checkpoint holds beside tensors.
    """
    arguments = attributes_of_inert(common.get("args"))
    iteration = common.get("iteration")
    samples = arguments.get("consumed_train_samples")
    if not isinstance(iteration, int) or not isinstance(samples, int):
        return {}
    skipped = arguments.get("skipped_train_samples") or 0
    values: dict[str, Any] = {
        "run.progress": {
            "iteration": iteration,
            "consumed_train_samples": samples,
            "skipped_train_samples": skipped,
            "consumed_valid_samples": arguments.get("consumed_valid_samples") or 0,
            "schedule_samples": samples - skipped,
            "consumed_tokens": samples * int(arguments.get("seq_length") or 0),
            "floating_point_operations": int(common.get("num_floating_point_operations_so_far") or 0),
        }
    }
    steps = set(_step_counts_in_state(common.get("optimizer")))
    if len(steps) == 1:
        values["run.optimizer_steps"] = steps.pop()
    return values


def _step_counts_in_state(value: Any) -> Iterator[int]:
    """Yield every number of updates found in an optimizer's state, of groups or parameters."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name in ("step", "common_step"):
                yield int(item)
            elif isinstance(item, (Mapping, list, tuple)):
                yield from _step_counts_in_state(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, (Mapping, list)):
                yield from _step_counts_in_state(item)
