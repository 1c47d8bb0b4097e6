"""What a checkpoint of another format holds. Imports torch, which takes longer than showing a checkpoint of our own."""

from __future__ import annotations

import math

from megatron.core.dist_checkpointing.saved import WORDS
from megatron.training.checkpoint.formats import find_foreign_checkpoint, open_checkpoint
from megatron.verify.compare.contents import CheckpointContents, TensorEntry


def foreign_checkpoint_contents(path: str, step: int | None) -> CheckpointContents:
    """Return the contents of a checkpoint of another format. step: iteration, in a folder of several."""
    source, files = open_checkpoint(path, step), find_foreign_checkpoint(path, step)
    tensors = tuple(
        TensorEntry(
            name, WORDS.get(one.dtype, str(one.dtype)), tuple(one.shape), math.prod(one.shape) * one.dtype.itemsize
        )
        for name, one in source.formats.items()
    )
    iteration, name = (
        source.values.get("run.progress", {}).get("iteration"),
        files[0].name if files else "another project",
    )
    return CheckpointContents(source.where, name, iteration, None, {}, tensors, source.values, source.settings)
