"""What a network holds, told by the network itself: its stages are built on the meta device (on_meta.py), where nothing takes memory.

    parameter_shapes   names and whole shapes, which converting and exporting compare with what files hold
    count_parameters   how many there are, by where they are
    rank_parameters    how many one rank holds under a layout

A network of hundreds of layers has few kinds of them: each is built once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.core.config.adapters import is_trained
from megatron.core.config.plan import LayerPlan, StageSpec, layer_rows, partition
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.parallel import ParallelConfig

Shape = tuple[int, ...]
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class Split:
    """How many ranks share a matrix (tensor), the experts of a layer (experts), and each expert's matrices (widths)."""

    tensor: int = 1
    experts: int = 1
    widths: int = 1

    @staticmethod
    def of(parallel: ParallelConfig) -> Split:
        """The division that a layout makes."""
        return Split(
            parallel.tp, parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or parallel.tp
        )


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of the whole network, the vocabulary padded. A tied output layer counts once, in the embedding.

    ahead: those of multi-token prediction.
    """

    embedding: int
    block: int
    final_norm: int
    head: int
    ahead: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.block + self.final_norm + self.head + self.ahead


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters of one rank: of its layers (layers), of the experts in them (experts), and of everything else (rest)."""

    layers: int
    experts: int
    rest: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.layers + self.rest

    def __sub__(self, other: Held) -> Held:
        """What is left without others."""
        return Held(self.layers - other.layers, self.experts - other.experts, self.rest - other.rest)


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Global name -> whole shape of every parameter. model: resolved, with its vocabulary; rows of padding do not count.

    Of a BERT these are all its heads; a checkpoint may lack some. A tied output layer is the embedding.
    """
    return dict(_shapes(replace(model, padded_vocab_size=model.true_vocab_size)))


def mtp_depths(model: ModelConfig) -> int:
    """Layers of multi-token prediction that are stored: one may serve all depths."""
    depths = model.mtp.mtp_num_layers or 0
    return min(depths, 1) if model.mtp.mtp_use_repeated_layer else depths


@lru_cache(maxsize=64)
def count_parameters(model: ModelConfig) -> ParameterCount:
    """The parameters of the whole network."""
    counts: Counter[str] = Counter()
    for name, shape in _shapes(replace(model, true_vocab_size=model.padded_vocab_size)):
        counts[_place(name)] += math.prod(shape)
    return ParameterCount(**{place: counts[place] for place in ("embedding", "block", "final_norm", "head", "ahead")})


def active_parameters(model: ModelConfig) -> int:
    """Parameters that one token uses: all but those of experts that it does not choose."""
    idle = 0
    for name, shape in _shapes(replace(model, true_vocab_size=model.padded_vocab_size)):
        if _EXPERTS in name:
            depths = (
                model.mtp.mtp_num_layers or 0 if name.startswith("mtp.") and model.mtp.mtp_use_repeated_layer else 1
            )
            idle += depths * math.prod(shape) // shape[0] * (shape[0] - model.moe.moe_router_topk)
    return count_parameters(model).total - idle


def layer_parameters(model: ModelConfig, split: Split = Split(), plan: LayerPlan | None = None) -> int:
    """One layer's parameters on each rank of a division. plan: which layer; the first, where it is left out."""
    return _layer(model, split, replace(plan or layer_rows(model)[0], index=0), False)[0]


def rank_parameters(
    model: ModelConfig, stages: Sequence[StageSpec], split: Split = Split(), *, trained: bool = False
) -> Held:
    """Parameters on one rank that holds these pipeline stages; trained: only those that are not frozen.

    A tied output layer that sits on another stage than the embedding is a second copy, and so is the embedding of a stage that looks
    ahead.
    """
    adapter = model.adapter
    trained = trained and (adapter.has_adapters or bool(adapter.freeze))
    alike = not trained or not (adapter.freeze or adapter.lora_modules_to_save)  # whose patterns may name layers
    plans = [replace(plan, index=0) if alike else plan for stage in stages for plan in stage.layers]
    layers = [_layer(model, split, plan, trained) for plan in plans]
    rest = sum(_around(model, split, _thinned(model, stage), trained) for stage in stages)
    return Held(sum(total for total, _ in layers), sum(experts for _, experts in layers), rest)


def _thinned(model: ModelConfig, stage: StageSpec) -> StageSpec:
    """A stage without layers that change nothing around them, so that stages which differ in those alone are built once."""
    if model.architecture == "t5":  # a stage that ends the encoder has its norm
        return stage
    return replace(stage, index=0, count=1, rank=0, chunk=0, layers=())


@lru_cache(maxsize=16)
def _shapes(model: ModelConfig) -> tuple[tuple[str, Shape], ...]:
    (stage,) = partition(layer_rows(model), pp=1)
    return tuple((name, shape) for name, shape, _ in _held(model, Split(), stage))


@lru_cache(maxsize=1024)
def _layer(model: ModelConfig, split: Split, plan: LayerPlan, trained: bool) -> tuple[int, int]:
    """Parameters of a layer on a rank, and those of its experts among them."""
    sizes = dict(_sizes(model, split, StageSpec(0, 1, 0, 0, (plan,), has_embedding=False, has_output=False), trained))
    inside = {name: size for name, size in sizes.items() if ".layers." in name}
    return sum(inside.values()), sum(size for name, size in inside.items() if _EXPERTS in name)


@lru_cache(maxsize=1024)
def _around(model: ModelConfig, split: Split, stage: StageSpec, trained: bool) -> int:
    """Parameters of a stage on a rank, those of its layers left out."""
    here = ("decoder.layers.", "encoder.layers.")
    return sum(size for name, size in _sizes(model, split, stage, trained) if not name.startswith(here))


def _sizes(model: ModelConfig, split: Split, stage: StageSpec, trained: bool) -> Iterator[tuple[str, int]]:
    """Name and size of what a rank holds of each parameter of a stage, or of each that is trained."""
    held = _held(model, split, stage)
    return ((name, size) for name, _, size in held if not trained or is_trained(name, model.adapter))


def _held(model: ModelConfig, split: Split, stage: StageSpec) -> list[tuple[str, Shape, int]]:
    from megatron.core.models.on_meta import (
        held_parameters,
    )  # needs torch, which a tool's help and refusals do not wait for

    return held_parameters(model, stage, tp=split.tensor, ep=split.experts, etp=split.widths)


def _place(name: str) -> str:
    """The part of a network that a parameter belongs to, as `ParameterCount` names it."""
    if name.startswith("mtp."):
        return "ahead"
    if name.startswith(("decoder.layers.", "encoder.layers.")):
        return "block"
    if name.endswith((".final_layernorm.weight", ".final_layernorm.bias")):
        return "final_norm"
    return "embedding" if name.startswith("embedding.") or "relative_pos_emb" in name else "head"
