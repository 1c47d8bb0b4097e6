"""Fit the layout to the ranks that there are (`--elastic`). Arithmetic and rules only: asked before torch is imported.

The flags give the layout that is wished for. What may change is how often the network is copied; only where not even one
copy of it fits, it is cut less. In this order, the first that keeps every rule is taken:

    1. tensor, context, pipeline and expert sizes as given, with as many copies as fit and the global batch allows
    2. fewer expert ranks, then a shorter pipeline, then fewer context ranks, then fewer tensor ranks: divisors of what was given

Ranks left over stand by. The choice follows from flags and ranks alone, not from what ran before; so a run that lost ranks
and finds them again has its first layout back. The global batch stays, and with it the samples of every step.

        --tensor-model-parallel-size 2 --global-batch-size 16, micro batches of 1
        8 ranks   2 tensor x 4 data          6 ranks   2 tensor x 2 data, 2 stand by: 16 is no multiple of 3
        4 ranks   2 tensor x 2 data          1 rank    1 tensor x 1 data
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from megatron.core.config.flags.declare import flag_name
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.config.settings.run import RequestedRun

# Names of the rules that a config breaks on so many ranks.
Problems = Callable[[RequestedRun, int], set[str]]
# What speaks of a pipeline, and of a context group, of the size that was given.
_OF_PIPELINE = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
_OF_CONTEXT = ("hierarchical_context_parallel_sizes",)


def fit_layout_to_ranks(config: RequestedRun, world_size: int, problems: Problems) -> tuple[RequestedRun, int]:
    """Return the config in the first layout that fits and the number of ranks that train; else both unchanged.
    problems: names of the rules that a config breaks on so many ranks. Those broken under any layout are ignored.
    """
    hopeless = problems(dataclasses.replace(config, parallel=ParallelConfig(elastic=True)), 1)
    for parallel, ranks in _possible_layouts(config.parallel, world_size):
        fitted = dataclasses.replace(config, parallel=parallel)
        if problems(fitted, ranks) <= hopeless:
            return fitted, ranks
    return config, world_size


def elastic_layout_change_text(given: ParallelConfig, chosen: ParallelConfig, *, world_size: int, ranks: int) -> str:
    """Return a line saying which parallel sizes were changed and how many ranks train; "" if nothing changed."""
    changed = [
        f"{flag_name(one.name)} {getattr(given, one.name)} -> {getattr(chosen, one.name)}"
        for one in dataclasses.fields(given)
        if getattr(given, one.name) != getattr(chosen, one.name) and one.name != "sequence_parallel"
    ]
    if not changed and ranks == world_size:
        return ""
    copies = chosen.data_parallel_size(ranks)
    noun = "copy" if copies == 1 else "copies"
    why = "not one of the layout that was given fits"
    if not changed:
        why = "more do not fit or cannot share the global batch evenly"
    rest = f", {world_size - ranks} stand by" if ranks < world_size else ""
    return f"elastic: {ranks} of {world_size} ranks train, in {copies} data-parallel {noun}{rest}: {'; '.join([why, *changed])}"


def _possible_layouts(given: ParallelConfig, world_size: int) -> Iterator[tuple[ParallelConfig, int]]:
    """Yield every layout and its number of ranks, the best first."""
    sizes = (given.tp, given.context_parallel_size, given.pp, given.expert_model_parallel_size)
    for tensor, context, pipeline, expert in product(*map(_divisors, sizes)):
        cut = tensor * context * pipeline
        unset: dict[str, Any] = dict.fromkeys(_OF_PIPELINE if pipeline < given.pp else ())
        unset |= dict.fromkeys(_OF_CONTEXT if context < given.context_parallel_size else ())
        parallel = dataclasses.replace(
            given,
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            pipeline_model_parallel_size=pipeline,
            expert_model_parallel_size=expert,
            **unset,
        )
        yield from ((parallel, cut * copies) for copies in range(world_size // cut, 0, -1))


def _divisors(size: int) -> list[int]:
    """Return the divisors of a size, the largest first."""
    return [part for part in range(max(1, size), 0, -1) if size % part == 0] or [1]
