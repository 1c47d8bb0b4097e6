"""The layer of experts against plain formulas and the published blocks, its initial values, and what recomputation keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeSparseMoeBlock

from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel import collectives
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.blocks import Block, PreNorm, make_layer
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer
from tests.helpers import tiny
from tests.helpers.world import Worlds

S, B, H, E, K = 6, 2, 32, 4, 2
ONE = ForwardContext(AttentionMaskSpec())
GATED = {"swiglu": True, "add_bias_linear": False, "ffn_hidden_size": 48, "normalization": "RMSNorm"}
SHARED = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}


def layer_of(kind: type[nn.Module] = MoELayer, **changes: Any) -> Any:
    """A layer of the tiny network whose every parameter differs from what it starts from."""
    run = tiny.run_of(
        tiny.config(**{"fp64": True, "num_experts": E, "moe_router_topk": K, "moe_ffn_hidden_size": 24, **changes})
    )
    plan = network_layer_plans(run.config.model)[0]
    layer = kind(run.layer_build_context, plan) if kind is MoELayer else kind(plan, run.layer_build_context)
    set_global_param_names(layer)
    materialize_parameters(layer, run.mesh, seed=3)
    random = torch.Generator().manual_seed(1)
    for param in layer.parameters():
        param.data += 0.1 * torch.randn(param.shape, dtype=torch.float64, generator=random).to(param.dtype)
    return layer


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return (
        torch.randn((S, B, H), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        .to(dtype)
        .requires_grad_()
    )


def act(wide: Tensor, *, gated: bool) -> Tensor:
    if not gated:
        return F.gelu(wide)
    gate, up = wide.chunk(2, -1)
    return F.silu(gate) * up


def by_formula(layer: MoELayer, x: Tensor, *, gated: bool) -> Tensor:
    """Token by token, expert by expert."""
    rows, bias = [], layer.router.bias
    for token in x.flatten(0, 1):
        scores = F.linear(token, layer.router.weight, bias)
        best, experts = scores.topk(K)
        weights, row = best.softmax(-1), torch.zeros_like(token)
        for weight, expert in zip(weights, experts.tolist(), strict=True):
            biases = [
                None if part.bias is None else part.bias[expert]
                for part in (layer.experts.linear_fc1, layer.experts.linear_fc2)
            ]
            wide = F.linear(token, layer.experts.linear_fc1.weight[expert], biases[0])
            row = row + weight * F.linear(act(wide, gated=gated), layer.experts.linear_fc2.weight[expert], biases[1])
        if layer.shared_experts is not None:
            shared = layer.shared_experts
            said = F.linear(
                act(F.linear(token, shared.linear_fc1.weight, shared.linear_fc1.bias), gated=gated),
                shared.linear_fc2.weight,
                shared.linear_fc2.bias,
            )
            row = row + said * (1.0 if shared.gate_weight is None else F.linear(token, shared.gate_weight).sigmoid())
        rows.append(row)
    return torch.stack(rows).view_as(x)


def gradients(layer: nn.Module, x: Tensor, output: Tensor) -> list[Tensor]:
    target = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    held = [x, *layer.parameters()]
    for tensor in held:
        tensor.grad = None
    (output * target).sum().backward()  # recomputed parts know no other way
    return [tensor.grad for tensor in held]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        GATED,
        {},
        {**GATED, **SHARED},
        {"moe_shared_expert_intermediate_size": 8},
        {**GATED, "add_bias_linear": True, **SHARED},
    ],
    ids=lambda c: " ".join(c) or "plain",
)
def test_a_layer_is_the_weighed_sum_of_its_experts_and_of_what_all_tokens_use(
    changes: dict[str, Any], grouped: bool
) -> None:
    layer, x = layer_of(**changes, moe_grouped_gemm=grouped), tokens()
    found = layer(x, ONE)
    expected = by_formula(layer, x, gated="swiglu" in changes)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for value, true in zip(gradients(layer, x, found), gradients(layer, x, expected), strict=True):
        torch.testing.assert_close(value, true, rtol=1e-11, atol=1e-11)


def test_a_layer_is_mixtrals_block() -> None:
    layer, x = layer_of(**GATED), tokens()
    theirs = MixtralSparseMoeBlock(
        MixtralConfig(num_local_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=24)
    ).double()
    theirs.gate.weight.data = layer.router.weight.data
    theirs.experts.gate_up_proj.data, theirs.experts.down_proj.data = (
        layer.experts.linear_fc1.weight.data,
        layer.experts.linear_fc2.weight.data,
    )
    expected = theirs(x.transpose(0, 1).contiguous()).transpose(0, 1)
    torch.testing.assert_close(layer(x, ONE), expected, rtol=1e-6, atol=1e-6)  # its softmax is taken in fp32


def test_a_layer_with_a_weighed_shared_expert_is_qwen2s_block() -> None:
    layer, x = layer_of(**GATED, **SHARED, moe_router_pre_softmax=True), tokens()
    theirs = Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=H,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=16,
            norm_topk_prob=False,
        )
    ).double()
    gate, up = layer.shared_experts.linear_fc1.weight.data.chunk(2)
    shared = theirs.shared_expert
    shared.gate_proj.weight.data, shared.up_proj.weight.data = gate, up
    shared.down_proj.weight.data = layer.shared_experts.linear_fc2.weight.data
    theirs.shared_expert_gate.weight.data = layer.shared_experts.gate_weight.data
    theirs.gate.weight.data = layer.router.weight.data
    theirs.experts.gate_up_proj.data, theirs.experts.down_proj.data = (
        layer.experts.linear_fc1.weight.data,
        layer.experts.linear_fc2.weight.data,
    )
    expected = theirs(x.transpose(0, 1).contiguous()).transpose(0, 1)
    torch.testing.assert_close(layer(x, ONE), expected, rtol=1e-6, atol=1e-6)


def test_a_half_precision_layer_stays_half_though_its_router_does_not() -> None:
    layer = layer_of(**GATED, **SHARED, fp64=False, bf16=True, moe_grouped_gemm=True)
    x = tokens(torch.bfloat16)
    found = layer(x, ONE)
    assert found.dtype == torch.bfloat16
    expected = by_formula(layer.double(), x.double(), gated=True).detach()
    assert float((found.detach().double() - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_layers_with_and_without_experts_follow_the_pattern() -> None:
    run = tiny.run_of(tiny.config(num_experts=E, moe_layer_freq="[0]+[1]*3"))
    kinds = [type(make_layer(plan, run.layer_build_context).mlp) for plan in network_layer_plans(run.config.model)]
    assert kinds == [MLP, MoELayer, MoELayer, MoELayer]


def test_experts_start_from_draws_of_their_own_with_the_deviations_of_a_dense_mlp() -> None:
    run = tiny.run_of(tiny.config(num_experts=64, hidden_size=64, moe_ffn_hidden_size=64, init_method_std=0.1, **GATED))
    layer = MoELayer(run.layer_build_context, network_layer_plans(run.config.model)[0])
    set_global_param_names(layer)
    materialize_parameters(layer, run.mesh, seed=3)
    up, down = layer.experts.linear_fc1.weight.detach(), layer.experts.linear_fc2.weight.detach()
    assert float(up.std()) == pytest.approx(0.1, rel=0.02)
    assert float(down.std()) == pytest.approx(0.1 / (2 * run.config.model.num_layers) ** 0.5, rel=0.02)
    assert len({tuple(expert[0].tolist()) for expert in up}) == 64


def saved_bytes(layer: Block, x: Tensor) -> int:
    """Bytes that the backward pass of a layer keeps, each memory once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x, ONE)
    held = sum(kept.values())
    del output
    return held


