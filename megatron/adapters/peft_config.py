"""PEFT's adapter_config.json, read key by key: each is understood, changes nothing here, or is refused by name.

    {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "alpha_pattern": {"layers.0.*": 3}, "init_lora_weights": "pissa", ...}

Known are the fields of LoraConfig of PEFT 0.14 to 0.21; docs/finetuning.md lists them. Which modules a config names, and their rank and
alpha, is decided as PEFT decides it. Its regular expressions are matched within a limit of time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config.flags.bounded_regex import names_matching
from megatron.core.config.foreign.mapping import ForeignMapping, short_value
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families.hf_folder import read_json

CONFIG = "adapter_config.json"
# Versions of PEFT: from the first, A of experts is as wide as their input, however their parameter is stored; in the second it is
# not so for parameters that are stored transposed.
FIRST_WITH_EXPERT_ROWS = (0, 19, 1)
SWAPS_TRANSPOSED_EXPERTS = (0, 19, 0)
_ALL_LINEAR = "all-linear"
_TASKS = ("CAUSAL_LM", "SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_LARGEST_RANK = 2**20
# Initial values under which the base stays what it is. PEFT reads the configs beside them at the start of a training alone.
_INITIAL = (True, False, "gaussian", "orthogonal", "mica", "eva")
_CHANGED_BASE = re.compile(r"pissa(_niter_\d+)?|olora|corda.*|loftq|lora_ga", re.IGNORECASE)
_AT_THE_START = "is read when a training starts"
_HARMLESS = {
    "auto_mapping": "says which class the base was loaded with",
    "revision": "says which revision of the base was fetched",
    "inference_mode": "says whether the adapter was to be trained on",
    "fan_in_fan_out": "follows from the class of each layer",
    "megatron_core": "names a package for megatron_config, which is refused",
    "qalora_group_size": "belongs to use_qalora, which is refused",
    "runtime_config": "PEFT ignores it in a file",
    "loftq_config": _AT_THE_START,
    "eva_config": _AT_THE_START,
    "corda_config": _AT_THE_START,
    "lora_ga_config": _AT_THE_START,
}
_ADVICE = "is not computed here: only what LoRA, rsLoRA and DoRA of linear layers do is"
_WORD = re.compile(r"[\w-]+(\.[\w-]+)*")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What an adapter_config.json says. targets, excluded: endings of module names, or a regular expression; None: nothing.

    parameters: endings of parameter names with adapters of their own. layers: indices of the adapted layers, or None for all.
    saved_modules: endings of names of modules that are saved whole. ties: a saved embedding stays tied to the output layer.
    """

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    dora: bool
    targets: tuple[str, ...] | str | None
    excluded: tuple[str, ...] | str | None
    parameters: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    saved_modules: tuple[str, ...]
    bias: str
    ties: bool
    task: str | None
    base: str | None
    version: tuple[int, ...] | None

    def targeted(self, modules: Iterable[str]) -> set[str]:
        """Return those of these linear modules (transformers' names) that target_modules names."""
        names = {name for name in modules if not self._is_excluded_by_name(name)}
        if isinstance(self.excluded, str):
            names -= names_matching([self.excluded], names)[0]
        if isinstance(self.targets, str) and self.targets.lower() != _ALL_LINEAR:
            return names_matching([self.targets], names)[0]
        if isinstance(self.targets, str):
            return {name for name in names if name != "lm_head"}
        return {name for name in names if _ends_in(name, self.targets or ()) and self._is_in_layers(name)}

    def targeted_parameters(self, parameters: Iterable[str]) -> set[str]:
        """Return those of these parameters (transformers' names) that target_parameters names."""
        return {name for name in parameters if _ends_in(name, self.parameters)}

    def ranks(self, names: Iterable[str]) -> dict[str, int]:
        """Return the rank of each adapted module or parameter: the first rank_pattern that ends its name, or `r`."""
        return _first_matching(self.rank_pattern, names, self.rank)

    def scales(self, ranks: Mapping[str, int]) -> dict[str, float]:
        """Return alpha / r (rsLoRA: alpha / sqrt r) of each name, alpha by the first alpha_pattern that ends it."""
        alphas = _first_matching(self.alpha_pattern, ranks, self.alpha)
        return {name: alphas[name] / (math.sqrt(rank) if self.rslora else rank) for name, rank in ranks.items()}

    def is_saved(self, module: str) -> bool:
        """Whether modules_to_save names a module or one that it is in."""
        parts = module.split(".")
        return any(".".join(parts[:count]).endswith(self.saved_modules) for count in range(1, len(parts) + 1))

    def _is_excluded_by_name(self, module: str) -> bool:
        """Whether exclude_modules, if it is a list, or modules_to_save leaves a module without an adapter."""
        listed = () if isinstance(self.excluded, str) else self.excluded or ()
        saved = any(f".{one}." in f".{module}." for one in self.saved_modules)
        return saved or _ends_in(module, listed)

    def _is_in_layers(self, module: str) -> bool:
        """Whether a module is in one of layers_to_transform. Its index is the first number after layers_pattern."""
        if not self.layers or module in (self.targets or ()):
            return True
        parts = module.split(".")
        for place in range(1, len(parts) - 1):
            follows = any(f".{'.'.join(parts[:place])}".endswith(f".{one}") for one in self.layers_pattern)
            # without a pattern something stands before the list of layers, as in model.layers.3.
            if parts[place].isdigit() and (follows or not self.layers_pattern and place > 1):
                return int(parts[place]) in self.layers
        return False


