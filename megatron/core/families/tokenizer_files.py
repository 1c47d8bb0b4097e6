"""Which tokenizer the files of a Hugging Face folder make, in our settings.

A tokenizer.json says everything by itself. Older files do not: what cuts text into words stands in the code of a class,
which tokenizer_config.json may name, so that a vocabulary is taken only for a class whose rule we have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.flags.declare import raise_config_error_if
from megatron.core.config.foreign.mapping import short_value
from megatron.core.dist_checkpointing.files import DISK, read_file

_SIGNS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def tokenizer_settings_of_folder(folder: Path) -> dict[str, Any]:
    """Return the settings of `TokenizerConfig` for a folder's tokenizer files; {} if it has none.

    Files of a tokenizer class that is not built here, without a tokenizer.json, are named HuggingFaceTokenizer, which
    then asks for that file.
    """
    if not any((folder / name).is_file() for name in _SIGNS):
        return {}
    here = folder.resolve()
    config = read_json_or_empty(folder / "tokenizer_config.json")
    named = config.get("tokenizer_class")
    kind = str(named).removesuffix("Fast") if named else None

    def has_files_but_no_tokenizer_json(*names: str) -> bool:
        return all((folder / name).is_file() for name in names) and not (folder / "tokenizer.json").is_file()

    if has_files_but_no_tokenizer_json("vocab.json", "merges.txt") and kind in (None, "GPT2Tokenizer"):
        _refuse_other_settings(folder, config, add_prefix_space=False, add_bos_token=False)
        return {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": str(here / "vocab.json"),
            "merge_file": str(here / "merges.txt"),
        }
    if has_files_but_no_tokenizer_json("vocab.txt") and kind in (None, "BertTokenizer"):
        lower = bool(config.get("do_lower_case", True))
        _refuse_other_settings(folder, config, tokenize_chinese_chars=True, strip_accents=lower)
        case = "LowerCase" if lower else "Case"
        return {"tokenizer_type": f"BertWordPiece{case}", "vocab_file": str(here / "vocab.txt")}
    if has_files_but_no_tokenizer_json("tokenizer.model") and kind in (None, "LlamaTokenizer"):
        _refuse_other_settings(folder, config, add_eos_token=False, add_prefix_space=True, sp_model_kwargs={})
        name = "GPTSentencePieceTokenizer" if config.get("add_bos_token") is False else "Llama2Tokenizer"
        return {"tokenizer_type": name, "tokenizer_model": str(here / "tokenizer.model")}
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(here)}


def _refuse_other_settings(folder: Path, config: Mapping[str, Any], **built: object) -> None:
    """Raise `ConfigError` for settings of a class of transformers with other values than those that are built here."""
    raise_config_error_if(
        f"{folder / 'tokenizer_config.json'}: {name}: {short_value(config[name])} has no counterpart here without a "
        f"tokenizer.json; {short_value(value)} has. `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` writes one"
        for name, value in built.items()
        if config.get(name) is not None and config[name] != value
    )


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if it is missing, unreadable or no object, which a later reader reports."""
    try:
        content = json.loads(read_file(DISK, path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
