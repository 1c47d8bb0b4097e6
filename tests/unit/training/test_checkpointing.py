"""Saving and resuming runs: across layouts, formats and flags, against runs that never stopped."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing import checkpoint_folders
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.dist_checkpointing.saver import CheckpointSaver, HostSnapshotBuffer
from megatron.core.families.hf import open_hf_folder
from megatron.core.parallel.boxes import whole_box
from megatron.core.tokenizers.base import tokenizer_fingerprint_fields
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.state.run import TrainingProgress
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.checkpoints import complete_iterations
from tests.helpers.programme import trained
from tests.helpers.training import Held, assemble, held_weights, train_alone, train_on
from tests.helpers.world import Worlds
from tests.unit.dist_checkpointing.failing_files import FULL, Faulty

SERIAL: dict[str, Any] = {}
FOUR: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True},
    {
        "use_distributed_optimizer": True,
        "ddp_num_buckets": 3,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "use_distributed_optimizer": True},
    {
        "tensor_model_parallel_size": 4,
        "group_query_attention": True,
        "num_query_groups": 8,
        "make_vocab_size_divisible_by": 7,
    },
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
]


def start(**changes: Any) -> tuple[Trainer, Checkpointer]:
    """A trainer on this process's ranks, and its checkpoint."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(world_size, **changes)))
    return trainer, Checkpointer(trainer)


def train_and_save(folder: Path, steps: int = 2, **changes: Any) -> tuple[Trainer, list[float]]:
    """Train some steps and save."""
    trainer, checkpoint = start(save=str(folder), **changes)
    losses, _ = train_on(trainer, steps)
    checkpoint.save()
    return trainer, losses


def save_here(folder: Path, changes: dict[str, Any]) -> Held:
    """On every rank: train, save; the weights at that moment."""
    return held_weights(train_and_save(folder, **changes)[0])


def resume_here(folder: Path, changes: dict[str, Any]) -> tuple[Held, list[float]]:
    """On every rank: resume; the weights found, and the losses of two more steps."""
    trainer, checkpoint = start(load=str(folder), **changes)
    assert checkpoint.resume()
    found = held_weights(trainer)
    return found, train_on(trainer, 2)[0]


def held_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A serial trainer's weights and slots, by name."""
    slots = {f"{slot} {segment.name}": tensor.clone() for slot, segment, tensor in trainer.optimizer.checkpoint_state()}
    return slots | {f"weight {name}": value for name, value in assemble([held_weights(trainer)]).items()}


@pytest.mark.parametrize("before", [SERIAL, *FOUR], ids=str)
def test_a_run_resumes_under_any_layout_as_if_it_had_never_stopped(
    world: Worlds, tmp_path: Path, before: dict[str, Any]
) -> None:
    expected = train_alone({}, steps=4)
    held = [save_here(tmp_path, before)] if before is SERIAL else world(4).run(save_here, tmp_path, before)
    saved = assemble(held)
    after = FOUR[(FOUR.index(before) + 1) % len(FOUR)] if before in FOUR else FOUR[2]
    results = {"serial": [resume_here(tmp_path, SERIAL)], str(after): world(4).run(resume_here, tmp_path, after)}
    for name, ranks in results.items():
        loaded = assemble([held for held, _ in ranks])
        assert loaded.keys() == saved.keys() and all(torch.equal(loaded[key], saved[key]) for key in saved), name
        for _, losses in ranks:
            assert losses == pytest.approx(expected.losses[2:], rel=1e-5), name


def test_the_same_layout_resumes_to_the_last_bit_with_dropout_and_all_counters(world: Worlds, tmp_path: Path) -> None:
    for result in world(4).run(stop_and_go, tmp_path, {**FOUR[0], "hidden_dropout": 0.2, "attention_dropout": 0.1}):
        assert result == ""


