"""Hugging Face folders that are damaged, incomplete, of older habits; and folders that are written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.rewrite import CastSource
from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.families import hf, hf_export
from megatron.core.families.registry import FAMILIES
from megatron.core.models.parameter_names import OUTPUT, WORD_EMBEDDING
from megatron.core.parallel.boxes import Box, whole_box
from tests.unit.families.made import GPT2, LLAMA, Made, same_tensors

QKV = "model.decoder.layers.1.self_attention.linear_qkv.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder of three files."""
    hf_export.export_hf_folder(Made(LLAMA), tmp_path / "llama", shard_bytes=8000)
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) == 3
    return tmp_path / "llama"


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes one out."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a safetensors file."""
    tensors = safetensors.torch.load(path.read_bytes())
    change(tensors)
    path.write_bytes(
        safetensors.torch.save({name: value.contiguous() for name, value in tensors.items()}, metadata={"format": "pt"})
    )


@pytest.mark.parametrize("settings", [LLAMA, GPT2, {**LLAMA, "untie_embeddings_and_output_weights": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_what_is_read(settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    source = Made(settings, dtype)
    hf_export.export_hf_folder(source, tmp_path / "out")
    found = hf.open_hf_folder(tmp_path / "out")
    same_tensors(found, source)
    assert model_config_from_settings(found.settings) == model_config_from_settings(
        {**settings, "init_method_std": 0.02, "hidden_dropout": found.settings["hidden_dropout"]}
    )


def test_boxes_of_a_parameter_are_parts_of_the_whole(llama: Path) -> None:
    source = hf.open_hf_folder(llama)
    tensor = source.read(QKV, whole_box((32, 16)))
    for box in (Box((3, 0), (7, 16)), Box((14, 4), (10, 5)), Box((31, 15), (1, 1))):
        assert torch.equal(source.read(QKV, box), tensor[box.slices()])


def test_only_one_whole_tensor_is_in_memory_while_a_folder_is_written(tmp_path: Path) -> None:
    source = Made(LLAMA)
    hf_export.export_hf_folder(CastSource(source, torch.bfloat16), tmp_path / "out")
    assert source.most == 0, f"{source.most} tensors were still held when the next was read"


def test_a_tokenizer_with_fewer_ids_takes_the_first_rows_and_one_with_more_is_refused(llama: Path) -> None:
    source, full = hf.open_hf_folder(llama, {"true_vocab_size": 17}), hf.open_hf_folder(llama)
    for name in (f"model.{WORD_EMBEDDING}", f"model.{OUTPUT}"):
        assert source.formats[name].shape == (17, 16) and source.settings["true_vocab_size"] == 17
        assert torch.equal(source.read(name, whole_box((17, 16))), full.read(name, Box((0, 0), (17, 16))))
    with pytest.raises(CheckpointError, match="the tokenizer has 21 ids, and the embedding 20 rows"):
        hf.open_hf_folder(llama, {"true_vocab_size": 21})


@pytest.mark.parametrize(
    "change, complaint",
    [
        (
            lambda path: (path / "model-00002-of-00003.safetensors").unlink(),
            "model-00002-of-00003.safetensors is missing",
        ),
        (lambda path: (path / "model-00002-of-00003.safetensors").write_bytes(b"short"), "cut short or no safetensors"),
        (lambda path: os.truncate(path / "model-00003-of-00003.safetensors", 3000), "cut short: it has 3000 bytes"),
        (
            lambda path: shutil.copy(
                path / "model-00001-of-00003.safetensors", path / "model-00002-of-00003.safetensors"
            ),
            "model-00002-of-00003.safetensors lacks",
        ),
        (lambda path: (path / "model.safetensors.index.json").write_text("{"), "index.json cannot be read"),
        (lambda path: edit(path / "model.safetensors.index.json", weight_map={}), "has no weight_map"),
        (
            lambda path: edit(path / "model.safetensors.index.json", weight_map={"a": "../up.safetensors"}),
            "outside its folder: ../up",
        ),
        (lambda path: (path / "model.safetensors.index.json").unlink(), "it has neither model.safetensors nor"),
        (lambda path: (path / "config.json").unlink(), "config.json cannot be read: No such file"),
        (lambda path: (path / "config.json").write_text("[1]"), "it holds a list, not an object"),
        (
            lambda path: edit(path / "config.json", architectures=["OPTForCausalLM"]),
            "OPTForCausalLM, which is not known",
        ),
        (
            lambda path: edit(path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
            "are quantised .gptq.",
        ),
        (
            lambda path: edit(path / "config.json", intermediate_size=25),
            r"gate_proj.weight has shape \[24, 16\], and the config says \[25",
        ),
        (
            lambda path: edit(path / "config.json", num_hidden_layers=3),
            "model.layers.2.self_attn.q_proj.weight is missing",
        ),
        (
            lambda path: edit(path / "config.json", num_hidden_layers=1),
            "model.layers.1.self_attn.q_proj.weight is unknown",
        ),
        (lambda path: edit(path / "config.json", num_hidden_layers=9_000), "too few for 9000 layers"),
        (
            lambda path: edit(path / "config.json", num_hidden_layers=2_000_000_000),
            "2000000000 are more than any network has",
        ),
        (
            lambda path: edit(path / "config.json", hidden_size=1 << 62, intermediate_size=1 << 62),
            "beyond any tensor|has shape",
        ),
        (
            lambda path: edit(path / "config.json", tie_word_embeddings=True),
            "lm_head.weight differs from the embedding",
        ),
    ],
)
def test_a_folder_that_is_damaged_or_contradicts_itself_is_refused_with_the_reason(
    llama: Path, change: Any, complaint: str
) -> None:
    change(llama)
    with pytest.raises(CheckpointError, match=complaint):
        hf.open_hf_folder(llama)


@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling", "text_config", "vision_config"])
def test_a_section_of_a_config_that_is_no_object_is_refused_by_every_family(section: str, tmp_path: Path) -> None:
    for family in FAMILIES.values():
        config = {"model_type": family.model_type, "architectures": [family.architecture], section: "wide"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=f"config.json: {section}: 'wide' is not an object"):
            hf.open_hf_folder(tmp_path)


def test_all_problems_are_listed_at_once(llama: Path) -> None:
    edit(llama / "config.json", hidden_act="relu", logit_scale=3.0)
    (llama / "model-00001-of-00003.safetensors").unlink()
    os.truncate(llama / "model-00003-of-00003.safetensors", 50)
    with pytest.raises(CheckpointError) as raised:
        hf.open_hf_folder(llama)
    assert len(raised.value.problems) == 4, raised.value


def one_file(folder: Path, settings: dict[str, Any]) -> Path:
    """A folder of one file."""
    hf_export.export_hf_folder(Made(settings), folder)
    return folder / "model.safetensors"


def test_tensors_that_are_quantised_of_no_use_or_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.o_proj.weight"] = tensors["model.layers.0.self_attn.o_proj.weight"].to(
            torch.int8
        )
        tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].double()
        tensors["model.layers.0.self_attn.o_proj.weight_scale"] = torch.ones(1)

    rewrite(one_file(tmp_path / "a", LLAMA), change)
    with pytest.raises(CheckpointError) as raised:
        hf.open_hf_folder(tmp_path / "a")
    text = str(raised.value)
    assert "o_proj.weight holds int8, quantised" in text and "o_proj.weight_scale is unknown" in text
    rewrite(
        one_file(tmp_path / "b", LLAMA),
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.q_proj.weight": tensors["model.layers.0.self_attn.q_proj.weight"].double()}
        ),
    )
    with pytest.raises(CheckpointError, match="k_proj.weight.* differ in dtype"):
        hf.open_hf_folder(tmp_path / "b")


def test_files_saved_without_the_head_with_masks_and_copies_are_read(tmp_path: Path) -> None:
    """As the published GPT-2 is: no `transformer.`, causal masks as buffers; and a tied head that is stored twice."""
    source = Made(GPT2)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
        tensors["h.0.attn.masked_bias"], tensors["lm_head.weight"] = torch.tensor(-1e4), tensors["wte.weight"].clone()

    rewrite(one_file(tmp_path / "gpt2", GPT2), change)
    same_tensors(hf.open_hf_folder(tmp_path / "gpt2"), source)


@pytest.mark.parametrize("old", [False, True])
def test_folders_with_pytorch_model_bin_are_read(tmp_path: Path, old: bool) -> None:
    path = one_file(tmp_path / "llama", LLAMA)
    tensors = safetensors.torch.load(path.read_bytes())
    torch.save(tensors, path.with_name("pytorch_model.bin"), _use_new_zipfile_serialization=not old)
    path.unlink()
    same_tensors(hf.open_hf_folder(tmp_path / "llama"), Made(LLAMA))
    (tmp_path / "llama" / "pytorch_model.bin").write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match="pytorch_model.bin cannot be read"):
        hf.open_hf_folder(tmp_path / "llama")


def test_a_folder_of_a_published_model_is_told_from_a_checkpoint_of_ours(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps({"world_size": 1, "values": {}}))
    assert (
        hf.is_hf_checkpoint(llama)
        and not hf.is_hf_checkpoint(tmp_path / "ours")
        and not hf.is_hf_checkpoint(tmp_path / "none")
    )


def test_checkpoint_args_are_the_flags_of_the_model_and_its_tokenizer(llama: Path) -> None:
    found = hf.hf_model_settings(llama)
    assert {name: found[name] for name in ("num_layers", "num_query_groups", "swiglu", "normalization")} == {
        "num_layers": 2,
        "num_query_groups": 2,
        "swiglu": True,
        "normalization": "RMSNorm",
    }
    assert not {"true_vocab_size", "hidden_dropout", "attention_dropout", "tokenizer_type"} & found.keys()
    (llama / "tokenizer.json").write_text("{}")
    assert hf.hf_model_settings(llama)["tokenizer_type"] == "HuggingFaceTokenizer"
    assert hf.hf_model_settings(llama)["tokenizer_model"] == str(llama)


def test_a_folder_that_is_there_is_left_alone(llama: Path) -> None:
    before = {path.name: path.read_bytes() for path in llama.iterdir()}
    with pytest.raises(CheckpointError, match="is there already"):
        hf_export.export_hf_folder(Made(GPT2), llama)
    assert {path.name: path.read_bytes() for path in llama.iterdir()} == before


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def full(*arguments: Any) -> int:
        if next(calls) == 5:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        hf_export.export_hf_folder(Made(LLAMA), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_gets_its_name_last_when_all_of_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda handle: (events.append(("sync", os.readlink(f"/proc/self/fd/{handle}"))), sync(handle))
    )
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(("rename", str(new))), rename(old, new)))
    hf_export.export_hf_folder(Made(LLAMA), tmp_path / "out", shard_bytes=8000)
    place = events.index(("rename", str(tmp_path / "out")))
    synced = {Path(path).name for kind, path in events[:place] if kind == "sync"}
    assert synced >= {path.name for path in (tmp_path / "out").iterdir()} | {".out.unfinished"}
    assert events[place + 1 :] == [("sync", str(tmp_path))]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, content, place: real(handle, content[:7], place))
    hf_export.export_hf_folder(Made(GPT2), tmp_path / "out")
    monkeypatch.undo()
    same_tensors(hf.open_hf_folder(tmp_path / "out"), Made(GPT2))


