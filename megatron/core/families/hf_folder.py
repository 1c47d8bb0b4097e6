"""How a Hugging Face folder is recognized, which needs none of what reads it."""

from __future__ import annotations

from pathlib import Path

from megatron.core.families.tokenizer_files import read_json_or_empty

CONFIG_FILE = "config.json"


def is_hf_checkpoint(path: str | Path) -> bool:
    """Whether a folder holds the config.json of a published model (that of our own checkpoints has other keys)."""
    config = read_json_or_empty(Path(path) / CONFIG_FILE)
    return "architectures" in config or "model_type" in config
