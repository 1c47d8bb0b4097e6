"""A quantized base under adapters: the formula of NF4, the same values under every layout, and what is saved and planned."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.adapters.files import BASE
from megatron.adapters.quantized_base import (
    BlockQuantizedWeight,
    multiply_by_block_scales,
    nf4_value_pairs,
    nf4_values,
    pack_4_bit_codes,
    quantize_weight_blocks,
    unpack_nf4_values,
)
from megatron.adapters.saved import base_weights_hash
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.rules.engine import broken_rules
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.models.flops import estimate_memory_by_pipeline_rank
from megatron.core.parallel.spec import local_shard_boxes, param_spec_of, quantized_storage_of
from megatron.core.tensor_parallel.frozen_quantized import dense_weight
from megatron.plan.simulate.dry_run import dry_run
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.training import held_weights, train_on
from tests.helpers.world import Worlds
from tests.parity.table import MODELS

# As bitsandbytes and QLoRA's authors publish them.
PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}
QLORA: dict[str, Any] = {**LORA, "lora_base_quantization": "nf4"}
WIDE: dict[str, Any] = {"hidden_size": 96, "ffn_hidden_size": 200, "num_layers": 2}


def build(**changes: Any) -> Trainer:
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return tiny.trainer_of(tiny.run_of(tiny.config(world_size, **{**MODELS["llama"], **changes})))


def matrix(*shape: int) -> Tensor:
    """Normal numbers; the first row is zero, and the second much larger than the others."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    values[..., 0, :], values[..., 1, :] = 0.0, values[..., 1, :] * 40
    return values


def by_the_paper(weight: Tensor, format: str) -> Tensor:
    """Dettmers et al. (2023), section 3, number by number; the 8-bit scales symmetric about their mean. weight: [out, in]."""
    scales = torch.tensor([[float(block.abs().max()) for block in row.split(64)] for row in weight])
    for group in scales.split(256):
        for column in group.unbind(1):
            mean = float(column.double().mean())
            step = float((column - mean).abs().max()) / 127
            column.copy_(
                torch.tensor([max(0.0, mean + step * round((float(one) - mean) / (step or 1))) for one in column])
            )
    rows = []
    for row, ours in zip(weight, scales, strict=True):
        for block, scale in zip(row.split(64), ours, strict=True):
            largest = float(block.abs().max()) or 1.0
            for value in block:
                level = float(value) / largest
                near = (
                    min(nf4_values(), key=lambda one: abs(one - level)) if format == "nf4" else round(level * 127) / 127
                )
                rows.append(near * float(scale))
    return torch.tensor(rows).view(weight.shape)


def levels_of(blocks: BlockQuantizedWeight, format: str) -> Tensor:
    if format == "nf4":
        return unpack_nf4_values(pack_4_bit_codes(blocks.codes), blocks.codes.shape[-1], nf4_value_pairs())
    return blocks.codes / 127


def test_the_values_of_nf4_are_the_quantiles_that_are_published() -> None:
    assert nf4_values() == pytest.approx(PUBLISHED, abs=5e-7)
    # Equally likely for a normal number, up to what the zero in their midst takes.
    shares = [NormalDist().cdf(value * 1.8481308) for value in nf4_values()]
    assert max(b - a for a, b in zip(shares, shares[1:], strict=False)) < 0.08


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_a_matrix_is_what_the_formula_of_the_paper_gives(format: str) -> None:
    weight = matrix(258, 70)
    blocks = quantize_weight_blocks(weight, format)
    scales = torch.cat(
        [
            mean + step * codes
            for mean, step, codes in zip(blocks.means, blocks.steps, blocks.scales.split(256), strict=True)
        ]
    )
    found = multiply_by_block_scales(levels_of(blocks, format), scales.clamp_min(0.0), first=0, dtype=torch.float32)
    expected = by_the_paper(weight, format)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert float(found[0].abs().max()) == 0.0
    assert float((found - weight)[2:].norm() / weight[2:].norm()) < {"nf4": 0.35, "int8": 0.3}[format]


