"""Hugging Face folders: config.json and weights in one file or many, read a tensor at a time.

    FOLDER/config.json                                the network
    FOLDER/model.safetensors                          its weights; or, in many files,
    FOLDER/model-00001-of-00003.safetensors, ...      and
    FOLDER/model.safetensors.index.json               which of them holds what
    FOLDER/tokenizer.json                             carried along
    FOLDER/generation_config.json                     carried along, or written: which ids begin and end a text

`open_hf_folder` gives a `Source` of our names; hf_export.py writes such a folder. Nothing here knows of ranks, and memory never holds more than one
whole tensor. Folders with pytorch_model.bin instead are read, not written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.flags.declare import flag_fields
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.settings.model import ModelConfig, RequestedModel
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.pickles import read_torch_file
from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.families.config_json import architectures_of
from megatron.core.families.dequantize import (
    LazyCheckpointTensor,
    unreadable_quantization_problem,
    with_dequantized_tensors,
)
from megatron.core.families.hf_folder import CONFIG_FILE, is_hf_checkpoint, read_json
from megatron.core.families.parameter_mapping import Family, HFModelClass, ParameterMapping, hf_shapes
from megatron.core.families.registry import config_of_language_model, family_of_config
from megatron.core.families.tensor_file import read_safetensors_header
from megatron.core.families.tokenizer_files import read_json_or_empty, tokenizer_settings_of_folder
from megatron.core.models.describe import global_parameter_shapes, num_stored_mtp_layers
from megatron.core.models.parameter_names import VOCABULARY
from megatron.core.parallel.boxes import Box

PUBLISHED = "published.config"  # the value under which a source keeps the config.json that it came from

WEIGHTS_FILE, _BIN = "model.safetensors", "pytorch_model.bin"
_HEADS = ("lm_head.", "cls.", "classifier.")  # beginnings of names that stand beside a family's base
DTYPE_WORDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}
_CHUNK = 1 << 24  # elements that are looked at together where two large tensors are compared


@dataclass(frozen=True, slots=True)
class PytorchBinTensor:
    """A tensor of a pytorch_model.bin, memory-mapped."""

    tensor: Tensor

    @property
    def format(self) -> ShapeAndDtype:
        """Shape and dtype."""
        return ShapeAndDtype(tuple(self.tensor.shape), self.tensor.dtype)

    def read(self) -> Tensor:
        """Return the tensor itself (any shape)."""
        return self.tensor


class HFCheckpoint:
    """An opened Hugging Face folder: a `Source` under our names. family: its published architecture."""

    def __init__(
        self,
        where: Path,
        family: Family,
        config: Mapping[str, Any],
        settings: Mapping[str, Any],
        rows: Mapping[str, tuple[ParameterMapping, list[LazyCheckpointTensor]]],
    ) -> None:
        self.where, self.family, self.settings = str(where), family, settings
        self.values: dict[str, Any] = {PUBLISHED: dict(config)}
        self._rows = rows
        self._last: tuple[tuple[str, int, int], Tensor] | None = None
        shapes = global_parameter_shapes(model_config_from_settings(settings))
        self.formats = {
            f"model.{name}": ShapeAndDtype(shapes[name], parts[0].format.dtype) for name, (_, parts) in rows.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a parameter (any shape), in the dtype of the files. The tensor read last is cached, for its
        other boxes.

        Of a parameter made of experts only those of the box are read. Rows of the embedding beyond the tokenizer's ids
        are in no box.
        """
        row, parts = self._rows[name.removeprefix("model.")]
        start, count, slices = 0, 0, box.slices()
        if row.op.each:
            start, count, slices = box.offset[0], box.shape[0], (slice(None), *slices[1:])
            parts = parts[start * row.op.each : (start + count) * row.op.each]
        if self._last is None or self._last[0] != (name, start, count):
            self._last = None  # before the next is made, so that there is only one
            self._last = ((name, start, count), row.op.ours([part.read() for part in parts]))
        return self._last[1][slices]


