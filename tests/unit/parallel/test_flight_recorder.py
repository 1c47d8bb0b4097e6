"""The notes of a rank: what it did last, where it is, how often each group met, and how long it worked itself."""

from __future__ import annotations

import time

import torch

from megatron.core.parallel import collectives
from megatron.core.parallel.device import Stopwatch
from megatron.core.parallel.flight_recorder import FlightRecorder, describe_schedule_action
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.pipeline_parallel.schedules import Action
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.helpers.world import Worlds

CPU = torch.device("cpu")


def test_where_a_rank_is_in_words() -> None:
    flight_recorder = FlightRecorder()
    assert flight_recorder.current_position_text() == "start-up" and flight_recorder.last_collectives() == []
    flight_recorder.begin_activity("training", 3)
    flight_recorder.enter_phase(Action("B", 1, 4))
    assert flight_recorder.current_position_text() == "training, iteration 3, backward of stage 1, microbatch 4"
    assert (
        describe_schedule_action(Action("R", 2)) == "reduce of stage 2"
        and describe_schedule_action("optimizer") == "optimizer"
    )


def test_the_last_notes_are_kept_and_all_are_counted() -> None:
    flight_recorder = FlightRecorder()
    for number in range(40):
        flight_recorder.record_collective("all_reduce", "tp", (0, 1), number)
    flight_recorder.record_collective("barrier", "world", (0, 1, 2), 0)
    assert flight_recorder.counts == {("tp", (0, 1)): 40, ("world", (0, 1, 2)): 1} and flight_recorder.num_events == 41
    assert (
        flight_recorder.last_collective_group() == ("world", (0, 1, 2))
        and len(flight_recorder.last_collectives(100)) == 16
    )
    assert flight_recorder.last_collectives(2)[1].startswith(
        "all_reduce over tp (ranks 0, 1) of 39 bytes at unit/parallel/test_flight_recorder.py:"
    )


def noted() -> tuple[list[str], str]:
    """On every rank: a sum over all, and what is noted of it."""
    mesh = Mesh.build(tiny.config(2, tensor_model_parallel_size=2).parallel, CPU)
    mesh.flight_recorder.begin_activity("training", 7)
    collectives.all_reduce(torch.ones(1024), mesh.tp)
    collectives.all_reduce(torch.ones(1024), Axis("alone"))
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(2, pipeline_model_parallel_size=2, num_layers=2)))
    train_on(trainer, 1)
    messages = [words for words in trainer.run.mesh.flight_recorder.last_collectives(16) if words.startswith("message")]
    return mesh.flight_recorder.last_collectives(2), messages[-1] if messages else ""


def test_collectives_and_messages_note_who_asked_for_them(world: Worlds) -> None:
    for said, message in world(2).run(noted):
        assert len(said) == 1, "an axis of one rank has nothing to note"
        assert said[0].startswith(
            "all_reduce over tp (ranks 0, 1) of 4 kB at unit/parallel/test_flight_recorder.py:"
        ), said
        assert said[0].endswith("in training, iteration 7")
        assert "pipeline_parallel/executor.py" in message and "training, iteration 1" in message, message


def test_a_stopwatch_counts_work_and_leaves_waits_out() -> None:
    flight_recorder = FlightRecorder()
    flight_recorder.stopwatch = Stopwatch(CPU)
    flight_recorder.pause_compute_timing()
    flight_recorder.resume_compute_timing()
    time.sleep(0.05)
    assert flight_recorder.stopwatch.take_seconds() == 0.0, "nothing was started"
    flight_recorder.start_compute_timing()
    time.sleep(0.05)
    flight_recorder.pause_compute_timing()
    time.sleep(0.2)
    flight_recorder.resume_compute_timing()
    time.sleep(0.05)
    flight_recorder.stop_compute_timing()
    assert 0.1 <= flight_recorder.stopwatch.take_seconds() < 0.2
