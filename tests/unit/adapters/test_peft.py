"""Adapters and PEFT: its folders load here and ours load there, with equal logits and gradients, and merge to the same weights."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron.adapters import peft
from megatron.adapters.files import LoadedAdapter, read_native_adapter_checkpoint
from megatron.adapters.peft_config import CONFIG
from megatron.adapters.peft_export import write_peft_folder
from megatron.adapters.saved import possible_base_model_names, source_base_hash
from megatron.cli.commands import check_config
from megatron.cli.commands.checkpoint import adapter as tool
from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.families import hf
from megatron.core.parallel.boxes import whole_box
from megatron.core.parallel.spec import param_spec_of
from megatron.training.checkpoint.adapters import open_adapters
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.flags import parse_args_or_raise, run_config_of_args
from tests.helpers.tiny import VOCABULARY
from tests.helpers.training import train_on

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
theirs = pytest.importorskip("peft", reason="peft is not installed; the extra `dev` brings it")

LENGTH = 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
SPARSE = {
    **SIZES,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
PATTERNS = {
    "target_modules": "all-linear",
    "rank_pattern": {"k_proj": 3, "layers.1.mlp.down_proj": 2},
    "alpha_pattern": {"v_proj": 5, "model.layers.0.self_attn.o_proj": 3},
}
EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
EXPERT_PATTERNS = {
    **EXPERTS,
    "rank_pattern": {"mlp.experts.down_proj": 2},
    "alpha_pattern": {
        r"layers\.1\.mlp\.experts\.gate_up_proj": 5,
        "mlp.experts": 90,
    },  # the last one matches no parameter
}
REGEXES = {
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "rank_pattern": {r"^model\.layers\.1\..*q_proj": 2, r".*\.0\.self_attn\.v_proj": 3},
    "alpha_pattern": {r"layers\.[01]\.mlp\.down_proj": 9},
}
# A network of transformers', and what PEFT adapts of it.
THEIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "all linear": ("Llama", SIZES, PATTERNS),
    "rslora, patterns": ("Llama", SIZES, {**PATTERNS, "use_rslora": True}),
    "dora, patterns": ("Llama", SIZES, {**PATTERNS, "use_dora": True}),
    "regexes in patterns": ("Llama", SIZES, REGEXES),
    "regex, rslora": ("Llama", SIZES, {"target_modules": r".*\.layers\.1\..*(q|down)_proj", "use_rslora": True}),
    "dora": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}, {"target_modules": "all-linear", "use_dora": True}),
    "whole parameters": ("Llama", SIZES, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "conv1d": ("GPT2", GPT2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "experts": ("Qwen3Moe", SPARSE, EXPERTS),
    "experts and attention": ("Qwen3Moe", SPARSE, {**EXPERTS, "target_modules": ["q_proj", "o_proj"]}),
    "experts, patterns": ("Qwen3Moe", SPARSE, EXPERT_PATTERNS),
    "one matrix of experts": ("Mixtral", {**SIZES, "num_local_experts": 4}, {**EXPERTS, "target_parameters": ["mlp.experts.down_proj"]}),
    "latent attention": (
        "DeepseekV3",
        LATENT,
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    ),
}  # fmt: skip
# The same the other way round: flags of ours.
OURS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "each projection": ("Llama", SIZES, ["--lora-targets", "all-linear", "k_proj=2:5", "layers.1.mlp.linear_fc2=3"]),
    "fused": ("Llama", SIZES, ["--lora-targets", "linear_qkv", "linear_fc1=2", "--lora-rslora"]),
    "dora": ("Llama", SIZES, ["--dora"]),
    "whole parameters": ("Llama", SIZES, ["--lora-modules-to-save", "output_layer.*", "*final_layernorm*"]),
    "conv1d": ("GPT2", GPT2, ["--lora-targets", "linear_qkv", "linear_proj"]),
    "a part of a conv1d": ("GPT2", GPT2, ["--lora-targets", "q_proj", "v_proj=2:7"]),
    "experts": ("Qwen3Moe", SPARSE, ["--lora-targets", "q_proj", "linear_fc1", "linear_fc2"]),
    "experts of two ranks": ("Qwen3Moe", SPARSE, ["--lora-targets", "q_proj", "linear_fc1=2:3", "linear_fc2=3"]),
    "some layers of experts": ("Qwen3Moe", SPARSE, ["--lora-targets", "layers.1.mlp.experts.linear_fc2"]),
    "latent attention": ("DeepseekV3", LATENT, ["--lora-targets", "layers.*.self_attention.*"]),
}


def ids() -> Tensor:
    """Some ids, [2, 16]."""
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def published(kind: str, sizes: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random network of transformers', which is saved in the folder."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(11)
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**sizes)).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def adapted(model: nn.Module, folder: Path, **settings: Any) -> nn.Module:
    """The network with random adapters of PEFT's, which are saved in the folder."""
    config = theirs.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings})
    torch.manual_seed(5)  # some ways to begin draw
    made = theirs.get_peft_model(model, config)
    for name, param in made.named_parameters():
        if param.requires_grad:
            param.data = param.data * (1.0 + 0.3 * torch.rand_like(param)) + 0.1 * torch.randn_like(param) * (
                "magnitude" not in name
            )
    made.save_pretrained(folder)
    return made.eval()


