"""Adapters as PEFT has them: a folder with adapter_config.json and adapter_model.safetensors, read and written.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      [r, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      [out, r]
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector   [out], with DoRA
    base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight     [e r, in], of gate_up_proj of all experts
    base_model.model.lm_head.weight                                     modules_to_save: a whole parameter

Which of their matrices is a part of which of ours is what a family's rows say. What is adapted is told by the tensors, so that lists,
patterns and `all-linear` in the config need not be understood; ranks too. Alphas are the config's.
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.core.config.adapters import layer_module_path, linear_shapes_of_layer
from megatron.core.config.plan import network_layer_plans
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families.adapter_set import LinearLoraWeights, LoadedAdapter
from megatron.core.families.hf import read_json, write_json
from megatron.core.families.parameter_mapping import ParameterMapping
from megatron.core.families.registry import fitting_family
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.models.parameter_names import VOCABULARY

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Our matrices of experts, and the parameters of all experts that transformers has: PEFT's target_parameters, and what its patterns match.
_EXPERT_PARAMETERS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
_TASKS = {"gpt": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}
_FACTOR = re.compile(r"(.+?)(\.base_layer)?\.(?:lora_(A|B)\.weight|lora_(magnitude)_vector(?:\.weight)?)")
# What a config may say otherwise, and nothing here computes.
_UNKNOWN = ("lora_bias", "use_qalora", "use_bdlora", "layer_replication", "trainable_token_indices", "alora_invocation_tokens", "arrow_config",
            "kasa_config", "velora_config", "monteclora_config")  # fmt: skip


def is_peft_folder(folder: str | Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (Path(folder) / CONFIG).is_file()


class _PeftMatrixMapping:
    """How a network's matrices in transformers correspond to ours. `CheckpointError` for gpt-oss with experts."""

    def __init__(self, model: ModelConfig) -> None:
        model = replace(model, adapter=AdapterConfig())
        family = fitting_family(model)
        if family.name == "gpt_oss" and model.moe.num_experts:
            raise CheckpointError(
                "adapters of a gpt-oss network cannot be exchanged with PEFT: its experts are laid out otherwise"
            )
        rows = family.network_mappings(model)
        self.shapes = {
            f"{layer_module_path(model, plan)}.{path}": shape
            for plan in network_layer_plans(model)
            for path, shape in linear_shapes_of_layer(model, plan).items()
        }
        self.whole = global_parameter_shapes(model)
        self.row_of = {row.ours: row for row in rows}
        self.linear_of = {
            name.removesuffix(".weight"): row
            for row in rows
            if row.ours.removesuffix(".weight") in self.shapes
            for name in row.theirs
        }
        self.row_of_name = {name: row for row in rows for name in row.theirs}
        self.experts = {
            _experts_module_name(row.theirs[0]): row.ours.removesuffix(".weight").rpartition(".")[0]
            for row in rows
            if row.op.each and row.ours.endswith("linear_fc1.weight")
        }

    def is_transposed(self, row: ParameterMapping) -> bool:
        """Whether transformers' matrix is the transpose of ours (GPT-2)."""
        return (
            tuple(row.op.theirs(torch.empty(2, 3, device="meta"))[0].shape) == (3, 2) if len(row.theirs) == 1 else False
        )

    def lora_b_to_ours(self, row: ParameterMapping, place: int, second: Tensor) -> Tensor:
        """Return B of their matrix number `place`, [out, r], as B of our matrix: zeros in the rows of the others."""
        if self.is_transposed(row):
            return row.op.ours([second.t()])
        blank = torch.empty(self.whole[row.ours], device="meta")
        sizes = [part.shape[0] for part in row.op.theirs(blank)]
        parts = [
            second if index == place else second.new_zeros(size, second.shape[1]) for index, size in enumerate(sizes)
        ]
        return row.op.ours(parts)

    def lora_b_to_theirs(self, row: ParameterMapping, second: Tensor) -> list[Tensor]:
        """Return B of our matrix, [all rows, r], as B of each of theirs."""
        parts = row.op.theirs(second)
        return [part.t() for part in parts] if self.is_transposed(row) else list(parts)


def _experts_module_name(name: str) -> str:
    """Return all experts' module for the name of one: a.mlp.experts.3.up_proj.weight -> a.mlp.experts."""
    return name.partition(".experts.")[0].replace(".block_sparse_moe", ".mlp") + ".experts"


