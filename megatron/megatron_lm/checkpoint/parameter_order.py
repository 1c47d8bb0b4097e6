"""Which parameters a rank of Megatron holds, in the order in which its network defines them.

A checkpoint of the distributed format names global tensors; the ranks that wrote it are found again from the boxes of these
and from the arguments of the run. The order is that of the constructors of Megatron Core, which has been the same since its
first release: a module's own parameters, then those of its children, one after the other. Only the convolution of layers with
a state has two places: it was a child, and is two parameters of the mixer in later releases, which write the same names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.layers import StageSpec, partition_into_stages, uniform_layer_plans
from megatron.core.dist_checkpointing.pickles import attributes_of_inert
from megatron.core.parallel.boxes import Box
from megatron.megatron_lm.checkpoint.buffers import UnreadableStateError
from megatron.megatron_lm.checkpoint.hybrid import mixer_piece_names

# Names of siblings stand in the order in which their parent defines them.
_ORDER = {
    word: place
    for place, word in enumerate(
        (
            "embedding word_embeddings position_embeddings tokentype_embeddings encoder decoder mtp layers enorm hnorm eh_proj transformer_layer "
            "mtp_model_layer conv1d_weight conv1d_bias dt_bias A_log D in_proj conv1d norm out_norm out_proj mixer "
            "input_layernorm self_attention pre_cross_attn_layernorm cross_attention pre_mlp_layernorm mlp core_attention linear_proj "
            "linear_qkv linear_q linear_kv linear_q_proj linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj q_layernorm "
            "k_layernorm kv_layernorm router experts local_experts shared_experts linear_fc1 linear_fc2 weight1 weight2 gate_weight final_layernorm final_norm "
            "lm_head dense layer_norm output_layer pooler binary_head softmax_offset layer_norm_weight layer_norm_bias weight bias"
        ).split()
    )
}
_STACKED = re.compile(r"^(encoder|decoder)\.layers\.(?!\d)")
_LAYER = re.compile(r"^(encoder|decoder|mtp)\.layers\.(\d+)\.")
_EXPERTS = re.compile(r"\.mlp\.experts\.experts\.(linear_fc[12])\.(weight|bias)$")
_NORMS = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
_WORDS = "embedding.word_embeddings.weight"
_CONV = re.compile(r"\.conv1d\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class GlobalParameter:
    """A parameter as a checkpoint has it: its key, its global shape, and the distinct boxes that ranks saved of it."""

    key: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class LocalParameterPart:
    """Which box of the checkpoint's `key` a part of a rank's parameter holds. inside: the part, in the parameter's own
    coordinates. transposed: with the last two axes exchanged.
    """

    key: str
    box: Box
    inside: Box
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter of one rank. name: in its stage's modules. shared: the stage holds a copy of a tied embedding."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[LocalParameterPart, ...]
    shared: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to experts, which differ between expert ranks."""
        return ".experts." in self.name


@dataclass(frozen=True, slots=True)
class SavedRunLayout:
    """Sizes of the layout that wrote a checkpoint, and how it builds a network."""

    tensor: int
    pipeline: int
    chunks: int
    expert: int
    expert_tensor: int
    fused_norms: bool
    grouped: str  # experts: "" one after the other, "native" as one matrix, "fused" as Transformer Engine has them
    stages: tuple[StageSpec, ...]

    @staticmethod
    def from_arguments(arguments: Mapping[str, Any], layers: int) -> SavedRunLayout:
        """Return the layout from the arguments of a run. `UnreadableStateError` if its pipeline stages cannot be known."""
        fused = arguments.get("transformer_impl") == "transformer_engine"
        native = not fused or bool(arguments.get("moe_use_legacy_grouped_gemm"))
        grouped = ("native" if native else "fused") if arguments.get("moe_grouped_gemm") else ""
        tensor = int(arguments.get("tensor_model_parallel_size") or 1)
        return SavedRunLayout(
            tensor,
            int(arguments.get("pipeline_model_parallel_size") or 1),
            int(arguments.get("virtual_pipeline_model_parallel_size") or 1),
            int(arguments.get("expert_model_parallel_size") or 1),
            int(arguments.get("expert_tensor_parallel_size") or tensor),
            fused,
            grouped,
            _stages_of_arguments(arguments, layers),
        )

    def stage_of_layer(self, layer: int) -> tuple[int, int]:
        """Return (pipeline rank, chunk) of a decoder layer."""
        return next((one.rank, one.chunk) for one in self.stages if layer in {each.index for each in one.layers})

    @property
    def stage_ahead(self) -> tuple[int, int]:
        """(pipeline rank, chunk) of the final norm and of the layers of multi-token prediction."""
        return next((one.rank, one.chunk) for one in self.stages if one.has_mtp)


