"""Write tensors as a distributed checkpoint of Megatron Core's, on one processor and one tensor at a time.

torch.distributed.checkpoint lays out the boxes and the index; what Megatron adds is `common.pt` and `metadata.json`.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class _LazySavePlanner(DefaultSavePlanner):
    """Save planner that plans with meta tensors, and computes each tensor when it is written."""

    def __init__(self, values: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """See `SavePlanner`."""
        if write_item.type != WriteItemType.BYTE_IO:
            return self._values[write_item.index.fqn]()
        empty = io.BytesIO()
        torch.save([None], empty)
        return empty


def write_torch_dist_tensors(
    folder: Path,
    values: Mapping[str, Callable[[], Tensor]],
    formats: Mapping[str, Tensor],
    states: Sequence[str],
    common: Mapping[str, Any],
) -> None:
    """Write tensors of any shape into an existing folder, under the names of the torch_dist format.

    values: functions that make each tensor; formats: the same tensors on the meta device; states: keys of objects that
    are all None (stored as a list with one element); common: values that are no tensors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        checkpoint.save(
            {**formats, **dict.fromkeys(states)},
            planner=_LazySavePlanner(values),
            no_dist=True,
            storage_writer=checkpoint.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1),
        )
    torch.save(dict(common), folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_FORMAT), encoding="ascii")
