"""Triton's scans and its convolution in the interpreter, against torch's in fp64, forward and backward; and packages that compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.external import state_space_packages
from megatron.core.kernels.ops.requirements import KernelRequirements, package_unsupported_reason
from megatron.core.kernels.state_space import scans
from tests.helpers.triton_interpreter import interpreted, needs_triton

FILES = (
    "state_space.triton_scan_forward",
    "state_space.triton_scan_gradients",
    "state_space.triton_scans",
    "state_space.triton_conv",
)


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[str, ModuleType]]:
    """The files, imported anew so that their kernels are interpreted, as tensors are on a CPU."""
    with interpreted(*FILES) as modules:
        yield modules


def inputs_of(kind: str, length: int) -> tuple[dict[str, Tensor], Tensor]:
    """What a scan is called with, and a state: 2 sequences, 4 heads of 5 channels in 2 groups, 7 deep."""
    torch.manual_seed(length)
    grouped, by_head = [F.normalize(torch.randn(length, 2, 2, 7), dim=-1) for _ in range(2)], (length, 2, 4)
    values, rates = torch.randn(*by_head, 5), torch.rand(by_head)
    if kind == "mamba":
        inputs = {"x": values, "dt": rates, "a": -torch.rand(4) * 3, "b": grouped[0], "c": grouped[1]}
        return inputs, torch.randn(2, 4, 5, 7)
    inputs = {"q": grouped[0], "k": grouped[1], "v": values, "g": -torch.rand(by_head), "beta": rates}
    return inputs, torch.randn(2, 4, 7, 5)


@needs_triton
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("kind", ["mamba", "delta"])
def test_a_scan_by_triton_gives_torchs_outputs_and_gradients(
    kernels: dict[str, ModuleType], kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels["state_space.triton_scans"], "_CHUNK", 16)
    monkeypatch.setattr(kernels["state_space.triton_scans"], "_SPAN", 2)
    inputs, state = inputs_of(kind, 71)
    lengths = torch.tensor([20, 12, 1, 38])
    segments = torch.repeat_interleave(torch.arange(4), lengths).expand(2, -1) if packed else None
    name = "selective_scan" if kind == "mamba" else "delta_rule_scan"
    results = []
    for module, dtype in ((kernels["state_space.triton_scans"], torch.float32), (scans, torch.float64)):
        leaves = {key: each.to(dtype).requires_grad_() for key, each in inputs.items()}
        first = state.to(dtype).requires_grad_()
        outputs = getattr(module, name)(**leaves, segments=segments, state=first)
        pulls = [torch.cos(torch.arange(each.numel())).view_as(each).to(dtype) for each in outputs]
        results.append((*outputs, *torch.autograd.grad(outputs, [*leaves.values(), first], pulls)))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= 3e-6 * max(1.0, expected.abs().max().item())


LENGTHS = [3, *(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 63, 64, 65, 257))]


@needs_triton
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["mamba", "delta"])
def test_gradients_of_a_scan_by_triton_are_torchs_at_any_length(
    kernels: dict[str, ModuleType], kind: str, length: int
) -> None:
    """Steps are limited as Mamba-2's are, some documents have one token, and the last state is used by the loss."""
    inputs, state = inputs_of(kind, length)
    name = "selective_scan" if kind == "mamba" else "delta_rule_scan"
    for packed in (False, True):
        segments = (torch.arange(length) * 7 // 40).expand(2, -1) if packed else None
        results = []
        for module, dtype in ((kernels["state_space.triton_scans"], torch.float32), (scans, torch.float64)):
            leaves = {key: each.to(dtype).requires_grad_() for key, each in inputs.items()}
            first = state.to(dtype).requires_grad_()
            limited = {key: each.clamp(0.2, 0.7) if key == "dt" else each for key, each in leaves.items()}
            outputs = getattr(module, name)(**limited, segments=segments, state=first)
            loss = sum((each * torch.cos(torch.arange(each.numel())).view_as(each)).sum() for each in outputs)
            assert isinstance(loss, Tensor)
            results.append(torch.autograd.grad(loss, [*leaves.values(), first]))
        for found, expected in zip(*results, strict=True):
            assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@needs_triton
@pytest.mark.parametrize("kind", ["mamba", "delta"])
def test_a_scan_by_triton_takes_bf16_and_no_state(kernels: dict[str, ModuleType], kind: str) -> None:
    inputs, _ = inputs_of(kind, 70)
    wide = ("a", "dt", "g", "beta")
    given = {key: each if key in wide else each.bfloat16() for key, each in inputs.items()}
    name = "selective_scan" if kind == "mamba" else "delta_rule_scan"
    found, last = getattr(kernels["state_space.triton_scans"], name)(**given)
    expected, end = getattr(scans, name)(**{key: each.double() for key, each in given.items()})
    assert found.dtype == torch.bfloat16 and last.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(last.double(), end, rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_the_convolution_by_triton_gives_torchs_outputs_and_gradients(
    kernels: dict[str, ModuleType], packed: bool
) -> None:
    torch.manual_seed(1)
    given = [torch.randn(shape) for shape in ((70, 2, 67), (67, 4), (67,), (3, 2, 67))]
    segments = torch.repeat_interleave(torch.arange(4), torch.tensor([2, 1, 29, 38])).expand(2, -1) if packed else None
    for before, bias in ((True, True), (False, True), (False, False)):
        results = []
        for module, dtype in ((kernels["state_space.triton_conv"], torch.float32), (scans, torch.float64)):
            x, weight, shift, past = (each.to(dtype).requires_grad_() for each in given)
            leaves = [x, weight, *([shift] if bias else []), *([past] if before else [])]
            y = module.causal_conv(x, weight, shift if bias else None, segments, past if before else None)
            pull = torch.cos(torch.arange(y.numel())).view_as(y).to(dtype)
            results.append((y, *torch.autograd.grad(y, leaves, pull)))
        for found, expected in zip(*results, strict=True):
            assert (found - expected).abs().max() <= 3e-6 * max(1.0, expected.abs().max().item())


def test_packages_are_called_in_their_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the packages' signatures, which compute what those document, from torch's own kernels."""

    def mamba(x, dt, a, b, c, chunk_size, *, initial_states, **given):  # type: ignore[no-untyped-def]
        seq_idx = given["seq_idx"]
        assert given["return_final_states"] and (seq_idx is None or seq_idx.dtype == torch.int32)
        x, dt, b, c = (each.transpose(0, 1) for each in (x, dt, b, c))
        y, last = scans.selective_scan(x, dt, a, b, c, segments=seq_idx, state=initial_states, chunk=chunk_size)
        return y.transpose(0, 1), last

    def delta(q, k, v, g, beta, *, scale, initial_state, output_final_state):  # type: ignore[no-untyped-def]
        assert scale == 1.0 and output_final_state and q.shape[2] == v.shape[2]
        o, last = scans.delta_rule_scan(*(each.transpose(0, 1) for each in (q, k, v, g, beta)), state=initial_state)
        return o.transpose(0, 1), last

    def conv(x, weight, bias, *, seq_idx, initial_states, activation):  # type: ignore[no-untyped-def]
        assert activation == "silu" and (seq_idx is None or (initial_states is None and x.stride(1) == 1))
        before = None if initial_states is None else initial_states.permute(2, 0, 1)
        return scans.causal_conv(x.permute(2, 0, 1), weight, bias, seq_idx, before).permute(1, 2, 0)

    made = {"mamba_chunk_scan_combined": mamba, "chunk_gated_delta_rule": delta, "causal_conv1d_fn": conv}
    monkeypatch.setattr(state_space_packages, "resolve_name", lambda name: made[name.partition(":")[2]])
    segments = torch.repeat_interleave(torch.arange(2), torch.tensor([20, 51])).expand(2, -1)
    for kind, name in (("mamba", "selective_scan"), ("delta", "delta_rule_scan")):
        inputs, state = inputs_of(kind, 71)
        for known, first in ((None, None), (segments, None), (None, state), (segments, state)):
            found = getattr(state_space_packages, name)(**inputs, segments=known, state=first)
            for a, b in zip(found, getattr(scans, name)(**inputs, segments=known, state=first), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    x, weight, before = torch.randn(71, 2, 8), torch.randn(8, 4), torch.randn(3, 2, 8)
    for known, past in ((None, None), (segments, None), (None, before), (segments, before)):
        expected = scans.causal_conv(x, weight, None, known, past)
        torch.testing.assert_close(state_space_packages.causal_conv(x, weight, None, known, past), expected)
    need = KernelRequirements(device="cuda", dtype=torch.float32)
    assert package_unsupported_reason("fla", KernelRequirements()) == "it needs a CUDA device"
    assert package_unsupported_reason("no_such_package", need) == "the package no_such_package is not installed"
