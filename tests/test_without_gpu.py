"""The GPU's code on the stand-in for a GPU: training, recorded layers, products in few bits, and layouts over the stand-in for NCCL."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA itself"),
              pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="the stand-in is made by a C++ compiler")]


@pytest.mark.parametrize("capability, chosen", [
    ("9.0", ["-m", "gpu", "tests/gpu/test_training.py", "tests/gpu/test_low_precision.py", "tests/gpu/test_decoding.py"]),
    ("9.0", ["-m", "gpu", "tests/gpu/test_graphs.py", "-k", "(llama or moe) and not bf16"]),
    ("10.0", ["-m", "gpu", "tests/gpu/test_low_precision.py", "-k", "products"]),
    ("9.0", ["tests/parity/test_layouts.py", "-k", "serial_run and (zero or fsdp or cp2) and llama and fp64"])], ids=["gpu", "graphs", "blackwell", "layouts"])
def test_what_is_for_gpus_passes_on_the_stand_in(capability: str, chosen: list[str]) -> None:
    done = subprocess.run(["bash", "tests/without_gpu/run.sh", *chosen], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "MEGATRON_STAND_IN": capability})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " failed" not in done.stdout