def stop_and_go(folder: Path, changes: dict[str, Any]) -> str:
    trainer, losses = train_and_save(folder, **changes)
    counters = json.dumps(
        [trainer.progress.iteration, trainer.progress.consumed_train_samples, trainer.optimizer.num_steps]
    )
    went_on = train_on(trainer, 2)
    again, checkpoint = start(load=str(folder), save=str(folder), **changes)
    checkpoint.resume()
    found = json.dumps([again.progress.iteration, again.progress.consumed_train_samples, again.optimizer.num_steps])
    if found != counters or checkpoint.last_saved != 2:
        return f"counters {found} and {checkpoint.last_saved}, not {counters}"
    resumed = train_on(again, 2)
    same = all(torch.equal(a[3], b[3]) for a, b in zip(held_weights(trainer), held_weights(again), strict=True))
    return "" if resumed == went_on and same else f"{resumed} is not {went_on}"


def test_dropout_streams_start_afresh_in_another_layout_and_say_so(world: Worlds, tmp_path: Path, caplog: Any) -> None:
    dropout = {"hidden_dropout": 0.2}
    world(4).run(save_here, tmp_path, {**FOUR[0], **dropout})
    with caplog.at_level(logging.INFO):
        fresh, _ = start(**dropout)
        expected = {name: state.clone() for name, state in fresh.run.streams.state().items()}
        trainer, checkpoint = start(load=str(tmp_path), **dropout)
        checkpoint.resume()
    assert all(torch.equal(state, expected[name]) for name, state in trainer.run.streams.state().items())
    assert caplog.text.count("dropout streams start afresh from --seed") == 1
    assert "tensor 2 x pipeline 1 x data 2, this run is tensor 1 x pipeline 1 x data 1" in caplog.text


def test_a_half_precision_run_is_resumed_exactly_in_fp32_and_back(tmp_path: Path) -> None:
    half, _ = train_and_save(tmp_path / "half", bf16=True)
    masters = {
        segment.name: tensor.clone() for slot, segment, tensor in half.optimizer.checkpoint_state() if slot == "master"
    }
    wide, checkpoint = start(load=str(tmp_path / "half"), save=str(tmp_path / "wide"))
    checkpoint.resume()
    assert all(torch.equal(segment.data, masters[segment.name]) for segment in wide.optimizer.segments)
    moments = {f"{slot} {s.name}": t for slot, s, t in half.optimizer.checkpoint_state() if slot != "master"}
    assert all(torch.equal(t, moments[f"{slot} {s.name}"]) for slot, s, t in wide.optimizer.checkpoint_state())
    checkpoint.save()
    again, checkpoint = start(load=str(tmp_path / "wide"), bf16=True)
    checkpoint.resume()
    before, after = held_state(half), held_state(again)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert any(name.startswith("master") for name in after)


def test_the_loss_scale_of_fp16_is_resumed(tmp_path: Path) -> None:
    trainer, checkpoint = start(save=str(tmp_path), fp16=True, initial_loss_scale=1024.0)
    trainer.optimizer.scaler.update(overflow=True)
    trainer.optimizer.scaler.update(overflow=True)
    trainer.optimizer.scaler.update(overflow=False)
    checkpoint.save()
    again, checkpoint = start(load=str(tmp_path), fp16=True, initial_loss_scale=1024.0)
    checkpoint.resume()
    left = trainer.optimizer.scaler.overflows_left
    assert again.optimizer.scaler.state() == {"scale": 512.0, "good_steps": 1, "overflows_left": left}


