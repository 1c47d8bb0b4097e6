"""Which rank writes which box: every box is assigned to one of the ranks that hold it, so that all write about as much."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint_folders import xxh3_hex_digest
from megatron.core.dist_checkpointing.manifest import (
    WIDTHS,
    ManifestTensor,
    RankFileInfo,
    StoredShard,
    data_file_name,
    shard_key,
)
from megatron.core.dist_checkpointing.rank_file import HashedByteRange
from megatron.core.dist_checkpointing.saved import WORDS
from megatron.core.dist_checkpointing.sharded_state import ShardedTensor, Tree, replicated_tensor
from megatron.core.parallel.boxes import Box

_ALIGNMENT = 64  # boxes begin at a multiple of it


@dataclass(frozen=True, slots=True, order=True)
class BoxToWrite:
    """A box of a tensor that a rank could write. dtype: in safetensors' notation. shape: of the whole tensor."""

    name: str
    box: Box
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the box."""
        return self.box.num_elements * WIDTHS[self.dtype]

    @property
    def key(self) -> str:
        """Its key in a data file."""
        return shard_key(self.name, self.box, self.shape)


def sharded_tensors_of_state(state: Tree) -> dict[str, ShardedTensor]:
    """Return the tensors of a tree of state, of any shape, by name; plain tensors become replicated ones."""
    result = {name: replicated_tensor(value) if isinstance(value, Tensor) else value for name, value in state.items()}
    return {name: value for name, value in result.items() if isinstance(value, ShardedTensor)}


def non_tensor_values(state: Tree) -> Tree:
    """Return the entries of a tree that are not tensors."""
    return {name: value for name, value in state.items() if not isinstance(value, (Tensor, ShardedTensor))}


def local_boxes_to_write(tensors: dict[str, ShardedTensor]) -> list[BoxToWrite]:
    """Return the boxes of tensors of any shape that this rank holds and could write; a box held twice counts once."""
    for name, one in tensors.items():
        assert one.dtype in WORDS, f"{name}: {one.dtype} is none of the dtypes of a checkpoint"
    return [
        BoxToWrite(name, box, WORDS[one.dtype], tuple(one.shape))
        for name, one in tensors.items()
        for box in dict.fromkeys(box for box, _ in one.pieces)
    ]


def assign_writers(ranks: Sequence[Sequence[BoxToWrite]]) -> list[list[BoxToWrite]]:
    """Assign every box to one of the ranks that hold it, the one with the least to write so far.

    ranks: the boxes that each rank holds. Returns the boxes that each rank writes, in the order of its file: dtypes
    with large elements first, then by name. Asserts that the boxes of a tensor cover it.
    """
    holders: dict[BoxToWrite, list[int]] = {}
    for rank, mine in enumerate(ranks):
        for offer in mine:
            holders.setdefault(offer, []).append(rank)
    _require_full_coverage(list(holders))
    loads: list[int] = [0] * len(ranks)
    shares: list[list[BoxToWrite]] = [[] for _ in ranks]
    # What only one rank holds comes first; then the largest first, which evens out best.
    for offer in sorted(holders, key=lambda one: (len(holders[one]) > 1, -one.num_bytes, one)):
        writer = min(holders[offer], key=lambda rank: (loads[rank], rank))
        loads[writer] += offer.num_bytes
        shares[writer].append(offer)
    return [sorted(share, key=lambda one: (-WIDTHS[one.dtype], one)) for share in shares]


def local_tensor_of_box(offer: BoxToWrite, tensors: dict[str, ShardedTensor]) -> Tensor:
    """Return this rank's tensor for a box that it is to write; it has the shape of the box (any shape)."""
    return next(tensor for box, tensor in tensors[offer.name].pieces if box == offer.box)


def rank_file_header(rank: int, share: Sequence[BoxToWrite], *, save: str, iteration: int) -> bytes:
    """Return the header of a rank's data file (safetensors). The boxes keep their order."""
    metadata = {"format": "pt", "save": save, "iteration": str(iteration), "file": data_file_name(rank)}
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for offer in share:
        start, end = end, end + offer.num_bytes
        entries[offer.key] = {"dtype": offer.dtype, "shape": list(offer.box.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def rank_file_ranges(
    rank: int, share: Sequence[BoxToWrite], header: bytes, hashes: Sequence[str]
) -> list[HashedByteRange]:
    """Return the byte ranges of a rank's data file, header first, with their hashes. hashes: of header and boxes."""
    result, place = [HashedByteRange(data_file_name(rank), 0, len(header), hashes[0], "its header")], len(header)
    for offer, hash_ in zip(share, hashes[1:], strict=True):
        result.append(HashedByteRange(data_file_name(rank), place, offer.num_bytes, hash_, offer.key))
        place += offer.num_bytes
    return result


def manifest_entries(
    shares: Sequence[Sequence[BoxToWrite]], hashes: Sequence[Sequence[str]], *, save: str, iteration: int
) -> tuple[dict[str, RankFileInfo], dict[str, ManifestTensor]]:
    """Return the data files and tensors of any shape as the manifest lists them.

    shares: the boxes that each rank writes. hashes: of each rank's header and boxes, from `shard.write_rank_file`.
    """
    files: dict[str, RankFileInfo] = {}
    pieces: dict[str, list[StoredShard]] = {}
    facts: dict[str, BoxToWrite] = {}
    for rank, (share, result) in enumerate(zip(shares, hashes, strict=True)):
        if not share:
            continue
        header = rank_file_header(rank, share, save=save, iteration=iteration)
        assert result[0] == xxh3_hex_digest(header), "the ranks agree about the headers"
        head, *rest = rank_file_ranges(rank, share, header, result)
        for offer, one in zip(share, rest, strict=True):
            pieces.setdefault(offer.name, []).append(StoredShard(one.file, one.start, offer.box, one.hash))
            facts.setdefault(offer.name, offer)
        files[head.file] = RankFileInfo(head.length + sum(one.length for one in rest), head.length, head.hash)
    tensors = {
        name: ManifestTensor(
            facts[name].dtype, facts[name].shape, tuple(sorted(pieces[name], key=lambda piece: piece.box))
        )
        for name in sorted(pieces)
    }
    return files, tensors


def _require_full_coverage(offers: Sequence[BoxToWrite]) -> None:
    """Assert that the boxes of each tensor have as many elements as the tensor."""
    held: dict[str, int] = {}
    for offer in offers:
        held[offer.name] = held.get(offer.name, 0) + offer.box.num_elements
    for offer in offers:
        size = math.prod(offer.shape)
        assert held[offer.name] == size, (
            f"{offer.name}: the ranks' boxes hold {held[offer.name]} elements, the tensor has {size}"
        )
