"""Arguments of a run of Megatron as settings: its defaults of what a network does not have are not the user's words."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.megatron_lm.checkpoint.arguments_to_settings import (
    run_settings_of_megatron_args,
    settings_of_megatron_args,
)
from megatron.megatron_lm.checkpoint.hybrid import merge_layer_pairs
from tests.peers.upstream_arguments import namespace

GIVEN = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "seq_length": 64,
    "global_batch_size": 4,
    "micro_batch_size": 1,
}


def model(**given: Any) -> ModelConfig:
    """The network that the namespace of such a run makes here."""
    args = namespace({**GIVEN, **given}, rank=0, world_size=1, iteration=1)
    return model_config_from_settings(settings_of_megatron_args(vars(args), {"true_vocab_size": 64}))


def test_a_plain_network_has_as_many_key_heads_as_heads_and_no_experts() -> None:
    found = model()
    assert (
        found.num_query_groups,
        found.moe.num_experts,
        found.mtp.mtp_num_layers,
        found.mla.multi_latent_attention,
    ) == (4, None, None, False)


@pytest.mark.parametrize("freq, expected", [(1, "1"), (2, "2"), ([0, 1, 1, 1], "[0, 1, 1, 1]")])
def test_which_layers_have_experts_may_be_a_number_or_a_list(freq: Any, expected: str) -> None:
    assert model(num_experts=4, moe_layer_freq=freq).moe.moe_layer_freq == expected


def test_balancing_may_be_one_or_many() -> None:
    one = model(num_experts=4, moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1).moe
    many = model(
        num_experts=4, moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"], moe_aux_loss_coeff=[0.1, 0.2]
    ).moe
    assert (one.balancing_losses, many.balancing_losses) == (
        (("seq_aux_loss", 0.1),),
        (("aux_loss", 0.1), ("seq_aux_loss", 0.2)),
    )


def test_windows_and_layers_without_rotations_are_read_from_tuples_and_lists() -> None:
    found = model(
        position_embedding_type="rope", window_size=(8, 0), window_attn_skip_freq=2, no_rope_freq=[0, 0, 0, 1]
    )
    assert (found.parsed_window_size, found.window_attn_skip_freq, found.rope.no_rope_freq) == (
        (8, 0),
        "2",
        "[0, 0, 0, 1]",
    )


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"add_bias_linear": False}, "gelu"),
        ({"swiglu": True}, "silu"),
        ({"squared_relu": True}, "squared_relu"),
    ],
)
def test_the_fused_gelu_is_the_tanh_formula(given: dict[str, Any], expected: str) -> None:
    assert model(**given).activation_name == expected


@pytest.mark.parametrize(
    "written_by, applied", [({}, False), ({"use_legacy_models": True}, True), ({"use_mcore_models": True}, False)]
)
def test_megatron_core_never_started_its_residual_after_the_norm(written_by: dict[str, Any], applied: bool) -> None:
    assert (
        model(apply_residual_connection_post_layernorm=True, **written_by).apply_residual_connection_post_layernorm
        == applied
    )


def test_a_run_goes_on_with_tokenizer_and_sequence_length() -> None:
    args = namespace(
        {**GIVEN, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "folder"},
        rank=0,
        world_size=1,
        iteration=1,
    )
    found = run_settings_of_megatron_args(vars(args))
    assert (found["tokenizer_type"], found["tokenizer_model"], found["seq_length"]) == (
        "HuggingFaceTokenizer",
        "folder",
        64,
    )


@pytest.mark.parametrize(
    "given, layers, experts",
    [({"hybrid_override_pattern": "*-*-"}, 2, None), ({"hybrid_layer_pattern": "*-|*E|*E"}, 3, "[0, 1, 1]")],
)
def test_two_layers_of_a_hybrid_network_are_one_here(given: dict[str, str], layers: int, experts: str | None) -> None:
    found = settings_of_megatron_args({"num_layers": 2 * layers, "num_experts": experts and 4, **given}, {})
    assert (found["num_layers"], found.get("moe_layer_freq")) == (layers, experts)
    names = {f"decoder.layers.{number}.x": number for number in range(4)}
    assert list(
        merge_layer_pairs(
            {
                "decoder.layers.2.input_layernorm.weight": 0,
                "decoder.layers.3.mlp.linear_fc1.weight": 1,
                "mtp.layers.3.x": 2,
            },
            given,
        )
    ) == ["decoder.layers.1.input_layernorm.weight", "decoder.layers.1.mlp.linear_fc1.weight", "mtp.layers.3.x"]
    assert merge_layer_pairs(names, {}) == names


@pytest.mark.parametrize("pattern", ["M*-", "*-*", "-*", "G-|*-"])
def test_other_layers_of_a_hybrid_network_are_those_of_its_pattern(pattern: str) -> None:
    found = settings_of_megatron_args({"num_layers": 3, "hybrid_layer_pattern": pattern, "hybrid_mlp_ratio": 0.5}, {})
    symbols = pattern.replace("|", "")
    assert (found["hybrid_layer_pattern"], found["num_layers"]) == (symbols, len(symbols))
    assert "hybrid_mlp_ratio" not in found


@pytest.mark.parametrize("pattern", ["M*D", "MD/M"])
def test_hybrid_layers_that_are_not_built_here_are_refused_by_their_pattern(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="hybrid network with the layers .*read are M G"):
        settings_of_megatron_args({"num_layers": 3, "hybrid_layer_pattern": pattern}, {})
