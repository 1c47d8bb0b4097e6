"""Layers with windows, sinks, caps, gates and stretched rotations against the published implementations, with their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.rope import rotary_table_for
from megatron.core.transformer.mixers.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from tests.helpers import tiny

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask  # noqa: E402
from transformers.models.gemma2 import modeling_gemma2  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm  # noqa: E402
from transformers.models.qwen2_vl import modeling_qwen2_vl  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next  # noqa: E402

S, B, H = 11, 2, 32
GROUPED = {
    "hidden_size": H,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 8,
    "seq_length": S,
}
THEIRS = {
    "hidden_size": H,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "attention_dropout": 0.0,
    "attn_implementation": "eager",
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}


def ours(kind: type, window: tuple[int, int] | None = None, **changes: Any) -> tuple[nn.Module, tiny.RunContext]:
    run = tiny.run_of(tiny.config(**{"fp64": True, **GROUPED, **changes}))
    module = (
        kind(run.layer_build_context, LayerPlan(0, window=window))
        if kind is SelfAttention
        else kind(run.layer_build_context)
    )
    set_global_param_names(module)
    materialize_parameters(module, run.mesh, seed=3)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn_like(param) * 0.3)  # scores that differ, sinks and biases away from zero
    return module, run


def copy_qkv(theirs: nn.Module, module: SelfAttention) -> None:
    """Our weights in their modules."""
    for part in ("weight", "bias"):
        fused = getattr(module.linear_qkv, part)
        if fused is not None:
            for name, rows in zip(("q_proj", "k_proj", "v_proj"), fused.split([64, 32, 32]), strict=True):
                getattr(getattr(theirs, name), part).data.copy_(rows)
            getattr(theirs.o_proj, part).data.copy_(getattr(module.linear_proj, part))
    if hasattr(theirs, "o_proj"):
        theirs.o_proj.weight.data.copy_(module.linear_proj.weight)


def hidden() -> Tensor:
    return torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()


def run_ours(module: nn.Module, run: tiny.RunContext, x: Tensor, positions: Tensor | None = None) -> Tensor:
    return module(x, ForwardContext(AttentionMaskSpec(), rotary_table_for(run.layer_build_context, x, positions)))


def same(found: Tensor, expected: Tensor, pairs: list[tuple[Tensor, Tensor]], tolerance: float) -> None:
    """Outputs, and the gradients of pairs of leaves: ours and theirs."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    weight = torch.arange(found.numel(), dtype=found.dtype).view_as(found).sin()
    leaves = list(zip(*pairs, strict=True))
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), leaves[0]),
        torch.autograd.grad((expected * weight).sum(), leaves[1]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def their_masks(config: Any, x: Tensor) -> dict[str, Tensor]:
    embedded = x.transpose(0, 1)
    about = {
        "config": config,
        "inputs_embeds": embedded,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": torch.arange(S)[None],
    }
    return {
        "full_attention": create_causal_mask(**about),
        "sliding_attention": create_sliding_window_causal_mask(**about),
    }


@pytest.mark.parametrize("backend", ["fused", "unfused"])
@pytest.mark.parametrize("layer, window", [(0, (3, 0)), (1, None)])
def test_attention_is_that_of_gpt_oss(layer: int, window: tuple[int, int] | None, backend: str) -> None:
    config = transformers.GptOssConfig(
        **THEIRS,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "rope_theta": 150000.0,
            "original_max_position_embeddings": 4096,
        },
    )
    module, run = ours(
        SelfAttention,
        window,
        softmax_type="learnable",
        position_embedding_type="yarn",
        rotary_base=150000.0,
        rotary_scaling_factor=32.0,
        yarn_correction_range_round_to_int=False,
        attention_backend=backend,
    )
    theirs = modeling_gpt_oss.GptOssAttention(config, layer).double()
    copy_qkv(theirs, module)
    theirs.sinks.data.copy_(module.softmax_offset)
    x, y = hidden(), hidden()
    rope = modeling_gpt_oss.GptOssRotaryEmbedding(config)(y.transpose(0, 1), torch.arange(S)[None])
    expected = theirs(y.transpose(0, 1), rope, their_masks(config, y)[config.layer_types[layer]])[0].transpose(0, 1)
    same(
        run_ours(module, run, x),
        expected,
        [(x, y), (module.softmax_offset, theirs.sinks), (module.linear_proj.weight, theirs.o_proj.weight)],
        2e-6,
    )


