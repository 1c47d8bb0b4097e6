"""Writing a Hugging Face folder: weights, config.json, and the files that are carried along, a tensor at a time.

`export` writes one from any `Source`; hf.py reads it, and says what the files are. Memory never holds more than one whole tensor.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.files import DISK
from megatron.core.dist_checkpointing.source import CheckpointSource, ShapeAndDtype
from megatron.core.families.config_json import architectures_of
from megatron.core.families.hf import DTYPE_WORDS, PUBLISHED, WEIGHTS_FILE, write_json
from megatron.core.families.hf_folder import CONFIG_FILE, read_json
from megatron.core.families.parameter_mapping import Family, HFModelClass, ParameterMapping, hf_shapes
from megatron.core.families.registry import family_of_config, fitting_family
from megatron.core.families.tensor_file import SafetensorsEntry, preallocate_safetensors_file, write_safetensors_tensor
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.models.parameter_names import WORD_EMBEDDING
from megatron.core.parallel.boxes import Box, whole_box

SHARD_BYTES = 5_000_000_000
_CARRIED = tuple(
    """
    generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    merges.txt vocab.txt tokenizer.model spiece.model chat_template.jinja chat_template.json
    """.split()
)


def export_hf_folder(
    source: CheckpointSource,
    folder: str | Path,
    *,
    family: str | None = None,
    like: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    ids: Mapping[str, int | list[int] | None] = MappingProxyType({}),
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> Family:
    """Write the model of a source as a folder. The folder gets its name when it is complete. Returns the family.

    family: one of `registry.FAMILIES`; left out, the one that the source came from, else the first that can say what the
    network is. like: a folder whose tokenizer files, and whose ids of special tokens, are carried over.
    shard_bytes: the largest file, if no tensor is larger. ids: of special tokens, where no earlier config.json says them.
    files: further files, such as a tokenizer's, by name; those of `like` win.
    `rewrite.CastSource` gives the weights another dtype on the way.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already; move it away, or choose another folder")
    earlier = (
        read_json(Path(like) / CONFIG_FILE)
        if like and (Path(like) / CONFIG_FILE).is_file()
        else source.values.get(PUBLISHED, {})
    )
    embedding = source.formats.get(f"model.{WORD_EMBEDDING}", ShapeAndDtype((0,), torch.float32))
    model = model_config_from_settings(
        {"true_vocab_size": embedding.shape[0], **source.settings}
    )  # a format without a tokenizer has its rows
    if family is None and earlier:
        family = family_of_config(earlier, f"{like or source.where}").name
    chosen = fitting_family(model, family)
    variant, rows, formats = _export_plan(chosen, model, source)
    config = {
        **dict(chosen.fallbacks),
        **ids,
        **_config_json_to_export(chosen, model, earlier if _config_is_of_family(earlier, chosen) else {}, formats),
        "architectures": [variant.architecture],
    } | _reward_head_config_keys(model, {**ids, **earlier})
    with folder_written_whole(folder) as made:
        _write_weights(made, rows, formats, source, shard_bytes, chosen.constants(model))
        write_json(made / CONFIG_FILE, config)
        _write_generation_config(made, config)
        for name, content in files.items():
            (made / name).write_bytes(content)
        _copy_tokenizer_files(like, made)
    return chosen


@contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """Within: a folder to write files into, which takes the name `folder` when the block ends and is removed if it raises.

    `CheckpointError` if it cannot be written, as on a full disk.
    """
    made = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        yield made
        for path in (*made.iterdir(), made):
            DISK.sync_folder(path)
        DISK.rename(made, folder)
        DISK.sync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _export_plan(
    family: Family, model: ModelConfig, source: CheckpointSource
) -> tuple[HFModelClass, tuple[ParameterMapping, ...], dict[str, ShapeAndDtype]]:
    """Return the class to export as, its mappings, and the formats of the tensors to write, in order.

    Raises `CheckpointError` if the source lacks parameters or has others; heads may be missing.
    """
    there = {
        name.removeprefix("model."): format for name, format in source.formats.items() if name.startswith("model.")
    }
    variant, lacking = family.class_for_parameters(there), family.missing_heads(there)
    base = family.base if variant.bare else ""
    rows = tuple(
        ParameterMapping(row.ours, tuple(name.removeprefix(base) for name in row.theirs), row.op)
        for row in family.network_mappings(model)
        if not row.ours.startswith(lacking)
    )
    shapes = {name: shape for name, shape in global_parameter_shapes(model).items() if not name.startswith(lacking)}
    if problems := _parameter_difference_problems(there, shapes):
        raise CheckpointError(f"{source.where} does not hold the network that its settings describe", problems)
    their = hf_shapes(rows, shapes)
    formats = {name: ShapeAndDtype(their[name], there[row.ours].dtype) for row in rows for name in row.theirs}
    dtype = next(iter(formats.values())).dtype
    return (
        variant,
        rows,
        formats | {name: ShapeAndDtype(shape, dtype) for name, (shape, _) in family.constants(model).items()},
    )


