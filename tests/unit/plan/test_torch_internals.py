"""What torch does not document is used in one file of the dry run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.plan import simulate
from megatron.plan.simulate import torch_internals

_ALLOWED = ("self", "cls", "super", "aten", "sys")  # of this project, of operations, and of Python


def private_uses(source: str) -> Iterator[str]:
    """Names with an underscore in front that are imported from torch, or read of anything but this project's own objects."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if part.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            whole = ast.unparse(node.value)
            if whole.split(".")[0].split("(")[0] not in _ALLOWED and not whole.startswith("torch.ops."):
                yield f"{whole}.{node.attr}"


def test_only_one_file_uses_what_torch_does_not_document() -> None:
    folder = Path(simulate.__file__).parent
    found = {file.name: set(private_uses(file.read_text(encoding="utf-8"))) for file in folder.glob("*.py")}
    assert {name for name, uses in found.items() if uses} == {Path(torch_internals.__file__).name}, found


@pytest.mark.parametrize(
    "line",
    [
        "from torch._subclasses import fake_tensor",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.autograd import _thing",
        "torch._C._DisableTorchDispatch()",
        "key = tensor.untyped_storage()._cdata",
    ],
)
def test_a_private_name_is_noticed(line: str) -> None:
    assert list(private_uses(line)) and not list(private_uses("self._x; torch.ops.c10d._allgather_base_.default"))
