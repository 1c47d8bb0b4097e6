"""Named random streams, and initial values that do not depend on the parallel layout.

Initial values: each parameter is drawn as a whole by a generator seeded with its global *name*, and then sharded, so
one seed gives the same model under every layout. Dropout: each rank has two named streams. The `default` stream is the
same on all tensor-parallel ranks, for activations that are replicated; the `cut` stream differs, for activations that
are sharded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron.core.parallel.boxes import Box
from megatron.core.parallel.device import device_rng_state, set_device_rng_state
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import ParamSpec, local_shape, local_shard_boxes, param_spec_of, quantized_storage_of


def derive_seed(*words: object) -> int:
    """Return a 63-bit seed computed from `words` (hash of their text), the same on every machine."""
    digest = hashlib.blake2b("/".join(str(word) for word in words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def materialize_parameters(module: nn.Module, mesh: Mesh, seed: int, *, draw_on: torch.device | None = None) -> None:
    """Allocate every meta parameter of a module on the mesh's device and set its initial values; quantized ones are
    only drawn and quantized. Parameters must have global names.

    draw_on: device of the random generators; draws on the CPU are the same on every kind of machine.
    """
    source, made = draw_on or mesh.device, set[int]()
    for owner in module.modules():
        for name, param in owner.named_parameters(recurse=False):
            if not param.is_meta:
                continue
            spec, quantized = param_spec_of(param), quantized_storage_of(param)
            if quantized is not None:
                for index, box in enumerate(quantized.boxes):
                    drawn = torch.zeros(box.shape, dtype=param.dtype, device=mesh.device)
                    _draw_initial_values([(box, drawn)], spec, seed, source)
                    quantized.quantize_box(index, drawn)
                continue
            value = torch.zeros(local_shape(spec, mesh), dtype=param.dtype, device=mesh.device)
            _draw_initial_values(
                [(one.box, value[one.local.slices()]) for one in local_shard_boxes(spec, mesh)], spec, seed, source
            )
            param_on_device = nn.Parameter(value, requires_grad=param.requires_grad)
            param_on_device.spec = spec  # type: ignore[attr-defined]
            setattr(owner, name, param_on_device)
            made.add(id(param_on_device))
    for owner in module.modules():
        # Modules whose initial values derive from other parameters; those of earlier calls may be sharded by now.
        initialize = getattr(owner, "initialize_from_other_parameters", None)
        if callable(initialize) and not made.isdisjoint(map(id, owner.parameters())):
            initialize()


def _draw_initial_values(
    targets: Sequence[tuple[Box, Tensor]], spec: ParamSpec, seed: int, source: torch.device
) -> None:
    """Draw a parameter's initial values and write the given boxes of it into tensors.

    The whole parameter is drawn with one generator; of a stacked one, each index that a box touches with its own.
    """
    if not spec.stacked:
        whole = spec.init(spec.shape, torch.Generator(source).manual_seed(derive_seed("initial", seed, spec.name)))
        for box, target in targets:
            target.copy_(whole[box.slices()].to(target))
        return
    for index in {index for box, _ in targets for index in range(box.offset[0], box.offset[0] + box.shape[0])}:
        generator = torch.Generator(source).manual_seed(derive_seed("initial", seed, spec.name, index))
        whole = spec.init(spec.shape[1:], generator)
        for box, target in targets:
            local = target[index - box.offset[0]]
            local.copy_(whole[box.slices()[1:]].to(local))


class RandomStreams:
    """The dropout streams of one rank. The default one is the device's generator; `fork` swaps in another's state."""

    def __init__(self, device: torch.device, seeds: dict[str, int]) -> None:
        """Seed the streams.

        seeds: stream name -> seed, `default` among them; empty for a network that is only described, which leaves the
        generator alone.
        """
        self.device = device
        self._states: dict[str, torch.Tensor] = {}
        for name, seed in sorted(seeds.items(), reverse=True):  # `default` last but for `cut`: it stays in the device
            self._states[name] = torch.Generator(device).manual_seed(seed).get_state()
        if self._states:
            set_device_rng_state(device, self._states.pop("default"))

    @staticmethod
    def build(mesh: Mesh, seed: int, *, per_data_rank: bool = False) -> RandomStreams:
        """Return the dropout streams of this rank, by seed, pipeline and context rank; "cut" also by tensor rank.

        per_data_rank: both also by the data-parallel rank; otherwise data-parallel ranks draw the same numbers.
        """
        place = ("dropout", seed, mesh.pp.rank, mesh.cp.rank, mesh.dp.rank if per_data_rank else 0)
        return RandomStreams(
            mesh.device, {"default": derive_seed(*place, "default"), "cut": derive_seed(*place, "cut", mesh.tp.rank)}
        )

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Context manager: random numbers drawn inside come from the stream `name`."""
        if name == "default":
            yield
            return
        outside = device_rng_state(self.device)
        set_device_rng_state(self.device, self._states[name])
        try:
            yield
        finally:
            self._states[name] = device_rng_state(self.device)
            set_device_rng_state(self.device, outside)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of every stream by name, each uint8 [bytes]."""
        return {"default": device_rng_state(self.device), **self._states}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the states, uint8 [bytes] each, that `state` returned."""
        rest = {name: value.clone() for name, value in state.items()}
        set_device_rng_state(self.device, rest.pop("default"))
        self._states = rest
