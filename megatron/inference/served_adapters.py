"""The adapters that requests may name: which are loaded, under which number, and when one that was unloaded may go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

import torch

from megatron.adapters.files import LoadedAdapter, incomplete_adapter_problems, require_adapters_fit_network
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.linear_layers import EXPERTS
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.inference.model_runner import ModelRunner

# What decoding multiplies by the weight of, and not by calling the layer (latent attention).
_ABSORBED = ".linear_kv_up_proj"


class ServedAdapters:
    """The adapters that requests may name, on the leader. They change between steps, in the thread that steps; `names`
    may be read by any. most: adapters at once; rank: the largest LoRA rank that may be loaded.
    """

    def __init__(self, runner: ModelRunner, *, most: int, rank: int) -> None:
        self._runner, self._most, self._rank = runner, most, rank
        build = runner.networks[0].build
        self._model, self._dtype = build.model, build.dtype
        self._numbers: dict[str, int] = {}
        # A number is given once, so that keys of an adapter that is gone are never taken for another's.
        self._serial = count(1)
        self._retired: set[int] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._numbers)

    def number_of(self, name: str) -> int:
        """Return the number of an adapter; 0 for the base, whose name is empty. `ConfigError` if it is not loaded."""
        if name and name not in self._numbers:
            raise ConfigError(f"there is no adapter {name[:100]!r}; load it first")
        return self._numbers[name] if name else 0

    def has_adapter_number(self, number: int) -> bool:
        """Whether all ranks have the adapter of this number; always for the base, 0."""
        return number == 0 or number in self._retired or number in self._numbers.values()

    def load(self, name: str, adapters: LoadedAdapter) -> None:
        """Load an adapter under a name on all ranks. `CheckpointError` if it does not fit, before any rank has it."""
        problems = [*self._name_problems(name), *_adapter_problems(adapters, self._model, self._rank)]
        problems += incomplete_adapter_problems(adapters) or _infinite_factor_problems(adapters, self._dtype)
        if self._runner.networks[0].adapters.other_engine_has_adapters:
            problems.append("another engine of this process has adapters beside this network")
        if problems:
            raise CheckpointError(f"{adapters.where} cannot be served", problems)
        require_adapters_fit_network(adapters, self._model)
        number = next(self._serial)
        try:
            self._runner.set_adapter(number, adapters)
        except Exception as error:
            if self._runner.mesh.world.size > 1:  # whose ranks may differ now
                raise
            self._runner.set_adapter(number, None)
            raise CheckpointError(f"{adapters.where} cannot be served: {type(error).__name__}: {error}") from error
        self._numbers = {**self._numbers, name: number}  # anew, since other threads read it

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter, which goes when its last ends. `ConfigError` if it is not loaded."""
        self._retired.add(self.number_of(name))
        self._numbers = {other: number for other, number in self._numbers.items() if other != name}

    def remove_unused_unloaded(self, used: Iterable[int]) -> None:
        """Remove from all ranks the unloaded adapters that no request uses. used: numbers that requests still use."""
        if not self._retired:
            return
        for number in sorted(self._retired - set(used)):
            self._retired.remove(number)
            self._runner.set_adapter(number, None)

    def _name_problems(self, name: str) -> Iterator[str]:
        if not name or len(name) > 100 or not name.isprintable():
            yield "an adapter needs a name, of at most 100 printable characters"
        loaded = len(self._numbers) + len(self._retired)
        if name in self._numbers:
            yield f"there is an adapter {name!r} already; unload it first, or choose another name"
        elif loaded >= self._most:
            yield f"{loaded} adapters are loaded, and --max-loras is {self._most}; unload one first"


def _adapter_problems(adapters: LoadedAdapter, model: ModelConfig, rank: int) -> Iterator[str]:
    """Why adapters cannot be served beside others of the same network."""
    if model.adapter.has_adapters:
        yield "the network that is served has adapters of its own"
    if adapters.saved:
        yield f"it replaces whole parameters ({', '.join(list(adapters.saved)[:3])}), which all requests share; merge it"
    highest = max((pair.rank for pair in adapters.pairs), default=0)
    if highest > rank:
        yield f"its rank {highest} is above --max-lora-rank {rank}; raise that"
    if any(EXPERTS in pair.linear for pair in adapters.pairs):
        yield "it adapts experts, whose rows of several requests are computed together; merge it"
    if any(pair.linear.endswith(_ABSORBED) for pair in adapters.pairs):
        yield "it adapts the projection of latents to keys and values, which decoding never computes by itself; merge it"


def _infinite_factor_problems(adapters: LoadedAdapter, dtype: torch.dtype) -> list[str]:
    """Return which adapters have factors that are not finite in the dtype of the network: they are multiplied beside others'."""
    return [
        f"{pair.parameter_prefix}: its factors are not finite in {str(dtype).removeprefix('torch.')}"
        for pair in adapters.pairs
        if not bool(pair.first.to(dtype).isfinite().all() & (pair.scale * pair.second.to(dtype)).isfinite().all())
    ]
