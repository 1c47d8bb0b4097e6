"""Names, shapes and counts of parameters, from the network built on the meta device (on_meta.py), where nothing takes
memory.

    global_parameter_shapes   names and global shapes, which conversion and export compare with files
    count_parameters   number of parameters, by part of the network
    count_rank_parameters    number of parameters of one rank under a layout

Networks of hundreds of layers have few kinds of them: each kind is built once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.core.config.adapters import is_trained_parameter, layer_adapter_plans
from megatron.core.config.plan.layers import LayerPlan, StageSpec, network_layer_plans, partition_into_stages
from megatron.core.config.plan.linear_layers import EXPERTS
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.parallel import ParallelConfig

Shape = tuple[int, ...]
_LAYERS = ("decoder.layers.", "encoder.layers.")


@dataclass(frozen=True, slots=True)
class WeightShardCounts:
    """Number of shards of a matrix over tensor ranks, of a layer's experts, and of each expert's matrices (widths)."""

    tensor: int = 1
    experts: int = 1
    widths: int = 1

    @staticmethod
    def from_parallel(parallel: ParallelConfig) -> WeightShardCounts:
        """Return the shard counts of a parallel layout."""
        return WeightShardCounts(
            parallel.tp, parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or parallel.tp
        )


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Number of parameters of the whole network, with padded vocabulary; a tied output layer is in the embedding.

    block: layers. ahead: layers of multi-token prediction. vision: encoder of images and projector of a language model.
    """

    embedding: int
    block: int
    final_norm: int
    head: int
    ahead: int = 0
    vision: int = 0

    @property
    def total(self) -> int:
        """Number of parameters of the whole network."""
        return self.embedding + self.block + self.final_norm + self.head + self.ahead + self.vision


@dataclass(frozen=True, slots=True)
class RankParameterCounts:
    """Number of parameters of one rank: of its layers, of the experts among them, and of everything else (rest)."""

    layers: int
    experts: int
    rest: int

    @property
    def total(self) -> int:
        """Number of all parameters of the rank (experts are part of the layers)."""
        return self.layers + self.rest

    def __sub__(self, other: RankParameterCounts) -> RankParameterCounts:
        """What is left without others."""
        return RankParameterCounts(self.layers - other.layers, self.experts - other.experts, self.rest - other.rest)


def global_parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return global name -> global shape of every parameter, without rows of vocabulary padding.

    model: resolved, with its vocabulary size. For BERT all heads are included, though a checkpoint may lack some. A
    tied output layer has no entry.
    """
    return dict(_global_parameter_shapes(replace(model, padded_vocab_size=model.true_vocab_size)))


def num_stored_mtp_layers(model: ModelConfig) -> int:
    """Return the number of stored layers of multi-token prediction: one layer may serve all depths."""
    depths = model.mtp.mtp_num_layers or 0
    return min(depths, 1) if model.mtp.mtp_use_repeated_layer else depths


@lru_cache(maxsize=64)
def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the parameters of the whole network."""
    counts: Counter[str] = Counter()
    for name, shape in _global_parameter_shapes(replace(model, true_vocab_size=model.padded_vocab_size)):
        counts[_network_component_of(_strip_vision_model_prefix(model, name))] += math.prod(shape)
    places = ("embedding", "block", "final_norm", "head", "ahead", "vision")
    return ParameterCount(**{place: counts[place] for place in places})


def count_active_parameters(model: ModelConfig) -> int:
    """Count the parameters that a token uses: without idle experts, at each depth of a repeated MTP layer."""
    inactive = 0
    for name, shape in _global_parameter_shapes(replace(model, true_vocab_size=model.padded_vocab_size)):
        if EXPERTS in name:
            inactive += math.prod(shape) // shape[0] * (shape[0] - model.moe.moe_router_topk)
    return count_parameters(model).total - inactive