def ours(base: Path, *more: str) -> Trainer:
    """A run from this base by its command line, with what it starts from loaded."""
    words = f"--use-checkpoint-args --pretrained-checkpoint {base} --seq-length {LENGTH} --micro-batch-size 2 --global-batch-size 2 "
    words += f"--train-iters 4 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --attention-dropout 0 "
    words += "--hidden-dropout 0 --num-workers 0"
    settings = json.loads((base / "config.json").read_text())
    biased = "n_routed_experts" in settings and "moe" in settings.get(
        "layers_block_type", ["moe"]
    )  # it would move what is frozen
    words += " --moe-router-bias-update-rate 0" if biased else ""
    config = tiny.with_vocabulary(run_config_of_args(parse_args_or_raise([*words.split(), *more]), 1), VOCABULARY)
    trainer = tiny.trainer_of(tiny.run_of(config))
    assert Checkpointer(trainer).resume()
    for stage in trainer.stages:
        stage.eval()
    return trainer


def logits_of(trainer: Trainer) -> Tensor:
    """[2, 16, v]."""
    return trainer.stages[0](ids=ids())[..., :VOCABULARY].transpose(0, 1)


def loss_of(logits: Tensor) -> Tensor:
    """Of each next id, []."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids()[:, 1:].flatten())


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within a tolerance relative to the largest."""
    worst = float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-30))
    assert worst < tolerance, worst


def gradients_as_peft(trainer: Trainer, folder: Path) -> dict[str, Tensor]:
    """The gradients of the adapters of ours by PEFT's names: a set of adapters whose factors are gradients is written."""
    params = {param_spec_of(param).name: param for param in trainer.stages[0].parameters() if param.requires_grad}
    gradients = dict(zip(params, torch.autograd.grad(loss_of(logits_of(trainer)), list(params.values())), strict=True))
    values = open_adapters(folder, trainer.run.config.model)

    def of(name: str, like: Tensor) -> Tensor:
        return gradients[name].reshape(like.shape)

    pairs = tuple(
        replace(
            pair,
            first=of(f"{pair.parameter_prefix}.lora_A", pair.first),
            second=of(f"{pair.parameter_prefix}.lora_B", pair.second),
            lengths=None if pair.lengths is None else of(f"{pair.parameter_prefix}.magnitude", pair.lengths),
        )
        for pair in values.pairs
    )
    saved = {name: gradients[name][: tensor.shape[0]] for name, tensor in values.saved.items()}
    write_peft_folder(LoadedAdapter("gradients", values.model, pairs, saved, {}), folder / "gradients")
    return load_file(folder / "gradients" / peft.WEIGHTS)


