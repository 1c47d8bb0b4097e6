"""Triton's kernels in its interpreter, against the reference; tests/test_gpu_benchmarks.py compiles them for a Hopper."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.kernels import NAMED
from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.choice.table import (
    CANDIDATES,
    KernelRequirements,
    Kernels,
    select_kernels,
    supported_kernel_requests,
)
from megatron.core.kernels.ops import linear_loss, reference, requirements
from megatron.core.kernels.ops.linear_loss import VocabularyShard
from megatron.core.kernels.ops.permute import permute
from megatron.core.kernels.ops.reference import GatedActivationOptions
from megatron.core.transformer.dispatch import permutation_by_expert, permute_tokens, unpermute_tokens
from tests.helpers import tiny
from tests.helpers.triton_interpreter import interpreted, missing_interpreter, needs_triton

ROOT = Path(__file__).resolve().parents[3]
FILES = ("triton.norm", "triton.pointwise", "triton.rotary", "triton.split_qkv", "triton.loss", "triton.permute")
GPU = KernelRequirements(device="cuda", dtype=torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[str, ModuleType]]:
    """The files, imported anew so that their kernels are interpreted, as tensors are on a CPU."""
    with interpreted(*FILES) as modules:
        yield modules


def draw(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(name) + sum(shape)))


def compare(
    kernel: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    """Result and gradients of a kernel against those of the formula in fp64, from the same rounded inputs."""
    mine = [one.to(dtype).requires_grad_() for one in inputs]
    exact = [one.detach().double().requires_grad_() for one in mine]
    found, expected = kernel(*mine), formula(*exact)
    pull = draw("gradient", *expected.shape).to(dtype)
    for a, b in zip(
        (found, *torch.autograd.grad(found, mine, pull.to(found.dtype))),
        (expected, *torch.autograd.grad(expected, exact, pull.double())),
        strict=True,
    ):
        assert (a.double() - b).abs().max() <= TOLERANCE[dtype] * b.abs().max()
    assert found.dtype == dtype or expected.dim() == 1, "losses are wide"


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_equal_the_reference(kernels: dict[str, ModuleType], dtype: torch.dtype) -> None:
    file = kernels["triton.norm"]
    for rows, size in ((3, 37), (70, 129), (1, 5)):  # more rows than a program sums, more columns than one does
        x, weight, bias = draw("x", rows, 1, size), 1 + draw("weight", size), draw("bias", size)
        compare(lambda x, w: file.rms_norm(x, w, 1e-3), lambda x, w: reference.rms_norm(x, w, 1e-3), (x, weight), dtype)
        compare(lambda x: file.rms_norm(x, None, 1e-3), lambda x: reference.rms_norm(x, None, 1e-3), (x,), dtype)
        compare(
            lambda x, w, b: file.layer_norm(x, w, b, 0.1),
            lambda x, w, b: reference.layer_norm(x, w, b, 0.1),
            (x, weight, bias),
            dtype,
        )
    assert file.rms_norm(torch.empty(0, 5), torch.ones(5), 1e-5).shape == (0, 5)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sums_and_their_norms_equal_the_reference(kernels: dict[str, ModuleType], dtype: torch.dtype) -> None:
    def both(found: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(found)  # so that gradients come to the sum and to its norm

    file, (x, update) = kernels["triton.norm"], (draw(name, 5, 1, 37) for name in ("x", "update"))
    weight, bias = 1 + draw("weight", 37), draw("bias", 37)
    compare(
        lambda *given: both(file.residual_norm(*given, 1e-3)),
        lambda *given: both(reference.residual_norm(*given, 1e-3)),
        (x, update, weight, bias),
        dtype,
    )
    compare(
        lambda *given: both(file.residual_norm(*given, None, 1e-3)),
        lambda *given: both(reference.residual_norm(*given, None, 1e-3)),
        (x, update, weight),
        dtype,
    )
    total, normed = file.residual_norm(*(one.to(dtype) for one in (x, update, weight)), None, 1e-3)
    assert torch.equal(normed, file.rms_norm(total, weight.to(dtype), 1e-3)), (
        "what is normed is the sum as it was rounded"
    )


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("drops, capacity", [(False, None), (True, None), (True, 4)])
def test_rows_go_to_experts_and_back_as_by_torch(
    kernels: dict[str, ModuleType], drops: bool, capacity: int | None, dtype: torch.dtype
) -> None:
    experts = torch.tensor([[0, 2], [3, 2], [0, 4], [2, 4], [2, 0], [0, 3], [4, 0]])  # nobody chooses expert 1
    kept = torch.ones_like(experts, dtype=torch.bool).index_fill_(0, torch.tensor([2, 3]), False) if drops else None
    order = permutation_by_expert(
        experts, kept, 5, capacity=capacity, all_here=True, permute=kernels["triton.permute"].permute
    )
    for given, go in ((7, permute_tokens), (len(order.choices), unpermute_tokens)):
        compare(
            lambda x, go=go: go(x, order),
            lambda x, go=go: go(x, replace(order, permute=permute)),
            (draw("x", given, 1030),),
            dtype,
        )
    assert unpermute_tokens(torch.empty(len(order.choices), 0), order).shape == (7, 0)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "quick_gelu"])
def test_gated_activations_equal_the_reference(kernels: dict[str, ModuleType], name: str, dtype: torch.dtype) -> None:
    for gating in (GatedActivationOptions(), GatedActivationOptions(clamp=0.7, offset=1.0)):
        compare(
            lambda x: kernels["triton.pointwise"].gated_activation(x, name, gating),
            lambda x: reference.gated_activation(x, name, gating),
            (draw("x", 3, 2, 2 * 19),),
            dtype,
        )


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"])
def test_activations_with_a_bias_equal_the_reference(
    kernels: dict[str, ModuleType], name: str, dtype: torch.dtype
) -> None:
    op = kernels["triton.pointwise"].bias_activation
    cases = [(67, 19, None), (66, 19, GatedActivationOptions(0.7, 1.0))]  # more rows than a program sums
    for rows, size, gating in (
        [*cases, (3, 1030, None), (3, 530, GatedActivationOptions())] if name == "gelu" else cases
    ):
        columns = size if gating is None else 2 * size
        compare(
            lambda x, bias, gating=gating: op(x, bias, name, gating),
            lambda x, bias, gating=gating: reference.bias_activation(x, bias, name, gating),
            (draw("x", rows, 1, columns), draw("bias", columns)),
            dtype,
        )
    nothing, bias = torch.empty(0, 6), torch.ones(6, requires_grad=True)
    op(nothing, bias, name).sum().backward()
    assert bias.grad is not None and not bias.grad.any(), "no rows, no gradient"


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "rows, size, gating", [([67, 0, 64, 1, 0], 19, None), ([0, 3, 130], 19, GatedActivationOptions(0.7, 1.0))]
)
def test_activations_with_a_bias_of_each_expert_equal_the_reference(
    kernels: dict[str, ModuleType],
    rows: list[int],
    size: int,
    gating: GatedActivationOptions | None,
    dtype: torch.dtype,
) -> None:
    columns, counts = size if gating is None else 2 * size, torch.tensor(rows)
    compare(
        lambda x, bias: kernels["triton.pointwise"].bias_activation(x, bias, "silu", gating, counts),
        lambda x, bias: reference.bias_activation(x, bias, "silu", gating, counts),
        (draw("x", sum(rows), columns), draw("bias", len(rows), columns)),
        dtype,
    )
    nothing, bias = torch.empty(0, columns), torch.ones(len(rows), columns, requires_grad=True)
    kernels["triton.pointwise"].bias_activation(
        nothing, bias, "silu", gating, torch.zeros_like(counts)
    ).sum().backward()
    assert bias.grad is not None and not bias.grad.any(), "no rows, no gradient"


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_equal_the_reference(kernels: dict[str, ModuleType], interleaved: bool, dtype: torch.dtype) -> None:
    for rows, turned in (
        (1, 12),
        (2, 12),
        (2, 6),
    ):  # one table for all rows of a batch, or one each; the whole head, or half of it
        angles = draw("angles", 4, rows, 1, turned // 2)
        angles = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 1, 1, 2)
        compare(
            lambda x: kernels["triton.rotary"].rotary(x, angles.cos().float(), angles.sin().float(), interleaved),
            lambda x: reference.rotary(x, angles.cos(), angles.sin(), interleaved),
            (draw("x", 4, 2, 3, 12),),
            dtype,
        )


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("counts, turned", [((3, 2, 2), 12), ((3, 3, 1, 1), 6)], ids=["whole", "half, gate"])
def test_queries_and_keys_of_a_fused_projection_are_rotated_as_by_the_reference(
    kernels: dict[str, ModuleType], counts: tuple[int, ...], turned: int, interleaved: bool, dtype: torch.dtype
) -> None:
    angles = draw("angles", 4, 2 if turned == 6 else 1, 1, turned // 2)
    angles = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 1, 1, 2)

    def joined(parts: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(
            [part.permute(1, 2, 0, 3).flatten() for part in parts]
        )  # whose gradients lie as attention's do

    rotary_qkv = kernels["triton.rotary"].rotary_qkv
    compare(
        lambda x: joined(rotary_qkv(x, counts, angles.cos().float(), angles.sin().float(), interleaved)),
        lambda x: joined(reference.rotary_qkv(x, counts, angles.cos(), angles.sin(), interleaved)),
        (draw("x", 4, 2, sum(counts), 12),),
        dtype,
    )


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("counts", [(3, 2, 2), (3, 3, 1, 1), (1, 1, 1)], ids=str)
def test_gradients_of_a_split_projection_and_of_its_bias_equal_the_reference(
    kernels: dict[str, ModuleType], counts: tuple[int, ...], biased: bool, dtype: torch.dtype
) -> None:
    def joined(parts: tuple[Tensor, ...]) -> Tensor:
        q, *others = parts  # queries as attention has them, and the rest as it is
        return torch.cat([q.permute(1, 2, 0, 3).flatten(), *(one.flatten() for one in others)])

    op = kernels["triton.split_qkv"].split_qkv
    for length in (1, 35):  # fewer tokens than one program joins, and more
        given = draw("x", length, 2, sum(counts), 12), *((draw("bias", 12 * sum(counts)),) if biased else ())
        compare(
            lambda x, bias=None: joined(op(x if bias is None else with_bias(x, bias), counts, bias)),
            lambda x, bias=None: joined(reference.split_qkv(x if bias is None else with_bias(x, bias), counts, bias)),
            given,
            dtype,
        )


def with_bias(x: Tensor, bias: Tensor) -> Tensor:
    """What a projection gives whose bias gets its gradient later. x: [s, b, n, d]; bias: [n * d]."""
    return x + bias.detach().view(x.shape[2:])


class _Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@needs_triton
def test_the_gradient_of_a_fused_projection_is_written_once_and_not_concatenated(
    kernels: dict[str, ModuleType],
) -> None:
    changes = {"position_embedding_type": "rope", "group_query_attention": True, "num_query_groups": 2}
    names, gradients = _backward_of_a_layer(changes, rotary_qkv=kernels["triton.rotary"].rotary_qkv)
    by_formula, expected = _backward_of_a_layer(changes, rotary_qkv=reference.rotary_qkv)
    assert "cat" not in names and by_formula.count("cat") >= 1
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def _backward_of_a_layer(changes: dict[str, Any], **kernels: Any) -> tuple[list[str], list[Tensor]]:
    """Names of the backward pass's operations, and the gradients, of a network of one layer with these kernels."""
    run = tiny.run_of(tiny.config(num_layers=1, seq_length=8, **changes))
    run = replace(run, kernels=replace(run.kernels, **kernels))
    stage = tiny.gpt(run, stage_specs_of_run(run.config)[0]).materialize(1)
    ids = torch.arange(2 * run.config.train.seq_length).view(2, -1) % 7
    loss = stage(ids=ids, labels=ids).sum()
    with _Operations() as seen:
        loss.backward()
    return seen.names, [param.grad for param in stage.parameters()]


