"""The loss picture and the unigram entropy: what is read from a log, what is drawn, and what is said of a bad log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.cli.commands import plot_loss, unigram_entropy
from megatron.core.config.settings.run import LogConfig
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.training.hooks.writers import Writers
from megatron.training.report.metrics import StepMetrics

PNG = b"\x89PNG"


def write_log(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def step(iteration: int, loss: float) -> dict[str, Any]:
    return {"kind": "step", "iteration": iteration, "losses": {"lm loss": loss}}


def start(iteration: int) -> dict[str, Any]:
    return {"kind": "start", "iteration": iteration}


def test_a_log_of_the_training_programme_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    writers = Writers(LogConfig(log_jsonl=str(log)), speaks=True, console=lambda text: None)
    losses = [3.0, 2.5, 2.25]
    writers.write_steps(
        [StepMetrics(number, number * 4, 4, 0.1, {"lm loss": loss}) for number, loss in enumerate(losses, start=1)]
    )
    writers.write_validation({"lm loss": 2.75}, iteration=2, consumed_samples=8)
    writers.write_validation({"lm loss": 9.0}, iteration=3, consumed_samples=12, final="test")
    writers.close()
    curves = plot_loss.read_loss_curves(log, "lm loss")
    assert curves.train == list(enumerate(losses, start=1))
    assert curves.valid == [(2, 2.75)], "the test set is no point of the validation curve"
    assert curves.resumed == []


def test_steps_that_a_resumed_run_took_again_count_as_written_last(tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "log.jsonl",
        [start(0), step(1, 5.0), step(2, 4.0), step(3, 99.0), step(4, 98.0), start(2), step(3, 3.0)],
    )
    curves = plot_loss.read_loss_curves(log, "lm loss")
    assert curves.train == [(1, 5.0), (2, 4.0), (3, 3.0)]
    assert curves.resumed == [2]


def test_a_loss_that_is_not_finite_leaves_a_gap_and_no_error(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [step(1, 5.0), {**step(2, 0), "losses": {"lm loss": "nan"}}, step(3, 4.0)])
    plot_loss.main([str(log), "--output", str(tmp_path / "x.png")])
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


def test_the_running_mean_is_over_the_last_points() -> None:
    assert plot_loss.moving_average([(1, 4.0), (2, 2.0), (3, 6.0)], 2) == [(1, 4.0), (2, 3.0), (3, 4.0)]


def test_the_picture_holds_every_curve_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validation = {"kind": "validation", "iteration": 2, "losses": {"lm loss": 4.5}}
    one = write_log(tmp_path / "one.jsonl", [start(0), step(1, 5.0), step(2, 4.0), validation, start(2), step(3, 3.5)])
    two = write_log(tmp_path / "two.jsonl", [step(1, 5.5)])
    curves = [plot_loss.read_loss_curves(path, "lm loss") for path in (one, two)]
    figure = plot_loss.draw_loss_curves(curves, "lm loss", [("unigram entropy", 6.886)])
    (axes,) = figure.axes
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert labels == {"one: training", "one: validation", "one: resumed", "two: training", "unigram entropy 6.89"}
    assert [6.886, 6.886] in [list(line.get_ydata()) for line in axes.get_lines()]
    picture = tmp_path / "loss.png"
    plot_loss.main([str(one), str(two), "--output", str(picture), "--line", "level", "6.9"])
    assert picture.read_bytes().startswith(PNG)
    assert str(picture) in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, loss, said",
    [
        ('{"kind": "step", "iteration": 1, "losses": {"lm loss": 1}}\n', "mlm loss", "it has lm loss"),
        ("", "lm loss", "no losses at all"),
        ('{"kind": "start", "iteration": 0}\n{"kind"\n', "lm loss", "line 2 is not JSON"),
    ],
)
def test_a_log_that_cannot_be_drawn_is_explained(tmp_path: Path, text: str, loss: str, said: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=said):
        plot_loss.main([str(log), "--loss", loss, "--output", str(tmp_path / "x.png")])
    assert not (tmp_path / "x.png").exists()


def write_tokens(prefix: Path, documents: Sequence[Sequence[int]]) -> str:
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for document in documents:
            builder.add_sequence(document)
            builder.end_document()
    return str(prefix)


def test_equally_common_tokens_have_the_entropy_of_a_fair_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_tokens(tmp_path / "even", [[0, 1, 2, 3], [7, 7, 300, 300, 0, 1, 2, 3], []])
    unigram_entropy.main(["--quiet", prefix])
    assert float(capsys.readouterr().out) == pytest.approx(math.log(6), abs=1e-4)


def test_the_entropy_is_the_mean_surprise_of_the_tokens(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 40, 500) ** 2 // 40
    prefix = write_tokens(tmp_path / "some", [tokens[:200].tolist(), tokens[200:].tolist()])
    surprise = [-math.log(np.mean(tokens == token)) for token in tokens]
    assert unigram_entropy.entropy_of_counts(unigram_entropy.count_tokens_by_id(prefix)) == pytest.approx(
        np.mean(surprise)
    )


def test_a_missing_or_empty_token_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothere"):
        unigram_entropy.main([str(tmp_path / "nothere")])
    with pytest.raises(SystemExit, match="holds no tokens"):
        unigram_entropy.main([write_tokens(tmp_path / "empty", [[]])])
