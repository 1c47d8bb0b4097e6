"""Adapters read into memory, by our names; and a network with adapters merged into its weights, as a source.

LoadedAdapter      factors of every adapted matrix, and parameters that were trained beside them
InMemoryAdapterSource   the same as the tensors that a run with adapters loads
Merged          a network's source whose weights are W + scale B A, and with lengths of rows m (W + scale B A) / |W + scale B A|
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.adapters import WHOLE, is_adapter_parameter, layer_adapter_plans
from megatron.core.config.flags.declare import config_to_flat_dict
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.plan.linear_layers import layer_module_path, linear_shapes_of_layer
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.source import CheckpointSource, ShapeAndDtype
from megatron.core.parallel.boxes import Box, whole_box

BASE = "run.base"  # the value under which a checkpoint of adapters keeps the hash of its base


# Endings of names of matrices whose adapters can be merged, but have no place in a run: routers, gates of shared experts, the output layer.
MERGED_ONLY = (".router", ".shared_experts.gate_weight", "output_layer")
OUTPUT_LAYER = "output_layer."  # of language models, which reward models have not
_LEFT = ("run.tokenizer", "run.progress")  # of a run's values those that weights keep


@dataclass(frozen=True, slots=True)
class LinearLoraWeights:
    """One adapter. linear: global name of its layer. part: of a fused matrix, "" all of it. rows: first row of the matrix, and number.

    first: A, [r, in], of experts [e, r, in]. second: B, [rows, r], of experts [e, rows, r]. lengths: of rows, [rows], with DoRA.
    """

    linear: str
    part: str
    rows: tuple[int, int]
    first: Tensor
    second: Tensor
    scale: float
    lengths: Tensor | None = None

    @property
    def parameter_prefix(self) -> str:
        """Prefix of the global names of its parameters."""
        return f"{self.linear}.adapter.pairs.{self.part or WHOLE}"

    @property
    def rank(self) -> int:
        """LoRA rank: the number of rows of A."""
        return self.first.shape[-2]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """All adapters of a network, in memory. where: what they were read from, for errors. model: with its adapters.
    saved: parameters that were trained beside them, by global name. base: hash and name of the base, where known.
    vocabulary_rows: of a saved embedding or output layer, as many as its file has, if there is one.
    """

    where: str
    model: ModelConfig
    pairs: tuple[LinearLoraWeights, ...]
    saved: Mapping[str, Tensor]
    base: Mapping[str, Any]
    vocabulary_rows: int | None = None


def planned_adapters(model: ModelConfig) -> Iterator[tuple[str, str, tuple[int, int], float]]:
    """Yield (global name of the linear layer, part, (first row, number of rows), scale) of every adapter of a network."""
    for plan in network_layer_plans(model):
        shapes = linear_shapes_of_layer(model, plan)
        for one in layer_adapter_plans(model, plan):
            rows = shapes[one.linear].row_offset_and_count_of_part(one.part)
            yield f"{layer_module_path(model, plan)}.{one.linear}", one.part, rows, one.scale


def require_adapters_fit_network(adapters: LoadedAdapter, model: ModelConfig) -> None:
    """Raise `CheckpointError` if adapters name layers that the network does not have, or matrices of other sizes."""
    shapes = {
        f"{layer_module_path(model, plan)}.{path}": shape
        for plan in network_layer_plans(model)
        for path, shape in linear_shapes_of_layer(model, plan).items()
    }
    problems = []
    merged = [pair.linear for pair in adapters.pairs if pair.linear not in shapes and pair.linear.endswith(MERGED_ONLY)]
    if merged:
        raise CheckpointError(
            f"{adapters.where} adapts {', '.join(merged[:3])}{', ...' if merged[3:] else ''}, which has no adapter in a run or a server here; merge "
            "it into its base: megatron checkpoint adapter merge"
        )
    for pair in adapters.pairs:
        shape, theirs = shapes.get(pair.linear), (pair.second.shape[-2], pair.first.shape[-1])
        if shape is None or pair.part not in ("", *(part for part, _ in shape.parts)):
            problems.append(f"{pair.parameter_prefix}: this network has no such linear layer")
        elif theirs != (mine := (shape.row_offset_and_count_of_part(pair.part)[1], shape.inputs)):
            problems.append(
                f"{pair.parameter_prefix} is of a matrix of {theirs[0]} x {theirs[1]}, and this network has {mine[0]} x {mine[1]}"
            )
    if problems:
        raise CheckpointError(f"{adapters.where} holds adapters of another network", problems)


def incomplete_adapter_problems(adapters: LoadedAdapter) -> list[str]:
    """Return which tensors that the settings of adapters name are missing, or of another shape; [] if all is there."""
    unplanned, problems = {(pair.linear, pair.part): pair for pair in adapters.pairs}, []
    for linear, part, (_, size), _ in planned_adapters(adapters.model):
        pair = unplanned.pop((linear, part), None)
        if pair is None:
            problems.append(f"{linear}{part and '.'}{part}: its factors are missing")
            continue
        if adapters.model.adapter.dora != (pair.lengths is not None):
            problems.append(f"{pair.parameter_prefix}: its magnitudes are missing, or are there without --dora")
        elif pair.lengths is not None and tuple(pair.lengths.shape) != (size,):
            problems.append(f"{pair.parameter_prefix}: {list(pair.lengths.shape)} magnitudes for {size} rows")
        if pair.second.shape[-1] != pair.rank or pair.second.shape[-2] != size:
            problems.append(
                f"{pair.parameter_prefix}: factors of shapes {list(pair.first.shape)} and {list(pair.second.shape)} do not fit"
            )
    return problems + [f"{pair.parameter_prefix}: its settings do not name it" for pair in unplanned.values()]


def read_native_adapter_checkpoint(source: CheckpointSource) -> LoadedAdapter:
    """Read the adapters of a checkpoint of a run that trained them. `CheckpointError` if it holds none, or not all."""
    model = model_config_from_settings(source.settings)
    if BASE not in source.values or not model.adapter.has_adapters:
        raise CheckpointError(f"{source.where} holds no adapters but a network")
    tensors = {
        name.removeprefix("model."): source.read(name, whole_box(one.shape)).clone()
        for name, one in source.formats.items()
        if name.startswith("model.")
    }
    pairs = []
    for linear, part, rows, scale in planned_adapters(model):
        name = f"{linear}.adapter.pairs.{part or WHOLE}"
        missing = [f"{name}.{one}" for one in ("lora_A", "lora_B") if f"{name}.{one}" not in tensors]
        if missing:
            raise CheckpointError(f"{source.where} lacks adapters that its settings name", missing)
        factors = tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]
        pairs.append(LinearLoraWeights(linear, part, rows, *factors, scale, tensors.get(f"{name}.magnitude")))
    saved = {name: tensor for name, tensor in tensors.items() if not is_adapter_parameter(name)}
    return LoadedAdapter(source.where, model, tuple(pairs), saved, dict(source.values[BASE]))


class InMemoryAdapterSource:
    """A `Source` of the tensors that a run with adapters loads, from an `LoadedAdapter`."""

    def __init__(self, adapters: LoadedAdapter) -> None:
        self.where, self.settings = adapters.where, config_to_flat_dict(adapters.model)
        self.values: dict[str, Any] = {BASE: dict(adapters.base)}
        self._tensors = {f"model.{name}": tensor for name, tensor in adapters.saved.items()}
        for pair in adapters.pairs:
            self._tensors |= {
                f"model.{pair.parameter_prefix}.lora_A": pair.first,
                f"model.{pair.parameter_prefix}.lora_B": pair.second,
            }
            if pair.lengths is not None:
                self._tensors[f"model.{pair.parameter_prefix}.magnitude"] = pair.lengths
        self.formats: Mapping[str, ShapeAndDtype] = {
            name: ShapeAndDtype(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()
        }

    def fills(self, name: str) -> bool:
        """Whether it must have this tensor of a run: all of its adapters, and what was saved beside them."""
        return is_adapter_parameter(name) or name in self.formats

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of an adapter's tensor, [*box.shape]; see `Source`."""
        return self._tensors[name][box.slices()]