@needs_triton
@pytest.mark.parametrize("backend", ["fused", "unfused"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True, "position_embedding_type": "rope"},
    ],
    ids=["learned positions", "norms before rotary embeddings"],
)
def test_gradients_of_attention_are_joined_as_the_bias_gradient_is_summed(
    kernels: dict[str, ModuleType], changes: dict[str, Any], backend: str
) -> None:
    changes = {**changes, "attention_backend": backend}
    names, gradients = _backward_of_a_layer(changes, split_qkv=kernels["triton.split_qkv"].split_qkv)
    by_torch, expected = _backward_of_a_layer(changes)
    concatenated = by_torch.count("cat") - names.count("cat")
    assert concatenated == 1, "those of queries, keys and values, which torch's backward pass of a split puts together"
    assert names.count("sum") == by_torch.count("sum"), "that of the bias is one of the parts' sums"
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_loss_of_blocks_equals_that_by_torch(
    kernels: dict[str, ModuleType], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_loss, "_FEWEST", 4)
    monkeypatch.setattr(kernels["triton.loss"], "_BLOCK", 16)
    targets, weights = torch.tensor([3, -1, 20, 0, 7, 7, -1, 12, 5]), torch.linspace(0.5, 2.0, 9)
    others = torch.tensor([0.5, 2.0, 0.3])[None, :, None]  # what another rank says of every token
    for valid, first in (
        (21, 0),
        (-3, 21),
    ):  # a rank's words, the last of which are padding; a rank with nothing but padding
        words = VocabularyShard(
            first, valid, None, lambda stated: torch.cat((stated, others.to(stated.dtype).expand_as(stated)))
        )
        for weight_of in (torch.ones(9), weights):
            compare(
                lambda x, w, b: (
                    linear_loss.blockwise_linear_cross_entropy(x, w, b, targets, words, fused=True) * weight_of
                ),
                lambda x, w, b: linear_loss.blockwise_linear_cross_entropy(x, w, b, targets, words) * weight_of,
                (draw("x", 9, 6), draw("words", 24, 6), draw("biases", 24)),
                dtype,
            )


