"""Which evaluation of a run was the best (`--save-best`), so that its checkpoint is kept.

Value, iteration and figure are among the run's counters: a run that resumes goes on with the best of the run that it continues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron.core.config.figures import match_metric_name
from megatron.core.config.flags import ConfigError
from megatron.core.config.settings.run import CheckpointConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.training.run import TrainingProgress


def require_save_best_metric(word: str, names: Sequence[str]) -> str:
    """Return the metric among `names` that --save-best `word` means (`match_metric_name`); `ConfigError` if there is none."""
    figure = match_metric_name(word, names)
    if figure is None:
        raise ConfigError(
            f"--save-best {word}: evaluations of this run give no such figure; choose of: {', '.join(names)}"
        )
    return figure


def note_if_best(
    progress: TrainingProgress, losses: Mapping[str, float], options: CheckpointConfig, world: Axis
) -> bool:
    """Record an evaluation in `progress` if its --save-best metric is better than all before; return whether it was.
    Collective. NaN and inf are never better; if metric or direction differ from those recorded, this evaluation is the
    first.
    """
    assert options.save_best is not None, "only runs with --save-best look for the best evaluation"
    figure = require_save_best_metric(options.save_best, list(losses))
    mode = options.save_best_mode or ("min" if figure.endswith("loss") else "max")
    value, described = collectives.broadcast_object(losses[figure], world), f"{mode} {figure}"
    if not math.isfinite(value):
        return False
    if progress.best_value is not None and progress.best_figure == described:
        if not (value < progress.best_value if mode == "min" else value > progress.best_value):
            return False
    progress.best_iteration, progress.best_value, progress.best_figure = progress.iteration, value, described
    return True
