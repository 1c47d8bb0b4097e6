"""What the real megatron-energon reads of a folder or a YAML file: a JSON line a sample, in order.

cd ELSEWHERE && PYTHONPATH=FOLDER_OF_MEGATRON_ENERGON python .../tests/peers/run_energon.py prepare FOLDER PART=PATTERN ...
cd ELSEWHERE && PYTHONPATH=FOLDER_OF_MEGATRON_ENERGON python .../tests/peers/run_energon.py read PATH PART
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from megatron.energon import SampleDecoder, TaskEncoder, WorkerConfig, get_loader, get_val_dataset, load_dataset
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

FIELDS = ("caption", "context", "answers", "answer_weights", "text", "choices", "correct_choice_idx", "texts")


class Encoder(TaskEncoder):  # type: ignore[misc]
    """Samples as they are."""

    decoder = SampleDecoder(image_decode="pilrgb")

    def encode_sample(self, sample: Any) -> Any:
        return sample

    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


def plain(sample: Any) -> dict[str, Any]:
    """The key, the texts, and the size and a sum of the image of a sample."""
    own = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    result = {name: own[name] for name in FIELDS if name in own}
    if (image := own.get("image")) is not None:
        result["image"] = [*image.size, sum(image.convert("RGB").tobytes())]
    return {"key": sample.__key__, **result}


def main() -> None:
    """Prepare a folder, or read what a path names."""
    what, path, *rest = sys.argv[1:]
    if what == "prepare":
        patterns = [tuple(word.split("=", 1)) for word in rest]
        shards = sorted(file.name for file in Path(path).glob("*.tar"))
        WebdatasetPreparator.prepare_dataset(path, shards, split_parts_patterns=patterns, workers=1)
        return
    if path.endswith(".yaml"):
        load_dataset(EPath(path)).prepare(split_part=rest[0])
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    data = get_val_dataset(path, split_part=rest[0], worker_config=config, batch_size=1, task_encoder=Encoder())
    for batch in get_loader(data):
        for sample in batch:
            print("sample " + json.dumps(plain(sample)))


if __name__ == "__main__":
    main()
