"""Adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors, read for one network.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      [r, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      [out, r]
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector   [out], with DoRA
    base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight     [e r, in], of gate_up_proj of all experts
    base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight      [r, in], of one expert, as transformers 4 has them
    base_model.model.lm_head.weight                                     modules_to_save: a whole parameter

What the config names and what the file holds must agree. The file may be anybody's: sizes are checked before anything is read, and
numbers that are not finite are refused. Folders are written by peft_export.py.
"""

from __future__ import annotations

import math
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.adapters.files import LinearLoraWeights, LoadedAdapter
from megatron.adapters.peft_config import CONFIG, PeftConfig, read_peft_config
from megatron.adapters.peft_factors import WRAPPED, ConvertedTensors, add_adapters
from megatron.adapters.peft_mapping import PeftMatrixMapping
from megatron.core.config.flags.bounded_regex import RegexError
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.plan.linear_layers import layer_module_path, linear_shapes_of_layer
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families.registry import fitting_families
from megatron.core.models.parameter_names import VOCABULARY, WORD_EMBEDDING

WEIGHTS, OLDER_WEIGHTS, PREFIX = "adapter_model.safetensors", "adapter_model.bin", "base_model.model."
_FACTOR = re.compile(r"(.+?)\.(?:lora_(A|B)\.weight|lora_(magnitude)_vector(?:\.weight)?)")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOLD_PROBLEMS = 20
_LONGEST_CONFIG = 1 << 24
# Further copies of a saved embedding, which PEFT writes where tokens were added and passes over when it loads.
_COPIES = (".modules_to_save.", ".original_module.")
_HEAD = "lm_head.weight"


def is_peft_folder(folder: str | Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (Path(folder) / CONFIG).exists()


def read_peft_folder(folder: str | Path, model: ModelConfig, *, largest_rank: int | None = None) -> LoadedAdapter:
    """Read the PEFT adapter in a folder, for this network. Raises one `CheckpointError` with all that does not fit it.

    largest_rank: refuse a higher one before its factors are read.
    """
    folder = Path(folder)
    _require_regular_files(folder)
    config = read_peft_config(folder)
    model = replace(model, reward_head=model.reward_head or config.task == "SEQ_CLS")
    places = PeftMatrixMapping(model)

    def require_fitting_shapes(shapes: Mapping[str, Tensor]) -> None:
        nonlocal places
        result = _convert_tensors(shapes, config, places)
        for family in fitting_families(replace(model, adapter=AdapterConfig())) if result.problems else ():
            others = PeftMatrixMapping(model, family)  # which may name matrices otherwise: Qwen3.5 and Qwen3-Next
            if not (of_others := _convert_tensors(shapes, config, others)).problems:
                places, result = others, of_others
                break
        highest = max((pair.rank for pair in result.pairs), default=0)
        if largest_rank is not None and highest > largest_rank:
            result.problems.append(f"its rank {highest} is above --max-lora-rank {largest_rank}; raise that")
        _refuse(folder, result.problems or ([] if result.pairs else ["it adapts nothing"]))

    try:
        tensors, metadata = _read_tensors(folder / WEIGHTS, require_fitting_shapes)
        result = _convert_tensors(tensors, config, places)
    except RegexError as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from None
    _refuse(folder, result.problems)
    in_runs = [pair for pair in result.pairs if pair.linear in places.shapes]
    made = replace(model, adapter=_adapter_config_from_peft(config, model, in_runs, result.saved))
    base = {"hash": metadata.get("base_hash"), "where": config.base}
    return LoadedAdapter(str(folder), made, tuple(result.pairs), result.saved, base, result.vocabulary_rows)


def _require_regular_files(folder: Path) -> None:
    """Raise `CheckpointError` unless config and weights are files: a pipe or a device might never end."""
    for path in (folder / CONFIG, folder / WEIGHTS):
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            if path.name == WEIGHTS and (folder / OLDER_WEIGHTS).exists():
                raise CheckpointError(
                    f"{folder} holds {OLDER_WEIGHTS}, PEFT's older form, which is not read here; load it in PEFT, and save_pretrained "
                    f"writes {WEIGHTS}"
                ) from None
            raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} cannot be read: it is no regular file")
        if path.name == CONFIG and status.st_size > _LONGEST_CONFIG:
            raise CheckpointError(f"{path} has {status.st_size} bytes, and {_LONGEST_CONFIG} are read at most")


