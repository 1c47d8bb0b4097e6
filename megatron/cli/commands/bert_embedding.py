"""Write a vector for each text, as rows of a .npy file in their order, by a BERT of any layout and format.

    megatron bert-embedding --load runs/bert_small/checkpoints --input corpus.jsonl --output corpus.npy

    lines -> ids -> batches of about equal length -> hidden states [s, b, h] -> one vector a text [h] -> rows on disk

The input is read a piece at a time and rows are written as they come, so memory does not grow with either. The file
appears when it is complete. Blank lines are no texts; any other line that cannot be read ends the work, since rows would
no longer stand for lines.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megatron.cli.tool_parser import ToolArgumentParser, add_checkpoint_options, add_dtype, exit_on
from megatron.core.config.flags.declare import ConfigError, add_config_arguments, flag_fields
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets.ingest.input_spans import InputPosition
from megatron.core.datasets.ingest.inputs import (
    find_input_files,
    read_input_chunks,
    record_location,
    spans_of_corpus_shard,
)
from megatron.core.datasets.ingest.records import BLANK, parse_records
from megatron.core.datasets.special_tokens import encode_without_special_tokens
from megatron.core.datasets.storage import DataError, open_for_writing
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.models.bert import BERTModel
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.checkpoint.inference_model import ModelKind, load_network
from megatron.training.launch.launch_info import install_interrupt_excepthook

POOLINGS = ("mean", "first", "pooled")


@dataclass(frozen=True, slots=True)
class BertTextEmbedder:
    """Computes a vector for each text by a BERT.
    pooling: mean of the hidden states of all tokens, [CLS] and [SEP] included; first: that of [CLS]; pooled: the
    pooler's output. normalize: to length 1. length: most tokens of a text; batch_tokens: of a batch, padding included.
    """

    network: BERTModel
    tokenizer: Tokenizer
    length: int
    pooling: str = "mean"
    normalize: bool = False
    batch_tokens: int = 8192

    @property
    def vector_size(self) -> int:
        """Size of a vector, h."""
        return self.network.build.model.hidden_size

    def tokenize(self, texts: Sequence[str]) -> tuple[list[np.ndarray], list[int]]:
        """Return (the ids of each text with [CLS] and [SEP], indices of the texts that were truncated)."""
        rows: list[np.ndarray] = []
        cut: list[int] = []
        cls, sep = self.tokenizer.cls, self.tokenizer.sep
        assert cls is not None and sep is not None, "a tokenizer without [CLS] and [SEP] is refused"
        for number, ids in enumerate(encode_without_special_tokens(self.tokenizer, texts)):
            if len(ids) + 2 > self.length:
                cut.append(number)
                ids = ids[: self.length - 2]
            rows.append(np.concatenate(([cls], ids, [sep])).astype(np.int64))
        return rows, cut

    def embed(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the vectors of these rows of ids, float32 [len(rows), h]."""
        vectors = np.empty((len(rows), self.vector_size), np.float32)
        for batch in self._batches_by_length([len(row) for row in rows]):
            vectors[batch] = self._embed_batch([rows[number] for number in batch]).float().cpu().numpy()
        return vectors

    def _batches_by_length(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield indices of rows that are computed together, the longest first."""
        batch: list[int] = []
        for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
            if batch and (len(batch) + 1) * lengths[batch[0]] > self.batch_tokens:
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    @torch.no_grad()
    def _embed_batch(self, rows: Sequence[np.ndarray]) -> Tensor:
        """Return the vectors of a batch, [b, h]; means are computed in fp32 or better."""
        ids = np.full((len(rows), len(rows[0])), self.tokenizer.pad, np.int64)
        for row, line in zip(ids, rows):
            row[: len(line)] = line
        device = self.network.build.mesh.device
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        hidden = self.network.encode(padding=None if bool(mask.all()) else mask, ids=torch.from_numpy(ids).to(device))
        if self.pooling == "mean":
            wide = hidden if hidden.dtype == torch.float64 else hidden.float()
            means = (wide * mask.t()[:, :, None]).sum(dim=0) / lengths[:, None]
        else:
            means = hidden[0]
            if self.pooling == "pooled":
                assert self.network.pooler is not None, "a BERT without a pooler is refused"
                means = self.network.pooler(hidden)
        return torch.nn.functional.normalize(means, dim=-1) if self.normalize else means


class NpyWriter:
    """Writes a float32 .npy file a few rows at a time; the file appears when the block ends without an error."""

    def __init__(self, path: str, width: int) -> None:
        self.path, self.width, self.count = Path(path), width, 0
        self._made = self.path.with_name(self.path.name + ".tmp")
        self._file: BinaryIO

    def __enter__(self) -> NpyWriter:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_for_writing(self._made)
        except OSError as error:
            raise ConfigError(f"--output {self.path} cannot be written: {error.strerror}") from None
        self._write_header()
        return self

    def add(self, rows: np.ndarray) -> None:
        """Write float32 [n, width]."""
        self._file.write(np.ascontiguousarray(rows, "<f4").tobytes())
        self.count += len(rows)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file as file:
                if kind is None:
                    file.seek(0)
                    self._write_header()
            if kind is None:
                self._made.replace(self.path)
        finally:
            self._made.unlink(missing_ok=True)

    def _write_header(self) -> None:
        """Write the header, whose size is the same for any number of rows."""
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self.count, self.width)}
        np.lib.format.write_array_header_1_0(self._file, shape)


def read_text_batches(words: Sequence[str], key: str, bar: tqdm) -> Iterator[list[str]]:
    """Yield the texts of all inputs in batches, advancing the bar. `DataError` names the first lines it cannot read."""
    spans = spans_of_corpus_shard(find_input_files(words, "auto", "line"), None)
    behind = [sum(span.source.size for span in spans[:number]) for number in range(len(spans))]
    for chunk in read_input_chunks(spans, [key], InputPosition()):
        span = spans[chunk.start.span]
        records = parse_records(chunk, [key])
        bad = [
            f"{record_location(span, number)}: {reason}"
            for reason, drop in records.drops.items()
            if reason != BLANK
            for number in drop.records
        ]
        if bad:
            raise DataError(
                "\n  ".join(["lines that are no texts; rows of the output would not stand for lines", *bad])
            )
        bar.update(behind[chunk.start.span] + chunk.consumed - bar.n)
        yield [text for (text,) in records.texts[0]]


def write_embeddings(
    embedder: BertTextEmbedder, words: Sequence[str], *, key: str, output: str, refuse_long: bool
) -> tuple[int, int]:
    """Write the vectors of all texts of the inputs. Return (number of texts, number of those that were truncated).
    `DataError` for unreadable texts, and with `refuse_long` for long ones.
    """
    lost, size = 0, sum(source.size for source in find_input_files(words, "auto", "line"))
    with (
        NpyWriter(output, embedder.vector_size) as rows,
        tqdm(total=size, unit="B", unit_scale=True, desc="embeddings", disable=None) as bar,
    ):
        for texts in read_text_batches(words, key, bar):
            try:
                tokenized, cut = embedder.tokenize(texts)
            except ValueError as error:
                raise DataError(
                    f"the tokenizer cannot read one of the texts {rows.count + 1} to {rows.count + len(texts)}: {error}"
                ) from error
            if cut and refuse_long:
                raise DataError(
                    f"text {rows.count + cut[0] + 1} is longer than {embedder.length} tokens; give --long-texts cut, or a "
                    "larger --seq-length if the network has more positions"
                )
            lost += len(cut)
            rows.add(embedder.embed(tokenized))
        if not rows.count:
            raise DataError(f"{' '.join(words)}: there is no text")
    return rows.count, lost


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ToolArgumentParser(description=__doc__)
    what = add_checkpoint_options(parser, "what")
    what.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines, plain text (.txt, a text a line), both also .gz or .zst, .parquet or .arrow; - is standard input",
    )
    what.add_argument("--json-key", default="text", metavar="KEY", help="key, or column, of the text (default: text)")
    what.add_argument("--output", required=True, metavar="FILE", help="the .npy file, float32 [texts, hidden size]")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--pooling",
        choices=POOLINGS,
        default="mean",
        help="mean of all tokens, the first token, or the pooler's (default: mean)",
    )
    how.add_argument("--normalize", action="store_true", help="make every vector as long as 1")
    how.add_argument(
        "--seq-length", type=int, metavar="N", help="most tokens of a text (default: all positions of the network)"
    )
    how.add_argument(
        "--long-texts", choices=("cut", "refuse"), default="cut", help="what becomes of longer texts (default: cut)"
    )
    how.add_argument(
        "--batch-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens in one batch, padding included (default: 8192)",
    )
    add_dtype(how)
    add_config_arguments(parser, TokenizerConfig)
    return parser.parse_args(argv)


def load_embedder(given: argparse.Namespace) -> BertTextEmbedder:
    """Load the embedder that the command line describes; `ConfigError` and `CheckpointError` if it cannot be."""
    parts = ("model.embedding.", "model.encoder.", *(("model.pooler.",) if given.pooling == "pooled" else ()))
    tokenizer = {
        field.name: getattr(given, field.name)
        for field, _ in flag_fields(TokenizerConfig)
        if getattr(given, field.name) != field.default
    }
    loaded = load_network(
        given.load, ModelKind("bert", BERTModel, parts), step=given.ckpt_step, dtype=given.dtype, tokenizer=tokenizer
    )
    (network,), model = loaded.stages, loaded.config.model
    if given.pooling == "pooled" and network.pooler is None:
        raise ConfigError(f"{loaded.source.where} has no pooler; choose --pooling mean or first")
    if None in (loaded.tokenizer.cls, loaded.tokenizer.sep, loaded.tokenizer.pad):
        raise ConfigError(
            "a BERT needs a tokenizer with [CLS], [SEP] and [PAD], as --tokenizer-type BertWordPieceLowerCase has them"
        )
    length = given.seq_length or model.max_position_embeddings
    learned = model.rope.position_embedding_type == "learned_absolute"
    if length < 3 or learned and length > model.max_position_embeddings:
        raise ConfigError(
            f"--seq-length {length} is not between 3 and the network's {model.max_position_embeddings} positions"
        )
    if given.batch_tokens < 1:
        raise ConfigError(f"--batch-tokens {given.batch_tokens} is less than 1")
    return BertTextEmbedder(network, loaded.tokenizer, length, given.pooling, given.normalize, given.batch_tokens)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the embeddings, and print how many."""
    install_interrupt_excepthook()
    given, began = parse_arguments(argv), time.perf_counter()
    logging.basicConfig(level=logging.WARNING)
    with exit_on(ConfigError, CheckpointError, DataError, OSError):
        embedder = load_embedder(given)
        count, lost = write_embeddings(
            embedder, given.input, key=given.json_key, output=given.output, refuse_long=given.long_texts == "refuse"
        )
    seconds = time.perf_counter() - began
    sys.stdout.write(
        f"{given.output}: {count} texts x {embedder.vector_size} ({given.pooling}) in {seconds:.1f} s; {lost} lost what is behind "
        f"{embedder.length} tokens\n"
    )
