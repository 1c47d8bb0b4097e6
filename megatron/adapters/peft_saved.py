"""Parameters that a PEFT folder holds whole: of modules_to_save, biases, and a vocabulary that PEFT saves by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from megatron.adapters.peft_config import PeftConfig
from megatron.adapters.peft_factors import WRAPPED, ConvertedTensors
from megatron.adapters.peft_mapping import PeftMatrixMapping
from megatron.core.models.parameter_names import VOCABULARY, WORD_EMBEDDING

# Further copies of a saved embedding, which PEFT writes where tokens were added and passes over when it loads.
_COPIES = (".modules_to_save.", ".original_module.")
_HEAD = "lm_head.weight"


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
