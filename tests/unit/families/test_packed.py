"""Tensors that are packed in files: in 4 bits, in 8 bits, many experts in one; and layers that a file has behind the last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.rewrite import CastSource
from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.families import hf, hf_export
from megatron.core.families.dequantize import with_dequantized_tensors
from megatron.core.parallel.boxes import Box, whole_box
from megatron.core.parallel.mesh import Axis
from megatron.training.checkpoint.resuming import find_requested_checkpoint, open_requested_checkpoint
from tests.helpers import tiny
from tests.unit.families.made import LLAMA, Made, same_tensors

KIN = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 32}
GPT_OSS = {
    **KIN,
    "hidden_size": 32,
    "kv_channels": 8,
    "swiglu": False,
    "quick_geglu": True,
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "window_size": "3,0",
    "window_attn_skip_freq": "2",
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 32.0,
}
DEEPSEEK = {
    **KIN,
    "multi_latent_attention": True,
    "group_query_attention": False,
    "kv_lora_rank": 5,
    "q_lora_rank": 6,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "qk_layernorm": True,
    "norm_epsilon": 1e-6,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": "[0]*1+[1]*1",
}
HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Held:
    """A readable tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.format, self.read = tensor, ShapeAndDtype(tuple(tensor.shape), tensor.dtype), lambda: tensor


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder of one file."""
    return safetensors.torch.load((folder / "model.safetensors").read_bytes())


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """The folder with these tensors, and these keys changed in its config.json."""
    (folder / "model.safetensors").write_bytes(
        safetensors.torch.save({name: one.contiguous() for name, one in tensors.items()}, metadata={"format": "pt"})
    )
    (folder / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **config}))
    return folder


def test_four_bits_are_a_sign_two_bits_of_exponent_and_one_of_mantissa_lower_half_first() -> None:
    codes = torch.arange(32) % 16
    blocks = (codes[0::2] + 16 * codes[1::2]).to(torch.uint8).view(1, 1, 1, 16)
    found = with_dequantized_tensors(
        {"x_blocks": Held(blocks), "x_scales": Held(torch.tensor([[[128]]], dtype=torch.uint8))}, {}, ()
    )
    assert list(found) == ["x"] and found["x"].format == ShapeAndDtype((1, 32, 1), torch.bfloat16)
    expected = [2 * (-1 if code > 7 else 1) * HALVES[code % 8] for code in codes.tolist()]
    assert found["x"].read().flatten().tolist() == expected


def test_four_bits_are_read_as_transformers_reads_them() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    random = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(90, 160, (3, 6, 2), dtype=torch.uint8, generator=random)
    found = with_dequantized_tensors({"x_blocks": Held(blocks), "x_scales": Held(scales)}, {}, ())["x"]
    assert torch.equal(found.read(), mxfp4.convert_moe_packed_tensors(blocks, scales)) and found.format.shape == (
        3,
        64,
        6,
    )


def test_eight_bits_have_a_scale_for_every_square() -> None:
    random = torch.Generator().manual_seed(3)
    weight, scales = torch.randn(5, 7, generator=random).to(torch.float8_e4m3fn), torch.rand(2, 3, generator=random)
    found = with_dequantized_tensors(
        {"w": Held(weight), "w_scale_inv": Held(scales)}, {"quant_method": "fp8", "weight_block_size": [4, 3]}, ()
    )
    expected = torch.tensor(
        [
            [float(weight[row, column].float() * scales[row // 4, column // 3]) for column in range(7)]
            for row in range(5)
        ]
    )
    assert list(found) == ["w"] and found["w"].format == ShapeAndDtype((5, 7), torch.bfloat16)
    assert torch.equal(found["w"].read(), expected.bfloat16())


def test_a_network_in_four_bits_is_that_of_the_numbers_they_stand_for(tmp_path: Path) -> None:
    hf_export.export_hf_folder(Made(GPT_OSS, torch.bfloat16), tmp_path / "plain")
    hf_export.export_hf_folder(Made(GPT_OSS, torch.bfloat16), tmp_path / "packed")
    tensors, random = tensors_of(tmp_path / "plain"), torch.Generator().manual_seed(5)
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=random)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), generator=random)
        values = torch.tensor((*HALVES, *(-half for half in HALVES)))[codes] * 2.0 ** (scales[..., None] - 127)
        tensors[name] = values.flatten(2).transpose(1, 2).bfloat16()
        del packed[name]
        packed[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        packed[f"{name}_scales"] = scales.to(torch.uint8)
    write(
        tmp_path / "packed",
        packed,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )
    source = hf.open_hf_folder(tmp_path / "packed")
    same_tensors(source, hf.open_hf_folder(write(tmp_path / "plain", tensors)))
    hf_export.export_hf_folder(source, tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    assert all(torch.equal(tensors[name], one) for name, one in tensors_of(tmp_path / "again").items())


@pytest.mark.parametrize(
    "change",
    [
        {"down_proj_scales": torch.zeros(4, 32, 2, dtype=torch.uint8)},
        {"down_proj_blocks": torch.zeros(4, 32, 1, 8, dtype=torch.uint8)},
        {"down_proj_scales": None},
    ],
)
def test_packed_tensors_that_do_not_fit_together_are_refused(change: dict[str, Tensor | None], tmp_path: Path) -> None:
    hf_export.export_hf_folder(Made(GPT_OSS, torch.bfloat16), tmp_path / "out")
    tensors, prefix = tensors_of(tmp_path / "out"), "model.layers.0.mlp.experts."
    del tensors[f"{prefix}down_proj"]
    parts = {
        "down_proj_blocks": torch.zeros(4, 32, 1, 16, dtype=torch.uint8),
        "down_proj_scales": torch.zeros(4, 32, 1, dtype=torch.uint8),
        **change,
    }
    write(tmp_path / "out", tensors | {f"{prefix}{name}": one for name, one in parts.items() if one is not None})
    with pytest.raises(CheckpointError) as raised:
        hf.open_hf_folder(tmp_path / "out")
    assert any("down_proj is missing" in one for one in raised.value.problems)
    assert any("down_proj_blocks is unknown" in one for one in raised.value.problems)


def test_only_the_experts_of_a_box_are_read(tmp_path: Path) -> None:
    hf_export.export_hf_folder(Made(KIN), tmp_path / "out", family="mixtral")
    source, name = hf.open_hf_folder(tmp_path / "out"), "model.decoder.layers.1.mlp.experts.linear_fc1.weight"
    tensor = source.read(name, whole_box(source.formats[name].shape))
    parts = source._rows[name.removeprefix("model.")][1]
    for expert in (0, 1, 3):
        parts[2 * expert] = parts[2 * expert + 1] = None  # nobody may ask for them
    for box in (Box((2, 0, 0), (1, *tensor.shape[1:])), Box((2, 5, 3), (1, 20, 4))):
        assert torch.equal(source.read(name, box), tensor[box.slices()])


def test_layers_that_predict_further_stand_behind_the_last_and_may_be_left(tmp_path: Path) -> None:
    source = Made({**DEEPSEEK, "mtp_num_layers": 1})
    hf_export.export_hf_folder(source, tmp_path / "out")
    tensors, last = tensors_of(tmp_path / "out"), "model.layers.2."
    own = {name.removeprefix(last) for name in tensors if name.startswith(last)}
    assert {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "self_attn.kv_b_proj.weight",
        "mlp.experts.3.up_proj.weight",
        "mlp.gate.e_score_correction_bias",
        "input_layernorm.weight",
    } <= own
    again = {
        f"{last}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{last}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    write(tmp_path / "out", tensors | again, num_nextn_predict_layers=1)
    found = hf.open_hf_folder(tmp_path / "out")
    assert found.settings["mtp_num_layers"] == 1
    same_tensors(found, source)
    without = hf.open_hf_folder(tmp_path / "out", {"mtp_num_layers": None})
    assert without.formats == {name: one for name, one in source.formats.items() if not name.startswith("model.mtp.")}
    write(tmp_path / "out", tensors | {f"{last}embed_tokens.weight": tensors["lm_head.weight"].clone()})
    with pytest.raises(CheckpointError, match="model.layers.2.embed_tokens.weight differs from the embedding"):
        hf.open_hf_folder(tmp_path / "out")


def test_a_network_that_was_published_in_eight_bits_is_read(tmp_path: Path) -> None:
    hf_export.export_hf_folder(Made(DEEPSEEK, torch.bfloat16), tmp_path / "out")
    tensors = tensors_of(tmp_path / "out")
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.full(tuple(-(-size // 128) for size in tensors[name].shape), 0.5)
    write(
        tmp_path / "out",
        tensors,
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    )
    found, name = hf.open_hf_folder(tmp_path / "out"), "model.decoder.layers.0.self_attention.linear_proj.weight"
    expected = tensors["model.layers.0.self_attn.o_proj.weight"].float() / 2
    assert torch.equal(found.read(name, whole_box(tuple(expected.shape))), expected.bfloat16())
    assert {one.dtype for one in found.formats.values()} == {torch.bfloat16}


def test_the_biases_of_experts_stay_fp32_whatever_the_weights_become() -> None:
    cast = CastSource(Made(DEEPSEEK), torch.bfloat16)
    wide = [name for name, one in cast.formats.items() if one.dtype == torch.float32]
    assert wide == ["model.decoder.layers.1.mlp.router.expert_bias"]
    assert cast.read(wide[0], whole_box((4,))).dtype == torch.float32


def test_a_run_takes_the_layers_that_predict_further_if_it_has_them_and_norms_latents_as_the_files_do(
    tmp_path: Path,
) -> None:
    hf_export.export_hf_folder(Made({**DEEPSEEK, "mtp_num_layers": 1}), tmp_path / "out")
    for depths in (1, None):
        wanted = find_requested_checkpoint(
            tiny.config(**{**DEEPSEEK, "mtp_num_layers": depths, "load": str(tmp_path / "out")})
        )
        opened = open_requested_checkpoint(
            wanted, tiny.with_vocabulary(tiny.config(**DEEPSEEK, mtp_num_layers=depths), 20), Axis("world")
        )
        assert any(name.startswith("model.mtp.") for name in opened.source.formats) == (depths == 1)
    bare = tiny.with_vocabulary(tiny.config(**{**DEEPSEEK, "qk_layernorm": False}), 20)
    with pytest.raises(CheckpointError, match="--qk-layernorm: on in the checkpoint, off in this run"):
        open_requested_checkpoint(wanted, bare, Axis("world"))
