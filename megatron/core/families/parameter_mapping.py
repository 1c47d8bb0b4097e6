"""Rows: how a parameter of ours is made of the parameters of a published file, and back.

    Row("decoder.layers.0.self_attention.linear_qkv.weight",
        ("model.layers.0.self_attn.q_proj.weight", "...k_proj.weight", "...v_proj.weight"), concat(q, kv, kv))

A `ReversibleTensorConversion` is a pair of functions on whole tensors, so nothing here depends on ranks. Both directions stand in one row and
cannot disagree; a test runs rows on tensors of indices and names every element that is lost, doubled or moved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import config_json_keys, preserved_keys
from megatron.core.models.parameter_names import OUTPUT, SCORE

Shape = tuple[int, ...]
BIASED = ("weight", "bias")  # the parameters of a module with a bias


@dataclass(frozen=True, slots=True)
class ReversibleTensorConversion:
    """ours: their tensors, in the row's order, to our tensor; theirs: the way back. Results may be views.

    each: how many of theirs an index of our first dimension is made of, where some can be had without the others; else 0.
    joined: whether ours is theirs laid end to end in the same order, so that files may cut it in other places.
    """

    ours: Callable[[Sequence[Tensor]], Tensor]
    theirs: Callable[[Tensor], Sequence[Tensor]]
    each: int = 0
    joined: bool = False


@dataclass(frozen=True, slots=True)
class ParameterMapping:
    """A parameter of ours and the parameters of theirs that hold it."""

    ours: str
    theirs: tuple[str, ...]
    op: ReversibleTensorConversion


@dataclass(frozen=True, slots=True)
class HFModelClass:
    """A class of transformers' that holds a family's network with some of its heads.

    heads: beginnings of our names that are there beside the network itself; bare: its names lack the family's base.
    """

    architecture: str
    heads: tuple[str, ...] = ()
    bare: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A published architecture.

    architecture, model_type: its names in config.json. read_config: their settings to ours, by field name. write_config: the way
    back; its second argument is an earlier config.json of the same model. rows: all parameters of a network. silent: keys that
    say nothing of the network; they are passed over, and kept from an earlier config.json. pinned: keys with the one value that
    is computed here, which is also what holds where they are left out. usual: what the class has for keys that are left out, where that
    differs from Llama's. base: what names begin
    with, and lack in files of the network without its head. skipped: names in files that hold nothing of the network, as a rule
    tables that follow from the settings. copies: names that a file may hold beside others of theirs, whose copies they are.
    variants: the other classes with this network, those with most heads first; heads that none
    requires may be left out. seen: completes the settings by the names that the files have. respelled: (pattern, replacement)
    of names as they once were, where the new name is not there. unused: whether a tensor belongs to a part that the network does not have. constants: tensors that
    are written beside the rows, since their class wants them: name -> shape and value of all elements. fallbacks: keys of a
    config.json that are written where nothing else says them, since the class would take another value. within: the key of the network's own config, in classes that hold others beside it.
    holder: a class that holds this network beside a vision tower, of which the language model alone is read; beside: names of the tower's tensors.
    """

    name: str
    architecture: str
    model_type: str
    read_config: Callable[[ForeignMapping], dict[str, Any]]
    write_config: Callable[[ModelConfig, Mapping[str, Any]], dict[str, Any]]
    rows: Callable[[ModelConfig], tuple[ParameterMapping, ...]]
    silent: tuple[str, ...] = ()
    pinned: tuple[tuple[str, Any], ...] = ()
    usual: tuple[tuple[str, Any], ...] = ()
    base: str = "model."
    skipped: re.Pattern[str] = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
    copies: tuple[tuple[str, str], ...] = (("lm_head.weight", "model.embed_tokens.weight"),)
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    beyond: re.Pattern[str] | None = None
    variants: tuple[HFModelClass, ...] = ()
    seen: Callable[[dict[str, Any], Collection[str]], dict[str, Any]] = lambda settings, names: settings
    respelled: tuple[tuple[str, str], ...] = ()
    unused: Callable[[ModelConfig, str], bool] = lambda model, name: False
    fallbacks: tuple[tuple[str, Any], ...] = ()
    constants: Callable[[ModelConfig], dict[str, tuple[Shape, float]]] = lambda model: {}
    within: str = ""
    holder: str = ""
    beside: re.Pattern[str] = re.compile("(?!)")

    def settings_from_config(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return our settings, by field name, for a config.json, and what cannot be expressed, a line each."""
        keys = config_json_keys(config.get(self.within, config))
        keys.set_key_defaults(**dict(self.usual))
        for name, value in self.pinned:
            keys.one_of(name, (value,), value)
        settings = self.read_config(keys)
        experts, used = settings.get("num_experts"), settings.get("moe_router_topk")
        if experts and used and used > experts and not keys.problems:
            keys.problems.append(
                f"num_experts_per_tok: {used} of {experts} experts; a token can use all of them at most"
            )
        return settings, keys.all_problems(self.silent)

    def to_hf_config(self, model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of a network. like: an earlier one; of it what says nothing of the network is kept."""
        like = like.get(self.within, like)
        return {**preserved_keys(like, *self.silent), **dict(self.pinned), **self.write_config(model, like)}

    @property
    def scoring_class(self) -> str | None:
        """Class of transformers for reward models, ...ForSequenceClassification; None if the family is no decoder."""
        stem = re.fullmatch(r"(\w+?)(ForCausalLM|LMHeadModel)", self.architecture)
        return f"{stem[1]}ForSequenceClassification" if stem else None

    def network_mappings(self, model: ModelConfig) -> tuple[ParameterMapping, ...]:
        """Return the mappings of all parameters; those of a reward model have its head instead of the output layer."""
        rows = self.rows(model)
        if not model.reward_head:
            return rows
        return (*(row for row in rows if row.ours != OUTPUT), ParameterMapping(SCORE, (SCORE,), same))

    def class_for_architectures(self, named: Collection[str]) -> HFModelClass | None:
        """Return this family's class that is among the named ones, or None."""
        known = self.variants or (
            HFModelClass(self.architecture),
            *([HFModelClass(self.scoring_class)] if self.scoring_class else []),
        )
        return next((variant for variant in known if variant.architecture in named), None)

    def class_for_parameters(self, names: Collection[str]) -> HFModelClass:
        """Return the class for a network with these parameters (our names): the first whose heads are all there."""
        if self.scoring_class and SCORE in names:
            return HFModelClass(self.scoring_class)
        return next(
            (
                variant
                for variant in self.variants
                if all(any(name.startswith(head) for name in names) for head in variant.heads)
            ),
            HFModelClass(self.architecture),
        )

    def missing_heads(self, names: Collection[str], required: HFModelClass | None = None) -> tuple[str, ...]:
        """Return prefixes (ours) of heads that have no parameter here, but for heads of the class `required`."""
        heads = {head for variant in self.variants for head in variant.heads} - set(required.heads if required else ())
        return tuple(head for head in sorted(heads) if not any(name.startswith(head) for name in names))


same = ReversibleTensorConversion(lambda parts: parts[0], lambda whole: (whole,))
transpose = ReversibleTensorConversion(lambda parts: parts[0].t(), lambda whole: (whole.t(),))


def concat_conversion(*sizes: int) -> ReversibleTensorConversion:
    """Return the conversion in which our tensor is theirs concatenated along dimension 0. sizes: of theirs."""
    return ReversibleTensorConversion(lambda parts: torch.cat(list(parts)), lambda whole: whole.split(list(sizes)))


def per_expert_conversion(op: ReversibleTensorConversion, each: int) -> ReversibleTensorConversion:
    """Return the conversion of experts to one tensor with a leading axis, `each` tensors of theirs by `op`."""

    def to_our_tensor(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([op.ours(parts[start : start + each]) for start in range(0, len(parts), each)])

    return ReversibleTensorConversion(
        to_our_tensor, lambda whole: tuple(part for expert in whole.unbind(0) for part in op.theirs(expert)), each
    )


def module_mappings(
    ours: str, *theirs: str, op: ReversibleTensorConversion = same, kinds: Sequence[str] = ("weight",)
) -> list[ParameterMapping]:
    """Return the mappings of one of our modules. theirs: the modules that hold it; kinds: names of its parameters."""
    return [ParameterMapping(f"{ours}.{kind}", tuple(f"{part}.{kind}" for part in theirs), op) for kind in kinds]


def rename_only_weight_mappings(ours: str, theirs: str, names: Mapping[str, str]) -> list[ParameterMapping]:
    """Return mappings of weights that only differ by name. ours, theirs: prefixes; names: our module name -> theirs."""
    return [row for mine, there in names.items() for row in module_mappings(f"{ours}{mine}", f"{theirs}{there}")]


def decoder_mappings_with_ends(
    model: ModelConfig,
    layers: Sequence[ParameterMapping],
    embedding: str = "embed_tokens",
    final_norm: str = "norm",
    base: str = "model.",
) -> tuple[ParameterMapping, ...]:
    """Return the mappings of a whole decoder, in the order of transformers: embedding, `layers`, final norm, and output
    layer if it is not tied. embedding, final_norm: their names of these modules; base: prefix of their names.
    """
    return (
        *module_mappings("embedding.word_embeddings", f"{base}{embedding}"),
        *layers,
        *module_mappings("decoder.final_layernorm", f"{base}{final_norm}"),
        *(() if model.ties_embeddings else module_mappings("output_layer", "lm_head")),
    )


def hf_shapes(rows: Sequence[ParameterMapping], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of their parameters, in the order of the rows. shapes: of ours. Nothing is computed."""
    result_shapes: dict[str, Shape] = {}
    for row in rows:
        parts = row.op.theirs(torch.empty(shapes[row.ours], device="meta"))
        result_shapes |= {name: tuple(part.shape) for name, part in zip(row.theirs, parts, strict=True)}
    return result_shapes
