"""Every field of PEFT's LoraConfig: what PEFT computes after reloading a folder is computed here, or the folder is refused by the field's name."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.adapters import peft
from megatron.adapters.files import LinearLoraWeights, LoadedAdapter, planned_adapters
from megatron.adapters.peft_config import _HARMLESS, CONFIG
from megatron.adapters.peft_export import write_peft_folder
from megatron.cli.commands.checkpoint import adapter as tool
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families import hf
from megatron.core.parallel.spec import param_spec_of
from megatron.training.checkpoint.adapters import open_adapters
from megatron.training.state.trainer import Trainer
from tests.unit.adapters.test_peft import (
    GPT2,
    LATENT,
    SIZES,
    SPARSE,
    VOCABULARY,
    adapted,
    close,
    edited,
    ids,
    logits_of,
    ours,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
theirs = pytest.importorskip("peft", reason="peft is not installed; the extra `dev` brings it")

HEADS = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
TIED, BIASED = {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
NEMOTRON = {
    **SIZES,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 8,
    "chunk_size": 16,
    "layers_block_type": ["mamba", "attention", "mlp"],
}
NEMOTRON_EXPERTS = {
    "layers_block_type": ["mamba", "attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
}
del NEMOTRON["num_hidden_layers"]
DELTA_NET = {
    **SIZES,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "initializer_range": 0.05,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHARED = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
OSS = {**SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
# family: (class, sizes, endings of linear layers that PEFT adapts, flags of ours that leave out what PEFT does not adapt)
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    "llama": ("Llama", SIZES, ["q_proj", "v_proj", "down_proj"], []),
    "gpt2": ("GPT2", GPT2, ["c_attn", "c_proj"], []),
    "qwen2, tied": ("Qwen2", {**SIZES, **TIED}, ["q_proj", "v_proj", "down_proj"], []),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16}, ["q_proj", "v_proj", "down_proj"], []),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}, ["q_proj", "v_proj"], []),
    "qwen2_moe": ("Qwen2Moe", {**SIZES, **SHARED}, ["q_proj", "shared_expert.up_proj"], []),
    "qwen3_moe": ("Qwen3Moe", SPARSE, ["q_proj", "v_proj"], []),
    "deepseek_v3": ("DeepseekV3", LATENT, ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"], []),
    "gpt_oss": ("GptOss", OSS, ["q_proj", "o_proj"], []),
    "nemotron_h": ("NemotronH", NEMOTRON, ["in_proj", "q_proj", "up_proj"], ["*in_proj", "linear_qkv", "linear_fc1"]),
    "nemotron_h, experts": (
        "NemotronH", {**NEMOTRON, **NEMOTRON_EXPERTS}, ["in_proj", "v_proj"], ["*in_proj", "linear_qkv", "linear_fc1", "linear_fc2"],
    ),
    "qwen3_next": ("Qwen3Next", {**DELTA_NET, **SHARED}, ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"], []),
    "qwen3_5": ("Qwen3_5", DELTA_NET, ["q_proj", "in_proj_qkv", "in_proj_b", "out_proj", "up_proj"], []),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA_NET, **SHARED}, ["q_proj", "in_proj_qkv", "out_proj"], []),
    "falcon_h1": ("FalconH1", {**SIZES, **MAMBA, "head_dim": 8, "mamba_d_ssm": 64}, ["in_proj", "q_proj"], ["*in_proj", "linear_qkv"]),
    "mamba2": (
        "Mamba2",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 16,
         "n_groups": 2, "chunk_size": 16, "initializer_range": 0.2},
        ["in_proj"],
        ["*in_proj"],
    ),
    "bamba": ("Bamba", {**SIZES, **MAMBA, "attn_layer_indices": [1]}, ["in_proj", "q_proj", "out_proj"], []),
}  # fmt: skip


def saved_base(family: str, folder: Path, **changes: Any) -> Path:
    """A random network of a family in a folder."""
    kind, sizes = FAMILIES[family][:2]
    torch.manual_seed(11)
    config = getattr(transformers, f"{kind}TextConfig" if kind.startswith("Qwen3_5") else f"{kind}Config")
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    getattr(transformers, head)(config(**{**sizes, **changes})).save_pretrained(folder)
    return folder


def loaded_by_peft(base: Path, folder: Path) -> Tensor:
    """Logits after PEFT has reloaded a folder on a fresh base, [2, 16, v]."""
    with torch.no_grad():
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        return theirs.PeftModel.from_pretrained(plain, folder).eval()(ids()).logits


def differs_from_peft(base: Path, folder: Path, settings: Mapping[str, Any], tolerance: float = 1e-5) -> str:
    """Save an adapter with these fields; "" if ours equals PEFT's reload, the refusal if it is refused, "peft: ..." if PEFT cannot."""
    try:
        adapted(transformers.AutoModelForCausalLM.from_pretrained(base), folder, **settings)
        expected = loaded_by_peft(base, folder)
    except Exception as error:
        return f"peft: {error}"
    try:
        with torch.no_grad():
            found = logits_of(ours(base, "--adapter", str(folder)))
    except (ConfigError, CheckpointError) as error:
        return str(error)
    close(found, expected, tolerance)
    return ""


