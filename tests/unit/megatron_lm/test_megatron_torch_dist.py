"""Megatron Core's distributed format, as torch's own classes write it: every box lands where it belongs, damage is named."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.parallel.boxes import Box, whole_box
from megatron.megatron_lm.checkpoint.open import open_megatron_checkpoint
from megatron.megatron_lm.checkpoint.torch_dist import open_torch_dist_checkpoint
from tests.unit.megatron_lm.megatron_files import LOCAL, Whole

IDS = {"true_vocab_size": 10}
RANKS = 2


def pieces_of(model: Whole, *, stacked: bool) -> dict[str, list[tuple[tuple[int, ...], Tensor]]]:
    """Key -> (offset, box) of what two tensor ranks save of a model."""
    found: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    states = [
        model.stage(LOCAL, range(model.layers), version=3.0, rank=r, ranks=RANKS, first=True, last=True)
        for r in range(RANKS)
    ]
    for name in states[0]:
        shards = [state[name] for state in states]
        if (
            name.endswith("position_embeddings.weight")
            or "layernorm" in name
            or name.endswith(("proj.bias", "fc2.bias"))
        ):
            boxes = [((0,) * shards[0].dim(), shards[0])]
        elif name.endswith(("proj.weight", "fc2.weight")):
            boxes = [((0, r * shards[0].shape[1]), shard) for r, shard in enumerate(shards)]
        elif "fc1" in name and model.gated:
            half = shards[0].shape[0] // 2
            rest = (0,) * (shards[0].dim() - 1)
            boxes = [
                ((part * half * RANKS + r * half, *rest), shard[part * half : (part + 1) * half])
                for r, shard in enumerate(shards)
                for part in (0, 1)
            ]
        else:
            boxes = [((r * shards[0].shape[0], *(0,) * (shards[0].dim() - 1)), shard) for r, shard in enumerate(shards)]
        words = name.split(".")
        if words[1] == "layers" and stacked:
            key = ".".join(words[:2] + words[3:])
            key = key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            found.setdefault(key, []).extend(((int(words[2]), *offset), box[None]) for offset, box in boxes)
        else:
            found[name] = boxes
    return found


def write(
    folder: Path,
    pieces: dict[str, list[tuple[tuple[int, ...], Tensor]]],
    *,
    common: dict[str, Any],
    inside: bool = False,
) -> Path:
    """Save boxes as torch.distributed.checkpoint does, some in each of two files."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    files: dict[str, bytearray] = {"__0_0.distcp": bytearray(), "__1_0.distcp": bytearray()}

    def put(index: dcp.MetadataIndex, value: Any, number: int) -> None:
        name = f"__{number % 2}_0.distcp"
        blob = io.BytesIO()
        torch.save(value, blob)
        places[index] = _StorageInfo(name, len(files[name]), blob.tell())
        files[name] += blob.getvalue()

    for key, boxes in pieces.items():
        size = [max(offset[d] + box.shape[d] for offset, box in boxes) for d in range(boxes[0][1].dim())]
        chunks = [dcp.ChunkStorageMetadata(torch.Size(offset), box.shape) for offset, box in boxes]
        entries[key] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=boxes[0][1].dtype), torch.Size(size), chunks
        )
        for number, (offset, box) in enumerate(boxes):
            put(dcp.MetadataIndex(key, torch.Size(offset)), box.clone(), number)
    if inside:
        entries["common_state"] = dcp.BytesStorageMetadata()
        put(dcp.MetadataIndex("common_state"), common, 0)
    else:
        torch.save(common, folder / "common.pt")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(entries, storage_data=places)))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


def common(model: Whole, **more: Any) -> dict[str, Any]:
    """What is no tensor."""
    return {
        "args": argparse.Namespace(**model.settings(), consumed_train_samples=24, seq_length=6),
        "iteration": 3,
        "checkpoint_version": 3.0,
        **more,
    }


