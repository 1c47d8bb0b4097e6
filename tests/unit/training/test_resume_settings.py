"""Every setting of a run, changed by itself, against a checkpoint: an equal network, refused, or named.

The settings come from `RunConfig`, so a new one is changed here without being added. What `unused_settings` says of a network is
checked from outside: both networks are built and fed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.flags.declare import (
    ConfigError,
    config_from_flat_dict,
    config_to_flat_dict,
    field_resume_roles,
)
from megatron.core.config.plan.network import network_fields, network_setting_differences, unused_settings
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.dist_checkpointing.checkpoint_folders import FREE, CheckpointError
from megatron.core.parallel.mesh import Axis
from megatron.megatron_lm.checkpoint.open import open_megatron_checkpoint
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.checkpoint.resume_settings import SettingDifferences, compare_checkpoint_settings
from megatron.training.checkpoint.resuming import find_requested_checkpoint, open_requested_checkpoint
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.every_setting import DATA, NETWORKS, Changes, changed, fields, resolved
from tests.helpers.training import train_on
from tests.peers.make_fixtures import unpack


def says(lines: tuple[str, ...], name: str) -> bool:
    """Whether a line is about a setting."""
    labels = {"true_vocab_size": "size of the tokenizer's vocabulary", "architecture": "kind of network"}
    return any(line.startswith(f"{labels.get(name) or '--' + name.replace('_', '-')}: ") for line in lines)


def test_fields_are_those_of_the_roles() -> None:
    assert {name for name, _ in fields()} == field_resume_roles(RequestedRun).keys()


@pytest.mark.parametrize("weights_only", [False, True], ids=["goes on", "weights only"])
def test_each_setting_changed_by_itself_is_an_equal_network_or_refused_or_named(weights_only: bool) -> None:
    roles, told, bad = field_resume_roles(RequestedRun), set(), []
    for label, network in NETWORKS.items():
        config = resolved({**network, **DATA})
        for name, kind in fields():
            role = roles[name]
            if role not in ("network", "adaptable") and label not in ("dense", "t5"):
                continue  # says the same whatever the network
            saved, run = changed(config, name, kind)
            found = compare_checkpoint_settings(saved, run, weights_only=weights_only)
            expected = {
                "network": found.network,
                "adaptable": found.adapted if weights_only else found.network,
                "data": (*found.data, *found.named),
                "training": found.named,
            }.get(str(role), ())
            if says(expected, name):
                told.add(name)
            elif found != SettingDifferences():
                bad.append(f"{label}: {name} ({role}) says {found}")
    assert not bad, "\n".join(bad[:10])
    speaks = ("network", "adaptable") if weights_only else ("network", "adaptable", "data", "training")
    silent = sorted({name for name, role in roles.items() if role in speaks} - told)
    assert not silent, f"no network of this test uses these, or nothing is said of them: {silent}"


def first_step(config: RunConfig) -> torch.Tensor:
    """Loss and gradient norm of the network, whose initial weights follow from their names."""
    trainer = tiny.trainer_of(tiny.run_of(config))
    losses, norms = train_on(trainer, 1)
    return torch.tensor(losses + norms, dtype=torch.float64)


@pytest.mark.parametrize("label", ["dense", "gated", "yarn", "latent", "experts", "ahead"])
def test_settings_that_are_said_to_be_unused_change_no_number(label: str) -> None:
    config, expected, tried = resolved(NETWORKS[label]), None, []
    for name, kind in fields():
        if name in network_fields():
            _, run = changed(config, name, kind)
            if not network_setting_differences(config.model, run.model) and not list(broken_rules(run, 1)):
                expected = first_step(config) if expected is None else expected
                assert torch.equal(first_step(run), expected), (
                    f"--{name} is said to be unused in {label}, and changes what it computes"
                )
                tried.append(name)
    assert tried, "no setting is unused, so that nothing was tried"


def test_kernels_and_layouts_of_a_checkpoint_are_no_part_of_its_network() -> None:
    assert not FREE & network_fields().keys()


def test_of_a_setting_that_an_older_checkpoint_does_not_know_the_default_holds() -> None:
    config = resolved({"attention_logit_softcap": 5.0})
    saved = {name: value for name, value in config_to_flat_dict(config).items() if name != "attention_logit_softcap"}
    assert compare_checkpoint_settings(saved, config, weights_only=False).network == (
        "--attention-logit-softcap: not given in the checkpoint, 5.0 in this run",
    )
    assert compare_checkpoint_settings(saved, config, weights_only=False, complete=False) == SettingDifferences()
    assert compare_checkpoint_settings(saved, resolved({}), weights_only=False) == SettingDifferences()


def test_what_megatron_does_not_know_is_off_in_its_checkpoints(tmp_path: Path) -> None:
    place = unpack("dense", tmp_path) / "checkpoints"
    settings = open_megatron_checkpoint(place).settings
    rows = open_megatron_checkpoint(place).formats["model.embedding.word_embeddings.weight"].shape[0]

    def resumed(**changes: Any) -> None:
        config = tiny.with_vocabulary(
            config_from_flat_dict(RequestedRun, {**tiny.BASE, **settings, "load": str(place), **changes}).resolve(1),
            rows,
        )
        wanted = find_requested_checkpoint(config)
        assert wanted is not None
        open_requested_checkpoint(wanted, config, Axis("world"))

    resumed()
    with pytest.raises(
        CheckpointError, match="--attention-logit-softcap: not given in the checkpoint, 5.0 in this run"
    ):
        resumed(attention_logit_softcap=5.0)


@pytest.mark.parametrize(
    "saved, mine",
    [
        (
            {"position_embedding_type": "yarn", "rotary_scaling_factor": 2.0},
            {"position_embedding_type": "rope", "rope_type": "yarn", "rotary_scaling_factor": 2.0},
        ),
        ({"window_size": "3,0"}, {"window_size": "3,-1", "window_attn_skip_freq": "[1]*4"}),
        ({"num_query_groups": 8, "group_query_attention": True}, {}),
        ({"data_path": ["1", "here/text"], "mock_data": False}, {"data_path": ["1", "there/text"], "mock_data": False}),
    ],
    ids=["yarn", "window", "groups", "moved data"],
)
def test_two_ways_to_say_one_thing_are_no_difference(saved: Changes, mine: Changes) -> None:
    found = compare_checkpoint_settings(config_to_flat_dict(resolved(saved)), resolved(mine), weights_only=False)
    assert not found.network and not found.data, found


def start(**changes: Any) -> tuple[Trainer, Checkpointer]:
    trainer = tiny.trainer_of(tiny.run_of(resolved(changes)))
    return trainer, Checkpointer(trainer)


def saved(folder: Path, **changes: Any) -> list[float]:
    """Train two steps and save; the losses of the two that would have come next."""
    trainer, checkpoint = start(save=str(folder), **changes)
    train_on(trainer, 2)
    checkpoint.save()
    return train_on(trainer, 2)[0]


@pytest.mark.parametrize(
    "pattern, setting, values", [("*-/M-", "mamba_state_dim", (16, 32)), ("*E/*-", "ffn_hidden_size", (64, 128))]
)
def test_layers_of_multi_token_prediction_alone_use_their_settings(
    pattern: str, setting: str, values: tuple[int, int]
) -> None:
    states, experts = ({"mamba_num_heads": 16, "mamba_head_dim": 8}, {"num_experts": 4, "moe_ffn_hidden_size": 48})
    sizes = states if "M" in pattern else experts
    a, b = (
        tiny.config(**{**sizes, "hybrid_layer_pattern": pattern, "num_layers": 2, "mtp_num_layers": 1, setting: value})
        for value in values
    )
    assert setting not in unused_settings(a.model) and network_setting_differences(a.model, b.model) == [setting]


def test_a_network_with_caps_and_windows_is_not_resumed_without_them(tmp_path: Path, caplog: Any) -> None:
    saved(tmp_path, attention_logit_softcap=5.0, window_size="3,0")
    with pytest.raises(CheckpointError, match="another network") as caught:
        start(load=str(tmp_path), softmax_type="off-by-one")[1].resume()
    assert set(caught.value.problems) == {
        "--attention-logit-softcap: 5.0 in the checkpoint, not given in this run",
        "--window-size: 3,0 in the checkpoint, not given in this run",
        "--softmax-type: vanilla in the checkpoint, off-by-one in this run",
    }
    with pytest.raises(CheckpointError) as caught:
        start(load=str(tmp_path), softmax_type="off-by-one", finetune=True)[1].resume()
    assert caught.value.problems == ("--softmax-type: vanilla in the checkpoint, off-by-one in this run",)
    with caplog.at_level(logging.INFO):
        assert start(load=str(tmp_path), finetune=True)[1].resume()
    assert "--attention-logit-softcap: 5.0 in the checkpoint, not given in this run" in caplog.text


def test_stretched_rotations_are_not_resumed_as_plain_ones(tmp_path: Path, caplog: Any) -> None:
    yarn = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 4}
    expected = saved(tmp_path, **yarn)
    with pytest.raises(CheckpointError) as caught:
        start(load=str(tmp_path), position_embedding_type="rope")[1].resume()
    assert "--rotary-scaling-factor: 4.0 in the checkpoint, 1.0 in this run" in caught.value.problems
    trainer, checkpoint = start(load=str(tmp_path), **{**yarn, "position_embedding_type": "rope", "rope_type": "yarn"})
    assert checkpoint.resume() and train_on(trainer, 2)[0] == expected
    with caplog.at_level(logging.INFO):
        assert start(load=str(tmp_path), position_embedding_type="rope", finetune=True)[1].resume()
    assert "--rope-type: yarn in the checkpoint, rope in this run" in caplog.text


def test_other_numbers_of_training_are_listed_in_one_paragraph(tmp_path: Path, caplog: Any) -> None:
    saved(tmp_path)
    changes = {
        "adam_beta2": 0.95,
        "hidden_dropout": 0.1,
        "clip_grad": 1.0,
        "micro_batch_size": 2,
        "num_workers": 1,
        "log_interval": 7,
    }
    with caplog.at_level(logging.INFO):
        start(load=str(tmp_path), **changes)[1].resume()
    (told,) = [
        record.getMessage()
        for record in caplog.records
        if "settings that are not the checkpoint's" in record.getMessage()
    ]
    assert told.splitlines()[1:] == [
        "  --hidden-dropout: 0.0 in the checkpoint, 0.1 in this run",
        "  --micro-batch-size: 1 in the checkpoint, 2 in this run",
        "  --adam-beta2: 0.999 in the checkpoint, 0.95 in this run",
        "  --clip-grad: 0.5 in the checkpoint, 1.0 in this run",
    ]


def test_other_data_need_a_flag_to_go_on_with(tmp_path: Path, caplog: Any) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="trained on 16 samples of other data, or in another order") as caught:
        start(load=str(tmp_path), seed=8, dataloader_type="cyclic")[1].resume()
    assert caught.value.problems == (
        "--seed: 7 in the checkpoint, 8 in this run",
        "--dataloader-type: single in the checkpoint, cyclic in this run",
    )
    with caplog.at_level(logging.INFO):
        assert start(load=str(tmp_path), seed=8, allow_other_data=True)[1].resume()
    assert "  --seed: 7 in the checkpoint, 8 in this run" in caplog.text
    assert start(load=str(tmp_path), seed=8, finetune=True)[1].resume()
    assert start(load=str(tmp_path), seed=8, skip_train=True)[1].resume()


def test_a_run_is_extended_with_one_flag_or_with_none_where_its_rate_does_not_follow(
    tmp_path: Path, caplog: Any
) -> None:
    saved(tmp_path / "cosine")
    with pytest.raises(ConfigError, match="--train-iters was 8 and is 16, and the decay follows it"):
        start(load=str(tmp_path / "cosine"), train_iters=16)[1].resume()
    for way in ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"):
        trainer, checkpoint = start(load=str(tmp_path / "cosine"), train_iters=16, **{way: True})
        assert checkpoint.resume() and trainer.progress.iteration == 2
    expected = saved(tmp_path / "constant", lr_decay_style="constant")
    with caplog.at_level(logging.INFO):
        trainer, checkpoint = start(load=str(tmp_path / "constant"), lr_decay_style="constant", train_iters=16)
        assert checkpoint.resume() and train_on(trainer, 2)[0] == expected
    assert "--train-iters: 8 in the checkpoint, 16 in this run" in caplog.text
