"""Decoding steps (one token per sequence) as CUDA graphs: launching kernels one by one would take longer than the kernels.

    capture                      the forward pass of 8 rows of 512 keys over static tensors
    5 sequences of <= 512 keys   ids, positions and block tables are copied into those tensors, 3 rows are padding; replay

A graph is of one shape, rows x keys, both rounded up to powers of two. Padding rows read and write block 0, which belongs
to no sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import device as devices
from megatron.inference.cache import CacheGroup, KVCache, Span, StepCache, slots_of

_FEWEST_KEYS = 256  # of a recording
Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def unfit(stages: Sequence[GPTModel]) -> str:
    """Why the passes of these stages cannot be captured; "" if they can."""
    build = stages[0].build
    if build.mesh.device.type != "cuda":
        return "there is no GPU"
    if build.mesh.tp.size * build.mesh.pp.size * build.mesh.cp.size > 1:
        return "a copy of the network lies on several ranks"
    if build.model.moe.num_experts:
        return "how many tokens an expert takes is known only as it runs"
    return ""


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    """One shape. ids, positions, new: [1, rows], [1, rows], [rows]; slots, padding: [rows, keys]; logits: [rows, 1, v]."""

    ids: Tensor
    positions: Tensor
    new: Tensor
    slots: Tensor
    padding: Tensor
    repeat: Callable[[], None]
    logits: Tensor


class CapturedGraphs:
    """Recorded steps of one network that lies on this rank alone, at most `count` shapes of them: the one longest unused goes.

    record: runs what it is given, and returns what repeats it on the same tensors, and the tensor that it returns.
    """

    def __init__(
        self, stage: GPTModel, pool: KVCache, *, block_size: int, count: int, record: Recorder | None = None
    ) -> None:
        self._stage, self._pool, self._block_size, self._count = stage, pool, block_size, count
        self._record = record or devices.CudaGraphPool(pool.device).warm_up_and_capture
        self._kept: OrderedDict[tuple[int, int], _CapturedGraph] = OrderedDict()

    def logits(self, ids: Sequence[int], spans: Sequence[Span]) -> Tensor:
        """What follows the next token of each text, [texts, 1, v]; good until the next step. ids: those tokens."""
        slots, there = slots_of(spans, self._block_size)
        shape = _rounded(len(spans), 1), _rounded(slots.shape[1], _FEWEST_KEYS)
        # A row that fills up sees one key, the first block's: of no key, the softmax would be no number.
        table, seen = np.zeros(shape, np.int64), np.zeros(shape, bool)
        seen[:, -1] = True
        table[: len(spans), shape[1] - slots.shape[1] :], seen[: len(spans), shape[1] - slots.shape[1] :] = slots, there
        filling = [0] * (shape[0] - len(spans))
        given = [
            np.array([[*ids, *filling]]),
            np.array([[*(span.start for span in spans), *filling]]),
            table[:, -1],
            table,
            seen,
        ]
        inputs = [torch.from_numpy(values) for values in given]
        if shape not in self._kept:
            if len(self._kept) == self._count:
                self._kept.popitem(last=False)
            self._kept[shape] = self._recorded([tensor.to(self._pool.device) for tensor in inputs])
        self._kept.move_to_end(shape)
        graph = self._kept[shape]
        for tensor, values in zip(
            (graph.ids, graph.positions, graph.new, graph.slots, graph.padding), inputs, strict=True
        ):
            tensor.copy_(values)
        graph.repeat()
        return graph.logits[: len(spans)]

    def _recorded(self, inputs: Sequence[Tensor]) -> _CapturedGraph:
        ids, positions, new, slots, padding = inputs
        cache = StepCache(self._pool, [CacheGroup(0, 1, slots, padding)], new=new)
        repeat, logits = self._record(lambda: self._stage(ids=ids, positions=positions, cache=cache))
        return _CapturedGraph(ids, positions, new, slots, padding, repeat, logits)


def _rounded(number: int, least: int) -> int:
    """The next power of two from `least` on."""
    return max(least, 1 << (number - 1).bit_length())