def contents(source: CheckpointSource, prefix: str = "model.") -> dict[str, Tensor]:
    """Everything under a beginning of names."""
    return {
        name.removeprefix(prefix): source.read(name, whole_box(entry.shape))
        for name, entry in source.formats.items()
        if name.startswith(prefix)
    }


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, same bits."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("stacked", "gated", "groups", "inside"), [(True, True, 2, False), (True, False, 4, True), (False, True, 4, False)]
)
def test_boxes_of_all_ranks_become_the_model(
    tmp_path: Path, stacked: bool, gated: bool, groups: int, inside: bool
) -> None:
    model = Whole(gated=gated, groups=groups)
    source = open_megatron_checkpoint(
        write(tmp_path / "iter_0000003", pieces_of(model, stacked=stacked), common=common(model), inside=inside), IDS
    )
    equal(contents(source), model.ours())
    assert (
        source.values["run.progress"]["consumed_train_samples"] == 24
        and source.values["run.progress"]["iteration"] == 3
    )


def test_moments_by_parameter_are_read(tmp_path: Path) -> None:
    model, other = Whole(groups=2), Whole(groups=2)
    other.tensors = {name: tensor * 3 for name, tensor in other.tensors.items()}
    pieces = pieces_of(model, stacked=True)
    for slot in ("exp_avg", "exp_avg_sq", "fp32_param"):
        pieces |= {f"optimizer.state.{slot}.{key}": boxes for key, boxes in pieces_of(other, stacked=True).items()}
    groups = {"optimizer": {"optimizer": {"param_groups": [{"lr": 1.0, "step": 5}, {"lr": 1.0, "step": 5}]}}}
    source = open_torch_dist_checkpoint(write(tmp_path, pieces, common=common(model, **groups)), IDS)
    equal(contents(source), model.ours())
    for slot in ("exp_avg", "exp_avg_sq", "master"):
        equal(contents(source, f"optimizer.{slot}."), other.ours())
    assert source.values["run.optimizer_steps"] == 5 and not source.skipped


def test_the_momentum_of_matrices_and_the_moments_of_the_rest_are_read_from_a_chain_of_optimizers(
    tmp_path: Path,
) -> None:
    model = Whole(groups=2)
    pieces = pieces_of(model, stacked=False)
    matrices = {name for name in pieces if re.search(r"linear_(qkv|proj|fc1|fc2)\.weight$", name)}
    state = dict[str, list[tuple[tuple[int, ...], Tensor]]]()
    for name, boxes in pieces.items():
        chain, slots = (0, ("momentum_buffer",)) if name in matrices else (1, ("exp_avg", "exp_avg_sq"))
        state |= {f"chained_{chain}.optimizer.state.{slot}.{name}": boxes for slot in slots}
    groups = {"optimizer": {0: {"param_groups": [{}]}, 1: {"optimizer": {"param_groups": [{"step": 5}]}}}}
    source = open_torch_dist_checkpoint(write(tmp_path, pieces | state, common=common(model, **groups)), IDS)
    found = {slot: contents(source, f"optimizer.{slot}.") for slot in ("momentum_buffer", "exp_avg", "exp_avg_sq")}
    assert len(found["momentum_buffer"]) == len(matrices) and found["exp_avg"].keys() == found["exp_avg_sq"].keys()
    equal(found["momentum_buffer"] | found["exp_avg"], model.ours())
    assert source.values["run.optimizer_steps"] == 5 and not source.skipped


def test_what_an_optimizer_keeps_that_is_not_built_here_is_named(tmp_path: Path) -> None:
    model = Whole(groups=2)
    pieces = pieces_of(model, stacked=True)
    pieces |= {f"optimizer.state.Q_L.{name}": boxes for name, boxes in pieces_of(model, stacked=True).items()}
    source = open_torch_dist_checkpoint(write(tmp_path, pieces, common=common(model)), IDS)
    equal(contents(source), model.ours())
    assert "its optimizer keeps Q_L" in source.skipped


BUCKET = "optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0."


