"""Whole samples of BERT, T5 and GPT, and of blends of them, against those that megatron-core itself made of the same files.

`tests/peers/samples.py` writes the file that is read here, with megatron-core on the path and nothing of ours.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.settings.run import RequestedRun
from megatron.core.datasets.blend import build_split_datasets
from megatron.core.datasets.kinds import KINDS
from tests.helpers.sentences import LetterTokenizer, write

PEER = Path(__file__).parents[2] / "peers" / "samples.json.gz"
SENTINELS, GPT_EOD = 8, 7


def recorded() -> dict:
    return json.loads(gzip.decompress(Path(os.environ.get("PEER_SAMPLES", PEER)).read_bytes()))


class PlainTokenizer(LetterTokenizer):
    """A GPT's: an end of document, and no padding."""

    pad = None
    eod, special_ids = GPT_EOD, (GPT_EOD,)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder, content = tmp_path_factory.mktemp("samples"), recorded()
    for name, documents in content["texts"].items():
        write(folder / name, documents)
    return folder, content


def named(case: dict) -> str:
    return "-".join(str(value).replace(" ", "") for name, value in case.items() if name not in ("samples", "lengths"))


@pytest.mark.parametrize("number", range(len(recorded()["cases"])), ids=[named(case) for case in recorded()["cases"]])
def test_samples_are_those_of_megatron_core(texts: tuple[Path, dict], number: int) -> None:
    folder, content = texts
    case = dict(content["cases"][number])
    samples, lengths, kind = case.pop("samples"), case.pop("lengths"), case.pop("kind")
    words = [str(folder / word) if word in content["texts"] else word for word in case.pop("data_path")]
    run = config_from_flat_dict(RequestedRun, {**case, "architecture": kind, "data_path": tuple(words)}).resolve(1)
    tokenizer = {"bert": LetterTokenizer(), "t5": LetterTokenizer(extra=SENTINELS), "gpt": PlainTokenizer()}[kind]
    splits = build_split_datasets(run.data, KINDS[kind](run, tokenizer), tuple(content["sizes"]))
    assert [None if split is None else len(split) for split in splits] == lengths
    different = []
    for split, peers in zip(splits, samples):
        for place, peer in enumerate(peers):
            different += [(place, name) for name in differing(split[place], peer)]
    assert not different, f"{len(different)} fields differ in {sum(map(len, samples))} samples: {different[:10]}"


def differing(sample: dict[str, np.ndarray], peer: dict) -> list[str]:
    """The fields that are not the same in both; of labels, those that count: where no loss is, Megatron's are -1 and ours 0."""
    peer = dict(peer)
    seen = peer.pop("attention_mask", None)
    used = np.asarray(peer["loss_mask"]) == 1
    result = [name for name, value in peer.items() if name != "labels" and not np.array_equal(sample[name], value)]
    result += ["labels"] * (not np.array_equal(sample["labels"][used], np.asarray(peer["labels"])[used]))
    if seen is not None:
        documents = sample.get("document_ids", np.zeros(len(used), np.int64))
        mine = np.tril(documents[:, None] == documents[None, :])
        result += ["attention_mask"] * (["".join("01"[int(one)] for one in row) for row in mine] != seen)
    return result
