"""Adapters written as a folder that PEFT loads; peft.py says what is in it.

What PEFT has no place for is refused before anything is written: matrices of Mamba layers that it does not adapt, DoRA of parts of a matrix.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from megatron.adapters.files import LinearLoraWeights, LoadedAdapter
from megatron.adapters.peft import PREFIX, WEIGHTS
from megatron.adapters.peft_config import CONFIG
from megatron.adapters.peft_mapping import PeftMatrixMapping
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families.config_json import architectures_of
from megatron.core.families.hf import write_json
from megatron.core.families.hf_export import folder_written_whole
from megatron.core.families.hf_folder import CONFIG_FILE
from megatron.core.families.parameter_mapping import Family
from megatron.core.families.registry import config_of_language_model, fitting_families
from megatron.core.families.tokenizer_files import read_json_or_empty
from megatron.core.models.parameter_names import WORD_EMBEDDING

_VERSION = "0.20.0"  # of PEFT, whose layout of experts' factors is written
_TASKS = {"gpt": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}
# PEFT takes these last words among target_modules for experts, in networks whose experts were modules in transformers 4. Dense and
# shared MLPs are called the same; their weights are written as target_parameters.
_GATED_MLP = frozenset(("gate", "gate_proj", "up_proj", "down_proj"))
_WORDS_OF_EXPERTS = {
    "mixtral": frozenset(("gate", "w1", "w2", "w3")),
    **dict.fromkeys(("qwen3_moe", "deepseek_v2", "deepseek_v3", "qwen3_next"), _GATED_MLP),
}
# Layers of Mamba whose weights are read past their module, so that PEFT refuses them; by model_type.
_NO_ADAPTER_IN_PEFT = dict.fromkeys(("mamba2", "nemotron_h", "falcon_h1"), frozenset(("out_proj", "conv1d")))


def write_peft_folder(adapters: LoadedAdapter, folder: str | Path, *, base: str | None = None) -> None:
    """Write adapters as a folder that PEFT loads. base: value of base_model_name_or_path.

    Raises `CheckpointError` if the folder is not empty, or PEFT's files cannot express the adapters.
    """
    places, file = PeftMatrixMapping(adapters.model, _family_of_base(adapters.model, base)), _PeftExport()
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already; move it away, or choose another folder")
    experts: dict[str, list[LinearLoraWeights]] = {}
    linears: dict[str, list[LinearLoraWeights]] = {}
    for pair in adapters.pairs:
        (experts if pair.first.dim() == 3 else linears).setdefault(pair.linear, []).append(pair)
    for linear, pairs in linears.items():
        _export_linear_adapters(linear, pairs, places, file)
    _export_expert_adapters(experts, places, file)
    _require_modules_that_peft_adapts(file, places, dora=adapters.model.adapter.dora)
    _export_whole_parameters(adapters.saved, places, file)
    hash_of_base = adapters.base.get("hash")
    metadata = {"format": "pt", **({"base_hash": str(hash_of_base)} if hash_of_base else {})}
    weights = save({name: tensor.contiguous().clone() for name, tensor in file.tensors.items()}, metadata)
    with folder_written_whole(folder) as made:
        (made / WEIGHTS).write_bytes(weights)
        write_json(made / CONFIG, _make_peft_config(adapters.model, file, base))


def _family_of_base(model: ModelConfig, base: str | None) -> Family | None:
    """Return the family of a base that is a Hugging Face folder of this network, or None. Others may name its matrices otherwise."""
    config = config_of_language_model(read_json_or_empty(Path(base) / CONFIG_FILE)) if base else {}
    families = fitting_families(replace(model, adapter=AdapterConfig())) if config else ()
    return next((one for one in families if one.class_for_architectures(architectures_of(config))), None)


@dataclass(slots=True)
class _PeftExport:
    """Content of a PEFT folder, collected before it is written. sizes: (rank, scale) by the name that PEFT matches
    patterns against, of a module or a parameter. saved: modules that are written whole. bias: which biases are written.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, tuple[int, float]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    saved: set[str] = field(default_factory=set)
    bias: str = "none"
    ties: bool = False
    transposed: bool = False


