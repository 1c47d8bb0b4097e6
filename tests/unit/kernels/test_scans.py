"""Scans in chunks against their recurrences, written out in fp64; documents apart; the causal convolution against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.state_space import scans

LENGTHS = (1, 3, 63, 64, 65, 257)
BATCH, HEADS, GROUPS, SIZE, WIDTH = 2, 6, 3, 4, 5


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _mamba(length: int) -> dict[str, Tensor]:
    inputs = {
        "x": _drawn(length, BATCH, HEADS, SIZE),
        "dt": F.softplus(_drawn(length, BATCH, HEADS)),
        "a": -torch.rand(HEADS, dtype=torch.float64) * 16 - 1,
        "b": _drawn(length, BATCH, GROUPS, WIDTH),
        "c": _drawn(length, BATCH, GROUPS, WIDTH),
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def _delta(length: int) -> dict[str, Tensor]:
    inputs = {
        "q": F.normalize(_drawn(length, BATCH, GROUPS, WIDTH), dim=-1),
        "k": F.normalize(_drawn(length, BATCH, GROUPS, WIDTH), dim=-1),
        "v": _drawn(length, BATCH, HEADS, SIZE),
        "g": -F.softplus(_drawn(length, BATCH, HEADS)) * 4,
        "beta": torch.sigmoid(_drawn(length, BATCH, HEADS)),
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def _mamba_recurrence(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, token by token and with every index written out."""
    outputs = []
    b, c = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (b, c))
    for t in range(len(x)):
        state = torch.exp(dt[t] * a)[..., None, None] * state + torch.einsum("bn,bnp,bnd->bnpd", dt[t], x[t], b[t])
        outputs.append(torch.einsum("bnpd,bnd->bnp", state, c[t]))
    return torch.stack(outputs), state


def _delta_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    q, k = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (q, k))
    for t in range(len(v)):
        state = torch.exp(g[t])[..., None, None] * state
        update = beta[t][..., None] * (v[t] - torch.einsum("bnde,bnd->bne", state, k[t]))
        state = state + torch.einsum("bnd,bne->bnde", k[t], update)
        outputs.append(torch.einsum("bnde,bnd->bne", state, q[t]))
    return torch.stack(outputs), state


KINDS = {
    "mamba": (_mamba, _mamba_recurrence, scans.selective_scan, (BATCH, HEADS, SIZE, WIDTH)),
    "delta": (_delta, _delta_recurrence, scans.delta_rule_scan, (BATCH, HEADS, WIDTH, SIZE)),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_in_chunks_is_its_recurrence_forward_and_backward(kind: str, length: int) -> None:
    draw, recurrence, scan, shape = KINDS[kind]
    inputs, state = draw(length), _drawn(*shape).requires_grad_()
    tensors = [*inputs.values(), state]
    found, expected = scan(**inputs, state=state, chunk=32), recurrence(**inputs, state=state)
    weights = [torch.randn_like(tensor) for tensor in expected]
    gradients = [
        torch.autograd.grad(sum((one * w).sum() for one, w in zip(pair, weights, strict=True)), tensors)
        for pair in (found, expected)
    ]
    for a, b in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert (a - b).abs().max() <= 1e-12 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_steps_go_on_where_a_scan_ended(kind: str) -> None:
    draw, _, scan, _ = KINDS[kind]
    inputs = {name: tensor.detach() for name, tensor in draw(40).items()}
    whole, _ = scan(**inputs, chunk=16)
    start = {name: tensor if name == "a" else tensor[:30] for name, tensor in inputs.items()}
    _, state = scan(**start, chunk=16)
    for t in range(30, 40):
        now = {name: tensor if name == "a" else tensor[t] for name, tensor in inputs.items()}
        step = scans.selective_scan_step if kind == "mamba" else scans.delta_rule_step
        y, state = step(**now, state=state)
        torch.testing.assert_close(y, whole[t], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_packed_row_are_scanned_as_if_each_were_alone(kind: str) -> None:
    draw, _, scan, shape = KINDS[kind]
    inputs, state = {name: tensor.detach() for name, tensor in draw(100).items()}, _drawn(*shape)
    borders = (0, 10, 11, 48, 64, 100)
    documents = torch.repeat_interleave(torch.tensor([3, 1, 7, 3, 3 + 1]), torch.tensor(borders).diff())
    segments = scans.segment_ids_from_document_ids(documents.expand(BATCH, -1))
    whole, last = scan(**inputs, segments=segments, state=state, chunk=16)
    for number, (low, high) in enumerate(zip(borders, borders[1:], strict=False)):
        part = {name: tensor if name == "a" else tensor[low:high] for name, tensor in inputs.items()}
        alone, end = scan(**part, chunk=16, state=state if number == 0 else None)
        torch.testing.assert_close(whole[low:high], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(last, end, rtol=0, atol=1e-12)


def test_strong_decay_gives_finite_gradients() -> None:
    inputs = _mamba(64)
    inputs["dt"] = (inputs["dt"].detach() * 100).requires_grad_()
    y, _ = scans.selective_scan(**{name: tensor.float() for name, tensor in inputs.items()})
    y.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in inputs.values())


def _torchs_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    padded = F.pad(x, (0, 0, 0, 0, 3, 0)).permute(1, 2, 0)
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).permute(2, 0, 1)


def _close_with_gradients(found: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((each * weights).sum(), tensors, retain_graph=True) for each in (found, expected)]
    torch.testing.assert_close((found, *gradients[0]), (expected, *gradients[1]))


@pytest.mark.parametrize("length", (1, 2, 9))
def test_the_convolution_is_torchs_forward_and_backward_and_goes_on_from_the_last_inputs(length: int) -> None:
    x, weight, bias = tensors = [_drawn(*shape).requires_grad_() for shape in ((length + 5, BATCH, 7), (7, 4), (7,))]
    expected = _torchs_convolution(x, weight, bias)
    _close_with_gradients(scans.causal_conv(x, weight, bias), expected, tensors)
    before = scans.last_conv_inputs(x[:length], 4)
    _close_with_gradients(scans.causal_conv(x[length:], weight, bias, before=before), expected[length:], tensors)


def test_the_convolution_and_its_gradients_do_not_look_into_another_document() -> None:
    x, weight = tensors = [_drawn(9, 1, 7).requires_grad_(), _drawn(7, 4).requires_grad_()]
    segments = scans.segment_ids_from_document_ids(torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2]]))
    alone = torch.cat([_torchs_convolution(part, weight, None) for part in x.split((4, 1, 4))])
    _close_with_gradients(scans.causal_conv(x, weight, None, segments), alone, tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_scan_keeps_for_its_backward_pass_is_less_than_the_insides_of_its_chunks(kind: str) -> None:
    draw, _, scan, _ = KINDS[kind]
    inputs, stored = draw(512), dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, _ = scan(**inputs, chunk=64)
    decays = 8 * 512 * 64 * BATCH * HEADS  # bytes of one of the arrays inside of chunks
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
    assert sum(size for place, size in stored.items() if place not in given) <= decays / 10
    assert y.requires_grad
