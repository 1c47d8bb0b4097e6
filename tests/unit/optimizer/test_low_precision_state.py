"""State in narrow formats: what it holds, what it loses on average, and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.settings.optim import PrecisionConfig
from megatron.core.optimizer.state_formats import (
    BLOCK,
    Bf16RemainderTensor,
    EncodedTensor,
    UnscaledTensor,
    encoded_zeros,
)
from tests.unit.distributed.ranks import SIZES
from tests.unit.optimizer.test_optimizer import ADAM, adamw, optimizer_of, take_step, torch_steps

KINDS = ("fp32", "bf16", "fp16", "fp8")
ERROR = {
    "fp32": 0.0,
    "bf16": 2.0**-7,
    "fp16": 2.0**-10,
    "fp8": 2.0**-3,
}  # of a number next to which the format has others


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(size: int = 3 * BLOCK + 5) -> Tensor:
    """Numbers whose blocks differ by factors of a million, none far below the largest of its block."""
    found = torch.randn(size, generator=chance(1)).sign() * (0.05 + torch.rand(size, generator=chance(2)))
    return found * torch.logspace(-12, 6, 4).repeat_interleave(BLOCK)[:size]


def through(kept: EncodedTensor, values: Tensor, seed: int = 0) -> Tensor:
    kept.encode_slice(0, values, chance(seed))
    return kept.decode_slice(0, len(values)).clone()


@pytest.mark.parametrize("as_root", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_comes_back_near_and_what_came_back_comes_back_equal(kind: str, as_root: bool) -> None:
    values = numbers().abs() if as_root else numbers()
    kept = encoded_zeros(kind, values, as_root=as_root)
    found = through(kept, values)
    error = 2.2 * ERROR[kind] if as_root and kind in ("fp16", "fp8") else ERROR[kind]
    assert bool(((found - values).abs() <= error * values.abs()).all()), ((found - values) / values).abs().max()
    for seed in range(3):
        assert torch.equal(through(kept, found, seed), found)


@pytest.mark.parametrize("kind", KINDS)
def test_on_average_nothing_is_lost(kind: str) -> None:
    values = numbers(BLOCK)
    kept = encoded_zeros(kind, values)
    mean = torch.stack([through(kept, values, seed) for seed in range(400)]).double().mean(0)
    assert float(((mean - values) / values).abs().max()) <= ERROR[kind] * 5 * 0.5 / 400**0.5 + 1e-6


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_moment_that_decays_slowly_decays(kind: str) -> None:
    values = torch.ones(BLOCK * 4)
    kept = encoded_zeros(kind, values, as_root=True)
    kept.encode_slice(0, values, chance())
    for step in range(700):
        kept.encode_slice(0, kept.decode_slice(0, len(values)) * 0.999, chance(step))
    # In blocks it is the root that is right on average, and its square is a little more.
    assert 0.9 * 0.999**700 < float(kept.decode_slice(0, len(values)).mean()) < 1.3 * 0.999**700
    nearest = torch.ones(1, dtype=torch.bfloat16)
    assert bool((nearest.float() * 0.999).bfloat16() == nearest), "to the nearest it would never move"


def test_no_second_moment_becomes_zero() -> None:
    values = torch.logspace(-30, 0, BLOCK)
    found = through(encoded_zeros("fp8", values, as_root=True), values)
    assert bool((found > 0).all()) and not through(encoded_zeros("fp8", values, as_root=True), torch.zeros(BLOCK)).any()


def test_a_bf16_weight_and_its_remainder_are_the_master_to_the_last_bit() -> None:
    bits = torch.randint(-(2**31), 2**31 - 2**24, (4000,), generator=chance(), dtype=torch.int64).int()
    values = bits.view(torch.float32)
    values = torch.cat(
        [
            values[values.isfinite() & (values.abs() < 1e38)],
            torch.tensor([0.0, -0.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -1.0 - 2.0**-8]),
        ]
    )
    kept = Bf16RemainderTensor(
        torch.zeros(len(values), dtype=torch.bfloat16), torch.zeros(len(values), dtype=torch.int16)
    )
    assert torch.equal(through(kept, values).view(torch.int32), values.view(torch.int32))
    is_tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(kept.weight[~is_tie], values.bfloat16()[~is_tie]) and int(is_tie.sum()) >= 3
    assert bool((kept.weight[is_tie].float().abs() > values[is_tie].abs()).all()), "halfway, away from zero"


def test_infinities_stay_what_they_are() -> None:
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0])
    found = through(UnscaledTensor(torch.zeros(4, dtype=torch.bfloat16)), values)
    assert torch.equal(found[[0, 1, 3]], values[[0, 1, 3]]) and bool(found[2].isnan())


def narrow(**settings: Any) -> PrecisionConfig:
    return PrecisionConfig(bf16=True, use_precision_aware_optimizer=True, **settings)


def masters(optimizer: Any) -> dict[str, Tensor]:
    return {segment.name: tensor for slot, segment, tensor in optimizer.checkpoint_state() if slot == "master"}


@pytest.mark.parametrize(
    "settings, error",
    [
        ({}, 1e-5),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 0.02),
        ({"main_params_dtype": "fp16"}, 0.2),
        ({"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}, 0.2),
    ],
)
def test_steps_are_adamws_up_to_the_formats(settings: dict[str, Any], error: float) -> None:
    module, optimizer = optimizer_of(torch.bfloat16, precision=narrow(**settings), clip_grad=1.0, **ADAM)
    start = {name: child.weight.detach().float().clone() for name, child in module.items()}
    for step in range(5):
        take_step(module, optimizer, step)
    for name, expected in torch_steps(adamw, 1.0, 5, start, torch.float32).items():
        moved = (expected - start[name]).abs().max()
        found = masters(optimizer)[f"{name}.weight"].view(SIZES[name])
        assert float((found - expected).abs().max()) <= error * float(moved)
        assert torch.equal(module[name].weight.detach(), found.bfloat16()), "weights are the main weights, rounded"
    assert optimizer.num_steps == 5


def test_state_in_slices_is_state_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (2**20, BLOCK):
        monkeypatch.setattr("megatron.core.optimizer.low_precision._SLICE", size)
        module, optimizer = optimizer_of(torch.bfloat16, precision=narrow(), **ADAM)
        for step in range(2):
            take_step(module, optimizer, step)
        found.append([tensor for _, _, tensor in optimizer.checkpoint_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_every_step_and_every_segment_has_a_chance_of_its_own() -> None:
    _, optimizer = optimizer_of(torch.bfloat16, precision=narrow(exp_avg_sq_dtype="bf16"), **ADAM)

    def draws() -> list[float]:
        return [
            float(torch.rand((), generator=optimizer.rules[-1]._segment_generator(entry)))
            for entry in optimizer.rules[-1].states.values()
        ]

    first = draws()
    assert draws() == first, "a resumed step draws the same"
    optimizer.load_num_steps(1)
    assert len({*first, *draws()}) == 2 * len(optimizer.segments) > 2


def test_rows_of_masters_can_be_scaled() -> None:
    module, optimizer = optimizer_of(torch.bfloat16, precision=narrow(), **ADAM)
    name = f"{next(iter(SIZES))}.weight"
    before = masters(optimizer)[name]
    rows = torch.full((SIZES[next(iter(SIZES))][0],), 0.5)
    optimizer._scale_weight_rows({name: rows})
    torch.testing.assert_close(masters(optimizer)[name], before * 0.5)


def test_what_is_loaded_is_what_is_kept() -> None:
    precision = narrow(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16")
    module, optimizer = optimizer_of(torch.bfloat16, precision=precision, **ADAM)
    for step in range(3):
        take_step(module, optimizer, step)
    saved, weights = (
        list(optimizer.checkpoint_state()),
        {name: child.weight.detach().clone() for name, child in module.items()},
    )
    again, other = optimizer_of(torch.bfloat16, precision=precision, **ADAM)
    for name, child in again.items():
        child.weight.data.copy_(weights[name])
    slots = list(other.checkpoint_state())
    for (_, _, tensor), (_, _, value) in zip(slots, saved, strict=True):
        tensor.copy_(value)
    other.apply_loaded_state(slots)
    other.load_num_steps(3)
    assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(other.checkpoint_state(), saved, strict=True))
    for step in (3, 4):
        take_step(module, optimizer, step)
        take_step(again, other, step)
    assert all(torch.equal(child.weight, again[name].weight) for name, child in module.items())