def test_recomputation_of_experts_keeps_less_and_changes_no_gradient() -> None:
    changes = {**GATED, "moe_shared_expert_intermediate_size": 96, "moe_ffn_hidden_size": 96}
    outcomes = {}
    for modules in ((), ("moe_act",), ("shared_experts",), ("moe",)):
        layer = layer_of(
            PreNorm,
            **changes,
            recompute_granularity="selective" if modules else None,
            recompute_modules=modules or None,
        )
        x = tokens()
        outcomes[modules] = saved_bytes(layer, x), gradients(layer, x, layer(x, ONE))
    size, rows = 8, S * B * K
    kept = {modules: held for modules, (held, _) in outcomes.items()}
    assert kept[()] - kept[("moe_act",)] >= rows * 96 * size * 3, kept  # silu(gate), the gated row, and the weighed one
    assert kept[()] - kept[("shared_experts",)] >= S * B * 96 * size * 4, kept
    assert kept[("moe",)] < min(held for modules, held in kept.items() if modules != ("moe",)), kept
    for _, found in outcomes.values():
        for value, true in zip(found, outcomes[()][1], strict=True):
            torch.testing.assert_close(value, true, rtol=1e-12, atol=1e-12)


def whole_outputs(sizes: dict[str, Any], positions: int) -> Tensor:
    """On every rank of a tensor group: what the layer makes of tokens that all ranks hold."""
    run = tiny.run_of(
        tiny.config(dist.get_world_size(), fp64=True, num_experts=E, moe_ffn_hidden_size=24, **GATED, **sizes)
    )
    layer = MoELayer(run.layer_build_context, network_layer_plans(run.config.model)[0])
    set_global_param_names(layer)
    materialize_parameters(layer, run.mesh, seed=3)
    return layer(tokens()[:positions], ONE).detach()


