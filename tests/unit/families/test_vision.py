"""Encoders of images and language models that read them: the outputs of transformers', and folders both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron.core.config.plan.layers import network_layer_plans, partition_into_stages
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families import hf, hf_export
from megatron.core.families.registry import FAMILIES
from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.models.embedding import IdsWithImages
from megatron.core.models.on_meta import NETWORKS
from megatron.core.models.vision import ImageEmbedder
from megatron.core.parallel.boxes import whole_box
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import param_spec_of
from megatron.core.transformer.context.layer_build_context import LayerBuildContext

TOLERANCE = 1e-5  # of the largest value
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
WIDE = {**SIZES, "intermediate_size": 48}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
IMAGE = 60  # the id of an image token


def clip() -> transformers.PreTrainedModel:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**WIDE))


def siglip() -> transformers.PreTrainedModel:
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**WIDE))


def internvit_300m() -> transformers.PreTrainedModel:
    return transformers.InternVLVisionModel(transformers.InternVLVisionConfig(**WIDE, attention_bias=True))


def internvit_6b() -> transformers.PreTrainedModel:
    config = transformers.InternVLVisionConfig(**WIDE, use_qk_norm=True, norm_type="rms_norm", attention_bias=False)
    return transformers.InternVLVisionModel(config)


def dinov2() -> transformers.PreTrainedModel:
    return transformers.Dinov2Model(transformers.Dinov2Config(**SIZES, mlp_ratio=2))


def vit() -> transformers.PreTrainedModel:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**WIDE, num_labels=5))


def llava_clip() -> transformers.PreTrainedModel:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**WIDE),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config)


def llava_siglip() -> transformers.PreTrainedModel:
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**WIDE, vision_use_head=False),
        text_config=transformers.Qwen2Config(**TEXT, tie_word_embeddings=True),
        image_token_index=IMAGE,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return transformers.LlavaForConditionalGeneration(config)


def internvl() -> transformers.PreTrainedModel:
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**WIDE, attention_bias=True),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return transformers.InternVLForConditionalGeneration(config)


def smolvlm_of(kind: str) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(
        vision_config={**WIDE, "model_type": f"{kind.lower()}_vision"},
        text_config=transformers.LlamaConfig(**TEXT, tie_word_embeddings=kind == "Idefics3"),
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=kind == "Idefics3",
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def smolvlm() -> transformers.PreTrainedModel:
    return smolvlm_of("SmolVLM")


def idefics3_tied() -> transformers.PreTrainedModel:
    return smolvlm_of("Idefics3")


ENCODERS = [clip, siglip, internvit_300m, internvit_6b, dinov2, vit]
READERS = [llava_clip, llava_siglip, internvl, smolvlm, idefics3_tied]


def with_random_weights(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same model, where no parameter is what another could be taken for."""
    torch.manual_seed(3)
    for name, param in model.named_parameters():
        param.data.normal_(0.0, 0.3)
        if "norm" in name and name.endswith("weight"):
            param.data.add_(1.0)
    return model.eval()


def network(source: CheckpointSource, **changes: Any) -> nn.Module:
    """Our network with the weights of a source. changes: of its settings."""
    model = model_config_from_settings({**source.settings, **changes})
    model, mesh = replace(model, padded_vocab_size=model.true_vocab_size), Mesh.single_process()
    (stage,) = partition_into_stages(network_layer_plans(model), pp=1)
    kernels = select_kernels(KernelRequirements(device="cpu", dtype=torch.float32), {})
    build = LayerBuildContext(model=model, mesh=mesh, kernels=kernels, streams=RandomStreams.build(mesh, 1))
    made = NETWORKS[model.architecture.name](stage, build).materialize(1)
    for param in made.parameters():
        spec = param_spec_of(param)
        param.data.copy_(source.read(f"model.{spec.name}", whole_box(spec.shape)))
    return made.eval()


def saved(make: Callable[[], transformers.PreTrainedModel], folder: Path) -> transformers.PreTrainedModel:
    """A model with random weights, which is then in the folder too."""
    model = with_random_weights(make())
    model.save_pretrained(folder)
    return model


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((a - b).detach().abs().max() / a.detach().abs().max())


def features(model: nn.Module, images: Tensor) -> Tensor:
    """The output of our encoder for every token, [b, tokens, h]."""
    return model.vision_model(images).transpose(0, 1)  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("make", ENCODERS, ids=lambda make: make.__name__)
def test_an_encoder_gives_the_features_of_transformers(
    make: Callable[[], transformers.PreTrainedModel], tmp_path: Path
) -> None:
    model = saved(make, tmp_path / "theirs")
    ours, images = network(hf.open_hf_folder(tmp_path / "theirs")), torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        output = model(pixel_values=images)
        if make is vit:
            assert distance(output.logits, ours(images=images)) < TOLERANCE
        elif make is clip:  # whose norm of the output is applied to the class token only
            assert distance(output.pooler_output, features(ours, images)[:, 0]) < TOLERANCE
        else:
            assert distance(output.last_hidden_state, features(ours, images)) < TOLERANCE


