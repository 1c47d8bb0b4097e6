"""What a folder of checkpoints holds."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing.checkpoint_folders import scan_checkpoint_folder


def complete_iterations(folder: str | Path) -> list[int]:
    """The iterations with a committed checkpoint, ascending."""
    return sorted({step.iteration for step in scan_checkpoint_folder(folder).steps})
