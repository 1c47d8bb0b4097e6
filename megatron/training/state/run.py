"""Run: what `initialize_megatron` returns and every provider receives. Nothing of it lives in module state."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.config.settings.run import RunConfig
from megatron.core.kernels.choice.table import Kernels
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.tensor_parallel.overlapped_matmul import MatmulOverlapOptions
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.training.report.run_log import RunLog
from megatron.training.report.timers import Timers


@dataclass(slots=True)
class TrainingProgress:
    """The counters of a run, saved in checkpoints. schedule_samples: of steps that updated the weights, by which the
    learning rate is scheduled. best_figure: mode (min or max) and metric of --save-best.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    consumed_tokens: int = 0
    schedule_samples: int = 0
    floating_point_operations: int = 0
    best_iteration: int | None = None
    best_value: float | None = None
    best_figure: str = ""


@dataclass(slots=True)
class TerminationSignalState:
    """The name of the signal that told this process to end, "" so far."""

    signal: str = ""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What one process knows of the run. given, origins, notes: of its settings, as in `CheckedRun`."""

    config: RunConfig
    mesh: Mesh
    kernels: Kernels
    tokenizer: Tokenizer
    streams: RandomStreams
    timers: Timers = field(default_factory=lambda: Timers(level=0))
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("megatron"))
    given: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    run_log: RunLog = field(default_factory=RunLog)
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    ending: TerminationSignalState = field(default_factory=TerminationSignalState)
    started: float = field(default_factory=time.monotonic)

    @property
    def layer_build_context(self) -> LayerBuildContext:
        """The `LayerBuildContext` that layers are built with."""
        return LayerBuildContext(
            model=self.config.model,
            mesh=self.mesh,
            kernels=self.kernels,
            streams=self.streams,
            dtype=getattr(torch, self.config.precision.param_dtype_name),
            sequence_parallel=self.config.parallel.sequence_parallel,
            recompute=self.config.recompute,
            cp_comm_type=self.config.parallel.cp_comm_type,
            state_comm_type=self.config.parallel.state_comm_type,
            wgrad_store=self.mesh.overlap.wgrad_store if self.config.parallel.defers_weight_gradients else None,
            low_precision=self.config.precision.low,
            overlapped=self._overlapped_matmuls,
            sums=self.config.parallel.gradient_accumulation_fusion,
        )

    @property
    def _overlapped_matmuls(self) -> MatmulOverlapOptions:
        parallel = self.config.parallel
        # Matrices of 8 and 4 bits are scaled as a whole, and not piece by piece.
        if not parallel.tp_comm_overlap or self.config.precision.low.recipe_name:
            return MatmulOverlapOptions()
        return MatmulOverlapOptions(
            parallel.tp_comm_overlap_ag, parallel.tp_comm_overlap_rs, parallel.tp_comm_overlap_rs_dgrad
        )

    def print_rank_0(self, text: str) -> None:
        """One line, from rank 0."""
        if self.mesh.world.is_first:
            self.log.info(text)