@pytest.mark.parametrize("format", [{}, {"bf16": True}], ids=str)
def test_finetune_takes_the_weights_and_nothing_else(tmp_path: Path, format: dict[str, Any]) -> None:
    trainer, _ = train_and_save(tmp_path, **format)
    other, checkpoint = start(load=str(tmp_path), finetune=True, lr=3e-3, **format)
    untouched = {name: state.clone() for name, state in other.run.streams.state().items()}
    assert checkpoint.resume() and checkpoint.last_saved is None
    assert other.progress == TrainingProgress() and other.optimizer.num_steps == 0
    before, after = held_state(trainer), held_state(other)
    for name, value in after.items():
        if name.startswith("weight"):
            assert torch.equal(value, before[name]), name
        elif name.startswith("master"):
            weight = before[name.replace("master", "weight")].flatten().float()
            assert torch.equal(value[: weight.numel()], weight), name  # a master has the vocabulary's padding too
        else:
            assert not value.any(), name
    assert all(torch.equal(state, untouched[name]) for name, state in other.run.streams.state().items())


def test_no_load_optim_keeps_counters_but_starts_optimizer_and_schedule_anew(tmp_path: Path) -> None:
    train_and_save(tmp_path)
    trainer, checkpoint = start(load=str(tmp_path), load_optim=False, lr=3e-3)  # another schedule is no obstacle then
    checkpoint.resume()
    assert (trainer.progress.iteration, trainer.progress.consumed_train_samples, trainer.progress.schedule_samples) == (
        2,
        16,
        0,
    )
    assert trainer.optimizer.num_steps == 0
    assert not any(tensor.any() for slot, _, tensor in trainer.optimizer.checkpoint_state())


def test_what_was_not_saved_is_missed_unless_it_is_not_asked_for(tmp_path: Path) -> None:
    train_and_save(tmp_path, save_optim=False, save_rng=False)
    names = open_native_checkpoint(tmp_path / "iter_0000002").formats
    assert names and all(name.startswith("model.") for name in names)
    with pytest.raises(CheckpointError) as caught:
        start(load=str(tmp_path))[1].resume()
    assert [problem.partition(" (")[0] for problem in caught.value.problems] == [
        "no optimizer state",
        "no dropout streams",
    ]
    assert start(load=str(tmp_path), load_optim=False, load_rng=False)[1].resume()
    assert start(load=str(tmp_path), finetune=True)[1].resume()


def test_random_streams_are_left_alone_with_no_load_rng(tmp_path: Path) -> None:
    saved, _ = train_and_save(tmp_path, hidden_dropout=0.2)
    trained = {name: state.clone() for name, state in saved.run.streams.state().items()}
    trainer, checkpoint = start(load=str(tmp_path), load_rng=False, hidden_dropout=0.2)
    before = {name: state.clone() for name, state in trainer.run.streams.state().items()}
    checkpoint.resume()
    now = trainer.run.streams.state()
    assert all(torch.equal(state, before[name]) for name, state in now.items())
    assert any(not torch.equal(state, trained[name]) for name, state in now.items())


def test_an_empty_folder_is_a_fresh_start_only_when_it_is_also_the_save_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "new")
    trainer, checkpoint = start(load=folder, save=folder + "/../new/")
    assert not checkpoint.resume() and trainer.progress == TrainingProgress()
    for changes, said in (
        ({}, "leave --load out"),
        ({"save": str(tmp_path)}, "leave --load out"),
        ({"save": folder, "exit_on_missing_checkpoint": True}, "--exit-on-missing-checkpoint"),
        ({"save": folder, "ckpt_step": 5}, "--ckpt-step 5"),
    ):
        with pytest.raises(CheckpointError, match=said):
            start(load=folder, **changes)[1].resume()
    assert not start()[1].resume()


