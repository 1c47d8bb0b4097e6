"""The doctor: healthy machines pass, and each planted illness is named with its ranks."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.kernels.choice import kernel_check
from megatron.core.kernels.choice.kernel_check import TOLERANCE, trials_for_ops_of_run, try_chosen_kernels
from megatron.core.kernels.choice.run_requirements import kernel_requirements
from megatron.core.kernels.choice.table import Kernels, select_kernels
from megatron.core.kernels.ops import fused, reference
from megatron.core.parallel.mesh import Mesh
from megatron.verify import doctor
from megatron.verify.doctor import DoctorContext, DoctorFinding
from tests.helpers import tiny
from tests.helpers.world import Worlds

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
EVERYTHING: dict[str, Any] = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_experts": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "reset_attention_mask": True,
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.doctor")


def subject(changes: dict[str, Any], mesh: Mesh, **kernels: Any) -> DoctorContext:
    """A tiny run on this mesh, with other kernels in some places."""
    config = tiny.config(mesh.world.size, **changes)
    need = kernel_requirements(config, CPU)
    return DoctorContext(
        config,
        mesh,
        replace(select_kernels(need, config.model.all_requested_kernels), **kernels),
        need,
        tuple(f"machine{rank}" for rank in range(mesh.world.size)),
        True,
        1,
    )


def report(tool: ModuleType, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, str]]]:
    """(exit code, rows) of the tool on one rank."""
    with pytest.raises(SystemExit) as leaving:
        tool.main([*words, "--json", "--megabytes", "1"])
    return leaving.value.code, json.loads(capsys.readouterr().out)


def test_a_healthy_machine_passes_with_a_run_and_without(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    code, rows = report(tool, capsys)
    assert code == 0 and {row["check"] for row in rows} >= {
        "versions",
        "devices",
        "kernels",
        "numbers",
        "clocks",
        "limits",
    }, rows
    code, rows = report(
        tool,
        capsys,
        *tool.STAND_IN,
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "30",
        "--save",
        str(tmp_path / "s"),
        "--window-size",
        "4,0",
        "--attention-backend",
        "flash",
    )
    assert code == 1 and any("windows are kept by a mask tensor" in row["finding"] for row in rows), (
        "a kernel that cannot serve is refused"
    )
    code, rows = report(
        tool,
        capsys,
        *tool.STAND_IN,
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "30",
        "--save",
        str(tmp_path / "s"),
    )
    assert (
        code == 0
        and [row["status"] for row in rows if row["check"] in ("tokenizer", "checkpoints", "disk")] == ["OK"] * 3
    ), rows
    assert list((tmp_path / "s").iterdir()) == [], "something stays behind"


def test_broken_rules_are_told_and_the_machines_examined_all_the_same(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = report(tool, capsys, *tool.STAND_IN, "--tensor-model-parallel-size", "3", "--no-such-flag")
    failed = [row["finding"] for row in rows if row["status"] == "FAIL"]
    assert (
        code == 1
        and any(found.startswith("world-size: ") for found in failed)
        and any("--no-such-flag" in found for found in failed)
    )
    assert any(row["check"] == "numbers" for row in rows)


class _WrongBackward(torch.autograd.Function):
    """Right forward; the gradient is a tenth too large."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.1


def _raises(*_: Any) -> Tensor:
    raise RuntimeError("no such instruction")