# Fields by themselves on a Llama, and whether they are read ("") or by which word they are refused.
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "r": ({"r": 3}, ""),
    "lora_alpha": ({"lora_alpha": 5}, ""),
    "lora_dropout": ({"lora_dropout": 0.1}, ""),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, ""),
    "bias all": ({"bias": "all"}, ""),
    "bias lora_only": ({"bias": "lora_only"}, ""),
    "bias of a part": ({"bias": "lora_only", "target_modules": ["q_proj"]}, "q_proj.bias"),
    "use_rslora": ({"use_rslora": True}, ""),
    "use_dora": ({"use_dora": True}, ""),
    "modules_to_save": ({"modules_to_save": ["lm_head", "norm"]}, ""),
    "an embedding": ({"modules_to_save": ["embed_tokens"]}, ""),
    "a fused matrix": ({"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}, ""),
    "a fused matrix with biases": ({"target_modules": ["q_proj"], "modules_to_save": ["mlp"], "bias": "all"}, ""),
    "gaussian": ({"init_lora_weights": "gaussian"}, ""),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, ""),
    "random": ({"init_lora_weights": False}, ""),
    "mica": ({"init_lora_weights": "mica"}, ""),
    "eva": ({"init_lora_weights": "eva"}, ""),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa took a part out of the base"),
    "pissa_niter": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: pissa_niter_4 took a part"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights: olora took a part out of the base"),
    "layers_to_transform": ({"layers_to_transform": [1]}, ""),
    "layers_pattern": ({"layers_to_transform": 0, "layers_pattern": ["blocks", "layers"]}, ""),
    "rank_pattern": ({"rank_pattern": {"v_proj": 2, r"layers\.1\..*o_proj": 5}}, ""),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 3, r".*\.0\.self_attn\.k_proj": 9}}, ""),
    "own rank": ({"rank_pattern": {"v_proj": 2}, "use_rslora": True}, ""),
    "exclude_modules": ({"exclude_modules": ["v_proj", "layers.1.self_attn.o_proj"]}, ""),
    "an excluding regex": ({"exclude_modules": r".*\.1\..*k_proj"}, ""),
    "all-linear": ({"target_modules": "all-linear"}, ""),
    "a regex": ({"target_modules": r".*\.(q|v|down)_proj"}, ""),
    "full names": ({"target_modules": ["model.layers.0.self_attn.q_proj", "o_proj"]}, ""),
    "lora_bias": ({"lora_bias": True}, "lora_bias: True"),
    "trainable_token_indices": ({"trainable_token_indices": [1, 3]}, "trainable_token_indices: [1, 3]"),
    "ensure_weight_tying": ({"ensure_weight_tying": True}, ""),
    "target_parameters": ({"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]}, ""),
    "the output layer": (
        {"target_modules": ["q_proj", "lm_head"]},
        "adapts output_layer, which has no adapter in a run",
    ),
    "an adapted embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
    "alora_invocation_tokens": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: [1]"),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication: [[0, 2], [1, 2]]"),
    "velora_config": ({"velora_config": {}}, "velora_config: {"),
}
QUICK = {
    "r",
    "bias of a part",
    "bias lora_only",
    "a fused matrix",
    "pissa",
    "layers_to_transform",
    "own rank",
    "target_parameters",
}


