"""--compile: the same training, in graphs without breaks, of parts that can be named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.parallel import device
from megatron.core.transformer.blocks import Block
from megatron.training.accelerate.compile import LayerCompiler, compile_obstacles_by_method
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.training import Held, differences, held_weights, outcome, train_alone, train_on
from tests.helpers.world import Worlds
from tests.parity.table import MODELS, Changes, read_layout

TRACED: Changes = {"compile": True, "compile_backend": "aot_eager", "fp64": True}
FULL: Changes = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


@pytest.fixture(autouse=True)
def forget() -> Any:
    """What one test compiled is not the next one's."""
    yield
    torch._dynamo.reset()


def compiled(**changes: Any) -> tuple[Trainer, LayerCompiler]:
    """A trainer on this process's ranks, and its compiler."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(world_size, **changes)))
    compiler = LayerCompiler(trainer)
    trainer.add_hook(compiler)
    return trainer, compiler


def train_here(changes: Changes, steps: int) -> tuple[list[float], list[float], Held]:
    """On every rank: train compiled, without a graph break."""
    trainer, compiler = compiled(**changes)
    before = torch._dynamo.utils.counters["graph_break"].copy()
    losses, norms = train_on(trainer, steps)
    assert torch._dynamo.utils.counters["graph_break"] == before, "a layer broke"
    torch._dynamo.reset()
    return losses, norms, held_weights(trainer)


def test_layers_of_a_kind_are_one_graph_without_breaks_and_train_to_the_same_weights(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    changes = {**MODELS["llama"], **TRACED, **FULL, "num_layers": 3, "hidden_dropout": 0.1, "global_batch_size": 2}
    eager = train_alone({**changes, "compile": False}, 3)
    with caplog.at_level(logging.INFO, logger="tiny"):
        trainer, compiler = compiled(save=str(tmp_path), **changes)
        losses, norms = train_on(trainer, 2)
        compiler.after_iteration(None)
    # One graph for the layer that is recomputed, whose first pass has no gradient, and one for both others.
    assert said(caplog)[0] == "compile by aot_eager: 3 layers whole"
    assert said(caplog)[1].startswith("compile: 2 graphs, no graph breaks; first step ")
    Checkpointer(trainer).save()
    plain = tiny.trainer_of(tiny.run_of(tiny.config(**{**changes, "compile": False, "load": str(tmp_path)})))
    assert list(trainer.stages[0].state_dict()) == list(plain.stages[0].state_dict())
    assert Checkpointer(plain).resume(), "an eager run goes on from a compiled one's checkpoint"
    last = train_on(plain, 1)
    found = outcome([(losses + last[0], norms + last[1], held_weights(plain))])
    assert not (problems := differences(found, eager, 1e-10)), "\n".join(problems)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the run."""
    return [record.message for record in caplog.records if record.name == "tiny"]


NIGHT = [pytest.mark.nightly]


@pytest.mark.parametrize(
    "layout, model, more",
    [
        ("tp2 sp mb2", "llama", {}),
        *(
            pytest.param(*row, marks=NIGHT)
            for row in (
                ("tp2", "gpt", {}),
                ("pp2 mb2", "gpt2", {}),
                ("pp2 mb2", "llama", {"pipeline_schedule": "zb-h1"}),
                ("dp2 zero", "gqa2", {}),
                ("dp2 zero overlap-reduce overlap-gather bucket700", "gpt", {}),
                ("dp2 fsdp", "llama", FULL),
                ("dp2 fsdp", "gpt", {}),
                ("cp2 mb2", "llama", {}),
                ("tp2 sp cp2", "gqa2", {}),
                ("ep2 dp2 alltoall grouped mb2", "moe-shared", {}),
                ("tp2 sp mb2", "mla-q", {}),
                ("pp2 mb2", "mtp2", {}),
                ("pp2 vpp3 mb2", "t5-v1.1", {}),
                ("tp2 mb2", "bert", {}),
                ("tp2 recompute-all-parts mb2", "llama", {}),
            )
        ),
    ],
)
def test_a_compiled_layout_equals_the_serial_run_without_a_compiler(
    world: Worlds, layout: str, model: str, more: Changes
) -> None:
    ranks, changes = read_layout(layout)
    found = outcome(world(ranks).run(train_here, {**MODELS[model], **TRACED, **changes, **more}, 2, timeout=600.0))
    problems = differences(found, train_alone({**MODELS[model], "fp64": True}, 2), 1e-10)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "model",
    [
        "gpt",
        "gpt2",
        "llama",
        "gpt-oss-dense",
        "qk-clip-gqa",
        "mla-packed",
        "moe",
        "mtp2-tied-packed",
        "bert-published",
        "t5",
        "t5-v1.0",
        "dropout",
        "hybrid-packed",
    ],
)
@pytest.mark.nightly
def test_every_kind_of_network_trains_compiled_as_without(model: str) -> None:
    found = outcome([train_here({**MODELS[model], **TRACED}, 2)])
    assert not (problems := differences(found, train_alone({**MODELS[model], "fp64": True}, 2), 1e-10)), "\n".join(
        problems
    )


