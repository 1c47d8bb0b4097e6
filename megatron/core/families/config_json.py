"""Reading and writing config.json: every key is understood, known to say nothing of the network, or refused.

A key of a published config that nobody here knows may change the network, so it is never passed over: unless it is off
(null or false), the folder is refused with the key and its value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron.core.config.flags.declare import config_to_flat_dict
from megatron.core.config.foreign.mapping import ForeignMapping, short_value
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.model import ModelConfig, PositionConfig

# Why keys change nothing of what the network computes, and which they are.
_HARMLESS = (
    (
        "names and versions of programs and files",
        """_commit_hash _name_or_path architectures auto_map is_llama_config model_type prefix tokenizer_class
        transformers.js_config transformers_version unsloth_fixed unsloth_version""",
    ),
    (
        "how generation ends and samples, which generation_config.json says",
        """bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty do_sample early_stopping
        encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty forced_bos_token_id
        forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
        num_return_sequences pad_token_id remove_invalid_values repetition_penalty sep_token_id suppress_tokens
        temperature top_k top_p typical_p""",
    ),
    (
        "how transformers runs the network and what it returns",
        """attn_implementation chunk_size_feed_forward dtype gradient_checkpointing keys_to_ignore_at_inference
        output_attentions output_hidden_states output_past output_scores pretraining_tp reorder_and_upcast_attn
        return_dict return_dict_in_generate torch_dtype torchscript use_cache""",
    ),
    (
        "heads and tasks beside language modeling",
        """finetuning_task id2label is_decoder label2id problem_type summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj task_specific_params""",
    ),
    ("a second name of the sequence length", "max_sequence_length n_ctx"),
)
IGNORED: Mapping[str, str] = {name: reason for reason, names in _HARMLESS for name in names.split()}

# Keys that say how experts are balanced while they are trained.
BALANCE = ("aux_loss_alpha", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "seq_aux")
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # one formula by three names


# Key of config.json -> our setting that it holds as it is, and its value where it is left out (None: it must be there).
PlainKeys = Mapping[str, tuple[str, int | float | bool | None]]


def config_json_keys(config: Mapping[str, Any]) -> ForeignMapping:
    """Return the keys of a config.json, to be taken one by one."""
    return ForeignMapping(
        config,
        harmless=IGNORED,
        defaults={"is_causal": True},  # false would show every token those behind it
        advice="is unknown here and may change the network; if it does not, take it out of config.json",
    )


def read_plain_keys(keys: ForeignMapping, table: PlainKeys) -> dict[str, Any]:
    """Read the settings of a table: flags, numbers from 0 on and positive integers, by the type of their default."""
    takes: dict[type, Callable[[str, Any], Any]] = {bool: keys.boolean, float: keys.non_negative_float}
    return {setting: takes.get(type(usual), keys.positive_int)(key, usual) for key, (setting, usual) in table.items()}


def write_plain_keys(model: ModelConfig, table: PlainKeys) -> dict[str, Any]:
    """Return the keys of a table for a config.json."""
    values = config_to_flat_dict(model)
    return {key: values[setting] for key, (setting, _) in table.items()}


_RENAMED_CLASSES = {"LLaMAForCausalLM": "LlamaForCausalLM"}  # the first conversions of Llama name the old one


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """Return the class names of transformers in `architectures` of a config.json, by their new names; [] if there are none."""
    named = config.get("architectures") or []
    names = [named] if isinstance(named, str) else named if isinstance(named, Iterable) else []
    return [_RENAMED_CLASSES.get(str(name), str(name)) for name in names]


def read_rope_keys(keys: ForeignMapping, *, base: float = 10000.0, latent: bool = False) -> dict[str, Any]:
    """Read the settings of rotary positions from `rope_theta` and `rope_scaling`, or `rope_parameters`, which holds
    both. base: default of rope_theta. latent: whether the network has latent attention.
    """
    scaling, both, given_base = (
        keys.pop_or_none("rope_scaling"),
        keys.pop_or_none("rope_parameters"),
        keys.pop_or_none("rope_theta"),
    )
    given = {
        **_dict_else_note_problem(keys, "rope_scaling", scaling),
        **_dict_else_note_problem(keys, "rope_parameters", both),
    }
    if scaling and both and scaling != both:
        keys.problems.append("rope_scaling and rope_parameters say two things; keep the one that holds")
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    inner = ForeignMapping({"rope_theta": given_base, **given})
    settings: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": inner.non_negative_float("rope_theta", base, positive=True),
        **({"rope_type": "rope"} if latent else {}),
    }
    inner.one_of("partial_rotary_factor", (1.0,), 1.0)
    if kind == "linear":
        settings["rotary_seq_len_interpolation_factor"] = inner.non_negative_float("factor", positive=True)
    elif kind == "llama3":
        settings |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": inner.non_negative_float("factor", positive=True),
            "rope_scaling_low_freq_factor": inner.non_negative_float("low_freq_factor"),
            "rope_scaling_high_freq_factor": inner.non_negative_float("high_freq_factor"),
            "rope_scaling_original_length": inner.positive_int("original_max_position_embeddings"),
        }
        if settings["rope_scaling_high_freq_factor"] <= settings["rope_scaling_low_freq_factor"]:
            inner.problems.append("high_freq_factor must be larger than low_freq_factor")
    elif kind == "yarn":
        settings |= {
            "position_embedding_type": "rope" if latent else "yarn",
            "rope_type": "yarn",
            **_read_yarn_keys(inner),
        }
        if settings["rotary_base"] == 1.0:
            inner.problems.append("rope_theta: 1 gives every pair of channels one wavelength, which yarn cannot scale")
    elif kind != "default":
        keys.problems.append(f"rope_type: {short_value(kind)} is not built here; default, linear, llama3 and yarn are")
        return settings
    keys.problems += [f"rotary positions: {problem}" for problem in inner.all_problems()]
    return settings


def _read_yarn_keys(keys: ForeignMapping) -> dict[str, Any]:
    factor, mscale, every = (
        keys.non_negative_float("factor", positive=True),
        keys.non_negative_float("mscale", 0.0),
        keys.non_negative_float("mscale_all_dim", 0.0),
    )
    if bool(mscale) != bool(every) and (mscale, every) != (1.0, 0.0):
        keys.problems.append(f"mscale: {mscale:g} with mscale_all_dim: {every:g}; either both are given or neither")
    grown = _yarn_attention_factor(factor, mscale or 1.0) / _yarn_attention_factor(factor, every)
    stated = keys.non_negative_float("attention_factor", grown)
    if not math.isclose(stated, grown, rel_tol=1e-6):
        keys.problems.append(
            f"attention_factor: {stated:g} has no counterpart here; {grown:g}, which follows from the factor, has"
        )
    return {
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": keys.positive_int("original_max_position_embeddings"),
        "yarn_beta_fast": keys.non_negative_float("beta_fast", 32.0, positive=True),
        "yarn_beta_slow": keys.non_negative_float("beta_slow", 1.0, positive=True),
        "yarn_correction_range_round_to_int": keys.boolean("truncate", True),
        "mscale": mscale or 1.0,
        "mscale_all_dim": every,
    }


def _yarn_attention_factor(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_config_keys(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's keys for RoPE: `rope_parameters` if `like` has it, else `rope_theta`, `rope_scaling`."""
    rope, scaling = model.rope, dict[str, Any]()
    earlier = like.get("rope_parameters") or like.get("rope_scaling") or {}
    if rope.rope_type == "yarn":
        scaling = _yarn_config_keys(rope, earlier)
    elif rope.use_rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": rope.rope_scaling_factor,
            "low_freq_factor": rope.rope_scaling_low_freq_factor,
            "high_freq_factor": rope.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": rope.rope_scaling_original_length,
        }
    elif rope.rotary_seq_len_interpolation_factor:
        scaling = {"rope_type": "linear", "factor": rope.rotary_seq_len_interpolation_factor}
    if like.get("rope_parameters"):
        return {"rope_parameters": {"rope_theta": rope.rotary_base, **(scaling or {"rope_type": "default"})}}
    if "type" in earlier and "rope_type" not in earlier and scaling:  # its older name
        scaling["type"] = scaling.pop("rope_type")
    return {"rope_theta": rope.rotary_base, "rope_scaling": scaling or None}