class MergedAdapterSource:
    """A `Source` with adapters merged into weights, or taken out. Of a run's values tokenizer and progress stay."""

    def __init__(self, source: CheckpointSource, adapters: LoadedAdapter, *, sign: float = 1.0) -> None:
        """sign: -1 takes adapters out. Raises `CheckpointError` where an adapter belongs to no matrix of the source, or cannot be taken out."""
        self.where, self._source, self._sign = source.where, source, sign
        self.values = {
            name: value for name, value in source.values.items() if not name.startswith("run.") or name in _LEFT
        }
        self.formats: Mapping[str, ShapeAndDtype] = {
            name: one for name, one in source.formats.items() if name.startswith("model.")
        }
        self.settings: Mapping[str, Any] = {**source.settings, **config_to_flat_dict(AdapterConfig())}
        self._saved = {f"model.{name}": tensor for name, tensor in adapters.saved.items()}
        if adapters.model.reward_head:
            self._replace_output_by_reward_head(adapters.saved["score.weight"])
        self._pairs: dict[str, list[LinearLoraWeights]] = {}
        for pair in adapters.pairs:
            name = f"model.{pair.linear}"  # of a gate the parameter itself
            self._pairs.setdefault(name if name in self.formats else f"{name}.weight", []).append(pair)
        if problems := [*self._adapter_shape_problems(), *self._saved_parameter_problems()]:
            raise CheckpointError(f"the adapters of {adapters.where} do not fit {source.where}", problems)
        if sign < 0 and (self._saved or any(pair.lengths is not None for pair in adapters.pairs)):
            raise CheckpointError(
                f"the adapters of {adapters.where} cannot be taken out of a network: what they replaced (lengths of rows, whole "
                "parameters) is in the base alone; take the base"
            )
        self._last: tuple[str, Tensor] | None = None

    def _replace_output_by_reward_head(self, head: Tensor) -> None:
        """Replace the output layer of the language model by the head of a reward model, [1, h]."""
        dtype = self.formats["model.embedding.word_embeddings.weight"].dtype
        kept = {name: one for name, one in self.formats.items() if not name.startswith(f"model.{OUTPUT_LAYER}")}
        self.formats = {**kept, "model.score.weight": ShapeAndDtype(tuple(head.shape), dtype)}
        self.settings = {**self.settings, "reward_head": True}

    def _adapter_shape_problems(self) -> Iterator[str]:
        """Yield which adapters belong to no matrix of the source, or to one of another size."""
        for name, pairs in self._pairs.items():
            if name not in self.formats:
                yield f"{name} is no matrix of the network"
                continue
            outputs, inputs = self.formats[name].shape[-2:]
            for pair in pairs:
                fits = (pair.second.shape[-2], pair.first.shape[-1]) == (pair.rows[1], inputs)
                if not fits or sum(pair.rows) > outputs:
                    theirs = f"{pair.second.shape[-2]} x {pair.first.shape[-1]}"
                    yield f"{pair.parameter_prefix} is of a matrix of {theirs}, and {name} has {pair.rows[1]} x {inputs}"

    def _saved_parameter_problems(self) -> Iterator[str]:
        """Yield which whole parameters saved with the adapters the source lacks or has in another shape."""
        for name, tensor in self._saved.items():
            if name not in self.formats or self.formats[name].shape != tuple(tensor.shape):
                yield f"{name}: shape {tuple(tensor.shape)} beside the adapters, and not in the network"

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a weight, [*box.shape], with its adapters merged in; see `Source`.

        The weight merged last is cached, for its other boxes.
        """
        if name not in self._pairs:
            return self._read_unmerged(name, box)
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next is made, so that there is only one
            self._last = (name, self._merge_weight(name))
        return self._last[1][box.slices()]

    def _read_unmerged(self, name: str, box: Box) -> Tensor:
        """Return a box of a weight without its adapters, as it was saved with them or else is in the source."""
        if name in self._saved:
            return self._saved[name][box.slices()].to(self.formats[name].dtype)
        return self._source.read(name, box)

    def _merge_weight(self, name: str) -> Tensor:
        """Return the weight with adapters, W + scale B A (DoRA rescales rows), in fp32 or wider, rounded once."""
        format = self.formats[name]
        wide = torch.promote_types(format.dtype, torch.float32)
        weight = self._read_unmerged(name, whole_box(format.shape)).to(wide, copy=True)
        for pair in self._pairs[name]:
            own = weight.narrow(-2, *pair.rows)
            own += (self._sign * pair.scale) * (pair.second.to(wide) @ pair.first.to(wide))
            if pair.lengths is not None:
                own *= (pair.lengths.to(wide) / own.norm(dim=-1))[..., None]
        return weight.to(format.dtype)
