"""Nothing that changes while a run trains is forgotten: it is in the inventory and saved, or said to be derived."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core.config.flags.declare import config_to_flat_dict
from megatron.core.dist_checkpointing.sharded_state import ShardedTensor
from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.tokenizers.build import NullTokenizer
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.hooks.default import default_hooks
from megatron.training.loader import build_split_batches
from megatron.training.session import TrainingSession
from megatron.training.state.step import train_step
from megatron.training.state.trainer import build_trainer
from megatron.verify.compare.contents import matches_pattern
from megatron.verify.state_inventory import INVENTORY, StateCategory, expected_state_names
from tests.helpers import tiny
from tests.helpers.flags import parse_args_or_raise, run_config_of_args
from tests.helpers.programme import TINY, VOCABULARY, write_tokens
from tests.helpers.training import train_on
from tests.helpers.world import Worlds
from tests.parity.table import MODELS
from tests.unit.verify.walking import changed, held, roots

FLAGS = [
    *TINY,
    *(
        "--train-iters 8 --eval-iters 1 --eval-interval 2 --save-interval 3 --log-interval 2 --hidden-dropout 0.1 "
        "--attention-dropout 0.1 --timing-log-level 2 --log-num-zeros-in-grad"
    ).split(),
]
RUNS = {
    "adam": [],
    "sgd": ["--optimizer", "sgd"],
    "bf16": ["--bf16"],
    "readers": ["--num-workers", "1"],
    "growing batch": "--rampup-batch-size 2 2 4 --global-batch-size 4".split(),
    "experts": "--bf16 --num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-enable-routing-replay "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1 --moe-per-layer-logging".split(),
    "muon": "--bf16 --optimizer muon --num-experts 2 --muon-scalar-optimizer lion".split(),
    "adafactor": "--bf16 --optimizer adafactor --num-experts 2".split(),
    "soap": "--bf16 --optimizer soap --num-experts 2".split(),
    "narrow": "--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16".split(),
    "delayed scales": "--bf16 --fp8-format hybrid --num-experts 2".split(),
    "fp16": "--fp16 --initial-loss-scale 1e30 --loss-scale-window 2 --hysteresis 1".split(),
}
TWO = {
    "overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000".split(),
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel --bf16".split(),
    "fsdp": "--use-torch-fsdp2 --bf16".split(),
    "pipeline": "--pipeline-model-parallel-size 2".split(),
}


@contextmanager
def session(flags: list[str], folder: Path) -> Iterator[TrainingSession]:
    """A run on this process's ranks, before its first step."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    config = run_config_of_args(
        parse_args_or_raise(
            [
                *FLAGS,
                "--data-path",
                str(folder / "data"),
                "--split",
                "60,20,20",
                "--save",
                str(folder / "save"),
                *flags,
            ],
            world_size=ranks,
        ),
        ranks,
    )
    config = replace(config, model=config.model.with_vocabulary(VOCABULARY + 1, config.parallel.tp))
    run = replace(
        tiny.run_of(config),
        tokenizer=NullTokenizer(VOCABULARY + 1),
        kernels=select_kernels(
            KernelRequirements(
                device="cpu", dtype=getattr(torch, config.precision.param_dtype_name), attention_dropout=0.1
            ),
            {},
        ),
    )
    trainer = build_trainer(run, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    hooks, checkpoint = default_hooks(trainer), Checkpointer(trainer)
    for hook in hooks:
        trainer.add_hook(hook)
    with closing(build_split_batches(trainer, pretrain_gpt.datasets_provider)) as data:
        one = TrainingSession(trainer, checkpoint, data, partial(train_step, trainer))
        for hook in trainer.hooks:
            hook.begin_run(one)
        yield one
        checkpoint.wait_for_save_outcome()


def train(one: TrainingSession, steps: int = 5) -> None:
    """Train, evaluate, report and save as the loop does."""
    one.total = one.trainer.progress.iteration + steps
    with one.watch:
        one._train()


# Patterns of places -> why what is there need not be saved.
DERIVED = {
    (
        "trainer.parallels.*.buckets.*.grad",
        "trainer.optimizer.segments.*.grad",
        "trainer.parallels.*.buckets.*.main_grads.*",
    ): "gradients are made anew in every step",
    (
        "trainer.optimizer.rules.*.param_groups.*.lr",
        "trainer.optimizer.rules.*.param_groups.*.weight_decay",
    ): "set from the schedule and the counters before every update",
    (
        "trainer.parallels.*._launched",
        "trainer.parallels.*._missing*",
        "trainer.parallels.*._reducing*",
    ): "of one step's reductions",
    ("trainer.parallels.*._gathering*",): "parameters on their way to other ranks; a save waits for them",
    ("trainer.scripts.*",): "the order of work, a function of the number of microbatches",
    ("trainer.loss_names*", "trainer.note_names*"): "names of the losses, which the first step asks for",
    ("trainer.stages.*.scaling.seen",): "largest values of the step that is under way",
    ("trainer.stages.*.recorded*",): "choices of experts of the last step, for a replay (--moe-enable-routing-replay)",
    ("trainer.run.timers.*",): "time spent, which is only reported",
    ("data.*",): "samples read ahead; which come next follows from the counters",
    ("meter.*", "writers.*", "clock.*", "total", "trainer.hooks.*.reported_memory"): "reports",
    ("watch.*",): "signals and questions of this process, for which a resumed run waits anew",
    ("trainer.hooks.*.num_microbatches",): "of the batch that the counters say",
    ("checkpoint.*",): "what is known of the folder of checkpoints, found again there",
}


def items_at(place: str) -> list[StateCategory]:
    """The items that live at a place."""
    return [item for item in INVENTORY if item.places and matches_pattern(place, item.places)]


def why_derived(place: str) -> str:
    """Why what lives at a place need not be saved; empty where nobody has said so."""
    return next((reason for patterns, reason in DERIVED.items() if matches_pattern(place, patterns)), "")


def saved(one: TrainingSession) -> dict[str, str]:
    """What a save would hold now, as text."""
    found = {}
    for name, value in one.checkpoint.state_to_save().items():
        if isinstance(value, ShardedTensor):
            value = [(str(box), tensor.tolist()) for box, tensor in value.pieces]
        found[name] = str(value.tolist()) if isinstance(value, torch.Tensor) else json.dumps(value)
    return found


def forgotten(flags: list[str], folder: Path) -> list[str]:
    """What changes in a run and is neither saved nor derived; and what is said to be saved and is not."""
    with session(flags, folder) as one:
        before, state_before = held(roots(one)), saved(one)
        train(one)
        places, state = changed(before, held(roots(one))), saved(one)
    assert len(places) > 100, places
    moved = {name for name in state if state[name] != state_before.get(name)}
    wrong = [
        f"{place} changes, and stands in neither table"
        for place in places
        if not items_at(place) and not why_derived(place)
    ]
    for place in places:
        if (
            items_at(place)
            and not why_derived(place)
            and not any(matches_pattern(name, item.names) for item in items_at(place) for name in moved)
        ):
            wrong.append(f"{place} changes, but what a save holds of {items_at(place)[0].what} does not")
    return wrong


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with data."""
    write_tokens(tmp_path / "data")
    return tmp_path


@pytest.mark.parametrize("name", RUNS)
def test_everything_that_changes_while_a_run_trains_is_saved_or_derived(name: str, folder: Path) -> None:
    assert not forgotten(RUNS[name], folder)


@pytest.mark.parametrize("name", TWO)
def test_everything_that_changes_on_two_ranks_is_saved_or_derived(world: Worlds, name: str, folder: Path) -> None:
    assert not [text for rank in world(2).run(forgotten, TWO[name], folder) for text in rank]


def test_a_new_piece_of_state_is_noticed_wherever_it_is_kept(folder: Path) -> None:
    with session([], folder) as one:
        trainer = one.trainer
        trainer.stages[0].register_buffer("average", torch.zeros(3))
        spots: dict[str, Any] = {
            "optimizer": trainer.optimizer,
            "bucket": trainer.parallels[0].buckets[0],
            "session": one,
            "layer": trainer.stages[0].decoder.layers["1"],
        }
        for spot in spots.values():
            spot.counted = {"steps": [0]}
        before = held(roots(one))
        train(one, 1)
        trainer.stages[0].average += 1.0
        for spot in spots.values():
            spot.counted["steps"][0] += 1
        found = [place for place in changed(before, held(roots(one))) if not items_at(place) and not why_derived(place)]
    expected = {
        "trainer.stages.0._buffers.average",
        "trainer.optimizer.counted.steps.0",
        "trainer.parallels.0.buckets.0.counted.steps.0",
        "trainer.stages.0._modules.decoder._modules.layers._modules.1.counted.steps.0",
        "counted.steps.0",
    }
    assert expected <= set(found), (expected - set(found), found)


def test_a_piece_of_state_that_is_registered_and_not_saved_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Checkpointer.state_to_save
    for lost, of in (
        ("run.optimizer_steps", "updates done"),
        ("optimizer.exp_avg_sq.", "second moments (Adam)"),
        ("run.random.", "random streams"),
        ("run.progress", "counters and position in the data"),
    ):
        monkeypatch.setattr(
            Checkpointer,
            "state_to_save",
            lambda self, lost=lost: {name: value for name, value in real(self).items() if not name.startswith(lost)},
        )
        assert any(text.endswith(f"what a save holds of {of} does not") for text in forgotten([], folder)), lost


@pytest.mark.parametrize("name", ["t5", "deepseek", "output-gate"])
def test_a_checkpoint_must_hold_the_histories_that_a_run_has(name: str) -> None:
    settings = tiny.config(**MODELS[name], fp8_format="hybrid", first_last_layers_bf16=True)
    state = Checkpointer(tiny.trainer_of(tiny.run_of(settings))).state_to_save()
    parameters = [name.removeprefix("model.") for name in state if name.startswith("model.")]
    expected = expected_state_names(config_to_flat_dict(settings), 1, parameters)["histories of delayed scales"]
    assert expected and set(expected) == {name for name in state if name.startswith("run.amax.")}


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": True, "fp8_format": "hybrid"},
        {"optimizer": "muon", "freeze": ("embedding.*", "*.norm.*")},
        {"fp16": True, "optimizer": "adafactor", "freeze": ("decoder.layers.3.*",)},
    ],
)
def test_a_checkpoint_of_a_hybrid_holds_what_it_must(changes: dict[str, Any]) -> None:
    sizes = {"mamba_num_heads": 16, "mamba_state_dim": 8, "linear_value_head_dim": 8, "linear_key_head_dim": 8}
    settings = tiny.config(**{**MODELS["hybrid"], **sizes, "hybrid_layer_pattern": "MG*-", **changes})
    trainer = tiny.trainer_of(tiny.run_of(settings))
    train_on(trainer, 1)
    state = Checkpointer(trainer).state_to_save()
    parameters = [name.removeprefix("model.") for name in state if name.startswith("model.")]
    expected = {*chain(*expected_state_names(config_to_flat_dict(settings), 1, parameters).values())}
    held = {name for name in state if name.startswith(("optimizer.", "run.amax."))}
    assert (
        len(held) > len(parameters)
        and {name for name in expected if name.startswith(("optimizer.", "run.amax."))} == held
    )


def test_no_row_of_the_tables_is_a_dead_letter(folder: Path) -> None:
    live: set[str] = set()
    for flags in RUNS.values():
        with session(flags, folder) as one:
            live |= set(held(roots(one)))
            train(one, 3)
            live |= set(held(roots(one)))
    rows = [(pattern, item.what) for item in INVENTORY for pattern in item.places]
    rows += [(pattern, reason) for patterns, reason in DERIVED.items() for pattern in patterns]
    dead = [row for row in rows if not any(matches_pattern(place, row[:1]) for place in live)]
    assert not dead, dead