@needs_triton
def test_layers_with_any_of_these_kernels_are_one_graph_of_torchs_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "benchmarks/gpu/graph_breaks.py"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.count("one graph") == 11, done.stdout + done.stderr[-3000:]


def test_why_triton_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    ours = [candidate for candidate in CANDIDATES if candidate.name == "triton"]
    assert {candidate.op for candidate in ours} == {
        "layer_norm",
        "rms_norm",
        "gated_activation",
        "bias_activation",
        "rotary",
        "rotary_qkv",
        "split_qkv",
        "cross_entropy",
        "permute",
        "residual_norm",
        "paged_attention",
        "causal_conv",
        "selective_scan",
        "delta_rule_scan",
        "quantise",
        "adamw",
    }
    eight_bits = replace(GPU, low=LowPrecisionConfig(fp8_format="hybrid"))
    for candidate in ours:
        assert (
            candidate.unsupported_reason(KernelRequirements()) == "it needs a CUDA device"
            and candidate.unsupported_reason(eight_bits) == "the package triton is not installed"
        )
    monkeypatch.setattr(requirements, "find_spec", lambda name: object())
    for candidate in ours:
        assert (
            candidate.unsupported_reason(eight_bits) == ""
            and candidate.unsupported_reason(replace(eight_bits, dtype=torch.float64))
            == "it computes in fp32, not in fp64"
        )
    assert (
        select_kernels(GPU, {"rms_norm": "triton"}).rms_norm is not Kernels().rms_norm
        and select_kernels(GPU).rms_norm is Kernels().rms_norm
    )
    with pytest.raises(
        ConfigError,
        match="--kernel rotary=triton cannot be used: triton: it needs a CUDA device; choose another of triton, torch",
    ):
        select_kernels(KernelRequirements(), {"rotary": "triton"})
    assert supported_kernel_requests(
        KernelRequirements(), {"rotary": "triton", "rms_norm": "reference", "attention": "auto"}
    ) == {"rms_norm": "reference", "attention": "auto"}


def test_the_names_that_the_command_line_knows_are_those_of_the_table() -> None:
    for op, names in NAMED.items():
        assert {candidate.name for candidate in CANDIDATES if candidate.op == op} == set(names), op
    rest = {candidate.op for candidate in CANDIDATES} - set(NAMED)
    assert rest == {"attention", "cross_entropy", "moe_flex_dispatcher", "paged_attention"}, (
        "these have flags of their own"
    )


def test_why_kernels_are_not_interpreted() -> None:
    assert missing_interpreter("3.7.1", "2.4.6") == missing_interpreter("3.6.0", "2.3.9") == ""
    assert "takes no numpy 2.4.6" in missing_interpreter("3.6.0", "2.4.6")
    assert "pip install triton" in missing_interpreter("", "2.4.6")
