"""Python imports this file by itself, before all others, where its folder is in PYTHONPATH: so every process has the stand-in."""

import ctypes
import importlib.util
import os
from pathlib import Path


def _install() -> None:
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(torch_folder / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(Path(os.environ["MEGATRON_STAND_IN_FOLDER"]) / "gpu_stand_in.so"), ctypes.RTLD_GLOBAL)
    import device
    import groups

    device.install()
    groups.install()


if "MEGATRON_STAND_IN" in os.environ:
    _install()
