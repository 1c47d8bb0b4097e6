"""The pipeline stages of a run, from its settings."""

from __future__ import annotations

from megatron.core.config.plan.layers import (
    StageSpec,
    network_layer_plans,
    partition_into_stages,
    virtual_pipeline_size,
)
from megatron.core.config.settings.run import RunConfig


def stage_specs_of_run(config: RunConfig) -> tuple[StageSpec, ...]:
    """Return the pipeline stages of a run; `ConfigError` if the layers cannot be split as configured."""
    model, parallel = config.model, config.parallel
    counted = {
        "account_for_embedding": parallel.account_for_embedding_in_pipeline_split,
        "account_for_loss": parallel.account_for_loss_in_pipeline_split,
    }
    layout, rows = parallel.pipeline_model_parallel_layout, network_layer_plans(model)
    chunks = virtual_pipeline_size(
        len(rows),
        pp=parallel.pp,
        chunks_per_rank=parallel.num_virtual_stages_per_pipeline_rank,
        layers_per_chunk=parallel.num_layers_per_virtual_pipeline_stage,
        layout=layout,
        unsaid=2 if parallel.stage_placement == "v" else 1,
        **counted,
    )
    return partition_into_stages(
        rows,
        pp=parallel.pp,
        vpp=chunks,
        layout=layout,
        placement=parallel.stage_placement,
        ends=(parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers),
        **counted,
    )
