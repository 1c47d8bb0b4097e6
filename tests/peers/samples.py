"""Writes samples.json.gz: what megatron-core's own data sets make of some documents, to be compared with ours.

    cd ELSEWHERE && PYTHONPATH=FOLDER_OF_MEGATRON_CORE python .../tests/peers/samples.py .../tests/peers/samples.json.gz [MOST]

Run it with megatron-core on the path, and not in a checkout of this repository, which owns the same import name; so it
imports nothing of ours. MOST: how many samples of a split are kept (default: 4). To compare every sample, write another
file and name it to the test: PEER_SAMPLES=FILE pytest tests/unit/datasets/test_megatron_samples.py
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np

VOCAB_SIZE, SENTINELS = 100, 8
PAD, CLS, SEP, MASK, BOS, EOS = range(6)
GPT_EOD = 7


class Letters:
    """The same tokenizer as `tests/helpers/sentences.py` has: every fourth id continues a word."""

    pad, cls, sep, mask, bos, eos, eod = PAD, CLS, SEP, MASK, BOS, EOS, EOS
    vocab_size = VOCAB_SIZE
    unique_identifiers = OrderedDict({"class": "letters"})

    def __init__(self, sentinels: int) -> None:
        self.additional_special_tokens_ids = list(range(VOCAB_SIZE - sentinels, VOCAB_SIZE))
        self.inv_vocab = {
            token: f"##{token}" if EOS < token < VOCAB_SIZE - sentinels and token % 4 == 0 else f"w{token}"
            for token in range(VOCAB_SIZE)
        }


class Plain:
    """A GPT's tokenizer: an end of document and no padding."""

    eod, eos, vocab_size = GPT_EOD, GPT_EOD, VOCAB_SIZE
    unique_identifiers = OrderedDict({"class": "plain"})


def documents(count: int, *, seed: int, longest: int, eod: int | None = None) -> list[list[list[int]]]:
    """Documents of 0 to 8 random sentences, or of one that ends on `eod`; most ids are plain text."""
    random = np.random.RandomState(seed)
    if eod is not None:
        return [[[*random.randint(8, VOCAB_SIZE, random.randint(0, longest)).tolist(), eod]] for _ in range(count)]
    return [
        [
            random.randint(6, VOCAB_SIZE - SENTINELS, random.randint(1, longest + 1)).tolist()
            for _ in range(random.randint(0, 9))
        ]
        for _ in range(count)
    ]


TEXTS = {
    "sentences": documents(60, seed=1, longest=12),
    "long": documents(20, seed=2, longest=40),
    "gpt": documents(60, seed=3, longest=20, eod=GPT_EOD),
    "gpt2": documents(25, seed=4, longest=9, eod=GPT_EOD),
}


def cases() -> list[dict]:
    """What is built: the kind of samples, the files, and the settings in the words of our flags."""
    bert = [
        {"kind": "bert", "data_path": ["sentences"], "split": "60,30,10", "seq_length": 32, "seed": 1, **changes}
        for changes in (
            {},
            {"seed": 1234},
            {"seq_length": 16},
            {"seq_length": 9, "short_seq_prob": 0.5},
            {"mask_prob": 0.4},
            {"bert_binary_head": False},
            {"data_path": ["long"]},
            {"data_path": ["long"], "bert_binary_head": False, "seq_length": 12},
            {"data_path": ["0.7", "sentences", "0.3", "long"]},
        )
    ]
    t5 = [
        {
            "kind": "t5",
            "data_path": ["sentences"],
            "split": "60,30,10",
            "seq_length": 48,
            "decoder_seq_length": 48,
            "seed": 1,
            **changes,
        }
        for changes in ({}, {"seed": 77, "short_seq_prob": 0.5}, {"data_path": ["long"]}, {"decoder_seq_length": 32})
    ]
    gpt = [
        {"kind": "gpt", "data_path": ["gpt"], "split": "80,15,5", "seq_length": 16, "seed": 1, **changes}
        for changes in (
            {},
            {"reset_position_ids": True},
            {"reset_attention_mask": True},
            {"eod_mask_loss": True, "reset_position_ids": True, "seed": 5},
            {"seq_length": 1},
            {"data_path": ["0.6", "gpt", "0.4", "gpt2"]},
            {"data_path": ["gpt", "gpt2"], "split": "50,30,20", "seq_length": 8},
            {"split": "1,1,1", "seq_length": 5},
        )
    ]
    return bert + t5 + gpt


SIZES = [40, 12, 3]


def blend(folder: Path, words: list[str]) -> tuple[list[str], list[float] | None]:
    """Megatron's reading of --data-path: prefixes, or weights and prefixes in turn."""
    if len(words) == 1 or words[0] in TEXTS:
        return [str(folder / word) for word in words], None
    return [str(folder / word) for word in words[1::2]], [float(word) for word in words[::2]]


def build(folder: Path, case: dict) -> list:
    """The three splits of a case, by megatron-core."""
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

    shared = dict(
        random_seed=case["seed"],
        sequence_length=case["seq_length"],
        blend=blend(folder, case["data_path"]),
        split=case["split"],
        path_to_cache=str(folder / "cache"),
    )
    masking = dict(
        masking_probability=case.get("mask_prob", 0.15),
        short_sequence_probability=case.get("short_seq_prob", 0.1),
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
    )
    if case["kind"] == "bert":
        config = BERTMaskedWordPieceDatasetConfig(
            **shared,
            **masking,
            tokenizer=Letters(0),
            masking_max_ngram=3,
            masking_use_geometric_distribution=False,
            classification_head=case.get("bert_binary_head", True),
        )
        kind = BERTMaskedWordPieceDataset
    elif case["kind"] == "t5":
        config = T5MaskedWordPieceDatasetConfig(
            **shared,
            **masking,
            tokenizer=Letters(SENTINELS),
            masking_max_ngram=10,
            masking_use_geometric_distribution=True,
            sequence_length_decoder=case["decoder_seq_length"],
        )
        kind = T5MaskedWordPieceDataset
    else:
        config = GPTDatasetConfig(
            **shared,
            tokenizer=Plain(),
            create_attention_mask=True,
            **{name: case.get(name, False) for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")},
        )
        kind = GPTDataset
    return BlendedMegatronDatasetBuilder(kind, SIZES, lambda: True, config).build()


def plain(sample: dict) -> dict:
    """A sample as JSON; a mask of attention as a string of digits a row, 1 where a token is seen."""
    result = {}
    for name, value in sample.items():
        if name == "attention_mask":
            result[name] = ["".join("01"[not hidden] for hidden in row) for row in value[0].tolist()]
        else:
            result[name] = np.asarray(value).tolist()
    return result


def main(target: str, most: int) -> None:
    """Write the file."""
    import torch

    import megatron.core
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo")
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for text, content in TEXTS.items():
            builder = IndexedDatasetBuilder(f"{folder / text}.bin", dtype=np.uint16)
            for document in content:
                for sentence in document:
                    builder.add_item(torch.tensor(sentence))
                builder.end_document()
            builder.finalize(f"{folder / text}.idx")
        for case in cases():
            splits = build(folder, case)
            found.append(
                {
                    **case,
                    "lengths": [None if split is None else len(split) for split in splits],
                    "samples": [
                        [plain(split[number]) for number in range(min(most, len(split)))]
                        for split in splits
                        if split is not None
                    ],
                }
            )
    content = {"megatron_core": megatron.core.__version__, "sizes": SIZES, "texts": TEXTS, "cases": found}
    Path(target).write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4)
