"""What a dry run needs of torch that torch does not document. A new version that changes any of it is followed here alone.

tensors without data   `FakeTensor` and its mode, `fake_tensor_on`, `values_known_by_torch`
groups without ranks   `FakeStore`, `finished_work`
operations             `operation_of`, `writes_into_inputs`, `num_results`, `storage_key`
dispatch               `RecordingMode`, `without_dispatch`, `without_modes`
autograd               numbers of nodes, `call_after_backward`
FSDP2                  `fsdp2_on_one_rank`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

__all__ = ["FakeStore", "FakeTensor", "FakeTensorMode", "tree_map", "tree_map_only"]


class RecordingMode(TorchDispatchMode):
    """A dispatch mode that runs outside of torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that torch would put around costs more than the rest


def without_dispatch() -> AbstractContextManager[None]:
    """Return a context whose operations reach neither modes nor tensors that override them."""
    return torch._C._DisableTorchDispatch()


def without_modes() -> AbstractContextManager[Any]:
    """Return a context whose operations reach no dispatch mode."""
    return _disable_current_modes()


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key of a storage, of its own while it is alive; one without data has no address."""
    return storage._cdata


def operation_of(func: Any) -> Any:
    """Return the operation of which the dispatch saw an overload: aten.add of aten.add.Tensor."""
    return func._overloadpacket


def writes_into_inputs(func: Any) -> bool:
    """Whether an operation changes a tensor that it is given."""
    return func._schema.is_mutable


def num_results(func: Any) -> int:
    """Return how many results an operation has."""
    return len(func._schema.returns)


def finished_work() -> Any:
    """Return what a collective returns that is over, as the dispatch sees it."""
    return FakeWork().boxed()


def wait_for(work: Any) -> None:
    """Wait for a collective, given as the dispatch sees it."""
    dist.Work.unbox(work).wait()


def fake_tensor_on(mode: FakeTensorMode, like: Tensor, attributes: dict[str, Any]) -> FakeTensor:
    """Return the fake tensor that torch makes of one on the meta device (any shape), which is to be on the CPU.

    attributes: empty at first; those of the first one, which is torch's own, and of which the others are copies: torch takes ten times as long.
    """
    cpu = torch.device("cpu")
    if not attributes:
        made = FakeTensor(mode, like, cpu)
        attributes.update(vars(made))
        return made
    made = Tensor._make_subclass(
        FakeTensor, like, like.requires_grad, dispatch_device=True, device_for_backend_keys=cpu
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(attributes)
    return made


def values_known_by_torch(tensor: Any) -> Tensor | None:
    """Return the values that torch itself knows of a fake tensor (any shape)."""
    return tensor.constant


def newest_node_number() -> int:
    """Return the number of the autograd node that was made last in this thread."""
    return torch.autograd._get_sequence_nr() - 1


def running_node_number() -> int | None:
    """Return the number of the autograd node whose backward pass runs, None outside of one."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_python_node(node: Any) -> bool:
    """Whether an autograd node, or None, is one of a `torch.autograd.Function`."""
    return isinstance(node, torch._C._FunctionBase)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call this when the backward pass is over that runs."""
    Variable._execution_engine.queue_callback(callback)


@contextmanager
def fsdp2_on_one_rank(on_resize: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Within: FSDP2 compares neither device meshes nor sharded parameters on real ranks. on_resize: called after a storage was
    resized, as FSDP2 does when it gathers and frees layers.
    """
    resize, from_group = torch.UntypedStorage.resize_, DeviceMesh.from_group

    def resize_and_report(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        on_resize(storage)

    def from_group_unrecorded(*args: Any, **options: Any) -> DeviceMesh:
        with _disable_current_modes():
            return from_group(*args, **options)

    with (
        _patched_attribute(torch.UntypedStorage, "resize_", resize_and_report),
        _patched_attribute(DeviceMesh, "from_group", staticmethod(from_group_unrecorded)),
        _patched_attribute(FSDPParam, "reset_sharded_param", lambda param: None),
    ):
        yield


@contextmanager
def _patched_attribute(owner: type, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a class while this is open."""
    plain, is_own = owner.__dict__.get(name), name in owner.__dict__
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, plain)
        else:
            delattr(owner, name)
