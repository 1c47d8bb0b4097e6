"""A folder of Megatron's, whatever its version, as a `Source`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.flags import ConfigError
from megatron.core.dist_checkpointing.files import DISK, read_file
from megatron.core.dist_checkpointing.source import Source
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.families.megatron.legacy import is_legacy, legacy_arguments, open_legacy
from megatron.core.families.megatron.torch_dist import is_torch_dist, open_torch_dist, torch_dist_arguments
from megatron.core.families.registry import model_of
from megatron.core.models.describe import parameter_shapes
from megatron.core.models.names import VOCABULARY, WORD_EMBEDDING

_MOST = 12  # problems that are told
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
            word = read_file(DISK, path / _TRACKER).decode("utf-8").strip()
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
        raise CheckpointError(
            f"{path} holds no checkpoint of Megatron's: neither mp_rank_... folders, nor a metadata.json "
            "that says torch_dist"
        )
    source: Source = open_legacy(folder, given) if is_legacy(folder) else open_torch_dist(folder, given)
    _demand_its_network(source)
    return source


def megatron_arguments(path: str | Path, iteration: int | None = None) -> dict[str, Any]:
    """The arguments of the run that saved a checkpoint of Megatron's; empty when there is none, or it has none."""
    folder = find_megatron(path, iteration)
    return {} if folder is None else legacy_arguments(folder) if is_legacy(folder) else torch_dist_arguments(folder)


def _demand_its_network(source: Source) -> None:
    """Refuse parameters that the network of the settings does not have, lacks, or has in other shapes.

    Of a BERT heads may be missing. Published files without arguments do not say all sizes.
    """
    try:
        model = model_of({"true_vocab_size": source.formats[f"model.{WORD_EMBEDDING}"].shape[0], **source.settings})
        expected = {name: tuple(shape) for name, shape in parameter_shapes(model).items()}
    except ConfigError as error:
        raise CheckpointError(f"{source.where} has arguments that make no network here: {error}") from None
    shapes = {
        name.removeprefix("model."): tuple(one.shape)
        for name, one in source.formats.items()
        if name.startswith("model.")
    }
    problems = [f"{name}: no parameter of this network" for name in shapes if name not in expected]
    if model.architecture == "gpt":
        problems += [f"{name} is missing" for name in expected if name not in shapes]
    if {"ffn_hidden_size", "kv_channels"} <= source.settings.keys():
        problems += [
            f"{name}: {shapes[name]} in the checkpoint, {expected[name]} by its arguments"
            for name in shapes.keys() & expected.keys() - VOCABULARY
            if shapes[name] != expected[name]
        ]
    if problems:
        more = [f"... and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
        raise CheckpointError(
            f"{source.where} holds a network that is not built here, or has other arguments", problems[:_MOST] + more
        )
