"""generation_config.json of a Hugging Face folder: what ends a generated text, and how tokens are sampled unless a request says so.

Values are those with which transformers' `generate` would sample: without `do_sample` it takes the likeliest, so that
`temperature`, `top_k` and their like say nothing, and with it `top_k` is 50 unless the file has another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core.config.flags.declare import ConfigError, raise_config_error_if
from megatron.core.config.foreign.mapping import ForeignMapping, short_value

FILE = "generation_config.json"
_HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("_commit_hash", "_from_model_config", "transformers_version", "trust_remote_code"), "says where it is from"
        ),
        **dict.fromkeys(
            ("bos_token_id", "pad_token_id", "decoder_start_token_id"), "the tokenizer and config.json say it"
        ),
        **dict.fromkeys(("max_length", "num_return_sequences"), "a request says how much it wants"),
        **dict.fromkeys(("early_stopping", "length_penalty"), "of beam search, which only a request asks for"),
        **dict.fromkeys(
            (
                "use_cache cache_implementation cache_config max_cache_len return_legacy_cache prefill_chunk_size low_memory "
                "compile_config disable_compile continuous_batching_config is_assistant num_assistant_tokens "
                "num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit assistant_lookbehind "
                "target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size speculation_type use_mtp"
            ).split(),
            "changes how fast tokens come, not which",
        ),
        **dict.fromkeys(
            "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate".split(),
            "says what else is returned",
        ),
        **dict.fromkeys(
            ("remove_invalid_values", "renormalize_logits"), "logits that are not finite end a request here"
        ),
    }
)
# The values at which these do nothing in transformers; any other has no counterpart here.
_OFF: Mapping[str, Any] = MappingProxyType(
    {
        "min_length": 0,
        "min_new_tokens": 0,
        "num_beams": 1,
        "num_beam_groups": 1,
        "diversity_penalty": 0.0,
        "encoder_repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 0,
        "guidance_scale": 1.0,
        "penalty_alpha": 0.0,
        "token_healing": False,
    }
)
_OFF_IN_SAMPLING: Mapping[str, Any] = MappingProxyType(
    {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": 1.0}
)
_USUAL_TOP_K = 50  # of transformers, where a file only says do_sample


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a folder says of the texts that its network writes. end_ids: each ends a text, beside the tokenizer's end of
    document. sampling: fields of `SamplingParams`, for requests that do not say. num_tokens: most new ones, likewise, or
    None. stop_words: likewise. problems: what it says and has no counterpart here, a line each.
    """

    end_ids: tuple[int, ...] = ()
    sampling: Mapping[str, int | float] = field(default_factory=dict)
    num_tokens: int | None = None
    stop_words: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def for_requests(self, choice: str, where: str) -> GenerationDefaults:
        """Return what requests are answered with by --generation-config `choice`: auto, or none for the ids that end a text
        alone. where: the checkpoint. `ConfigError` if the file asks for something that has no counterpart here.
        """
        if choice == "none":
            return GenerationDefaults(self.end_ids)
        raise_config_error_if(
            f"{where}, {FILE}: {problem}; or give --generation-config none, to read the ids that end a text alone"
            for problem in self.problems
        )
        return self


def read_generation_defaults(folder: str | Path) -> GenerationDefaults:
    """Read a folder's generation_config.json; the ids that end a text from config.json if it has none. Empty without
    both files. `ConfigError` for a file that is not a JSON object, or whose `eos_token_id` is not of ids.
    """
    config = _read_object(Path(folder) / FILE)
    keys = ForeignMapping(config, harmless=_HARMLESS, defaults=_OFF)
    ends = keys.pop_or_none("eos_token_id")
    ends = _end_ids(_model_end_ids(Path(folder)) if ends is None else ends, folder)
    samples = keys.pop_or_none("do_sample")
    sampling: dict[str, int | float] = {}
    penalty = keys.non_negative_float("repetition_penalty", 1.0, positive=True)
    if penalty != 1.0:
        sampling["repetition_penalty"] = penalty
    if samples is True:
        sampling |= _sampling_fields(keys)
    else:
        keys.ignore_keys("temperature", "top_k", "top_p", "min_p", *_OFF_IN_SAMPLING)
        if samples is False:
            sampling["temperature"] = 0.0
        elif samples is not None:
            keys.problems.append(f"do_sample: {short_value(samples)} is neither true nor false")
    num_tokens = keys.positive_int_or_none("max_new_tokens")
    stop = keys.pop_or_none("stop_strings") or []
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        keys.problems.append(f"stop_strings: {short_value(stop)} is not a text or a list of texts")
        words = []
    return GenerationDefaults(ends, sampling, num_tokens, tuple(words), tuple(keys.all_problems()))


def _sampling_fields(keys: ForeignMapping) -> dict[str, int | float]:
    """Take the settings of sampling, where a file says do_sample."""
    top_k = keys.pop_or_none("top_k")
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 0):
        keys.problems.append(f"top_k: {short_value(top_k)} is not a whole number from 0 on")
        top_k = 0
    result: dict[str, int | float] = {
        "temperature": keys.non_negative_float("temperature", 1.0, positive=True),
        "top_k": _USUAL_TOP_K if top_k is None else top_k,
        "top_p": keys.non_negative_float("top_p", 1.0, positive=True),
        "min_p": keys.non_negative_float("min_p", 0.0),
    }
    for name in ("top_p", "min_p"):
        if result[name] > 1.0:
            keys.problems.append(f"{name}: {result[name]:g} is above 1")
            result[name] = 1.0
    for name, off in _OFF_IN_SAMPLING.items():
        keys.one_of(name, (off,), off)
    return result


def _model_end_ids(folder: Path) -> Any:
    """Return `eos_token_id` of config.json, or of the part of it that is the decoder's; None if it says none."""
    config = _read_object(folder / "config.json")
    parts = [
        config,
        *(part for name in ("decoder", "generator", "text_config") if isinstance(part := config.get(name), dict)),
    ]
    return next((part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), None)


def _end_ids(value: Any, folder: str | Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"{folder}: eos_token_id {short_value(value)} is neither an id nor a list of ids; mend it")
    return tuple(token for token in dict.fromkeys(ids) if token >= 0)  # -1: none


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no such file. `ConfigError` if it is damaged."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content