PLANTED: dict[str, dict[str, Any]] = {
    "forward": {
        "attention": lambda q, k, v, mask, dropout, scores: fused.attention_by_sdpa(
            q, k, v, replace(mask, documents=None), dropout, scores
        )
    },
    "backward": {"rms_norm": lambda x, weight, epsilon: _WrongBackward.apply(fused.rms_norm(x, weight, epsilon))},
    "gradient of one input": {"rotary": lambda x, *rest: reference.rotary(x, *rest).detach() + 0 * x},
    "not a number": {"gated_activation": lambda x, *rest: reference.gated_activation(x, *rest) / 0},
    "an error": {"grouped_linear": _raises},
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_broken_kernel_fails(planted: str) -> None:
    rows = list(doctor.diagnose_kernel_accuracy(subject(EVERYTHING, Mesh.single_process(), **PLANTED[planted])))
    failed = [row for row in rows if row.status == "FAIL"]
    (op,) = PLANTED[planted]
    assert len(failed) == 1 and failed[0].finding.startswith(op) and "rank 0 (machine0)" in failed[0].finding, rows
    assert {row.finding.split()[0] for row in rows} == {
        "attention",
        "rms_norm",
        "gated_activation",
        "rotary",
        "rotary_qkv",
        "cross_entropy",
        "grouped_linear",
        "permute",
        "adamw",
    }


STATES: dict[str, Any] = {
    "num_layers": None,
    "hybrid_layer_pattern": "MG*",
    "reset_attention_mask": True,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 6,
}


@pytest.mark.parametrize("op", ["causal_conv", "selective_scan", "delta_rule_scan"])
def test_a_scan_that_goes_on_into_the_next_document_fails(op: str) -> None:
    sound = getattr(Kernels(), op)

    def blind(*inputs: Any, segments: Any = None) -> Any:
        return sound(*inputs[:3]) if op == "causal_conv" else sound(*inputs)

    found = {}
    for name, planted in (("sound", {}), ("blind", {op: blind})):
        rows = list(doctor.diagnose_kernel_accuracy(subject(STATES, Mesh.single_process(), **planted)))
        found[name] = [row.finding.split()[0] for row in rows if row.status == "FAIL"]
    assert found == {"sound": [], "blind": [op]}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_sound_kernels_are_far_within_the_tolerance(dtype: str) -> None:
    for changes in (
        {},
        EVERYTHING,
        STATES,
        {"architecture": "bert"},
        {"window_size": "4,0", "group_query_attention": True, "num_query_groups": 1},
    ):
        one = subject({**changes, **({dtype: True} if dtype != "fp32" else {})}, Mesh.single_process())
        found = try_chosen_kernels(one.kernels, one.config, one.need, CPU)
        assert all(error < TOLERANCE[one.need.dtype] / 4 for error in found.values()), found


def test_all_kernels_of_the_machine_are_tried_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(subject(EVERYTHING, Mesh.single_process()), all_kernels=True)
    tried = {row.finding.split(" in ")[0] for row in doctor.diagnose_kernel_accuracy(one)}
    assert tried == {
        "attention by fused",
        "attention by unfused",
        "attention by local",
        "rms_norm by torch",
        "adamw by torch",
        "rms_norm by reference",
        "gated_activation by torch",
        "rotary by torch",
        "rotary_qkv by torch",
        "cross_entropy by linear",
        "grouped_linear by grouped",
        "grouped_linear by loop",
        "permute by torch",
    }
    broken = tuple(
        replace(each, kernel=_raises) if each.name == "unfused" else each for each in kernel_check.CANDIDATES
    )
    monkeypatch.setattr(kernel_check, "CANDIDATES", broken)
    (failed,) = (row for row in doctor.diagnose_kernel_accuracy(one) if row.status == "FAIL")
    assert (
        failed.finding.startswith("attention by unfused")
        and "choose another than --attention-backend unfused" in failed.mend
    )


def test_every_trial_is_of_an_op_that_the_table_knows() -> None:
    one = subject(EVERYTHING, Mesh.single_process())
    assert {trial.op for trial in trials_for_ops_of_run(one.config, one.need)} <= {
        field.name for field in dataclasses.fields(Kernels)
    }


def examine_apart(folder: str, broken: bool) -> list[DoctorFinding]:
    """On every rank: a run with relative paths, where the ranks from the second on may stand elsewhere."""
    before = os.getcwd()
    rank = torch.distributed.get_rank()
    os.chdir(Path(folder) / str(rank if broken else 0))
    try:
        here = subject(
            {"mock_data": False, "data_path": ("corpus",), "save": "save", "load": "save"},
            Mesh.build(tiny.config(2).parallel, CPU),
        )
        if broken and rank == 1:
            here = replace(here, kernels=replace(here.kernels, layer_norm=PLANTED["backward"]["rms_norm"]))
        checks = (
            doctor.diagnose_devices,
            doctor.diagnose_kernel_accuracy,
            doctor.diagnose_links,
            doctor.diagnose_clock_skew,
            doctor.diagnose_system_limits,
            doctor.diagnose_same_data_files,
            doctor.diagnose_shared_checkpoints,
            doctor.diagnose_disk,
        )
        return [row for check in checks for row in check(here)]
    finally:
        os.chdir(before)


def test_what_one_rank_cannot_see_fails_and_names_the_rank(world: Worlds, tmp_path: Path) -> None:
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    for suffix in ("bin", "idx"):
        (tmp_path / "0" / f"corpus.{suffix}").write_bytes(b"x" * 10)
    (tmp_path / "1" / "corpus.idx").write_bytes(b"x" * 12)
    first, second = world(2).run(examine_apart, str(tmp_path), True)
    assert [(row.check, row.status) for row in first] == [(row.check, row.status) for row in second], (
        "ranks tell different things"
    )
    failed = {row.check: row.finding for row in first if row.status == "FAIL"}
    assert set(failed) == {"data", "checkpoints", "numbers"}, failed
    texts = [row.finding for row in first if row.status == "FAIL"]
    assert any(
        "corpus.bin cannot be opened" in text and "bytes of" not in text and text.endswith("on rank 1 (machine1)")
        for text in texts
    ), texts
    assert any(
        "bytes of corpus.idx differ: 10 on rank 0 (machine0); 12 on rank 1 (machine1)" in text for text in texts
    ), texts
    assert any("what rank 0 writes is not seen by rank 1 (machine1)" in text for text in texts), texts
    assert "layer_norm" in failed["numbers"] and failed["numbers"].endswith("on rank 1 (machine1)")


def test_two_ranks_that_see_the_same_pass(world: Worlds, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for suffix in ("bin", "idx"):
        (tmp_path / "0" / f"corpus.{suffix}").write_bytes(b"x")
    rows = world(2).run(examine_apart, str(tmp_path), False)[0]
    assert all(row.status != "FAIL" for row in rows), rows
    (link,) = [row for row in rows if row.check == "links"]
    assert link.finding.startswith("dp, 2 ranks: "), "axes of the same ranks are measured once"
    assert not list((tmp_path / "0" / "save").iterdir())
