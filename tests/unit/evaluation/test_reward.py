"""Reward models: exported for transformers, read back, and asked for scores."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.commands import score_with_reward_model as tool
from megatron.cli.commands.checkpoint import adapter
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.evaluation.reward_model import RewardModel, _hf_padding_id
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.checkpoint.export import export_hf_with_tokenizer
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.checkpoint.inference_model import GPT, load_network
from megatron.training.state.trainer import Trainer, build_trainer
from tests.helpers import tiny

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
}
FAMILIES = {
    "llama": {**LLAMA, "untie_embeddings_and_output_weights": True},
    "llama tied": LLAMA,
    "gpt2": {"openai_gelu": True},
}
TEXTS = ["2 + 2 = 4", "2 + 2 = 5", "", "a longer text, of forty bytes, I suppose"]


def trainer_of(folder: Path, **changes: Any) -> Trainer:
    """A network with random weights, of bytes, that is saved into a folder."""
    sizes = {"seq_length": 64, "max_position_embeddings": 64}
    config = tiny.config(save=str(folder), tokenizer_type="ByteTokenizer", **sizes, **changes)
    model = dataclasses.replace(config.model, padded_vocab_size=None).with_vocabulary(257, 1)
    run = dataclasses.replace(tiny.run_of(dataclasses.replace(config, model=model)), tokenizer=ByteTokenizer())
    return build_trainer(run, tiny.gpt, tiny.forward_step)


def saved(folder: Path, **changes: Any) -> str:
    """A checkpoint of such a network."""
    Checkpointer(trainer_of(folder, **changes)).save()
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_scores_that_we_give(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    run = saved(tmp_path / "run", reward_head=True, **FAMILIES[family])
    scores = RewardModel.load(run).score(TEXTS)
    export_hf_with_tokenizer(open_checkpoint(run), tmp_path / "hf")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification") and theirs.config.num_labels == 1
    for text, mine in zip(TEXTS, scores, strict=True):
        ids = torch.tensor([[*text.encode(), 256]])
        assert float(theirs(input_ids=ids).logits) == pytest.approx(mine, abs=1e-5)
    again = RewardModel.load(str(tmp_path / "hf"), tokenizer={"tokenizer_type": "ByteTokenizer"})
    assert again.score(TEXTS) == pytest.approx(scores, abs=1e-6)
    # As TRL writes what it trains with a tokenizer that fills up with the end of text.
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "pad_token_id": 256}))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    _hf_padding_id.cache_clear()
    again = RewardModel.load(str(tmp_path / "hf"), tokenizer={"tokenizer_type": "ByteTokenizer"})
    for text, mine in zip(TEXTS, again.score(TEXTS), strict=True):
        assert float(theirs(input_ids=torch.tensor([[*text.encode(), 256]])).logits) == pytest.approx(mine, abs=1e-5)


def test_conversations_are_scored_by_their_template(tmp_path: Path) -> None:
    model = RewardModel.load(saved(tmp_path / "run", reward_head=True, **LLAMA), template="chatml")
    talk = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
    (score,) = model.score([talk])
    stage = model.loaded.stages[0]
    ids = "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n".encode()
    assert score == pytest.approx(float(stage(ids=torch.tensor([list(ids)]))[0, -1]), abs=1e-6)  # type: ignore[index]


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_a_reward_model_are_merged_into_the_language_model_that_they_began_with(
    tied: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    shape = {**LLAMA, "untie_embeddings_and_output_weights": not tied}
    base = saved(tmp_path / "base", **shape)
    lora = {"lora_rank": 2, "lora_targets": ("all-linear",), "lora_modules_to_save": ("score.weight",)}
    trainer = trainer_of(tmp_path / "run", reward_head=True, pretrained_checkpoint=base, **shape, **lora)
    Checkpointer(trainer).resume()
    for name, param in trainer.stages[0].named_parameters():
        if param.requires_grad:
            param.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    Checkpointer(trainer).save()
    arguments = ["--adapter", str(tmp_path / "run"), "--base", base, "--save", str(tmp_path / "merged")]
    adapter.main(["merge", *arguments])
    with pytest.raises(CheckpointError, match="holds adapters without their network; merge them into it"):
        RewardModel.load(str(tmp_path / "run"))
    names = open_checkpoint(str(tmp_path / "merged")).formats
    assert "model.score.weight" in names and not any("output_layer" in name for name in names)
    stage = trainer.stages[0].eval()
    expected = [float(stage(ids=torch.tensor([[*text.encode(), 256]]))[0, -1].detach()) for text in TEXTS]  # type: ignore[index]
    assert RewardModel.load(str(tmp_path / "merged")).score(TEXTS) == pytest.approx(expected, abs=1e-5)
    adapter.main(["export", "--adapter", str(tmp_path / "run"), "--save", str(tmp_path / "peft")])
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"]) == ("SEQ_CLS", ["score"])
    adapter.main(["merge", "--adapter", str(tmp_path / "peft"), *arguments[2:5], str(tmp_path / "from-peft")])
    assert RewardModel.load(str(tmp_path / "from-peft")).score(TEXTS) == pytest.approx(expected, abs=1e-5)
    peft = pytest.importorskip("peft", reason="peft is not installed")
    export_hf_with_tokenizer(open_checkpoint(base), tmp_path / "hf")
    network = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", num_labels=1)
    theirs = peft.PeftModel.from_pretrained(network, tmp_path / "peft")
    found = [float(theirs(input_ids=torch.tensor([[*text.encode(), 256]])).logits) for text in TEXTS]
    assert found == pytest.approx(expected, abs=1e-5)
    with pytest.raises(SystemExit, match="holds adapters of another base"):
        adapter.main(
            ["merge", *arguments[:3], saved(tmp_path / "other", seed=8, **shape), "--save", str(tmp_path / "no")]
        )


def test_a_language_model_gives_no_scores_and_a_reward_model_no_texts(tmp_path: Path) -> None:
    reward = saved(tmp_path / "reward", reward_head=True)
    language = saved(tmp_path / "language")
    with pytest.raises(CheckpointError, match="a language model, which gives no scores"):
        RewardModel.load(language)
    with pytest.raises(CheckpointError, match="a reward model, which scores texts"):
        load_network(reward, GPT)


def test_the_tool_adds_scores_to_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved(tmp_path / "reward", reward_head=True)
    lines = [
        {"text": "a", "id": 7},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tool.main(["--load", run, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")])
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    a, ab, ac = RewardModel.load(run).score(["a", "ab", "ac"])
    assert found[0] == {**lines[0], "score": pytest.approx(a)} and found[1]["score"] == pytest.approx(ab)
    assert found[2]["chosen_score"] == pytest.approx(ab) and found[2]["rejected_score"] == pytest.approx(ac)
    assert f"of 1 pairs, {int(ab > ac)} have the chosen answer above" in capsys.readouterr().out
    (tmp_path / "in.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(SystemExit, match="line 1"):
        tool.main(["--load", run, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")])
