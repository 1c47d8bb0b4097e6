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
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.adapters.files import LinearLoraWeights, LoadedAdapter
from megatron.adapters.peft_config import CONFIG, PeftConfig, read_peft_config
from megatron.adapters.peft_factors import ConvertedTensors, add_adapters
from megatron.adapters.peft_mapping import PeftMatrixMapping
from megatron.adapters.peft_saved import add_whole_parameters
from megatron.core.config.flags.bounded_regex import RegexError
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.plan.linear_layers import layer_module_path, linear_shapes_of_layer
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families.registry import fitting_families

WEIGHTS, OLDER_WEIGHTS, PREFIX = "adapter_model.safetensors", "adapter_model.bin", "base_model.model."
_FACTOR = re.compile(r"(.+?)\.(?:lora_(A|B)\.weight|lora_(magnitude)_vector(?:\.weight)?)")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOLD_PROBLEMS = 20
_LONGEST_CONFIG = 1 << 24


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
