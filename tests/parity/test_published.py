"""The serial run itself is right: GPT-2 and Llama as others wrote them, with the same weights, give the same numbers.

Compared with Hugging Face's models: logits, loss and gradients; and after some steps of torch's own AdamW and clipping,
the weights. That implementation takes norms and rotations in fp32 whatever its weights are; for fp64 it is told to take
them in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.training.state.batch import Batch
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.tiny import BASE, VOCABULARY
from tests.parity.table import MODELS, PRECISIONS

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOLERANCES = {"fp64": (1e-10, 1e-10), "fp32": (1e-5, 1e-4)}  # values and gradients; weights after Adam, see table.py
RATE, STEPS = 1e-2, 3
SIZES = {name: BASE[name] for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length")}


def gpt2() -> nn.Module:
    """GPT-2 of the tiny size."""
    layers, hidden, heads, length = SIZES.values()
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=length,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-5,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Llama of the tiny size, with grouped heads."""
    layers, hidden, heads, length = SIZES.values()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def as_gpt2(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (weights or gradients) under GPT-2's names and in its shapes."""
    found = {
        "wte.weight": ours["embedding.word_embeddings.weight"][:VOCABULARY],
        "wpe.weight": ours["embedding.position_embeddings.weight"],
    }
    pairs = {
        "ln_1": "input_layernorm",
        "attn.c_attn": "self_attention.linear_qkv",
        "attn.c_proj": "self_attention.linear_proj",
        "ln_2": "pre_mlp_layernorm",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }
    for kind in ("weight", "bias"):
        found[f"ln_f.{kind}"] = ours[f"decoder.final_layernorm.{kind}"]
        for layer in range(SIZES["num_layers"]):
            for theirs, mine in pairs.items():  # GPT-2 keeps its matrices transposed
                found[f"h.{layer}.{theirs}.{kind}"] = ours[f"decoder.layers.{layer}.{mine}.{kind}"].t()
    return {f"transformer.{name}": value for name, value in found.items()}


def as_llama(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (weights or gradients) under Llama's names and in its shapes."""
    found = {
        "model.embed_tokens.weight": ours["embedding.word_embeddings.weight"][:VOCABULARY],
        "model.norm.weight": ours["decoder.final_layernorm.weight"],
        "lm_head.weight": ours["output_layer.weight"][:VOCABULARY],
    }
    for layer in range(SIZES["num_layers"]):
        here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        q, k, v = ours[here + "self_attention.linear_qkv.weight"].split([32, 16, 16])
        gate, up = ours[here + "mlp.linear_fc1.weight"].chunk(2)
        named = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "self_attn.o_proj": ours[here + "self_attention.linear_proj.weight"],
            "mlp.down_proj": ours[here + "mlp.linear_fc2.weight"],
            "input_layernorm": ours[here + "input_layernorm.weight"],
            "post_attention_layernorm": ours[here + "pre_mlp_layernorm.weight"],
        }
        found |= {f"{there}{name}.weight": value for name, value in named.items()}
    return found


PUBLISHED = {"gpt2": (gpt2, as_gpt2), "llama": (llama, as_llama)}


@contextmanager
def taken_in_fp64(precision: str) -> Iterator[None]:
    """Inside, the published models take in fp64 what they otherwise take in fp32."""
    with ExitStack() as stack:
        if precision == "fp64":
            wide = ModuleType("torch")
            wide.__dict__.update({**torch.__dict__, "float32": torch.float64, "float": torch.float64})
            stack.enter_context(patch.object(transformers.models.llama.modeling_llama, "torch", wide))
            stack.enter_context(patch.object(Tensor, "float", Tensor.double))
        yield


def ours_and_theirs(model: str, precision: str, **changes: Any) -> tuple[Trainer, nn.Module]:
    """A trainer of our model, and the published model with the same weights."""
    settings = {**MODELS[model], **PRECISIONS[precision], "lr": RATE, "lr_decay_style": "constant", **changes}
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**settings)))
    make, rename = PUBLISHED[model]
    with taken_in_fp64(precision):
        published = make().to(trainer.run.layer_build_context.dtype)
    missing = published.load_state_dict(
        {name: value.clone() for name, value in rename(weights(trainer)).items()}, strict=False
    )
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing
    published.tie_weights()
    return trainer, published


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Our weights by name."""
    return {name: param.detach() for name, param in trainer.stages[0].named_parameters()}


def whole_batch(trainer: Trainer, iteration: int) -> Batch:
    """All samples of an iteration in one batch."""
    parts = list(tiny.short_run_batches(trainer.run, iteration))
    return Batch(
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "labels", "loss_mask")}
    )


def mean_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The loss of the tokens that count. logits: [b, s, v]."""
    losses = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
    return (losses * batch.loss_mask).sum() / batch.loss_mask.sum()


def check_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Every tensor within the tolerance, relative to its largest value."""
    for name, value in expected.items():
        gap, size = float((found[name] - value).detach().abs().max()), float(value.detach().abs().max())
        assert gap <= tolerance * max(size, 1e-3), f"{name} differs by {gap:.3g} of {size:.3g}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", PUBLISHED)
def test_logits_loss_and_gradients_are_those_of_the_published_model(model: str, precision: str) -> None:
    trainer, published = ours_and_theirs(model, precision)
    stage, batch, tolerance = trainer.stages[0], whole_batch(trainer, 0), TOLERANCES[precision][0]
    with taken_in_fp64(precision):
        expected = published(batch.tokens).logits
        expected_loss = mean_loss(expected, batch)
        expected_loss.backward()
    logits = stage(ids=batch.tokens)[..., :VOCABULARY].transpose(0, 1)
    loss = (stage(ids=batch.tokens, labels=batch.labels) * batch.loss_mask).sum() / batch.loss_mask.sum()
    check_close({"logits": logits, "loss": loss}, {"logits": expected, "loss": expected_loss}, tolerance)
    named = dict(stage.named_parameters())
    gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    theirs = {name: param.grad for name, param in published.named_parameters()}
    check_close(PUBLISHED[model][1](gradients), theirs, tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", PUBLISHED)
def test_steps_are_those_of_torch_adamw_with_clipping(model: str, precision: str) -> None:
    trainer, published = ours_and_theirs(model, precision)
    decay = [param for param in published.parameters() if param.dim() > 1]
    rest = [param for param in published.parameters() if param.dim() == 1]
    epsilon = trainer.run.config.optimizer.adam_eps
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": BASE["weight_decay"]}, {"params": rest, "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.999),
        eps=epsilon,
    )
    for iteration in range(STEPS):
        batch = whole_batch(trainer, iteration)
        with taken_in_fp64(precision):
            adam.zero_grad()
            mean_loss(published(batch.tokens).logits, batch).backward()
        norm = nn.utils.clip_grad_norm_(published.parameters(), BASE["clip_grad"])
        assert norm > BASE["clip_grad"], "clipping is meant to be at work"
        adam.step()
        step = train_step(trainer, tiny.short_run_batches(trainer.run, iteration))
        assert float(step.grad_norm) == pytest.approx(float(norm), rel=TOLERANCES[precision][0])
    theirs = {name: param.detach() for name, param in published.named_parameters()}
    check_close(PUBLISHED[model][1](weights(trainer)), theirs, TOLERANCES[precision][1])