@pytest.mark.parametrize("layer, window", [(0, (3, 0)), (1, None)])
def test_attention_is_that_of_gemma_2(layer: int, window: tuple[int, int] | None) -> None:
    config = transformers.Gemma2Config(**THEIRS, sliding_window=4, attn_logit_softcapping=1.5, query_pre_attn_scalar=20)
    module, run = ours(
        SelfAttention,
        window,
        add_bias_linear=False,
        position_embedding_type="rope",
        attention_logit_softcap=1.5,
        softmax_scale=20**-0.5,
    )
    theirs = modeling_gemma2.Gemma2Attention(config, layer).double()
    copy_qkv(theirs, module)
    x, y = hidden(), hidden()
    rope = modeling_gemma2.Gemma2RotaryEmbedding(config)(y.transpose(0, 1), torch.arange(S)[None])
    expected = theirs(y.transpose(0, 1), rope, their_masks(config, y)[config.layer_types[layer]])[0].transpose(0, 1)
    same(run_ours(module, run, x), expected, [(x, y), (module.linear_proj.weight, theirs.o_proj.weight)], 1e-5)


def test_the_output_gate_is_that_of_qwen_3_next() -> None:
    config = transformers.Qwen3NextConfig(
        **THEIRS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )
    module, run = ours(
        SelfAttention,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_percent=0.5,
        qk_layernorm=True,
        normalization="RMSNorm",
        apply_layernorm_1p=True,
        attention_output_gate=True,
    )
    theirs = modeling_qwen3_next.Qwen3NextAttention(config, 1).double()
    queries, gates, keys, values = module.linear_qkv.weight.split([64, 64, 32, 32])
    by_head = torch.cat((queries.view(8, 8, H), gates.view(8, 8, H)), dim=1)  # theirs: q and gate of each head
    for name, value in (
        ("q_proj", by_head.flatten(0, 1)),
        ("k_proj", keys),
        ("v_proj", values),
        ("o_proj", module.linear_proj.weight),
        ("q_norm", module.q_layernorm.weight),
        ("k_norm", module.k_layernorm.weight),
    ):
        getattr(theirs, name).weight.data.copy_(value)
    x, y = hidden(), hidden()
    rope = modeling_qwen3_next.Qwen3NextRotaryEmbedding(config)(y.transpose(0, 1), torch.arange(S)[None])
    expected = theirs(y.transpose(0, 1), rope, their_masks(transformers.GptOssConfig(**THEIRS), y)["full_attention"])[
        0
    ].transpose(0, 1)
    same(
        run_ours(module, run, x),
        expected,
        [(x, y), (module.linear_proj.weight, theirs.o_proj.weight), (module.q_layernorm.weight, theirs.q_norm.weight)],
        1e-5,
    )


def test_rotations_by_time_height_and_width_are_those_of_qwen2_vl() -> None:
    section = [2, 1, 1]
    config = transformers.Qwen2VLTextConfig(
        **THEIRS, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
    )
    module, run = ours(
        SelfAttention,
        add_bias_linear=False,
        position_embedding_type="mrope",
        mrope_section=tuple(section),
        max_position_embeddings=64,
    )
    places = torch.randint(0, 40, (3, B, S), generator=torch.Generator().manual_seed(1))
    x = hidden()
    cos, sin = modeling_qwen2_vl.Qwen2VLRotaryEmbedding(config)(x, places)
    table = rotary_table_for(run.layer_build_context, x, places)
    torch.testing.assert_close(table.cos[:, :, 0].transpose(0, 1), cos, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(table.sin[:, :, 0].transpose(0, 1), sin, rtol=1e-5, atol=1e-5)
    plain, other = ours(
        SelfAttention, add_bias_linear=False, position_embedding_type="rope", max_position_embeddings=64
    )
    plain.load_state_dict(module.state_dict())
    text = torch.randint(0, 40, (B, S), generator=torch.Generator().manual_seed(2))
    expected = run_ours(plain, other, x, text)
    assert torch.equal(run_ours(module, run, x, text), expected)
    assert torch.equal(run_ours(module, run, x, text.expand(3, -1, -1)), expected), (
        "the same place on all three axes is a plain place"
    )
    assert not torch.allclose(run_ours(module, run, x, places), expected)


def test_heads_are_divided_by_their_root_mean_square_as_in_llama_4() -> None:
    heads: dict[bool, tuple[Tensor, Tensor]] = {}
    for normed in (True, False):
        module, run = ours(SelfAttention, position_embedding_type="rope", qk_l2_norm=normed, norm_epsilon=1e-2)

        def attention(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
            heads[normed] = q.detach(), k.detach()
            return run.kernels.attention(q, k, *rest)

        torch.manual_seed(0)
        module.build = replace(run.layer_build_context, kernels=replace(run.kernels, attention=attention))
        module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()})
        run_ours(module, run, hidden())
    for found, raw in zip(heads[True], heads[False], strict=True):
        torch.testing.assert_close(found, Llama4TextL2Norm(1e-2)(raw), rtol=1e-6, atol=1e-6)