def _stages_of_arguments(arguments: Mapping[str, Any], layers: int) -> tuple[StageSpec, ...]:
    """Return the pipeline stages of a run. `UnreadableStateError` for a division of layers that is not known here."""
    layout = arguments.get("pipeline_model_parallel_layout")
    layout = attributes_of_inert(layout).get("input_data", layout)
    pattern = str(arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern") or "")
    if "|" in pattern:
        layout = "|".join("t" * len(part) for part in pattern.partition("/")[0].split("|")).join("EL")
    pipeline = int(arguments.get("pipeline_model_parallel_size") or 1)
    if pipeline > 1 and arguments.get("standalone_embedding_stage"):
        raise UnreadableStateError("its run divided the layers by --standalone-embedding-stage")
    if layout is not None and not isinstance(layout, str):
        raise UnreadableStateError("its run divided the layers by a --pipeline-model-parallel-layout that is no text")
    try:
        return partition_into_stages(
            uniform_layer_plans(layers),
            pp=pipeline,
            vpp=int(arguments.get("virtual_pipeline_model_parallel_size") or 1),
            ends=(
                arguments.get("decoder_first_pipeline_num_layers"),
                arguments.get("decoder_last_pipeline_num_layers"),
            ),
            account_for_embedding=bool(arguments.get("account_for_embedding_in_pipeline_split")),
            account_for_loss=bool(arguments.get("account_for_loss_in_pipeline_split")),
            layout=layout,
        )
    except ConfigError as error:
        raise UnreadableStateError(f"the pipeline stages of its run cannot be known: {error}") from None


def parameters_of_rank(
    model: Sequence[GlobalParameter],
    ranks: SavedRunLayout,
    *,
    tensor: int,
    pipeline: int,
    expert: int,
    expert_tensor: int,
    tied: bool,
    own_conv: bool = False,
) -> list[list[LocalParameter]]:
    """Return the parameters of one rank, for each of its chunks, in the order of definition.

    tensor, pipeline, expert, expert_tensor: its ranks. tied: word embedding and output layer are one matrix.
    own_conv: convolutions of stateful mixers are parameters of the mixer itself.
    """
    chunks: list[list[LocalParameter]] = [[] for _ in range(ranks.chunks)]
    model, fused = _group_mixer_pieces(model)
    for whole, pieces in fused.items():
        stage = _stage_of_key(whole, _layer_number(whole), ranks)
        if stage[0] == pipeline:
            name = _CONV.sub(r".conv1d_\1", whole) if own_conv else whole
            chunks[stage[1]].append(
                _concat_parameter_pieces(name, [_describe_local_parameter(one, one, ranks, tensor) for one in pieces])
            )
    for one in model:
        for layer, part in _per_layer_parameters(one):
            stage = _stage_of_key(part.key, layer, ranks)
            if stage[0] != pipeline:
                continue
            if match := _EXPERTS.search(part.key):
                chunks[stage[1]] += _local_expert_parameters(part, one, ranks, expert_tensor, expert, matrix=match)
            else:
                chunks[stage[1]].append(_describe_local_parameter(part, one, ranks, tensor))
    words = next(one for one in model if one.key == _WORDS)
    ahead = ranks.stage_ahead if any(one.key.startswith("mtp.") for one in model) else (0, 0)
    copy = replace(_describe_local_parameter(words, words, ranks, tensor), shared=True)
    _share_embeddings(chunks, copy, ranks, pipeline, tied=tied, ahead=ahead)
    return [sorted(chunk, key=lambda one: _parameter_order_key(one.name)) for chunk in chunks]


def _group_mixer_pieces(
    model: Sequence[GlobalParameter],
) -> tuple[list[GlobalParameter], dict[str, list[GlobalParameter]]]:
    """Return the unfused parameters, and name -> pieces, in order, of each fused one of a stateful mixer."""
    by_key, fused = {one.key: one for one in model}, dict[str, list[GlobalParameter]]()
    for key in by_key:
        whole, _, piece = key.rpartition(".")
        if piece in mixer_piece_names(whole) and whole not in fused:
            keys = [f"{whole}.{each}" for each in mixer_piece_names(whole)]
            if missing := [each for each in keys if each not in by_key]:
                raise UnreadableStateError(f"the checkpoint has {key}, and lacks {', '.join(missing)}")
            fused[whole] = [by_key[each] for each in keys]
    taken = {one.key for pieces in fused.values() for one in pieces}
    return [one for one in model if one.key not in taken], fused


def _concat_parameter_pieces(name: str, pieces: Sequence[LocalParameter]) -> LocalParameter:
    """Describe the parameter that consists of these pieces, stacked along dimension 0."""
    parts, rows = list[LocalParameterPart](), 0
    for one in pieces:
        for part in one.parts:
            first, *others = part.inside.offset
            parts.append(replace(part, inside=Box((rows + first, *others), part.inside.shape)))
        rows += one.shape[0]
    return LocalParameter(name, (rows, *pieces[0].shape[1:]), tuple(parts))


def _share_embeddings(
    chunks: list[list[LocalParameter]],
    words: LocalParameter,
    ranks: SavedRunLayout,
    pipeline: int,
    *,
    tied: bool,
    ahead: tuple[int, int],
) -> None:
    """Add the copies of the word embedding that a pipeline rank holds, and mark its first as shared.

    words: the embedding. tied: the output layer of the last stage is a copy. ahead: the stage of multi-token prediction,
    which embeds tokens too; (0, 0) without it.
    """
    if ranks.pipeline == 1 or not (tied or ahead != (0, 0)):
        return
    chunks[0] = [words if one.name == _WORDS else one for one in chunks[0]]
    if ahead != (0, 0) and ahead[0] == pipeline:
        chunks[ahead[1]].append(words)
    if tied and pipeline == ranks.pipeline - 1:
        chunks[-1].append(replace(words, name="output_layer.weight"))


def _parameter_order_key(name: str) -> tuple[int, ...]:
    """Return the key that sorts parameter names in definition order. `UnreadableStateError` for unknown words."""
    places = []
    for word in name.split("."):
        if word in _ORDER:
            places.append(_ORDER[word])
        elif counted := re.fullmatch(r"(weight|bias)?(\d+)", word):
            places.append(int(counted[2]) + (len(_ORDER) * 1000 if counted[1] == "bias" else 0))
        else:
            raise UnreadableStateError(f"the place of {name} in the order of parameters is not known here")
    return tuple(places)


def _layer_number(key: str) -> int:
    match = _LAYER.match(key)
    return int(match[2]) if match else 0


def _per_layer_parameters(one: GlobalParameter) -> Iterator[tuple[int, GlobalParameter]]:
    """Yield (layer, its parameter) of stacked layers; of another parameter itself. Boxes keep all axes."""
    if not _STACKED.match(one.key):
        yield _layer_number(one.key), one
        return
    stack, _, rest = one.key.partition(".layers.")
    for layer in range(one.shape[0]):
        boxes = tuple(box for box in one.boxes if box.offset[0] == layer and box.shape[0] == 1)
        yield layer, GlobalParameter(f"{stack}.layers.{layer}.{rest}", one.shape, boxes)


def _stage_of_key(key: str, layer: int, ranks: SavedRunLayout) -> tuple[int, int]:
    """Return (pipeline rank, chunk) of a parameter by its key and layer."""
    if key.startswith("embedding."):
        return 0, 0
    if key.startswith(("decoder.layers.", "encoder.layers.")):
        return ranks.stage_of_layer(layer)
    ahead = key.startswith(("mtp.", "decoder.final_"))
    return ranks.stage_ahead if ahead else (ranks.pipeline - 1, ranks.chunks - 1)


def _boxes_on_rank(boxes: Sequence[Box], lead: int, rank: int, size: int, one: GlobalParameter) -> list[Box]:
    """Return the boxes of a parameter that one of `size` ranks holds: one, or two of a gated matrix. lead: number of
    leading axes (layer, expert), which do not order boxes. `UnreadableStateError` if they do not fit the ranks.
    """
    places = sorted(boxes, key=lambda box: box.offset[lead:])
    if len(places) == 1:
        return places
    if len(places) == size:
        return [places[rank]]
    if len(places) == 2 * size and "linear_fc1" in one.key:
        return [places[rank], places[size + rank]]
    raise UnreadableStateError(f"{one.key} is saved in {len(places)} boxes, which are not those of {size} tensor ranks")


def _describe_local_parameter(
    part: GlobalParameter, one: GlobalParameter, ranks: SavedRunLayout, rank: int
) -> LocalParameter:
    """Describe what a tensor rank holds of a parameter, by its name in the modules. one: as the checkpoint has it."""
    lead = 1 if _STACKED.match(one.key) else 0
    boxes = _boxes_on_rank(part.boxes, lead, rank, ranks.tensor, one)
    name = part.key
    for fused, alone in () if ranks.fused_norms else _NORMS:
        name = name.replace(fused, alone)
    return _local_parameter_of_boxes(name, one.key, boxes, lead)


def _local_parameter_of_boxes(name: str, key: str, boxes: Sequence[Box], lead: int) -> LocalParameter:
    """Describe a rank's parameter `name` that consists of these boxes of the checkpoint's `key`, stacked along
    dimension 0. lead: number of leading axes (layer, expert) dropped.
    """
    shape = boxes[0].shape[lead:]
    rows = [0] if len(boxes) == 1 else [number * shape[0] for number in range(len(boxes))]
    whole = shape if len(boxes) == 1 else (len(boxes) * shape[0], *shape[1:])
    parts = tuple(
        LocalParameterPart(key, box, Box((row, *(0,) * (len(shape) - 1)) if shape else (), shape))
        for row, box in zip(rows, boxes)
    )
    return LocalParameter(name, whole, parts)


def _local_expert_parameters(
    part: GlobalParameter, one: GlobalParameter, ranks: SavedRunLayout, rank: int, expert: int, *, matrix: re.Match[str]
) -> list[LocalParameter]:
    """Describe the expert parameters of a rank: each by itself, or all as one grouped matrix. matrix: match of the key."""
    lead, size = 1 if _STACKED.match(one.key) else 0, ranks.expert_tensor
    count = one.shape[lead] // ranks.expert
    mine = range(expert * count, (expert + 1) * count)
    layer, (linear, kind) = part.key[: part.key.index(".mlp.experts.")], matrix.groups()
    if ranks.grouped == "native":
        return [_grouped_expert_parameter(f"{layer}.mlp.experts.weight{linear[-1]}", one, part, lead, mine, rank, size)]
    experts = []
    for number, index in enumerate(mine):
        boxes = [box for box in part.boxes if box.offset[lead] == index and box.shape[lead] == 1]
        name = f"{linear}.{kind}{number}" if ranks.grouped else f"local_experts.{number}.{linear}.{kind}"
        if not boxes:
            raise UnreadableStateError(f"{one.key} is not saved expert by expert")
        experts.append(
            _local_parameter_of_boxes(
                f"{layer}.mlp.experts.{name}", one.key, _boxes_on_rank(boxes, lead + 1, rank, size, one), lead + 1
            )
        )
    return experts


def _grouped_expert_parameter(
    name: str, one: GlobalParameter, part: GlobalParameter, lead: int, mine: range, rank: int, size: int
) -> LocalParameter:
    """Describe all experts of a rank as one transposed matrix [experts, h, f], gate beside up."""
    boxes = [box for box in part.boxes if box.offset[lead] == mine.start and box.shape[lead] == len(mine)]
    if not boxes:
        raise UnreadableStateError(f"{one.key} is not saved by expert ranks")
    boxes = _boxes_on_rank(boxes, lead + 1, rank, size, one)
    rows, columns = boxes[0].shape[lead + 1 :]
    parts = tuple(
        LocalParameterPart(one.key, box, Box((0, 0, number * rows), (len(mine), columns, rows)), True)
        for number, box in enumerate(boxes)
    )
    return LocalParameter(name, (len(mine), columns, len(boxes) * rows), parts)
