"""--save-best: the checkpoint of the best evaluation is saved, linked, and kept through retention and resuming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.run import CheckpointConfig
from megatron.core.dist_checkpointing.checkpoint_folders import iteration_of_best_link
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.parallel.mesh import Axis
from megatron.training.hooks import evaluation
from megatron.training.hooks.evaluation import note_if_best
from megatron.training.state.run import TrainingProgress
from megatron.training.state.trainer import Trainer
from tests.helpers.checkpoints import complete_iterations
from tests.helpers.programme import trained, write_tokens

# iteration -> validation loss: the best is at 3, between two regular saves.
LOSSES = {1: 5.0, 2: float("nan"), 3: 2.0, 4: 4.0, 5: 2.0, 6: 3.0, 7: 2.5}
FLAGS = (
    "--mock-data --train-iters 7 --hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --eval-interval 1 --save-interval 2 "
    "--save-keep-last 1 --save-best loss"
).split()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations give the losses of the table."""

    def losses_of(trainer: Trainer, batches: object, iterations: int) -> dict[str, float]:
        return {"lm loss": LOSSES[trainer.progress.iteration]}

    monkeypatch.setattr(evaluation, "evaluate_loss", losses_of)


def saved_counters(folder: Path) -> dict[str, object]:
    return dict(open_native_checkpoint(folder).values["run.progress"])


def test_the_best_checkpoint_survives_retention_and_is_the_same_in_a_resumed_run(planned: None, tmp_path: Path) -> None:
    trained([*FLAGS, "--save", str(tmp_path / "straight")])
    trained([*FLAGS, "--save", str(tmp_path / "parts"), "--exit-interval", "4"])
    assert complete_iterations(tmp_path / "parts") == [3, 4]
    resumed = trained([*FLAGS, "--save", str(tmp_path / "parts"), "--load", str(tmp_path / "parts")])
    assert (resumed.progress.best_iteration, resumed.progress.best_value) == (3, 2.0)
    assert resumed.progress.best_figure == "min lm loss"
    for folder in (tmp_path / "straight", tmp_path / "parts"):
        assert complete_iterations(folder) == [3, 7] and iteration_of_best_link(folder) == 3
        assert (folder / "best").readlink() == Path("iter_0000003")
    for name in ("best", "iter_0000007"):
        assert saved_counters(tmp_path / "straight" / name) == saved_counters(tmp_path / "parts" / name)
    assert saved_counters(tmp_path / "parts" / "best")["best_iteration"] == 3
    started = trained(
        [*FLAGS, "--pretrained-checkpoint", str(tmp_path / "parts" / "best"), "--save", str(tmp_path / "new")]
    )
    assert (
        started.progress.best_iteration == 3 and iteration_of_best_link(tmp_path / "new") == 3
    )  # its own, not that of its start


def test_the_last_iteration_is_evaluated_before_its_save(
    planned: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSSES, 7, 1.0)
    trained([*FLAGS, "--save", str(tmp_path), "--eval-interval", "3"])
    assert complete_iterations(tmp_path) == [7] and iteration_of_best_link(tmp_path) == 7
    assert saved_counters(tmp_path / "best")["best_value"] == 1.0


def test_the_evaluation_before_the_last_save_is_the_one_at_the_end(tmp_path: Path) -> None:
    logs = []
    for name, words in (("with", FLAGS[-2:]), ("without", [])):
        log = tmp_path / f"{name}.jsonl"
        run = trained(
            [*FLAGS[:-2], *words, "--save", str(tmp_path / name), "--eval-interval", "3", "--log-jsonl", str(log)]
        )
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        found = [(row["iteration"], row.get("final"), row["losses"]) for row in rows if row["kind"] == "validation"]
        logs.append((found, run.progress.consumed_valid_samples))
    assert logs[0] == logs[1] and [iteration for iteration, _, _ in logs[0][0]] == [3, 6, 7, 7]
    assert saved_counters(tmp_path / "with" / "best")["best_value"] == logs[0][0][2][2]["lm loss"]


def better(progress: TrainingProgress, value: float, mode: str | None = None, figure: str = "reward margin") -> bool:
    progress.iteration += 1
    options = CheckpointConfig(save_best=figure, save_best_mode=mode)
    return note_if_best(progress, {"preference loss": -value, "reward margin": value}, options, Axis("world"))


def test_losses_are_minimized_other_figures_maximized_and_a_changed_figure_begins_anew() -> None:
    progress = TrainingProgress()
    assert [better(progress, value) for value in (1.0, 1.0, float("inf"), 2.0, 0.5)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert (progress.best_iteration, progress.best_figure) == (4, "max reward margin")
    assert better(progress, 0.25, "min") and not better(progress, 0.5, "min")
    assert better(progress, 0.1, figure="loss") and progress.best_figure == "min preference loss"
    assert better(progress, 0.2, figure="preference-loss") and progress.best_value == -0.2


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--save-best accuracy: .* no such figure; choose of: lm loss"):
        trained([*FLAGS, "--save", str(tmp_path / "a"), "--save-best", "accuracy"])
    data = [*write_tokens(tmp_path / "tokens"), "--split", "100,0,0"]
    with pytest.raises(ConfigError, match="--save-best: there are no validation data; give them a share in --split"):
        trained([*FLAGS[1:], *data, "--save", str(tmp_path / "b")])
