"""Everything that can change in a run, by where it lives: a walk over all objects that can be reached from some roots.

    before = held(roots)
    ...
    changed(before, held(roots))     places whose content is another now, new, or gone

Tensors, numbers, words, containers, the attributes of objects, the variables of closures and of generators that wait.
What only the interpreter or C++ knows (threads, process groups, open files) has no content here.
"""

from __future__ import annotations

import hashlib
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from megatron.training.session import TrainingSession

_PLAIN = (int, float, str, bytes, bool, complex, type(None), Enum, np.generic, torch.dtype, torch.device, torch.Size)
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, torch.futures.Future)
_SHELLS = (
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)  # of torch, where FSDP2 adds its own
_OURS = ("megatron", "pretrain_", "tests.")


def held(roots: Mapping[str, Any]) -> dict[str, str]:
    """Place -> content of everything that can be reached from roots. An object reached twice counts at its first place."""
    found: dict[str, str] = {}
    known: dict[int, Any] = {}  # the objects are kept, so that no address is used again meanwhile
    waiting: deque[tuple[str, Any]] = deque(roots.items())
    while waiting:
        place, value = waiting.popleft()
        if isinstance(value, torch.Tensor):
            if id(value) not in known:
                known[id(value)] = value
                found[place] = _digest(value)
                if value.grad is not None:
                    waiting.append((f"{place}.grad", value.grad))
        elif isinstance(value, _PLAIN):
            found[place] = repr(value)
        elif isinstance(value, tuple) and not value:  # one object wherever it stands, so no place is its first
            found[f"{place}.len"] = "0"
        elif isinstance(value, _OPAQUE) or id(value) in known:
            continue
        elif isinstance(value, np.ndarray):
            known[id(value)] = value
            found[place] = hashlib.sha1(value.tobytes()).hexdigest() if value.nbytes < 1 << 20 else "large"
        else:
            known[id(value)] = value
            waiting += [(place + inside, part) for inside, part in _parts(value)]
            if isinstance(value, (dict, list, deque, set, frozenset, tuple)):
                found[f"{place}.len"] = str(len(value))
    return found


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The places that hold something else now, are new, or gone."""
    return sorted(place for place in {*before, *after} if before.get(place) != after.get(place))


def roots(session: TrainingSession) -> dict[str, Any]:
    """Everything that a run holds: the parts of its session, by the names that the inventory uses, and the generators that
    belong to nobody."""
    randomness = {
        "torch": torch.get_rng_state(),
        "numpy": repr(np.random.get_state()),
        "python": repr(random.getstate()),
    }
    parts = {name: value for name, value in vars(session).items() if name not in ("config", "mesh", "log")}
    return {**parts, "randomness": randomness}


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """(how it is called, object) of all that an object refers to."""
    if isinstance(value, Mapping):
        for number, (key, part) in enumerate(value.items()):
            yield f".{key if isinstance(key, (str, int, tuple)) else number}", part
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f".{number}", part) for number, part in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((".{}", part) for part in value)
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            yield from ((f".<{name}>", part) for name, part in value.gi_frame.f_locals.items())
        yield ".<from>", value.gi_yieldfrom
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f".({name})", cell.cell_contents
            except ValueError:  # not yet bound
                pass
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif type(value).__module__.startswith((*_OURS, "torch.optim", "torch.nn", "functools")) or isinstance(
        value, torch.nn.Module
    ):
        if hasattr(value, "func"):
            yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items() if name not in _SHELLS)
        for kind in type(value).__mro__:
            for name in (
                [kind.__dict__["__slots__"]]
                if isinstance(kind.__dict__.get("__slots__"), str)
                else kind.__dict__.get("__slots__", ())
            ):
                if hasattr(value, name):
                    yield f".{name}", getattr(value, name)


def _digest(tensor: torch.Tensor) -> str:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha1(content).hexdigest()}"