def test_codes_are_those_of_torchaos_nf4() -> None:
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    weight = torch.randn(512, 64, generator=torch.Generator().manual_seed(5))
    theirs = nf4.to_nf4(weight, 64, 256)
    blocks = quantize_weight_blocks(weight, "nf4")
    halves = blocks.codes.view(-1, 2)
    packed = halves[:, 0] << 4 | halves[:, 1]
    # All but a few, which lie between two values: their table has seven digits of other rounding.
    assert float((theirs.quantized_data.flatten() != packed).float().mean()) < 1e-3
    scales = torch.cat(
        [m + s * c for m, s, c in zip(blocks.means, blocks.steps, blocks.scales.split(256), strict=True)]
    )
    found, original = (
        multiply_by_block_scales(levels_of(blocks, "nf4"), scales, first=0, dtype=torch.float32),
        theirs.get_original_weight(),
    )
    # Their scales are rounded about the mean of the whole matrix.
    assert float((found - original).norm() / original.norm()) < 0.01
    ours, their = (float((one - weight).norm() / weight.norm()) for one in (found, original))
    assert ours == pytest.approx(their, rel=0.01)


def values_here(changes: dict[str, Any]) -> list[tuple[str, Any, Any, Tensor]]:
    """The dequantized pieces that this rank holds."""
    trainer = build(**changes)
    if changes.get("load"):
        Checkpointer(trainer).resume()
    mesh = trainer.run.mesh
    return [
        (
            param_spec_of(param).name,
            param_spec_of(param).shape,
            piece.box,
            dense_weight(param)[piece.local.slices()].clone(),
        )
        for stage in trainer.stages
        for param in stage.parameters()
        if quantized_storage_of(param) is not None
        for piece in local_shard_boxes(param_spec_of(param), mesh)
    ]


@pytest.mark.parametrize("changes", [{**WIDE}, {**MODELS["lora-moe"], "lora_base_quantization": "int8"}])
def test_values_are_the_same_under_every_layout(changes: dict[str, Any], world: Worlds) -> None:
    flags = {**QLORA, **changes, "bf16": True}
    whole: dict[str, Tensor] = {}
    for name, shape, box, value in values_here(flags):
        whole.setdefault(name, torch.full(shape, float("nan"), dtype=value.dtype))[box.slices()] = value
    assert len(whole) == len({name for name in whole if ".layers." in name}) > 4
    layouts: list[dict[str, Any]] = [{"tensor_model_parallel_size": 2, "sequence_parallel": True}]
    layouts += [{"expert_model_parallel_size": 2}] if "num_experts" in changes else [{"use_torch_fsdp2": True}]
    for layout in layouts:
        for held in world(2).run(values_here, {**flags, **layout}):
            assert held and all(torch.equal(value, whole[name][box.slices()]) for name, _, box, value in held)


def test_a_run_saves_adapters_and_the_hash_of_the_base_before_it_was_quantized(tmp_path: Path) -> None:
    base = build(**WIDE, save=str(tmp_path / "base"))
    train_on(base, 1)
    Checkpointer(base).save()
    flags = {
        **WIDE,
        "pretrained_checkpoint": str(tmp_path / "base"),
        "load": str(tmp_path / "run"),
        "save": str(tmp_path / "run"),
    }
    runs = []
    for kind in (QLORA, {**LORA, "dora": True, "lora_base_quantization": "int8"}):
        trainer = build(**flags | {"load": None}, **kind)
        Checkpointer(trainer).resume()
        weights = [quantized_storage_of(param) for stage in trainer.stages for param in stage.parameters()]
        before = [one.clone() for held in weights if held is not None for one in held.storage_tensors()]
        train_on(trainer, 2)
        after = [one for held in weights if held is not None for one in held.storage_tensors()]
        assert before and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        runs.append(trainer)
    dora = runs[1].stages[0].decoder.layers["0"].mlp.linear_fc2
    start = build(**flags | {"load": None}, **LORA, dora=True, lora_base_quantization="int8")
    Checkpointer(start).resume()
    linear = start.stages[0].decoder.layers["0"].mlp.linear_fc2
    torch.testing.assert_close(linear.adapter.pairs["whole"].magnitude, dense_weight(dora.weight).norm(dim=1))
    Checkpointer(runs[0]).save()
    saved = open_native_checkpoint(tmp_path / "run" / "iter_0000002")
    assert all(".adapter." in name for name in saved.formats if name.startswith("model."))
    plain = build(**flags | {"load": None}, **LORA)
    Checkpointer(plain).resume()
    assert saved.values[BASE]["hash"] == base_weights_hash(plain.stages, plain.run.mesh, plain.run.config.model.adapter)
    again = build(**flags, **QLORA)
    assert Checkpointer(again).resume() and again.progress.iteration == 2
    assert train_on(again, 2) == train_on(runs[0], 2)
    assert all(torch.equal(a[3], b[3]) for a, b in zip(held_weights(runs[0]), held_weights(again), strict=True))


@pytest.mark.parametrize("format, bits", [("nf4", 4.127), ("int8", 8.127), ("none", 16.0)])
def test_the_plan_counts_what_a_quantized_base_takes(format: str, bits: float) -> None:
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 2, "bf16": True}
    flags = {**MODELS["llama"], **LORA, **sizes, "lora_base_quantization": format}
    config = tiny.config(1, **flags)
    held = dry_run(config, 1).traces[0]
    matrices = 2 * (256 * (256 + 2 * 4 * 32) + 256 * 256 + 3 * 256 * 512)
    rest = 2 * 2 * 256 * tiny.VOCABULARY
    # Beside those: adapters, norms, and padding of the vocabulary.
    assert held.at_peak.weights == pytest.approx(matrices * bits / 8 + rest, rel=0.25)
    estimate = estimate_memory_by_pipeline_rank(
        config, [*stage_specs_of_run(config)], data_parallel_size=1, num_microbatches=1
    )[0]
    trainer = build(**flags)
    real = sum(
        one.nbytes
        for stage in trainer.stages
        for param in stage.parameters()
        for one in (
            quantized_storage_of(param).storage_tensors() if quantized_storage_of(param) is not None else (param,)
        )
    )
    state = sum(one.nbytes for one in trainer.optimizer.storage_tensors()) + sum(
        segment.grad.nbytes for segment in trainer.optimizer.segments
    )
    assert held.at_peak.weights == pytest.approx(real, rel=0.02)
    assert estimate.weights_and_optimizer == pytest.approx(real + state, rel=0.05)


def test_optimizer_memory_is_below_a_tenth_and_as_the_plan_says() -> None:
    few, whole = (
        tiny.config(1, **{**MODELS["llama"], "hidden_size": 128, "ffn_hidden_size": 384, "num_layers": 2, **changes})
        for changes in ({"lora_rank": 2}, {})
    )
    planned = [dry_run(config, 1).traces[0].at_peak.optimizer for config in (few, whole)]
    real = [
        sum(one.nbytes for one in tiny.trainer_of(tiny.run_of(config)).optimizer.storage_tensors())
        for config in (few, whole)
    ]
    assert planned[0] < planned[1] / 10 and real[0] < real[1] / 10
    assert planned == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    "changes, words",
    [({"lora_base_quantization": "nf4"}, "give --lora-rank"), ({**QLORA, "fp8_format": "hybrid"}, "round them again")],
)
def test_a_quantized_base_that_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    problems = dict(broken_rules(tiny.config(1, **{**MODELS["llama"], **changes}), 1))
    assert any(words in message for message in problems.values()), problems
