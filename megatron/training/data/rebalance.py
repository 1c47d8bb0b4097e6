"""Sequences of one global batch, cut over as many ranks as their length deserves (`--hybrid-context-parallel`).

Every data-parallel rank reads the whole global batch, takes its rows apart into documents, and divides these by the same plan
(`context_parallel/sequence_assignment.py`). What is left for a rank is a number of microbatches of its own: some with documents that it
has for itself, some with its piece of those that it shares with its neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.settings.run import RunConfig
from megatron.core.context_parallel.sequence_assignment import (
    RankBlockAssignment,
    SequenceAssignment,
    assign_sequences_to_ranks,
)
from megatron.core.kernels.ops.packed_document_starts import memoize_packed_document_starts
from megatron.core.parallel.mesh import Mesh
from megatron.training.state.batch import Batch, require_next_batch

Document = dict[str, Tensor]  # name -> [length]


@dataclass(slots=True)
class RebalancedBatches:
    """Iterator of this rank's microbatches, regrouped by document so that context-parallel groups fit sequence lengths.
    rows: the microbatches of all ranks, in order. plan: the assignment of the last global batch.
    """

    rows: Iterator[Batch]
    mesh: Mesh
    config: RunConfig
    plan: SequenceAssignment | None = None
    _waiting: deque[Batch] = field(default_factory=deque)

    def __iter__(self) -> RebalancedBatches:
        return self

    def __next__(self) -> Batch:
        assert self._waiting, "a global batch begins with prepare_step"
        return self._waiting.popleft()

    def batch_metrics(self) -> dict[str, tuple[float, float]]:
        """Return the balance of the last global batch's assignment, as a metric."""
        return {} if self.plan is None else {"context balance": (self.plan.balance, 1.0)}

    def close(self) -> None:
        """Close the generator of rows."""
        if isinstance(self.rows, Generator):
            self.rows.close()

    def prepare_step(self, num_microbatches: int) -> int:
        """Regroup the next global batch; return this rank's number of microbatches. num_microbatches: before it."""
        axis = self.mesh.dp
        rows = (require_next_batch(self.rows) for _ in range(num_microbatches * axis.size))
        documents = [document for batch in rows for document in documents_with_loss(batch)]
        self.plan = assign_documents_to_ranks(
            [len(document["tokens"]) for document in documents], self.config, axis.size
        )
        self._waiting = deque(
            self._pack_documents(share, documents) for share in self.plan.shares if share.includes_rank(axis.rank)
        )
        if not self._waiting:  # a rank with nothing to do takes part in the sums with nothing
            self._waiting.append(self._empty_batch())
        return len(self._waiting)

    def _pack_documents(self, share: RankBlockAssignment, documents: Sequence[Document]) -> Batch:
        """Pack a share's documents into one row, padded so that its ranks can shard it; return this rank's part."""
        local, tp = [documents[number] for number in share.sequences], self.mesh.tp.size
        unit = lcm(2 * share.size, share.size * tp) if self.config.parallel.sequence_parallel else 2 * share.size
        length = sum(len(document["tokens"]) for document in local)
        fill = -length % unit
        rows = {name: F.pad(torch.cat([document[name] for document in local]), (0, fill))[None] for name in local[0]}
        numbers = [torch.full_like(document["tokens"], number) for number, document in enumerate(local)]
        rows["documents"] = F.pad(torch.cat(numbers), (0, fill), value=len(local))[None]
        lengths = [*map(len, numbers), fill]
        memoize_packed_document_starts(rows["documents"], np.repeat(np.arange(len(lengths)), lengths)[None])
        return _batch_from_tensors(rows).shard_over_context(self.mesh.context_axis_of_size(share.size))

    def _empty_batch(self) -> Batch:
        length = lcm(2, self.mesh.tp.size)
        ids = torch.zeros((1, length), dtype=torch.int64, device=self.mesh.device)
        names = ["tokens", "labels", "positions", "documents", "loss_mask"]
        for depth in range(1, (self.config.model.mtp.mtp_num_layers or 0) + 1):
            names += [f"mtp_{depth}_{name}" for name in ("tokens", "labels", "loss_mask", "weights")]
        return _batch_from_tensors(dict.fromkeys(names, ids))


def assign_documents_to_ranks(lengths: Sequence[int], config: RunConfig, ranks: int) -> SequenceAssignment:
    """Assign documents of these lengths to groups of ranks for hybrid context parallelism."""
    limit = config.parallel.max_seqlen_per_dp_cp_rank
    assert limit is not None, "--hybrid-context-parallel asks for --max-seqlen-per-dp-cp-rank"
    return assign_sequences_to_ranks(lengths, ranks=ranks, limit=limit, linear=12.0 * config.model.hidden_size)


def documents_with_loss(batch: Batch) -> Iterator[Document]:
    """Yield the documents of all rows, name -> [length], except those without any loss."""
    tokens, apart = batch.tokens, batch.documents
    labels, loss_mask = batch.labels, batch.loss_mask
    assert tokens is not None and apart is not None, "documents are apart, which the rules ask for"
    assert labels is not None and loss_mask is not None, "every rank reads all of a batch that is divided"
    positions = batch.positions
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    rows = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "positions": positions}
    rows |= {name: row for name, row in batch.extras.items() if name.startswith("mtp_")}
    for index in range(len(tokens)):
        _, lengths = torch.unique_consecutive(apart[index], return_counts=True)
        for parts in zip(*(row[index].split(lengths.tolist()) for row in rows.values()), strict=True):
            document = dict(zip(rows, parts, strict=True))
            if document["loss_mask"].any():
                yield document


def _batch_from_tensors(rows: dict[str, Tensor]) -> Batch:
    fields: dict[str, Any] = {name: rows[name] for name in ("tokens", "labels", "loss_mask", "positions", "documents")}
    return Batch(**fields, extras={name: row for name, row in rows.items() if name not in fields})
