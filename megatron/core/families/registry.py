"""The published architectures that are known here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.flags import from_values, spelling, to_values
from megatron.core.config.model import ModelConfig
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.families.bert import BERT, MEGATRON_BERT
from megatron.core.families.gpt2 import GPT2
from megatron.core.families.llama import LLAMA, MISTRAL
from megatron.core.families.qwen import QWEN2, QWEN3
from megatron.core.families.rules import Family
from megatron.core.families.settings import classes_of
from megatron.core.families.t5 import T5

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, BERT, MEGATRON_BERT, T5)}

# Settings of ours that no published config holds: they do not change the function that the weights are.
_FREE = frozenset(("attention_backend", "hidden_dropout", "attention_dropout", "init_method_std", "embedding_init_method_std",
                   "init_method_xavier_uniform", "make_vocab_size_divisible_by", "padded_vocab_size", "true_vocab_size",
                   "fp32_residual_connection", "group_query_attention", "bert_binary_head"))
_ROTARY = frozenset(("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
                     "use_rope_scaling"))
_SCALING = frozenset(("rope_scaling_factor", "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor",
                      "rope_scaling_original_length"))
_RELATIVE = frozenset(("relative_attention_num_buckets", "relative_attention_max_distance"))


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json belongs to. Raises `CheckpointError` that names those known here."""
    named = classes_of(config)
    for family in FAMILIES.values():
        if family.variant(named) or (not named and config.get("model_type") == family.model_type):
            return family
    known = ", ".join(variant.architecture for family in FAMILIES.values() for variant in family.variants or (family,))
    what = f"architectures: {', '.join(named)}" if named else f"model_type: {config.get('model_type')}"
    raise CheckpointError(f"{where} holds {what}, which is not known here; known are {known}")


def model_of(settings: Mapping[str, Any]) -> ModelConfig:
    """The resolved model of settings by field name, such as a `Source` has."""
    return from_values(ModelConfig, settings).resolve()


def fitting_family(model: ModelConfig, asked: str | None = None) -> Family:
    """The family whose config.json can say all that this network is; `asked`: this one, or an error.

    Raises `CheckpointError` that says, family by family, which settings it has no word for.
    """
    if asked is not None and asked not in FAMILIES:
        raise CheckpointError(f"the family {asked} is not known here; known are {', '.join(FAMILIES)}")
    tried = [FAMILIES[asked]] if asked else list(FAMILIES.values())
    problems = []
    for family in tried:
        unsaid = differences(model, family)
        if not unsaid:
            return family
        problems.append(f"{family.name}: {'; '.join(unsaid)}")
    raise CheckpointError("no published architecture known here computes what this network does" if asked is None else
                          f"{asked} does not compute what this network does", problems)


def differences(model: ModelConfig, family: Family) -> list[str]:
    """Which settings of a network get lost in the family's config.json, a line each; nothing when it can be published so."""
    found, problems = family.config_in(family.config_out(model, {}))
    mine, back = to_values(model), to_values(model_of(found))
    silent = _FREE | (_SCALING if not model.rope.use_rope_scaling else frozenset())
    if model.rope.position_embedding_type != "rope":
        silent |= _ROTARY | _SCALING
    silent |= {"max_position_embeddings"} if model.rope.position_embedding_type == "relative" else _RELATIVE
    unsaid = [f"{spelling(name)} is {mine[name]}, there {back[name]}" for name in mine
              if name not in silent and mine[name] != back[name]]
    return unsaid or problems