@pytest.mark.parametrize("case", THEIRS)
def test_an_adapter_of_pefts_loads_here(case: str, tmp_path: Path) -> None:
    kind, sizes, settings = THEIRS[case]
    model = adapted(published(kind, sizes, tmp_path / "base"), tmp_path / "adapter", **settings)
    trainer = ours(tmp_path / "base", "--adapter", str(tmp_path / "adapter"))
    expected = model(ids()).logits
    close(logits_of(trainer), expected, 1e-5)
    loss_of(expected).backward()
    found = gradients_as_peft(trainer, tmp_path / "adapter")
    known = {
        name.replace(".default", "").replace(".modules_to_save", ""): param.grad
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    known = {name.removesuffix(".weight") if "magnitude" in name else name: grad for name, grad in known.items()}
    assert found.keys() == known.keys()
    for name, gradient in known.items():
        close(found[name], gradient, 1e-4)
    with torch.no_grad(), model.disable_adapter():
        assert (model(ids()).logits - expected).abs().max() > 1e-3, "the adapter does nothing"


@pytest.mark.parametrize("case", OURS)
def test_an_adapter_of_ours_loads_in_peft(case: str, tmp_path: Path) -> None:
    kind, sizes, flags = OURS[case]
    published(kind, sizes, tmp_path / "base")
    run = ["--lora-rank", "4", "--lora-alpha", "6", *flags]
    trainer = ours(tmp_path / "base", *run, "--save", str(tmp_path / "run"))
    train_on(trainer, 2)
    Checkpointer(trainer).save()
    tool.main(["export", "--adapter", str(tmp_path / "run"), "--save", str(tmp_path / "out"), "--base", "some/name"])
    plain = getattr(transformers, "AutoModelForCausalLM").from_pretrained(tmp_path / "base")
    with torch.no_grad():
        close(before := plain(ids()).logits, logits_of(ours(tmp_path / "base")), 1e-5)
        model = theirs.PeftModel.from_pretrained(plain, tmp_path / "out").eval()
        loaded = {name: value for name, value in model.state_dict().items() if "lora_" in name}
        assert len(loaded) == len([name for name in load_file(tmp_path / "out" / peft.WEIGHTS) if "lora_" in name])
        close(model(ids()).logits, logits_of(trainer), 1e-5)
        assert (model(ids()).logits - before).abs().max() > 1e-4, "the adapter does nothing"
    again = ours(tmp_path / "base", "--adapter", str(tmp_path / "out"))
    close(logits_of(again), logits_of(trainer), 1e-6)
    own = ours(tmp_path / "base", "--adapter", str(tmp_path / "run"))
    assert torch.equal(logits_of(own), logits_of(trainer))


@pytest.mark.parametrize(
    "case",
    [
        "all linear", "dora", "conv1d", "whole parameters", "experts", "experts, patterns",
        *[pytest.param(case, marks=pytest.mark.nightly) for case in ("regex, rslora", "latent attention", "regexes in patterns")],
    ],
)  # fmt: skip
def test_merged_weights_are_pefts(case: str, tmp_path: Path) -> None:
    kind, sizes, settings = THEIRS[case]
    base, folder, out = tmp_path / "base", str(tmp_path / "adapter"), tmp_path / "merged"
    model = adapted(published(kind, sizes, base, torch.float64), tmp_path / "adapter", **settings)
    tool.main(["merge", "--base", str(base), "--adapter", folder, "--save", str(out)])
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    first, second = hf.open_hf_folder(out), hf.open_hf_folder(tmp_path / "theirs")
    assert first.formats == second.formats
    for name, one in first.formats.items():
        close(first.read(name, whole_box(one.shape)), second.read(name, whole_box(one.shape)), 1e-10)
    if case in ("dora", "whole parameters"):
        with pytest.raises(SystemExit, match="cannot be taken out"):
            tool.main(["unmerge", "--base", str(out), "--adapter", folder, "--save", str(tmp_path / "back")])
        return
    tool.main(["unmerge", "--base", str(out), "--adapter", folder, "--save", str(tmp_path / "back")])
    back, before = hf.open_hf_folder(tmp_path / "back"), hf.open_hf_folder(base)
    for name, one in before.formats.items():
        close(back.read(name, whole_box(one.shape)), before.read(name, whole_box(one.shape)), 1e-12)


def test_what_is_imported_is_a_checkpoint_of_a_run(tmp_path: Path) -> None:
    base, folder, run = tmp_path / "base", tmp_path / "adapter", tmp_path / "run"
    adapted(published("Llama", SIZES, base), folder, **PATTERNS)
    tool.main(["import", "--base", str(base), "--adapter", str(folder), "--save", str(run)])
    first, second = ours(base, "--adapter", str(run)), ours(base, "--adapter", str(folder))
    assert torch.equal(logits_of(first), logits_of(second))
    found = read_native_adapter_checkpoint(open_checkpoint(run))
    assert found.base["hash"] == source_base_hash(hf.open_hf_folder(base), found.model.adapter)
    published("Llama", {**SIZES, "initializer_range": 0.1}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="another base"):
        ours(tmp_path / "other", "--adapter", str(run))


def edited(
    folder: Path, config: Mapping[str, Any] | None = None, tensors: Callable[[dict[str, Tensor]], Any] | None = None
) -> None:
    """Change keys of a folder's config, and its tensors."""
    content = {**json.loads((folder / CONFIG).read_text()), **(config or {})}
    (folder / CONFIG).write_text(json.dumps(content))
    values = load_file(folder / peft.WEIGHTS)
    if tensors is not None:
        tensors(values)
    save_file(values, folder / peft.WEIGHTS)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    "config, tensors, words",
    [
        ({"peft_type": "IA3"}, None, "peft_type: 'IA3' has no counterpart here; 'LORA' has"),
        ({"lora_bias": True}, None, "lora_bias: True is not computed here"),
        ({"lora_alpha": None}, None, "lora_alpha: nothing is no number"),
        ({}, lambda values: values.pop(Q.format("B")), "q_proj has not both of lora_A and lora_B"),
        ({}, lambda values: values.update({Q.format("A"): torch.zeros(4, 16)}), "is of a matrix of 32 x 16, and this network has 32 x 32"),
        ({}, lambda values: values.update({Q.format("A"): torch.zeros(3, 32)}), "factors of different ranks, 3 and 4"),
        ({}, lambda values: values.update({Q.format("A").replace(".0.", ".7."): torch.zeros(4, 32)}), "layers.7.self_attn.q_proj"),
        ({}, lambda values: values.update({"base_model.model.score.weight": torch.zeros(2, 32)}), "score.weight is no parameter"),
        ({}, lambda values: values.clear(), "q_proj has no factors, and adapter_config.json names it"),
        ({"target_modules": []}, lambda values: values.clear(), "it adapts nothing"),
        ({"target_modules": ["v_proj"]}, None, "q_proj has factors, and adapter_config.json does not name it"),
        ({"r": 8}, None, "q_proj has rank 4, and adapter_config.json says 8"),
        ({"use_dora": True}, None, "q_proj has no lora_magnitude_vector, and use_dora is true"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused_by_one_sentence(
    config: dict[str, Any],
    tensors: Callable[[dict[str, Tensor]], Any] | None,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapted(published("Llama", SIZES, tmp_path / "base"), tmp_path / "adapter", target_modules=["q_proj"])
    edited(tmp_path / "adapter", config, tensors)
    with pytest.raises(ConfigError, match=words):
        ours(tmp_path / "base", "--adapter", str(tmp_path / "adapter"))
    assert words.partition(",")[0] in checked(tmp_path / "base", tmp_path / "adapter", capsys)


def checked(base: Path, adapter: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `megatron check-config` says of a run from this base, which it refuses."""
    words = f"--use-checkpoint-args --pretrained-checkpoint {base} --adapter {adapter} --seq-length 16 --micro-batch-size 1 "
    words += (
        "--global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 50"
    )
    with pytest.raises(SystemExit, match="2"):
        check_config.main(words.split())
    return capsys.readouterr().out


def test_adapters_of_ours_are_refused_by_a_base_of_another_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published("Llama", SIZES, tmp_path / "base")
    trainer = ours(tmp_path / "base", "--lora-rank", "4", "--save", str(tmp_path / "run"))
    Checkpointer(trainer).save()
    for other, words in (
        (
            {"intermediate_size": 64},
            "linear_fc1.adapter.pairs.gate is of a matrix of 48 x 32, and this network has 64 x 32",
        ),
        (
            {"num_hidden_layers": 1},
            "layers.1.self_attention.linear_qkv.adapter.pairs.q: this network has no such linear layer",
        ),
    ):
        folder = tmp_path / next(iter(other))
        published("Llama", {**SIZES, **other}, folder)
        with pytest.raises(ConfigError, match="adapters of another network"):
            ours(folder, "--adapter", str(tmp_path / "run"))
        assert words in checked(folder, tmp_path / "run", capsys)


def test_an_adapter_of_a_network_with_other_names_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published("Llama", SIZES, tmp_path / "base")
    adapted(published("GPT2", GPT2, tmp_path / "gpt2"), tmp_path / "adapter", target_modules=["c_attn"])
    with pytest.raises(ConfigError, match="is no adapter of this network"):
        ours(tmp_path / "base", "--adapter", str(tmp_path / "adapter"))
    words = "transformer.h.1.attn.c_attn is no linear layer of this network"
    assert words in checked(tmp_path / "base", tmp_path / "adapter", capsys)


def test_adapters_of_another_base_are_refused_by_hash_or_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    adapted(published("Llama", SIZES, tmp_path / "base"), tmp_path / "theirs", target_modules=["q_proj"])
    trainer = ours(tmp_path / "base", "--lora-rank", "4", "--save", str(tmp_path / "run"))
    Checkpointer(trainer).save()
    tool.main(["export", "--adapter", str(tmp_path / "run"), "--save", str(tmp_path / "out")])
    published("Llama", {**SIZES, "initializer_range": 0.1}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="another base.* hash"):
        ours(tmp_path / "other", "--adapter", str(tmp_path / "out"))
    edited(tmp_path / "theirs", {"base_model_name_or_path": "some/Base"})
    with caplog.at_level(logging.INFO):
        ours(tmp_path / "base", "--adapter", str(tmp_path / "theirs"))
    assert "trained on some/Base" in caplog.text
    words = f"trained on some/Base, and the base here is {tmp_path / 'other'}; give theirs"
    with pytest.raises(ConfigError, match=re.escape(words)):
        ours(tmp_path / "other", "--adapter", str(tmp_path / "theirs"))
    assert words in checked(tmp_path / "other", tmp_path / "theirs", capsys)
    for command in ("merge", "import"):
        flags = ["--adapter", str(tmp_path / "theirs"), "--save", str(tmp_path / command)]
        with pytest.raises(SystemExit, match=re.escape(words)):
            tool.main([command, *flags, "--base", str(tmp_path / "other")])
    edited(tmp_path / "theirs", {"base_model_name_or_path": str(tmp_path / "other")})  # as the message says
    ours(tmp_path / "other", "--adapter", str(tmp_path / "theirs"))


def test_a_base_is_called_as_its_folder_its_repository_or_its_config_says(tmp_path: Path) -> None:
    (tmp_path / "network").mkdir()
    (tmp_path / "network/config.json").write_text('{"_name_or_path": "meta-llama/Llama-3.1-8B"}')
    (tmp_path / "link").symlink_to(tmp_path / "network")
    assert possible_base_model_names(str(tmp_path / "link")) == {"link", "network", "llama-3.1-8b"}
    for where in (
        "meta-llama/Llama-3.1-8B",
        "/data/Llama-3.1-8B/",
        "hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f",
    ):
        assert possible_base_model_names(where) == {"llama-3.1-8b"}
    assert (
        possible_base_model_names("runs/lora/base/iter_0000150")
        == possible_base_model_names("runs/lora/base")
        == possible_base_model_names("Base/best")
        == {"base"}
    )
    assert possible_base_model_names("/best") == set()  # which names nothing, so that it contradicts nothing


def test_flags_that_contradict_an_adapter_are_refused_and_those_that_repeat_it_are_not(tmp_path: Path) -> None:
    adapted(published("Llama", SIZES, tmp_path / "base"), tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    start = ["--adapter", str(tmp_path / "adapter")]
    trainer = ours(
        tmp_path / "base", *start, "--lora-rank", "4", "--lora-targets", "q_proj", "v_proj", "--lora-dropout", "0.1"
    )
    assert trainer.run.config.model.adapter.lora_dropout == 0.1 and trainer.run.config.model.adapter.lora_alpha == 6.0
    for flags in (["--lora-rank", "8"], ["--lora-targets", "k_proj"], ["--dora"], ["--lora-rslora"]):
        with pytest.raises(Exception, match=f"{flags[0]}: --adapter .* says otherwise"):
            ours(tmp_path / "base", *start, *flags)
    assert math.isfinite(loss_of(logits_of(trainer)).item())