def test_a_source_that_is_not_the_network_of_its_settings_is_refused(tmp_path: Path) -> None:
    source = Made(LLAMA)
    source.formats["model.decoder.final_layernorm.weight"] = ShapeAndDtype((3,), torch.float32)
    source.formats["model.extra"] = source.formats.pop(QKV)
    with pytest.raises(CheckpointError) as raised:
        hf_export.export_hf_folder(source, tmp_path / "out")
    assert len(raised.value.problems) == 3 and not (tmp_path / "out").exists()


def test_weights_change_their_dtype_when_asked_and_not_when_it_cannot_hold_them(tmp_path: Path) -> None:
    hf_export.export_hf_folder(CastSource(Made(LLAMA), torch.bfloat16), tmp_path / "half")
    found, expected = hf.open_hf_folder(tmp_path / "half"), Made(LLAMA)
    box = whole_box((32, 16))
    assert torch.equal(found.read(QKV, box), expected.read(QKV, box).bfloat16())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rewrite(one_file(tmp_path / "large", LLAMA), lambda tensors: tensors["model.norm.weight"].fill_(7e4))
    with pytest.raises(CheckpointError, match="final_layernorm.weight has values that float16 cannot hold"):
        hf_export.export_hf_folder(CastSource(hf.open_hf_folder(tmp_path / "large"), torch.float16), tmp_path / "out")


