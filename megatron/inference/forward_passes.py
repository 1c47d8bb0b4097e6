"""Forward passes of a network's pipeline stages over several microbatches, without backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.settings.parallel import Placement
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.executor import Shape, run_rank_script
from megatron.core.pipeline_parallel.schedules import forward_only_plan
from megatron.core.pipeline_parallel.transfers import RankScript, build_rank_script

RunStage = Callable[[GPTModel, int, Tensor | None], Any]


def run_forward_pipeline(stages: Sequence[GPTModel], shapes: Sequence[tuple[int, int]], run_stage: RunStage) -> None:
    """Run every microbatch through all pipeline stages. Collective over the pipeline.

    stages: this rank's. shapes: (rows, length) of each microbatch. run_stage: called with a stage, the number of a
    microbatch and the hidden states from the stage before, or None; returns what goes to the next, of the last stage
    nothing that is used.
    """
    axis, backward_axis = stages[0].build.mesh.pp, stages[0].build.mesh.pp_backward
    script = _forward_only_script(axis.size, len(stages), len(shapes), stages[0].stage.placement, axis.rank)
    run_rank_script(script, work=_ForwardOnlyWork(stages, shapes, run_stage), axis=axis, backward_axis=backward_axis)


@lru_cache
def _forward_only_script(pp: int, vpp: int, microbatches: int, placement: Placement, rank: int) -> RankScript:
    return build_rank_script(forward_only_plan(pp, vpp, microbatches, placement), rank)


@dataclass(frozen=True, slots=True)
class _ForwardOnlyWork:
    """The `PipelineWork` of `run_forward_pipeline`."""

    stages: Sequence[GPTModel]
    shapes: Sequence[tuple[int, int]]
    run_stage: RunStage

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.stages[0].build.mesh.device

    def input_specs(self, stage: int, microbatch: int) -> tuple[Shape, ...]:
        """Return shape and dtype of what a stage receives."""
        chunk = self.stages[stage // self.stages[0].build.mesh.pp.size]
        return (chunk.hidden_states_spec(*self.shapes[microbatch]),) * chunk.num_received_tensors

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run one stage on one microbatch."""
        chunk = self.stages[stage // self.stages[0].build.mesh.pp.size]
        output = self.run_stage(chunk, microbatch, received[0] if received else None)
        if chunk.stage.has_output:
            return ()
        return output if isinstance(output, tuple) else (output,)

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        """Never called: the plan has no backward passes."""

    def start_gradient_reduction(self, stage: int) -> None:
        """Never called: the plan has no reductions."""