def read_peft_folder(folder: str | Path, model: ModelConfig) -> LoadedAdapter:
    """Read the PEFT adapter in a folder, for this network. Raises one `CheckpointError` with all that does not fit it."""
    folder = Path(folder)
    config, (tensors, metadata) = _read_peft_config(folder), _read_peft_tensors(folder)
    model = replace(model, reward_head=model.reward_head or config.get("task_type") == "SEQ_CLS")
    places = _PeftMatrixMapping(model)
    factors, saved, problems = _classify_peft_tensors(tensors, places)
    pairs = list[LinearLoraWeights]()
    for module, tensors_of in factors.items():
        result = _convert_peft_module_factors(module, tensors_of, config, places)
        if isinstance(result, str):
            problems.append(result)
        else:
            pairs.append(result)
    if problems or not pairs:
        raise CheckpointError(f"{folder} is no adapter of this network", problems or ["it adapts nothing"])
    made = replace(model, adapter=_adapter_config_from_peft(config, model, pairs, saved))
    base = {"hash": metadata.get("base_hash"), "where": config.get("base_model_name_or_path")}
    return LoadedAdapter(str(folder), made, tuple(pairs), saved, base)


def _classify_peft_tensors(
    tensors: Mapping[str, Tensor], places: _PeftMatrixMapping
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], list[str]]:
    """Return LoRA factors by module and kind (A, B, magnitude), whole parameters by our names, and problems."""
    factors: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    problems = []
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(_PREFIX)
        factor, row = _FACTOR.fullmatch(name), places.row_of_name.get(name)
        if factor:
            factors.setdefault(f"{factor[1]}{factor[2] or ''}", {})[factor[3] or factor[4]] = tensor
        elif row is None or len(row.theirs) > 1:
            problems.append(f"{name} is no parameter of this network, or a part of one that is fused here")
        else:
            whole = row.op.ours([tensor])
            saved[row.ours] = whole[: places.whole[row.ours][0]] if row.ours in VOCABULARY else whole
            if tuple(saved[row.ours].shape) != places.whole[row.ours]:
                problems.append(f"{name} has shape {list(tensor.shape)}, which is not this network's")
    return factors, saved, problems


def _convert_peft_module_factors(
    module: str, factors: Mapping[str, Tensor], config: Mapping[str, Any], places: _PeftMatrixMapping
) -> LinearLoraWeights | str:
    """Convert one PEFT adapter to ours, or return why that is impossible."""
    if not {"A", "B"} <= factors.keys() or factors["A"].dim() != 2 or factors["B"].dim() != 2:
        return f"{module} has not both of lora_A and lora_B, as matrices"
    first, second = factors["A"], factors["B"]
    experts = places.experts.get(module.removesuffix(".base_layer"))
    if experts is not None:
        return _convert_peft_expert_adapter(module, experts, first, second, config, places)
    row = places.linear_of.get(module)
    if row is None:
        return f"{module} is no linear layer of this network"
    linear, place = row.ours.removesuffix(".weight"), row.theirs.index(f"{module}.weight")
    shape = places.shapes[linear]
    parts = [name for name, _ in shape.parts]
    part = parts[place] if len(parts) == len(row.theirs) else ""
    if part == "" and len(row.theirs) > 1:
        return f"{module} is a part of {linear} that has no adapter of its own here"
    start, size = shape.row_offset_and_count_of_part(part)
    their = row.op.theirs(torch.empty(places.whole[row.ours], device="meta"))[place]
    outputs, inputs = reversed(their.shape) if places.is_transposed(row) else their.shape
    if first.shape[0] != second.shape[1]:
        return f"{module} has factors of different ranks, {first.shape[0]} and {second.shape[1]}"
    if first.shape[1] != inputs or second.shape[0] != outputs:
        return f"{module} is of a matrix of {second.shape[0]} x {first.shape[1]}, and this network has {outputs} x {inputs} there"
    scale = _lora_scale(config, module, first.shape[0])
    lengths = factors.get("magnitude")
    if lengths is not None:
        lengths = places.lora_b_to_ours(row, place, lengths.view(-1, 1))[start : start + size, 0].contiguous()
    return LinearLoraWeights(
        linear,
        part,
        (start, size),
        first,
        places.lora_b_to_ours(row, place, second)[start : start + size].contiguous(),
        scale,
        lengths,
    )


def _convert_peft_expert_adapter(
    module: str, experts: str, first: Tensor, second: Tensor, config: Mapping[str, Any], places: _PeftMatrixMapping
) -> LinearLoraWeights | str:
    """Convert experts' factors A [e r, in], B [out, r e] to A [e, r, in], B [e, out, r]; or return why not."""
    for matrix in _EXPERT_PARAMETERS:
        count, outputs, inputs = places.whole[f"{experts}.{matrix}.weight"]
        if (second.shape[0], first.shape[1]) == (outputs, inputs) and first.shape[0] % count == 0:
            rank = first.shape[0] // count
            a, b = first.reshape(count, rank, inputs), second.reshape(outputs, rank, count).permute(2, 0, 1)
            return LinearLoraWeights(
                f"{experts}.{matrix}",
                "",
                (0, outputs),
                a.contiguous(),
                b.contiguous(),
                _lora_scale(config, f"{module.removesuffix('.base_layer')}.{_EXPERT_PARAMETERS[matrix]}", rank),
            )
    return (
        f"{module} is of matrices of {second.shape[0]} x {first.shape[1]}, which the experts of this network have not"
    )


