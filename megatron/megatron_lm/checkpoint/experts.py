"""Experts in Megatron's old format: one entry an expert, or all in two flat matrices; ours are stacked.

mlp.experts.local_experts.E.linear_fc1.weight     [outputs, inputs]       one after the other
mlp.experts.linear_fc1.weightE                    [outputs, inputs]       Transformer Engine's grouped products
mlp.experts.weight1                               [h, e * outputs], read as [e, h, outputs]
mlp.experts.weight2                               [e * inputs, h], read as [e, inputs, h]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ONE = re.compile(
    r"^(.*\.mlp\.experts)\.(?:local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)|(linear_fc[12])\.(weight|bias)(\d+))$"
)
_STACK = re.compile(r"^(.*\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)$")
_FLAT = re.compile(r"^(.*\.mlp\.experts)\.weight([12])$")


@dataclass(frozen=True)
class LazyStackedExperts:
    """Matrices or biases of one rank's experts, stacked when they are read.

    flat: they are transposed in one flat matrix: (number of experts, rows of each).
    """

    tensors: tuple[Tensor, ...]
    flat: tuple[int, int] | None = None

    def to(self, device: str) -> Tensor:
        """Return all experts stacked, [e, outputs, inputs] or [e, outputs], on a device."""
        if self.flat is None:
            return torch.stack([tensor.to(device) for tensor in self.tensors])
        return self.tensors[0].to(device).reshape(*self.flat, -1).transpose(1, 2)

    @property
    def shape(self) -> torch.Size:
        """Shape of what `to` returns."""
        return self.to("meta").shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all of them."""
        return self.tensors[0].dtype


def split_expert_name(name: str) -> tuple[str, int] | None:
    """Return (name of the stack, number of the expert) for a parameter of one expert; None for any other."""
    one = _ONE.match(name)
    if one is None:
        return None
    matrix, kind, expert = one.group(3, 4, 2) if one[2] else one.group(5, 6, 7)
    return f"{one[1]}.{matrix}.{kind}", int(expert)


def with_stacked_experts(state: Mapping[str, Tensor], experts: int) -> dict[str, Tensor | LazyStackedExperts]:
    """Return one rank's parameters by name, with experts stacked [e, ...] under the names of the distributed format.

    experts: number of experts that the rank holds.
    """
    tensors: dict[str, Tensor | LazyStackedExperts] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        flat = _FLAT.match(name)
        if one := split_expert_name(name):
            stacks.setdefault(one[0], {})[one[1]] = tensor
        elif flat:
            rows = tensor.shape[0] if flat[2] == "1" else tensor.shape[0] // experts
            tensors[f"{flat[1]}.linear_fc{flat[2]}.weight"] = LazyStackedExperts((tensor,), (experts, rows))
        else:
            tensors[name] = tensor
    return tensors | {
        name: LazyStackedExperts(tuple(parts[expert] for expert in sorted(parts))) for name, parts in stacks.items()
    }


def with_unstacked_experts(held: Mapping[str, Sequence[Tensor]]) -> dict[str, Sequence[Tensor]]:
    """Split stacked experts [e, ...] into one entry for each expert. held: name -> what each rank holds of it."""
    tensors: dict[str, Sequence[Tensor]] = {}
    for name, shards in held.items():
        match = _STACK.match(name)
        if not match:
            tensors[name] = shards
            continue
        for expert in range(len(shards[0])):
            tensors[f"{match[1]}.local_experts.{expert}.{match[2]}.{match[3]}"] = [
                shard[expert].clone() for shard in shards
            ]
    return tensors
