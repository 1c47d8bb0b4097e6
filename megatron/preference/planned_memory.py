"""What preference optimization keeps on a rank beside the policy in training, by formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron.core.config.settings.run import RunConfig
from megatron.core.config.stages import stages_of
from megatron.core.models.flops import BYTES, rank_memory
from megatron.preference.settings import PreferenceConfig, reference_folder


def reference_memory(preference: PreferenceConfig, run: RunConfig, world_size: int) -> Mapping[str, float]:
    """Return bytes of the fullest rank: of the reference network, where it is one of its own. The base under adapters takes none.

    A cache of the reference's log-probabilities is on disk. The network that fills it is there before the first step, when there are no
    activations yet: what it takes beyond theirs counts.
    """
    if reference_folder(preference, run) is None:
        return {}
    plain = replace(run, model=replace(run.model, adapter=type(run.model.adapter)()))
    copies = run.parallel.data_parallel_size(world_size)
    ranks, policy = (
        rank_memory(one, stages_of(one), data_parallel_size=copies, num_microbatches=1) for one in (plain, run)
    )
    size = BYTES[run.precision.dtype]
    if preference.preference_reference_cache is None:
        return {"reference": size * max(rank.parameters for rank in ranks)}
    excess = max(size * rank.parameters - there.activations for rank, there in zip(ranks, policy, strict=True))
    return {"reference while its cache is filled": excess} if excess > 0 else {}