@pytest.mark.parametrize("make", ENCODERS, ids=lambda make: make.__name__)
def test_an_exported_encoder_is_the_one_that_was_read(
    make: Callable[[], transformers.PreTrainedModel], tmp_path: Path
) -> None:
    model = saved(make, tmp_path / "theirs")
    hf_export.export_hf_folder(hf.open_hf_folder(tmp_path / "theirs"), tmp_path / "back")
    again, problems = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert {name for name in problems["missing_keys"] if "mask_token" not in name} == set()
    theirs, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    assert [name for name in theirs if not name.startswith("head.") and "mask_token" not in name] == [
        name for name in theirs if name in back and torch.equal(theirs[name], back[name])
    ]
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "back")]
    assert {**configs[0], "vision_use_head": None} == {**configs[1], "vision_use_head": None}


@pytest.mark.parametrize("make", [dinov2, internvit_300m], ids=lambda make: make.__name__)
def test_positions_are_interpolated_to_another_size_as_in_transformers(
    make: Callable[[], transformers.PreTrainedModel], tmp_path: Path
) -> None:
    model = saved(make, tmp_path)
    ours = network(hf.open_hf_folder(tmp_path, {"img_h": 42, "img_w": 35}), img_h=42, img_w=35)
    images = torch.randn(2, 3, 42, 35)
    with torch.no_grad():
        assert distance(model(pixel_values=images).last_hidden_state, features(ours, images)) < TOLERANCE


