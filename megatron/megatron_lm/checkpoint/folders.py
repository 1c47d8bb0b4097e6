"""How Megatron-LM's checkpoints of either kind are recognized, which needs next to nothing of what reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron.core.dist_checkpointing.files import DISK, read_file

RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_TRACKER = "latest_checkpointed_iteration.txt"


def is_legacy_checkpoint(folder: str | Path) -> bool:
    """Whether a folder holds a checkpoint in the old format, one file a rank."""
    return any(RANK_FOLDER.fullmatch(path.name) for path in Path(folder).glob("mp_rank_*"))


def is_torch_dist(folder: str | Path) -> bool:
    """Whether a folder holds a checkpoint of Megatron Core's distributed format, or of Megatron FSDP's."""
    folder = Path(folder)
    if not (folder / ".metadata").is_file():
        return False
    try:
        mark = json.loads(read_file(DISK, folder / "metadata.json"))
        return isinstance(mark, dict) and mark.get("sharded_backend") == "torch_dist"
    except FileNotFoundError:  # written last, and by Megatron FSDP not at all: its index has to be read
        from megatron.megatron_lm.checkpoint.torch_dist import is_fsdp_index

        return is_fsdp_index(folder / ".metadata")
    except (OSError, ValueError):
        return False


def find_megatron_checkpoint(path: str | Path, iteration: int | None = None) -> Path | None:
    """Return the folder of a Megatron checkpoint: `path` itself, or the iteration (or release) that its tracker names;
    None if there is none. iteration: this one instead.
    """
    path = Path(path)
    if iteration is None and (is_legacy_checkpoint(path) or is_torch_dist(path)):
        return path
    if iteration is not None:
        names = [f"iter_{iteration:07d}"]
    else:
        try:
            word = read_file(DISK, path / _TRACKER).decode("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            word = "release"
        names = ["release"] if word == "release" else [f"iter_{int(word):07d}"] if word.isdecimal() else []
    return next(
        (path / name for name in names if is_legacy_checkpoint(path / name) or is_torch_dist(path / name)), None
    )
