"""Pairs of PEFT's fields on eight families: equal to PEFT's own reload of the folder, or refused by the name of one of the two."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.unit.adapters.test_peft_fields import FAMILIES, differs_from_peft, saved_base

pytestmark = pytest.mark.nightly


def fields_of(targets: list[str]) -> dict[str, tuple[dict[str, Any], str]]:
    """Fields that a network of any kind can have: settings, and "" or the words by which they are refused. targets: endings of linear layers."""
    first, last = targets[0], targets[-1]
    return {
        "r": ({"r": 3}, ""),
        "lora_alpha": ({"lora_alpha": 5}, ""),
        "lora_dropout": ({"lora_dropout": 0.1}, ""),
        "fan_in_fan_out": ({"fan_in_fan_out": True}, ""),
        "bias all": ({"bias": "all"}, ""),
        "bias lora_only": ({"bias": "lora_only"}, ""),
        "use_rslora": ({"use_rslora": True}, ""),
        "use_dora": ({"use_dora": True}, ""),
        "the output layer saved": ({"modules_to_save": ["lm_head"]}, ""),
        "gaussian": ({"init_lora_weights": "gaussian"}, ""),
        "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
        "layers_to_transform": ({"layers_to_transform": [1]}, ""),
        "rank_pattern": ({"rank_pattern": {last: 2}}, ""),
        "alpha_pattern": ({"alpha_pattern": {first: 3}}, ""),
        "exclude_modules": ({"exclude_modules": [last]}, ""),
        "all-linear": ({"target_modules": "all-linear"}, ""),
        "a regex": ({"target_modules": rf".*\.({'|'.join(targets)})"}, ""),
        "lora_bias": ({"lora_bias": True}, "lora_bias: True"),
        "trainable_token_indices": ({"trainable_token_indices": [1, 3]}, "trainable_token_indices: [1, 3]"),
        "alora_invocation_tokens": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: [1]"),
    }


# What a network of its kind refuses in addition: field -> a word of the message.
ROUTER = {"all-linear": "has no adapter in a run or a server"}
REFUSED = {
    "gpt2": {"the output layer saved": "unties embedding and output layer"},
    "mixtral": ROUTER,
    "qwen3_moe": ROUTER,
    "deepseek_v3": ROUTER,
    "gpt_oss": {"bias lora_only": "is one parameter here with"},
    "nemotron_h": {},
    "qwen3_next": ROUTER,
    "falcon_h1": {},
}


@pytest.mark.parametrize("family", REFUSED)
def test_pairs_of_fields_are_read_as_peft_reads_them_or_refused_by_name(family: str, tmp_path: Path) -> None:
    base, targets = saved_base(family, tmp_path / "base"), FAMILIES[family][2]
    fields, counts, wrong = fields_of(targets), {"equal": 0, "refused": 0, "peft": 0}, []
    # In fp32 two ways to compute a delta rule differ by up to 4e-5; the same folders differ by 3e-6 in fp64.
    tolerance = 1e-4 if family == "qwen3_next" else 1e-5
    for number, (one, other) in enumerate(itertools.combinations_with_replacement(fields, 2)):
        settings = {"target_modules": targets, **fields[one][0], **fields[other][0]}
        result = differs_from_peft(base, tmp_path / str(number), settings, tolerance)
        kind = "equal" if not result else "peft" if result.startswith("peft: ") else "refused"
        words = [REFUSED[family].get(name) or fields[name][1] for name in (one, other)]
        # A pair brings no refusal of its own, and a field by itself is refused by its word alone.
        right = (
            any(word in result for word in words if word)
            if kind == "refused"
            else one != other or not any(words) or kind == "peft"
        )
        if not right:
            wrong.append(f"{one} and {other}: {result or 'is read'}")
        counts[kind] += 1
    assert not wrong and counts["equal"] > 100, (counts, wrong)