def _lora_scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / r (rsLoRA: alpha / sqrt r); alpha by the first alpha_pattern that ends the module's name."""
    patterns = config.get("alpha_pattern") or {}
    key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
    alpha = float(config["lora_alpha"] if key is None else patterns[key])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _adapter_config_from_peft(
    config: Mapping[str, Any], model: ModelConfig, pairs: list[LinearLoraWeights], saved: Mapping[str, Tensor]
) -> AdapterConfig:
    """Return the flags that make these adapters. A matrix that is adapted alike in all layers is named once."""
    rslora = bool(config.get("use_rslora"))
    sizes = {
        (pair.linear, pair.part): (pair.rank, pair.scale * (math.sqrt(pair.rank) if rslora else pair.rank))
        for pair in pairs
    }
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
        lora_dropout=float(config.get("lora_dropout") or 0.0),
        lora_targets=tuple(dict.fromkeys(targets)),
        lora_rslora=rslora,
        dora=bool(config.get("use_dora")),
        lora_modules_to_save=tuple(saved),
    )


def _read_peft_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json; `CheckpointError` if it asks for anything that is not computed here."""
    config = read_json(folder / CONFIG)
    problems = [] if config.get("peft_type") == "LORA" else [f"peft_type {config.get('peft_type')}: known is LORA"]
    problems += [] if config.get("bias", "none") == "none" else [f"bias {config['bias']}: known is none"]
    problems += [f"{name}: {config[name]}" for name in _UNKNOWN if config.get(name)]
    if not isinstance(config.get("lora_alpha"), int | float):
        problems.append(f"lora_alpha {config.get('lora_alpha')} is no number")
    if problems:
        raise CheckpointError(f"{folder / CONFIG} describes an adapter that cannot be built here", problems)
    return config


def _read_peft_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a folder's safetensors file, and its metadata."""
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {error}") from None


def write_peft_folder(adapters: LoadedAdapter, folder: str | Path, *, base: str | None = None) -> None:
    """Write adapters as a folder that PEFT loads. base: value of base_model_name_or_path.

    Raises `CheckpointError` if the folder is not empty, or PEFT's files cannot express the adapters.
    """
    folder, places, file = Path(folder), _PeftMatrixMapping(adapters.model), _PeftExport()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already; move it away, or choose another folder")
    experts: dict[str, list[LinearLoraWeights]] = {}
    linears: dict[str, list[LinearLoraWeights]] = {}
    for pair in adapters.pairs:
        if pair.first.dim() == 3:
            experts.setdefault(pair.linear.rpartition(".")[0], []).append(pair)
        else:
            linears.setdefault(pair.linear, []).append(pair)
    for linear, pairs in linears.items():
        _export_linear_adapters(linear, pairs, places, file)
    for module, pairs in experts.items():
        _export_expert_adapters(module, pairs, places, file)
    for name, tensor in adapters.saved.items():
        row = places.row_of[name]
        for their, part in zip(row.theirs, row.op.theirs(tensor), strict=True):
            file.tensors[f"{_PREFIX}{their}"] = part
            file.saved.add(their.rpartition(".")[0])
    folder.mkdir(parents=True, exist_ok=True)
    hash_of_base = adapters.base.get("hash")
    metadata = {"format": "pt", **({"base_hash": str(hash_of_base)} if hash_of_base else {})}
    save_file({name: tensor.contiguous().clone() for name, tensor in file.tensors.items()}, folder / WEIGHTS, metadata)
    config = _make_peft_config(adapters.model, file, places, base)
    write_json(folder / CONFIG, config)


