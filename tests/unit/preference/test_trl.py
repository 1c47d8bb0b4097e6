"""Whole trainers beside TRL's: two steps on a random Llama give the same weights."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.samplers import collate
from megatron.core.tokenizers.base import Tokenizer
from megatron.preference.data import ReferenceScoredBatches
from megatron.preference.dataset import PreferenceDataset, PreferenceRowSource
from megatron.preference.rows import PreferenceRowParser, parse_preference_rows
from megatron.preference.settings import PreferenceConfig
from megatron.preference.step import PreferenceStep
from megatron.training.state.batch import Batch
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer, build_trainer
from tests.helpers import tiny
from tests.helpers.preference import BASE
from tests.unit.preference.test_training import LLAMA

trl = pytest.importorskip("trl", reason="trl is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
published = pytest.importorskip("tests.parity.test_published", reason="transformers is not installed")

RATE = 0.2  # of plain gradient descent, which shows the size of gradients, too
WORDS = 49  # of the tokenizer, whose last id ends texts; the network has one more
# Of each test: our settings, TRL's trainer with its own, and what its rows are.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "sigmoid": ({}, "DPO", {"loss_type": ["sigmoid"]}),
    "robust": ({"preference_label_smoothing": 0.2}, "DPO", {"loss_type": ["robust"], "label_smoothing": 0.2}),
    "hinge": ({}, "DPO", {"loss_type": ["hinge"]}),
    "ipo": ({}, "DPO", {"loss_type": ["ipo"]}),
    "apo_zero": ({}, "DPO", {"loss_type": ["apo_zero"]}),
    "simpo": ({"preference_margin": 0.5}, "CPO", {"loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.0}),
    "orpo": ({}, "ORPO", {}),
    "kto": (
        {"finetune_task": "kto", "kto_desirable_weight": 1.25, "kto_undesirable_weight": 0.75},
        "KTO",
        {"desirable_weight": 1.25, "undesirable_weight": 0.75},
    ),
    "reward": ({"finetune_task": "reward", "reward_centre": 0.05}, "Reward", {"center_rewards_coefficient": 0.05}),
}
DEFAULT = ("sigmoid", "kto")


class Words(Tokenizer):
    """A tokenizer of numbers, for our reader."""

    eod = WORDS

    def tokenize(self, text: str) -> list[int]:
        """Ids."""
        return [int(word) for word in text.split()]

    def id_to_token(self, token: int) -> str:
        """Its number."""
        return str(token)


def theirs() -> Any:
    """The same tokenizer for TRL. What fills up a row is an id that no text ends with: reward models look for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, **{str(number): number for number in range(1, WORDS)}, "<eos>": WORDS}
    made = Tokenizer(models.WordLevel(words, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def rows(number: int, task: str) -> list[dict[str, Any]]:
    """Rows of a task, with answers of very uneven lengths."""
    random = np.random.default_rng(3)

    def text(low: int, high: int) -> str:
        return " ".join(map(str, random.integers(1, WORDS, random.integers(low, high))))

    pairs = [(text(1, 4), " " + text(1, 7), " " + text(1, 7)) for _ in range(number)]
    if task == "kto":
        return [
            {"prompt": prompt, "completion": answer, "label": bool(place % 4)}
            for place, (prompt, answer, _) in enumerate(pairs)
        ]
    if task == "reward":
        return [
            {"chosen": prompt + chosen, "rejected": prompt + rejected, "margin": 0.25 * place}
            for place, (prompt, chosen, rejected) in enumerate(pairs)
        ]
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in pairs]


def our_batches(given: list[dict[str, Any]], task: Any) -> Iterator[Batch]:
    """Global batches of 4 rows, a row a sample.

    Of kto each batch is a file of its own, and backwards: a prompt gets the answer of the row behind it, and in TRL of the row before.
    """
    for first in range(0, len(given), 4):
        lines = [json.dumps(row).encode() for row in given[first : first + 4][:: -1 if task == "kto" else 1]]
        read, dropped = parse_preference_rows(lines, PreferenceRowParser(Words(), "chatml", task))  # type: ignore[arg-type]
        assert not dropped
        source = PreferenceRowSource("rows", tuple(read))
        samples = [
            PreferenceDataset(
                source, range(place, place + 1), length=32, num_samples=None, seed=0, split="train", task=task
            )[0]
            for place in range(len(read))
        ]
        yield Batch.from_arrays(collate(samples), torch.device("cpu"), positions=True)


def by_their_names(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Our weights as transformers names them, of a reward model too."""
    ours = published.weights(trainer)
    if "score.weight" not in ours:
        return published.as_llama(ours)
    named = published.as_llama({**ours, "output_layer.weight": ours["embedding.word_embeddings.weight"]})
    del named["lm_head.weight"]
    return {**named, "score.weight": ours["score.weight"]}


def their_network(trainer: Trainer, task: str) -> Any:
    """A network of transformers' with our weights."""
    network = published.llama()
    if task == "reward":
        network.config.num_labels, network.config.pad_token_id = 1, 0
        network = transformers.LlamaForSequenceClassification(network.config)
    network.load_state_dict({name: value.clone() for name, value in by_their_names(trainer).items()})
    return network


def their_trainer(kind: str, settings: dict[str, Any], given: list[dict[str, Any]], **networks: Any) -> Any:
    """A trainer of TRL's, which takes the rows in their order. networks: `model`, and `ref_model` where it takes one."""
    import datasets  # which TRL brings

    where = trl
    if kind in ("CPO", "ORPO"):
        where = importlib.import_module(f"trl.experimental.{kind.lower()}")
    config = getattr(where, f"{kind}Config")(
        per_device_train_batch_size=4,
        max_steps=2,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=0.0,
        optim="sgd",
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        **({} if kind == "Reward" else {"beta": 0.3}),
        **({"train_sampling_strategy": "sequential"} if kind == "KTO" else {}),
        **settings,
    )
    made = getattr(where, f"{kind}Trainer")(
        args=config, train_dataset=datasets.Dataset.from_list(given), processing_class=theirs(), **networks
    )
    made._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(range(len(given)))
    if (
        kind == "ORPO"
    ):  # whose cross entropy counts the prompt too; the paper's is of the answer, as the log-probabilities are
        forward = made.concatenated_forward
        made.concatenated_forward = lambda *words: (*(parts := forward(*words))[:4], -parts[0].mean())
    return made


# Our name -> TRL's, of pairs and judged answers, and of reward models.
LOGGED = {"chosen reward": "rewards/chosen", "rejected reward": "rewards/rejected"}
LOGGED_OF_PAIRS = {**LOGGED, "reward margin": "rewards/margins", "preference accuracy": "rewards/accuracies"}
LOGGED_OF_SCORES = {"reward margin": "margin", "preference accuracy": "accuracy"}


def compare_logs(case: str, steps: list[Any], theirs: list[dict[str, Any]]) -> None:
    """What both log of rewards. Of ipo TRL 1 logs sums, and we the means that its loss compares, as TRL 0 did."""
    names = {"kto": LOGGED, "reward": LOGGED_OF_SCORES, "ipo": {}}.get(case, LOGGED_OF_PAIRS)
    for step, line in zip(steps, [line for line in theirs if "loss" in line], strict=True):
        for ours, name in names.items():
            total, count = step.losses[ours].tolist()
            # Where policy and reference agree TRL counts what rounding says, and we one half.
            assert total / count == pytest.approx(float(line[name]), abs=2e-5), (ours, total / count, line)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in DEFAULT else [pytest.mark.nightly]) for case in CASES]
)
def test_two_steps_give_trls_weights(case: str, tmp_path: Path) -> None:
    ours, kind, settings = CASES[case]
    task = ours.get("finetune_task", "dpo")
    config = PreferenceConfig(
        **{"preference_beta": 0.3, "preference_loss": case if task == "dpo" else "sigmoid", **ours}
    )
    changes = {
        **BASE, **LLAMA, "fp64": False, "global_batch_size": 4, "micro_batch_size": 4, "clip_grad": 0.0, "weight_decay": 0.0,
        "lr": RATE, "lr_decay_style": "constant", "num_query_groups": 4, "optimizer": "sgd", "sgd_momentum": 0.0,
        "reward_head": task == "reward",
    }  # fmt: skip
    trainer = build_trainer(tiny.run_of(tiny.config(**changes)), tiny.gpt, PreferenceStep(config))
    before = build_trainer(tiny.run_of(tiny.config(**changes, seed=99)), tiny.gpt, PreferenceStep(config))
    networks = {"model": their_network(trainer, task)}
    if config.has_reference:
        networks["ref_model"] = their_network(before, task)
    given = rows(8, task)
    start = {name: value.clone() for name, value in by_their_names(trainer).items()}
    their = their_trainer(kind, {"output_dir": str(tmp_path), **settings}, given, **networks)
    their.train()
    asked = dataclasses.replace(trainer, stages=before.stages, parallels=[], hooks=[], scripts={})
    data = ReferenceScoredBatches(trainer, our_batches(given, task), asked, config)  # type: ignore[arg-type]
    steps = [train_step(trainer, data) for _ in range(2)]
    if task == "kto":
        assert max(float(step.losses["divergence"][0]) for step in steps) > 0, "z says nothing here"
    compare_logs(case, steps, their.state.log_history)
    result, expected = by_their_names(trainer), networks["model"].state_dict()
    assert max(float((value - start[name]).abs().max()) for name, value in result.items()) > 1e-3, "nothing was learnt"
    for name, value in result.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
