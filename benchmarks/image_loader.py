#!/usr/bin/env python3
"""How many images a CPU-second yields (decoded, resized, normalized, packed): our reader of Energon's folders, Energon's own, and webdataset.

    python benchmarks/image_loader.py [--images 400]
    python benchmarks/image_loader.py --peers FOLDER    (where pip install --target put megatron-energon or webdataset, with what they need)

A folder of JPEG files of 640 x 480 in tars of 100, with captions, is read once by each, in a process of its own, without further workers, in turn. All
resize with Pillow to 336 x 336 and normalize with numpy; the peers do what their documentation shows: a task encoder with greedy packing
for Energon, a loop over a pipeline for webdataset. The checksums of the pixels must agree.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
SIDE, SLOTS, LENGTH, SHARD = 336, 576, 4096, 100
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def write(folder: Path, count: int) -> None:
    """The tars, and what `energon prepare` writes beside them."""
    random, counts = np.random.default_rng(0), {}
    for first in range(0, count, SHARD):
        name = f"shard-{first // SHARD}.tar"
        with tarfile.open(folder / name, "w") as tar:
            for number in range(first, min(first + SHARD, count)):
                small = random.integers(0, 255, (24, 32, 3), dtype=np.uint8)  # smooth, as photographs are
                image, file = Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC), io.BytesIO()
                image.save(file, "JPEG", quality=90)
                text = json.dumps({"caption": "word " * int(random.integers(5, 60))}).encode()
                for ending, data in (("jpg", file.getvalue()), ("json", text)):
                    entry = tarfile.TarInfo(f"{number:06d}.{ending}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
        counts[name] = min(SHARD, count - first)
    meta = folder / ".nv-meta"
    meta.mkdir()
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "split.yaml").write_text(
        json.dumps({"split_parts": {"train": list(counts), "val": [], "test": []}, "exclude": []})
    )
    sample = {"sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"}}
    (meta / "dataset.yaml").write_text(
        json.dumps({**sample, "field_map": {"image": "jpg", "caption": "json[caption]"}})
    )


def pixels(image: Any) -> np.ndarray:
    """What a script without a library of its own writes. float32 [3, side, side]"""
    small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    values = np.asarray(small, np.float32) / 255.0
    return np.ascontiguousarray(((values - np.array(MEAN, np.float32)) / np.array(STD, np.float32)).transpose(2, 0, 1))


def greedy(lengths: list[int]) -> list[list[int]]:
    """Samples into rows of LENGTH: the largest that fits next."""
    left, result = sorted(range(len(lengths)), key=lambda place: -lengths[place]), []
    while left:
        room, chosen = LENGTH, list[int]()
        for place in list(left):
            if lengths[place] <= room:
                chosen.append(place)
                left.remove(place)
                room -= lengths[place]
        result.append(chosen or [left.pop(0)])
    return result


def ours(folder: str, count: int) -> Iterator[np.ndarray]:
    """The images of each packed sample of ours."""
    sys.path.insert(0, str(ROOT))
    from megatron.core.config.settings.data import TokenizerConfig
    from megatron.core.datasets.blend import build_split_datasets
    from megatron.core.datasets.multimodal import make_image_chat_dataset_kind
    from megatron.core.tokenizers.build import build_tokenizer
    from tests.helpers import tiny

    run = tiny.config(
        vision_model_type="clip", img_h=SIDE, img_w=SIDE, patch_dim=14, disable_vision_class_token=True, vision_num_layers=1,
        vision_hidden_size=16, vision_num_attention_heads=2, sft=True, sft_tokenizer_prompt_format="plain", mock_data=False,
        data_path=(folder,), seq_length=LENGTH, max_position_embeddings=LENGTH,
    )  # fmt: skip
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer"))
    data, _, _ = build_split_datasets(run.data, make_image_chat_dataset_kind(run, tokenizer), (None, 0, 0))
    assert data is not None, "the folder has a training part"
    yield np.empty(0)  # headers are read once for all epochs: what follows is timed
    for index in range(len(data)):
        yield data[index]["images"]


def energon(folder: str, count: int) -> Iterator[np.ndarray]:
    """The images of each packed sample of Energon's loader."""
    from megatron.energon import SampleDecoder, TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    class Encoder(TaskEncoder):  # type: ignore[misc, valid-type]
        """Pixels, and bytes as ids."""

        decoder = SampleDecoder(image_decode="pilrgb")

        def encode_sample(self, sample: Any) -> Any:
            sample.image, sample.caption = (
                pixels(sample.image),
                np.frombuffer(sample.caption.encode(), np.uint8).astype(np.int64),
            )
            return sample

        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            rows = greedy([SLOTS + len(sample.caption) for sample in samples])
            return [[samples[place] for place in row] for row in rows]

        def pack_selected_samples(self, samples: list[Any]) -> Any:
            samples[0].image = np.stack([sample.image for sample in samples])
            samples[0].caption = np.concatenate([np.pad(sample.caption, (SLOTS, 0)) for sample in samples])
            return samples[0]

        def batch(self, samples: list[Any]) -> Any:
            return samples[0]

    shards = sorted(path.name for path in Path(folder).glob("*.tar"))
    WebdatasetPreparator.prepare_dataset(folder, shards, split_parts_ratio=[("train", 1.0)], workers=1)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    data = get_train_dataset(
        folder, batch_size=1, shuffle_buffer_size=None, max_samples_per_sequence=None, worker_config=config,
        task_encoder=Encoder(), packing_buffer_size=100, repeat=False,
    )  # fmt: skip
    loader = iter(get_savable_loader(data))
    yield np.empty(0)
    for sample in loader:
        yield np.asarray(sample.image)


