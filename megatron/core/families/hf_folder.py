"""How a Hugging Face folder is recognized, which needs none of what reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families.tokenizer_files import read_json_or_empty

CONFIG_FILE = "config.json"


def is_hf_checkpoint(path: str | Path) -> bool:
    """Whether a folder holds the config.json of a published model (that of our own checkpoints has other keys)."""
    config = read_json_or_empty(Path(path) / CONFIG_FILE)
    return "architectures" in config or "model_type" in config


def hf_model_name_or_path(path: str | Path) -> str:
    """Return _name_or_path of a folder's config.json, the model's name or path; empty if there is none."""
    file = Path(path) / CONFIG_FILE
    return str(read_json_or_empty(file).get("_name_or_path") or "") if file.is_file() else ""  # a pipe might never end


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises `CheckpointError` where it cannot be read or is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(content).__name__}, not an object")
    return content
