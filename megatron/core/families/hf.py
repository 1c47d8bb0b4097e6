"""Hugging Face folders: config.json and weights in one file or many, read and written a tensor at a time.

    FOLDER/config.json                                the network
    FOLDER/model.safetensors                          its weights; or, in many files,
    FOLDER/model-00001-of-00003.safetensors, ...      and
    FOLDER/model.safetensors.index.json               which of them holds what
    FOLDER/tokenizer.json                             carried along
    FOLDER/generation_config.json                     carried along, or written: which ids begin and end a text

`open_folder` gives a `Source` of our names; `export` writes one from any `Source`. Nothing here knows of ranks, and
memory never holds more than one whole tensor. Folders with pytorch_model.bin instead are read, not written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.flags import flag_fields
from megatron.core.config.settings.model import ModelConfig, RequestedModel
from megatron.core.dist_checkpointing.files import DISK, read_file
from megatron.core.dist_checkpointing.source import Source, TensorFormat
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.families.megatron.pickles import read_torch_file
from megatron.core.families.packed import Readable, dequantize_tensors, unsupported_quantization
from megatron.core.families.registry import family_of, fitting_family, model_of
from megatron.core.families.rules import Family, HeadVariant, ParameterMapping, expand_mappings, hf_shapes
from megatron.core.families.settings import classes_of
from megatron.core.families.tensor_file import Stored, create, read_header, write
from megatron.core.families.tokenizer_files import folder_tokenizer
from megatron.core.models.describe import num_mtp_layers, parameter_shapes
from megatron.core.models.names import VOCABULARY, WORD_EMBEDDING
from megatron.core.parallel.boxes import Box, whole_box

SHARD_BYTES = 5_000_000_000
PUBLISHED = "published.config"  # the value under which a source keeps the config.json that it came from

_CONFIG, _WEIGHTS, _BIN = "config.json", "model.safetensors", "pytorch_model.bin"
_CARRIED = tuple(
    """
    generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    merges.txt vocab.txt tokenizer.model spiece.model chat_template.jinja chat_template.json
    """.split()
)
_HEADS = ("lm_head.", "cls.", "classifier.")  # beginnings of names that stand beside a family's base
_WORDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}
_CHUNK = 1 << 24  # elements that are looked at together where two large tensors are compared


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A tensor of a pytorch_model.bin, mapped."""

    tensor: Tensor

    @property
    def format(self) -> TensorFormat:
        """Shape and dtype."""
        return TensorFormat(tuple(self.tensor.shape), self.tensor.dtype)

    def read(self) -> Tensor:
        """Return the tensor itself (any shape)."""
        return self.tensor


