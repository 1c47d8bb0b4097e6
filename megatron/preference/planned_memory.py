"""What preference optimization keeps on a rank beside the policy in training, by formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.optim import BYTES
from megatron.core.config.settings.run import RunConfig
from megatron.core.models.flops import estimate_memory_by_pipeline_rank
from megatron.preference.settings import PreferenceConfig, reference_checkpoint_path


def reference_network_memory(preference: PreferenceConfig, run: RunConfig, world_size: int) -> Mapping[str, float]:
    """Estimate the bytes of the reference network on the fullest rank, by name; empty if it is the base under adapters,
    or unused.

    With a cache the network is there only before the first step, when there are no activations: only what exceeds
    theirs counts.
    """
    if reference_checkpoint_path(preference, run) is None:
        return {}
    plain = replace(run, model=replace(run.model, adapter=type(run.model.adapter)()))
    copies = run.parallel.data_parallel_size(world_size)
    ranks, policy = (
        estimate_memory_by_pipeline_rank(one, stage_specs_of_run(one), data_parallel_size=copies, num_microbatches=1)
        for one in (plain, run)
    )
    size = BYTES[run.precision.param_dtype_name]
    if preference.preference_reference_cache is None:
        return {"reference": size * max(rank.parameters for rank in ranks)}
    excess = max(size * rank.parameters - there.activations for rank, there in zip(ranks, policy, strict=True))
    return {"reference while its cache is filled": excess} if excess > 0 else {}
