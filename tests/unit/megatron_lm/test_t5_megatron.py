"""Megatron's own checkpoints of T5 are read: both halves, cross attention in every order of rows, the bias of the output layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.models.describe import global_parameter_shapes
from megatron.megatron_lm.checkpoint.legacy import open_legacy_checkpoint
from megatron.megatron_lm.checkpoint.names import map_names_to_ours
from tests.unit.families.made import Made, same_tensors
from tests.unit.megatron_lm.megatron_encoders import LAST, share, write
from tests.unit.megatron_lm.test_bert_megatron import tensors_of

SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "encoder_num_layers": 2,
    "decoder_num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "kv_channels": 3,
    "ffn_hidden_size": 24,
    "max_position_embeddings": 8,
}
T5 = {**SETTINGS, "architecture": "t5", "true_vocab_size": 20}
IDS = {"true_vocab_size": 20}
MIDDLE = {**LAST, "norm": "layernorm"}


@pytest.mark.parametrize(
    ("age", "version", "tp"),
    [({**MIDDLE, "attention": "attention"}, 0, 2), (MIDDLE, 1, 2), (MIDDLE, 2.0, 1), (LAST, 3.0, 4)],
)
@pytest.mark.parametrize("arguments", [True, False])
def test_every_version_gives_the_t5_that_was_sharded(
    tmp_path: Path, age: dict[str, str], version: float, tp: int, arguments: bool
) -> None:
    made = Made(T5)
    folder = write(tmp_path, tensors_of(made), SETTINGS, age=age, version=version, tp=tp, arguments=arguments)
    source = open_legacy_checkpoint(
        folder, IDS if arguments else {**IDS, "num_attention_heads": 4, "kv_channels": 3, "ffn_hidden_size": 24}
    )
    same_tensors(source, made)
    assert source.settings["architecture"] == "t5"
    assert global_parameter_shapes(model_config_from_settings(source.settings)) == {
        name.removeprefix("model."): one.shape for name, one in made.formats.items()
    }


def test_a_decoder_of_another_depth_than_the_arguments_say_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors_of(Made(T5)), {**SETTINGS, "decoder_num_layers": 4}, age=LAST, version=3.0)
    with pytest.raises(CheckpointError, match="decoder_num_layers: 4 in the settings, 3 in the tensors"):
        open_legacy_checkpoint(folder, IDS)


def test_names_of_core_are_ours_but_for_its_copies_and_its_output_layer() -> None:
    made = Made({**T5, "position_embedding_type": "relative"})
    core = [name.removeprefix("model.").replace("output_layer.", "lm_head.output_layer.") for name in made.formats]
    found = map_names_to_ours([*core, "position_embeddings.weight", "decoder.layers.0.self_attention._extra_state"])
    assert sorted(found.values()) == sorted(name.removeprefix("model.") for name in made.formats)


def test_no_element_is_lost_by_the_helper_that_writes() -> None:
    """Ranks' shares hold every element of the fused matrices once."""
    rows = torch.arange(36.0)
    for name, fused in (("linear_qkv", 36), ("linear_kv", 24)):
        for version in (0, 1, 2.0):
            parts = [
                share(f"x.{name}.bias", rows[:fused], version=version, heads=4, rank=rank, ranks=2) for rank in range(2)
            ]
            assert torch.cat(parts).sort().values.tolist() == list(range(fused))
            assert parts[0].tolist() != rows[: fused // 2].tolist()
