"""Activations in the CPU's memory: the same bits, and fewer bytes on the device. Here both are one memory, told apart by who asked."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.parallel import device, offload
from megatron.core.parallel.main_grad import MainGrad
from megatron.core.parallel.offload import ActivationOffload
from tests.helpers import tiny
from tests.helpers.training import train_here
from tests.parity.table import MODELS

PARTS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
LAYERS: dict[str, Any] = {"cpu_offloading_num_layers": 2, "min_offloaded_tensor_size": 0}


def some(*names: str, smallest: int = 0) -> dict[str, Any]:
    return {"fine_grained_activation_offloading": True, "offload_modules": names, "min_offloaded_tensor_size": smallest}


class Storages(TorchDispatchMode):
    """Every storage that an operation made, while it lives. host: those that the CPU's memory was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.host: set[int] = set()

        def asked(*arguments: Any, **keywords: Any) -> Tensor:
            made = device.empty_host_tensor(*arguments, **keywords)
            self.host.add(made.untyped_storage()._cdata)
            return made

        monkeypatch.setattr(offload, "empty_host_tensor", asked)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return result

    def bytes(self, *, on_host: bool, but: set[int]) -> int:
        """Bytes that are there now. but: storages that do not count."""
        gc.collect()
        return sum(
            size
            for key, (storage, size) in self.alive.items()
            if storage() is not None and key not in but and (key in self.host) == on_host
        )


