"""Save and load a tree through torch.distributed.checkpoint (DCP), which knows files and intersects boxes.

A saving rank says which boxes it could write, and rank 0 gives each box to one of its holders. A loading rank says
which boxes it wants, and DCP finds out which saved boxes they meet. Our planners hold the tree and translate; DCP itself
is handed an empty state.

Values that are no tensors are stored as JSON text. Pickle is used in one place only, DCP's own `.metadata` index; it is
read by an unpickler that knows the index's classes and nothing else, so that a foreign file cannot run code.
"""

from __future__ import annotations

import io
import json
import math
import pathlib
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.planner import (
    LoadItemType, LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.dist_checkpointing.tree import Placed, Tree, placed_tensor
from megatron.core.parallel import collectives
from megatron.core.parallel.boxes import Box
from megatron.core.parallel.mesh import Axis

_INDEX = ".metadata"
_ALONE = Axis("world")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Format:
    """What a checkpoint's tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def save(state: Tree, folder: str | Path, axis: Axis = _ALONE) -> None:
    """Write the tree that the ranks of `axis` hold together into a folder. Every byte is written once, by one rank."""
    writer, planner = _Writer(folder, sync_files=True, overwrite=True), _SavePlanner(_placed(state))
    _collectively(f"{folder} cannot be written", lambda: dcp.save(
        {}, storage_writer=writer, planner=planner, process_group=axis.group, no_dist=axis.size == 1))


def load(state: Tree, folder: str | Path, axis: Axis = _ALONE, *, complete: tuple[str, ...] = (),
         instead: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Fill the tensors of the tree from a folder; names that the tree lacks are left alone. Returns the other values.

    Formats are converted. complete: beginnings of names under which every name of the checkpoint must be asked for by
    some rank. instead: name -> the checkpoint's name to read in its place.
    """
    found = read_metadata(folder, axis)
    planner = _LoadPlanner(_placed(state), complete, instead or {})
    reader = _Reader(folder, found)
    _collectively(f"{folder} cannot be read", lambda: dcp.load(
        {}, storage_reader=reader, planner=planner, process_group=axis.group, no_dist=axis.size == 1))
    return planner.values


def read_metadata(folder: str | Path, axis: Axis = _ALONE) -> index.Metadata:
    """The index of a folder: every name with its shape, format and boxes. All ranks of the axis fail, or none."""
    path = Path(folder) / _INDEX
    found, failure = None, ""
    try:
        with path.open("rb") as file:
            found = _IndexUnpickler(file).load()
        if not isinstance(found, index.Metadata) or not isinstance(found.storage_data, dict):
            failure = "it holds no index"
    except FileNotFoundError:
        failure = "it is missing"
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        failure = f"it is damaged ({error})"
    failures = [text for text in collectives.gather_objects(failure, axis) if text]
    if failures:
        raise CheckpointError(f"{path} cannot be read: {failures[0]}")
    return found


def formats(metadata: index.Metadata) -> dict[str, Format]:
    """Every tensor in a checkpoint."""
    return {name: Format(tuple(entry.size), entry.properties.dtype) for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, index.TensorStorageMetadata)}