@pytest.mark.parametrize(
    ("names", "more", "reason"),
    [
        (("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg",), 0, "another kind"),
        ((BUCKET + "exp_avg",), 0, "not Adam's state"),
        (tuple(BUCKET + slot for slot in ("param", "exp_avg", "exp_avg_sq")), 8, "do not fill them"),
        (tuple(BUCKET + slot for slot in ("param", "exp_avg", "exp_avg_sq")), 0, "are not those of"),
    ],
)
def test_flat_buckets_that_are_not_understood_are_left_out_with_the_way_out(
    tmp_path: Path, names: tuple[str, ...], more: int, reason: str
) -> None:
    model = Whole(gated=True, groups=2)
    pieces = pieces_of(model, stacked=True)
    sizes = [
        tensor.numel()
        for rank in range(RANKS)
        for tensor in model.stage(
            LOCAL, range(model.layers), version=3.0, rank=rank, ranks=RANKS, first=True, last=True
        ).values()
    ]
    one = sizes[: len(sizes) // RANKS]
    size = sum(-(-size // 64) * 64 for size in one[1:]) + one[0]  # the first lies last
    given = common(model)
    given["args"].tensor_model_parallel_size = RANKS
    for name in names:
        pieces |= {name.format(rank): [((0,), torch.full((size + more,), 0.5))] for rank in range(RANKS)}
    source = open_torch_dist_checkpoint(write(tmp_path, pieces, common=given), IDS)
    equal(contents(source), model.ours())
    assert reason in source.skipped and "fully-reshardable" in source.skipped


def test_a_box_is_that_part_of_the_whole(tmp_path: Path) -> None:
    model = Whole()
    source = open_torch_dist_checkpoint(write(tmp_path, pieces_of(model, stacked=True), common=common(model)), IDS)
    found = source.read("model.decoder.layers.2.self_attention.linear_qkv.weight", Box((7, 1), (20, 4)))
    assert torch.equal(found, model.ours()["decoder.layers.2.self_attention.linear_qkv.weight"][7:27, 1:5])


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    model = Whole()
    write(tmp_path, pieces_of(model, stacked=True), common=common(model))
    path = tmp_path / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-700])
    source = open_torch_dist_checkpoint(tmp_path, IDS)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp ends early"):
        contents(source)


def test_a_box_that_is_missing_is_found(tmp_path: Path) -> None:
    model = Whole()
    pieces = pieces_of(model, stacked=True)
    del pieces["decoder.layers.mlp.linear_fc2.weight"][2]
    source = open_torch_dist_checkpoint(write(tmp_path, pieces, common=common(model)), IDS)
    with pytest.raises(CheckpointError, match=r"incomplete: of decoder.layers.mlp.linear_fc2.weight"):
        contents(source)


class Hostile:
    """Runs a command when it is unpickled by the usual unpickler."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("file", [".metadata", "common.pt", "__0_0.distcp"])
def test_nothing_in_a_folder_is_run(tmp_path: Path, file: str) -> None:
    model, mark = Whole(), tmp_path / "ran"
    write(tmp_path, pieces_of(model, stacked=True), common=common(model))
    if file == ".metadata":
        (tmp_path / file).write_bytes(pickle.dumps(Hostile(mark)))
    elif file == "common.pt":
        torch.save({"args": Hostile(mark)}, tmp_path / file)
    else:
        (tmp_path / file).write_bytes(pickle.dumps(Hostile(mark)) * 2000)
    with pytest.raises(CheckpointError):
        contents(open_torch_dist_checkpoint(tmp_path, IDS))
    assert not mark.exists()


@pytest.mark.parametrize("damage", [lambda index: index[:40], lambda index: b"", lambda index: pickle.dumps({"a": 1})])
def test_a_damaged_index_is_named(tmp_path: Path, damage: Any) -> None:
    model = Whole()
    write(tmp_path, pieces_of(model, stacked=True), common=common(model))
    (tmp_path / ".metadata").write_bytes(damage((tmp_path / ".metadata").read_bytes()))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        open_torch_dist_checkpoint(tmp_path, IDS)


def test_an_index_that_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    model = Whole()
    write(tmp_path, pieces_of(model, stacked=True), common=common(model))
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    next(iter(index.storage_data.values())).relative_path = "../secret"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_torch_dist_checkpoint(tmp_path, IDS)