def test_a_pretrained_checkpoint_is_used_until_the_run_has_its_own(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    asked = {"pretrained_checkpoint": str(theirs), "load": str(ours), "save": str(ours)}
    with pytest.raises(CheckpointError, match="--pretrained-checkpoint .* holds no complete checkpoint"):
        start(**asked)[1].resume()
    pretrained, _ = train_and_save(theirs)
    trainer, checkpoint = start(**asked)
    assert checkpoint.resume() and trainer.progress.iteration == 0
    assert torch.equal(trainer.optimizer.segments[0].data, pretrained.optimizer.segments[0].data)
    train_on(trainer, 1)
    checkpoint.save()
    resumed, checkpoint = start(**asked)
    assert checkpoint.resume() and resumed.progress.iteration == 1


def test_ckpt_step_goes_back_and_retention_keeps_multiples(tmp_path: Path) -> None:
    trainer, checkpoint = start(save=str(tmp_path), save_retain_interval=2)
    for _ in range(5):
        train_on(trainer, 1)
        checkpoint.save()
    assert complete_iterations(tmp_path) == [2, 4, 5]
    back, checkpoint = start(load=str(tmp_path), ckpt_step=2)
    checkpoint.resume()
    assert back.progress.iteration == 2


def test_another_network_is_refused_with_every_difference(tmp_path: Path) -> None:
    train_and_save(tmp_path, save_optim=False)
    other = {
        "num_layers": 2,
        "hidden_size": 64,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "max_position_embeddings": 32,
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False,
    }
    with pytest.raises(CheckpointError) as caught:
        start(load=str(tmp_path), **other)[1].resume()
    assert set(caught.value.problems) == {
        "--num-layers: 4 in the checkpoint, 2 in this run",
        "--hidden-size: 32 in the checkpoint, 64 in this run",
        "--kv-channels: 4 in the checkpoint, 8 in this run",
        "--swiglu: off in the checkpoint, on in this run",
        "--normalization: LayerNorm in the checkpoint, RMSNorm in this run",
        "--norm-epsilon: 1e-05 in the checkpoint, 1e-06 in this run",
        "--max-position-embeddings: 16 in the checkpoint, 32 in this run",
        "--untie-embeddings-and-output-weights: off in the checkpoint, on in this run",
        "--add-bias-linear: on in the checkpoint, off in this run",
    }
    with pytest.raises(CheckpointError, match="--optimizer adam, this run has sgd; --no-load-optim"):
        start(load=str(tmp_path), optimizer="sgd")[1].resume()


def test_a_changed_schedule_is_refused_unless_it_is_said_whose_wins(tmp_path: Path) -> None:
    train_and_save(tmp_path)
    before = start()[0].schedule
    with pytest.raises(ConfigError, match="max lr is 0.003 now and was 0.01 in the checkpoint"):
        start(load=str(tmp_path), lr=3e-3)[1].resume()
    for flag, lr in (("override_opt_param_scheduler", 3e-3), ("use_checkpoint_opt_param_scheduler", 1e-2)):
        trainer, checkpoint = start(load=str(tmp_path), lr=3e-3, **{flag: True})
        checkpoint.resume()
        assert trainer.schedule.max_lr == lr
    assert trainer.schedule == before


def resume_what_is_not_there(folder: Path) -> str:
    try:
        start(load=str(folder))[1].resume()
    except CheckpointError as error:
        return str(error)
    return ""


def test_all_ranks_are_told_what_only_rank_0_looked_at(world: Worlds, tmp_path: Path) -> None:
    said = world(4).run(resume_what_is_not_there, tmp_path)
    assert len(set(said)) == 1 and said[0].startswith(f"--load {tmp_path} holds no complete checkpoint")


class Arriving:
    """A collective on its way."""

    arrived = False

    def wait(self) -> None:
        self.arrived = True


def test_a_save_waits_for_parameters_that_are_still_on_their_way(tmp_path: Path) -> None:
    trainer, checkpoint = start(save=str(tmp_path))
    work = Arriving()
    trainer.parallels[0]._gathering[0] = [work]  # type: ignore[assignment]
    checkpoint.save()
    assert work.arrived


def test_each_save_and_load_says_its_size_and_time_in_a_line(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        train_and_save(tmp_path)
        start(load=str(tmp_path))[1].resume()
    size = sum(path.stat().st_size for path in (tmp_path / "iter_0000002").iterdir()) / 1e9
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2
    for line, verb in zip(lines, ("saved", "loaded"), strict=True):
        assert line.startswith(f"{verb} checkpoint {tmp_path}/iter_0000002: {size:.3g} GB in ") and " s (" in line


def test_the_config_lies_beside_the_tensors_as_readable_json(tmp_path: Path) -> None:
    train_and_save(tmp_path)
    content = json.loads((tmp_path / "iter_0000002" / "config.json").read_text())
    assert content["world_size"] == 1 and content["values"]["hidden_size"] == 32 and content["values"]["lr"] == 1e-2
    assert checkpoint_folders.checkpoint_model_settings(tmp_path)["num_attention_heads"] == 8
    assert open_native_checkpoint(tmp_path / "iter_0000002").values["run.config"] == content["values"]


def spoil(folder: Path, iteration: int) -> Path:
    """Flip a bit in the middle of a checkpoint's data; the file."""
    path = checkpoint_folders.iteration_folder(folder, iteration) / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def saved_at(folder: Path, *iterations: int) -> Trainer:
    """A run that saved at these iterations."""
    trainer, checkpoint = start(save=str(folder))
    for iteration in iterations:
        train_on(trainer, iteration - trainer.progress.iteration)
        checkpoint.save()
    return trainer


def test_a_damaged_checkpoint_is_passed_over_loudly_and_saved_again(tmp_path: Path, caplog: Any) -> None:
    saved_at(tmp_path, 1, 2)
    path = spoil(tmp_path, 2)
    trainer, checkpoint = start(load=str(tmp_path), save=str(tmp_path))
    assert checkpoint.resume() and trainer.progress.iteration == checkpoint.last_saved == 1
    (warning,) = [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING and "GOING BACK" in record.message
    ]
    assert (
        warning.startswith("GOING BACK TO THE CHECKPOINT OF ITERATION 1, SINCE LATER ONES ARE DAMAGED")
        and f"{path} is damaged" in warning
    )
    train_on(trainer, 1)
    checkpoint.save()
    again, checkpoint = start(load=str(tmp_path))
    assert checkpoint.resume() and again.progress.iteration == 2


def test_going_back_can_be_forbidden(tmp_path: Path) -> None:
    saved_at(tmp_path, 1, 2)
    assert start(load=str(tmp_path), require_iteration=2)[1].resume()
    path = spoil(tmp_path, 2)
    for asked in ({"require_iteration": 2}, {"ckpt_step": 2}):
        with pytest.raises(CheckpointError, match=f"is damaged, and no other is to be loaded\n.*\n.*{path} is damaged"):
            start(load=str(tmp_path), **asked)[1].resume()
    with pytest.raises(
        CheckpointError, match="--require-iteration 1: the newest complete checkpoint .* is not of that iteration"
    ):
        start(load=str(tmp_path), require_iteration=1)[1].resume()
    (tmp_path / "iter_0000002" / "commit.txt").unlink()
    with pytest.raises(CheckpointError, match="--require-iteration 1: .* has a later checkpoint, which is damaged"):
        start(load=str(tmp_path), require_iteration=1)[1].resume()


def test_integrity_is_not_verified_on_demand(tmp_path: Path) -> None:
    saved_at(tmp_path, 1)
    spoil(tmp_path, 1)
    with pytest.raises(CheckpointError, match="holds no sound checkpoint|is damaged, and no other is to be loaded"):
        start(load=str(tmp_path))[1].resume()
    assert start(load=str(tmp_path), verify_integrity=False)[1].resume()


def test_a_tracker_that_names_another_iteration_is_a_hint_that_is_spoken_of(tmp_path: Path, caplog: Any) -> None:
    saved_at(tmp_path, 1, 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    trainer, checkpoint = start(load=str(tmp_path))
    assert checkpoint.resume() and trainer.progress.iteration == 2
    assert "names iteration 1, but 2 was committed last and is loaded; --ckpt-step goes back" in caplog.text


def test_a_run_that_went_back_resumes_from_what_it_wrote_since(tmp_path: Path) -> None:
    saved_at(tmp_path, 1, 3)
    trainer, checkpoint = start(load=str(tmp_path), save=str(tmp_path), ckpt_step=1)
    checkpoint.resume()
    train_on(trainer, 1)
    checkpoint.save()
    again, checkpoint = start(load=str(tmp_path))
    assert checkpoint.resume() and again.progress.iteration == 2, "not from iteration 3, which it left behind"


@pytest.mark.parametrize("finetune", [False, True])
def test_another_tokenizer_is_refused_and_both_are_named_unless_it_is_allowed(
    tmp_path: Path, caplog: Any, finetune: bool
) -> None:
    saved_at(tmp_path, 1)
    trainer, checkpoint = start(load=str(tmp_path), finetune=finetune)
    other = dataclasses.replace(trainer.run, tokenizer=Renamed(trainer.run.tokenizer))
    trainer.run = other
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(trainer).resume()
    mine, theirs = tokenizer_fingerprint_fields(other.tokenizer), tokenizer_fingerprint_fields(other.tokenizer.inner)
    assert (
        mine["hash"][:16] in str(caught.value)
        and theirs["hash"][:16] in str(caught.value)
        and "--allow-other-tokenizer" in str(caught.value)
    )
    trainer, checkpoint = start(load=str(tmp_path), finetune=finetune, allow_other_tokenizer=True)
    trainer.run = dataclasses.replace(trainer.run, tokenizer=other.tokenizer)
    assert Checkpointer(trainer).resume() and "another tokenizer is accepted" in caplog.text


class Renamed:
    """A tokenizer with as many ids that mean other words."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        return {**self.inner.unique_identifiers, "merges": "others"}


def save_beside_training(folder: Path, changes: dict[str, Any]) -> tuple[Held, Held, int]:
    """On every rank: begin to save, train on at once, poll to the end; weights at the save, after it, and polls."""
    trainer, checkpoint = start(save=str(folder), **changes)
    train_on(trainer, 2)
    then = held_weights(trainer)
    assert checkpoint.begin_save() == [] and checkpoint.on_its_way == 2
    outcome, polls = None, 0
    while outcome is None:
        train_on(trainer, 1)
        outcome, polls = checkpoint.poll_save(), polls + 1
    assert not outcome.problems and checkpoint.last_saved == 2 and checkpoint.on_its_way is None
    return then, held_weights(trainer), polls


@pytest.mark.parametrize("before", [SERIAL, *FOUR[:3]], ids=str)
def test_steps_taken_while_a_save_is_written_are_not_in_it(
    world: Worlds, tmp_path: Path, before: dict[str, Any]
) -> None:
    results = (
        [save_beside_training(tmp_path, before)]
        if before is SERIAL
        else world(4).run(save_beside_training, tmp_path, before)
    )
    saved, since = assemble([then for then, _, _ in results]), assemble([now for _, now, _ in results])
    loaded = assemble([resume_here(tmp_path, SERIAL)[0]])
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert any(not torch.equal(saved[name], since[name]) for name in saved)
    assert len({polls for _, _, polls in results}) == 1, "all ranks hear of the end in the same iteration"


def test_an_update_waits_for_the_copy_that_a_save_is_written_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, begun, returned = HostSnapshotBuffer.copy_to_host, threading.Event(), threading.Event()

    def slowly(self: HostSnapshotBuffer, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        begun.set()
        assert returned.wait(300), "the copy is made beside what comes next"
        time.sleep(0.3)  # in which an update that did not wait would come
        return take(self, tensors)

    monkeypatch.setattr(HostSnapshotBuffer, "copy_to_host", slowly)
    trainer, checkpoint = start(save=str(tmp_path))
    train_on(trainer, 1)
    saved = assemble([held_weights(trainer)])
    checkpoint.begin_save()
    returned.set()
    assert begun.wait(300)
    train_on(trainer, 1)
    outcome = checkpoint.wait_for_save_outcome()
    assert not outcome.problems and 0.0 < outcome.blocked
    loaded = assemble([resume_here(tmp_path, SERIAL)[0]])
    assert [name for name in saved if not torch.equal(loaded[name], saved[name])] == []


def test_a_save_waits_for_the_one_before_it_and_says_so(tmp_path: Path, caplog: Any) -> None:
    trainer, checkpoint = start(save=str(tmp_path))
    checkpoint._get_saver().files = Faulty(delay=0.01)
    train_on(trainer, 1)
    assert checkpoint.begin_save() == []
    train_on(trainer, 1)
    (first,) = checkpoint.begin_save()
    assert first.iteration == 1 and not first.problems and "the save of iteration 2 waited" in caplog.text
    assert checkpoint.wait_for_save_outcome().iteration == 2 and complete_iterations(tmp_path) == [1, 2]


def test_a_loop_lives_through_saves_that_fail_tells_of_them_and_ends_in_an_error_if_the_last_one_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    save, log = tmp_path / "save", tmp_path / "log.jsonl"
    flags = [
        "--mock-data",
        "--seq-length",
        "16",
        "--train-iters",
        "6",
        "--save",
        str(save),
        "--save-interval",
        "2",
        "--log-jsonl",
        str(log),
    ]
    for disk, kept, fails in (
        (Faulty("iter_0000004", fault=FULL), [2, 6], False),
        (Faulty("iter_0000006", fault=FULL), [2, 4], True),
    ):
        monkeypatch.setattr(Checkpointer, "_get_saver", with_disk(Checkpointer._get_saver, disk))
        if fails:
            with pytest.raises(
                CheckpointError, match="the last checkpoint of this run, of iteration 6, could not be saved"
            ):
                trained(flags)
        else:
            trained(flags)
        assert complete_iterations(save) == kept
        records = [
            record for line in log.read_text().splitlines() if (record := json.loads(line))["kind"] == "checkpoint"
        ]
        assert [(record["iteration"], record["failures"]) for record in records] == (
            [(2, 0), (4, 1), (6, 1)] if not fails else [(2, 0), (4, 0), (6, 1), (6, 2)]
        )
        text = capsys.readouterr().out
        assert (
            f"THE CHECKPOINT OF ITERATION {6 if fails else 4} WAS NOT SAVED" in text
            and "No space left on device" in text
        )
        shutil.rmtree(save)
        log.unlink()


def with_disk(
    writer: Callable[[Checkpointer], CheckpointSaver], disk: Faulty
) -> Callable[[Checkpointer], CheckpointSaver]:
    """The method, with another disk."""

    def changed(checkpoint: Checkpointer) -> CheckpointSaver:
        found = writer(checkpoint)
        found.files = disk
        return found

    return changed


def test_a_save_is_exported_where_that_is_asked_for(tmp_path: Path) -> None:
    trainer, _ = train_and_save(tmp_path / "save", export_hf=str(tmp_path / "hf"), async_save=False)
    source = open_hf_folder(tmp_path / "hf" / "iter_0000002", {})
    for name, param in trainer.stages[0].named_parameters():
        entry = source.formats[f"model.{name}"]
        assert torch.equal(source.read(f"model.{name}", whole_box(entry.shape)), param.detach()[: entry.shape[0]]), name


def test_a_network_that_cannot_be_exported_is_told_and_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tiny"):
        train_and_save(tmp_path / "save", export_hf=str(tmp_path / "hf"), async_save=False, squared_relu=True)
    assert "WAS NOT EXPORTED" in caplog.text and "--squared-relu" in caplog.text
    assert checkpoint_folders.newest_iteration(tmp_path / "save") == 2 and not (tmp_path / "hf").exists()