def prompt(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, labels as transformers takes them, and slots, of two texts with an image each. [2, 30]"""
    torch.manual_seed(4)
    ids, slots = torch.randint(0, IMAGE, (2, 30)), torch.full((2, 30), -1)
    for text, start in enumerate((3, 7)):
        ids[text, start : start + rows] = IMAGE
        slots[text, start : start + rows] = text * rows + torch.arange(rows)
    return ids, ids.masked_fill(ids == IMAGE, -100), slots


def as_given(make: Callable[[], transformers.PreTrainedModel], images: Tensor) -> Tensor:
    """Images as a class takes them: SmolVLM [texts, images, c, h, w], the others [images, c, h, w]."""
    return images[:, None] if make in (smolvlm, idefics3_tied) else images


@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_a_whole_network_gives_the_logits_loss_and_gradients_of_transformers(
    make: Callable[[], transformers.PreTrainedModel], tmp_path: Path
) -> None:
    model = saved(make, tmp_path / "theirs")
    ours = network(hf.open_hf_folder(tmp_path / "theirs"))
    ids, labels, slots = prompt(ours.build.model.vision.num_image_embeddings)  # type: ignore[union-attr]
    images = torch.randn(2, 3, 28, 28)
    output = model(input_ids=ids, pixel_values=as_given(make, images), labels=labels)
    given = {"ids": IdsWithImages(ids.masked_fill(slots >= 0, 0), images, slots)}
    assert distance(output.logits, ours(**given).transpose(0, 1)) < TOLERANCE
    targets = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    losses = ours(**given, labels=targets.clamp(min=-1))
    loss = losses[targets >= 0].mean()
    assert loss.item() == pytest.approx(output.loss.item(), rel=TOLERANCE)
    loss.backward()
    output.loss.backward()
    for param in model.parameters():  # their gradients, as a folder of their names
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    model.save_pretrained(tmp_path / "gradients")
    gradients = hf.open_hf_folder(tmp_path / "gradients")
    for param in ours.parameters():
        spec = param_spec_of(param)
        theirs = gradients.read(f"model.{spec.name}", whole_box(spec.shape))
        own = torch.zeros_like(theirs) if param.grad is None else param.grad
        assert float((theirs - own).abs().max()) <= 2 * TOLERANCE * max(float(theirs.abs().max()), 1e-3), spec.name


def _demand_gradients_without_images(ours: nn.Module) -> None:
    """A text without images trains the language model alone, and every other parameter has a gradient of zeros."""
    ids, labels, _ = prompt(1)
    given = IdsWithImages(ids.clamp(max=IMAGE - 1), torch.zeros(0, 3, 28, 28), torch.full_like(ids, -1))
    ours.zero_grad()
    ours(ids=given, labels=labels.clamp(min=0)).mean().backward()
    for name, param in ours.named_parameters():
        assert param.grad is not None, f"{name} has no gradient; ranks that sum it would wait for this one"
        assert bool(param.grad.any()) != name.startswith("image"), name


def test_a_rank_without_images_gives_every_parameter_a_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(llava_clip, tmp_path)
    ours = network(hf.open_hf_folder(tmp_path))
    _demand_gradients_without_images(ours)
    monkeypatch.setattr(ImageEmbedder, "forward", lambda self, hidden, images, slots: hidden)
    with pytest.raises(AssertionError, match="has no gradient"):
        _demand_gradients_without_images(ours)


@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_an_exported_network_gives_the_same_logits(
    make: Callable[[], transformers.PreTrainedModel], tmp_path: Path
) -> None:
    model = saved(make, tmp_path / "theirs")
    folder = hf.open_hf_folder(tmp_path / "theirs")
    ids, _, _ = prompt(model_config_from_settings(folder.settings).vision.num_image_embeddings)
    images = as_given(make, torch.randn(2, 3, 28, 28))
    hf_export.export_hf_folder(folder, tmp_path / "back")
    again, problems = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not problems["missing_keys"] and not problems["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(
            model(input_ids=ids, pixel_values=images).logits, again.eval()(input_ids=ids, pixel_values=images).logits
        )


def of_early_transformers_4(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def of_late_transformers_4(name: str) -> str:
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return f"model.{name.replace('language_model.model.', 'language_model.')}"


@pytest.mark.parametrize("respell", [of_early_transformers_4, of_late_transformers_4])
def test_names_of_transformers_4_are_read(respell: Callable[[str], str], tmp_path: Path) -> None:
    saved(llava_clip, tmp_path)
    today = network(hf.open_hf_folder(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({respell(name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    earlier = network(hf.open_hf_folder(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(today.parameters(), earlier.parameters(), strict=True))


def test_a_class_token_that_there_is_not_cannot_be_dropped(tmp_path: Path) -> None:
    saved(llava_siglip, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_feature_select_strategy": "default"}))
    with pytest.raises(CheckpointError, match="vision_feature_select_strategy: 'default' has no counterpart here"):
        hf.open_hf_folder(tmp_path)


def test_sizes_that_llava_leaves_out_are_those_of_transformers() -> None:
    settings, problems = FAMILIES["llava"].settings_from_config(
        {
            "image_token_index": 32000,
            "model_type": "llava",
            "projector_hidden_act": "gelu",
            "text_config": {
                "max_position_embeddings": 4096,
                "model_type": "llama",
                "rms_norm_eps": 1e-05,
                "vocab_size": 32064,
            },
            "vision_config": {**WIDE, "hidden_size": 64, "model_type": "clip_vision_model", "projection_dim": 768},
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        }
    )
    assert not problems
    assert (settings["hidden_size"], settings["num_layers"], settings["vision_num_layers"]) == (4096, 32, 2)


def test_a_config_as_smolvlm_is_published_is_read_with_what_it_leaves_out() -> None:
    settings, problems = FAMILIES["idefics3"].settings_from_config(
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "image_token_id": 49190,
            "model_type": "idefics3",
            "scale_factor": 4,
            "text_config": {
                "_flash_attn_2_enabled": True,
                "architectures": ["VLlama3ForCausalLM"],
                "head_dim": 64,
                "hidden_size": 576,
                "intermediate_size": 1536,
                "is_llama_config": True,
                "max_position_embeddings": 8192,
                "model_type": "llama",
                "neftune_noise_alpha": 0.0,
                "num_attention_heads": 9,
                "num_hidden_layers": 30,
                "num_key_value_heads": 3,
                "pad_token_id": 2,
                "perceiver_config": {"hidden_act": "silu"},
                "pixel_shuffle_factor": 4,
                "qk_layer_norms": False,
                "rms_norm_eps": 1e-05,
                "rope_interleaved": False,
                "rope_theta": 100000,
                "use_resampler": False,
                "vocab_size": 49280,
            },
            "tie_word_embeddings": False,
            "vision_config": {
                "hidden_size": 768,
                "image_size": 512,
                "max_image_size": {"longest_edge": 512},
                "model_type": "idefics3",
                "num_attention_heads": 12,
                "patch_size": 16,
                "size": {"longest_edge": 2048},
                "tie_word_embeddings": False,
                "use_base_siglip": False,
            },
            "vocab_size": 49280,
        }
    )
    assert not problems
    model = model_config_from_settings(settings)
    assert (model.vision.num_image_embeddings, model.vision.vision_num_layers, model.vision.vision_ffn_hidden_size) == (
        64,
        12,
        3072,
    )
    assert (model.vision.vision_activation, model.num_layers, model.true_vocab_size) == ("gelu_tanh", 30, 49280)
    encoder, problems = FAMILIES["siglip"].settings_from_config({"model_type": "siglip_vision_model", **WIDE})
    assert not problems and encoder["vision_activation"] == "gelu_tanh"  # as transformers', where it is left out
