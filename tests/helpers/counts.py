"""Numbers of parameters that only tests ask for."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.config.plan.layers import LayerPlan, network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.models import describe
from megatron.core.models.describe import WeightShardCounts


def count_layer_parameters(
    model: ModelConfig, split: WeightShardCounts = WeightShardCounts(), plan: LayerPlan | None = None
) -> int:
    """The parameters of one layer that each rank holds. plan: which layer; None: the first."""
    plan = replace(plan or network_layer_plans(model)[0], index=0)
    return describe._count_layer_parameters(model, split, plan, False)[0]
