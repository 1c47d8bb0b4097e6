"""Energon's data under another number of ranks and workers: a run goes on exactly where it was, which Energon's loader refuses."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.blend import build_split_datasets
from megatron.core.datasets.multimodal import make_image_chat_dataset_kind
from megatron.training.loader import iterate_split_microbatches
from tests.unit.datasets.test_energon import blend, captions, folder
from tests.unit.datasets.test_multimodal import SETTINGS, TOKENIZER
from tests.unit.training.test_loader import run_of

SAMPLES, GLOBAL, MICRO = 24, 8, 2
Content = tuple[bytes, ...]


def data_of(path: Path) -> dict[str, Any]:
    """Settings of a blend of two folders of several tars."""
    for name in "ab":
        made = captions(*(f"{name}{number} " * (number % 3 + 1) for number in range(30)))
        folder(path / name, [made[:11], made[11:]])
    nodes = [{"path": "a", "weight": 2}, {"path": "b", "weight": 1}]
    sizes = {"micro_batch_size": MICRO, "global_batch_size": GLOBAL, "seq_length": 24, "max_position_embeddings": 24}
    return {**SETTINGS, **sizes, "data_path": (blend(path / "blend.yaml", train={"blend": nodes}),), "split": None}


def read(settings: dict[str, Any], *, ranks: int, workers: int, consumed: int, stop: int) -> list[list[Content]]:
    """The samples (pixels, tokens, labels and mask of each) of every global batch from one place to another."""
    steps: list[list[Content]] = [[] for _ in range((stop - consumed) // GLOBAL)]
    for rank in range(ranks):
        run = run_of(rank=rank, ranks=ranks, **settings, num_workers=workers)
        data, _, _ = build_split_datasets(
            run.config.data, make_image_chat_dataset_kind(run.config, TOKENIZER), (SAMPLES, 0, 0)
        )
        batches = iterate_split_microbatches(run, data, consumed_samples=consumed, reads=True)
        each = GLOBAL // (MICRO * ranks)
        for number, batch in enumerate(islice(batches, each * len(steps))):
            assert batch.images is not None
            for place in range(MICRO):
                slots = batch.extras["image_slots"][place]
                parts = [batch.images[(slots[slots >= 0] // 4).unique()]]
                for rows in (batch.tokens, batch.labels, batch.loss_mask):
                    assert rows is not None
                    parts.append(rows[place])
                steps[number // each].append(tuple(part.numpy().tobytes() for part in parts))
        batches.close()
    return [sorted(step) for step in steps]


@pytest.mark.parametrize("ranks, workers", [(2, 3), (4, 1), (1, 2)])
def test_a_run_on_energons_data_goes_on_exactly_under_other_ranks_and_workers(
    ranks: int, workers: int, tmp_path: Path
) -> None:
    settings = data_of(tmp_path)
    whole = read(settings, ranks=1, workers=0, consumed=0, stop=SAMPLES)
    assert len({content for step in whole for content in step}) > GLOBAL
    resumed = read(settings, ranks=ranks, workers=workers, consumed=GLOBAL, stop=SAMPLES)
    assert resumed == whole[1:] and resumed[0] != whole[0]