def nightly_unless(quick: set[str], names: Any) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.mark.parametrize("field", nightly_unless(QUICK, FIELDS))
def test_a_field_is_read_as_peft_reads_it_or_refused_by_name(field: str, tmp_path: Path) -> None:
    settings, words = FIELDS[field]
    base = saved_base("llama", tmp_path / "base", **BIASED)
    result = differs_from_peft(base, tmp_path / "adapter", {**HEADS, **settings})
    assert words in result and (words or not result), result


@pytest.mark.nightly
def test_pairs_of_fields_are_read_as_peft_reads_them_or_refused_by_name(tmp_path: Path) -> None:
    base, refused, counts = saved_base("llama", tmp_path / "base", **BIASED), [], {"equal": 0, "refused": 0, "peft": 0}
    for number, (one, other) in enumerate(itertools.combinations(FIELDS, 2)):
        settings = {**HEADS, **FIELDS[one][0], **FIELDS[other][0]}
        result = differs_from_peft(base, tmp_path / str(number), settings)
        counts["equal" if not result else "peft" if result.startswith("peft: ") else "refused"] += 1
        expected = FIELDS[one][1] or FIELDS[other][1] or "it is one parameter here with"  # biases of one of q, k, v
        if (
            result
            and not result.startswith("peft: ")
            and not (FIELDS[one][1] or FIELDS[other][1] or expected in result)
        ):
            refused.append(f"{one} and {other}: {result}")
    assert not refused and counts["equal"] > 300, (counts, refused)


@pytest.mark.parametrize("family", nightly_unless({"qwen3_5_moe", "nemotron_h, experts"}, FAMILIES))
def test_an_adapter_of_every_family_goes_both_ways(family: str, tmp_path: Path) -> None:
    base, targets, flags = saved_base(family, tmp_path / "base"), *FAMILIES[family][2:]
    result = differs_from_peft(base, tmp_path / "theirs", {"target_modules": targets, "alpha_pattern": {targets[0]: 9}})
    assert not result, result
    trainer = ours(base, "--lora-rank", "3", "--lora-alpha", "5", *(["--lora-targets", *flags] if flags else []))
    with torch.no_grad():
        for name, param in trainer.stages[0].named_parameters():
            if name.endswith(("lora_A", "lora_B")):
                param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name))))
    write_peft_folder(adapters_of(trainer), tmp_path / "ours", base=str(base))
    expected = logits_of(trainer)
    close(loaded_by_peft(base, tmp_path / "ours"), expected, 1e-5)
    close(logits_of(ours(base, "--adapter", str(tmp_path / "ours"))), expected, 1e-5)


def adapters_of(trainer: Trainer) -> LoadedAdapter:
    """The adapters of a run, as its checkpoint would hold them."""
    model = trainer.run.config.model
    tensors = {param_spec_of(param).name: param.detach() for param in trainer.stages[0].parameters()}
    pairs = []
    for linear, part, rows, scale in planned_adapters(model):
        first, second = (tensors[f"{linear}.adapter.pairs.{part or 'whole'}.lora_{one}"] for one in "AB")
        pairs.append(LinearLoraWeights(linear, part, rows, first, second, scale))
    return LoadedAdapter("a run", model, tuple(pairs), {}, {})