def count_rank_parameters(
    model: ModelConfig,
    stages: Sequence[StageSpec],
    split: WeightShardCounts = WeightShardCounts(),
    *,
    trained: bool = False,
) -> RankParameterCounts:
    """Count the parameters of a rank that holds these pipeline stages. trained: only those that the run trains.

    A tied output layer on another stage than the embedding is a second copy, as is the embedding of a stage with
    multi-token prediction.
    """
    adapter = model.adapter
    trained = trained and (adapter.has_adapters or bool(adapter.freeze))
    alike = not trained or not (adapter.freeze or adapter.lora_modules_to_save)  # whose patterns may name layers
    plans = [_first_like(model, plan) if alike else plan for stage in stages for plan in stage.layers]
    layers = [_count_layer_parameters(model, split, plan, trained) for plan in plans]
    rest = sum(
        _count_nonlayer_parameters(model, split, _stage_without_layers(model, stage), trained) for stage in stages
    )
    return RankParameterCounts(sum(total for total, _ in layers), sum(experts for _, experts in layers), rest)


def _first_like(model: ModelConfig, plan: LayerPlan) -> LayerPlan:
    """Return the plan as that of layer 0, so that layers alike are built once; the plan itself if its adapters are others."""
    first = replace(plan, index=0)
    return first if layer_adapter_plans(model, first) == layer_adapter_plans(model, plan) else plan


def _stage_without_layers(model: ModelConfig, stage: StageSpec) -> StageSpec:
    """Return the stage without layers that do not affect the rest: stages that differ in them are built once."""
    if model.architecture.is_encoder_decoder:  # the stage that ends the encoder has the final norm
        return stage
    return replace(stage, index=0, count=1, rank=0, chunk=0, layers=())


@lru_cache(maxsize=16)
def _global_parameter_shapes(model: ModelConfig) -> tuple[tuple[str, Shape], ...]:
    """Return (global name, global shape) of every parameter of the network; cached."""
    (stage,) = partition_into_stages(network_layer_plans(model), pp=1)
    return tuple((name, shape) for name, shape, _ in _parameter_sizes_on_meta(model, WeightShardCounts(), stage))


@lru_cache(maxsize=1024)
def _count_layer_parameters(
    model: ModelConfig, split: WeightShardCounts, plan: LayerPlan, trained: bool
) -> tuple[int, int]:
    """Return the number of parameters of a layer on a rank, and how many of them belong to experts."""
    stage = StageSpec(0, 1, 0, 0, (plan,), has_embedding=False, has_output=False)
    held = dict(_local_parameter_sizes(model, split, stage, trained))
    sizes = {name: size for name, size in held.items() if name.startswith(_LAYERS)}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if EXPERTS in name)


@lru_cache(maxsize=1024)
def _count_nonlayer_parameters(model: ModelConfig, split: WeightShardCounts, stage: StageSpec, trained: bool) -> int:
    """Count the parameters of a stage on a rank, without those of its layers."""
    held = _local_parameter_sizes(model, split, stage, trained)
    return sum(size for name, size in held if not name.startswith(_LAYERS))


def _local_parameter_sizes(
    model: ModelConfig, split: WeightShardCounts, stage: StageSpec, trained: bool
) -> Iterator[tuple[str, int]]:
    """Yield (name, elements on a rank) of each parameter of a stage, without the prefix vision_model.; trained: only
    of those that the run trains.
    """
    for name, _, size in _parameter_sizes_on_meta(model, split, stage):
        if not trained or is_trained_parameter(name, model.adapter):
            yield _strip_vision_model_prefix(model, name), size


def _parameter_sizes_on_meta(
    model: ModelConfig, split: WeightShardCounts, stage: StageSpec
) -> list[tuple[str, Shape, int]]:
    """Return (global name, global shape, local elements) of each parameter of a stage, built on the meta device."""
    # needs torch, which a tool's help and refusals do not wait for
    from megatron.core.models.on_meta import rank_parameter_sizes

    return rank_parameter_sizes(model, stage, tp=split.tensor, ep=split.experts, etp=split.widths)


def _strip_vision_model_prefix(model: ModelConfig, name: str) -> str:
    """Return a parameter's name, of a vision transformer without the prefix vision_model."""
    return name.removeprefix("vision_model.") if model.architecture.classifies_images else name


def _network_component_of(name: str) -> str:
    """Return the part of the network that a parameter belongs to, as named in `ParameterCount`."""
    if name.startswith("mtp."):
        return "ahead"
    if name.startswith(("vision_model.", "vision_projection.")):
        return "vision"
    if name.startswith(_LAYERS):
        return "block"
    if name.endswith((".final_layernorm.weight", ".final_layernorm.bias")):
        return "final_norm"
    return "embedding" if name.startswith("embedding.") or "relative_pos_emb" in name else "head"
