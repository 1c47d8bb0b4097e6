"""Files of strangers: their tensors are read, their objects become records, and nothing of them is run."""

from __future__ import annotations

import argparse
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.pickles import attributes_of_inert, read_torch_file


class Calls:
    """Pickled as the call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def stranger() -> Any:
    """A class of Megatron's that is nowhere to be found once the file is written."""
    module = types.ModuleType("megatron.fp16.loss_scaler")
    module.DynamicLossScaler = type("DynamicLossScaler", (), {"__module__": module.__name__})  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module.DynamicLossScaler()  # type: ignore[attr-defined]
    sys.modules.pop(module.__name__, None)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "before torch 1.6"])
def test_objects_become_records_with_their_attributes(tmp_path: Path, stranger: Any, new: bool) -> None:
    stranger.cur_scale = 4.0
    content = {
        "args": argparse.Namespace(lr=0.5, name="x"),
        "scaler": stranger,
        "weight": torch.arange(3.0),
        "random": np.random.RandomState(1).get_state(),
    }
    torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=new)
    sys.modules.pop("megatron.fp16.loss_scaler")
    found = read_torch_file(tmp_path / "file.pt")
    assert attributes_of_inert(found["args"]) == {"lr": 0.5, "name": "x"}
    assert attributes_of_inert(found["scaler"]) == {"cur_scale": 4.0}
    assert torch.equal(found["weight"], torch.arange(3.0))


@pytest.mark.parametrize("new", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize(
    "call",
    [(os.system,), (os.unlink,), (eval,), (exec,), (getattr,), (np.save,), (torch.load,), (__import__,)],
    ids=lambda call: call[0].__name__,
)
@pytest.mark.parametrize("wrap", [lambda call: call, lambda call: {"model": {"deep": [(call,)]}}], ids=["bare", "deep"])
def test_nothing_in_a_file_is_run(tmp_path: Path, new: bool, call: tuple[Any, ...], wrap: Any) -> None:
    mark = tmp_path / "ran"
    arguments = {os.system: f"touch {mark}", eval: f"open({str(mark)!r}, 'w')", exec: f"open({str(mark)!r}, 'w')"}
    torch.save(
        wrap(Calls(call[0], arguments.get(call[0], str(mark)))),
        tmp_path / "file.pt",
        _use_new_zipfile_serialization=new,
    )
    if call[0] is np.save:  # a stand-in takes the call and does nothing
        read_torch_file(tmp_path / "file.pt")
    else:
        expected = "names posix.*nothing of it was run" if call[0] in (os.system, os.unlink) else "refused|no place"
        with pytest.raises(CheckpointError, match=expected):
            read_torch_file(tmp_path / "file.pt")
    assert not mark.exists() and not mark.with_suffix(".npy").exists()


def test_newer_pickle_protocols_are_refused_in_words_of_ours(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "file.pt", pickle_protocol=4)
    with pytest.raises(CheckpointError, match="pickled by protocol 4") as caught:
        read_torch_file(tmp_path / "file.pt")
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 not a zip", b"\x80\x02]"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file\.pt cannot be read"):
        read_torch_file(tmp_path / "file.pt")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        read_torch_file(tmp_path / "file.pt")
