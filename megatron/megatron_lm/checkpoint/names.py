"""The names and row orders of Megatron's versions, and how tensor ranks share a parameter.

Our names are Megatron Core's, with every norm beside its layer (`input_layernorm`, `pre_mlp_layernorm`). Fused matrices
are another matter: ours are the parts laid end to end, [q | k | v] and [gate | up]. In Megatron the rows of queries, keys
and values take turns, in an order that changed twice:

    checkpoint_version 0 (or none)   [3, n, d]          three parts, of the heads of one tensor rank
    checkpoint_version 1             [n, d, 3]          element by element
    checkpoint_version 2 and later   [g, n/g + 2, d]    for every key head its query heads, itself, its value head

and a tensor rank holds [its gate | its up].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.megatron_lm.checkpoint.hybrid import MixerPieceSizes

_RENAMED: tuple[tuple[str, str], ...] = (
    (r"^module\.", ""),
    (r"^language_model\.embedding\.", "embedding."),
    (r"^language_model\.(transformer|encoder)\.", "{stack}."),
    (r"^language_model\.decoder\.", "decoder."),
    (r"^language_model\.(output_layer|pooler)\.", r"\1."),
    (r"\.(attention|self_attention)\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(attention|self_attention)\.dense\.", ".self_attention.linear_proj."),
    (r"\.inter_attention\.query\.", ".cross_attention.linear_q."),
    (r"\.inter_attention\.key_value\.", ".cross_attention.linear_kv."),
    (r"\.inter_attention\.dense\.", ".cross_attention.linear_proj."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_inter_attention_(layernorm|norm)\.", ".pre_mlp_layernorm."),
    (r"\.post_attention_(layernorm|norm)\.", ".{after_attention}."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    (r"\.final_norm\.", ".final_layernorm."),
    (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.cross_attention\.linear_q\.layer_norm_(weight|bias)$", r".pre_cross_attn_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    (r"\.(mixer|self_attention)\.in_proj\.layer_norm_(weight|bias)$", r".input_layernorm.\2"),
    (r"(\.layers\.\d+)\.norm\.(weight|bias)$", r"\1.input_layernorm.\2"),
    (r"\.mixer\.conv1d_(weight|bias)\b", r".mixer.conv1d.\1"),
    (r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r".self_attention.\1_layernorm.\2"),
    (r"\.self_attention\.core_attention\.softmax_offset$", ".self_attention.softmax_offset"),
    (r"\.mlp\.experts\.experts\.", ".mlp.experts."),
    (r"^mtp\.layers\.(\d+)\.transformer_layer\.", r"mtp.layers.\1.mtp_model_layer."),
    (r"^lm_head\.(layernorm|norm)\.", "lm_head.layer_norm."),
    (r"^lm_head\.(output_layer\.)?(weight|bias)$", r"output_layer.\2"),
)
# Second names of parameters of a T5, in whose network two modules stand twice: name -> the first one.
_SECOND_NAMES = {
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "output_layer.weight": "lm_head.output_layer.weight",
    "output_layer.bias": "lm_head.output_layer.bias",
}
# Copies of what stands elsewhere, and states of kernels; nothing of the model is lost with them.
_DROPPED = re.compile(
    r"(^|\.)(word_embeddings_for_head\.weight|_extra_state(/.*)?|rotary_pos_emb\.inv_freq|inv_freq)$"
    r"|^(module\.)?position_embeddings\.weight$"
)
_HEADS = re.compile(r"\.self_attention\.linear_qkv\.(weight|bias)$")
_KEYS_AND_VALUES = re.compile(r"\.cross_attention\.linear_kv\.(weight|bias)$")
_GATED = re.compile(r"\.mlp\.((shared_)?experts\.)?linear_fc1\.(weight|bias)$")
_EXPERTS = re.compile(r"\.mlp\.experts\.linear_fc[12]\.(weight|bias)$")  # with a leading axis of experts
_LATENT = re.compile(r"\.self_attention\.linear_(q|kv)_down_proj\.(weight|bias)$")
_ROWS = re.compile(
    r"(^embedding\.word_embeddings\.weight|^output_layer\.(weight|bias)"
    r"|\.linear_fc1\.(weight|bias)|\.cross_attention\.linear_q\.(weight|bias)|\.linear_(q|q_up|kv_up)_proj\.(weight|bias)"
    r"|\.softmax_offset|\.eh_proj\.weight|\.(mixer|self_attention)\.(dt_bias|A_log)|\.mixer\.(D|norm\.weight))$"
)
_COLUMNS = re.compile(r"\.(linear_proj|linear_fc2|out_proj)\.weight$")
_VOCABULARY = re.compile(r"^(embedding\.word_embeddings\.weight|output_layer\.(weight|bias))$")


@dataclass(frozen=True, slots=True)
class MegatronRowLayout:
    """What the orders of rows depend on. heads, groups: of the whole model; version: of the checkpoint.

    latent: rows of the matrices that make the latent vectors of queries, and of keys and values; 0 where there are none.
    output_gate: whether query heads have gates beside them. states: rows of the pieces of layers with a state. zero_centred: whether
    weights of norms are stored minus one, there those of a delta net's heads too.
    """

    heads: int
    groups: int
    gated: bool
    version: float
    latent: tuple[int, int] = (0, 0)
    output_gate: bool = False
    states: MixerPieceSizes | None = None
    zero_centred: bool = False

    @staticmethod
    def from_settings(settings: Mapping[str, Any], version: float) -> MegatronRowLayout:
        """Return the layout from the settings of a model and the checkpoint version."""
        heads = int(settings["num_attention_heads"])
        grouped = settings.get("group_query_attention")
        return MegatronRowLayout(
            heads,
            int(settings.get("num_query_groups") or heads) if grouped else heads,
            bool(settings.get("swiglu") or settings.get("quick_geglu")),
            version,
            (
                int(settings.get("q_lora_rank") or 0),
                int(settings.get("kv_lora_rank") or 0) + int(settings.get("qk_pos_emb_head_dim") or 0),
            ),
            bool(settings.get("attention_output_gate")),
            MixerPieceSizes.from_settings(settings),
            bool(settings.get("apply_layernorm_1p")),
        )

    @property
    def total_heads_per_qkv_part(self) -> tuple[int, ...]:
        """Number of heads of each part of the fused qkv matrix: queries, their gates if any, keys, values."""
        return (self.heads, *((self.heads,) if self.output_gate else ()), self.groups, self.groups)

    def mixer_piece_rows(self, name: str) -> list[int]:
        """Return the number of rows of each piece of a fused parameter (our name) of a stateful mixer; [] for others."""
        return [] if self.states is None else list(self.states.piece_sizes(name).values())

    def norm_weight_offset(self, name: str) -> float:
        """Return what is added to a stored weight to get ours: 1 for norms that only Megatron has minus one, else 0."""
        return 1.0 if self.zero_centred and name.endswith(".self_attention.out_norm.weight") else 0.0


def flatten_nested_state(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors (any shape) of a nested state dict, by their names joined with dots."""
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            tensors |= flatten_nested_state(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            tensors[f"{prefix}{name}"] = value
    return tensors


def map_names_to_ours(names: Sequence[str]) -> dict[str, str]:
    """Return their name -> ours, for the parameters of one model; copies and kernel states are left out."""
    bert = any(re.search(r"(^|\.)(tokentype_embeddings|binary_head|lm_head\.dense)\b", name) for name in names)
    t5 = any("inter_attention" in name or "cross_attention" in name for name in names)
    renamed = {}
    for name in names:
        if _DROPPED.search(name):
            continue
        in_decoder = ".decoder." in name or name.startswith("decoder.")
        words = {
            "stack": "encoder" if bert or t5 else "decoder",
            "after_attention": "pre_cross_attn_layernorm" if t5 and in_decoder else "pre_mlp_layernorm",
        }
        ours = name
        for pattern, replacement in _RENAMED:
            ours = re.sub(pattern, replacement.format(**words) if "{" in replacement else replacement, ours)
        renamed[name] = ours
    return renamed


def is_second_name(name: str, names: Collection[str]) -> bool:
    """Whether a parameter (Megatron's name) stands among these by its first name, too."""
    return _SECOND_NAMES.get(name) in names


def first_name(name: str) -> str:
    """Return the first name of the positions of a T5, whose optimizer has the second; of others their own."""
    return _SECOND_NAMES[name] if name.startswith("position_embeddings.") else name


def has_vocabulary_rows(name: str) -> bool:
    """Whether a parameter (our name) has one row for each token id, followed by padding rows."""
    return bool(_VOCABULARY.match(name))


def merge_tensor_shards(name: str, shards: Sequence[Tensor], layout: MegatronRowLayout) -> Tensor:
    """Merge the shards of the tensor ranks into the whole parameter, in this project's order of rows.

    name: this project's. shards: [rows/tp, ...] or [rows, columns/tp], in Megatron's order.
    """
    if _HEADS.search(name):
        return _concat_fused_parts([_ungroup_qkv_heads(shard, layout, len(shards)) for shard in shards])
    if _KEYS_AND_VALUES.search(name):
        return _concat_fused_parts([_split_kv_rows(shard, layout, len(shards)) for shard in shards])
    if len(shards) == 1:
        return shards[0]
    rows = 1 if _EXPERTS.search(name) else 0  # the axis
    if layout.gated and _GATED.search(name):
        return _concat_fused_parts([shard.chunk(2, rows) for shard in shards], rows)
    if pieces := layout.mixer_piece_rows(name):
        return _concat_fused_parts(_split_fused_pieces(name, shards, pieces))
    if latent := _LATENT.search(name):  # some versions cut them, others hold them whole on every rank
        cut_rows = shards[0].shape[0] < layout.latent[latent[1] == "kv"]
        return torch.cat(list(shards)) if cut_rows else shards[0]
    if _ROWS.search(name):
        return torch.cat(list(shards), rows)
    return torch.cat(list(shards), rows + 1) if _COLUMNS.search(name) else shards[0]


def split_into_tensor_shards(
    name: str, whole: Tensor, ranks: int, layout: MegatronRowLayout, *, whole_latents: bool = False
) -> list[Tensor]:
    """Split a whole parameter (our name and order) into the shards of `ranks` tensor ranks, in Megatron's order
    (checkpoint version 3).

    whole: [rows, ...]. Parameters that are not sharded are returned for each rank, the same tensor.
    whole_latents: every rank holds all of the down projections of latent attention, as with Transformer Engine.
    """
    if _HEADS.search(name):
        return list(_group_qkv_heads(whole, layout).chunk(ranks))
    rows = 1 if _EXPERTS.search(name) else 0  # the axis
    if layout.gated and _GATED.search(name):
        gate, up = (part.chunk(ranks, rows) for part in whole.chunk(2, rows))
        return [torch.cat(pair, rows) for pair in zip(gate, up)]
    if pieces := layout.mixer_piece_rows(name):
        return [torch.cat(parts) for parts in zip(*(piece.chunk(ranks) for piece in whole.split(pieces)))]
    if _ROWS.search(name) or (_LATENT.search(name) and not whole_latents):
        return list(whole.chunk(ranks, rows))
    return list(whole.chunk(ranks, rows + 1)) if _COLUMNS.search(name) else [whole] * ranks


def sharding_problem(name: str, ranks: int, layout: MegatronRowLayout) -> str:
    """Return what of a parameter cannot be divided over so many tensor ranks, or ""."""
    if any(rows % ranks for rows in layout.mixer_piece_rows(name)):
        return f"pieces of {', '.join(map(str, layout.mixer_piece_rows(name)))} rows"
    return f"{layout.groups} key heads" if _HEADS.search(name) and layout.groups % ranks else ""


def _concat_fused_parts(parts: Sequence[Sequence[Tensor]], axis: int = 0) -> Tensor:
    """Concatenate all ranks' first parts, then all second parts, and so on. parts: those of each rank."""
    return torch.cat([torch.cat(list(column), axis) for column in zip(*parts)], axis)


def _split_fused_pieces(name: str, shards: Sequence[Tensor], pieces: Sequence[int]) -> list[Sequence[Tensor]]:
    """Split each rank's rows into shares of the pieces. pieces: rows of each. `CheckpointError` if they do not fit."""
    rows = sum(len(shard) for shard in shards)
    if sum(pieces) != rows:
        raise CheckpointError(f"{name} has {rows} rows, and by the arguments of the run it has {sum(pieces)}")
    return [shard.split([size // len(shards) for size in pieces]) for shard in shards]


def _ungroup_qkv_heads(shard: Tensor, layout: MegatronRowLayout, ranks: int) -> list[Tensor]:
    """Split one rank's qkv rows, in Megatron's order, into [q, k, v] (with gates [q, gate, k, v])."""
    rest = shard.shape[1:]
    heads, groups = layout.heads // ranks, layout.groups // ranks
    size = shard.shape[0] // (sum(layout.total_heads_per_qkv_part) // ranks)
    if layout.version < 1:
        return [part.reshape(-1, *rest) for part in shard.view(3, heads, size, *rest).unbind(0)]
    if layout.version < 2:
        return [part.reshape(-1, *rest) for part in shard.view(heads, size, 3, *rest).unbind(2)]
    turns = shard.view(groups, -1, size, *rest).split(
        [part // layout.groups for part in layout.total_heads_per_qkv_part], dim=1
    )
    return [part.reshape(-1, *rest) for part in turns]


def _split_kv_rows(shard: Tensor, layout: MegatronRowLayout, ranks: int) -> list[Tensor]:
    """Split one rank's key/value rows of cross attention into [k, v]."""
    rest, heads = shard.shape[1:], layout.heads // ranks
    size = shard.shape[0] // (2 * heads)
    if layout.version < 1:
        parts = shard.view(2, heads, size, *rest).unbind(0)
    elif layout.version < 2:
        parts = shard.view(heads, size, 2, *rest).unbind(2)
    else:
        parts = shard.view(heads, 2, size, *rest).unbind(1)
    return [part.reshape(-1, *rest) for part in parts]


def _group_qkv_heads(whole: Tensor, layout: MegatronRowLayout) -> Tensor:
    """Reorder [q | k | v] into rows grouped by key head: its queries, its key, its value."""
    rest = whole.shape[1:]
    size = whole.shape[0] // sum(layout.total_heads_per_qkv_part)
    parts = whole.split([heads * size for heads in layout.total_heads_per_qkv_part])
    turns = [part.view(layout.groups, -1, size, *rest) for part in parts]
    return torch.cat(turns, dim=1).reshape(-1, *rest)
