"""Write texts and their images as a multimodal .bin/.idx pair, with a mode byte for each text and image.

    python tools/preprocess_mmdata.py --input captions.jsonl --input-image images --pad-length 64 --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt --output-prefix pairs

A line of the input has a "text", and may have an "image", a path in the folder; without it the images are taken in the order of their
names. `pretrain_vlm.py --data-path pairs` reads the pair.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from megatron.cli.tool_parser import ToolArgumentParser, exit_on
from megatron.core.config.flags.declare import ConfigError, add_config_arguments, config_from_namespace
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.datasets.multimodal_bin_idx import IMAGE, TEXT, image_bytes_to_int32
from megatron.core.datasets.storage import DataError
from megatron.core.tokenizers.base import Tokenizer, tokenizer_fingerprint_fields
from megatron.core.tokenizers.build import build_tokenizer
from megatron.training.launch.launch_info import install_interrupt_excepthook

_AT_ONCE = 256


def read_text_image_pairs(path: str, folder: str) -> Iterator[tuple[str, Path]]:
    """Yield (text, path of its image) of each line. `DataError` if one lacks a text, or their numbers differ."""
    names = iter(sorted(os.listdir(folder)))
    number = 0
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                text, name = row["text"], row.get("image")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{path}, line {number} is no JSON object with a text: {error}") from None
            name = next(names, None) if name is None else name
            if not isinstance(text, str) or not isinstance(name, str):
                raise DataError(f"{path}, line {number} has no text, or {folder} no image for it")
            yield text, Path(folder) / name
    left = sum(1 for _ in names)
    if 0 < left < number:
        raise DataError(f"{folder} has {left} images more than {path} has lines without one; which belong together?")


def write_multimodal_pair(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """Write the .bin/.idx pair; return the number of documents."""

    def tokenize_and_fill_with_eod(text: str) -> np.ndarray:
        result = tokenizer.tokenize(text)
        if result and args.append_eod:
            result = result[: args.pad_length] + [tokenizer.eod] * (args.pad_length - len(result))
        return np.array(result, np.int32)

    rows = read_text_image_pairs(args.input, args.input_image)
    with (
        IndexedDatasetBuilder(
            args.output_prefix, np.int32, tokenizer=tokenizer_fingerprint_fields(tokenizer), multimodal=True
        ) as builder,
        ThreadPoolExecutor(args.workers) as pool,
    ):
        while batch := list(islice(rows, _AT_ONCE)):
            for (text, _), image in zip(batch, pool.map(lambda row: row[1].read_bytes(), batch), strict=True):
                builder.add_sequence(tokenize_and_fill_with_eod(text), TEXT)
                builder.add_sequence(image_bytes_to_int32(image), IMAGE)
                builder.end_document()
        return builder.num_documents


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pair, and print the number of documents."""
    install_interrupt_excepthook()
    made = ToolArgumentParser(description=__doc__)
    made.add_argument("--input", required=True, metavar="FILE", help='JSON lines, each with a "text"')
    made.add_argument("--input-image", required=True, metavar="FOLDER", help="folder of the images")
    made.add_argument("--pad-length", type=int, required=True, metavar="IDS", help="--append-eod: ids of every text")
    made.add_argument(
        "--append-eod",
        action="store_true",
        help="fill texts up to --pad-length with the end-of-document id, and cut longer ones; left out: texts as they are",
    )
    made.add_argument("--output-prefix", required=True, metavar="PREFIX", help="the pair, without its endings")
    made.add_argument("--workers", type=int, default=1, metavar="THREADS", help="threads that read images (default: 1)")
    add_config_arguments(made, TokenizerConfig)
    args = made.parse_args(arguments)
    if min(args.pad_length, args.workers) < 1:
        made.error("--pad-length and --workers are 1 or more")
    with exit_on(ConfigError, DataError, OSError):
        count = write_multimodal_pair(args, build_tokenizer(config_from_namespace(TokenizerConfig, args)))
    print(f"{args.output_prefix}: {count} documents of a text and an image")