class _SavePlanner(dcp.DefaultSavePlanner):
    """Offers the boxes of a tree; as the coordinator, gives each box to one holder."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tree = tree

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, value in self.tree.items():
            if isinstance(value, Placed):
                items += _write_items(name, value)
            else:
                items.append(WriteItem(index.MetadataIndex(name), WriteItemType.BYTE_IO))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], index.Metadata]:
        plans = share_out(all_plans)
        held: dict[str, int] = {}
        data = [(item.index.fqn, item.tensor_data) for plan in plans for item in plan.items if item.tensor_data is not None]
        for name, tensor in data:
            held[name] = held.get(name, 0) + math.prod(tensor.chunk.sizes)
        for name, tensor in data:
            size = math.prod(tensor.size)
            assert held[name] == size, f"{name}: the ranks' boxes hold {held[name]} elements, the tensor has {size}"
        return super().create_global_plan(plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        value = self.tree[write_item.index.fqn]
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(value).encode())
        return next(tensor for box, tensor in value.pieces if box.offset == tuple(write_item.index.offset))


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Asks for the boxes of a tree; as the coordinator, refuses what does not fit, all at once."""

    def __init__(self, tree: Tree, complete: tuple[str, ...], instead: Mapping[str, str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tree, self.complete, self.instead = tree, complete, instead
        self.values: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        problems: list[str] = []
        for name, value in self.tree.items():
            source = self.instead.get(name, name)
            entry = self.metadata.state_dict_metadata.get(source)
            problem = _unfit(source, value, entry)
            if problem:
                problems.append(problem)
            elif isinstance(value, Placed):
                found = _read_items(name, source, value, entry)
                asked = sum(box.size for box, _ in value.pieces)
                if sum(math.prod(item.lengths) for item in found) != asked:
                    problems.append(f"{source}: incomplete, the checkpoint lacks some of its boxes")
                items += found
            else:
                place, nothing = index.MetadataIndex(source), torch.Size((0,))
                items.append(ReadItem(LoadItemType.BYTE_IO, index.MetadataIndex(name), nothing, place, nothing, nothing))
        return LoadPlan(items, planner_data=(list(self.tree), problems))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        asked = {name for plan in global_plan for name in plan.planner_data[0]}
        problems = list(dict.fromkeys(problem for plan in global_plan for problem in plan.planner_data[1]))
        problems += [f"{name}: unexpected, the checkpoint has it and this run does not"
                     for name in sorted(self.metadata.state_dict_metadata)
                     if name.startswith(self.complete) and name not in asked]
        if problems:
            raise CheckpointError(f"{len(problems)} names of the checkpoint do not fit this run", problems)
        return [replace(plan, planner_data=None) for plan in global_plan]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = json.loads(value.read())

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        _, tensor = self.tree[read_item.dest_index.fqn].pieces[read_item.dest_index.index]
        place = Box(tuple(read_item.dest_offsets), tuple(read_item.lengths))
        return tensor[place.slices()]


class _Writer(dcp.FileSystemWriter):
    """Writes one file a rank. The index holds no path and no random id: equal states make equal files."""

    def storage_meta(self) -> index.StorageMeta:
        return index.StorageMeta()


class _Reader(dcp.FileSystemReader):
    """Reads each saved box once, however many wanted boxes it meets, and names the file that is at fault."""

    def __init__(self, folder: str | Path, metadata: index.Metadata) -> None:
        super().__init__(folder)
        self.folder, self.metadata = Path(folder), metadata

    def read_metadata(self, *_: Any, **__: Any) -> index.Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        files: dict[str, dict[index.MetadataIndex, list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            files.setdefault(info.relative_path, {}).setdefault(item.storage_index, []).append(item)
        for name, boxes in sorted(files.items()):
            path = self.folder / name
            if Path(name).name != name:
                raise CheckpointError(f"{self.folder / _INDEX} is damaged: it names a file outside its folder, {name}")
            try:
                with path.open("rb") as file:
                    for place, items in sorted(boxes.items(), key=lambda entry: self.storage_data[entry[0]].offset):
                        _read_box(file, self.storage_data[place], items, planner)
            except Exception as error:  # noqa: BLE001 - a damaged file may raise anything; the user needs its name
                raise CheckpointError(f"{path} is missing, truncated or damaged: {_first_line(error)}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's index, and nothing that could act."""

    _MODULES = {index.__name__: index, filesystem.__name__: filesystem}
    _NAMES = {"Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
              "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo"}

    def find_class(self, module: str, name: str) -> Any:
        if module in self._MODULES and name in self._NAMES:
            return getattr(self._MODULES[module], name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {"torch.strided": torch.strided}.__getitem__
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in an index")


def share_out(plans: list[SavePlan]) -> list[SavePlan]:
    """Give everything that several ranks hold to one of them, the one with the least to write so far."""
    holders: dict[index.MetadataIndex, list[int]] = {}
    sizes: dict[index.MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = _bytes_of(item)
    loads, writer = [0] * len(plans), {}
    # What only one rank holds comes first; then the largest first, which evens out best.
    for place in sorted(holders, key=lambda p: (len(holders[p]) > 1, -sizes[p], p.fqn, tuple(p.offset or ()))):
        writer[place] = min(holders[place], key=lambda rank: (loads[rank], rank))
        loads[writer[place]] += sizes[place]
    return [replace(plan, items=[item for item in plan.items if writer[item.index] == rank]) for rank, plan in enumerate(plans)]


def _placed(state: Tree) -> Tree:
    return {name: placed_tensor(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def _chunk(box: Box) -> index.ChunkStorageMetadata:
    return index.ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))


def _write_items(name: str, placed: Placed) -> Iterable[WriteItem]:
    """One item a box; a box that this rank holds twice counts once."""
    properties = index.TensorProperties(dtype=placed.dtype)
    return [WriteItem(index.MetadataIndex(name, box.offset), WriteItemType.SHARD,
                      tensor_data=TensorWriteData(_chunk(box), properties, torch.Size(placed.shape)))
            for box in dict.fromkeys(box for box, _ in placed.pieces)]


def _read_items(name: str, source: str, placed: Placed, entry: index.TensorStorageMetadata) -> list[ReadItem]:
    """What to copy from which saved box into which of our pieces (told by its number)."""
    found = []
    for number, (box, _) in enumerate(placed.pieces):
        for item in create_read_items_for_chunk_list(source, entry, [_chunk(box)]):
            found.append(replace(item, dest_index=index.MetadataIndex(name, box.offset, number)))
    return found


def _read_box(file: Any, info: Any, items: list[ReadItem], planner: Any) -> None:
    """Read one saved box, or one text, and hand it to everyone who waits for it."""
    file.seek(info.offset)
    content = file.read(info.length)
    if len(content) != info.length:
        raise EOFError(f"it ends {info.length - len(content)} bytes early")
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(content))
    wanted = [item for item in items if item.type == LoadItemType.TENSOR]
    if wanted:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        for item in wanted:
            target = planner.resolve_tensor(item)
            target.copy_(tensor[Box(tuple(item.storage_offsets), tuple(item.lengths)).slices()])


def _unfit(name: str, value: Any, entry: Any) -> str:
    """Why a name of the checkpoint cannot become this value, or nothing."""
    if entry is None:
        return f"{name}: missing in the checkpoint"
    is_tensor = isinstance(entry, index.TensorStorageMetadata)
    if isinstance(value, Placed) != is_tensor:
        return f"{name}: the checkpoint holds a {'tensor' if is_tensor else 'value'}, not a {'value' if is_tensor else 'tensor'}"
    if is_tensor and tuple(entry.size) != tuple(value.shape):
        return f"{name}: shape {tuple(entry.size)} in the checkpoint, {tuple(value.shape)} expected"
    return ""


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 1 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _collectively(summary: str, action: Callable[[], Result]) -> Result:
    """Run a collective of DCP; whatever failed on whichever ranks becomes one `CheckpointError` on all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            return action()
    except dcp.CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
    known = [failure for failure in failures if isinstance(failure, CheckpointError)]
    if len(known) == len(failures) and len({str(failure) for failure in known}) == 1:
        raise CheckpointError(known[0].summary, known[0].problems)
    texts = [line for failure in failures for line in (str(failure) if failure in known else _first_line(failure)).splitlines()]
    raise CheckpointError(summary, list(dict.fromkeys(texts)))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