def test_off_by_one_is_a_sink_of_zero() -> None:
    one, run = ours(SelfAttention, position_embedding_type="rope", softmax_type="off-by-one")
    learned, _ = ours(SelfAttention, position_embedding_type="rope", softmax_type="learnable")
    learned.load_state_dict({**one.state_dict(), "softmax_offset": torch.zeros(8)})
    assert "softmax_offset" not in one.state_dict()
    torch.testing.assert_close(run_ours(one, run, hidden()), run_ours(learned, run, hidden()), rtol=1e-12, atol=1e-12)


def test_layers_without_rotations_know_no_places() -> None:
    module, run = ours(SelfAttention, position_embedding_type="rope", no_rope_freq="2")
    blind = SelfAttention(run.layer_build_context, LayerPlan(1, rope=False))
    materialize_parameters(blind, run.mesh, seed=3)
    x = hidden()
    order = torch.tensor([4, 2, 0, 1, 3])
    shuffled = torch.cat((x[order], x[5:]))
    torch.testing.assert_close(run_ours(blind, run, x)[5:], run_ours(blind, run, shuffled)[5:], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(run_ours(module, run, x)[5:], run_ours(module, run, shuffled)[5:])


@pytest.mark.parametrize(
    "stretched",
    [
        {"rotary_seq_len_interpolation_factor": 8.0},
        {"use_rope_scaling": True, "rope_scaling_original_length": 8},
        {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 8},
        {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 8},
    ],
)
def test_layers_with_a_window_turn_by_their_own_base_and_are_not_stretched(stretched: dict[str, Any]) -> None:
    changes = {"position_embedding_type": "rope", "rotary_base": 500.0, "window_size": "2,0", **stretched}
    others = {"position_embedding_type": "rope", "rotary_base": 20.0, "window_size": "2,0"}
    x = hidden()
    for window, equal in ((None, changes), ((2, 0), others)):
        module, run = ours(SelfAttention, window, **changes, rotary_base_local=20.0)
        expected, plain = ours(SelfAttention, window, **equal)
        expected.load_state_dict(module.state_dict())
        torch.testing.assert_close(run_ours(module, run, x), run_ours(expected, plain, x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(run_ours(module, run, x), run_ours(expected, ours(SelfAttention, **changes)[1], x))


def test_the_clamped_mlp_is_that_of_gpt_oss() -> None:
    module, run = ours(
        MLP, quick_geglu=True, ffn_hidden_size=24, activation_func_clamp_value=0.8, glu_linear_offset=1.0
    )
    config = transformers.GptOssConfig(hidden_size=H, intermediate_size=24, num_local_experts=1, swiglu_limit=0.8)
    theirs = modeling_gpt_oss.GptOssExperts(config).double()
    for name, linear in (("gate_up_proj", module.linear_fc1), ("down_proj", module.linear_fc2)):
        parts = linear.weight, linear.bias
        if name == "gate_up_proj":  # theirs: gate and up row by row
            parts = [torch.stack(part.chunk(2), dim=1).flatten(0, 1) for part in parts]
        getattr(theirs, name).data.copy_(parts[0].t()[None])
        getattr(theirs, f"{name}_bias").data.copy_(parts[1][None])
    x, y = hidden(), hidden()
    expected = theirs(y.flatten(0, 1), torch.zeros(S * B, 1, dtype=torch.long), torch.ones(S * B, 1).double()).view(
        S, B, H
    )
    same(module(x, ForwardContext(AttentionMaskSpec())), expected, [(x, y)], 1e-11)
