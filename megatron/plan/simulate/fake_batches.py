"""Microbatches of a dry run: the shapes of the run's, filled with ones.

Under --hybrid-context-parallel, shapes follow from the lengths of documents, which a dry run does not know. It makes them up: a microbatch
with one document per row, the next with two, then four, until a document fits on one rank; then it starts again. So groups of
all sizes have work, and every rank gets the largest share possible.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.settings.run import RunConfig
from megatron.core.context_parallel.sequence_assignment import context_ranks_needed
from megatron.training.data.rebalance import RebalancedBatches, assign_documents_to_ranks
from megatron.training.data.sample_order import stages_read_data
from megatron.training.state.batch import Batch
from megatron.training.state.trainer import Trainer

_TEXT = ("tokens", "labels", "loss_mask", "positions", "documents", "images")


def fake_batches(trainer: Trainer) -> Iterator[Batch]:
    """Yield microbatches as a rank of this run reads them."""
    rows = _fake_microbatches(trainer)
    hybrid = trainer.run.config.parallel.hybrid_context_parallel
    return RebalancedBatches(rows, trainer.run.mesh, trainer.run.config) if hybrid else rows


def rank_shares_of_fake_documents(
    config: RunConfig, num_microbatches: int, ranks: int
) -> list[list[tuple[int, int, int]]]:
    """Return for each data-parallel rank, in order: (number of ranks it shares documents with, its index among them, length of these documents).

    num_microbatches: of a rank, before documents are divided.
    """
    lengths = [
        length
        for number in range(num_microbatches * ranks)
        for _ in range(config.train.micro_batch_size)
        for length in made_up_document_lengths(config, number)
    ]
    shares = assign_documents_to_ranks(lengths, config, ranks).shares
    return [
        [
            (share.size, place - share.first, sum(lengths[number] for number in share.sequences))
            for share in shares
            if share.includes_rank(place)
        ]
        for place in range(ranks)
    ]


def made_up_document_lengths(config: RunConfig, number: int) -> Sequence[int]:
    """Return the made-up lengths of the documents in each row of a microbatch."""
    length, size = config.train.seq_length, _fixed_document_length(config, number)
    return [min(size, length - start) for start in range(0, length, size)]


def _fixed_document_length(config: RunConfig, number: int) -> int:
    """Return the length of a microbatch's documents, except the last one of a row."""
    length, limit = config.train.seq_length, config.parallel.max_seqlen_per_dp_cp_rank
    assert limit is not None, "--hybrid-context-parallel asks for --max-seqlen-per-dp-cp-rank"
    sizes = context_ranks_needed(length, limit).bit_length()
    return -(-length // 2 ** (number % sizes))


def _fake_microbatches(trainer: Trainer) -> Generator[Batch]:
    """Yield microbatches of ones, before documents are regrouped."""
    run, train = trainer.run, trainer.run.config.train
    reads = stages_read_data(run.config, trainer.specs)
    for number in count():
        if not reads:
            yield Batch()
            continue
        batch = Batch.from_arrays(
            _fake_sample(run.config, train.micro_batch_size),
            run.mesh.device,
            positions=run.config.data.restarts_positions,
        )
        text: dict[str, Any] = {
            name: value if (value := getattr(batch, name)) is None else _ones_like(value) for name in _TEXT
        }
        batch = replace(batch, **text, extras={name: _ones_like(value) for name, value in batch.extras.items()})
        if run.config.parallel.hybrid_context_parallel:
            document = torch.arange(train.seq_length, device=run.mesh.device) // _fixed_document_length(
                run.config, number
            )
            batch = replace(batch, documents=document.repeat(train.micro_batch_size, 1))
        yield batch.with_future_tokens(
            run.config.model.mtp.mtp_num_layers or 0, per_token=run.config.train.calculate_per_token_loss
        ).shard_over_context(run.mesh.cp)


def _ones_like(tensor: Tensor) -> Tensor:
    """Return a new tensor with the shape, dtype and device of this one."""
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _fake_image_arrays(config: RunConfig, rows: int) -> dict[str, np.ndarray]:
    """Return fake images of so many samples, as many tiles as one image has at most in each of them, and their slots."""
    data, length = config.data.multimodal, config.train.seq_length
    tiles = data.max_num_tiles + (data.use_thumbnail and data.max_num_tiles > 1) if data.use_tiling else 1
    return {"images": _blank_pixels(config, rows * tiles), "image_slots": np.ones((rows, length), np.int64)}


def _blank_pixels(config: RunConfig, number: int) -> np.ndarray:
    """Return `number` images of ones, [number, channels, height, width]."""
    vision = config.model.vision
    return np.ones((number, vision.num_channels, vision.img_h, vision.img_w), np.float32)


def _fake_sample(config: RunConfig, rows: int) -> dict[str, np.ndarray]:
    """Return what a dataset of this kind gives for so many samples."""
    length, short = config.train.seq_length, config.train.decoder_seq_length
    sample = {name: np.ones((rows, length), np.int64) for name in ("tokens", "labels", "position_ids")}
    if config.model.architecture.is_decoder_only:
        sample["loss_mask"] = np.ones((rows, length), np.float32)
        if config.data.separates_documents:
            sample["document_ids"] = np.ones((rows, length), np.int64)
        return {**sample, **_fake_image_arrays(config, rows)} if config.model.has_vision else sample
    if config.model.architecture.classifies_images:
        sample["loss_mask"] = np.ones((rows, length), np.float32)
        return {**sample, "images": _blank_pixels(config, rows)}
    if config.model.architecture.predicts_masked_words:
        return {
            **{name: sample["tokens"] for name in ("text", "types", "labels", "loss_mask", "padding_mask")},
            **{name: np.ones(rows, np.int64) for name in ("is_random", "truncated")},
        }
    decoder = np.ones((rows, short), np.int64)
    return {
        "text_enc": sample["tokens"],
        "enc_mask": sample["tokens"],
        "truncated": np.ones(rows, np.int64),
        **{name: decoder for name in ("text_dec", "labels", "loss_mask", "dec_mask")},
    }