def test_keys_of_a_folder_of_the_same_class_and_another_model_type_are_kept(llama: Path, tmp_path: Path) -> None:
    kept = {"model_type": "kimi_k2", "eos_token_id": 7, "pretraining_tp": 2, "auto_map": {"AutoConfig": "there.Config"}}
    edit(llama / "config.json", **kept)
    hf_export.export_hf_folder(Made(LLAMA), tmp_path / "out", like=llama)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: config.get(name) for name in kept} == kept and config.keys() >= json.loads(
        (llama / "config.json").read_text()
    ).keys()


def test_files_of_the_tokenizer_and_ids_of_tokens_come_from_the_folder_that_is_like_it(
    llama: Path, tmp_path: Path
) -> None:
    edit(llama / "config.json", eos_token_id=7, rope_theta=5.0)
    for name in ("tokenizer.json", "generation_config.json", "training_args.bin"):
        (llama / name).write_text(f"content of {name}")
    hf_export.export_hf_folder(Made({**LLAMA, "ffn_hidden_size": 40}), tmp_path / "out", like=llama)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["intermediate_size"], config["rope_theta"]) == (7, 40, 10000.0)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "content of tokenizer.json"
    assert (tmp_path / "out" / "generation_config.json").exists() and not (
        tmp_path / "out" / "training_args.bin"
    ).exists()
