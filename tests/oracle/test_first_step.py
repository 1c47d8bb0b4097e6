"""The first step of random compositions of features, against plain torch: what every layout of ours might compute alike, and wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.parallel.spec import param_spec_of
from megatron.training.state.batch import Batch
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.oracle.first_step import Microbatch, first_step

ATTENTION: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "learned_absolute", "none"),
    "rotary_interleaved": (False, False, True),
    "rotary_base": (10000, 100),
    "rotary_percent": (1.0, 0.5),
    "scaled": ("", "interpolated", "llama3", "yarn"),
    "kv_channels": (None, 6),
    "num_query_groups": (None, 2, 1),
    "qk_layernorm": (False, True),
    "qk_layernorm_across_heads": (False, False, True),
    "qk_l2_norm": (False, False, False, True),
    "window_size": (None, "4,0", "3,0"),
    "window_attn_skip_freq": (None, "[1,0,1]", "2"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "attention_logit_softcap": (None, 2.0),
    "attention_output_gate": (False, True),
    "softmax_scale": (None, 0.3),
    "add_qkv_bias": (False, True),
    "no_rope_freq": (None, "[0,1,1]"),
}
LATENT: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (True,),
    "position_embedding_type": ("rope", "learned_absolute", "none"),
    "scaled": ("plain", "yarn"),
    "q_lora_rank": (None, 10),
    "kv_lora_rank": (12,),
    "qk_head_dim": (6,),
    "qk_pos_emb_head_dim": (4,),
    "v_head_dim": (6, 5),
    "qk_layernorm": (False, True),
}
NETWORK: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm", "LayerNorm"),
    "apply_layernorm_1p": (False, True),
    "add_bias_linear": (True, False),
    "norm_epsilon": (1e-5, 1e-2),
    "activation": ("", "swiglu", "geglu", "quick_geglu", "squared_relu", "relu", "openai_gelu"),
    "ffn_hidden_size": (None, 20),
    "untie_embeddings_and_output_weights": (False, True),
    "scale_embeddings": (False, True),
    "final_logit_softcap": (None, 3.0),
    "norms": ("", "", "sandwich_norm", "norm_after_sublayer", "apply_residual_connection_post_layernorm"),
    "calculate_per_token_loss": (True, False),
    "micro_batch_size": (1, 2),
    "mtp_num_layers": (None, 1, 3),
    "mtp_use_repeated_layer": (False, True),
    "mtp_loss_scaling_factor": (0.1, 0.5),
    "activation_func_clamp_value": (None, 0.5),
    "glu_linear_offset": (0.0, 1.0),
    "eod_mask_loss": (False, True),
}
EXPERTS: dict[str, tuple[Any, ...]] = {
    "num_experts": (4, 6),
    "moe_router_topk": (2, 1, 3),
    "moe_router_score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe_router_pre_softmax": (False, True),
    "moe_layer_freq": ("1", "[0,1,1]", "2"),
    "moe_ffn_hidden_size": (12,),
    "moe_z_loss_coeff": (None, 0.1),
    "moe_router_topk_scaling_factor": (None, 1.7),
    "moe_shared_expert_intermediate_size": (None, 12),
    "moe_shared_expert_gate": (False, True),
    "groups": ((None, None), (None, None), (2, 1), (2, 2)),
    "moe_router_group_score": ("sum", "max"),
    "moe_token_drop_policy": ("probs", "position"),
    "moe_expert_capacity_factor": (None, None, 0.8, 1.0),
    "moe_router_enable_expert_bias": (False, True),
    "moe_router_load_balancing_type": (
        ("none",),
        ("aux_loss",),
        ("seq_aux_loss",),
        ("global_aux_loss",),
        ("aux_loss", "seq_aux_loss"),
    ),
    "moe_aux_loss_coeff": ((0.7,), (0.2,)),
    "moe_per_layer_logging": (True,),
}


SCALED: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "rope"},
    "interpolated": {"rotary_seq_len_interpolation_factor": 2.0},
    "llama3": {"use_rope_scaling": True, "rope_scaling_factor": 4.0, "rope_scaling_original_length": 8},
    "yarn": {
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 64,
        "yarn_beta_fast": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
}


def composition(seed: int) -> dict[str, Any]:
    """Settings drawn at random; those that belong to nothing are left out, and rules may still refuse the rest."""
    draw = Random(seed)
    parts = [NETWORK, LATENT if draw.random() < 0.25 else ATTENTION, *([EXPERTS] if draw.random() < 0.6 else [])]
    values = {name: draw.choice(options) for part in parts for name, options in part.items()}
    for word in (values.pop("activation"), values.pop("norms")):
        values |= {word: True} if word else {}
    values["openai_gelu"] = values.get("openai_gelu", False) or (values.get("geglu", False) and draw.random() < 0.5)
    if values.get("num_query_groups") is not None:
        values["group_query_attention"] = True
    else:
        values.pop("num_query_groups", None)
    for name, needs in (
        ("window_attn_skip_freq", "window_size"),
        ("moe_shared_expert_gate", "moe_shared_expert_intermediate_size"),
        ("mtp_use_repeated_layer", "mtp_num_layers"),
        ("mtp_loss_scaling_factor", "mtp_num_layers"),
        ("qk_layernorm_across_heads", "qk_layernorm"),
    ):
        if not values.get(needs):
            values.pop(name, None)
    if values.get("position_embedding_type") != "rope":
        for name in ("rotary_interleaved", "no_rope_freq", "rotary_base", "rotary_percent", "scaled"):
            values.pop(name, None)
    if values.get("normalization") != "RMSNorm":
        values.pop("qk_layernorm_across_heads", None)
    values |= SCALED.get(values.pop("scaled", ""), {})
    if not any(values.get(name) for name in ("swiglu", "geglu", "quick_geglu")):
        values["activation_func_clamp_value"], values["glu_linear_offset"] = None, 0.0
    if values.get("moe_expert_capacity_factor") is None:
        values.pop("moe_token_drop_policy", None)
    if "groups" in values:
        values["moe_router_num_groups"], values["moe_router_group_topk"] = values.pop("groups")
        if values["moe_router_num_groups"] is None:
            values.pop("moe_router_group_score")
    if "moe_router_load_balancing_type" in values:
        values["moe_aux_loss_coeff"] *= len(values["moe_router_load_balancing_type"])
        if values["moe_router_load_balancing_type"] == ("none",):
            values["moe_aux_loss_coeff"] = (0.0,)
    if values.get("moe_router_score_function") in ("sigmoid", "sqrtsoftplus"):
        values.pop("moe_router_pre_softmax", None)
    elif values.get("num_experts"):
        values["moe_router_enable_expert_bias"] = False
        if values["moe_router_topk"] == 1:
            values["moe_router_pre_softmax"] = True
    return {
        **values,
        "num_layers": 3,
        "fp64": True,
        "init_method_std": 0.3,
        "global_batch_size": 4,
        "clip_grad": 0.0,
        "num_attention_heads": 4,
    }


def accepted(count: int, first: int) -> list[int]:
    """Seeds from `first` on whose composition the rules accept."""
    found, seed = [], first
    while len(found) < count:
        if not resolve_and_examine(config_from_flat_dict(RequestedRun, {**tiny.BASE, **composition(seed)}), 1)[1]:
            found.append(seed)
        seed += 1
    return found


def with_padding(batches: Iterator[Batch], config: RunConfig) -> Iterator[Batch]:
    """The microbatches, of which most samples end in padding, and one is nothing else."""
    generator = torch.Generator().manual_seed(6)
    for number, batch in enumerate(batches):
        size, length = batch.tokens.shape
        lengths = torch.randint(0 if number == 1 else length // 3, length + 1, (size,), generator=generator)
        lengths[-1] = 0 if number == 1 else lengths[-1]
        mask = (torch.arange(length) < lengths[:, None]).long()
        masked = replace(batch, loss_mask=batch.loss_mask * mask, extras={"padding_mask": mask})
        yield masked.with_future_tokens(
            config.model.mtp.mtp_num_layers or 0, per_token=config.train.calculate_per_token_loss
        )


def compare(settings: dict[str, Any], *, padded: bool = False) -> None:
    """One step of ours and of the oracle, from the same weights and on the same samples."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**settings)))
    config = trainer.run.config
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for param in trainer.stages[0].parameters():
        if (
            param.dim() == 1 or "bias" in param_spec_of(param).name
        ):  # norms and biases are constant at first: none may be forgotten
            param.data.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype), alpha=0.2)
        weights[param_spec_of(param).name] = param.detach().clone()
    drawn = list(tiny.short_run_batches(trainer.run, 0))
    drawn = list(with_padding(iter(drawn), config)) if padded else drawn
    batches = [
        Microbatch(
            batch.tokens,
            batch.labels,
            batch.loss_mask.double(),
            batch.extras["padding_mask"].bool() if padded else torch.ones_like(batch.tokens, dtype=torch.bool),
        )
        for batch in drawn
    ]
    expected = first_step(config.model, weights, batches, per_token=config.train.calculate_per_token_loss)
    step = train_step(trainer, iter(drawn))
    found = {name: float(total / count) for name, (total, count) in step.losses.items()}
    assert {name for name in found if not name.startswith("moe/")} == set(expected.losses), settings
    for name, value in expected.losses.items():
        assert found[name] == pytest.approx(value, rel=1e-10), (name, settings)
    assert float(step.grad_norm) == pytest.approx(expected.norm, rel=1e-9), settings
    if step.loads is not None:
        for name, load in expected.loads.items():
            assert step.loads.table[int(name.rsplit("_", 1)[1]), :-1].tolist() == load.tolist(), (name, settings)


