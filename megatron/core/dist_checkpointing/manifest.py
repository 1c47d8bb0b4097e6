"""manifest.json: where every shard of every tensor of a checkpoint is stored, and its hash. Needs no torch.

    {"save": id, "iteration": 1000,
     "files": {"rank_00000.safetensors": [size, length of the header, hash of the header], ...},
     "tensors": {name: {"dtype": "F32", "shape": [512, 128], "pieces": [
         [file, first byte, offset of the box, shape of the box, hash], ...]}, ...},
     "values": {"run.progress": {...}, ...}}

The shards of a file follow its header without a gap, so headers and shards together are all of its bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_folders import MANIFEST, CheckpointError
from megatron.core.parallel.boxes import Box

_WORDS_BY_WIDTH = {8: "F64 I64 U64", 4: "F32 I32 U32", 2: "BF16 F16 I16 U16", 1: "F8_E4M3 F8_E5M2 I8 U8 BOOL"}
# Safetensors' words for dtypes -> bytes an element.
WIDTHS = {word: width for width, words in _WORDS_BY_WIDTH.items() for word in words.split()}
_FILE = re.compile(r"rank_\d{5,}\.safetensors")


@dataclass(frozen=True, slots=True)
class RankFileInfo:
    """A data file: its size, and length and hash of its header, including the 8 bytes before it."""

    size: int
    header_length: int
    header_hash: str


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One box of a tensor: file, offset of its first byte, box in the global tensor, hash of its bytes."""

    file: str
    start: int
    box: Box
    hash: str


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """A tensor; its shards cover each element exactly once."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredShard, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint. values: everything saved that is not a tensor."""

    save: str
    iteration: int
    files: Mapping[str, RankFileInfo]
    tensors: Mapping[str, ManifestTensor]
    values: Mapping[str, Any]

    def json_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        tensors = {
            name: {
                "dtype": whole.dtype,
                "shape": whole.shape,
                "pieces": [
                    [piece.file, piece.start, piece.box.offset, piece.box.shape, piece.hash] for piece in whole.pieces
                ],
            }
            for name, whole in self.tensors.items()
        }
        files = {name: [facts.size, facts.header_length, facts.header_hash] for name, facts in self.files.items()}
        return json.dumps(
            {"save": self.save, "iteration": self.iteration, "files": files, "tensors": tensors, "values": self.values},
            separators=(",", ":"),
        ).encode()


def data_file_name(rank: int) -> str:
    """Return the name of a rank's data file."""
    return f"rank_{rank:05d}.safetensors"


def is_data_file_name(name: str) -> bool:
    """Return whether a file name is that of a data file, rank_NNNNN.safetensors."""
    return bool(_FILE.fullmatch(name))


def shard_key(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Return the key of a shard in its file: the tensor's name, with the box's ranges unless it is the whole."""
    if box.shape == tuple(shape):
        return name
    return (
        name
        + "["
        + ",".join(f"{start}:{start + size}" for start, size in zip(box.offset, box.shape, strict=True))
        + "]"
    )


def parse_manifest(content: Mapping[str, Any]) -> Manifest:
    """Return the manifest in a JSON object. Raises `CheckpointError` if it is inconsistent."""
    try:
        files = {name: _parse_rank_file_info(name, *entry) for name, entry in content["files"].items()}
        tensors = {name: _parse_manifest_tensor(name, entry, files) for name, entry in content["tensors"].items()}
        save, iteration, values = content["save"], content["iteration"], content["values"]
        _require(
            isinstance(save, str) and _are_nonnegative_ints(iteration) and isinstance(values, dict),
            "save, iteration and values",
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{MANIFEST} is damaged, or was written by another program: {type(error).__name__}: {error}"
        ) from None
    return Manifest(save, iteration, files, tensors, values)


def _parse_rank_file_info(name: str, size: int, header_length: int, header_hash: str) -> RankFileInfo:
    """Check one entry of "files" and return it. Raises `ValueError` if it is invalid."""
    _require(is_data_file_name(name), f"the name of a file in this folder, not {name!r}")
    _require(
        _are_nonnegative_ints(size, header_length) and 8 <= header_length <= size and isinstance(header_hash, str),
        f"the size of {name}",
    )
    return RankFileInfo(size, header_length, header_hash)


def _parse_manifest_tensor(name: str, entry: Mapping[str, Any], files: Mapping[str, RankFileInfo]) -> ManifestTensor:
    """Check one entry of "tensors" and return it. Raises `ValueError` or `KeyError` if it is invalid."""
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    _require(dtype in WIDTHS and _are_nonnegative_ints(*shape), f"dtype and shape of {name}")
    pieces = []
    for file, start, offset, extent, hash_ in entry["pieces"]:
        box = Box(tuple(offset), tuple(extent))
        _require(
            _are_nonnegative_ints(start, *offset, *extent)
            and len(offset) == len(extent) == len(shape)
            and isinstance(hash_, str),
            f"a piece of {name}",
        )
        _require(
            all(low + count <= size for low, count, size in zip(offset, extent, shape, strict=True)),
            f"a box inside {name}",
        )
        _require(
            start >= files[file].header_length and start + box.num_elements * WIDTHS[dtype] <= files[file].size,
            f"a place in {file} for {name}",
        )
        _require(start % WIDTHS[dtype] == 0, f"an even place in {file} for {name}")
        pieces.append(StoredShard(file, start, box, hash_))
    _require(sum(piece.box.num_elements for piece in pieces) == math.prod(shape), f"pieces that make up {name}")
    return ManifestTensor(dtype, shape, tuple(pieces))


def _are_nonnegative_ints(*numbers: Any) -> bool:
    return all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers)


def _require(holds: bool, what: str) -> None:
    """Raise `ValueError` that `what` is lacking, unless it `holds`."""
    if not holds:
        raise ValueError(f"it lacks {what}")
