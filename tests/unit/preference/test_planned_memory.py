"""What the planner counts of a reference network, and of the optimizer of a run with adapters, is what real runs hold and compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.models.flops import estimate_memory_by_pipeline_rank, owned_bytes_per_parameter
from megatron.plan.analytic_estimate import with_padded_vocabulary
from megatron.plan.command import parse_training_command
from megatron.plan.simulate.dry_run import dry_run
from megatron.preference import data
from megatron.preference.planned_memory import reference_network_memory
from megatron.preference.settings import PreferenceConfig
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.checkpoint.reference import load_reference_policy
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.preference import trainer_of
from tests.helpers.training import train_on

SMALL: dict[str, Any] = {"hidden_size": 128, "add_bias_linear": False, "bf16": True}
LORA: dict[str, Any] = {**SMALL, "lora_rank": 2, "lora_targets": ("all-linear",)}
COMMAND = (
    "finetune.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 1 --data-path x.jsonl --pretrained-checkpoint base --bf16"
)


def stepped(**changes: Any) -> Trainer:
    """A trainer after a step."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(1, **changes)))
    train_on(trainer, 1)
    return trainer


def test_the_optimizer_of_a_lora_run_is_below_a_tenth_and_within_two_percent_of_the_plan() -> None:
    held = {}
    for name, changes in (("full", SMALL), ("lora", LORA)):
        trainer = stepped(**changes)
        held[name] = sum(tensor.nbytes for tensor in trainer.optimizer.storage_tensors())
        trained = sum(param.numel() for stage in trainer.stages for param in stage.parameters() if param.requires_grad)
        assert held[name] == pytest.approx(owned_bytes_per_parameter(trainer.run.config) * trained, rel=0.02)
        (trace,) = dry_run(trainer.run.config, 1).traces
        assert held[name] == pytest.approx(trace.steady.optimizer, rel=0.02)
        everything = held[name] + sum(
            tensor.nbytes for stage in trainer.stages for tensor in (*stage.parameters(), *stage.buffers())
        )
        gradients = 4 * trained
        (planned,) = estimate_memory_by_pipeline_rank(
            trainer.run.config, stage_specs_of_run(trainer.run.config), data_parallel_size=1, num_microbatches=1
        )
        assert everything + gradients == pytest.approx(planned.weights_and_optimizer, rel=0.02)
    assert held["lora"] < held["full"] / 10


def test_a_reference_of_its_own_takes_what_is_planned_and_the_base_under_adapters_nothing(tmp_path: Path) -> None:
    policy = stepped(**SMALL, save=str(tmp_path), tokenizer_type="NullTokenizer", vocab_size=tiny.VOCABULARY)
    Checkpointer(policy).save()
    reference = load_reference_policy(policy, str(tmp_path))
    assert reference is not None
    held = sum(param.nbytes for stage in reference.stages for param in stage.parameters())
    asked = PreferenceConfig(preference_reference=str(tmp_path))
    assert reference_network_memory(asked, policy.run.config, 1) == {"reference": held}
    quantized = tiny.config(1, **LORA, lora_base_quantization="nf4")
    assert reference_network_memory(asked, quantized, 1) == {"reference": held}
    assert reference_network_memory(PreferenceConfig(), quantized, 1) == {}
    assert reference_network_memory(PreferenceConfig(preference_loss="simpo"), policy.run.config, 1) == {}


def test_the_planner_counts_the_reference_by_where_it_comes_from() -> None:
    def beside(*more: str) -> dict[str, float]:
        command = parse_training_command([*COMMAND.split(), *more], ranks=1)
        assert not command.unread and command.setting is not None
        return dict(
            command.beside(with_padded_vocabulary(command.setting.with_elastic_layout().config.resolve(1), 1000), 1)
        )

    reference = beside()["reference"]
    assert reference == beside("--finetune-task", "kto")["reference"] > 0
    cached = beside("--preference-reference-cache", "cache")
    assert not cached or 0 < cached["reference while its cache is filled"] < reference
    for words in (["--lora-rank", "2"], ["--finetune-task", "reward"], ["--preference-loss", "orpo"]):
        assert beside(*words) == {}


@pytest.mark.parametrize(
    "words, passes",
    [
        ((), 1),
        (("--lora-rank", "2"), 1),
        (("--preference-reference-cache", "cache"), 0),
        (("--preference-loss", "simpo"), 0),
        (("--finetune-task", "kto"), 3),
        (("--finetune-task", "kto", "--preference-reference-cache", "cache"), 1),
        (("--finetune-task", "reward"), 0),
        (("--finetune-task", "sft"), 0),
    ],
)
def test_the_planner_counts_the_passes_that_a_step_makes_before_it(words: tuple[str, ...], passes: int) -> None:
    command = parse_training_command([*COMMAND.split(), *words], ranks=1)
    assert command.setting is not None and command.setting.passes == passes


@pytest.mark.parametrize("task, loss", [("dpo", "sigmoid"), ("dpo", "orpo"), ("kto", "sigmoid")])
def test_a_step_makes_the_passes_that_are_planned(task: Any, loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = PreferenceConfig(finetune_task=task, preference_loss=loss), []
    made = data.compute_answer_logprobs
    monkeypatch.setattr(data, "compute_answer_logprobs", lambda *given: asked.append(len(given[2])) or made(*given))
    _, batches = trainer_of(config)
    batches.prepare_step(4)
    batches.close()
    assert asked == [4] * config.num_scoring_passes
