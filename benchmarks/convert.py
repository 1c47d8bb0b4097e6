#!/usr/bin/env python3
"""How fast checkpoints are converted, and how much memory that takes, beside a plain copy of the same bytes.

    python benchmarks/convert.py --gigabytes 2 --folder DIR

Makes a Llama of about that size in bf16 (random, 24 layers), and converts it to this project's format and back, each in a
process of its own. Memory: the most that the process had for itself (mappings of files not counted) above what it had
when everything was imported.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.rewrite import rewrite_checkpoint
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.families import hf, hf_export
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.parallel.boxes import Box

LAYERS, VOCABULARY = 24, 32000


class Random:
    """A source of bf16 values without meaning."""

    def __init__(self, gigabytes: float) -> None:
        hidden = round((gigabytes * 5e8 / (LAYERS * 12)) ** 0.5 / 128) * 128
        self.where, self.values = "random", {}
        self.settings = {
            "num_layers": LAYERS,
            "hidden_size": hidden,
            "ffn_hidden_size": hidden * 8 // 3 // 64 * 64,
            "num_attention_heads": hidden // 64,
            "true_vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
        }
        self.formats = {
            f"model.{name}": ShapeAndDtype(shape, torch.bfloat16)
            for name, shape in global_parameter_shapes(model_config_from_settings(self.settings)).items()
        }
        self._pool = torch.randn(1 << 22).bfloat16()

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        return self._pool.repeat(box.num_elements // len(self._pool) + 1)[: box.num_elements].view(box.shape)


def own_memory() -> int:
    """Bytes that this process has for itself."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def measured(action: Callable[..., Any], *arguments: Any) -> tuple[float, int]:
    """Seconds and bytes of memory that an action takes, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (action, arguments))


def _measure(action: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, int]:
    torch.set_num_threads(1)
    over, seen, base = threading.Event(), [0], own_memory()

    def watch() -> None:
        while not over.wait(0.002):
            seen[0] = max(seen[0], own_memory() - base)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    action(*arguments)
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    return seconds, seen[0]


def make(folder: Path, gigabytes: float) -> None:
    """A published folder to convert."""
    hf_export.export_hf_folder(Random(gigabytes), folder)


def copy(folder: Path, target: Path) -> None:
    """The same bytes, read and written by hand, durable."""
    target.mkdir()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as source, (target / path.name).open("wb") as written:
            shutil.copyfileobj(source, written, 1 << 24)
            written.flush()
            os.fsync(written.fileno())


def to_own(folder: Path, target: Path) -> None:
    """Published to ours."""
    source = hf.open_hf_folder(folder)
    rewrite_checkpoint(source, target, iteration=0, settings=source.settings)


def to_published(folder: Path, target: Path) -> None:
    """Ours to published."""
    hf_export.export_hf_folder(open_native_checkpoint(folder / "iter_0000000"), target)


def main() -> None:
    """Measure and print one line a conversion."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="where the files go (default: the temporary folder)")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        make(base / "published", args.gigabytes)
        source = hf.open_hf_folder(base / "published")
        sizes = [torch.empty(one.shape, dtype=one.dtype, device="meta").nbytes for one in source.formats.values()]
        print(f"{sum(sizes) / 1e9:.2f} GB in {len(sizes)} tensors, the largest {max(sizes) / 1e6:.0f} MB")
        for name, action, start, end in (
            ("plain copy", copy, "published", "copied"),
            ("Hugging Face to own", to_own, "published", "own"),
            ("own to Hugging Face", to_published, "own", "back"),
        ):
            seconds, memory = measured(action, base / start, base / end)
            print(f"  {name:20} {sum(sizes) / 1e9 / seconds:5.2f} GB/s   {memory / 1e6:6.0f} MB of memory")
            if name == "plain copy":
                shutil.rmtree(base / end)
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
