"""--cuda-graph-impl local: recorded layers train to the same bits, under any schedule. What stands for CUDA graphs on a CPU records
operations, and leaves no numbers behind where nothing has been repeated yet (tests/helpers/repeats.py)."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from megatron.cli.preflight import preflight
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.distributed.ddp import DataParallel
from megatron.core.parallel.main_grad import MainGrad
from megatron.training.accelerate.cuda_graphs import LayerGraphCapturer
from megatron.training.state.evaluate import evaluate_loss
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.repeats import capture
from tests.helpers.training import Held, differences, held_weights, outcome, train_alone, train_on
from tests.helpers.world import Worlds
from tests.parity.table import MODELS, Changes, read_layout

GRAPHS: Changes = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}
NIGHT = [pytest.mark.nightly]


def recorded(**changes: Any) -> tuple[Trainer, LayerGraphCapturer]:
    """A trainer on this process's ranks, and its recordings."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(world_size, **{**GRAPHS, **changes})))
    recordings = LayerGraphCapturer(trainer, capture)
    trainer.add_hook(recordings)
    return trainer, recordings


def train(trainer: Trainer, recordings: LayerGraphCapturer, steps: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for _ in range(steps):
        found = train_on(trainer, 1)
        recordings.after_iteration(None)
        losses += found[0]
        norms += found[1]
    return losses, norms


def train_here(changes: Changes, steps: int) -> tuple[list[float], list[float], Held, int]:
    """On every rank: train; also how many recordings were made, all of them in the step behind the warm-up."""
    trainer, recordings = recorded(**changes)
    losses, norms = train(trainer, recordings, 2)
    count = recordings.count
    more = train(trainer, recordings, steps - 2)
    assert recordings.count == count > 0, "every microbatch of a later step finds a recording"
    return losses + more[0], norms + more[1], held_weights(trainer), count


@pytest.mark.parametrize(
    "model",
    [
        "llama",
        "moe",
        "packed-rope",
        "t5",
        *(
            pytest.param(name, marks=NIGHT)
            for name in (
                "gpt",
                "gpt2",
                "windows-packed",
                "gpt-oss-dense",
                "gemma2",
                "residual-after-norm",
                "wide-residual",
                "mla-q",
                "mtp2",
                "mtp2-tied-packed",
                "moe-shared",
                "deepseek",
                "bert",
                "bert-published",
                "t5-v1.0",
                "t5-v1.1",
            )
        ),
    ],
)
def test_recorded_layers_train_to_the_same_bits(model: str) -> None:
    changes = {**MODELS[model], "global_batch_size": 2, "hidden_dropout": 0.1}
    losses, norms, weights, _ = train_here(changes, 4)
    plain = train_alone({**changes, **GRAPHS, "cuda_graph_impl": "none"}, 4)
    assert not (problems := differences(outcome([(losses, norms, weights)]), plain, 0.0)), "\n".join(problems)


@pytest.mark.parametrize("fused", [True, False])
def test_recorded_layers_add_gradients_of_weights_in_their_products(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[torch.Size] = []
    add_product = MainGrad.add_product

    def counted(self: MainGrad, left: torch.Tensor, right: torch.Tensor) -> None:
        products.append(self.total.shape)
        add_product(self, left, right)

    trainer, recordings = recorded(**MODELS["llama"], global_batch_size=1, gradient_accumulation_fusion=fused)
    train(trainer, recordings, 1)
    monkeypatch.setattr(MainGrad, "add_product", counted)
    train(trainer, recordings, 1)
    layers = recordings.count
    assert len(products) == (4 * layers if fused else 0), "the four matrices of each layer, as they are recorded"
    train(trainer, recordings, 1)
    assert len(products) == (4 * layers if fused else 0), "a repeated recording calls no Python"
    counted_weights: list[torch.Tensor] = []
    monkeypatch.setattr(DataParallel, "gradient_arrived", lambda _, weight: counted_weights.append(weight))
    train(trainer, recordings, 1)
    weights = list(trainer.stages[0].parameters())
    assert len(counted_weights) == len(weights) == len({id(one) for one in counted_weights}), "each of them once"


@pytest.mark.parametrize(
    "layout, model, counts",
    [
        ("pp2 mb2", "llama", (4, 2)),  # two layers a rank; the first has two microbatches under way, the last one
        ("dp2 zero overlap-reduce overlap-gather bucket700", "gpt", (4, 4)),
        ("tp2 sp mb2", "gqa2", (4, 4)),
        *(
            pytest.param(*row, marks=NIGHT)
            for row in (
                ("pp2 gpipe mb1", "gpt", None),
                ("pp2 vpp2 mb1", "gpt2", None),
                ("tp2 mb2", "bert", None),
                ("pp2 vpp3 mb2", "t5-v1.1", None),
                ("ep2 dp2 alltoall grouped mb2", "moe-shared", None),
                ("tp2 sp pp2 mb1", "mtp2", None),
                ("tp2 dp2 zero mb2", "mla-q", None),
            )
        ),
    ],
)
def test_a_recorded_layout_equals_the_serial_run(
    world: Worlds, layout: str, model: str, counts: tuple[int, ...] | None
) -> None:
    ranks, changes = read_layout(layout)
    results = world(ranks).run(train_here, {**MODELS[model], **changes, "fp64": True}, 3, timeout=300.0)
    found = outcome([result[:3] for result in results])
    assert not (problems := differences(found, train_alone({**MODELS[model], "fp64": True}, 3), 1e-10)), "\n".join(
        problems
    )
    assert counts is None or tuple(count for *_, count in results) == counts


@pytest.mark.parametrize(
    "modules, told, count",
    [
        ((), "1 layer: its attention; 1 layer: whole", 2),
        (("mlp",), "1 layer: nothing; 1 layer: its MLP", 1),
        (("attn",), "2 layers: its attention", 2),
    ],
)
def test_what_is_recorded_of_which_layers_is_said(
    caplog: pytest.LogCaptureFixture, modules: tuple[str, ...], told: str, count: int
) -> None:
    changes = {
        **MODELS["moe"],
        "num_layers": 2,
        "moe_layer_freq": "[1,0]",
        "cuda_graph_modules": modules,
        "global_batch_size": 1,
    }
    with caplog.at_level(logging.INFO, logger="tiny"):
        trainer, recordings = recorded(**changes)
        found = train(trainer, recordings, 3)
    said = [record.message for record in caplog.records if record.name == "tiny"]
    assert said[0] == f"CUDA graphs: {told}" and len(said) == 2
    assert said[1].startswith(f"CUDA graphs: iteration 2 recorded {count} forward and backward passes, and took ")
    plain = tiny.trainer_of(tiny.run_of(tiny.config(**{**changes, "cuda_graph_modules": ()})))
    assert found == train_on(plain, 3)


def test_evaluation_and_larger_batches_come_between_recorded_steps() -> None:
    changes: Changes = {
        "num_layers": 2,
        "pipeline_schedule": "gpipe",
        "rampup_batch_size": (1, 1, 2),
        "global_batch_size": 2,
    }
    trainer, recordings = recorded(**changes)
    plain = tiny.trainer_of(tiny.run_of(tiny.config(**changes)))
    for steps, count in ((2, 2), (2, 4)):  # in turn: all forward passes of a batch, then its backward passes
        assert train(trainer, recordings, steps) == train_on(plain, steps)
        assert recordings.count == count
        assert evaluate_loss(trainer, tiny.short_run_batches(trainer.run, 9), 1) == evaluate_loss(
            plain, tiny.short_run_batches(plain.run, 9), 1
        )


def test_a_recording_waits_for_the_weights_that_are_gathered_beside_it() -> None:
    trainer, recordings = recorded(
        num_layers=2,
        global_batch_size=1,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        ddp_bucket_size=700,
    )
    parallel, left = trainer.parallels[0], []
    start = parallel.start_gather
    parallel.start_gather = lambda: (left.append(len(parallel._gathering)), start())
    for iteration in range(1, 4):
        train_step(trainer, tiny.short_run_batches(trainer.run, iteration))
        recordings.after_iteration(None)
    assert left == [0, 0, 0] and len(parallel._gathering) > 2, (
        "all that was under way was waited for, by recorded layers too"
    )


def test_what_cannot_be_recorded_names_the_layer_and_the_way_out() -> None:
    def refuse(work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    trainer, recordings = recorded()
    recordings.record = refuse
    with pytest.raises(
        ConfigError,
        match="layer 1, whole, cannot be recorded: operation not permitted .*; choose other --cuda-graph-modules",
    ):
        train(trainer, recordings, 2)


def test_a_machine_without_a_gpu_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dataclasses.replace(
        tiny.config(**GRAPHS), tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=30)
    )
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    assert preflight(given, 1).problems == (
        ("machine", "--cuda-graph-impl local: there is no GPU to record for; leave it out"),
    )
    assert preflight(given, 1, device="cuda").problems == ()
