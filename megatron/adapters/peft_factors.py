"""LoRA factors of a PEFT folder as adapters of our matrices.

A module of theirs is adapted if the config names it and the file has its factors; PEFT passes over the rest, which is refused here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.adapters.files import LinearLoraWeights
from megatron.adapters.peft_config import CONFIG, FIRST_WITH_EXPERT_ROWS, SWAPS_TRANSPOSED_EXPERTS, PeftConfig
from megatron.adapters.peft_mapping import ExpertParameter, PeftMatrixMapping
from megatron.core.models.parameter_names import VOCABULARY

WRAPPED = ".base_layer"  # a module under an adapter, or under the adapter of another parameter of it


@dataclass(slots=True)
class ConvertedTensors:
    """What a folder's tensors are here. saved: whole parameters by our names. vocabulary_rows: of a saved embedding in the file."""

    pairs: list[LinearLoraWeights] = field(default_factory=list)
    saved: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    vocabulary_rows: int | None = None


def add_adapters(
    result: ConvertedTensors, factors: Mapping[str, Mapping[str, Tensor]], config: PeftConfig, places: PeftMatrixMapping
) -> set[str]:
    """Add the adapters that factors are, by module: A [r, in], B [out, r], magnitude [out]. Return the modules that PEFT adapts."""
    named = _named_modules(factors, config, places)
    result.problems += [
        f"{module} has no factors, and {CONFIG} names it" for module in sorted(set(named) - set(factors))
    ]
    result.problems += _unnamed_module_problems(sorted(set(factors) - set(named)), places)
    adapted = {module: name for module, name in named.items() if module in factors}
    ranks = config.ranks(adapted.values())
    scales = config.scales(ranks)
    single: dict[tuple[str, str], dict[int, LinearLoraWeights]] = {}
    for module, name in adapted.items():
        experts = places.experts.get(name)
        problem = _factor_problem(factors[module], None if experts else ranks[name], config)
        if problem is None and experts is not None:
            problem = _add_expert_parameter(
                result, experts, factors[module], (ranks[name], scales[name]), config, places
            )
        elif problem is None and module in places.single_experts:
            problem = _add_single_expert(single, module, factors[module], scales[name], places)
        elif problem is None:
            problem = _add_linear(result, module, factors[module], scales[name], places)
        if problem is not None:
            result.problems.append(f"{module} {problem}")
    _stack_single_experts(result, single, places)
    return set(adapted)


def _named_modules(factors: Collection[str], config: PeftConfig, places: PeftMatrixMapping) -> dict[str, str]:
    """Return the modules that the config names, by the names in files, with the names that their ranks and alphas go by."""
    result: dict[str, str] = {}
    single = [module for module in factors if module in places.single_experts]
    targeted = config.targeted([*places.linear_of, *single])
    parameters = config.targeted_parameters([*places.experts, *(f"{module}.weight" for module in places.linear_of)])
    for module in dict.fromkeys(one.module for one in places.experts.values()):
        names = [name for name in places.expert_parameters_of(module) if name in parameters]
        # the first is wrapped first, and so is innermost
        result |= {module + WRAPPED * (len(names) - 1 - place): name for place, name in enumerate(names)}
    in_runs = {module for module, row in places.linear_of.items() if row.ours.removesuffix(".weight") in places.shapes}
    result |= {module: module for module in targeted if module in factors or module in in_runs}
    return result | {name.removesuffix(".weight"): name for name in parameters if name not in places.experts}


def _unnamed_module_problems(modules: Collection[str], places: PeftMatrixMapping) -> Iterator[str]:
    """Yield what is wrong with modules that have factors and are not named by the config."""
    known = {*places.linear_of, *places.single_experts, *(one.module for one in places.experts.values())}
    for module in modules:
        if module.removesuffix(WRAPPED) in known:
            yield f"{module} has factors, and {CONFIG} does not name it, so that PEFT passes over them"
        else:
            yield f"{module} is no linear layer of this network"