class HFCheckpoint:
    """An opened folder: a `Source` of our names. family: what it is in the words of its publishers."""

    def __init__(
        self,
        where: Path,
        family: Family,
        config: Mapping[str, Any],
        settings: Mapping[str, Any],
        rows: Mapping[str, tuple[ParameterMapping, list[Readable]]],
    ) -> None:
        self.where, self.family, self.settings = str(where), family, settings
        self.values: dict[str, Any] = {PUBLISHED: dict(config)}
        self._rows = rows
        self._last: tuple[tuple[str, int, int], Tensor] | None = None
        shapes = parameter_shapes(model_of(settings))
        self.formats = {
            f"model.{name}": TensorFormat(shapes[name], parts[0].format.dtype) for name, (_, parts) in rows.items()
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


def is_hf_checkpoint(path: str | Path) -> bool:
    """Whether a folder holds the config.json of a published model. (A checkpoint of ours has one that says other things.)"""
    config = _config_of(path)
    return "architectures" in config or "model_type" in config


def recorded_name(path: str | Path) -> str:
    """The name or path that the config.json in a folder has of its network; empty where there is none."""
    return str(_config_of(path).get("_name_or_path") or "")


def _config_of(path: str | Path) -> Mapping[str, Any]:
    """The config.json in a folder; nothing where it cannot be read."""
    try:
        config = json.loads(read_file(DISK, Path(path) / _CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def open_folder(path: str | Path, given: Mapping[str, Any] | None = None) -> HFCheckpoint:
    """The model in a folder.

    given: settings that win over the folder's. With `true_vocab_size`, the size of a tokenizer that knows fewer ids than
    the embedding has rows, the rows behind are left out. Raises one `CheckpointError` that lists all that is wrong: keys
    that cannot be expressed here, files that are missing or damaged, tensors that are missing, unknown or of other shapes.
    """
    path = Path(path)
    config = _read_json(path / _CONFIG)
    family = family_of(config, str(path / _CONFIG))
    files, damaged = _read_tensors(path)
    files = dequantize_tensors(_with_current_names(files, family), config.get("quantization_config"), family.fused)
    published, problems = _settings_of_config(family, config, files)
    problems += damaged
    if problems:
        raise CheckpointError(f"{path} cannot be loaded", problems)
    settings = {**published, **(given or {})}
    rows, problems = _match_mappings(
        family, settings, published["true_vocab_size"], files, family.variant_among(classes_of(config))
    )
    if problems:
        raise CheckpointError(f"{path} does not hold the {family.name} that its config.json describes", problems)
    return HFCheckpoint(path, family, config, settings, rows)


def model_settings(path: str | Path) -> dict[str, Any]:
    """What `--use-checkpoint-args` takes from a folder: the flags of the model, and its tokenizer if it has one."""
    path = Path(path)
    config = _read_json(path / _CONFIG)
    family = family_of(config, str(path / _CONFIG))
    files = dequantize_tensors(
        _with_current_names(_read_tensors(path)[0], family), config.get("quantization_config"), family.fused
    )
    settings, problems = _settings_of_config(family, config, files)
    if problems:
        raise CheckpointError(f"{path} describes a network that cannot be built here", problems)
    flags = {field.name for field, _ in flag_fields(RequestedModel)} - {
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
    }
    return {**{name: value for name, value in settings.items() if name in flags}, **folder_tokenizer(path)}


def export(
    source: Source,
    folder: str | Path,
    *,
    family: str | None = None,
    like: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    ids: Mapping[str, int | list[int] | None] = MappingProxyType({}),
) -> Family:
    """Write the model of a source as a folder. The folder gets its name when it is complete. Returns the family.

    family: one of `registry.FAMILIES`; left out, the one that the source came from, else the first that can say what the
    network is. like: a folder whose tokenizer files, and whose ids of special tokens, are carried over.
    shard_bytes: the largest file, if no tensor is larger. ids: of special tokens, where no earlier config.json says them.
    `rewrite.CastSource` gives the weights another dtype on the way.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already; move it away, or choose another folder")
    earlier = (
        _read_json(Path(like) / _CONFIG)
        if like and (Path(like) / _CONFIG).is_file()
        else source.values.get(PUBLISHED, {})
    )
    embedding = source.formats.get(f"model.{WORD_EMBEDDING}", TensorFormat((0,), torch.float32))
    model = model_of(
        {"true_vocab_size": embedding.shape[0], **source.settings}
    )  # a format without a tokenizer has its rows
    if family is None and earlier:
        family = family_of(earlier, f"{like or source.where}").name
    chosen = fitting_family(model, family)
    variant, rows, formats = _export_plan(chosen, model, source)
    config = {
        **dict(chosen.fallbacks),
        **ids,
        **_config_json(chosen, model, earlier if _config_is_of_family(earlier, chosen) else {}, formats),
        "architectures": [variant.architecture],
    } | _reward_head_keys(model, {**ids, **earlier})
    made = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        _write_weights(made, rows, formats, source, shard_bytes, chosen.constants(model))
        _write_json(made / _CONFIG, config)
        _write_generation_config(made, config)
        _copy_other_files(like, made)
        _fsync_folder(made)
        os.rename(made, folder)
        _fsync_folder(folder.parent, only=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return chosen


def _settings_of_config(
    family: Family, config: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Our settings, and the keys that cannot be expressed. names: of the tensors in the files."""
    settings, problems = family.config_in(
        {name: value for name, value in config.items() if name != "quantization_config"}
    )
    if family.scoring_class in classes_of(config):
        settings["reward_head"] = True
    packed = unsupported_quantization(config.get("quantization_config"))
    problems = [packed, *problems] if packed else problems
    return {"architecture": "gpt", **family.seen(settings, names)}, [f"{_CONFIG}: {problem}" for problem in problems]


def _read_tensors(path: Path) -> tuple[dict[str, Readable], list[str]]:
    """Every tensor of the folder's files by its name there, and what is wrong with the files."""
    kind = next(
        (kind for kind in (_WEIGHTS, _BIN) if (path / kind).is_file() or (path / f"{kind}.index.json").is_file()), None
    )
    if kind is None:
        return {}, [f"it has neither {_WEIGHTS} nor {_WEIGHTS}.index.json (nor {_BIN})"]
    problems: list[str] = []
    promised: dict[str, str] = {}
    if (path / kind).is_file():
        names = [kind]
    else:
        promised, problems = _weight_map(path / f"{kind}.index.json")
        names = sorted(set(promised.values()))
    tensors: dict[str, Readable] = {}
    for name in names:
        if not (path / name).is_file():
            problems.append(f"{path / name} is missing")
            continue
        try:
            inside = read_header(path / name) if kind == _WEIGHTS else _read_bin(path / name)
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


def _weight_map(path: Path) -> tuple[dict[str, str], list[str]]:
    """Tensor -> file as an index says; files outside the folder are refused."""
    weights = _read_json(path).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        return {}, [f"{path} is damaged: it has no weight_map of names to files"]
    outside = {file for file in weights.values() if Path(file).name != file}
    return (
        {name: file for name, file in weights.items() if file not in outside},
        [f"{path} names a file outside its folder: {file}" for file in sorted(outside)],
    )


def _read_bin(path: Path) -> dict[str, LoadedTensor]:
    content = read_torch_file(path)
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no state dict of tensors")
    return {str(name): LoadedTensor(value) for name, value in content.items()}


def _with_current_names(files: Mapping[str, Readable], family: Family) -> dict[str, Readable]:
    """The tensors by the names that rows have: with the family's base, and as names end today."""
    if not any(name.startswith(family.base) for name in files):  # saved without its head
        files = {name if name.startswith(_HEADS) else f"{family.base}{name}": stored for name, stored in files.items()}
    for pattern, replacement in family.respelled:
        files = {re.sub(pattern, replacement, name): stored for name, stored in files.items()}
    renamed = dict(files)
    for name, stored in files.items():
        for old, new in family.renamed:
            now = f"{name.removesuffix(old)}{new}"
            if name.endswith(old) and now not in renamed:
                renamed[now] = renamed.pop(name)
    return renamed


def _match_mappings(
    family: Family,
    settings: Mapping[str, Any],
    vocabulary: int,
    files: Mapping[str, Readable],
    required: HeadVariant | None,
) -> tuple[dict[str, tuple[ParameterMapping, list[Readable]]], list[str]]:
    """Every parameter of ours with its row and what the files have for it.

    vocabulary: rows of the published embedding. required: the class whose heads must be there; others may be.
    """
    model = model_of(settings)
    requested, deepest = settings["true_vocab_size"], max(model.num_layers, model.decoder_num_layers or 0)
    if deepest > len(files):
        return {}, [f"its files hold {len(files)} tensors, too few for {deepest} layers"]
    rows = _present_mappings(family, model, files, required)
    try:
        shapes = parameter_shapes(model)
        shapes |= {name: (vocabulary, *shapes[name][1:]) for name in VOCABULARY & shapes.keys()}
        expected = hf_shapes(rows, shapes)
        expected |= _shapes_as_cut(rows, files, expected)
    except RuntimeError:
        return {}, ["its sizes are beyond any tensor"]
    problems = [f"{name} is missing" for name in expected if name not in files]
    if requested > vocabulary:
        problems.append(
            f"the tokenizer has {requested} ids, and the embedding {vocabulary} rows; it is another model's, or "
            "adds ids of its own (BertWordPiece does): take the model's, by --tokenizer-type HuggingFaceTokenizer"
        )
    depth = model.num_layers + num_mtp_layers(model)
    for name, stored in files.items():
        if name in expected:
            problems += _format_mismatch(name, stored.format, expected[name])
        else:
            problems += [] if family.unused(model, name) else _unread_tensor_problem(name, files, family, depth)
    if problems:
        return {}, problems
    return {row.ours: (row, [files[name] for name in row.theirs]) for row in rows}, _mixed_dtypes(rows, files)


def _shapes_as_cut(
    rows: Sequence[ParameterMapping], files: Mapping[str, Readable], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors that files cut in other places than a row says, where it allows that and they make its whole."""
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
    family: Family, model: ModelConfig, files: Mapping[str, Readable], required: HeadVariant | None
) -> tuple[ParameterMapping, ...]:
    """The rows of a network without those of heads that the files lack."""
    rows = expand_mappings(family.network_mappings(model), layers=model.num_layers)
    lacking = family.missing_heads([row.ours for row in rows if any(name in files for name in row.theirs)], required)
    return tuple(row for row in rows if not row.ours.startswith(lacking))


def _unread_tensor_problem(name: str, files: Mapping[str, Readable], family: Family, depth: int) -> list[str]:
    """What is wrong with a tensor of the files that no row reads: nothing with copies, buffers and layers beyond `depth`."""
    if family.beyond and (layer := family.beyond.match(name)) and int(layer[1]) >= depth:
        return []
    if original := next((original for pattern, original in family.copies if re.fullmatch(pattern, name)), None):
        return _tied_copy_problem(name, files[name], original, files.get(original))
    return [] if family.skipped.fullmatch(name) else [f"{name} is unknown to this architecture"]


def _mixed_dtypes(rows: Sequence[ParameterMapping], files: Mapping[str, Readable]) -> list[str]:
    return [
        f"{', '.join(row.theirs)} differ in dtype; save them in one"
        for row in rows
        if len({files[name].format.dtype for name in row.theirs}) > 1
    ]


def _format_mismatch(name: str, format: TensorFormat, shape: tuple[int, ...]) -> list[str]:
    problems = (
        [] if format.shape == shape else [f"{name} has shape {list(format.shape)}, and the config says {list(shape)}"]
    )
    if format.dtype not in _WORDS:
        problems.append(
            f"{name} holds {str(format.dtype).removeprefix('torch.')}, quantised or no weight; save it as float32, "
            "bfloat16 or float16 first"
        )
    return problems


def _tied_copy_problem(name: str, copy: Readable, original_name: str, original: Readable | None) -> list[str]:
    """A copy, as of a tied embedding, is passed over; a tensor of its own contradicts the config."""
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


def _export_plan(
    family: Family, model: ModelConfig, source: Source
) -> tuple[HeadVariant, tuple[ParameterMapping, ...], dict[str, TensorFormat]]:
    """The class, its rows, and what the folder will hold, in their order.

    Refuses a source that lacks parameters or has others; heads it may lack.
    """
    there = {
        name.removeprefix("model."): format for name, format in source.formats.items() if name.startswith("model.")
    }
    variant, lacking = family.class_for_parameters(there), family.missing_heads(there)
    base = family.base if variant.bare else ""
    rows = tuple(
        ParameterMapping(row.ours, tuple(name.removeprefix(base) for name in row.theirs), row.op)
        for row in expand_mappings(family.network_mappings(model), layers=model.num_layers)
        if not row.ours.startswith(lacking)
    )
    shapes = {name: shape for name, shape in parameter_shapes(model).items() if not name.startswith(lacking)}
    if problems := _parameter_differences(there, shapes):
        raise CheckpointError(f"{source.where} does not hold the network that its settings describe", problems)
    their = hf_shapes(rows, shapes)
    formats = {name: TensorFormat(their[name], there[row.ours].dtype) for row in rows for name in row.theirs}
    dtype = next(iter(formats.values())).dtype
    return (
        variant,
        rows,
        formats | {name: TensorFormat(shape, dtype) for name, (shape, _) in family.constants(model).items()},
    )


def _parameter_differences(formats: Mapping[str, TensorFormat], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """How the parameters of a source differ from those of the network that its settings describe."""
    problems = [f"{name} is missing" for name in shapes if name not in formats]
    problems += [f"{name} is unknown to the architecture" for name in formats if name not in shapes]
    return problems + [
        f"{name} has shape {list(formats[name].shape)}, and the settings say {list(shapes[name])}"
        for name in shapes
        if name in formats and formats[name].shape != shapes[name]
    ]


def _config_is_of_family(config: Mapping[str, Any], family: Family) -> bool:
    """Whether an earlier config.json is of a family: by its class, whatever a model calls its type (Kimi K2: `kimi_k2`)."""
    named = classes_of(config)
    return bool(family.variant_among(named)) if named else config.get("model_type") == family.model_type


def _config_json(
    family: Family, model: ModelConfig, like: Mapping[str, Any], formats: Mapping[str, TensorFormat]
) -> dict[str, Any]:
    """The config.json."""
    word = _WORDS[Counter(format.dtype for format in formats.values()).most_common(1)[0][0]]
    config = {**family.config_out(model, like), "model_type": like.get("model_type", family.model_type)}
    config["dtype" if "dtype" in like else "torch_dtype"] = word
    return config


def _reward_head_keys(model: ModelConfig, ids: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a reward model: one score, at the last token that is not padding, which must then be no token of texts.

    ids: of special tokens, by their keys in config.json.
    """
    if not model.reward_head:
        return {}
    ends = ids.get("eos_token_id")
    others = [ids.get(name) for name in ("pad_token_id", "bos_token_id")]
    known = ends if isinstance(ends, list) else [ends]
    padding = next((one for one in others if one is not None and one not in known), None)
    return {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": padding}


def _split_into_files(formats: Mapping[str, TensorFormat], limit: int) -> dict[str, list[str]]:
    """File -> its tensors: in order, a new file when one would grow over the limit, a larger tensor alone."""
    files: list[list[str]] = []
    open_file: list[str] = []
    size = 0
    for name, one in formats.items():
        length = whole_box(one.shape).size * one.dtype.itemsize
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
        return {_WEIGHTS: files[0]}
    return {f"model-{place:05d}-of-{len(files):05d}.safetensors": names for place, names in enumerate(files, start=1)}


def _write_weights(
    folder: Path,
    rows: Sequence[ParameterMapping],
    formats: Mapping[str, TensorFormat],
    source: Source,
    shard_bytes: int,
    constants: Mapping[str, tuple[tuple[int, ...], float]],
) -> None:
    """Write the weight files of a folder, and their index if there are several. constants: what is written beside the rows."""
    files = _split_into_files(formats, shard_bytes)
    places = {
        name: place
        for file, names in files.items()
        for name, place in create(folder / file, {name: formats[name] for name in names}).items()
    }
    for row in rows:
        _write_parameter(row, source, places)
    for name, (shape, value) in constants.items():
        write(places[name], torch.full(shape, value, dtype=formats[name].dtype))
    if len(files) > 1:
        _write_json(folder / f"{_WEIGHTS}.index.json", _index_json(files, formats))


def _write_parameter(row: ParameterMapping, source: Source, places: Mapping[str, Stored]) -> None:
    """Read a parameter once, of experts one at a time, and put its parts where they belong; on return nothing is in memory."""
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
            write(places[their_name], part)


def _index_json(files: Mapping[str, list[str]], formats: Mapping[str, TensorFormat]) -> dict[str, Any]:
    elements = {name: whole_box(one.shape).size for name, one in formats.items()}
    size = sum(elements[name] * one.dtype.itemsize for name, one in formats.items())
    return {
        "metadata": {"total_parameters": sum(elements.values()), "total_size": size},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }


def _write_generation_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a generation_config.json of the config's ids, if it has some: what generates looks there first."""
    generation = {
        name: config[name]
        for name in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
        if name in config
    }
    if generation.get("eos_token_id") is not None:
        _write_json(folder / "generation_config.json", generation)


def _copy_other_files(like: str | Path | None, folder: Path) -> None:
    """Copy the files that belong to a model and are not its network."""
    if like is not None:
        for name in _CARRIED:
            if (Path(like) / name).is_file():
                shutil.copyfile(Path(like) / name, folder / name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(content).__name__}, not an object")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _fsync_folder(folder: Path, *, only: bool = False) -> None:
    """Make a folder, and unless `only` it is meant, its files durable."""
    for path in [folder] if only else [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
