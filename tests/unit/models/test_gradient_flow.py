"""FLOPs of a step with frozen parts are those that torch counts, product by product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.models import flops
from tests.helpers import tiny
from tests.parity.table import MODELS

PLAIN: dict[str, Any] = {"attention_backend": "unfused", "cross_entropy_fusion_impl": "native", "fp64": False}
CASES: dict[str, dict[str, Any]] = {
    **{
        name: MODELS[name]
        for name in (
            *("llama", "lora", "lora-fused", "lora-some", "lora-last", "lora-last-fused", "lora-saved", "frozen"),
            *("lora-moe", "lora-moe-fused", "lora-t5", "mla-mtp2", "mtp3-repeated", "mtp2-apart", "moe-shared"),
            *("vlm", "vlm-projector", "vlm-frozen-vit", "vlm-frozen-lm", "vlm-frozen-projector", "vlm-moe", "vit"),
        )
    },
    "experts by parts": {
        **MODELS["lora-moe"],
        "lora_targets": ("q_proj", "*.experts.linear_fc1.up=2", "*.shared_experts.*.gate"),
    },
    "BERT": {**MODELS["lora-bert"], "bert_binary_head": False},
    "latents": {**MODELS["lora-mla"], "dora": False},
    "latents, first projections": {**MODELS["lora-mla"], "dora": False, "lora_targets": ("linear_q_down_proj",)},
    "router alone": {
        **MODELS["moe-shared"],
        "freeze": ("embedding.*", "*norm*", "*linear*", "output_layer.*", "*gate_weight"),
    },
    "experts alone": {
        **MODELS["moe-shared"],
        "freeze": ("embedding.*", "*norm*", "*attention*", "output_layer.*", "*router*", "*shared*"),
    },
    "prediction alone": {**MODELS["mla-mtp2"], "freeze": ("embedding.*", "decoder.*", "output_layer.*")},
    "output layer alone": {**MODELS["llama"], "freeze": ("embedding.*", "decoder.*")},
    "tied embedding alone": {**MODELS["llama-tied"], "freeze": ("decoder.*",)},
    "encoder frozen": {**MODELS["t5"], "freeze": ("encoder.*", "embedding.*")},
    "decoder frozen": {**MODELS["t5"], "freeze": ("decoder.*", "embedding.*")},
    "norms alone": {**MODELS["llama"], "freeze": ("embedding.*", "*linear*", "output_layer.*")},
}


def product_in_place(total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    """FLOPs of addmm_, which torch's table leaves out."""
    return int(2 * left[0] * left[1] * right[1])


BY_DEFAULT = ("lora", "frozen", "experts by parts", "lora-t5", "vlm-frozen-lm", "latents")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.nightly]) for name in CASES]
)
def test_flops_are_what_torch_counts_in_a_step(name: str) -> None:
    run = tiny.run_of(tiny.config(1, **{**CASES[name], **PLAIN}))
    trainer, config = tiny.trainer_of(run), run.config
    batch = next(tiny.short_run_batches(run, 0))
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product_in_place}) as counter:
        output, loss = trainer.forward_step(run, iter((batch,)), trainer.stages[0])
        loss(output)[0].backward()
    images = 0 if batch.images is None else len(batch.images) - (1 if config.model.has_vision else len(batch.images))
    found = flops.flops_per_sample(
        config.model, config.train.seq_length, "square", decoder_length=config.train.decoder_seq_length
    )
    assert counter.get_total_flops() == found + images * flops.flops_per_image(config.model)