@dataclass(slots=True)
class _PeftExport:
    """Content of a PEFT folder, collected before it is written. sizes: (rank, scale) of each module, for experts of
    each parameter. parameters: of experts, PEFT's target_parameters. saved: modules whose parameters are written whole.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, tuple[int, float]] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    saved: set[str] = field(default_factory=set)


def _make_peft_config(
    model: ModelConfig, file: _PeftExport, places: _PeftMatrixMapping, base: str | None
) -> dict[str, Any]:
    """Return the adapter_config.json: most frequent rank and alpha as defaults, others by full module names."""
    rslora = model.adapter.lora_rslora
    sizes = {
        module: (rank, _int_if_whole(scale * (math.sqrt(rank) if rslora else rank)))
        for module, (rank, scale) in file.sizes.items()
    }
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0]
    linears = [module for module in sizes if module in places.linear_of]
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.reward_head else _TASKS.get(model.architecture),
        "base_model_name_or_path": base,
        "bias": "none",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": model.adapter.lora_dropout,
        "target_modules": _peft_target_modules(linears, places),
        "target_parameters": file.parameters or None,
        "rank_pattern": {re.escape(module): size[0] for module, size in sizes.items() if size[0] != rank},
        "alpha_pattern": {re.escape(module): size[1] for module, size in sizes.items() if size[1] != alpha},
        "use_rslora": rslora,
        "use_dora": model.adapter.dora,
        "modules_to_save": sorted(file.saved) or None,
        "fan_in_fan_out": any(places.is_transposed(places.linear_of[module]) for module in linears),
        "inference_mode": True,
    }


def _export_linear_adapters(
    linear: str, pairs: list[LinearLoraWeights], places: _PeftMatrixMapping, file: _PeftExport
) -> None:
    """Add the tensors of one of our linear layers to the export. A module of theirs that several of our adapters write
    to gets all their ranks, with scales folded into B; modules that one adapter writes to share its A.
    """
    row, rows = places.row_of[f"{linear}.weight"], places.shapes[linear].outputs
    a = torch.cat([pair.first for pair in pairs])
    b, used = a.new_zeros(rows, a.shape[0]), torch.zeros(rows, a.shape[0])
    scales, column = a.new_empty(a.shape[0], dtype=torch.float64), 0
    for pair in pairs:
        columns = slice(column, column + pair.rank)
        place = slice(pair.rows[0], sum(pair.rows)), columns
        b[place], used[place], scales[columns] = pair.second, 1.0, pair.scale
        column += pair.rank
    for name, part, mask in zip(
        row.theirs, places.lora_b_to_theirs(row, b), places.lora_b_to_theirs(row, used), strict=True
    ):
        mine = mask.bool().any(dim=0)
        if mine.any():
            module, scale = name.removesuffix(".weight"), scales[mine]
            file.tensors[f"{_PREFIX}{module}.lora_A.weight"] = a[mine]
            file.tensors[f"{_PREFIX}{module}.lora_B.weight"] = part[:, mine] * (scale / scale[0]).to(b)
            file.sizes[module] = int(mine.sum()), float(scale[0])
    if any(pair.lengths is not None for pair in pairs):
        _export_dora_magnitudes(linear, pairs, places, file)


def _export_dora_magnitudes(
    linear: str, pairs: list[LinearLoraWeights], places: _PeftMatrixMapping, file: _PeftExport
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
            file.tensors[f"{_PREFIX}{module}.lora_magnitude_vector"] = part.flatten()


def _export_expert_adapters(
    ours: str, pairs: list[LinearLoraWeights], places: _PeftMatrixMapping, file: _PeftExport
) -> None:
    """Add the adapters of a layer's experts; of two adapted parameters the first is nested as base_layer."""
    module = next(theirs for theirs, name in places.experts.items() if name == ours)
    parts = [pair for pair in pairs if pair.part]
    if parts:
        raise CheckpointError(
            f"PEFT's files have gate and up of experts as one matrix: {parts[0].parameter_prefix} cannot be written; adapt linear_fc1"
        )
    for place, pair in enumerate(sorted(pairs, key=lambda pair: pair.linear)):
        deeper = ".base_layer" if place + 1 < len(pairs) else ""
        file.tensors[f"{_PREFIX}{module}{deeper}.lora_A.weight"] = pair.first.flatten(0, 1)
        file.tensors[f"{_PREFIX}{module}{deeper}.lora_B.weight"] = pair.second.permute(1, 2, 0).flatten(1)
        name = f"{module}.{_EXPERT_PARAMETERS[pair.linear.rpartition('.')[2]]}"
        file.parameters.append(name)
        file.sizes[name] = pair.rank, pair.scale


def _peft_target_modules(modules: list[str], places: _PeftMatrixMapping) -> list[str]:
    """Return last words of module names where all modules with that ending are adapted, else full names."""
    chosen = set(modules)
    ends = {module: module.rpartition(".")[2] for module in places.linear_of if ".experts." not in module}
    partly = {end for module, end in ends.items() if module not in chosen}
    return sorted({module if ends[module] in partly else ends[module] for module in chosen})


def _int_if_whole(value: float) -> int | float:
    """Return a float that is whole as an int, as PEFT's configs have it."""
    value = round(value, 9)
    return int(value) if value == int(value) else value
