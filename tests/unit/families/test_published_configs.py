"""The config.json files that makers publish are read, and mean what transformers takes them for.

published_configs.json holds some of them, of every family: older spellings, keys of other programs and keys that are null. Each says
where it was found. 42 are the makers' own, as other repositories hold them; some were written anew there by a version of transformers
or have fewer layers, and long lists of labels and of quantization are left out. The other 12 were written from the families'
documentation, so that a key may be missing or differ.
Compared with transformers' classes: what they read in a file and write anew must give the same settings, and a key that
a file leaves out must have the value that the class has for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.families.parameter_mapping import Family
from megatron.core.families.registry import FAMILIES, config_of_language_model, family_of_config

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

FILES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
PUBLISHED: dict[str, dict[str, Any]] = {name: file["config"] for name, file in FILES.items()}
REFUSED = {"nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": "moe_latent_size"}  # experts in a narrower space
NEW_NAMES = {"LLaMAForCausalLM": "LlamaForCausalLM"}  # of classes that once had another
# What a folder alone is not written with as it was: the names of a part, a tower's last layers, infinity in JSON.
WRITTEN_OTHERWISE = ("model_type", "time_step_limit", "text_config", "vision_config", "vision_feature_layer")
# A T5's class says that it is tied whatever its file says, and its tensors tell.
TOLD_BY_TENSORS = {"t5": {"untie_embeddings_and_output_weights"}}


def read(config: Mapping[str, Any], name: str) -> tuple[Family, dict[str, Any], list[str]]:
    """The family, our settings and what cannot be expressed of a config.json."""
    config = {key: value for key, value in config_of_language_model(config).items() if key != "quantization_config"}
    family = family_of_config(config, name)
    return family, *family.settings_from_config(config)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Setting -> both values, where they differ."""
    names = (ours.keys() | theirs.keys()) - TOLD_BY_TENSORS.get(ours.get("architecture", ""), set())
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


def as_transformers_writes_it(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json after transformers has read it and written it anew."""
    (named,) = config["architectures"]
    kind = getattr(transformers, NEW_NAMES.get(named, named)).config_class
    given = {key: value for key, value in config.items() if key != "quantization_config"}
    return {**kind.from_dict(deepcopy(given)).to_dict(), "architectures": [named]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_means_what_transformers_takes_it_for(name: str) -> None:
    _, settings, problems = read(PUBLISHED[name], name)
    if name in REFUSED:
        assert [problem.partition(":")[0] for problem in problems] == [REFUSED[name]]
        return
    assert problems == []
    _, anew, problems = read(as_transformers_writes_it(PUBLISHED[name]), name)
    assert problems == []
    assert not differences(settings, anew)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in REFUSED])
def test_a_published_config_is_written_as_it_was(name: str) -> None:
    config = config_of_language_model(PUBLISHED[name])
    family, settings, _ = read(config, name)
    written = family.to_hf_config(model_config_from_settings(settings), config)
    differ = {key: (config[key], value) for key, value in written.items() if key in config and config[key] != value}
    assert not differ.keys() - set(WRITTEN_OTHERWISE), differ


def test_published_configs_are_of_every_decoder_family_and_encoder() -> None:
    found = {read(config, name)[0].name for name, config in PUBLISHED.items()}
    combined = {"idefics3", "internvl", "smolvlm"}  # of a decoder and an encoder, which are here
    assert FAMILIES.keys() - found <= combined | {"internvit", "megatron_bert", "olmo_hybrid"}, FAMILIES.keys() - found


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in REFUSED])
def test_a_key_that_is_left_out_has_the_value_of_transformers_class(name: str) -> None:
    config = config_of_language_model(PUBLISHED[name])
    _, settings, _ = read(config, name)
    for key in sorted(keys_that_may_be_left_out(config)):
        less = {other: value for other, value in config.items() if other != key}
        _, found, problems = read(less, name)
        if problems:  # sizes of tensors must be there
            assert key != "max_position_embeddings" or settings["position_embedding_type"] == "learned_absolute", (
                problems
            )
            continue
        try:
            anew = as_transformers_writes_it(less)
        except Exception:  # noqa: BLE001  whatever the class raises, it does not take the file
            continue
        _, expected, problems = read(anew, name)
        assert not problems and not differences(found, expected), f"without {key}"


def keys_that_may_be_left_out(config: Mapping[str, Any]) -> set[str]:
    """The keys of a config.json that may be left out."""
    return config.keys() - {"architectures", "model_type", "quantization_config", "text_config", "vision_config"}