def _factor_problem(factors: Mapping[str, Tensor], rank: int | None, config: PeftConfig) -> str | None:
    """Return why a module's tensors are no adapter of the config's kind and of this rank (None: any), or None."""
    if not {"A", "B"} <= factors.keys() or factors["A"].dim() != 2 or factors["B"].dim() != 2:
        return "has not both of lora_A and lora_B, as matrices"
    if factors["A"].shape[0] != factors["B"].shape[1]:
        return f"has factors of different ranks, {factors['A'].shape[0]} and {factors['B'].shape[1]}"
    if rank not in (None, factors["A"].shape[0]):
        return f"has rank {factors['A'].shape[0]}, and {CONFIG} says {rank}"
    if config.dora != ("magnitude" in factors):
        return (
            "has no lora_magnitude_vector, and use_dora is true"
            if config.dora
            else "has a lora_magnitude_vector, and use_dora is not true"
        )
    return None


def _add_linear(
    result: ConvertedTensors, module: str, factors: Mapping[str, Tensor], scale: float, places: PeftMatrixMapping
) -> str | None:
    """Add the adapters that one of their linear modules is here: of each part of our matrix, with the same A. Or return why not."""
    row = places.linear_of[module]
    place = row.theirs.index(f"{module}.weight")
    first, second, lengths = factors["A"], factors["B"], factors.get("magnitude")
    outputs, inputs = places.their_shape(row, place)
    outputs = (
        second.shape[0] if row.ours in VOCABULARY else outputs
    )  # whose size may not be known before there is a tokenizer
    if (second.shape[0], first.shape[1]) != (outputs, inputs):
        return (
            f"is of a matrix of {second.shape[0]} x {first.shape[1]}, and this network has {outputs} x {inputs} there"
        )
    if first.shape[0] > max(outputs, inputs):
        return f"has rank {first.shape[0]}, above that of its matrix"
    if lengths is not None and lengths.numel() != outputs:
        return f"has {lengths.numel()} magnitudes for {outputs} rows"
    spans = places.parts_of(row, place)
    if not spans:
        return f"is a part of {row.ours} that has no adapter of its own here"
    if row.ours in VOCABULARY:
        spans = [("", (0, outputs))]
    b = places.lora_b_to_ours(row, place, second)
    m = None if lengths is None else places.lora_b_to_ours(row, place, lengths.view(-1, 1))[:, 0]
    for part, rows in spans:
        mine = slice(rows[0], sum(rows))
        used = _columns_of_part(b, mine)
        pair = LinearLoraWeights(
            row.ours.removesuffix(".weight"),
            part,
            rows,
            first[used],
            b[mine, used].contiguous(),
            scale,
            None if m is None else m[mine].contiguous(),
        )
        result.pairs.append(pair)
    return None


def _columns_of_part(b: Tensor, rows: slice) -> Tensor | slice:
    """Return which columns of B, [out, r], a part needs: not those that are zero in its rows and belong to another part.

    Adapters of the parts of a matrix that is one there are written as one, with all of their ranks.
    """
    if b.is_meta:
        return slice(None)
    needed = b[rows].any(dim=0) | ~b.any(dim=0)
    return slice(None) if bool(needed.all()) or not bool(needed.any()) else needed


