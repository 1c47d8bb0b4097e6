"""Every argument of Megatron-LM's parsers, release by release: taken, without effect with the reason, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.core.config.flags.declare import field_resume_roles
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig
from megatron.megatron_lm.checkpoint.argument_table import AT_DEFAULT, HARMLESS, harmless_reason
from megatron.megatron_lm.checkpoint.arguments_to_settings import megatron_argument_problems, settings_of_megatron_args
from tests.peers.parser_defaults import complete_arguments, parser_defaults

RELEASES = tuple(parser_defaults())
SIZES = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "kv_channels": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 16, "add_bias_linear": False, "swiglu": True}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
}
NETWORKS = {
    "dense": {},
    "grouped": {"group_query_attention": True, "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm"},
    "experts": EXPERTS,
    "latent": LATENT,
    "experts and latent": EXPERTS | LATENT,
    "further ahead": {"mtp_num_layers": 1, "position_embedding_type": "rope"},
    "hybrid": {"hybrid_override_pattern": "M*M-", "add_bias_linear": False},
}


def resolved(arguments: dict[str, Any]) -> ModelConfig:
    """The network that the arguments of a run make here."""
    return model_config_from_settings(settings_of_megatron_args(arguments, {"true_vocab_size": 64}))


@pytest.mark.parametrize("release", RELEASES)
def test_every_argument_is_a_setting_or_harmless_for_a_reason_or_refused_unless_it_is_off(release: str) -> None:
    settings = field_resume_roles(ModelConfig)
    undecided = [
        name
        for name in parser_defaults()[release]
        if sum((name in settings, bool(harmless_reason(name)), name in AT_DEFAULT)) != 1
    ]
    assert not undecided, f"of {len(parser_defaults()[release])} arguments of {release}"
    assert not megatron_argument_problems(parser_defaults()[release])


def test_the_table_names_no_argument_that_is_a_setting_of_the_network() -> None:
    settings = field_resume_roles(ModelConfig)
    assert not [name for name in (*HARMLESS, *AT_DEFAULT) if name in settings]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_defaults_of_a_release_are_nobodys_word_in_any_network(release: str, network: str) -> None:
    given = {**SIZES, **NETWORKS[network]}
    if "hybrid_override_pattern" in given and "hybrid_override_pattern" not in parser_defaults()[release]:
        given["hybrid_layer_pattern"] = given.pop("hybrid_override_pattern")
    model = resolved(complete_arguments(release, given)).with_vocabulary(64, 1)
    broken = [message for _, message in broken_rules(replace(RunConfig(), model=model), 1)]
    assert not [one for one in broken if "moe" in one or "mla" in one or "mtp" in one or "hybrid" in one], broken


@pytest.mark.parametrize(
    "name", [name for name in AT_DEFAULT if any(name in one for one in parser_defaults().values())]
)
def test_an_argument_that_makes_another_network_is_refused_by_name(name: str) -> None:
    release = next(release for release in reversed(RELEASES) if name in parser_defaults()[release])
    given = {name: 7 if AT_DEFAULT[name] is None else not AT_DEFAULT[name]}
    (problem,) = megatron_argument_problems(complete_arguments(release, given))
    assert problem.startswith(f"{name}: ")


@pytest.mark.parametrize(
    "value, refused", [(3, True), (True, True), ("x", True), (None, False), (False, False), ([], False)]
)
def test_an_argument_of_a_program_that_is_not_known_is_refused_unless_it_is_off(value: Any, refused: bool) -> None:
    assert bool(megatron_argument_problems({"attention_twist": value})) is refused


def test_a_network_of_another_programs_layers_is_refused() -> None:
    known = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    assert not megatron_argument_problems({"spec": known})
    assert megatron_argument_problems({"spec": ["my.layers", "layer_spec"]}) == [
        "spec: my.layers is no network of Megatron Core's"
    ]


@pytest.mark.parametrize(
    "release, name", [("0.15.3", "apply_layernorm_1p"), ("0.16.1", "layernorm_zero_centered_gamma")]
)
def test_weights_of_norms_that_are_stored_minus_one_are_known_by_both_names(release: str, name: str) -> None:
    assert resolved(complete_arguments(release, {**SIZES, name: True})).apply_layernorm_1p