def _make_peft_config(model: ModelConfig, file: _PeftExport, base: str | None) -> dict[str, Any]:
    """Return the adapter_config.json: most frequent rank and alpha as defaults, others by full module names."""
    rslora = model.adapter.lora_rslora
    sizes = {
        name: (rank, _int_if_whole(scale * (math.sqrt(rank) if rslora else rank)))
        for name, (rank, scale) in file.sizes.items()
    }
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0]
    return {
        "peft_type": "LORA",
        "peft_version": _VERSION,
        "task_type": "SEQ_CLS" if model.reward_head else _TASKS.get(model.architecture.name),
        "base_model_name_or_path": base,
        "bias": file.bias,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if file.parameters else model.adapter.lora_dropout,  # which PEFT has not beside parameters
        "target_modules": file.endings,
        "target_parameters": file.parameters or None,
        "rank_pattern": {re.escape(name): size[0] for name, size in sizes.items() if size[0] != rank},
        "alpha_pattern": {re.escape(name): size[1] for name, size in sizes.items() if size[1] != alpha},
        "use_rslora": rslora,
        "use_dora": model.adapter.dora,
        "modules_to_save": sorted(file.saved) or None,
        "ensure_weight_tying": file.ties,
        "fan_in_fan_out": file.transposed,
        "inference_mode": True,
    }


def _export_linear_adapters(
    linear: str, pairs: list[LinearLoraWeights], places: PeftMatrixMapping, file: _PeftExport
) -> None:
    """Add the tensors of one of our linear layers to the export. A module of theirs that several of our adapters write
    to gets all their ranks, with scales folded into B; modules that one adapter writes to share its A.
    """
    row = places.row_of.get(f"{linear}.weight") or places.row_of[linear]
    rows, groups = places.shape_of(row).outputs, _pairs_with_one_a(pairs)
    a = torch.cat([group[0].first for group in groups])
    b, used = a.new_zeros(rows, a.shape[0]), torch.zeros(rows, a.shape[0])
    scales, column = a.new_empty(a.shape[0], dtype=torch.float64), 0
    for group in groups:
        columns = slice(column, column + group[0].rank)
        for pair in group:
            place = slice(pair.rows[0], sum(pair.rows)), columns
            b[place], used[place] = pair.second, 1.0
        scales[columns] = group[0].scale
        column += group[0].rank
    for name, part, mask in zip(
        row.theirs, places.lora_b_to_theirs(row, b), places.lora_b_to_theirs(row, used), strict=True
    ):
        mine = mask.bool().any(dim=0)
        if mine.any():
            module, scale = name.removesuffix(".weight"), scales[mine]
            file.tensors[f"{PREFIX}{module}.lora_A.weight"] = a[mine]
            file.tensors[f"{PREFIX}{module}.lora_B.weight"] = part[:, mine] * (scale / scale[0]).to(b)
            file.sizes[module] = int(mine.sum()), float(scale[0])
            file.modules.append(module)
            file.transposed = places.is_transposed(row)
    if any(pair.lengths is not None for pair in pairs):
        _export_dora_magnitudes(linear, pairs, places, file)


def _pairs_with_one_a(pairs: list[LinearLoraWeights]) -> list[list[LinearLoraWeights]]:
    """Return the adapters of a matrix, those of parts with equal A and scale together: they were one adapter in PEFT."""
    groups: list[list[LinearLoraWeights]] = []
    for pair in pairs:
        for group in groups:
            if pair.scale == group[0].scale and torch.equal(pair.first, group[0].first):
                group.append(pair)
                break
        else:
            groups.append([pair])
    return groups


def _export_dora_magnitudes(
    linear: str, pairs: list[LinearLoraWeights], places: PeftMatrixMapping, file: _PeftExport
) -> None:
    """Add the DoRA magnitudes of one of our linear layers. `CheckpointError` if a module is adapted in part."""
    row = places.row_of[f"{linear}.weight"]
    lengths = torch.full((places.shapes[linear].outputs, 1), float("nan"), dtype=pairs[0].first.dtype)
    for pair in pairs:
        if pair.lengths is not None:
            lengths[slice(pair.rows[0], sum(pair.rows)), 0] = pair.lengths
    for name, part in zip(row.theirs, places.lora_b_to_theirs(row, lengths), strict=True):
        module = name.removesuffix(".weight")
        if module in file.sizes:
            if part.isnan().any():
                raise CheckpointError(f"PEFT has no adapter of a part of {module} with --dora; adapt all of {linear}")
            file.tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = part.flatten()


def _export_expert_adapters(
    experts: Mapping[str, list[LinearLoraWeights]], places: PeftMatrixMapping, file: _PeftExport
) -> None:
    """Add the adapters of experts; of several adapted parameters of a module the first is nested as base_layer."""
    adapted = [name for name, one in places.experts.items() if one.linear in experts]
    for name in adapted:
        one = places.experts[name]
        together = [other for other in adapted if places.experts[other].module == one.module]
        deeper = ".base_layer" * (len(together) - 1 - together.index(name))
        pair = _joined_parts(experts[one.linear], places.shapes[one.linear].outputs)
        second = pair.second
        if one.transposed:
            second = one.row.op.theirs(second)[0].transpose(1, 2)
        file.tensors[f"{PREFIX}{one.module}{deeper}.lora_A.weight"] = pair.first.flatten(0, 1)
        file.tensors[f"{PREFIX}{one.module}{deeper}.lora_B.weight"] = second.permute(1, 2, 0).flatten(1)
        file.parameters.append(name)
        file.sizes[name] = pair.rank, pair.scale