def _add_expert_parameter(
    result: ConvertedTensors,
    experts: ExpertParameter,
    factors: Mapping[str, Tensor],
    rank_and_scale: tuple[int, float],
    config: PeftConfig,
    places: PeftMatrixMapping,
) -> str | None:
    """Add the adapter of all experts, A [e r, in] and B [out, r e] there, A [e, r, in] and B [e, out, r] here. Or return why not.

    Before PEFT 0.19.1 A was as wide as the second dimension of the parameter, which mostly is the output.
    """
    count, outputs, inputs = places.whole[experts.row.ours]
    (rank, scale), a, b = rank_and_scale, factors["A"], factors["B"]
    sizes = b.shape[0], a.shape[1]
    layouts = _layouts_of_experts(experts, config, sizes == (outputs, inputs), sizes == (inputs, outputs))
    if len(layouts) > 1:
        return (
            "is square, so that its factors may be stored as PEFT has them before 0.19.1 or since; write the version that it was saved "
            f"with into {CONFIG} as peft_version"
        )
    if not layouts or a.shape[0] != count * rank or rank > max(outputs, inputs):
        return (
            f"is of {count} matrices of {sizes[0]} x {sizes[1]} with rank {a.shape[0]} in all, and the {count} of this network are "
            f"{outputs} x {inputs}, with rank {rank} each"
        )
    first, second = a.reshape(count, rank, sizes[1]), b.reshape(sizes[0], rank, count).permute(2, 0, 1)
    if layouts == [True]:
        first, second = second.transpose(1, 2), first.transpose(1, 2)
    if experts.transposed:
        second = experts.row.op.ours([second.transpose(1, 2)])
    result.pairs.append(
        LinearLoraWeights(experts.linear, "", (0, outputs), first.contiguous(), second.contiguous(), scale)
    )
    return None


def _layouts_of_experts(experts: ExpertParameter, config: PeftConfig, fits: bool, fits_swapped: bool) -> list[bool]:
    """Return in which layouts an adapter of experts may be stored: A as wide as their input (False), or as their output (True).

    PEFT once took the second dimension of the parameter for the input, and 0.19.0 the third where that is the output.
    """
    if config.version is None:
        return [False] * fits + [True] * (fits_swapped and not experts.transposed)
    if experts.transposed:
        swapped = config.version == SWAPS_TRANSPOSED_EXPERTS
    else:
        swapped = config.version < FIRST_WITH_EXPERT_ROWS
    return [swapped] if (fits_swapped if swapped else fits) else []


def _add_single_expert(
    single: dict[tuple[str, str], dict[int, LinearLoraWeights]],
    module: str,
    factors: Mapping[str, Tensor],
    scale: float,
    places: PeftMatrixMapping,
) -> str | None:
    """Add the adapter of one expert to those of its matrix and part; or return why not."""
    row, place = places.single_experts[module]
    linear = row.ours.removesuffix(".weight")
    shape, expert = places.shapes[linear], place // row.op.each
    part = shape.parts[place % row.op.each][0]
    rows = shape.row_offset_and_count_of_part(part)
    a, b = factors["A"], factors["B"]
    if (b.shape[0], a.shape[1]) != (rows[1], shape.inputs):
        return f"is of a matrix of {b.shape[0]} x {a.shape[1]}, and this network has {rows[1]} x {shape.inputs} there"
    if "magnitude" in factors:
        return "is an expert with DoRA, which experts have not here"
    single.setdefault((linear, part), {})[expert] = LinearLoraWeights(linear, part, rows, a, b, scale)
    return None


def _stack_single_experts(
    result: ConvertedTensors,
    single: Mapping[tuple[str, str], Mapping[int, LinearLoraWeights]],
    places: PeftMatrixMapping,
) -> None:
    """Add the adapters of single experts as one of all, A [e, r, in] and B [e, out, r]."""
    for (linear, part), experts in single.items():
        count = places.whole[f"{linear}.weight"][0]
        pairs = [experts[index] for index in sorted(experts)]
        if len(pairs) != count or len({(pair.rank, pair.scale) for pair in pairs}) > 1:
            result.problems.append(
                f"{linear}.{part or 'weight'}: {len(pairs)} of {count} experts have adapters, or these differ in rank or alpha"
            )
            continue
        first, second = torch.stack([pair.first for pair in pairs]), torch.stack([pair.second for pair in pairs])
        result.pairs.append(replace(pairs[0], first=first, second=second))
