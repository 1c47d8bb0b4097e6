#!/usr/bin/env python3
"""Adapt a GPT by IA3 (Liu et al., 2022): outputs of linear layers are multiplied by learned vectors, and the network is frozen.

    torchrun --nproc_per_node N pretrain_ia3.py --ia3-targets linear_qkv linear_fc1 <flags of pretrain_gpt.py>

A feature in a file of its own, beside an installed megatron: its flags, what is refused, what it puts into the network, what it saves, and
what it does in a step.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.cli.arguments import parse_args
from megatron.core.config.flags.declare import config_from_flat_dict, flag
from megatron.training.launch.launch_info import read_launch_info


@dataclass(frozen=True, slots=True)
class IA3Config:
    """IA3. Outputs of linear layers are multiplied by learned vectors; the network is frozen."""

    ia3_targets: tuple[Literal["linear_qkv", "linear_fc1"], ...] = flag(
        ("linear_qkv", "linear_fc1"),
        "linear layers with a vector: of queries, keys and values, and the first of the MLP",
    )


def ia3_problems(args: Namespace, world_size: int) -> Iterator[str]:
    """Yield what is wrong with the flags. args: their namespace. world_size: ranks that will run."""
    if not args.ia3_targets:
        yield "--ia3-targets names nothing, and nothing would be trained; leave it out for all"
    if args.lora_rank is not None:
        yield f"--lora-rank {args.lora_rank} puts adapters where --ia3-targets multiplies; drop one of them"


if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    CHECKED = parse_args(
        world_size=PLACE.size,
        speaks=PLACE.rank == 0,
        reads_data="datasets",
        extra=(IA3Config,),
        own_problems=ia3_problems,
    )

from torch import Tensor, nn

import pretrain_gpt
from megatron.core.config.plan.layers import StageSpec
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.sharded_state import Tree
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.dist_checkpointing.state_hooks import UNTRAINED, StateHooks
from megatron.core.models.stage_model import StageModel
from megatron.core.parallel.spec import (
    ParamSpec,
    constant_initializer,
    meta_parameter,
    param_spec_of,
    set_global_param_names,
)
from megatron.core.tensor_parallel.linear import ColumnParallelLinear
from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.loop import pretrain
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import RunContext

SAVED = "run.hooks.ia3"


class OutputScale(nn.Module):
    """The vector of a linear layer, ones at first, cut over the tensor ranks like its output. It is a `LinearBranch`."""

    enabled, has_dora_magnitudes = True, False

    def __init__(self, linear: ColumnParallelLinear, stage: StageModel) -> None:
        super().__init__()
        weight = param_spec_of(linear.weight)
        spec = ParamSpec(weight.shape[:1], constant_initializer(1.0), "vector", weight.shards)
        self.scale = meta_parameter(spec, stage.build.mesh, linear.weight.dtype)

    def forward(self, x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
        """Return the scaled output. x: the layer's input, [..., in]; base: its output, [..., out/tp]; weight: [out/tp, in]."""
        return base * self.scale

    def merged_weight(self, weight: Tensor) -> Tensor:
        """Return the weight with the vector merged in. weight: [out/tp, in]."""
        return weight * self.scale.detach()[:, None]

    def reset_dora_magnitudes(self, weight: Tensor) -> None:
        """Nothing starts from the weight, [out/tp, in]."""


class IA3(StepHooks, StateHooks):
    """The feature in a run: it changes stages when they are built, counts its updates, and says in checkpoints what it is."""

    def __init__(self, config: IA3Config) -> None:
        self.targets_of_run, self.updates = list(config.ia3_targets), 0

    def build_stage(self, run: RunContext, spec: StageSpec) -> StageModel:
        """Build a stage of a GPT, freeze it, and put vectors beside its linear layers."""
        stage = pretrain_gpt.model_provider(run, spec)
        stage.requires_grad_(False)
        for path, module in list(stage.named_modules()):
            if isinstance(module, ColumnParallelLinear) and path.rpartition(".")[2] in self.targets_of_run:
                module.adapter = OutputScale(module, stage)
        set_global_param_names(stage)
        stage.state_hooks = (*stage.state_hooks, self)
        return stage

    def end_step(self, *, updated: bool) -> None:
        """Count the update. updated: whether weights have changed."""
        self.updates += updated

    def interval_line(self, steps: int) -> str:
        """Return what the log says. steps: since the last interval."""
        return f"IA3: {self.updates} updates of the vectors of {', '.join(self.targets_of_run)}"

    def chosen(self, state: Tree) -> Tree:
        """Save the targets and the count beside the weights, and which weights have no optimizer state."""
        mine = {"targets": self.targets_of_run, "updates": self.updates}
        return {**state, SAVED: mine, UNTRAINED: ["*.weight", "*.bias"]}

    def opened(self, source: CheckpointSource) -> CheckpointSource:
        """Raise `CheckpointError` for a checkpoint with vectors of other layers."""
        theirs = source.values.get(SAVED, {}).get("targets", self.targets_of_run)
        if theirs != self.targets_of_run:
            raise CheckpointError(f"{source.where} was trained with --ia3-targets {' '.join(theirs)}; give the same")
        return source

    def targets(self, source: CheckpointSource, state: Tree) -> Tree:
        """Leave the vectors at one where a checkpoint is of a network without them."""
        if SAVED in source.values:
            return state
        return {name: value for name, value in state.items() if not name.endswith(".adapter.scale")}

    def loaded(self, source: CheckpointSource) -> None:
        """Go on counting where the checkpoint ended."""
        self.updates = source.values.get(SAVED, {}).get("updates", 0)


@guarded_entry_point
def main() -> None:
    """Initialize and train."""
    ia3 = IA3(config_from_flat_dict(IA3Config, CHECKED.given))
    pretrain(
        initialize_megatron(CHECKED),
        pretrain_gpt.datasets_provider,
        ia3.build_stage,
        pretrain_gpt.forward_step,
        hooks=[ia3],
    )


if __name__ == "__main__":
    main()