@pytest.mark.parametrize("seed", accepted(40, first=0))
def test_the_first_step_is_that_of_the_formulas(seed: int) -> None:
    compare(composition(seed))


@pytest.mark.parametrize("seed", [seed for seed in accepted(40, first=0) if composition(seed).get("num_experts")][:5])
def test_padding_counts_in_no_balance(seed: int) -> None:
    compare(composition(seed), padded=True)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(3000, 4000, 100))
def test_padding_counts_in_no_balance_of_many_compositions(first: int) -> None:
    for seed in accepted(50, first=first):
        if composition(seed).get("num_experts"):
            compare(composition(seed), padded=True)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_first_steps_are_those_of_the_formulas(first: int) -> None:
    for seed in accepted(50, first=first):
        compare(composition(seed))


@pytest.mark.parametrize("depths, repeated", [(1, False), (3, True), (3, False)])
def test_a_layer_that_serves_several_depths_counts_each(depths: int, repeated: bool) -> None:
    compare(
        {
            "num_layers": 2,
            "num_experts": 4,
            "moe_router_topk": 1,
            "moe_router_score_function": "sigmoid",
            "moe_aux_loss_coeff": (1.0,),
            "moe_router_load_balancing_type": ("aux_loss",),
            "moe_per_layer_logging": True,
            "position_embedding_type": "rope",
            "fp64": True,
            "init_method_std": 0.3,
            "mtp_num_layers": depths,
            "mtp_use_repeated_layer": repeated,
            "clip_grad": 0.0,
        }
    )