def _parameter_difference_problems(
    formats: Mapping[str, ShapeAndDtype], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """How the parameters of a source differ from those of the network that its settings describe."""
    problems = [f"{name} is missing" for name in shapes if name not in formats]
    problems += [f"{name} is unknown to the architecture" for name in formats if name not in shapes]
    return problems + [
        f"{name} has shape {list(formats[name].shape)}, and the settings say {list(shapes[name])}"
        for name in shapes
        if name in formats and formats[name].shape != shapes[name]
    ]


def _config_is_of_family(config: Mapping[str, Any], family: Family) -> bool:
    """Whether a config.json belongs to a family: by its class if it names one, else by its model_type."""
    named = architectures_of(config)
    return bool(family.class_for_architectures(named)) if named else config.get("model_type") == family.model_type


def _config_json_to_export(
    family: Family, model: ModelConfig, like: Mapping[str, Any], formats: Mapping[str, ShapeAndDtype]
) -> dict[str, Any]:
    """Return the config.json to write, with the most frequent dtype of the weights. like: an earlier one."""
    word = DTYPE_WORDS[Counter(format.dtype for format in formats.values()).most_common(1)[0][0]]
    config = {**family.to_hf_config(model, like), "model_type": like.get("model_type", family.model_type)}
    config["dtype" if "dtype" in like else "torch_dtype"] = word
    return config


def _reward_head_config_keys(model: ModelConfig, ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for a reward model: one label, and a padding token that is not an end token. {}
    for others. ids: of special tokens, by their keys in config.json.
    """
    if not model.reward_head:
        return {}
    ends = ids.get("eos_token_id")
    others = [ids.get(name) for name in ("pad_token_id", "bos_token_id")]
    known = ends if isinstance(ends, list) else [ends]
    padding = next((one for one in others if one is not None and one not in known), None)
    return {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": padding}


def _split_into_files(formats: Mapping[str, ShapeAndDtype], limit: int) -> dict[str, list[str]]:
    """Return file name -> tensors: in order, a new file before one would exceed the limit, larger tensors alone."""
    files: list[list[str]] = []
    open_file: list[str] = []
    size = 0
    for name, one in formats.items():
        length = one.num_bytes
        if length > limit:
            files.append([name])
            continue
        if open_file and size + length > limit:
            files.append(open_file)
            open_file, size = [], 0
        open_file.append(name)
        size += length
    files += [open_file] if open_file else []
    if len(files) == 1:
        return {WEIGHTS_FILE: files[0]}
    return {f"model-{place:05d}-of-{len(files):05d}.safetensors": names for place, names in enumerate(files, start=1)}


def _write_weights(
    folder: Path,
    rows: Sequence[ParameterMapping],
    formats: Mapping[str, ShapeAndDtype],
    source: CheckpointSource,
    shard_bytes: int,
    constants: Mapping[str, tuple[tuple[int, ...], float]],
) -> None:
    """Write the weight files of a folder, and their index if there are several.

    constants: name -> (shape, value) of tensors that are written beside the mapped ones.
    """
    files = _split_into_files(formats, shard_bytes)
    places = {
        name: place
        for file, names in files.items()
        for name, place in preallocate_safetensors_file(folder / file, {name: formats[name] for name in names}).items()
    }
    for row in rows:
        _write_converted_parameter(row, source, places)
    for name, (shape, value) in constants.items():
        write_safetensors_tensor(places[name], torch.full(shape, value, dtype=formats[name].dtype))
    if len(files) > 1:
        write_json(folder / f"{WEIGHTS_FILE}.index.json", _make_weight_index(files, formats))


def _write_converted_parameter(
    row: ParameterMapping, source: CheckpointSource, places: Mapping[str, SafetensorsEntry]
) -> None:
    """Read one parameter, experts one at a time, and write its converted parts to their places in the files."""
    name = f"model.{row.ours}"
    shape, each = source.formats[name].shape, row.op.each
    boxes = (
        [Box((index, *(0,) * (len(shape) - 1)), (1, *shape[1:])) for index in range(shape[0])]
        if each
        else [whole_box(shape)]
    )
    for place, box in enumerate(boxes):
        names = row.theirs[place * each : (place + 1) * each] if each else row.theirs
        for their_name, part in zip(names, row.op.theirs(source.read(name, box)), strict=True):
            write_safetensors_tensor(places[their_name], part)


def _make_weight_index(files: Mapping[str, list[str]], formats: Mapping[str, ShapeAndDtype]) -> dict[str, Any]:
    """Return the content of the index: file of each tensor, numbers of parameters and bytes."""
    parameters, size = (sum(getattr(one, name) for one in formats.values()) for name in ("num_elements", "num_bytes"))
    return {
        "metadata": {"total_parameters": parameters, "total_size": size},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }


def _write_generation_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a generation_config.json with the ids of special tokens, if the config has an end token."""
    generation = {
        name: config[name]
        for name in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
        if name in config
    }
    if generation.get("eos_token_id") is not None:
        write_json(folder / "generation_config.json", generation)


def _copy_tokenizer_files(like: str | Path | None, folder: Path) -> None:
    """Copy tokenizer files and generation_config.json from the folder `like`, if it is given."""
    if like is not None:
        for name in _CARRIED:
            if (Path(like) / name).is_file():
                shutil.copyfile(Path(like) / name, folder / name)