def _read_tensors(
    path: Path, require_fitting_shapes: Callable[[Mapping[str, Tensor]], None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file and its metadata; `CheckpointError` if it is damaged or not finite.

    require_fitting_shapes: is called with tensors on the meta device before any is read.
    """
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            dtypes = {name: one.get_dtype() for name, one in slices.items()}
            _refuse(path.parent, [f"{name} is of type {word}" for name, word in dtypes.items() if word not in _DTYPES])
            require_fitting_shapes(
                {
                    name: torch.empty(one.get_shape(), dtype=_DTYPES[dtypes[name]], device="meta")
                    for name, one in slices.items()
                }
            )
            tensors, metadata = {name: file.get_tensor(name) for name in slices}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    infinite = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    _refuse(path.parent, [f"{name} holds numbers that are not finite" for name in infinite])
    return tensors, metadata


def _refuse(folder: Path, problems: list[str]) -> None:
    """Raise `CheckpointError` if there are problems, with the first of them."""
    if problems:
        more = [f"and {len(problems) - _TOLD_PROBLEMS} more"] if len(problems) > _TOLD_PROBLEMS else []
        first = [one[:500] for one in problems[:_TOLD_PROBLEMS]]
        raise CheckpointError(f"{folder} is no adapter of this network", first + more)


def _convert_tensors(tensors: Mapping[str, Tensor], config: PeftConfig, places: PeftMatrixMapping) -> ConvertedTensors:
    """Convert all tensors of a folder, or with tensors on the meta device find what is wrong with their names and shapes."""
    result = ConvertedTensors()
    factors: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for full_name, tensor in tensors.items():
        name = places.class_name(full_name.removeprefix(PREFIX))
        factor = _FACTOR.fullmatch(name)
        if not full_name.startswith(PREFIX):
            result.problems.append(f"{full_name} does not begin with {PREFIX}")
        elif factor:
            factors.setdefault(factor[1], {})[factor[2] or factor[3]] = tensor
        else:
            whole[name] = tensor
    adapted = add_adapters(result, factors, config, places)
    add_whole_parameters(result, whole, adapted, config, places)
    return result


def _adapter_config_from_peft(
    config: PeftConfig, model: ModelConfig, pairs: list[LinearLoraWeights], saved: Mapping[str, Tensor]
) -> AdapterConfig:
    """Return the flags that make these adapters. A matrix that is adapted alike in all layers is named once."""
    sizes = {
        (pair.linear, pair.part): (pair.rank, pair.scale * (math.sqrt(pair.rank) if config.rslora else pair.rank))
        for pair in pairs
    }
    if not sizes:
        return AdapterConfig()
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0]
    layers = {
        path: layer_module_path(model, plan)
        for plan in network_layer_plans(model)
        for path in (f"{layer_module_path(model, plan)}.{one}" for one in linear_shapes_of_layer(model, plan))
    }
    every: dict[str, list[str]] = {}
    for path, layer in layers.items():
        every.setdefault(path.removeprefix(f"{layer}."), []).append(path)
    targets = list[str]()
    for (linear, part), size in sizes.items():
        suffix = f".{part}" if part else ""
        alike = every[linear.removeprefix(f"{layers[linear]}.")]
        same = all(sizes.get((other, part)) == size for other in alike)
        name = (linear.removeprefix(f"{layers[linear]}.") if same else linear) + suffix
        targets.append(name if size == (rank, alpha) else f"{name}={size[0]}:{size[1]:.12g}")
    return AdapterConfig(
        lora_rank=rank,
        lora_alpha=alpha,
        lora_dropout=config.dropout,
        lora_targets=tuple(dict.fromkeys(targets)),
        lora_rslora=config.rslora,
        dora=config.dora,
        lora_modules_to_save=tuple(saved),
    )


def add_whole_parameters(
    result: ConvertedTensors,
    whole: Mapping[str, Tensor],
    adapted: Collection[str],
    config: PeftConfig,
    places: PeftMatrixMapping,
) -> None:
    """Add parameters (any shape) that are saved whole, by their names; adapted: modules with factors."""
    given = {}
    for name, tensor in whole.items():
        plain = name.replace(f"{WRAPPED}.", ".")
        if _is_further_copy(name, whole, config):
            continue
        if problem := _name_problem(name, adapted, places):
            result.problems.append(f"{name} {problem}")
        else:
            given[plain] = tensor
    result.problems += [
        f"{name} is missing, and modules_to_save names it"
        for name, module in ((name, name.rpartition(".")[0]) for name in places.row_of_name)
        if name not in given and module not in adapted and config.is_saved(module)
    ]
    _join_tied_output_layer(result, given, config, places)
    for row in {places.row_of_name[name].ours: places.row_of_name[name] for name in given}.values():
        missing = [name for name in row.theirs if name not in given]
        if missing:
            result.problems.append(
                f"{missing[0]} is missing: it is one parameter here with {', '.join(set(row.theirs) - set(missing))}"
            )
        else:
            _add_whole_parameter(result, row.ours, [given[name] for name in row.theirs], places)


def _is_further_copy(name: str, whole: Collection[str], config: PeftConfig) -> bool:
    """Whether a tensor is one more copy of a parameter of a saved module, which PEFT passes over."""
    parts = [name.partition(copy) for copy in _COPIES]
    return any(
        copy and config.is_saved(module) and f"{module}.{rest.removeprefix('default.')}" in whole
        for module, copy, rest in parts
    )


def _name_problem(name: str, adapted: Collection[str], places: PeftMatrixMapping) -> str | None:
    """Return why a whole parameter of this name is not read, or None."""
    module, _, last = name.rpartition(".")
    plain = module.removesuffix(WRAPPED)
    if (module != plain) != (plain in adapted) or (plain in adapted and last != "bias" and f"{plain}.{last}" != _HEAD):
        return "is a matrix, or another parameter, beside its adapter, which is not read here"
    known = f"{plain}.{last}" in places.row_of_name or name == _HEAD
    return None if known else "is no parameter of this network"


def _add_whole_parameter(result: ConvertedTensors, ours: str, parts: list[Tensor], places: PeftMatrixMapping) -> None:
    """Add one parameter, of the tensors that it is made of there. Rows of ids that the tokenizer has not are left out."""
    row, expected = places.row_of[ours], places.whole[ours]
    shapes = [tuple(part.shape) for part in row.op.theirs(torch.empty(expected, device="meta"))]
    if ours in VOCABULARY:
        result.vocabulary_rows = len(parts[0])
        fits = (
            parts[0].dim() == len(expected)
            and parts[0].shape[0] >= expected[0]
            and tuple(parts[0].shape[1:]) == expected[1:]
        )
    else:
        fits = [tuple(part.shape) for part in parts] == shapes
    if not fits:
        result.problems.append(f"{row.theirs[0]} has shape {list(parts[0].shape)}, which is not this network's")
        return
    value = row.op.ours(parts)
    result.saved[ours] = value[: expected[0]] if ours in VOCABULARY else value


def _join_tied_output_layer(
    result: ConvertedTensors, given: dict[str, Tensor], config: PeftConfig, places: PeftMatrixMapping
) -> None:
    """Remove the output layer from `given` where it is the embedding's matrix. A problem is noted where PEFT unties the two.

    modules_to_save copies a module, so that the other one keeps the base's weights; what PEFT saves by itself is loaded into both.
    """
    if _HEAD in places.row_of_name or WORD_EMBEDDING not in places.row_of:
        return
    embedding_name = places.row_of[WORD_EMBEDDING].theirs[0]
    head, embedding = given.pop(_HEAD, None), given.get(embedding_name)
    if head is None and embedding is None:
        return
    if head is not None and embedding is not None:
        tied = head.shape == embedding.shape and (head.is_meta or torch.equal(head, embedding))
    elif embedding is None:
        assert head is not None, "one of the two is given"
        given[embedding_name] = head
        tied = not config.is_saved("lm_head")
    else:
        tied = config.ties or not config.is_saved(embedding_name.rpartition(".")[0])
    if not tied:
        result.problems.append(
            "modules_to_save unties embedding and output layer, which are one matrix in this network; train it with ensure_weight_tying, or give a base "
            "that has them apart (tie_word_embeddings: false in its config.json, and lm_head.weight beside the embedding)"
        )
