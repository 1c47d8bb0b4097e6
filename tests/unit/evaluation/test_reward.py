"""Reward models: exported for transformers, read back, and asked for scores."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.evaluation.reward import RewardModel
from megatron.tools import score as tool
from megatron.training.checkpoint.checkpointing import Checkpoint
from megatron.training.checkpoint.export import export
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.checkpoint.inference_model import GPT, load_network
from megatron.training.trainer import build_trainer
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


def saved(folder: Path, **changes: Any) -> str:
    """A checkpoint of a network with random weights, of bytes."""
    sizes = {"seq_length": 64, "max_position_embeddings": 64}
    config = tiny.config(save=str(folder), tokenizer_type="ByteTokenizer", **sizes, **changes)
    model = dataclasses.replace(config.model, padded_vocab_size=None).with_vocabulary(257, 1)
    run = dataclasses.replace(tiny.run_of(dataclasses.replace(config, model=model)), tokenizer=ByteTokenizer())
    Checkpoint(build_trainer(run, tiny.gpt, tiny.forward_step)).save()
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_scores_that_we_give(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    run = saved(tmp_path / "run", reward_head=True, **FAMILIES[family])
    scores = RewardModel.load(run).score(TEXTS)
    export(open_checkpoint(run), tmp_path / "hf")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification") and theirs.config.num_labels == 1
    for text, mine in zip(TEXTS, scores, strict=True):
        ids = torch.tensor([[*text.encode(), 256]])
        assert float(theirs(input_ids=ids).logits) == pytest.approx(mine, abs=1e-5)
    again = RewardModel.load(str(tmp_path / "hf"), tokenizer={"tokenizer_type": "ByteTokenizer"})
    assert again.score(TEXTS) == pytest.approx(scores, abs=1e-6)


def test_conversations_are_scored_by_their_template(tmp_path: Path) -> None:
    model = RewardModel.load(saved(tmp_path / "run", reward_head=True, **LLAMA), template="chatml")
    talk = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
    (score,) = model.score([talk])
    stage = model.loaded.stages[0]
    ids = "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n".encode()
    assert score == pytest.approx(float(stage(ids=torch.tensor([list(ids)]))[0, -1]), abs=1e-6)  # type: ignore[index]


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
