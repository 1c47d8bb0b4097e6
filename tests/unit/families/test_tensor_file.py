"""Safetensors files against the safetensors package, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.families.tensor_file import (
    preallocate_safetensors_file,
    read_safetensors_header,
    write_safetensors_tensor,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TENSORS = st.dictionaries(
    st.text("ab.019_\u00e9", min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)


def made(tensors: dict[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    """Random tensors of these dtypes and shapes."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in tensors.items()}


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TENSORS)
def test_files_are_those_of_the_safetensors_package_byte_by_byte(tmp_path: Path, tensors: dict[str, Any]) -> None:
    values = made(tensors)
    expected = safetensors.torch.save(values, metadata={"format": "pt"})
    path = tmp_path / "ours.safetensors"
    path.unlink(missing_ok=True)
    places = preallocate_safetensors_file(
        path, {name: ShapeAndDtype(tuple(value.shape), value.dtype) for name, value in values.items()}
    )
    for name in reversed(list(values)):  # in any order
        write_safetensors_tensor(places[name], values[name])
    assert path.read_bytes() == expected


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TENSORS, st.integers(0, 7))
def test_files_of_the_package_are_read_whatever_the_length_of_their_header(
    tmp_path: Path, tensors: dict[str, Any], odd: int
) -> None:
    values = made(tensors)
    content = safetensors.torch.save(values)
    length = int.from_bytes(content[:8], "little")
    path = tmp_path / "theirs.safetensors"
    path.write_bytes(
        (length + odd).to_bytes(8, "little") + content[8 : 8 + length] + b" " * odd + content[8 + length :]
    )
    found = read_safetensors_header(path)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].format == ShapeAndDtype(tuple(value.shape), value.dtype)
        assert torch.equal(found[name].read(), value)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file of two tensors."""
    path = tmp_path / "small.safetensors"
    path.write_bytes(
        safetensors.torch.save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})
    )
    return path


def test_a_file_that_is_cut_anywhere_is_refused_and_named(small: Path) -> None:
    content = small.read_bytes()
    for length in range(len(content)):
        small.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=str(small)):
            read_safetensors_header(small)
    small.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="damaged"):
        read_safetensors_header(small)


def test_a_flipped_bit_in_the_header_is_an_error_or_another_name_never_a_crash(small: Path) -> None:
    content, ours = small.read_bytes(), read_safetensors_header(small)
    length = int.from_bytes(content[:8], "little")
    for place in range(8 * (8 + length)):
        broken = bytearray(content)
        broken[place // 8] ^= 1 << place % 8
        small.write_bytes(bytes(broken))
        try:
            found = read_safetensors_header(small)
        except CheckpointError:
            continue
        for name, stored in found.items():  # where a header still holds together, no byte is read twice or from outside
            assert (
                stored.start + stored.format.num_bytes <= len(content) and stored.read().shape == stored.format.shape
            ), name
        assert sum(stored.format.num_bytes for stored in found.values()) == sum(
            stored.format.num_bytes for stored in ours.values()
        )


def header(path: Path, entries: Any, data: int) -> Path:
    """A file with this header and so many bytes of data."""
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """An entry of a header."""
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "entries, data, complaint",
    [
        ([1], 0, "it is no object"),
        ({"a": 3}, 0, "not one of a tensor"),
        ({"a": entry(dtype="F4")}, 8, "kind 'F4'"),
        ({"a": entry(shape=(3,))}, 8, "takes 12 bytes, and its place has 8"),
        ({"a": entry(shape=(-2,))}, 8, "no list of whole numbers"),
        ({"a": entry(shape="2")}, 8, "no list of whole numbers"),
        ({"a": entry(offsets=(0, 8, 8))}, 8, "no list of whole numbers"),
        ({"a": entry(), "b": entry()}, 8, "overlap or leave bytes"),
        ({"a": entry(offsets=(4, 12))}, 12, "overlap or leave bytes"),
        ({"a": entry()}, 12, "its header promises"),
        ('{"a": 1, "a": 2}', 0, "names a tensor twice"),
        ("[" * 100_000, 0, "cannot be read"),
        ('{"a": "\xff', 0, "cannot be read"),
        ({"a": entry(shape=(1 << 62, 1 << 62), offsets=(0, 1 << 126))}, 8, "promises"),
    ],
)
def test_a_header_that_does_not_hold_together_is_refused_with_the_reason(
    tmp_path: Path, entries: Any, data: int, complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        read_safetensors_header(header(tmp_path / "made.safetensors", entries, data))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone.safetensors cannot be read: No such file"):
        read_safetensors_header(tmp_path / "gone.safetensors")
