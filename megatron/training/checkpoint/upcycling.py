"""A dense checkpoint seen as one of a network with experts (`--moe-use-upcycling`; Komatsuzaki et al., 2023).

An MLP of width F becomes E experts of width f = F/G (He et al., 2024): expert number i is slice i mod G of a copy, and the G
slices of a copy have one row of the router in common, so that a token always uses whole copies:

    expert   0   1 | 2   3 | 4   5      G = 2, k = 2 or 4: of each copy that is chosen, both halves
    slice    a   b | a   b | a   b
    router   r0 r0 | r1 r1 | r2 r2      rows as they would be drawn without a checkpoint

Each slice then gets 1/G of the weights. So the second matrix grows by G, and the network says what it said before: exactly
where a token's weights add up to one, and nearly where they are shares among all experts (--moe-router-pre-softmax), of which
a fresh router gives each 1/E.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.flags.declare import config_to_flat_dict
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.run import RunConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.source import CheckpointSource, ShapeAndDtype
from megatron.core.parallel.boxes import Box
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.spec import normal_initializer, xavier_uniform_initializer

_MLP = re.compile(r"(model\.decoder\.layers\.(\d+)\.mlp\.)(linear_fc[12])\.(weight|bias)")


def is_dense_checkpoint(source: CheckpointSource) -> bool:
    """Whether a checkpoint has no experts."""
    return not any(".mlp.router." in name for name in source.formats)


class UpcycledSource:
    """A `Source` of a dense checkpoint's weights, with experts made from its MLPs where this run's network has experts."""

    def __init__(self, dense: CheckpointSource, config: RunConfig) -> None:
        self.dense, self.config, self.moe = dense, config, config.model.moe
        self.where = f"{dense.where}, upcycled,"
        settings, width = config_to_flat_dict(config), dense.settings.get("ffn_hidden_size")
        if width not in (None, config.model.ffn_hidden_size):
            raise CheckpointError(
                f"{dense.where} cannot be upcycled to this network",
                [f"--ffn-hidden-size: {width} in the checkpoint, {config.model.ffn_hidden_size} in this run"],
            )
        of_experts = {name: settings[name] for name in config_to_flat_dict(self.moe)}
        self.settings: Mapping[str, Any] = {**dense.settings, **of_experts}
        self.values: Mapping[str, Any] = {
            name: value for name, value in dense.values.items() if name == "run.tokenizer"
        }
        self.formats: dict[str, ShapeAndDtype] = {}
        self._made: dict[str, tuple[str, str]] = {}  # name of an expert's parameter -> the dense one's, and which it is
        layers = {row.index for row in network_layer_plans(config.model) if row.mlp == "moe"}
        for name, format in dense.formats.items():
            if name.startswith("model."):
                match = _MLP.fullmatch(name)
                if match and int(match[2]) in layers:
                    self._add_expert_formats(name, match, format)
                else:
                    self.formats[name] = format

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, [*box.shape]: experts are cut from the dense MLP, routers newly initialized."""
        if name.endswith(".router.weight"):
            return self._router_rows(name)[box.slices()]
        if ".router." in name:
            return torch.zeros(box.shape)
        if name not in self._made:
            return self.dense.read(name, box)
        dense, which = self._made[name]
        first, count = box.offset[0], box.shape[0]
        inner = Box(box.offset[1:], box.shape[1:])
        slices = (expert % self.moe.moe_upcycling_granularity for expert in range(first, first + count))
        return torch.stack([self._expert_slice(dense, which, number, inner) for number in slices])

    def _add_expert_formats(self, name: str, match: re.Match[str], format: ShapeAndDtype) -> None:
        """Add the formats of the experts' parameter (and of the router) that a dense MLP parameter becomes."""
        prefix, which, shape = match[1], f"{match[3]}.{match[4]}", list(format.shape)
        if which.startswith("linear_fc1"):
            shape[0] //= self.moe.moe_upcycling_granularity
        elif which == "linear_fc2.weight":
            shape[1] //= self.moe.moe_upcycling_granularity
        expert = f"{prefix}experts.{which}"
        self.formats[expert] = ShapeAndDtype((self.moe.num_experts_or_zero, *shape), format.dtype)
        self._made[expert] = name, which
        if which == "linear_fc1.weight":
            self.formats[f"{prefix}router.weight"] = ShapeAndDtype(
                (self.moe.num_experts_or_zero, shape[1]), torch.float32
            )
            each = ShapeAndDtype((self.moe.num_experts_or_zero,), torch.float32)
            if self.config.model.add_bias_linear:
                self.formats[f"{prefix}router.bias"] = each
            if self.moe.moe_router_enable_expert_bias:
                self.formats[f"{prefix}router.expert_bias"] = each

    def _expert_slice(self, dense: str, which: str, piece: int, box: Box) -> Tensor:
        """Read a box of one expert's parameter from the dense MLP. piece: which slice of a copy the expert is."""
        width = self.moe.expert_width
        if which == "linear_fc2.bias":
            return self.dense.read(dense, box) * (self._output_scale() / self.moe.moe_upcycling_granularity)
        if which == "linear_fc2.weight":
            return self.dense.read(dense, box.shifted((0, piece * width))) * self._output_scale()
        read, row, end = [], box.offset[0], box.offset[0] + box.shape[0]
        while row < end:  # gate and up each lie in the slice of their own
            part = row // width
            rows = min(end, (part + 1) * width) - row
            start = part * self.config.model.ffn_hidden_size + piece * width + row % width
            read.append(self.dense.read(dense, Box((start, *box.offset[1:]), (rows, *box.shape[1:]))))
            row += rows
        return torch.cat(read)

    def _output_scale(self) -> float:
        """Return the factor on the experts' outputs by which the routed sum equals the dense MLP's output."""
        moe = self.moe
        if moe.moe_router_score_function == "softmax" and moe.moe_router_pre_softmax:
            total = moe.moe_router_topk / moe.num_experts_or_zero
        else:
            total = 1.0
        return moe.moe_upcycling_granularity / (total * (moe.moe_router_topk_scaling_factor or 1.0))

    def _router_rows(self, name: str) -> Tensor:
        """Return the router's initial weight [e, h], the same row for all slices of a copy."""
        model = self.config.model
        xavier, normal = xavier_uniform_initializer(), normal_initializer(model.init_method_std)
        init = xavier if model.init_method_xavier_uniform else normal
        generator = torch.Generator().manual_seed(
            derive_seed("initial", self.config.train.seed, name.removeprefix("model."))
        )
        drawn = init(self.formats[name].shape, generator)
        parts = self.moe.moe_upcycling_granularity
        return drawn[: self.moe.num_experts_or_zero // parts].repeat_interleave(parts, 0)