def read_peft_config(folder: Path) -> PeftConfig:
    """Read adapter_config.json. One `CheckpointError` names every key that asks for what is not computed here."""
    keys = ForeignMapping(read_json(folder / CONFIG), harmless=_HARMLESS, advice=_ADVICE)
    keys.one_of("peft_type", ("LORA",), None)
    _note_changed_base(keys)
    if "lora_alpha" in keys.mapping and keys.mapping["lora_alpha"] is None:
        keys.problems.append("lora_alpha: nothing is no number")
    layers, modules = keys.pop_or_none("layers_to_transform"), keys.pop_or_none("target_modules")
    version = keys.text("peft_version", "")
    config = PeftConfig(
        rank=_take_rank(keys),
        alpha=keys.non_negative_float("lora_alpha", 8.0),
        dropout=_take_dropout(keys),
        rslora=keys.boolean("use_rslora", False),
        dora=keys.boolean("use_dora", False),
        targets=_take_words_or_regex(keys, "target_modules", modules),
        excluded=_take_words_or_regex(keys, "exclude_modules", keys.pop_or_none("exclude_modules")),
        parameters=_take_words(keys, "target_parameters"),
        rank_pattern=_take_numbers(keys, "rank_pattern", _is_rank),
        alpha_pattern=_take_numbers(keys, "alpha_pattern", _is_number),
        layers=_take_layers(keys, [layers] if isinstance(layers, int) else layers),
        layers_pattern=_take_words(keys, "layers_pattern"),
        saved_modules=_take_words(keys, "modules_to_save"),
        bias=keys.one_of("bias", ("none", "all", "lora_only"), "none"),
        ties=keys.boolean("ensure_weight_tying", False),
        task=keys.one_of("task_type", _TASKS, None) if keys.mapping.get("task_type") is not None else None,
        base=keys.text("base_model_name_or_path", "") or None,
        version=_release_numbers(version),
    )
    keys.ignore_keys("task_type")
    if not (config.base or "").isprintable():
        keys.problems.append(f"base_model_name_or_path: {short_value(config.base)} is no name of a network")
    if isinstance(config.targets, str) and (config.layers or config.layers_pattern):
        keys.problems.append("layers_to_transform: PEFT takes it beside a list in target_modules alone")
    if problems := keys.all_problems():
        raise CheckpointError(f"{folder / CONFIG} describes an adapter that cannot be built here", problems)
    return config


def _note_changed_base(keys: ForeignMapping) -> None:
    """Take init_lora_weights; note one that changed the base, on whose rest the adapter was trained."""
    value = keys.pop_or_none("init_lora_weights")
    if isinstance(value, str) and _CHANGED_BASE.fullmatch(value):
        keys.problems.append(
            f"init_lora_weights: {value} took a part out of the base when the training began, and the adapter belongs to what was left; in "
            "PEFT, save it for the base as it was: save_pretrained(folder, path_initial_model_for_weight_conversion=FOLDER OF THE ADAPTER AS "
            "IT WAS BEFORE TRAINING)"
        )
    elif value is not None and value not in _INITIAL:
        keys.problems.append(f"init_lora_weights: {short_value(value)} is unknown here and may change the base")


def _release_numbers(version: str) -> tuple[int, ...] | None:
    """Return the three numbers of a version such as 0.19.1.dev0, or None if it is none."""
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", version)
    return tuple(int(number or 0) for number in numbers.groups()) if numbers else None


def _take_rank(keys: ForeignMapping) -> int:
    rank = keys.positive_int("r", 8)
    if rank > _LARGEST_RANK:
        keys.problems.append(f"r: {short_value(rank)} is no rank")
    return rank


def _take_dropout(keys: ForeignMapping) -> float:
    value = keys.non_negative_float("lora_dropout", 0.0)
    if value >= 1.0:
        keys.problems.append(f"lora_dropout: {value:g} is not below 1")
    return value


def _take_words_or_regex(keys: ForeignMapping, name: str, value: Any) -> tuple[str, ...] | str | None:
    return value if isinstance(value, str) and value else _words(keys, name, value) if value is not None else None


def _take_words(keys: ForeignMapping, name: str) -> tuple[str, ...]:
    value = keys.pop_or_none(name)
    return _words(keys, name, [value] if isinstance(value, str) else value)


def _words(keys: ForeignMapping, name: str, value: Any) -> tuple[str, ...]:
    """Return a list of names of modules; a problem is noted for anything else, expressions included."""
    if value in (None, "", []):
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) and _WORD.fullmatch(one) for one in value):
        keys.problems.append(f"{name}: {short_value(value)} is not a list of names")
        return ()
    return tuple(value)


def _take_layers(keys: ForeignMapping, value: Any) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        keys.problems.append(f"layers_to_transform: {short_value(value)} is not a list of whole numbers")
        return None
    return tuple(value)


def _take_numbers(keys: ForeignMapping, name: str, is_one: Callable[[Any], bool]) -> dict[str, Any]:
    """Take a mapping from expressions to numbers."""
    value = keys.pop_or_none(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(is_one(one) for one in value.values()):
        keys.problems.append(f"{name}: {short_value(value)} does not give names numbers of the kind that it needs")
        return {}
    return dict(value)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_RANK


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value < 10**308


def _ends_in(name: str, endings: Sequence[str]) -> bool:
    return name in endings or name.endswith(tuple(f".{one}" for one in endings))


def _first_matching(patterns: Mapping[str, Any], names: Iterable[str], usual: Any) -> dict[str, Any]:
    """Return for each name the value of the first pattern that ends it, else `usual`."""
    result = dict.fromkeys(names, usual)
    if not patterns:
        return result
    matches = names_matching([rf"(.*\.)?({key})$" for key in patterns], result)
    for (_, value), matched in reversed(list(zip(patterns.items(), matches, strict=True))):
        result |= dict.fromkeys(matched, value)
    return result