def hf_vocabulary_rows(path: str | Path) -> int | None:
    """Return the number of rows of the embedding by a folder's config.json, or None if it is no such folder."""
    config = config_of_language_model(read_json_or_empty(Path(path) / CONFIG_FILE))
    rows = config.get("vocab_size") if is_hf_checkpoint(path) else None
    return rows if isinstance(rows, int) else None


def open_hf_folder(path: str | Path, given: Mapping[str, Any] | None = None) -> HFCheckpoint:
    """Open the model in a Hugging Face folder.

    given: settings that override the folder's. If its `true_vocab_size`, the size of a tokenizer, is less than the rows
    of the embedding, the rows beyond are left out. Raises one `CheckpointError` that lists all that is
    wrong: keys that cannot be expressed here, files that are missing or damaged, tensors that are missing, unknown or
    of other shapes.
    """
    path = Path(path)
    config = config_of_language_model(read_json(path / CONFIG_FILE))
    family = family_of_config(config, str(path / CONFIG_FILE))
    files, damaged = _open_weight_files(path)
    files = with_dequantized_tensors(
        _normalize_tensor_names(files, family), config.get("quantization_config"), family.fused
    )
    published, problems = _settings_from_hf_config(family, config, files)
    problems += damaged
    if problems:
        raise CheckpointError(f"{path} cannot be loaded", problems)
    settings = {**published, **(given or {})}
    rows, problems = _match_mappings_to_files(
        family, settings, published["true_vocab_size"], files, family.class_for_architectures(architectures_of(config))
    )
    if problems:
        raise CheckpointError(f"{path} does not hold the {family.name} that its config.json describes", problems)
    return HFCheckpoint(path, family, config, settings, rows)


def hf_model_settings(path: str | Path) -> dict[str, Any]:
    """Return the model's settings and its tokenizer's, if any, from a folder, for --use-checkpoint-args.

    Raises `CheckpointError` if it cannot be read or built here. Dropout and initialization are not included.
    """
    path = Path(path)
    config = config_of_language_model(read_json(path / CONFIG_FILE))
    family = family_of_config(config, str(path / CONFIG_FILE))
    files = with_dequantized_tensors(
        _normalize_tensor_names(_open_weight_files(path)[0], family), config.get("quantization_config"), family.fused
    )
    settings, problems = _settings_from_hf_config(family, config, files)
    if problems:
        raise CheckpointError(f"{path} describes a network that cannot be built here", problems)
    flags = {field.name for field, _ in flag_fields(RequestedModel)} - {
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
    }
    return {**{name: value for name, value in settings.items() if name in flags}, **tokenizer_settings_of_folder(path)}


# The keys of a config.json that hold keys of their own.
_SECTIONS = ("rope_parameters", "rope_scaling", "text_config", "vision_config")


