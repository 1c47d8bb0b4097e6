"""A recorder over fake tensors: tensors with a shape and no data.

Torch's FakeTensorMode derives the result of an operation from shapes. A step repeats the same operations on the same shapes thousands of
times, so results are cached, and the next fake tensor is made from the cache.

A step reads numbers from tensors in few places. How many tokens an expert has follows from the choice of experts, which is made in turn
(recorder.py); which ranks share a document follows from its length. So the true values of that choice, of texts, and of all integer
tensors computed from them are kept beside the fake tensors (`tensor.known`). Of any other tensor, a step may only ask whether
a number is finite, or small enough; the answer is yes.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.plan.simulate.recorder import OpFacts, StepRecorder, op_cost_facts, tensors_of
from megatron.plan.simulate.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    fake_tensor_on,
    finished_work,
    num_results,
    storage_key,
    values_known_by_torch,
    without_dispatch,
    writes_into_inputs,
)

aten = torch.ops.aten
_MOST_KNOWN = 1 << 21  # elements of a tensor whose values are kept
_WHOLE = (torch.int64, torch.int32, torch.bool)
_COUNTING = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_FROM_NOTHING = (*_COUNTING, aten.zeros.default, aten.ones.default, aten.full.default)
_LIKE = {aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.full_like.default: None}
_MAKES_CONSTANTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
ROUNDS = 3  # what is repeated until a number is small enough is done so often


@dataclass(frozen=True, slots=True)
class _FakeTensorBlueprint:
    """How to make a result from the inputs.

    of: index of the input that it is (same), or whose storage it views, or -1 for new storage. shift: offset into that storage.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    of: int = -1
    shift: int = 0
    same: bool = False


@dataclass(frozen=True, slots=True)
class _FakeResultBlueprint:
    """How to make a cached result. kind: None for a single output, else the type of the sequence of outputs."""

    kind: type | None
    outputs: tuple[_FakeTensorBlueprint | None, ...]
    facts: OpFacts


@dataclass(slots=True)
class FakeTensorCache:
    """The fake tensor mode and the cached results that all recorders of a dry run share.

    attributes: those with which torch makes a fake tensor of known shape; scans: costs of their spans (scan_recorder.py).
    """

    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    plans: dict[Any, _FakeResultBlueprint | None] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    scans: dict[Any, Any] = field(default_factory=dict)


