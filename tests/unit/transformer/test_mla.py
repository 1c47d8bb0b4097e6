"""Latent attention against the formula written one head at a time, against transformers', and against itself without heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.kernels.ops.reference import softmax_attention
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.rope import rotary_table_for
from megatron.core.transformer.mixers.mla import MultiLatentAttention
from tests.helpers import tiny

S, B, H, N = 7, 2, 32, 8
STILL, TURNED, VALUE, LATENT = 6, 4, 5, 12
SIZES: dict[str, Any] = {
    "multi_latent_attention": True,
    "kv_lora_rank": LATENT,
    "qk_head_dim": STILL,
    "qk_pos_emb_head_dim": TURNED,
    "v_head_dim": VALUE,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "init_method_std": 0.3,
}
YARN: dict[str, Any] = {
    "rotary_scaling_factor": 8.0,
    "yarn_original_max_position_embeddings": 4,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}


def layer_of(
    *, window: tuple[int, int] | None = None, rope: bool = True, **changes: Any
) -> tuple[MultiLatentAttention, tiny.RunContext]:
    run = tiny.run_of(tiny.config(**{"fp64": True, **SIZES, **changes}))
    layer = MultiLatentAttention(run.layer_build_context, LayerPlan(0, mixer="mla", window=window, rope=rope))
    set_global_param_names(layer)
    materialize_parameters(layer, run.mesh, seed=5)
    for name, param in layer.named_parameters():
        if "layernorm" in name:
            torch.nn.init.uniform_(param, 0.5, 1.5)
    return layer, run


def pass_of(run: tiny.RunContext, x: Tensor) -> ForwardContext:
    return ForwardContext(AttentionMaskSpec(), rotary_table_for(run.layer_build_context, x))


def by_hand(layer: MultiLatentAttention, x: Tensor, *, scale: float, window: int | None, rope: bool = True) -> Tensor:
    """Equations 37 to 47 of DeepSeek-V2, for every position and head. Without yarn. Latents without a norm's weight stay as they are."""
    weights = dict(layer.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in weights:
            return x
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    def turn(vector: Tensor, place: int) -> Tensor:
        if not rope:
            return vector
        turned = vector.clone()
        for i in range(TURNED // 2):
            a, b = 2 * i, 2 * i + 1
            angle = place / 10000.0 ** (2 * i / TURNED)
            turned[..., a] = vector[..., a] * math.cos(angle) - vector[..., b] * math.sin(angle)
            turned[..., b] = vector[..., b] * math.cos(angle) + vector[..., a] * math.sin(angle)
        return turned

    if "linear_q_proj.weight" in weights:
        queries = x @ weights["linear_q_proj.weight"].t()
    else:
        queries = (
            norm(x @ weights["linear_q_down_proj.weight"].t(), "q_layernorm") @ weights["linear_q_up_proj.weight"].t()
        )
    down = x @ weights["linear_kv_down_proj.weight"].t()
    latent, shared = norm(down[..., :LATENT], "kv_layernorm"), down[..., LATENT:]
    pairs = latent @ weights["linear_kv_up_proj.weight"].t()
    found = torch.zeros(S, B, N * VALUE, dtype=x.dtype)
    for head in range(N):
        q = queries[..., head * (STILL + TURNED) :][..., : STILL + TURNED]
        pair = pairs[..., head * (STILL + VALUE) :][..., : STILL + VALUE]
        for i in range(S):
            seen = range(0 if window is None else max(0, i - window), i + 1)
            scores = (
                torch.stack(
                    [
                        (q[i, :, :STILL] * pair[j, :, :STILL]).sum(-1)
                        + (turn(q[i, :, STILL:], i) * turn(shared[j], j)).sum(-1)
                        for j in seen
                    ]
                )
                * scale
            )
            values = torch.stack([pair[j, :, STILL:] for j in seen])
            found[i, :, head * VALUE : (head + 1) * VALUE] = (scores.softmax(0)[..., None] * values).sum(0)
    return found @ weights["linear_proj.weight"].t()


@pytest.mark.parametrize("compressed", [None, 10])
@pytest.mark.parametrize("normed", [False, True])
def test_latent_attention_is_the_published_formula_and_norms_latents_only_when_asked(
    compressed: int | None, normed: bool
) -> None:
    layer, run = layer_of(q_lora_rank=compressed, qk_layernorm=normed, rope_type="rope")
    assert [name for name, _ in layer.named_parameters() if "layernorm" in name] == (
        ["q_layernorm.weight"] * (compressed is not None) + ["kv_layernorm.weight"]
    ) * normed
    x = torch.randn(S, B, H, dtype=torch.float64)
    found = layer(x, pass_of(run, x))
    expected = by_hand(layer, x, scale=(STILL + TURNED) ** -0.5, window=None)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "changes, window, rope, scale",
    [
        ({}, (2, 0), True, (STILL + TURNED) ** -0.5),
        ({}, None, False, (STILL + TURNED) ** -0.5),
        ({"softmax_scale": 0.7}, None, True, 0.7),
    ],
)
def test_windows_layers_without_rotation_and_scales_are_kept_to(
    changes: dict[str, Any], window: tuple[int, int] | None, rope: bool, scale: float
) -> None:
    layer, run = layer_of(window=window, rope=rope, **changes)
    x = torch.randn(S, B, H, dtype=torch.float64)
    expected = by_hand(layer, x, scale=scale, window=None if window is None else window[0], rope=rope)
    torch.testing.assert_close(layer(x, pass_of(run, x)), expected, rtol=1e-11, atol=1e-11)


def theirs(layer: MultiLatentAttention, changes: dict[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """transformers' attention with our weights, and its rotations."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if "rotary_scaling_factor" in changes:
        rope = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": changes["rotary_scaling_factor"],
            "mscale": changes["mscale"],
            "mscale_all_dim": changes["mscale_all_dim"],
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": changes["yarn_original_max_position_embeddings"],
        }
    config = DeepseekV3Config(
        hidden_size=H,
        num_attention_heads=N,
        num_key_value_heads=N,
        q_lora_rank=changes.get("q_lora_rank"),
        kv_lora_rank=LATENT,
        qk_rope_head_dim=TURNED,
        qk_nope_head_dim=STILL,
        v_head_dim=VALUE,
        attention_bias=False,
        rope_parameters=rope,
        max_position_embeddings=64,
        rope_interleave=True,
    )
    config._attn_implementation = "eager"
    attention = published.DeepseekV3Attention(config, layer_idx=0).float().eval()
    names = {
        "linear_q_proj": "q_proj",
        "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm",
        "linear_q_up_proj": "q_b_proj",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
    }
    attention.load_state_dict(
        {f"{names[name.split('.')[0]]}.weight": param.detach() for name, param in layer.named_parameters()}
    )
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        if norm is not None:
            norm.variance_epsilon = 1e-5
    return attention, published.DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 10}, YARN, {"q_lora_rank": 10, **YARN}], ids=str)
def test_latent_attention_is_that_of_transformers_forward_and_backward(changes: dict[str, Any]) -> None:
    layer, run = layer_of(fp64=False, qk_layernorm=True, **changes)
    published, rotations = theirs(layer, changes)
    x = torch.randn(S, B, H)
    ours_in, theirs_in = x.clone().requires_grad_(), x.transpose(0, 1).clone().requires_grad_()
    found = layer(ours_in, pass_of(run, x))
    mask = torch.full((S, S), -torch.inf).triu(1).expand(B, 1, S, S)
    expected, _ = published(theirs_in, rotations(theirs_in, torch.arange(S).expand(B, S)), mask)
    torch.testing.assert_close(found.transpose(0, 1), expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream.transpose(0, 1))
    torch.testing.assert_close(ours_in.grad.transpose(0, 1), theirs_in.grad, rtol=1e-4, atol=1e-5)
    for (name, own), other in zip(layer.named_parameters(), published.parameters(), strict=True):
        torch.testing.assert_close(
            own.grad, other.grad, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_yarn_sharpens_the_scores_by_the_square_of_its_factor() -> None:
    layer, _ = layer_of(**YARN)
    sharper = 0.1 * YARN["mscale_all_dim"] * math.log(YARN["rotary_scaling_factor"]) + 1
    assert layer.build.model.softmax_scale == pytest.approx(sharper**2 / math.sqrt(STILL + TURNED), rel=1e-12)


class Remembered:
    """A cache of one text: keys are kept from pass to pass. Values must be the beginning of the keys."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def wrap_attention_kernel(self, layer: int, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def remembering(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, *rest: Any) -> Tensor:
            assert torch.equal(v, k[..., : v.shape[-1]]), "only keys are stored"
            self.keys = k if self.keys is None else torch.cat((self.keys, k))
            return kernel(q, self.keys, self.keys[..., : v.shape[-1]], mask, *rest)

        return remembering


@pytest.mark.parametrize(
    "changes, window", [({}, None), ({"q_lora_rank": 10, "qk_layernorm": True, **YARN}, None), ({}, (3, 0))]
)
@pytest.mark.parametrize("steps", [(S,), (1,) * S, (4, 2, 1)])
def test_decoding_from_latents_alone_gives_what_the_whole_text_gives(
    changes: dict[str, Any], window: tuple[int, int] | None, steps: tuple[int, ...]
) -> None:
    layer, run = layer_of(window=window, **changes)
    x = torch.randn(S, 1, H, dtype=torch.float64)
    whole, table = layer(x, pass_of(run, x)), rotary_table_for(run.layer_build_context, x)
    cache, found, start = Remembered(), [], 0
    for size in steps:
        part = slice(start, start + size)
        own = replace(table, cos=table.cos[part], sin=table.sin[part])
        found.append(layer(x[part], ForwardContext(AttentionMaskSpec(), own, cache=cache)))
        start += size
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-12, atol=1e-12)
    assert cache.keys.shape == (S, 1, 1, LATENT + TURNED), "a token costs its latent and the shared key"


def test_the_absorbed_form_takes_latents_and_shared_keys_of_any_origin() -> None:
    layer, run = layer_of(q_lora_rank=10)
    q = torch.randn(3, B, N, STILL + TURNED, dtype=torch.float64)
    latent, shared = torch.randn(S, B, LATENT, dtype=torch.float64), torch.randn(S, B, TURNED, dtype=torch.float64)
    pairs = F.linear(latent, layer.linear_kv_up_proj.weight).unflatten(-1, (N, -1))
    keys = torch.cat((pairs[..., :STILL], shared[:, :, None].expand(-1, -1, N, -1)), dim=-1)
    expected = softmax_attention(q, keys, pairs[..., STILL:], AttentionMaskSpec())
    found = layer.absorbed_attention(q, torch.cat((latent, shared), dim=-1), AttentionMaskSpec())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "modules", [("mla_up_proj",), ("mla_up_proj", "core_attn"), ("mla_up_proj", "layernorm", "core_attn")]
)
def test_recomputed_keys_and_values_change_no_gradient_and_are_made_twice(modules: tuple[str, ...]) -> None:
    x, found, made = torch.randn(S, B, H, dtype=torch.float64), [], []
    for choice in ({}, {"recompute_granularity": "selective", "recompute_modules": modules}):
        layer, run = layer_of(q_lora_rank=10, qk_layernorm=True, **choice)
        norm = run.layer_build_context.make_norm(H, before_matmul=True)
        set_global_param_names(norm)
        materialize_parameters(norm, run.mesh, seed=1)
        calls: list[int] = []
        layer.linear_kv_up_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        own = x.clone().requires_grad_()
        torch.manual_seed(3)
        for name, param in layer.named_parameters():
            if "layernorm" in name:
                torch.nn.init.uniform_(param, 0.5, 1.5)
        output = layer(norm(own), pass_of(run, x))
        output.square().sum().backward()
        made.append(len(calls))
        found.append([output, own.grad, *(param.grad for param in (*layer.parameters(), *norm.parameters()))])
    assert made == [1, 2]
    torch.testing.assert_close(found[1], found[0], rtol=1e-13, atol=1e-13)