def webdataset(folder: str, count: int) -> Iterator[np.ndarray]:
    """The images of each packed sample of a loop over a webdataset pipeline."""
    import webdataset as wds

    shards = [str(path) for path in sorted(Path(folder).glob("*.tar"))]
    data = wds.WebDataset(shards, shardshuffle=False).decode("pilrgb").to_tuple("jpg", "json")
    yield np.empty(0)
    buffer: list[tuple[np.ndarray, np.ndarray]] = []

    def packed() -> Iterator[np.ndarray]:
        for row in greedy([SLOTS + len(ids) for _, ids in buffer]):
            yield np.stack([buffer[place][0] for place in row])

    for image, text in data:
        buffer.append((pixels(image), np.frombuffer(text["caption"].encode(), np.uint8).astype(np.int64)))
        if len(buffer) == 100:
            yield from packed()
            buffer.clear()
    yield from packed()


READERS = {"ours": ours, "energon": energon, "webdataset": webdataset}


def measure(name: str, folder: str, count: int) -> None:
    """Print images, CPU-seconds and the sum of all pixels."""
    reader = READERS[name](folder, count)
    next(reader)
    begun, images, total = time.process_time(), 0, 0.0
    for block in reader:
        images += len(block)
        total += float(block[:, :, ::16, ::16].sum(dtype=np.float64))
    print(json.dumps({"images": images, "seconds": time.process_time() - begun, "sum": total}))


def main() -> None:
    """Measure each in turn."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--images", type=int, default=400, help="of the folder (default: 400)")
    made.add_argument("--rounds", type=int, default=3, help="of which the median counts (default: 3)")
    made.add_argument("--peers", metavar="FOLDER", help="where the peers are")
    made.add_argument("--measure", choices=READERS, help=argparse.SUPPRESS)
    made.add_argument("--folder", help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.measure:
        return measure(args.measure, args.folder, args.images)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.images)
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in (READERS if args.peers else ("ours",))}
        for name in [name for _ in range(args.rounds) for name in measured]:
            here = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT) if name == "ours" else str(args.peers),
            }
            command = [sys.executable, "-P", str(Path(__file__).resolve()), "--measure", name, "--folder", folder]
            run = subprocess.run([*command, "--images", str(args.images)], env=here, capture_output=True, text=True)
            if run.returncode:
                sys.exit(f"{name}: {run.stderr[-2000:]}")
            measured[name].append(json.loads(run.stdout.splitlines()[-1]))
        for name, results in measured.items():
            speed = statistics.median(one["images"] / one["seconds"] for one in results)
            print(
                f"{name:<12} {results[0]['images']} images, {speed:6.1f} a CPU-second, sum of pixels {results[0]['sum']:.1f}"
            )


if __name__ == "__main__":
    main()
