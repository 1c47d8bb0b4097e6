"""Counts of networks with latent attention and multi-token prediction against the networks themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.models import flops
from megatron.core.models.describe import count_rank_parameters
from megatron.core.models.gpt import GPTModel
from megatron.training.state.batch import Batch
from tests.helpers import tiny
from tests.parity.table import MODELS

NETWORKS = {
    **{
        name: MODELS[name]
        for name in ("mla", "mla-q", "mla-window", "mtp", "mtp2", "mtp3-repeated", "mla-mtp2", "deepseek")
    },
    "plain": {},
}


def stages(**changes: Any) -> tuple[list[GPTModel], tiny.RunContext]:
    """All pipeline stages, not yet materialized, on the mesh of one process."""
    run = tiny.run_of(tiny.config(int(changes.get("pipeline_model_parallel_size", 1)), **changes))
    return [GPTModel(spec, run.layer_build_context) for spec in stage_specs_of_run(run.config)], run


@pytest.mark.parametrize(
    "name, layout", [("mtp", "Et|t|t|tmL"), ("mtp2", "Et|tt|tmm|L"), ("mtp", "Et|tt|tm|L"), ("mla-mtp2", "E|ttt|tmm|L")]
)
def test_every_pipeline_rank_holds_what_its_stage_is_made_of(name: str, layout: str) -> None:
    built, run = stages(**NETWORKS[name], pipeline_model_parallel_size=4, pipeline_model_parallel_layout=layout)
    for model in built:
        held = count_rank_parameters(run.config.model, [model.stage]).total
        assert held == sum(param.numel() for param in model.parameters()), f"stage {model.stage.index} of {layout}"


@pytest.mark.parametrize("name", NETWORKS)
def test_flops_are_what_torch_counts_in_a_step(name: str) -> None:
    # Blocks of logits leave out the last tokens, which have nothing ahead; all logits do not.
    run = tiny.run_of(
        tiny.config(**{**NETWORKS[name], "attention_backend": "unfused", "cross_entropy_fusion_impl": "native"})
    )
    (model,) = tiny.trainer_of(run).stages
    ids, depths = torch.zeros(2, 16, dtype=torch.long), run.config.model.mtp.mtp_num_layers or 0
    batch = Batch(tokens=ids, labels=ids, loss_mask=torch.ones(2, 16)).with_future_tokens(depths)
    with FlopCounterMode(display=False) as counter:
        output = model(ids=ids, labels=ids, ahead=batch.mtp_inputs)
        total = output.next.sum() + sum(losses.sum() for losses in output.ahead) if depths else output.sum()
        total.backward()
    assert 2 * flops.flops_per_sample(run.config.model, 16, "square") == counter.get_total_flops()
