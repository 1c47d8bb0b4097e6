"""Files of `torch.save` from strangers, read without running anything in them.

Megatron's checkpoints hold more than tensors: the pickled arguments of the run, its own enums and loss scalers, random
states as numpy arrays. torch's restricted unpickler (`weights_only`) builds tensors and plain containers only. Here the
classes of Megatron, of argparse and of numpy are stood in for by `InertObject`, which keeps attributes and can do nothing; a
file that names anything else is refused before it is unpickled.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError

# Beginnings of the names that a record may stand in for. Nothing of these modules is imported.
_INERT = re.compile(
    r"(megatron|fp16|apex|transformer_engine|argparse|types|numpy|deepspeed|signal|pathlib|enum)\.[\w.]+"
)
_TORCH_DECIDES = re.compile(
    r"(torch|collections|builtins|__builtin__|_codecs)\.[\w.]+"
)  # it knows which of these are harmless
_PROTOCOL = 2
_PICKLES_BEFORE = 3  # pickles before the content in a file from before torch 1.6: magic number, protocol, system


class InertObject:
    """Stands for an object of a foreign class: it keeps the attributes, and has no methods."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})


def read_torch_file(path: str | Path) -> Any:
    """Read a file of `torch.save` (zip, or from before torch 1.6) without running its code; tensors on the CPU, mapped
    if possible.

    Raises `CheckpointError` if it is missing, damaged, no such file, or names a class that has no place in a
    checkpoint.
    """
    path = Path(path)
    try:
        is_zip = zipfile.is_zipfile(path)
        names = _globals_in_zip(path) if is_zip else _globals_in_legacy_file(path)
        _refuse_unknown_globals(names, path)
        with torch.serialization.safe_globals(_inert_class_pairs(names)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise CheckpointError(f"{path} cannot be read as a file of torch.save: {_short_error_text(error)}") from None


def read_torch_bytes(content: bytes, where: str) -> Any:
    """As `read_torch_file`, for the bytes of such a file. where: name for errors."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = _globals_in_archive(archive)
        _refuse_unknown_globals(names, where)
        with torch.serialization.safe_globals(_inert_class_pairs(names)):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise CheckpointError(f"{where} is damaged: {_short_error_text(error)}") from None


def attributes_of_inert(value: Any) -> dict[str, Any]:
    """Return the attributes of a pickled namespace (an `InertObject`); a dict as it is; {} for anything else."""
    if isinstance(value, dict):
        return dict(value)
    return (
        {name: item for name, item in vars(value).items() if name != "arguments"}
        if isinstance(value, InertObject)
        else {}
    )


def _inert_class_pairs(names: Iterable[str]) -> list[Any]:
    """Return (InertObject, name) for each foreign class, as torch.serialization.safe_globals takes them."""
    return [(InertObject, name) for name in sorted(names) if _INERT.fullmatch(name)]


def _refuse_unknown_globals(names: set[str], where: str | Path) -> None:
    """Raise `CheckpointError` if a pickle names classes or functions that are neither inert nor judged by torch."""
    strangers = sorted(name for name in names if not _INERT.fullmatch(name) and not _TORCH_DECIDES.fullmatch(name))
    if strangers:
        raise CheckpointError(
            f"{where} names {', '.join(strangers[:5])}, which has no place in a checkpoint; nothing of it "
            "was run. If you trust where the file is from, load it there and save its tensors alone"
        )


def _globals_in_zip(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return _globals_in_archive(archive)


def _globals_in_archive(archive: zipfile.ZipFile) -> set[str]:
    globals_used: set[str] = set()
    for member in archive.namelist():
        if member.endswith("data.pkl"):
            globals_used |= _globals_in_pickle(archive.read(member))
    return globals_used


def _globals_in_legacy_file(path: Path) -> set[str]:
    with path.open("rb") as file:
        for _ in range(_PICKLES_BEFORE):
            for _ in pickletools.genops(file):
                pass
        start = file.tell()
        for _ in pickletools.genops(file):
            pass
        stop = file.tell()
        file.seek(start)
        return _globals_in_pickle(file.read(stop - start))


def _globals_in_pickle(content: bytes) -> set[str]:
    """Return the classes and functions that a pickle names. `ValueError` for protocols newer than torch.save writes."""
    globals_used: set[str] = set()
    for code, argument, _ in pickletools.genops(content):
        if code.name == "GLOBAL":
            globals_used.add(".".join(str(argument).split(" ", 1)))
        elif code.name == "PROTO" and isinstance(argument, int) and argument > _PROTOCOL:
            raise ValueError(f"it is pickled by protocol {argument}, and torch.save writes {_PROTOCOL}")
    return globals_used


def _short_error_text(error: Exception) -> str:
    """Return the error's first line, without torch's advice to load the file unsafely."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        refused = re.search(r"Unsupported global: GLOBAL (\S+)|Unsupported class (\S+)", text)
        return f"it names {refused[1] or refused[2]}, which was refused" if refused else "its pickle was refused"
    return text.splitlines()[0][:300]
