"""A checkpoint's network as a Hugging Face folder that knows where its texts begin and end.

A config.json without ids of special tokens takes its class's: Llama's say that 2 ends a text, GPT-2's 50256, whatever tokenizer the
network was trained with; generation would then never stop. So the tokenizer of the run, or of the folder that it is to be like, is
built, and its ids are written, into config.json and generation_config.json. Its files are copied, so that the folder can be used at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core.config.flags.declare import ConfigError, config_from_flat_dict
from megatron.core.config.settings.architecture import ARCHITECTURES, GPT
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families import hf_export
from megatron.core.families.parameter_mapping import Family
from megatron.core.families.tokenizer_files import tokenizer_settings_of_folder
from megatron.core.models.parameter_names import WORD_EMBEDDING
from megatron.core.tokenizers.build import build_tokenizer

# Kind of tokenizer -> what a folder calls the files that settings name, and the tokenizer_config.json that says how they are read.
_SINGLE_FILES: Mapping[str, tuple[Mapping[str, str], Mapping[str, Any]]] = {
    "GPT2BPETokenizer": (
        {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
        {"tokenizer_class": "GPT2Tokenizer"},
    ),
    "BertWordPieceLowerCase": (
        {"vocab_file": "vocab.txt"},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
    ),
    "BertWordPieceCase": ({"vocab_file": "vocab.txt"}, {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    **{
        kind: (
            {"tokenizer_model": "tokenizer.model"},
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": kind == "Llama2Tokenizer", "add_eos_token": False},
        )
        for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
    },
    "HuggingFaceTokenizer": ({"tokenizer_model": "tokenizer.json"}, {}),
}


def export_hf_with_tokenizer(
    source: CheckpointSource,
    folder: str | Path,
    *,
    family: str | None = None,
    like: str | Path | None = None,
    shard_bytes: int = hf_export.SHARD_BYTES,
    tokenizer: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Family, str]:
    """`export_hf_folder` with the tokenizer's ids and files. Returns the family, and a sentence on the tokenizer's files.

    like: a folder whose tokenizer is taken; a config.json there has the last word on ids. Left out: what the settings name, or the
    source itself if it is a Hugging Face folder. tokenizer: settings of the tokenizer, where the source has none.
    """
    rows = source.formats[f"model.{WORD_EMBEDDING}"].shape[0] if f"model.{WORD_EMBEDDING}" in source.formats else 0
    settings = {**source.settings, **tokenizer}
    like = like or _tokenizer_folder(settings, source.where)
    files = {} if like else _single_tokenizer_files(settings)
    chosen = hf_export.export_hf_folder(
        source,
        folder,
        family=family,
        like=like,
        shard_bytes=shard_bytes,
        ids=hf_config_special_token_ids(settings, like, rows=rows),
        files=files,
    )
    if like:
        return chosen, f"tokenizer files of {like}"
    return chosen, (
        f"tokenizer files {', '.join(files)}"
        if files
        else "no tokenizer files: the run's are not here, or are of no kind that transformers reads; give a folder with them"
    )


def _tokenizer_folder(settings: Mapping[str, Any], where: str) -> Path | None:
    """Return the folder of the tokenizer that the settings name, or the source if it is one; None if neither is."""
    places = (Path(place) for place in (settings.get("tokenizer_model"), where) if place)
    return next((place for place in places if tokenizer_settings_of_folder(place)), None)


def _single_tokenizer_files(settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the tokenizer's files that the settings name one by one, and its class, by their names in a folder; {} if one is missing."""
    kind = str(settings.get("tokenizer_type"))
    targets, config = _SINGLE_FILES.get(kind, ({}, {}))
    places = {target: Path(settings.get(name) or "") for name, target in targets.items()}
    if not places or not all(place.is_file() for place in places.values()):
        return {}
    files = {target: place.read_bytes() for target, place in places.items()}
    return files | ({"tokenizer_config.json": json.dumps(config, indent=2).encode()} if config else {})


def hf_config_special_token_ids(
    settings: Mapping[str, Any], like: str | Path | None, *, rows: int
) -> dict[str, int | list[int] | None]:
    """Return the keys of a Hugging Face config.json that name special tokens (bos, eos ..), by the tokenizer.
    settings: of a run. like: folder whose tokenizer is taken instead. rows: of the embedding. None is written, since a
    missing key gets the class's default. Empty without a tokenizer, and for a BERT, which generates nothing.
    """
    known = {field.name for field in fields(TokenizerConfig)}
    of_run = {name: value for name, value in settings.items() if name in known}
    chosen = tokenizer_settings_of_folder(Path(like)) if like else of_run
    architecture = ARCHITECTURES[settings.get("architecture", GPT.name)]
    if architecture.predicts_masked_words or not chosen.get("tokenizer_type"):
        return {}
    try:
        tokenizer = build_tokenizer(config_from_flat_dict(TokenizerConfig, chosen))
    except (ConfigError, OSError, ValueError):
        return {}
    ends = list(
        dict.fromkeys(
            token for token in (tokenizer.eod, tokenizer.eos, *tokenizer.end_ids) if token is not None and token < rows
        )
    )
    eos = ends[0] if len(ends) == 1 else ends or None
    ids: dict[str, int | list[int] | None] = {"bos_token_id": tokenizer.bos, "eos_token_id": eos}
    if architecture.is_encoder_decoder:
        ids |= {"decoder_start_token_id": tokenizer.bos, "pad_token_id": tokenizer.pad}
    return ids