def after_forward(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[int, int]:
    """Bytes of activations that wait for the backward pass: on the device, and in the CPU's memory."""
    run = tiny.run_of(tiny.config(**{**MODELS["llama"], **changes}))
    trainer = tiny.trainer_of(run)
    batch = next(tiny.short_run_batches(run, 0))
    counted = Storages(monkeypatch)
    with counted:
        loss = trainer.stages[0](ids=batch.tokens, labels=batch.labels).sum()
        weights = {bucket.data.untyped_storage()._cdata for bucket in trainer.parallels[0].buckets}
        found = counted.bytes(on_host=False, but=weights), counted.bytes(on_host=True, but=weights)
    assert loss.requires_grad
    return found


def test_layers_that_went_away_leave_nothing_but_what_others_keep_too(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [
        after_forward(monkeypatch, cpu_offloading_num_layers=count, min_offloaded_tensor_size=0 if count else 2**20)
        for count in range(5)
    ]
    device_bytes, host_bytes = zip(*held, strict=True)
    layer = [a - b for a, b in zip(device_bytes, device_bytes[1:], strict=False)]
    assert host_bytes[0] == 0 and all(saved > 0 for saved in layer), held
    assert layer[1] == layer[2], "inner layers are alike"
    # One layer's activations once, whatever the number of views and of operations that saved them; its input may stay for a neighbour.
    residual = 16 * 32 * 4
    assert layer[1] <= host_bytes[2] - host_bytes[1] <= layer[1] + 2 * residual, held
    assert device_bytes[4] < 0.12 * device_bytes[0], held


def test_each_part_sends_something_away_and_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, nothing = after_forward(monkeypatch)
    assert nothing == 0
    for name in PARTS:
        here, there = after_forward(monkeypatch, **some(name))
        assert there > 0 and here <= plain, (name, plain, here, there)
    assert after_forward(monkeypatch, **some(*PARTS, smallest=2**20)) == (plain, 0)


def test_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = offload.OffloadedBuffer.__init__

    def watched(self: offload.OffloadedBuffer, source: Tensor, side_stream: Any) -> None:
        seen.append(source.untyped_storage()._cdata)
        real(self, source, side_stream)

    monkeypatch.setattr(offload.OffloadedBuffer, "__init__", watched)
    run = tiny.run_of(tiny.config(**MODELS["llama"], **LAYERS))
    trainer = tiny.trainer_of(run)
    batch = next(tiny.short_run_batches(run, 0))
    loss = trainer.stages[0](ids=batch.tokens, labels=batch.labels).sum()
    weights = {bucket.data.untyped_storage()._cdata for bucket in trainer.parallels[0].buckets}
    assert seen and not weights & set(seen) and loss.requires_grad


def test_what_the_backward_pass_makes_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = offload.OffloadedBuffer.__init__
    monkeypatch.setattr(
        offload.OffloadedBuffer,
        "__init__",
        lambda self, source, side_stream: (made.append(source.numel()), real(self, source, side_stream))[1],
    )
    run = tiny.run_of(
        tiny.config(
            **MODELS["llama"], **some(*PARTS), recompute_granularity="selective", recompute_modules=("mlp", "core_attn")
        )
    )
    trainer = tiny.trainer_of(run)
    batch = next(tiny.short_run_batches(run, 0))
    loss = trainer.stages[0](ids=batch.tokens, labels=batch.labels).sum()
    before = len(made)
    loss.backward()
    assert len(made) == before > 0


@pytest.mark.parametrize(
    "model, changes",
    [
        ("llama", LAYERS),
        ("moe", some(*PARTS, "expert_fc1", "moe_act")),
        ("mla-q", some(*PARTS)),
        ("llama", {**LAYERS, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}),
        (
            "gpt",
            {
                **some(*PARTS),
                "recompute_granularity": "selective",
                "recompute_modules": ("core_attn", "layernorm", "mlp"),
            },
        ),
    ],
)
def test_results_are_the_same_to_the_last_bit_with_dropout(model: str, changes: dict[str, Any]) -> None:
    base = {**MODELS[model], "hidden_dropout": 0.1, "attention_dropout": 0.1, "micro_batch_size": 4}
    expected, found = train_here(base, 2), train_here({**base, **changes}, 2)
    assert found[:2] == expected[:2]
    assert all(torch.equal(a, b) for (*_, a), (*_, b) in zip(found[2], expected[2], strict=True))


def test_a_view_comes_back_with_its_place_and_strides() -> None:
    away = ActivationOffload(torch.device("cpu"), 0)
    base = torch.arange(48.0).view(6, 8).requires_grad_()
    whole = base * 1.0
    with away.offloading():
        total = (whole.t()[1:7, ::2] * whole[:, :1].expand(6, 3)).sum() + whole[2:4].exp().sum() + (whole[0, 0] ** 2)
    plain = base * 1.0
    again = (plain.t()[1:7, ::2] * plain[:, :1].expand(6, 3)).sum() + plain[2:4].exp().sum() + (plain[0, 0] ** 2)
    found, expected = torch.autograd.grad(total, base), torch.autograd.grad(again, base)
    assert torch.equal(found[0], expected[0])


def test_while_a_part_works_the_one_before_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fetch, unpack = offload.OffloadedBuffer.start_fetch, offload._OffloadGroup.unpack
    sizes = {16: "first", 20: "second", 24: "third"}  # bytes

    def watched_fetch(self: offload.OffloadedBuffer) -> None:
        if self._back is None:
            seen.append(f"fetch {sizes[self.host.numel()]}")
        fetch(self)

    def watched_unpack(self: offload._OffloadGroup, packed: Any) -> Tensor:
        seen.append(f"want {sizes[packed.source.host.numel()]}")
        return unpack(self, packed)

    monkeypatch.setattr(offload.OffloadedBuffer, "start_fetch", watched_fetch)
    monkeypatch.setattr(offload._OffloadGroup, "unpack", watched_unpack)
    away, x = ActivationOffload(torch.device("cpu"), 0), torch.rand(4, requires_grad=True)
    for size in (4, 5, 6):
        with away.offloading():
            x = torch.nn.functional.pad(x, (0, size - len(x))).exp()
    x.sum().backward()
    assert seen == ["want third", "fetch third", "fetch second", "want second", "fetch first", "want first"]


def test_a_main_gradient_that_autograd_saves_is_the_one_that_the_backward_pass_adds_to() -> None:
    """As in a layer that a compiler made one graph: its backward pass adds to the main gradient, which it saved."""

    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
            ctx.save_for_backward(total)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            ctx.saved_tensors[0].add_(1.0)
            return gradient, None

    linear, total = torch.nn.Linear(4, 4, bias=False), torch.zeros(4, 4)
    linear.weight.main_grad = MainGrad(total)  # type: ignore[assignment]
    linear.weight.main_grad.open = True
    with ActivationOffload(torch.device("cpu"), 0).offloading(linear):
        result = Add.apply(torch.ones(4, requires_grad=True), total)
    result.sum().backward()
    assert torch.equal(total, torch.ones(4, 4))