def _settings_from_hf_config(
    family: Family, config: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return our settings, and the keys that cannot be expressed. names: of the tensors in the files."""
    given = {name: config.get(name) or {} for name in _SECTIONS}
    if damaged := [name for name, value in given.items() if not isinstance(value, Mapping)]:
        return {}, [f"{CONFIG_FILE}: {name}: {given[name]!r:.80} is not an object" for name in damaged]
    settings, problems = family.settings_from_config(
        {name: value for name, value in config.items() if name != "quantization_config"}
    )
    if family.scoring_class in architectures_of(config):
        settings["reward_head"] = True
    packed = unreadable_quantization_problem(config.get("quantization_config"))
    problems = [packed, *problems] if packed else problems
    return {"architecture": "gpt", **family.seen(settings, names)}, [
        f"{CONFIG_FILE}: {problem}" for problem in problems
    ]


def _open_weight_files(path: Path) -> tuple[dict[str, LazyCheckpointTensor], list[str]]:
    """Return every tensor of the folder's files, not yet read, by its name there; and what is wrong with the files."""
    kind = next(
        (kind for kind in (WEIGHTS_FILE, _BIN) if (path / kind).is_file() or (path / f"{kind}.index.json").is_file()),
        None,
    )
    if kind is None:
        return {}, [f"it has neither {WEIGHTS_FILE} nor {WEIGHTS_FILE}.index.json (nor {_BIN})"]
    problems: list[str] = []
    promised: dict[str, str] = {}
    if (path / kind).is_file():
        names = [kind]
    else:
        promised, problems = _read_weight_map(path / f"{kind}.index.json")
        names = sorted(set(promised.values()))
    tensors: dict[str, LazyCheckpointTensor] = {}
    for name in names:
        if not (path / name).is_file():
            problems.append(f"{path / name} is missing")
            continue
        try:
            inside = read_safetensors_header(path / name) if kind == WEIGHTS_FILE else _read_pytorch_bin(path / name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems += [f"{one} is in {name} and in another file" for one in inside if one in tensors]
        problems += [
            f"{name} lacks {one}, which the index promises"
            for one, file in promised.items()
            if file == name and one not in inside
        ]
        tensors |= inside
    return tensors, problems


def _read_weight_map(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return tensor -> file of an index, and problems; files outside the folder are left out and reported."""
    weights = read_json(path).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        return {}, [f"{path} is damaged: it has no weight_map of names to files"]
    outside = {file for file in weights.values() if Path(file).name != file}
    return (
        {name: file for name, file in weights.items() if file not in outside},
        [f"{path} names a file outside its folder: {file}" for file in sorted(outside)],
    )


def _read_pytorch_bin(path: Path) -> dict[str, PytorchBinTensor]:
    """Return the tensors of a pytorch_model.bin; `CheckpointError` if it holds anything else."""
    content = read_torch_file(path)
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no state dict of tensors")
    return {str(name): PytorchBinTensor(value) for name, value in content.items()}


def _normalize_tensor_names(
    files: Mapping[str, LazyCheckpointTensor], family: Family
) -> dict[str, LazyCheckpointTensor]:
    """Return the tensors under the names that mappings use: with the family's prefix, and older spellings replaced."""
    files = {name: stored for name, stored in files.items() if not family.beside.match(name)}
    if not any(name.startswith(family.base) for name in files):  # saved without its head
        files = {name if name.startswith(_HEADS) else f"{family.base}{name}": stored for name, stored in files.items()}
    renamed = dict(files)
    for pattern, replacement in family.respelled:
        for name in list(renamed):
            now = re.sub(pattern, replacement, name)
            if now not in renamed:
                renamed[now] = renamed.pop(name)
    return renamed


def _match_mappings_to_files(
    family: Family,
    settings: Mapping[str, Any],
    vocabulary: int,
    files: Mapping[str, LazyCheckpointTensor],
    required: HFModelClass | None,
) -> tuple[dict[str, tuple[ParameterMapping, list[LazyCheckpointTensor]]], list[str]]:
    """Return for every parameter of ours its mapping and the tensors in the files; or none, and what does not fit.

    vocabulary: rows of the published embedding. required: the class whose heads must be there; others may be.
    """
    model = model_config_from_settings(settings)
    requested, deepest = settings["true_vocab_size"], max(model.num_layers, model.decoder_num_layers or 0)
    if deepest > len(files):
        return {}, [f"its files hold {len(files)} tensors, too few for {deepest} layers"]
    rows = _present_mappings(family, model, files, required)
    try:
        shapes = global_parameter_shapes(model)
        shapes |= {name: (vocabulary, *shapes[name][1:]) for name in VOCABULARY & shapes.keys()}
        expected = hf_shapes(rows, shapes)
        expected |= _shapes_if_split_differently(rows, files, expected)
    except RuntimeError:
        return {}, ["its sizes are beyond any tensor"]
    problems = [f"{name} is missing" for name in expected if name not in files]
    if requested > vocabulary:
        problems.append(
            f"the tokenizer has {requested} ids, and the embedding {vocabulary} rows; it is another model's, or "
            "adds ids of its own (BertWordPiece does): take the model's, by --tokenizer-type HuggingFaceTokenizer"
        )
    depth = model.num_layers + num_stored_mtp_layers(model)
    for name, stored in files.items():
        if name in expected:
            problems += _shape_and_dtype_problems(name, stored.format, expected[name])
        else:
            problems += [] if family.unused(model, name) else _problems_of_unread_tensor(name, files, family, depth)
    if problems:
        return {}, problems
    return {row.ours: (row, [files[name] for name in row.theirs]) for row in rows}, _mixed_dtype_problems(rows, files)


def _shapes_if_split_differently(
    rows: Sequence[ParameterMapping], files: Mapping[str, LazyCheckpointTensor], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors that files split at other rows than mappings expect, where allowed and adding up."""
    result: dict[str, tuple[int, ...]] = {}
    for row in rows:
        if row.op.joined and all(name in files for name in row.theirs):
            shapes = {name: files[name].format.shape for name in row.theirs}
            whole = sum(expected[name][0] for name in shapes)
            if sum(shape[0] for shape in shapes.values() if shape) == whole and all(
                shape[1:] == expected[name][1:] for name, shape in shapes.items()
            ):
                result |= shapes
    return result


def _present_mappings(
    family: Family, model: ModelConfig, files: Mapping[str, LazyCheckpointTensor], required: HFModelClass | None
) -> tuple[ParameterMapping, ...]:
    """Return the mappings of a network, without those of heads that the files lack (unless required)."""
    rows = family.network_mappings(model)
    lacking = family.missing_heads([row.ours for row in rows if any(name in files for name in row.theirs)], required)
    return tuple(row for row in rows if not row.ours.startswith(lacking))


def _problems_of_unread_tensor(
    name: str, files: Mapping[str, LazyCheckpointTensor], family: Family, depth: int
) -> list[str]:
    """Return what is wrong with a tensor that no mapping reads; [] for copies, buffers, layers from `depth` on."""
    if family.beyond and (layer := family.beyond.match(name)) and int(layer[1]) >= depth:
        return []
    if original := next((original for pattern, original in family.copies if re.fullmatch(pattern, name)), None):
        return _tied_copy_problem(name, files[name], original, files.get(original))
    return [] if family.skipped.fullmatch(name) else [f"{name} is unknown to this architecture"]


def _mixed_dtype_problems(rows: Sequence[ParameterMapping], files: Mapping[str, LazyCheckpointTensor]) -> list[str]:
    """Return the mappings whose tensors in the files differ in dtype, a text each."""
    return [
        f"{', '.join(row.theirs)} differ in dtype; save them in one"
        for row in rows
        if len({files[name].format.dtype for name in row.theirs}) > 1
    ]


def _shape_and_dtype_problems(name: str, format: ShapeAndDtype, shape: tuple[int, ...]) -> list[str]:
    """Return what is wrong with shape or dtype of a tensor in the files, a text each."""
    problems = (
        [] if format.shape == shape else [f"{name} has shape {list(format.shape)}, and the config says {list(shape)}"]
    )
    if format.dtype not in DTYPE_WORDS:
        problems.append(
            f"{name} holds {str(format.dtype).removeprefix('torch.')}, quantised or no weight; save it as float32, "
            "bfloat16 or float16 first"
        )
    return problems


def _tied_copy_problem(
    name: str, copy: LazyCheckpointTensor, original_name: str, original: LazyCheckpointTensor | None
) -> list[str]:
    """Return a problem if a tensor that should be a copy (a tied output layer) differs from its original, else []."""
    if original is None:
        return []  # which is missing, and told so
    if copy.format == original.format:
        pairs = zip(*(one.read().view(-1).split(_CHUNK) for one in (copy, original)), strict=True)
        if all(torch.equal(a, b) for a, b in pairs):
            return []
    what = f"the embedding, {original_name}," if original_name.endswith(".weight") else original_name
    return [
        f"{name} differs from {what} and config.json says tie_word_embeddings: true; set it to false if that is wrong"
    ]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as a file of indented JSON with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