EXPERTS_IN_PEFT = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@pytest.mark.parametrize(
    "family", nightly_unless({"gpt_oss"}, ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen2_moe"))
)
def test_experts_of_pefts_are_read(family: str, tmp_path: Path) -> None:
    base = saved_base(family, tmp_path / "base")
    query = "q_a_proj" if family == "deepseek_v3" else "q_proj"
    settings = {**EXPERTS_IN_PEFT, "target_modules": [query], "rank_pattern": {r".*experts\.down_proj": 2}}
    assert not (result := differs_from_peft(base, tmp_path / "adapter", settings)), result


@pytest.mark.parametrize(
    "family", nightly_unless({"mixtral"}, ("mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "qwen3_next"))
)
def test_all_linear_layers_of_a_network_with_experts_can_be_merged(family: str, tmp_path: Path) -> None:
    """PEFT adapts routers and gates of shared experts, too, for which a run has no adapters."""
    base, folder = saved_base(family, tmp_path / "base"), tmp_path / "adapter"
    result = differs_from_peft(base, folder, {"target_modules": "all-linear"})
    assert "has no adapter in a run or a server here; merge it into its base" in result
    tool.main(["merge", "--base", str(base), "--adapter", str(folder), "--save", str(tmp_path / "merged")])
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        close(merged(ids()).logits, loaded_by_peft(base, folder), 2e-5)


@pytest.mark.nightly
def test_an_adapter_of_the_output_layer_can_be_merged(tmp_path: Path) -> None:
    base, folder = saved_base("llama", tmp_path / "base"), tmp_path / "adapter"
    assert "merge it" in differs_from_peft(base, folder, {"target_modules": ["q_proj", "lm_head"]})
    tool.main(["merge", "--base", str(base), "--adapter", str(folder), "--save", str(tmp_path / "merged")])
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        close(merged(ids()).logits, loaded_by_peft(base, folder), 1e-5)


def read(base: Path, folder: Path) -> LoadedAdapter:
    return open_adapters(folder, model_config_from_settings(hf.open_hf_folder(base).settings))


def test_adapters_of_single_experts_are_those_that_transformers_4_had(tmp_path: Path) -> None:
    """A folder with a module for each expert: PEFT joins them when it loads it into transformers 5, and so does this project."""
    base, folder = saved_base("mixtral", tmp_path / "base"), tmp_path / "adapter"
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer, expert, (name, rows, columns) in itertools.product(
        range(2), range(4), (("w1", 48, 32), ("w2", 32, 48), ("w3", 48, 32))
    ):
        prefix = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(3, columns, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 3, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / peft.WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["w1", "w2", "w3"],
    }
    (folder / CONFIG).write_text(json.dumps(config))
    trainer = ours(base, "--adapter", str(folder))
    expected = loaded_by_peft(base, folder)
    close(logits_of(trainer), expected, 1e-5)
    write_peft_folder(read(base, folder), tmp_path / "out")
    close(loaded_by_peft(base, tmp_path / "out"), expected, 1e-5)


SQUARE = {**SPARSE, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    "version, transposed",
    [("0.18.1", True), ("0.17", True), ("0.19.0", True), ("0.19.1", False), ("0.21.2", False), (None, None)],
)
def test_square_experts_are_read_in_the_layout_of_the_version_that_saved_them(
    version: str | None, transposed: bool | None, tmp_path: Path
) -> None:
    """Before 0.19.1 PEFT computed the change of parameter [e, m, n] as einsum("o r e, e r i -> e i o") with i of size m and o of size n."""
    base, folder = saved_base("qwen3_moe", tmp_path / "base", moe_intermediate_size=32), tmp_path / "adapter"
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted(model, folder, target_modules=[], target_parameters=["experts.down_proj"])
    edited(folder, {"peft_version": version})
    if transposed is None:
        with pytest.raises(CheckpointError, match="peft_version"):
            read(base, folder)
        return
    pair, tensors = read(base, folder).pairs[0], load_file(folder / peft.WEIGHTS)
    a, b = (tensors[f"base_model.model.model.layers.0.mlp.experts.lora_{one}.weight"] for one in "AB")
    a, b = a.reshape(4, 4, 32), b.reshape(32, 4, 4)
    expected = torch.einsum("ore,eri->eio" if transposed else "ore,eri->eoi", b, a)
    close(pair.second @ pair.first, expected, 1e-6)


def test_tied_embeddings_are_untied_by_peft_and_refused(tmp_path: Path) -> None:
    base = saved_base("qwen2, tied", tmp_path / "base")
    save = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    assert "modules_to_save unties embedding" in differs_from_peft(base, tmp_path / "apart", save)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    made = adapted(
        model, tmp_path / "tied", **save, ensure_weight_tying=True
    )  # a folder that PEFT 0.21 itself cannot reload
    with torch.no_grad():
        close(logits_of(ours(base, "--adapter", str(tmp_path / "tied"))), made(ids()).logits, 1e-5)
    head = differs_from_peft(base, tmp_path / "head", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    assert "modules_to_save unties embedding" in head
    trainer = ours(base, "--lora-rank", "2", "--lora-modules-to-save", "embedding.*")
    with torch.no_grad():
        dict(trainer.stages[0].named_parameters())["embedding.word_embeddings.weight"].mul_(1.5)
    values = dict(trainer.stages[0].named_parameters())["embedding.word_embeddings.weight"].detach()[:VOCABULARY]
    saved = dataclasses.replace(adapters_of(trainer), saved={"embedding.word_embeddings.weight": values})
    write_peft_folder(saved, tmp_path / "ours")
    close(loaded_by_peft(base, tmp_path / "ours"), logits_of(trainer), 1e-5)


def test_a_folder_with_rows_for_added_tokens_is_refused(tmp_path: Path) -> None:
    base, grown = saved_base("llama", tmp_path / "base"), transformers.AutoModelForCausalLM
    model = grown.from_pretrained(base)
    model.resize_token_embeddings(VOCABULARY + 3)
    adapted(model, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    with pytest.raises(ConfigError, match=f"for {VOCABULARY + 3} tokens, and .* has {VOCABULARY}: tokens were added"):
        ours(base, "--adapter", str(tmp_path / "adapter"))
    with pytest.raises(SystemExit, match="tokens were added"):
        tool.main(
            ["merge", "--base", str(base), "--adapter", str(tmp_path / "adapter"), "--save", str(tmp_path / "merged")]
        )


# Keys that are written into a config by hand, and by which words they are refused; None: they change nothing.
EDITS: list[tuple[dict[str, Any], str | None]] = [
    *(({name: value}, f"{name}: ") for name, value in {
        "use_qalora": True, "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 2}, "kasa_config": {"beta": 1e-4}, "lora_bias": True,
        "monteclora_config": {"n": 2}, "megatron_config": {"num_layers": 2}, "layer_replication": [[0, 1]], "never_seen": 3,
        "r": 10**400, "lora_alpha": float("nan"), "lora_dropout": 1.0, "rank_pattern": {"q_proj": 0}, "alpha_pattern": {"q_proj": float("inf")},
        "target_parameters": [3], "modules_to_save": [{}], "exclude_modules": 3, "layers_to_transform": "1", "use_rslora": "yes", "bias": [],
        "peft_type": None, "task_type": "NONE", "init_lora_weights": "unheard of", "base_model_name_or_path": "a\0b", "peft_version": 3,
    }.items()),
    *(({"init_lora_weights": value}, f"init_lora_weights: {value} took a part") for value in ("corda", "loftq", "lora_ga", "PiSSA")),
    ({"alpha_pattern": {"([a-z0-9_.]+)+!": 3}}, "more than .* seconds"),
    ({"rank_pattern": {"(": 3}}, "not a regular expression"),
    ({"target_modules": "((a{1,9999}){1,9999}){1,9999}!|(.*q_proj"}, "not a regular expression"),
    *(({name: value}, None) for name, value in {
        "auto_mapping": {"a": 1}, "revision": "main", "inference_mode": False, "fan_in_fan_out": True, "megatron_core": "megatron.core",
        "qalora_group_size": 32, "runtime_config": {"a": 1}, "loftq_config": {"a": 1}, "eva_config": {"rho": 2.0}, "corda_config": {"a": 1},
        "lora_ga_config": {"a": 1}, "lora_bias": False, "never_seen": None, "layer_replication": None,
    }.items()),
]  # fmt: skip


def test_every_key_of_a_config_is_read_harmless_or_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.config.flags.bounded_regex._SECONDS", 0.5)
    base, folder = saved_base("llama", tmp_path / "base"), tmp_path / "adapter"
    adapted(transformers.AutoModelForCausalLM.from_pretrained(base), folder, target_modules=["q_proj"])
    text, model = (folder / CONFIG).read_text(), model_config_from_settings(hf.open_hf_folder(base).settings)
    for keys, words in EDITS:
        edited(folder, keys)
        if words is None:
            open_adapters(folder, model)
        else:
            with pytest.raises(CheckpointError, match=words):
                open_adapters(folder, model)
        (folder / CONFIG).write_text(text)
    known = {field.name for field in dataclasses.fields(theirs.LoraConfig)}
    assert known >= _HARMLESS.keys() - {"runtime_config"} and len(known) >= 40


def make_pipe(path: Path) -> None:
    """Put a named pipe in the place of a file."""
    path.unlink()
    os.mkfifo(path)


FILES: dict[str, Any] = {
    "a pipe": make_pipe,
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "nothing": lambda path: path.unlink(),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "a hole": lambda path: os.truncate(path, 1 << 40),
    "lists in lists": lambda path: path.write_text("[" * 100_000),
    "a long number": lambda path: path.write_text('{"r": ' + "9" * 5000 + "}"),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 8),
}


@pytest.mark.parametrize("name", [CONFIG, peft.WEIGHTS])
def test_a_file_that_is_none_is_refused_in_time(name: str, tmp_path: Path) -> None:
    base, folder = saved_base("llama", tmp_path / "base"), tmp_path / "adapter"
    adapted(transformers.AutoModelForCausalLM.from_pretrained(base), folder, target_modules=["q_proj"])
    content, model = (folder / name).read_bytes(), model_config_from_settings(hf.open_hf_folder(base).settings)
    for damage in FILES.values():
        damage(folder / name)
        with pytest.raises(CheckpointError):
            open_adapters(folder, model)
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)
    (folder / peft.WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="adapter_model.bin, PEFT's older form"):
        open_adapters(folder, model)


def set_one(tensors: dict[str, Tensor], *, name: str, value: float) -> None:
    """Set one element of a tensor."""
    tensors[name].view(-1)[3] = value


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    base, folder = saved_base("llama", tmp_path / "base"), tmp_path / "adapter"
    adapted(transformers.AutoModelForCausalLM.from_pretrained(base), folder, target_modules=["q_proj"])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    for value in (float("nan"), float("inf")):
        edited(folder, {}, partial(set_one, name=name, value=value))
        with pytest.raises(CheckpointError, match="lora_B.weight holds numbers that are not finite"):
            read(base, folder)
    edited(folder, {}, lambda tensors: tensors.update({name: torch.ones(32, 4, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match="is of type I8"):
        read(base, folder)


VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    10**400,
    1e38,
    float("nan"),
    float("inf"),
    "",
    "x" * 5000,
    "(" * 50,
    [],
    [[]],
    [None],
    {},
    {"a": {}},
    "\ud800",
]


@pytest.mark.parametrize("rounds", [40, pytest.param(2000, marks=pytest.mark.nightly)])
def test_whatever_a_folder_holds_it_is_read_or_refused(rounds: int, tmp_path: Path) -> None:
    base, folder = saved_base("llama", tmp_path / "base"), tmp_path / "adapter"
    adapted(
        transformers.AutoModelForCausalLM.from_pretrained(base),
        folder,
        target_modules=["q_proj", "v_proj"],
        use_dora=True,
    )
    text, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / peft.WEIGHTS)
    model, draw = model_config_from_settings(hf.open_hf_folder(base).settings), random.Random(7)
    for number in range(rounds):
        config, values = dict(text), dict(tensors)
        for _ in range(draw.randint(0, 2)):
            config[draw.choice([*config, "strange"])] = draw.choice(VALUES)
        for _ in range(draw.randint(0, 2)):
            name = draw.choice(list(values))
            old = values.pop(name)
            change = draw.choice(("gone", "longer", "flat", "type", "wild", "name"))
            if change != "gone":
                values[name.replace("0", draw.choice(("1", "77", "")), 1) if change == "name" else name] = {
                    "longer": torch.cat([old, old]), "flat": old.flatten(), "type": old.to(torch.float16), "wild": old * 1e38, "name": old,
                }[change].contiguous()  # fmt: skip
        (folder / CONFIG).write_text(json.dumps(config))
        save_file({name: value.clone() for name, value in values.items()}, folder / peft.WEIGHTS)
        try:
            open_adapters(folder, model)
        except CheckpointError:
            continue
        assert values.keys() == tensors.keys(), (number, config)
