"""Randomness with names.

Initial values: each parameter is drawn whole, by a generator seeded with its global *name*, then cut. So one seed gives
one model under every layout. Dropout: two named streams per rank. The `default` stream is the same on all ranks of a
tensor group, for activations they hold in common; the `cut` stream differs, for activations they hold in pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megatron.core.parallel.device import random_state, set_random_state
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import ParamSpec, local_shape, local_shards, spec_of


def seed_of(*words: object) -> int:
    """A 63-bit seed from any words, the same on every machine."""
    digest = hashlib.blake2b("/".join(str(word) for word in words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def materialize(module: nn.Module, mesh: Mesh, seed: int, *, draw_on: torch.device | None = None) -> None:
    """Give every meta parameter of a named module memory on the mesh's device, and its initial value.

    draw_on: device of the random numbers; CPU draws are the same on every kind of machine.
    """
    source = draw_on or mesh.device
    for owner in module.modules():
        for name, param in owner.named_parameters(recurse=False):
            if not param.is_meta:
                continue
            spec = spec_of(param)
            value = torch.zeros(local_shape(spec, mesh), dtype=param.dtype, device=mesh.device)
            if spec.stacked:
                _draw_stack(value, spec, mesh, seed, source)
            else:
                whole = spec.init(spec.shape, torch.Generator(source).manual_seed(seed_of("initial", seed, spec.name)))
                for piece in local_shards(spec, mesh):
                    value[piece.local.slices()] = whole[piece.box.slices()].to(value)
            made = nn.Parameter(value, requires_grad=param.requires_grad)
            made.spec = spec  # type: ignore[attr-defined]
            setattr(owner, name, made)
    for owner in module.modules():
        initialize = getattr(
            owner, "initialize_from_others", None
        )  # of what has its initial values from other parameters
        if callable(initialize):
            initialize()


def _draw_stack(value: torch.Tensor, spec: ParamSpec, mesh: Mesh, seed: int, source: torch.device) -> None:
    """Draw those parameters of a stack that this rank holds, each whole, by a generator of its own."""
    held = local_shards(spec, mesh)
    for index in {
        index for piece in held for index in range(piece.box.offset[0], piece.box.offset[0] + piece.box.shape[0])
    }:
        generator = torch.Generator(source).manual_seed(seed_of("initial", seed, spec.name, index))
        whole = spec.init(spec.shape[1:], generator)
        for piece in held:
            own = value[piece.local.slices()][index - piece.box.offset[0]]
            own.copy_(whole[piece.box.slices()[1:]].to(value))


class RandomStreams:
    """The dropout streams of one rank. The default stream is the device's own generator; others are swapped in."""

    def __init__(self, device: torch.device, seeds: dict[str, int]) -> None:
        """seeds: name -> seed, `default` among them; none for a network that is only described, which leaves the generator as it is."""
        self.device = device
        self._states: dict[str, torch.Tensor] = {}
        for name, seed in sorted(seeds.items(), reverse=True):  # `default` last but for `cut`: it stays in the device
            self._states[name] = _fresh_state(device, seed)
        if self._states:
            set_random_state(device, self._states.pop("default"))

    @staticmethod
    def build(mesh: Mesh, seed: int, *, per_data_rank: bool = False) -> RandomStreams:
        """The streams of this rank, seeded by its coordinates."""
        place = ("dropout", seed, mesh.pp.rank, mesh.cp.rank, mesh.dp.rank if per_data_rank else 0)
        return RandomStreams(
            mesh.device, {"default": seed_of(*place, "default"), "cut": seed_of(*place, "cut", mesh.tp.rank)}
        )

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Inside, random numbers come from the stream `name`."""
        if name == "default":
            yield
            return
        outside = random_state(self.device)
        set_random_state(self.device, self._states[name])
        try:
            yield
        finally:
            self._states[name] = random_state(self.device)
            set_random_state(self.device, outside)

    def state(self) -> dict[str, torch.Tensor]:
        """The state of every stream, as byte tensors."""
        return {"default": random_state(self.device), **self._states}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Put every stream back into a state that `state` returned."""
        rest = {name: value.clone() for name, value in state.items()}
        set_random_state(self.device, rest.pop("default"))
        self._states = rest


def _fresh_state(device: torch.device, seed: int) -> torch.Tensor:
    return torch.Generator(device).manual_seed(seed).get_state()
