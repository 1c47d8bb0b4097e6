"""Writers: which names and points reach each place, under which switch."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.io import gfile

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.run import LogConfig
from megatron.core.dist_checkpointing.saver import SaveOutcome
from megatron.training.hooks import writers as writers_module
from megatron.training.hooks.writers import Writers
from megatron.training.report import run_log as run_log
from megatron.training.report.metrics import IntervalReport, StepMetrics, Throughput

STEPS = [
    StepMetrics(
        iteration=k,
        consumed_samples=8 * k,
        batch_size=8,
        learning_rate=0.1 * k,
        losses={"lm loss": 5.0 - k},
        loss_scale=4.0,
        grad_norm=0.5 * k,
    )
    for k in (1, 2, 3, 4)
]
REPORT = IntervalReport(
    last=STEPS[-1],
    train_iters=100,
    skipped_samples=16,
    seconds_per_iteration=0.25,
    losses={"lm loss": 2.5},
    skipped_iterations=0,
    nan_iterations=0,
    throughput=Throughput(32.0, 3200.0, 7.0, 8.0),
)


@pytest.fixture
def shown():
    return []


def make(shown, speaks=True, world_size=8, **fields):
    return Writers(LogConfig(**fields), speaks=speaks, world_size=world_size, console=shown.append)


def curves(folder):
    board = EventAccumulator(str(folder))
    board.Reload()
    return {
        name: [(point.step, round(point.value, 4)) for point in board.Scalars(name)] for name in board.Tags()["scalars"]
    }


def journal(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_reach_tensorboard_by_iteration_and_by_samples(tmp_path, shown):
    writers = make(shown, tensorboard_dir=str(tmp_path), tensorboard_log_interval=2)
    writers.write_steps(STEPS)
    writers.close()
    found = curves(tmp_path)
    assert found["lm loss"] == [(2, 3.0), (4, 1.0)]
    assert found["lm loss vs samples"] == [(16, 3.0), (32, 1.0)]
    assert found["learning-rate"] == [(2, 0.2), (4, 0.4)]
    names = {"learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm"}
    assert set(found) == names | {f"{name} vs samples" for name in names}


def test_optional_numbers_and_switches_add_their_curves(tmp_path, shown):
    writers = make(
        shown, tensorboard_dir=str(tmp_path), log_world_size_to_tensorboard=True, log_loss_scale_to_tensorboard=False
    )
    writers.write_steps([dataclasses.replace(STEPS[0], num_zeros=12.0, params_norm=3.0, decoupled_learning_rate=0.5)])
    writers.close()
    found = curves(tmp_path)
    assert found["world-size"] == [(1, 8.0)] and found["world-size vs samples"] == [(8, 8.0)]
    assert found["num-zeros"] == [(1, 12.0)] and found["params-norm"] == [(1, 3.0)]
    assert found["decoupled-learning-rate"] == [(1, 0.5)] and "loss-scale" not in found


def test_the_loss_of_a_skipped_step_is_no_point_of_its_curve(tmp_path, shown):
    writers = make(shown, tensorboard_dir=str(tmp_path))
    writers.write_steps([STEPS[0], dataclasses.replace(STEPS[1], skipped=True)])
    writers.close()
    assert curves(tmp_path)["lm loss"] == [(1, 4.0)]


@pytest.mark.parametrize("on", [False, True])
def test_timers_throughput_and_memory_need_their_switch(tmp_path, shown, on):
    writers = make(shown, tensorboard_dir=str(tmp_path), log_timers_to_tensorboard=on, log_memory_to_tensorboard=on)
    writers.write_interval_report(REPORT)
    writers.write_times(4, "(min, max)", {"optimizer-time": 0.5})
    writers.write_memory(
        4, {"allocated": 1.0, "max allocated": 2.0, "reserved": 3.0, "max reserved": 4.0, "allocated count": 5.0}
    )
    writers.close()
    expected = (
        {
            "iteration-time": 0.25,
            "throughput": 7.0,
            "optimizer-time": 0.5,
            "mem-allocated-bytes": 1.0,
            "mem-max-allocated-bytes": 2.0,
            "mem-reserved-bytes": 3.0,
            "mem-allocated-count": 5.0,
        }
        if on
        else {}
    )
    expected["skipped-train-samples"] = 16.0
    assert curves(tmp_path) == {name: [(4, value)] for name, value in expected.items()}


@pytest.mark.parametrize("perplexity", [False, True])
def test_validation_reaches_the_boards_but_the_final_runs_do_not(tmp_path, shown, perplexity):
    writers = make(shown, tensorboard_dir=str(tmp_path), log_validation_ppl_to_tensorboard=perplexity)
    writers.write_validation({"lm loss": math.log(8)}, iteration=4, consumed_samples=32)
    writers.write_validation({"lm loss": 1.0}, iteration=4, consumed_samples=32, final="test")
    writers.close()
    found = curves(tmp_path)
    assert found["lm loss validation"] == [(4, 2.0794)] and found["lm loss validation vs samples"] == [(32, 2.0794)]
    assert found.get("lm loss validation ppl") == ([(4, 8.0)] if perplexity else None)
    assert " validation loss at iteration 4 on test set | " in shown[1]


def test_the_journal_has_every_step_and_report_once(tmp_path, shown):
    path = tmp_path / "deep" / "log.jsonl"
    writers = make(shown, log_jsonl=str(path), tensorboard_log_interval=100)
    writers.write_steps(STEPS)
    writers.write_interval_report(REPORT)
    writers.write_validation({"lm loss": 1.5}, iteration=4, consumed_samples=32, final="test")
    writers.close()
    lines = journal(path)
    assert [line["kind"] for line in lines] == ["start", "step", "step", "step", "step", "report", "validation"]
    assert [line["iteration"] for line in lines[1:5]] == [1, 2, 3, 4]
    assert lines[2]["losses"] == {"lm loss": 3.0} and lines[2]["grad_norm"] == 1.0 and "num_zeros" not in lines[2]
    assert lines[5]["throughput"]["causal_tflops"] == 7.0 and lines[6]["final"] == "test"


def test_the_journal_is_strict_json_and_is_appended_to(tmp_path, shown):
    path = tmp_path / "log.jsonl"
    for iteration, loss in ((0, math.nan), (1, -math.inf)):
        writers = Writers(LogConfig(log_jsonl=str(path)), speaks=True, start_iteration=iteration, console=shown.append)
        writers.write_steps([dataclasses.replace(STEPS[iteration], losses={"lm loss": loss})])
        writers.close()

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["iteration"]) for line in lines] == [
        ("start", 0),
        ("step", 1),
        ("start", 1),
        ("step", 2),
    ]
    assert [line["losses"]["lm loss"] for line in lines[1::2]] == ["nan", "-inf"]


def test_a_silent_rank_writes_nothing_anywhere(tmp_path, shown):
    writers = make(shown, speaks=False, tensorboard_dir=str(tmp_path / "board"), log_jsonl=str(tmp_path / "log.jsonl"))
    writers.write_steps(STEPS)
    writers.write_interval_report(REPORT)
    writers.print_text("hello")
    writers.write_validation({"lm loss": 1.0}, iteration=1, consumed_samples=8)
    writers.close()
    assert shown == [] and list(tmp_path.iterdir()) == []


def test_a_report_is_one_line_of_the_console(shown):
    make(shown).write_interval_report(REPORT)
    (line,) = shown
    assert re.match(
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration        4/     100 \| consumed samples:           32 \| ",
        line,
    )


@pytest.mark.parametrize("speaks", [True, False])
def test_a_missing_package_is_an_error_on_every_rank_with_the_command(monkeypatch, shown, speaks):
    monkeypatch.setattr(writers_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        make(shown, speaks=speaks, tensorboard_dir="somewhere", wandb_project="mine")
    assert "--tensorboard-dir somewhere needs the package tensorboard" in str(error.value)
    assert "pip install wandb" in str(error.value)


def test_weights_and_biases_draws_against_our_iteration(monkeypatch, shown, tmp_path):
    calls = []
    run = types.SimpleNamespace(
        define_metric=lambda name, **options: calls.append(("metric", name, options)),
        log=lambda values: calls.append(("log", values)),
        finish=lambda: calls.append(("finish",)),
    )
    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace(name="wandb")
    fake.init = lambda **options: calls.append(("init", options)) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writers = Writers(
        LogConfig(wandb_project="p", wandb_exp_name="n", wandb_save_dir=str(tmp_path / "w")),
        speaks=True,
        settings={"num_layers": 2},
        console=shown.append,
    )
    writers.write_steps(STEPS[:1])
    writers.close()
    assert calls[0] == (
        "init",
        {"project": "p", "name": "n", "entity": None, "dir": str(tmp_path / "w"), "config": {"num_layers": 2}},
    )
    assert ("metric", "*", {"step_metric": "iteration"}) in calls
    (logged,) = [call[1] for call in calls if call[0] == "log"]
    assert logged == {
        "learning-rate": 0.1,
        "batch-size": 8,
        "lm loss": 4.0,
        "loss-scale": 4.0,
        "grad-norm": 0.5,
        "iteration": 1,
        "samples": 8,
    }
    assert calls[-1] == ("finish",)


def test_samples_reach_weights_and_biases_as_they_are(monkeypatch, shown):
    logged = []
    fake = types.ModuleType("wandb")
    fake.__spec__, fake.Html = types.SimpleNamespace(name="wandb"), lambda text: ("html", text)
    fake.init = lambda **options: types.SimpleNamespace(
        define_metric=lambda *_, **__: None, log=logged.append, finish=lambda: None
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writers = Writers(LogConfig(wandb_project="p"), speaks=True, console=shown.append)
    writers.write_samples([("a < b", "\n<i>c</i>")], iteration=7)
    assert logged == [{"sample 1": ("html", "<pre>a &lt; b\n&lt;i&gt;c&lt;/i&gt;</pre>"), "iteration": 7}]
    assert shown == [r" sample 1 at iteration 7 | 'a < b' -> '\n<i>c</i>'"]


def test_a_progress_bar_is_shown_on_a_terminal_only(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    writers = Writers(LogConfig(), speaks=True, start_iteration=1, train_iters=10)
    writers.write_steps(STEPS)
    writers.print_text("a line")
    writers.close()
    output = capsys.readouterr()
    assert output.out == "a line\n" and "4/10" in output.err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    writers = Writers(LogConfig(), speaks=True, train_iters=10)
    writers.write_steps(STEPS)
    writers.print_text("a line")
    writers.close()
    output = capsys.readouterr()
    assert output.out == "a line\n" and output.err == ""


def everything(writers):
    for k in range(3):
        writers.write_steps(STEPS)
        writers.write_interval_report(REPORT)
        writers.write_validation({"lm loss": 1.0}, iteration=4, consumed_samples=8)
        writers.write_samples([("a", "b")], iteration=4)
        writers.write_save_result(
            SaveOutcome(4, Path("iter_0000004"), (), (), size=5, blocked=0.1, seconds=1.0), failures=0
        )
    writers.close()


def test_a_full_disk_under_the_journal_is_told_once_and_ends_no_run(shown, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("megatron"), "handlers", [])  # a record that two handlers see is there twice
    everything(make(shown, log_jsonl="/dev/full"))
    told = [record.getMessage() for record in caplog.records if "--log-jsonl" in record.getMessage()]
    assert told == ["WARNING: --log-jsonl /dev/full cannot be written: No space left on device; the run goes on"]


def test_a_journal_that_has_room_again_is_gone_on_with(tmp_path, shown, monkeypatch):
    writers, write = make(shown, log_jsonl=str(tmp_path / "journal")), os.write
    monkeypatch.setattr(run_log.os, "write", lambda file, content: write(file, content[:7]))  # room for so much
    writers.write_steps(STEPS[:1])
    monkeypatch.undo()
    writers.write_steps(STEPS[1:])
    lines = (tmp_path / "journal").read_text().splitlines()
    assert lines[1] == '{"kind"' and [json.loads(line)["iteration"] for line in lines[2:]] == [2, 3, 4]


@pytest.mark.parametrize("fails", ["__init__", "write", "write_texts", "close"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no network")])
def test_a_board_that_fails_is_told_of_and_given_up(tmp_path, shown, monkeypatch, fails, error):
    def failing(*arguments, **keywords):
        raise error

    monkeypatch.setattr(writers_module.TensorBoard, fails, failing)
    everything(make(shown, tensorboard_dir=str(tmp_path)))
    told = [line for line in shown if line.startswith("WARNING")]
    assert told == [
        f"WARNING: --tensorboard-dir {tmp_path} cannot be written: {type(error).__name__}: {error}; "
        "the run goes on without it, and tries it again every minute"
    ]


def test_tensorboard_goes_on_after_a_disk_that_was_full(tmp_path, shown, monkeypatch, capsys):
    class Full:
        """A file on it."""

        def write(self, content):
            raise OSError(28, "No space left on device")

        flush = close = write

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    writers = make(shown, tensorboard_dir=str(tmp_path))
    name = f"--tensorboard-dir {tmp_path}"
    writers._boards[name]._writer.file_writer.event_writer._async_writer._worker._record_writer._writer = Full()
    for _ in range(100):
        writers.write_steps(STEPS)
        time.sleep(0.01)
        if not writers._boards:
            break
    assert not writers._boards and "Traceback" not in capsys.readouterr().err, "TensorBoard's own thread ends with it"
    monkeypatch.setattr(writers_module, "RETRY_SECONDS", 0.0)
    writers._failed[name] = 0.0  # a minute has gone
    writers.write_steps([dataclasses.replace(STEPS[0], iteration=77)])
    writers.close()
    assert len([line for line in shown if "No space left" in line]) == 1
    assert 77 in dict(curves(tmp_path)["lm loss"]), "and there is room again"


def test_a_standard_output_that_cannot_be_written_ends_no_run(monkeypatch):
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        everything(Writers(LogConfig(), speaks=True))
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(tmp_path, shown, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # who never reads
    writers = make(shown, log_jsonl=str(tmp_path / "pipe"))
    for _ in range(200):
        writers.write_steps(STEPS)
    os.close(reader)
    assert "--log-jsonl" in caplog.text
    with pytest.raises(OSError, match="it is a pipe"):
        run_log.read_run_log_events(tmp_path / "pipe")


def test_a_board_that_finds_no_room_leaves_no_empty_file(tmp_path, shown, monkeypatch):
    def full(self, filename, content, mode):
        open(filename, "wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", lambda failure: None)
    monkeypatch.setattr(gfile.LocalFileSystem, "_write", full)
    make(shown, tensorboard_dir=str(tmp_path))
    assert "No space left" in shown[0] and not list(tmp_path.iterdir())
