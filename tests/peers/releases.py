"""What releases of Megatron Core lack on this machine, or call otherwise, so that one script runs them all (0.5 to 0.19)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def module(name: str) -> types.ModuleType | None:
    """A module of Megatron Core's, None in a release that has none."""
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ImportError:
        return None


def known(function: Callable, /, *arguments: Any, **named: Any) -> Any:
    """The call, without arguments that the release does not know by name."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return function(*arguments, **named)
    return function(*arguments, **{name: value for name, value in named.items() if name in parameters})


def fill_in() -> None:
    """Modules that a release imports and this Python does not have. Call this before megatron.core is imported."""
    if importlib.util.find_spec("pkg_resources") is None:  # gone from new releases of setuptools
        import packaging.version

        sys.modules["pkg_resources"] = types.ModuleType("pkg_resources")
        sys.modules["pkg_resources"].packaging = packaging
    np.product = np.prod  # as until NumPy 1
    from torch.distributed.checkpoint import filesystem as torch_files

    write = torch_files._write_item

    def as_ever(*arguments: Any) -> Any:  # torch asked for less when releases until 0.12 were made
        if not isinstance(arguments[0], torch_files._StorageWriterTransforms):
            arguments = (torch_files._StorageWriterTransforms(), *arguments)
        return write(*arguments, *([torch_files.SerializationFormat.TORCH_SAVE] if len(arguments) == 5 else []))

    torch_files._write_item = as_ever


class CountingAdam(torch.optim.AdamW):
    """torch's, which counts the steps in its groups, as Apex and Transformer Engine do."""

    def step(self, closure: Any = None) -> Any:
        """See `AdamW`."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def let_optimizers_be_distributed() -> None:
    """Until 0.12 a distributed optimizer wants Adam of Apex or Transformer Engine, and weights in 8 bits."""
    found = module("optimizer.distrib_optimizer")
    if found is not None:
        if not hasattr(found, "Adam"):
            found.HAVE_APEX_OR_TE, found.Adam = True, CountingAdam
            module("optimizer").Adam = CountingAdam
        found.quantize_param_shard = lambda *_, **__: None


def index_samples() -> None:
    """Megatron's index of samples, where the compiled function is for another Python than this."""
    if module("datasets.helpers_cpp") is not None or module("datasets.helpers") is not None:
        return
    found = types.ModuleType("megatron.core.datasets.helpers_cpp")
    found.build_sample_idx_int32 = found.build_sample_idx_int64 = _sample_index
    sys.modules[found.__name__] = found


def _sample_index(
    sizes: np.ndarray, documents: np.ndarray, length: int, epochs: int, tokens: int, *_: Any
) -> np.ndarray:
    """(place in `documents`, offset) of the first token of every sample, and of the end. All have `length` tokens and one more."""
    ends = np.cumsum(sizes[documents].astype(np.int64))
    starts = np.arange((epochs * tokens - 1) // length + 1) * length
    place = np.searchsorted(ends, starts, side="right")
    return np.stack([place, starts - (ends - sizes[documents])[place]], axis=1).astype(np.int32)


class Schedule:
    """Learning rates as Megatron-LM made them before Megatron Core did (until 0.8), for warmup and a cosine, in samples."""

    def __init__(self, optimizer: Any, **given: Any) -> None:
        self.optimizer, self.given, self.num_steps = optimizer, given, 0
        self.step(0)

    def step(self, increment: int) -> None:
        """Go on by so many samples."""
        self.num_steps += increment
        given, done = self.given, self.num_steps
        if done <= given["lr_warmup_steps"]:
            rate = given["max_lr"] * done / given["lr_warmup_steps"]
        else:
            part = (min(done, given["lr_decay_steps"]) - given["lr_warmup_steps"]) / (
                given["lr_decay_steps"] - given["lr_warmup_steps"]
            )
            rate = given["min_lr"] + (given["max_lr"] - given["min_lr"]) * (math.cos(math.pi * part) + 1) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = given["start_wd"] * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            name: self.given[name]
            for name in (
                "max_lr",
                "lr_warmup_steps",
                "lr_decay_style",
                "lr_decay_steps",
                "min_lr",
                "start_wd",
                "end_wd",
                "wd_incr_style",
                "wd_incr_steps",
            )
        } | {"num_steps": self.num_steps}
