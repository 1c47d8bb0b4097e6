"""Where in the source of this project a step is, and what the code there is known for.

Code that a recorder, the cost model or the matching of collectives treats in a way of its own is named by modules and functions:
what is renamed fails here at import, and in mypy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import torch
from torch.distributed import fsdp

from megatron.core.distributed import finalize
from megatron.core.kernels.low_precision import fp8
from megatron.core.kernels.ops import chunked_attention, fused, linear_loss
from megatron.core.parallel import collectives, device, flight_recorder, recompute
from megatron.core.pipeline_parallel import executor
from megatron.core.tensor_parallel import cross_entropy
from megatron.plan.simulate.torch_internals import newest_node_number, running_node_number
from megatron.plan.simulate.trace import SourceRole

ROOT = Path(__file__).parents[3]  # as the frames of this package name it: not resolved
_FSDP2 = f"{Path(fsdp.__file__).parent}/"
_OURS = ("megatron/", "tasks/", "tools/", "examples/", "tests/", "pretrain_")


@dataclass(frozen=True, slots=True)
class SourceLines:
    """Lines of this project. path: of a file from the project's folder, or of a folder, with / at its end. lines: None: all."""

    path: str
    lines: range | None = None

    def includes(self, where: str) -> bool:
        """Whether a line, given as "file:number", or all lines of a file are among them."""
        file, _, line = where.partition(":")
        return file.startswith(self.path) and (self.lines is None or int(line) in self.lines)


def source_of(module: ModuleType) -> SourceLines:
    """Return all lines of a module."""
    assert module.__file__ is not None, f"{module.__name__} has a file"
    return SourceLines(Path(module.__file__).relative_to(ROOT).as_posix())


def lines_of(function: Callable[..., object]) -> SourceLines:
    """Return the lines of a function or method."""
    lines, first = inspect.getsourcelines(function)
    file = Path(inspect.getfile(function)).relative_to(ROOT).as_posix()
    return SourceLines(file, range(first, first + len(lines)))


# Code that only watches: its operations and collectives are those of its caller.
_OBSERVERS = (
    SourceLines(Path(__file__).parents[1].relative_to(ROOT).as_posix() + "/"),
    *map(source_of, (collectives, flight_recorder)),
)
# Where a backward pass is started: what runs then belongs to the line of the forward pass that it goes back to.
_STARTS_BACKWARD = tuple(map(source_of, (executor, recompute)))
ALLOCATES_IN_HOST_MEMORY = lines_of(device.empty_host_tensor)
_ROLES: tuple[tuple[SourceRole, tuple[SourceLines, ...]], ...] = (
    ("attention", (source_of(fused),)),
    ("attention in chunks", (source_of(chunked_attention),)),
    ("blocks", (source_of(cross_entropy), source_of(linear_loss))),
    ("emulated product", (lines_of(fp8.emulated_quantized_matmul), lines_of(fp8.QuantizedMatrix.apply_block_scales))),
    ("sum of shares", (source_of(finalize),)),
)


@cache
def role_of(where: str) -> SourceRole:
    """Return what the cost model and the matching of collectives must know of a line, given as "file:number"."""
    return next((role for role, known in _ROLES if any(one.includes(where) for one in known)), "")


class SourceLocator:
    """Finds the innermost line of this project on the call stack, "file:number"; of what autograd runs, that of its forward pass."""

    def __init__(self) -> None:
        self._files: dict[CodeType, str] = {}
        self._lines: dict[tuple[CodeType, int], str] = {}
        self._nodes: dict[int, tuple[str, str]] = {}  # number of an autograd node -> where the forward pass made it

    def location(self, frame: FrameType | None, module: str) -> tuple[str, str]:
        """Return (line, module) of an operation that this frame runs; "" for the line of other projects' code.

        module: that runs; of what autograd runs, it is that of the forward pass instead.
        """
        while frame is not None and not (file := self._project_file(frame.f_code)):
            frame = frame.f_back
        if frame is None:
            return "", module
        if any(one.includes(file) for one in _STARTS_BACKWARD):
            node = running_node_number()
            if node is not None and (made := self._nodes.get(node)) is not None:
                return made
        key = frame.f_code, frame.f_lineno
        if key not in self._lines:
            self._lines[key] = f"{file}:{frame.f_lineno}"
        place = self._lines[key], module
        if torch.is_grad_enabled():
            self._nodes[newest_node_number()] = place
        return place

    def _project_file(self, code: CodeType) -> str:
        """Return the path of a code object's file within the project; "" for other code and for code that only watches."""
        if code not in self._files:
            path = Path(code.co_filename)
            file = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
            watches = any(one.includes(file) for one in _OBSERVERS)
            self._files[code] = file if file.startswith(_OURS) and not watches else ""
        return self._files[code]


def called_by_fsdp2(frame: FrameType | None) -> bool:
    """Whether FSDP2 is on the call stack between this frame and the first frame of this project."""
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(ROOT / "megatron"):
        if frame.f_code.co_filename.startswith(_FSDP2):
            return True
        frame = frame.f_back
    return False
