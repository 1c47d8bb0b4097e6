"""What is written in Megatron's format is a network that Megatron builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.flags.declare import flag_name
from megatron.core.config.plan.network import network_fields
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.megatron_lm.checkpoint import export_arguments
from megatron.megatron_lm.checkpoint.export import write_legacy_checkpoint
from megatron.megatron_lm.checkpoint.export_arguments import COUNTERPARTS, settings_unknown_to_megatron
from megatron.megatron_lm.checkpoint.legacy import open_legacy_checkpoint
from tests.helpers.every_setting import NETWORKS, changed, fields, resolved
from tests.peers.parser_defaults import parser_defaults
from tests.unit.megatron_lm.megatron_files import V2, Whole


def test_each_setting_without_a_counterpart_stops_an_export_when_it_is_changed_by_itself() -> None:
    """Whatever makes a function, and is not in the table: also what is new."""
    lines, networks = set(), network_fields()
    for network in NETWORKS.values():
        config = resolved(network)
        for name, kind in fields():
            if name in networks and name not in COUNTERPARTS:
                lines.update(settings_unknown_to_megatron(changed(config, name, kind)[1].model))
    stopped = {
        name for name in networks for line in lines if line.startswith((f"{flag_name(name)}:", f"{flag_name(name)} "))
    }
    assert networks.keys() - COUNTERPARTS.keys() <= stopped


@pytest.mark.parametrize(
    "changes, lines",
    [
        ({}, []),
        (
            {
                "position_embedding_type": "rope",
                "swiglu": True,
                "normalization": "RMSNorm",
                "window_size": "3,0",
                "softmax_type": "off-by-one",
            },
            [],
        ),
        ({"architecture": "bert"}, []),
        (
            {"attention_logit_softcap": 5.0, "final_logit_softcap": 30.0},
            [
                "--attention-logit-softcap 5.0: Megatron builds no such network",
                "--final-logit-softcap 30.0: Megatron builds no such network",
            ],
        ),
        ({"softmax_type": "learnable"}, ["--softmax-type learnable: Megatron builds no such network"]),
        ({"openai_gelu": True, "mtp_num_layers": 1}, []),
        (
            {"openai_gelu": True, "add_bias_linear": False},
            ["--openai-gelu: Megatron has the tanh formula only in MLPs with biases, without experts and gates"],
        ),
        (
            {"num_experts": 4, "moe_shared_expert_intermediate_size": 8},
            [
                "--moe-shared-expert-intermediate-size: Megatron's shared expert has no biases, as with --disable-bias-linear"
            ],
        ),
        (
            {
                "position_embedding_type": "rope",
                "mtp_num_layers": 1,
                "window_size": "3,0",
                "window_attn_skip_freq": "2",
                "no_rope_freq": "2",
            },
            [
                "--window-attn-skip-freq with --mtp-num-layers: which layers ahead have the window differs between Megatron's releases",
                "--no-rope-freq with --mtp-num-layers: Megatron has no such network",
            ],
        ),
        ({"multi_latent_attention": True, "position_embedding_type": "rope", "rotary_scaling_factor": 4.0}, []),
        (
            {"position_embedding_type": "rope", "rope_type": "yarn"},
            ["--rope-type yarn: Megatron builds no such network"],
        ),
        ({"position_embedding_type": "rope", "rope_scaling_low_freq_factor": 2.0}, []),
        (
            {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_low_freq_factor": 2.0},
            ["--rope-scaling-low-freq-factor 2.0: Megatron builds no such network"],
        ),
        (
            {"apply_residual_connection_post_layernorm": True},
            ["--apply-residual-connection-post-layernorm: Megatron builds no such network"],
        ),
    ],
    ids=str,
)
def test_networks_are_told_by_what_megatron_lacks(changes: dict[str, Any], lines: list[str]) -> None:
    assert settings_unknown_to_megatron(resolved(changes).model) == lines


def test_a_network_with_soft_caps_is_not_written(tmp_path: Path) -> None:
    source = Whole(groups=2, gated=True)
    source.write(tmp_path / "in", V2, version=3.0)
    capped = open_legacy_checkpoint(tmp_path / "in", {"true_vocab_size": 10, "attention_logit_softcap": 5.0})
    with pytest.raises(CheckpointError) as caught:
        write_legacy_checkpoint(capped, tmp_path / "out")
    assert caught.value.problems == ("--attention-logit-softcap 5.0: Megatron builds no such network",)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("release", parser_defaults())
def test_what_a_checkpoint_is_trusted_to_give_megatron_is_an_argument_of_every_release(release: str) -> None:
    assert not export_arguments._TAKEN - parser_defaults()[release].keys()