@pytest.mark.nightly
def test_graphs_of_scans_do_not_grow_with_the_length() -> None:
    counts = []
    for length in (1024, 2048):
        sizes = {"seq_length": length, "max_position_embeddings": length, "global_batch_size": 1}
        trainer, compiler = compiled(**{**MODELS["hybrid-packed"], **TRACED, **sizes})
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        train_on(trainer, 1)
        compiler.after_iteration(None)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
        torch._dynamo.reset()
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_offloading_num_layers": 2},
        {"fine_grained_activation_offloading": True, "offload_modules": ("attn_norm", "mlp_norm")},
        {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp64": False},
    ],
    ids=str,
)
@pytest.mark.nightly
def test_what_stands_around_and_inside_of_layers_stays_as_it_is(changes: Changes) -> None:
    changes = {**MODELS["llama"], **TRACED, "adam_eps": 1e-4, "min_offloaded_tensor_size": 1, **changes}
    found, expected = outcome([train_here(changes, 2)]), train_alone({**changes, "compile": False}, 2)
    problems = differences(found, expected, 1e-10 if changes["fp64"] else 1e-5)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.nightly
def test_kernels_of_the_compiler_agree_with_eager_ones_and_draw_the_same_dropout(
    model: str, attention_dropout: float
) -> None:
    changes = {
        **MODELS[model],
        "hidden_dropout": 0.1,
        "attention_dropout": attention_dropout,
        "compile": True,
        "adam_eps": 1e-4,
    }
    found = outcome([train_here(changes, 3)])
    problems = differences(found, train_alone({**changes, "compile": False}, 3), 1e-5, weights=1e-4)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "changes, attention, mlp",
    [
        ({}, "", ""),
        ({"attention_dropout": 0.1}, "its dropout has a random stream of its own", ""),
        ({"qk_clip": True}, "its scores are watched", ""),
        ({**MODELS["moe"]}, "", "tokens choose experts"),
        ({"pipeline_schedule": "zb-h1"}, "gradients of weights wait", "gradients of weights wait"),
        ({"recompute_granularity": "selective"}, "it is recomputed", ""),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
            "norms are recomputed",
            "norms are recomputed",
        ),
        ({"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, "", ""),
        ({"use_distributed_optimizer": True, "overlap_param_gather": True}, *["its modules have hooks"] * 2),
        ({"fp8_format": "hybrid"}, "", ""),
        ({"lora_rank": 2, "lora_base_quantization": "nf4"}, *["its weights are quantized"] * 2),
        (MODELS["hybrid-limits"], "its scan is long", "there is none"),
    ],
    ids=str,
)
def test_a_half_that_is_no_single_graph_has_a_reason(changes: Changes, attention: str, mlp: str) -> None:
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**changes)))
    layers = [part for part in trainer.stages[0].modules() if isinstance(part, Block)]
    assert all(
        compile_obstacles_by_method(layer) == {"attention_block": attention, "mlp_block": mlp} for layer in layers
    )
    before = [layer.forward for layer in layers]
    LayerCompiler(trainer)
    assert all(
        (layer.forward == old) == bool(attention or mlp or layer.recomputes_mlp)
        for layer, old in zip(layers, before, strict=True)
    )
    assert all(
        ("mlp_block" in vars(layer)) == (not mlp and (bool(attention) or layer.recomputes_mlp)) for layer in layers
    )


def test_graph_breaks_are_counted_with_their_reason_and_later_graphs_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @torch.compile(backend="eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break(msg="a word to the host")
        return x + 1

    with caplog.at_level(logging.INFO, logger="tiny"):
        trainer, compiler = compiled(**TRACED)
        for iteration, (size, dtype) in enumerate(
            ((2, torch.float32),) * 2 + ((3, torch.float32), (4, torch.float32), (4, torch.float64)), start=1
        ):
            compiler.begin_step(None)
            broken(torch.ones(size, dtype=dtype))
            trainer.progress.iteration = iteration
            compiler.after_iteration(None)
    _, first, reason, *warnings = said(caplog)
    assert ", 1 graph break; first step" in first and reason.startswith("  1 x ") and "a word to the host" in reason
    assert (
        len(warnings) == 1
        and warnings[0].startswith("WARNING: iteration 3 compiled 1 more graph, since ")
        and "size" in warnings[0]
    )
    assert compiler.again == 2, "a second size makes a graph for all sizes, and another format one more"


@pytest.mark.parametrize(
    "kind, installed, missing",
    [("cpu", "", "there is no no-such-compiler"), ("cuda", "", "triton"), ("cpu", "python3", "")],
)
def test_a_machine_that_cannot_compile_is_told_so(
    monkeypatch: pytest.MonkeyPatch, kind: str, installed: str, missing: str
) -> None:
    monkeypatch.setenv("CXX", installed or "no-such-compiler")
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    why = device.missing_compiler_reason(torch.device(kind))
    assert (missing in why) if missing else not why