class FakeTensorRecorder(StepRecorder):
    """A recorder over fake tensors.

    world: its FakeTensorMode must be active below this mode. knows: track integer values, even without routers. masks: track fp32 masks too,
    where shapes follow from them.
    """

    def __init__(
        self,
        ranks: dict[str, tuple[int, ...]],
        choices: tuple[int, int] | None,
        world: FakeTensorCache,
        *,
        knows: bool = False,
        masks: bool = False,
    ) -> None:
        super().__init__(ranks, choices)
        self.world, self.knows, self.num_questions = world, knows or masks or choices is not None, 0
        self._kept = (*_WHOLE, torch.float32) if masks else _WHOLE

    @property
    def modes(self) -> tuple[AbstractContextManager[Any], ...]:
        """See the base class."""
        return self.world.mode, self

    def run_operation(self, func: Any, args: tuple, kwargs: dict[str, Any], where: str) -> tuple[Any, OpFacts]:
        """Derive the result of an operation from shapes, and known values; see `StepRecorder.run_operation`."""
        if func is aten._local_scalar_dense.default:
            return self._known_number(args[0], where), op_cost_facts(func, args, kwargs, None)
        if func is aten.randint.default:  # a seed, of which one is as good as another
            result, facts = self._fake_result_of(func, args, kwargs)
            with without_dispatch():
                result.known = torch.zeros(result.shape, dtype=result.dtype)
            return result, facts
        if not self.knows:
            return self._fake_result_of(func, args, kwargs)
        known = self._evaluate_on_known_values(func, args, kwargs)
        if known is not None and torch.Tag.dynamic_output_shape in func.tags:
            made = [torch.empty(value.shape, dtype=value.dtype) for value in tensors_of((known,))]
            result = made[0] if isinstance(known, Tensor) else tuple(made)
            facts = op_cost_facts(func, args, kwargs, result)
        else:
            result, facts = self._fake_result_of(func, args, kwargs)
        self._attach_values(func, args, result, known)
        return result, facts

    def _attach_values(self, func: Any, args: tuple, result: Any, known: Any) -> None:
        """Attach the known values of results, and drop those of tensors that the operation changed in place."""
        if self._is_router_choice(func, args):
            with without_dispatch():
                result[1].known = self._fake_routing(result[1])
        elif func is aten.sort.stable and args[0].dim() == 1 and args[0].dtype.is_floating_point:
            with without_dispatch():  # one order is as good as another: numbers follow from none
                result[1].known = torch.arange(args[0].numel())
        elif known is not None:
            for tensor, value in zip(tensors_of((result,)), tensors_of((known,)), strict=True):
                _attach_fake_tensor_values(tensor, value if value.numel() <= _MOST_KNOWN else None)
        elif writes_into_inputs(func):
            for tensor in tensors_of((result,)):
                _attach_fake_tensor_values(tensor, None)

    def run_communication(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """As `StepRecorder`'s. All ranks make the same choices, so a gathered tensor repeats this rank's values."""
        work = finished_work()  # no data goes anywhere, and torch's own way compares lists of all tensors first
        result = (args[0], work) if num_results(func) > 1 else work
        if self.knows:
            for tensor in tensors_of((args[0],)):
                _attach_fake_tensor_values(tensor, None)
            if (
                func is torch.ops.c10d._allgather_base_.default
                and (known := getattr(args[1], "known", None)) is not None
            ):
                with without_dispatch():
                    args[0].known = known.reshape(-1).repeat(args[0].numel() // args[1].numel()).view(args[0].shape)
        return result

    def _known_number(self, tensor: Tensor, where: str) -> Any:
        """Return the number that the step reads from a tensor. Raises `RuntimeError` if it depends on data."""
        known = getattr(tensor, "known", None)
        known = values_known_by_torch(tensor) if known is None else known
        if known is not None:
            with without_dispatch():
                return known.item()
        if tensor.dtype == torch.bool:
            return True
        if tensor.dtype.is_floating_point:
            self.num_questions += 1
            return float(self.num_questions % ROUNDS != 0)
        raise RuntimeError(f"{where} asks for a number that depends on data, of which a dry run has none")

    def _evaluate_on_known_values(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Compute an operation on the known values of its inputs; None if some are unknown or no integers."""
        inputs = list(tensors_of((*args, *kwargs.values())))
        if not inputs and not self._keeps_created_values(func, args, kwargs):
            return None
        if func in _LIKE and inputs[0].dtype in self._kept and inputs[0].numel() <= _MOST_KNOWN:
            with without_dispatch():
                value = args[1] if func is aten.full_like.default else _LIKE[func]
                return torch.full(inputs[0].shape, value or 0, dtype=inputs[0].dtype)
        if any(getattr(tensor, "known", None) is None for tensor in inputs):
            return None
        with without_dispatch():
            return func(
                *_replace_fakes_by_known_values(args),
                **{name: _replace_fakes_by_known_values((value,))[0] for name, value in kwargs.items()},
            )

    def _keeps_created_values(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the values of what an operation without tensors makes (zeros, a range) are kept."""
        counts = func in _COUNTING
        if func not in _FROM_NOTHING or kwargs.get("dtype", torch.int64 if counts else None) not in self._kept:
            return False
        return counts or math.prod(args[0]) <= _MOST_KNOWN

    def _fake_result_of(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, OpFacts]:
        """Derive the result of an operation from shapes, from the cache where possible."""
        if func is aten.set_.source_Storage_storage_offset:  # remembered, it would keep the storage
            self.world.mode.cache_enabled = False
            try:
                result = func(*args, **kwargs)
            finally:
                self.world.mode.cache_enabled = True
            return result, op_cost_facts(func, args, kwargs, result)
        inputs: list[Tensor] = []
        key = (func, _cache_key(args, inputs), _cache_key(tuple(kwargs.items()), inputs) if kwargs else ())
        plan = self.world.plans.get(key)
        if plan is None or any(values_known_by_torch(tensor) is not None for tensor in inputs):
            result = func(*args, **kwargs)
            facts = op_cost_facts(func, args, kwargs, result)
            if key not in self.world.plans and func not in _MAKES_CONSTANTS:
                self.world.plans[key] = _blueprint_of_result(result, inputs, facts)
            return result, facts
        made = [None if output is None else self._make_output(output, inputs) for output in plan.outputs]
        return (made[0] if plan.kind is None else plan.kind(made)), plan.facts

    def _make_output(self, output: _FakeTensorBlueprint, inputs: list[Tensor]) -> Tensor:
        """Return a fake tensor by its recipe, on new storage or on an input's."""
        if output.same:
            return inputs[output.of]
        with without_dispatch():
            if output.of < 0:
                tensor = torch.empty_strided(output.size, output.stride, dtype=output.dtype, device="meta")
            else:
                source = inputs[output.of]
                tensor = torch.empty(0, dtype=output.dtype, device="meta")
                tensor.set_(
                    source.untyped_storage(), source.storage_offset() + output.shift, output.size, output.stride
                )
        return fake_tensor_on(self.world.mode, tensor, self.world.attributes)


def _cache_key(values: Any, inputs: list[Tensor]) -> tuple:
    """Return what the shapes of a result depend on. inputs: all tensors among the values are appended to it."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            inputs.append(value)
            key.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            key.append(_cache_key(value, inputs))
        elif isinstance(value, (bool, float)):
            key.append((type(value), value))
        else:
            key.append(value)
    return tuple(key)


def _blueprint_of_result(result: Any, inputs: list[Tensor], facts: OpFacts) -> _FakeResultBlueprint | None:
    """Return how to make such a result again; None if it cannot be cached."""
    several = isinstance(result, (list, tuple))
    values, outputs = tuple(result) if several else (result,), []
    behind = list(reversed(list(enumerate(inputs))))
    alike = {id(tensor): place for place, tensor in behind}
    places = {storage_key(tensor.untyped_storage()): place for place, tensor in behind}
    for value in values:
        if value is not None and (not isinstance(value, FakeTensor) or values_known_by_torch(value) is not None):
            return None
        outputs.append(None if value is None else _blueprint_of_output(value, inputs, alike, places))
    return _FakeResultBlueprint(type(result) if several else None, tuple(outputs), facts)


def _blueprint_of_output(
    value: FakeTensor, inputs: list[Tensor], alike: dict[int, int], places: dict[int, int]
) -> _FakeTensorBlueprint:
    """Describe one result. alike: id of an input -> its index; places: storage of an input -> its index."""
    shape = tuple(value.shape), value.stride(), value.dtype
    if id(value) in alike:
        return _FakeTensorBlueprint(*shape, alike[id(value)], same=True)
    place = places.get(storage_key(value.untyped_storage()), -1)
    return _FakeTensorBlueprint(
        *shape, place, 0 if place < 0 else int(value.storage_offset() - inputs[place].storage_offset())
    )


def _attach_fake_tensor_values(tensor: Any, value: Tensor | None) -> None:
    """Attach the known values of a fake tensor; None: unknown."""
    tensor.known = value


def _replace_fakes_by_known_values(args: Any) -> list[Any]:
    """Return arguments with known values in the place of tensors."""
    return [
        getattr(value, "known")
        if isinstance(value, Tensor)
        else _replace_fakes_by_known_values(value)
        if isinstance(value, (list, tuple))
        else value
        for value in args
    ]
