"""The memory of this rank's device: whether a run fits it, and what is moved out of it while rollouts are sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.config.flags import raise_config_error_if
from megatron.core.parallel.device import free_and_total_memory
from megatron.rl.planned_memory import memory_problem
from megatron.rl.settings import RLConfig
from megatron.training.run import RunContext


def refuse_beyond_device_memory(rl: RLConfig, run: RunContext) -> None:
    """Raise `ConfigError` for a run that cannot fit the device's memory, before anything is built; nothing on a CPU."""
    memory = free_and_total_memory(run.mesh.device)
    if memory is not None:
        raise_config_error_if([memory_problem(rl, run.config, run.mesh.world.size, memory[1])])


@contextmanager
def offload_to_host(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Context manager: the storages of the tensors (any shape) are in CPU memory, and must not be used; gives their
    bytes.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    kept = [(storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)) for storage in storages.values()]
    for storage, _ in kept:
        storage.resize_(0)
    try:
        yield sum(copy.nbytes() for _, copy in kept)
    finally:
        for storage, copy in kept:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