@pytest.mark.parametrize("positions", [1, 3, 4])
def test_tokens_that_tensor_ranks_cannot_share_evenly_are_routed_too(world: Worlds, positions: int) -> None:
    run = tiny.run_of(tiny.config(fp64=True, num_experts=E, moe_ffn_hidden_size=24, **GATED))
    alone = MoELayer(run.layer_build_context, network_layer_plans(run.config.model)[0])
    set_global_param_names(alone)
    materialize_parameters(alone, run.mesh, seed=3)
    expected = alone(tokens()[:positions], ONE).detach()
    for sizes in (
        {},
        {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
    ):
        for found in world(2).run(whole_outputs, {"tensor_model_parallel_size": 2, **sizes}, positions):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def order_of_events(overlaps: bool) -> list[str]:
    """On every rank: when rows depart and arrive, and when the shared expert is at work."""
    run = tiny.run_of(
        tiny.config(
            dist.get_world_size(),
            num_experts=E,
            expert_model_parallel_size=2,
            moe_token_dispatcher_type="alltoall",
            moe_shared_expert_intermediate_size=8,
            moe_shared_expert_overlap=overlaps,
        )
    )
    layer, events = MoELayer(run.layer_build_context, network_layer_plans(run.config.model)[0]), []
    set_global_param_names(layer)
    materialize_parameters(layer, run.mesh, seed=3)
    start, finish = collectives.start_autograd_all_to_all, collectives.finish_autograd_all_to_all

    def heard(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*arguments: Any) -> Tensor:
            if arguments[0].shape[1] == H:  # weights travel too
                events.append(name)
            return call(*arguments)

        return run

    layer.shared_experts.register_forward_hook(lambda *_: events.append("shared"))
    with (
        patch.object(collectives, "start_autograd_all_to_all", heard("start", start)),
        patch.object(collectives, "finish_autograd_all_to_all", heard("finish", finish)),
    ):
        layer(torch.randn(4, 2, H), ONE)
    return events


def test_a_shared_expert_that_overlaps_works_while_tokens_travel(world: Worlds) -> None:
    way = ["start", "finish"]
    assert world(2).run(order_of_events, True) == [["start", "shared", "finish", *way]] * 2
    assert world(2).run(order_of_events, False) == [[*way, *way, "shared"]] * 2