def _joined_parts(pairs: list[LinearLoraWeights], outputs: int) -> LinearLoraWeights:
    """Return the adapters of experts' parts (gate, up) as one of the matrix: its rank is the sum of theirs."""
    if len(pairs) == 1 and not pairs[0].part:
        return pairs[0]
    first = torch.cat([pair.first for pair in pairs], dim=1)
    second, column = first.new_zeros(first.shape[0], outputs, first.shape[1]), 0
    for pair in pairs:
        columns = slice(column, column + pair.rank)
        second[:, slice(pair.rows[0], sum(pair.rows)), columns] = pair.second * (pair.scale / pairs[0].scale)
        column += pair.rank
    return LinearLoraWeights(pairs[0].linear, "", (0, outputs), first, second, pairs[0].scale)


def _require_modules_that_peft_adapts(file: _PeftExport, places: PeftMatrixMapping, *, dora: bool) -> None:
    """Sort modules into target_modules and target_parameters. `CheckpointError` for those that PEFT cannot adapt."""
    refused = _NO_ADAPTER_IN_PEFT.get(places.family.model_type, frozenset())
    never = [module for module in file.modules if module.rpartition(".")[2] in refused]
    if never:
        raise CheckpointError(
            f"PEFT adapts no {', '.join(sorted({one.rpartition('.')[2] for one in never}))} of {places.family.model_type}, and this adapter has {never[0]}; "
            "merge it (megatron checkpoint adapter merge), or train with --lora-targets that leave it out"
        )
    words = _WORDS_OF_EXPERTS.get(places.family.model_type, frozenset())
    of_parameters = [module for module in file.modules if module.rpartition(".")[2] in words]
    if of_parameters and dora:
        raise CheckpointError(
            f"PEFT has no adapter of {of_parameters[0]} with --dora in a network with experts; leave it out of --lora-targets, or merge it"
        )
    for module in of_parameters:
        file.sizes[f"{module}.weight"] = file.sizes.pop(module)
    file.parameters += [f"{module}.weight" for module in of_parameters]
    file.endings = _common_endings([module for module in file.modules if module not in of_parameters], places)


def _export_whole_parameters(saved: Mapping[str, Tensor], places: PeftMatrixMapping, file: _PeftExport) -> None:
    """Add parameters that were trained whole: modules of which all are given as modules_to_save, others by their names."""
    given = {
        name: part
        for ours, tensor in saved.items()
        for name, part in zip(places.row_of[ours].theirs, places.row_of[ours].op.theirs(tensor), strict=True)
    }
    modules: dict[str, set[str]] = {}
    for name in places.row_of_name:
        modules.setdefault(name.rpartition(".")[0], set()).add(name)
    for name, part in given.items():
        module, _, last = name.rpartition(".")
        if module in file.modules:
            if last != "bias":
                raise CheckpointError(f"PEFT has no adapter beside a trained {name}; leave one of the two out")
            file.bias = "all"
            file.tensors[f"{PREFIX}{module}.base_layer.bias"] = part
            continue
        file.tensors[f"{PREFIX}{name}"] = part
        if modules[module] <= given.keys():
            file.saved.add(module)
        elif last == "bias":
            file.bias = "all"
    if WORD_EMBEDDING in saved and "lm_head.weight" not in places.row_of_name:
        file.ties = True  # with which PEFT wants the matrix by both of its names
        file.tensors[f"{PREFIX}lm_head.weight"] = file.tensors[f"{PREFIX}{places.row_of[WORD_EMBEDDING].theirs[0]}"]


def _common_endings(modules: list[str], places: PeftMatrixMapping) -> list[str]:
    """Return last words of module names where all modules with that ending are adapted, else full names."""
    chosen = set(modules)
    ends = {module: module.rpartition(".")[2] for module in places.linear_of}
    partly = {end for module, end in ends.items() if module not in chosen}
    return sorted({module if ends[module] in partly else ends[module] for module in chosen})


def _int_if_whole(value: float) -> int | float:
    """Return a float that is whole as an int, as PEFT's configs have it."""
    value = round(value, 9)
    return int(value) if value == int(value) else value
