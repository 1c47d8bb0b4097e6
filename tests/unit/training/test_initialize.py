"""What happens once, before a model is built: mistakes cost a second, and old scripts find this run's things."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.arguments import parse_args_unchecked
from megatron.cli.preflight import check_arguments
from megatron.core import parallel_state
from megatron.core.parallel.mesh import Mesh
from megatron.training import global_vars, initialize
from megatron.training.checkpoint import inference_model
from megatron.training.initialize import initialize_megatron
from megatron.training.launch import rendezvous
from megatron.training.launch.launch_info import read_launch_info
from megatron.training.state.run import RunContext
from tests.helpers import tiny
from tests.helpers.programme import TINY, checked, started
from tests.helpers.world import Worlds

RUN = ["--mock-data", "--train-iters", "1"]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU, and nothing of one test in the next."""
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    yield
    logging.getLogger("megatron").handlers.clear()
    torch.use_deterministic_algorithms(False)


def refused(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of a run that must not get as far as a device."""

    def too_late() -> torch.device:
        raise AssertionError("a device was claimed before the mistake was found")

    monkeypatch.setattr(initialize, "pick_device", too_late)
    tiny = list(TINY)
    if "--tokenizer-type" in words:  # another tokenizer would not read the tiny one's setting
        place = tiny.index("--vocab-size")
        del tiny[place : place + 2]
    with pytest.raises(SystemExit) as caught:
        initialize_megatron(check_arguments(parse_args_unchecked([*tiny, *RUN, *words]), 1))
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    shown = refused(["--save", str(tmp_path / "file" / "save")], capsys, monkeypatch)
    assert shown.startswith("ConfigError: ") and f"--save {tmp_path}/file/save cannot be written" in shown


@pytest.mark.parametrize(
    "words, message",
    [
        (["--tokenizer-type", "WordPiece"], "--tokenizer-type WordPiece is not known; choose one of"),
        (
            ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "nowhere.json", "--merge-file", "nowhere.txt"],
            "nowhere.json",
        ),
        (["--padded-vocab-size", "8"], "--padded-vocab-size 8 is smaller than the tokenizer's 31 ids"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_anything(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in refused(words, capsys, monkeypatch)


def test_one_rank_speaks_for_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert refused(["--tokenizer-type", "WordPiece"], capsys, monkeypatch) == ""


def test_a_run_that_was_checked_for_other_ranks_does_not_start() -> None:
    with pytest.raises(AssertionError, match="checked for 2 ranks, started on 1"):
        initialize_megatron(checked([*TINY, *RUN], world_size=2))


def test_the_run_knows_its_vocabulary_and_the_save_folder_is_there(tmp_path: Path) -> None:
    run = started([*RUN, "--save", str(tmp_path / "new" / "save")])
    assert (run.config.model.true_vocab_size, run.config.model.padded_vocab_size) == (31, 32)
    assert run.mesh == Mesh.single_process(torch.device("cpu")) and (tmp_path / "new" / "save").is_dir()
    assert run.progress.iteration == 0


def test_what_was_understood_in_another_way_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    started([*RUN, "--use-mcore-models"])
    assert "--use-mcore-models is ignored: there is one implementation of the models\n" in capsys.readouterr().out


def test_the_shims_give_old_scripts_this_runs_things() -> None:
    run = started(RUN)
    assert global_vars.get_global_run() is run and vars(global_vars.get_args()) == run.given
    assert global_vars.get_tokenizer() is run.tokenizer and global_vars.get_timers() is run.timers
    assert parallel_state.model_parallel_is_initialized() and parallel_state.installed_mesh() is run.mesh
    later = started(RUN)
    assert global_vars.get_global_run() is later, "the newest run is the one that is meant"


def test_the_shims_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_vars, "_RUN", None)
    monkeypatch.setattr(parallel_state, "_MESH", None)
    with pytest.raises(RuntimeError, match="call initialize_megatron first"):
        global_vars.get_args()
    with pytest.raises(RuntimeError, match="call initialize_megatron first"):
        parallel_state.get_tensor_model_parallel_rank()
    assert not parallel_state.model_parallel_is_initialized()


def shim_answers() -> list[Any]:
    """On every rank: what Megatron's functions say."""
    run: RunContext = tiny.run_of(tiny.config(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    parallel_state.install_mesh(run.mesh)
    groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    )
    members = [sorted(torch.distributed.get_process_group_ranks(group)) for group in groups]
    return [
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.is_pipeline_first_stage(),
        parallel_state.is_pipeline_last_stage(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
        members,
    ]


@pytest.mark.slow
def test_the_shims_speak_of_the_mesh_in_megatrons_order(world: Worlds) -> None:
    for rank, found in enumerate(world(8).run(shim_answers)):
        tensor, data, pipeline = rank % 2, rank // 2 % 2, rank // 4  # tensor innermost, then data, then pipeline
        members = [[rank - tensor, rank - tensor + 1], [rank % 4, rank % 4 + 4], [rank - 2 * data, rank - 2 * data + 2]]
        assert found == [tensor, data, pipeline, 2, 2, 2, pipeline == 0, pipeline == 1, 0, 1, members]


def test_deterministic_mode_allows_deterministic_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    started(RUN)
    assert not torch.are_deterministic_algorithms_enabled()
    started([*RUN, "--deterministic-mode"])
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory, "nothing reads what was not written"


@pytest.mark.parametrize("attempt", ["0", "1"])
def test_the_process_group_knows_a_ranks_gpu(attempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(rendezvous.dist, "init_process_group", lambda *_, **how: given.append(how["device_id"]))
    monkeypatch.setattr(rendezvous, "_connect_tcp_store", lambda *_: torch.distributed.HashStore())
    place = replace(read_launch_info(), rank=1, size=2, store="node0:6000", attempt=attempt)
    rendezvous.init_default_process_group(tiny.config().parallel, place, torch.device("cuda", 1))
    monkeypatch.setattr(initialize, "read_launch_info", lambda: place)
    monkeypatch.setattr(inference_model, "read_launch_info", lambda: place)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(Mesh, "build", lambda *_: None)
    for name in ("set_current_device", "disable_malloc_trim"):
        monkeypatch.setattr(inference_model, name, lambda _: None)
    config = tiny.config()
    initialize.build_mesh(config, torch.device("cuda", 1))
    inference_model._join_mesh(config, torch.device("cuda", 1))
    assert given == 3 * [torch.device("cuda", 1)], "training and generation both say it"


def test_the_launchers_environment_says_where_this_process_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    alone = read_launch_info()
    assert (alone.rank, alone.size, alone.store, alone.job) == (0, 1, "", "")
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "6000",
        "SLURM_JOB_ID": "77",
    }.items():
        monkeypatch.setenv(name, value)
    there = read_launch_info()
    assert (there.rank, there.size, there.store, there.meeting, there.job) == (3, 8, "", "node0:6000", "77")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert read_launch_info().store == "node0:6000", "torchrun's own store is there before and after the ranks"


def test_a_line_that_finds_no_room_on_the_disk_is_lost_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    full = open("/dev/full", "w", encoding="utf-8")
    console = initialize.ConsoleHandler(full)
    console.emit(logging.makeLogRecord({"msg": "a line"}))
    assert not capsys.readouterr().err
    console.emit(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    assert "TypeError" in capsys.readouterr().err, "our own mistakes are still told"
    with pytest.raises(OSError, match="No space"):
        full.close()
