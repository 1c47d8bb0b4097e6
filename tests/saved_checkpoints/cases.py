"""Checkpoints that were written once and are kept: what their runs were, and how they are packed.

    python -m tests.saved_checkpoints.cases                 write those that are missing

An archive `NAME.tar.xz` holds the folder of the run and `steps.json`: losses and gradient norms of the steps that follow, for each
reader of the case, by the code that wrote the checkpoint. An archive is never written anew: that would only show that the code
agrees with itself. A case is added when a checkpoint can hold something new.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.training.checkpoint.checkpointing import Checkpointer
from tests.helpers import tiny
from tests.helpers.resuming import AFTER, BEFORE, resume_and_train
from tests.helpers.training import train_on
from tests.helpers.world import Worlds
from tests.parity.table import read_layout

HERE = Path(__file__).resolve().parent
STEPS = "steps.json"


@dataclass(frozen=True)
class Case:
    """A run that was saved. layout: of the writer. readers: layouts under which it goes on. base: name of the case it adapts.

    writer: settings of the writer alone. Readers compute in fp64, so that machines and layouts agree.
    """

    changes: Mapping[str, Any]
    layout: str
    readers: tuple[str, ...]
    writer: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None


_GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "swiglu": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
_HYBRID: dict[str, Any] = {
    "num_layers": None,
    "hybrid_layer_pattern": "M*GE",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 16,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.1,
    "mamba_head_dim": 4,
    "mamba_num_heads": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "fp8_format": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 2,
    "fp8_amax_compute_algo": "max",
}
CASES: Mapping[str, Case] = {
    "gpt": Case(_GPT, "tp2 pp2 dp2 zero", ("", "tp2 sp dp2 zero"), writer={"bf16": True}),
    "lora": Case(
        {
            **_GPT,
            "lora_rank": 2,
            "lora_alpha": 4.0,
            "dora": True,
            "lora_base_quantization": "int8",
            "lora_modules_to_save": ("*final_layernorm*",),
        },
        "tp2",
        ("", "pp2"),
        base="gpt",
    ),
    "hybrid-moe": Case(_HYBRID, "ep2 dp2 zero", ("ep2 dp2 zero",)),
}


def unpack(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, list[float]]]]:
    """Unpack a case, and its base; returns (settings of its readers, recorded losses and norms by reader)."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return _settings(name, folder), json.loads((folder / name / STEPS).read_text())


def go_on(name: str, reader: str, settings: dict[str, Any], folder: Path, world: Worlds) -> dict[str, list[float]]:
    """Resume an unpacked case under a reader's layout and train on; losses and norms, which are the same on all ranks."""
    ranks, layout = read_layout(reader)
    changes = {**settings, "fp64": True, **layout}
    arguments = changes, str(folder / name / "run"), AFTER
    losses, norms, _ = resume_and_train(*arguments) if ranks == 1 else world(ranks).run(resume_and_train, *arguments)[0]
    return {"losses": losses, "norms": norms}


def write(name: str, world: Worlds) -> None:
    """Train, save, train on under every reader's layout, and pack."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ranks, layout = read_layout(case.layout)
        settings = _settings(name, folder)
        world(ranks).run(_train_and_save, {**settings, **case.writer, **layout}, folder / name / "run")
        steps = {reader: go_on(name, reader, settings, folder, world) for reader in case.readers}
        (folder / name / STEPS).write_text(json.dumps(steps, indent=1))
        with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
            for path in sorted(path for path in (folder / name).rglob("*") if path.is_file()):
                entry, content = tarfile.TarInfo(str(path.relative_to(folder / name))), path.read_bytes()
                entry.size, entry.mode = len(content), 0o644  # without times and owners
                archive.addfile(entry, io.BytesIO(content))


def _settings(name: str, folder: Path) -> dict[str, Any]:
    """The settings of a case's run, with the unpacked base of its adapters."""
    case = CASES[name]
    if case.base is None:
        return dict(case.changes)
    if not (folder / case.base).exists():
        unpack(case.base, folder)
    return {**case.changes, "pretrained_checkpoint": str(folder / case.base / "run")}


def _train_and_save(changes: dict[str, Any], folder: Path) -> None:
    """On every rank: train, from the base if there is one, and save."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(torch.distributed.get_world_size(), **changes, save=str(folder))))
    checkpoint = Checkpointer(trainer)
    checkpoint.resume()
    train_on(trainer, BEFORE)
    checkpoint.save()


if __name__ == "__main__":
    pools = Worlds()
    for missing in (name for name in CASES if not (HERE / f"{name}.tar.xz").exists()):
        write(missing, pools)
    pools.stop()