def _yarn_config_keys(rope: PositionConfig, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return YaRN's keys; those with default values only if the earlier config.json has them."""
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "mscale": 1.0, "mscale_all_dim": 0.0}
    values = {
        "beta_fast": rope.yarn_beta_fast,
        "beta_slow": rope.yarn_beta_slow,
        "truncate": rope.yarn_correction_range_round_to_int,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    named = {*earlier, "mscale"} if rope.mscale_all_dim else {*earlier}
    return {
        "rope_type": "yarn",
        "factor": rope.rotary_scaling_factor,
        "original_max_position_embeddings": rope.yarn_original_max_position_embeddings,
        **{name: value for name, value in values.items() if value != usual[name] or name in named},
    }


def format_layer_freq(layers: Sequence[bool]) -> str:
    """Return a layer pattern as our flags take it, such as `[0]*3+[1]*58`; number by number if it alternates often."""
    runs = [(int(value), len(list(run))) for value, run in itertools.groupby(layers)]
    if len(runs) > 4:
        return f"[{','.join(str(int(value)) for value in layers)}]"
    return "+".join(f"[{value}]*{count}" for value, count in runs)


def sliding_window_to_settings(size: int, layers: Sequence[bool]) -> dict[str, Any]:
    """Return the settings of layers with a window of `size` tokens, the query's own included; {} if none has one."""
    if not any(layers):
        return {}
    return {"window_size": f"{size - 1},0", "window_attn_skip_freq": None if all(layers) else format_layer_freq(layers)}


def window_and_layers_of_model(model: ModelConfig) -> tuple[int | None, list[bool]]:
    """Return the sliding window in tokens, the query's own included, or None; and whether each layer has one."""
    layers = [plan.window is not None for plan in network_layer_plans(model)]
    return (model.parsed_window_size[0] + 1 if any(layers) and model.parsed_window_size is not None else None), layers


def settings_from_head_counts(heads: int, groups: int) -> dict[str, Any]:
    """Return our settings for these numbers of query heads and key/value heads."""
    return {"num_attention_heads": heads, "group_query_attention": heads != groups, "num_query_groups": groups}


def preserved_keys(like: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Return the keys of an earlier config.json that say nothing of the network, and those in `more`."""
    return {name: value for name, value in like.items() if name in IGNORED or name in more}


def _dict_else_note_problem(keys: ForeignMapping, name: str, value: Any) -> dict[str, Any]:
    if value is None or isinstance(value, Mapping):
        return dict(value or {})
    keys.problems.append(f"{name}: {short_value(value)} is not an object")
    return {}
