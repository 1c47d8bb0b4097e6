"""The GPU's code on the stand-in for a GPU: training, recorded layers, low-precision matmuls, and layouts over the stand-in for NCCL."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA itself"),
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="the stand-in is made by a C++ compiler"
    ),
]


NETWORK = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --micro-batch-size 4 "
    "--global-batch-size 8 --lr 1e-3 --clip-grad 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 8000 --eval-iters 0 "
    "--log-interval 1 --train-iters 3 --bf16"
).split()


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--cross-entropy-fusion-impl linear --hidden-dropout 0",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --attention-dropout 0",
        "--fp8-format e4m3 --fp8-recipe blockwise --attention-dropout 0",
        "--num-experts 4 --moe-grouped-gemm --moe-router-topk 2 --attention-dropout 0",
        "--optimizer-cpu-offload --cpu-offloading-num-layers 3",
    ],
)
def test_a_run_holds_as_much_as_its_plan_says(flags: str) -> None:
    words = [*NETWORK, *flags.split()]
    ran = on_the_stand_in("9.0", "pretrain_gpt.py", *words)
    held = float(re.findall(r"max allocated: ([0-9.]+)", ran)[-1]) * 2**20
    planned = subprocess.run(
        [sys.executable, "-m", "megatron", "plan", *words, "--world-size", "1", "--gpu", "h200", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (rank,) = json.loads(planned.stdout)["ranks"]
    assert held == pytest.approx(rank["peak"], rel=0.01)


@pytest.mark.parametrize(
    "capability, chosen",
    [
        (
            "9.0",
            [
                "-m",
                "gpu",
                "tests/gpu/test_training.py",
                "tests/gpu/test_low_precision.py",
                "tests/gpu/test_decoding.py",
            ],
        ),
        ("9.0", ["-m", "gpu", "tests/gpu/test_graphs.py", "-k", "(llama or moe) and not bf16"]),
        ("10.0", ["-m", "gpu", "tests/gpu/test_low_precision.py", "-k", "products"]),
        ("9.0", ["tests/parity/test_layouts.py", "-k", "serial_run and (zero or fsdp or cp2) and llama and fp64"]),
        ("9.0", ["tests/unit/inference/test_layouts.py", "-k", "answers and (tp2 or ep2) and not pp2 and not ahead"]),
    ],
    ids=["gpu", "graphs", "blackwell", "layouts", "decoding over ranks"],
)
def test_what_is_for_gpus_passes_on_the_stand_in(capability: str, chosen: list[str]) -> None:
    said = on_the_stand_in(capability, *chosen)
    assert " passed" in said and " failed" not in said


def on_the_stand_in(capability: str, *words: str) -> str:
    """What tests or a program say there."""
    done = subprocess.run(
        ["bash", "tests/without_gpu/run.sh", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MEGATRON_STAND_IN": capability},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout
