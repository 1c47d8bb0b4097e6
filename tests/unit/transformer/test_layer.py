"""One layer of each kind against the formula written with plain torch, and how layers are recomputed and dropped out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.plan.layers import network_layer_plans, uniform_layer_plans
from megatron.core.kernels.ops import reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.blocks import Block
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.dropout import Dropout
from megatron.core.transformer.stack import TransformerStack
from tests.helpers import tiny
from tests.helpers.training import train_on

S, B, H = 6, 2, 32


def stack_of(layers: int = 1, **changes: Any) -> tuple[TransformerStack, tiny.RunContext]:
    run = tiny.run_of(tiny.config(**{"fp64": True, **changes}))
    stack = TransformerStack(network_layer_plans(run.config.model)[:layers], run.layer_build_context, final_norm=False)
    set_global_param_names(stack)
    materialize_parameters(stack, run.mesh, seed=2)
    return stack, run


def by_hand(layer: Block, x: Tensor, run: tiny.RunContext) -> Tensor:
    """x + attention(norm(x)), then x + mlp(norm(x)), one head at a time."""
    model, weights = run.config.model, dict(layer.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        scale = weights[f"{name}.weight"]
        if model.normalization == "RMSNorm":
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale
        return F.layer_norm(x, x.shape[-1:], scale, weights[f"{name}.bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    normed = norm(x, "input_layernorm")
    q, k, v = linear(normed, "self_attention.linear_qkv").split(
        [model.query_projection_width, model.key_projection_width, model.key_projection_width], dim=-1
    )
    size, mixed = model.kv_channels, []
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    for head in range(model.num_attention_heads):
        group = head // (model.num_attention_heads // model.num_query_groups)
        qs, ks, vs = (
            q[..., head * size :][..., :size],
            k[..., group * size :][..., :size],
            v[..., group * size :][..., :size],
        )
        if model.qk_layernorm:
            qs, ks = norm(qs, "self_attention.q_layernorm"), norm(ks, "self_attention.k_layernorm")
        scores = torch.einsum("ibd,jbd->bij", qs, ks) / size**0.5
        mixed.append(torch.einsum("bij,jbd->ibd", scores.masked_fill(hidden, -torch.inf).softmax(-1), vs))
    after = model.apply_residual_connection_post_layernorm
    x = (normed if after else x) + linear(torch.cat(mixed, dim=-1), "self_attention.linear_proj")
    normed = norm(x, "pre_mlp_layernorm")
    wide = linear(normed, "mlp.linear_fc1")
    if model.has_gated_mlp:
        gate, up = wide.chunk(2, dim=-1)
        wide = (F.silu(gate) if model.swiglu else gate * torch.sigmoid(1.702 * gate)) * up
    else:
        wide = F.relu(wide).square() if model.squared_relu else F.gelu(wide)
    return (normed if after else x) + linear(wide, "mlp.linear_fc2")


KINDS = {
    "gpt": {},
    "grouped": {"group_query_attention": True, "num_query_groups": 2},
    "one-key": {"group_query_attention": True, "num_query_groups": 1},
    "narrow heads": {"kv_channels": 6},
    "gated": {"swiglu": True, "ffn_hidden_size": 24},
    "quick": {"quick_geglu": True, "ffn_hidden_size": 24},
    "relu": {"squared_relu": True},
    "rms": {"normalization": "RMSNorm", "add_bias_linear": False},
    "qkv bias": {"add_bias_linear": False, "add_qkv_bias": True},
    "head norms": {"qk_layernorm": True},
    "after norm": {"apply_residual_connection_post_layernorm": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_formula(kind: str) -> None:
    stack, run = stack_of(position_embedding_type="none", **KINDS[kind])
    with torch.no_grad():
        for param in stack.parameters():
            param.add_(torch.randn_like(param) * 0.1)  # biases and scales away from zero and one
    x = torch.randn(S, B, H).double()
    torch.testing.assert_close(
        stack(x, ForwardContext(AttentionMaskSpec())), by_hand(stack.layers["0"], x, run), rtol=1e-11, atol=1e-11
    )


def test_layers_are_named_by_their_global_number() -> None:
    run = tiny.run_of(tiny.config())
    stack = TransformerStack(uniform_layer_plans(4)[2:], run.layer_build_context, final_norm=True)
    assert {name.split(".")[1] for name, _ in stack.named_parameters() if name.startswith("layers")} == {"2", "3"}


@pytest.mark.parametrize(
    "method, layers, expected",
    [
        ("uniform", 1, [([0], True), ([1], True), ([2], True), ([3], True)]),
        ("uniform", 3, [([0, 1, 2], True), ([3], True)]),
        ("block", 1, [([0], True), ([1], False), ([2], False), ([3], False)]),
        ("block", 3, [([0], True), ([1], True), ([2], True), ([3], False)]),
    ],
)
def test_full_recomputation_covers_groups_or_the_first_layers(method: str, layers: int, expected: list) -> None:
    stack, _ = stack_of(4, recompute_granularity="full", recompute_method=method, recompute_num_layers=layers)
    place = {layer: int(number) for number, layer in stack.layers.items()}
    assert [([place[layer] for layer in group], drop) for group, drop in stack._recompute_groups()] == expected


def test_evaluation_recomputes_and_drops_nothing() -> None:
    stack, _ = stack_of(
        recompute_granularity="full", recompute_method="uniform", hidden_dropout=0.5, attention_dropout=0.5
    )
    x, calls = torch.randn(S, B, H).double().requires_grad_(), []
    stack.layers["0"].register_forward_pre_hook(lambda *_: calls.append(1))
    stack.eval()
    first = stack(x, ForwardContext(AttentionMaskSpec()))
    assert torch.equal(first, stack(x, ForwardContext(AttentionMaskSpec())))
    first.sum().backward()
    assert len(calls) == 2, "backward ran no layer again"
    stack.train()
    assert not torch.equal(stack(x, ForwardContext(AttentionMaskSpec())), first)


def test_dropout_draws_from_its_stream_only() -> None:
    _, run = stack_of()
    x, layer = torch.ones(1000), Dropout(0.25, run.streams, "cut")
    state = torch.get_rng_state()
    dropped = layer(x)
    assert torch.equal(torch.get_rng_state(), state), "the default stream is where it was"
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.75]) and abs(dropped.mean() - 1) < 0.1
    assert not torch.equal(layer(x), dropped)
    assert Dropout(0.0, run.streams, "cut")(x) is x and layer.eval()(x) is x


@pytest.mark.parametrize(
    "changes, norms",
    [
        ({}, 2),
        ({"sandwich_norm": True}, 2),
        ({"apply_residual_connection_post_layernorm": True}, 2),
        ({"num_experts": 4, "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True}, 2),
        ({"parallel_mamba": True, "mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_num_groups": 2}, 2),
        ({"norm_after_sublayer": True}, 0),
    ],
    ids=str,
)
def test_recomputed_norms_are_not_kept_for_the_backward_pass_and_change_no_gradient(
    changes: dict[str, Any], norms: int
) -> None:
    x, gradients, kept = torch.randn(S, B, H).double(), [], []
    for modules in (None, ("layernorm",)):
        stack, _ = stack_of(recompute_granularity=modules and "selective", recompute_modules=modules, **changes)
        own, saved = x.clone().requires_grad_(), dict[int, Tensor]()
        weights = {param.untyped_storage().data_ptr() for param in stack.parameters()}

        # A hook outside, such as that of activation offloading, sees all activations but what hooks inside dropped.
        def keep(tensor: Tensor, saved: dict[int, Tensor] = saved, weights: set[int] = weights) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = stack(own, ForwardContext(AttentionMaskSpec()))
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
        output.square().sum().backward()
        gradients.append([own.grad, *(param.grad for param in stack.parameters())])
    assert kept[0] - kept[1] == norms * x.nbytes, kept
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("after_norm", [False, True])
def test_a_wide_residual_stays_fp32_from_layer_to_layer(after_norm: bool) -> None:
    stack, _ = stack_of(
        2, fp64=False, bf16=True, fp32_residual_connection=True, apply_residual_connection_post_layernorm=after_norm
    )
    x = torch.randn(S, B, H)
    formats = []
    for layer in stack.layers.values():
        layer.register_forward_hook(lambda module, inputs, output: formats.append((inputs[0].dtype, output.dtype)))
    assert (
        stack(x, ForwardContext(AttentionMaskSpec())).dtype == torch.float32
        and formats == [(torch.float32, torch.float32)] * 2
    )
    assert stack.layers["0"].input_layernorm(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization": "RMSNorm", "swiglu": True, "apply_layernorm_1p": True, "hidden_dropout": 0.1},
        {"num_experts": 4, "moe_ffn_hidden_size": 16},
    ],
    ids=str,
)
def test_a_kernel_that_sums_and_norms_takes_the_place_of_both(changes: dict[str, Any]) -> None:
    calls: list[int] = []

    def counted(*inputs: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return reference.residual_norm(*inputs)

    def trained(kernel: Any) -> list[float]:
        run = tiny.run_of(tiny.config(**changes, num_layers=2, global_batch_size=2, fp64=True))
        losses, norms = train_on(tiny.trainer_of(replace(run, kernels=replace(run.kernels, residual_norm=kernel))), 3)
        return losses + norms

    found = trained(counted)
    assert found == pytest.approx(trained(None), rel=1e-10) and len(calls) == 12, (
        "two layers of two microbatches in three steps"
    )


def trained_with_bias_kernel(changes: dict[str, Any], ranks: int, kernel: bool) -> tuple[list[float], int]:
    """Losses and gradient norms of three steps, and how often the kernel in place of bias and activation was called."""
    calls: list[int] = []

    def counted(x: Tensor, bias: Tensor, *how: Any) -> Tensor:
        assert x.shape[-1] == bias.shape[-1], "a bias is cut like the rows of its matrix"
        calls.append(1)
        return reference.bias_activation(x, bias, *how)

    run = tiny.run_of(tiny.config(ranks, **changes, num_layers=2, global_batch_size=2, fp64=True))
    build = replace(run, kernels=replace(run.kernels, bias_activation=counted if kernel else None))
    losses, norms = train_on(tiny.trainer_of(build), 3)
    return losses + norms, len(calls)


ROTARY: dict[str, Any] = {"position_embedding_type": "rope"}
SEQUENCE_CUT: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
BIASED_EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}


@pytest.mark.parametrize(
    "changes, ranks",
    [
        ({}, 1),
        ({"openai_gelu": True, "recompute_granularity": "selective", "recompute_modules": ("layernorm",)}, 1),
        ({"swiglu": True, "delay_wgrad_compute": True}, 1),
        (SEQUENCE_CUT, 2),
        ({**SEQUENCE_CUT, "swiglu": True}, 2),
        ({**BIASED_EXPERTS, "recompute_granularity": "selective", "recompute_modules": ("moe_act",)}, 1),
        ({**SEQUENCE_CUT, **BIASED_EXPERTS, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 2),
        ({"tensor_model_parallel_size": 2, **BIASED_EXPERTS, "swiglu": True}, 2),
    ],
    ids=str,
)
def test_a_kernel_that_adds_the_bias_takes_the_place_of_both(world: Any, changes: dict[str, Any], ranks: int) -> None:
    def trained(kernel: bool) -> tuple[list[float], int]:
        if ranks == 1:
            return trained_with_bias_kernel(changes, ranks, kernel)
        return world(ranks).run(trained_with_bias_kernel, changes, ranks, kernel)[0]

    (found, calls), (expected, none) = trained(True), trained(False)
    assert found == pytest.approx(expected, rel=1e-10) and none == 0
    assert calls == (24 if "moe_act" in changes.get("recompute_modules", ()) else 12), (
        "two layers of two microbatches in three steps, with what is recomputed"
    )


def trained_with_split_kernel(changes: dict[str, Any], ranks: int, kernel: bool) -> tuple[list[float], int]:
    """Losses and gradient norms of three steps, and how often the kernel that splits a projection was called."""
    calls: list[int] = []

    def counted(heads: Tensor, counts: tuple[int, ...], bias: Tensor | None) -> tuple[Tensor, ...]:
        assert bias is None or bias.numel() == heads[0, 0].numel(), "a bias is cut like heads"
        calls.append(1)
        return reference.split_qkv(heads, counts, bias)

    run = tiny.run_of(tiny.config(ranks, **changes, num_layers=2, global_batch_size=2, fp64=True))
    build = replace(run, kernels=replace(run.kernels, split_qkv=counted if kernel else None))
    losses, norms = train_on(tiny.trainer_of(build), 3)
    return losses + norms, len(calls)


@pytest.mark.parametrize(
    "changes, ranks, called",
    [
        ({}, 1, 12),
        ({"delay_wgrad_compute": True}, 1, 12),
        ({"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}, 1, 12),
        ({"group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True, **ROTARY}, 1, 12),
        ({"no_rope_freq": "[0,1]", **ROTARY}, 1, 6),
        (ROTARY, 1, 0),
        ({"add_bias_linear": False, "attention_output_gate": True}, 1, 12),
        (SEQUENCE_CUT, 2, 12),
        ({"tensor_model_parallel_size": 2, "delay_wgrad_compute": True}, 2, 12),
    ],
    ids=str,
)
def test_a_kernel_that_splits_the_projection_computes_the_gradient_of_its_bias(
    world: Any, changes: dict[str, Any], ranks: int, called: int
) -> None:
    def trained(kernel: bool) -> tuple[list[float], int]:
        if ranks == 1:
            return trained_with_split_kernel(changes, ranks, kernel)
        return world(ranks).run(trained_with_split_kernel, changes, ranks, kernel)[0]

    (found, calls), (expected, none) = trained(True), trained(False)
    assert found == pytest.approx(expected, rel=1e-10) and none == 0
    assert calls == called, "of two layers of two microbatches in three steps, those that do not rotate the projection"


def test_a_bias_before_a_multiplied_gate_is_added_by_the_linear_layer() -> None:
    model = tiny.config(swiglu=True).model
    assert model.can_fuse_mlp_bias and not replace(model, add_bias_linear=False).can_fuse_mlp_bias
    assert not replace(model, multipliers=replace(model.multipliers, mlp_multipliers=(0.5, 1.0))).can_fuse_mlp_bias
