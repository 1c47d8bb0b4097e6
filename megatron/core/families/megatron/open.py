"""A folder of Megatron's, whatever its version, as a `Source`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.source import Source
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.families.megatron.legacy import is_legacy, open_legacy
from megatron.core.families.megatron.torch_dist import is_torch_dist, open_torch_dist

_TRACKER = "latest_checkpointed_iteration.txt"


def find_megatron(path: str | Path, iteration: int | None = None) -> Path | None:
    """The folder of Megatron's that `path` means: itself, or the iteration (or release) that its tracker names.

    iteration: this one instead. None when there is nothing of Megatron's there.
    """
    path = Path(path)
    if iteration is None and (is_legacy(path) or is_torch_dist(path)):
        return path
    if iteration is not None:
        names = [f"iter_{iteration:07d}"]
    else:
        try:
            word = (path / _TRACKER).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            word = "release"
        names = ["release"] if word == "release" else [f"iter_{int(word):07d}"] if word.isdecimal() else []
    return next((path / name for name in names if is_legacy(path / name) or is_torch_dist(path / name)), None)


def open_megatron(path: str | Path, given: Mapping[str, Any] | None = None) -> Source:
    """The checkpoint of Megatron's in a folder, or the one that the folder's tracker names.

    given: settings that win over the checkpoint's, and `true_vocab_size`, without which the rows that pad the vocabulary
    count as ids.
    """
    folder = find_megatron(path)
    if folder is None:
        raise CheckpointError(f"{path} holds no checkpoint of Megatron's: neither mp_rank_... folders, nor a metadata.json "
                              "that says torch_dist")
    return open_legacy(folder, given) if is_legacy(folder) else open_torch_dist(folder, given)
