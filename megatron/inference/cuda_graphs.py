"""Decoding steps (one token per sequence) as CUDA graphs: launching kernels one by one would take longer than the kernels.

    capture                      the forward pass of 8 rows over static tensors: ids, lengths and block tables
    5 sequences                  their ids, lengths and tables are copied there at once, 3 rows are padding; replay

A graph is of one number of rows, a power of two, and of the longest text. Where keys are gathered, it is also of a number of keys,
since all rows are gathered to as many. Padding rows read and write block 0, which belongs to no sequence.

Capturing takes longer than a step. So a server captures before it serves, and later between requests: until then steps are launched
kernel by kernel. `on_demand` captures a shape when it is first met, where nobody waits for a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.core.kernels import reference
from megatron.core.kernels.host_reads import forbid_host_reads
from megatron.core.kernels.paged import BlockTables
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import device as devices
from megatron.inference.cache import CacheGroup, KVCache, Span, StepCache, tables_of
from megatron.inference.states import stateful_mixers

_FEWEST_KEYS = 256  # of a graph
Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
GraphShape = tuple[int, int]  # rows, keys
Awaited = Sequence[tuple[int, int]]


def unsupported_reason(stages: Sequence[GPTModel]) -> str:
    """Why the passes of these stages cannot be captured; "" if they can."""
    build = stages[0].build
    mesh, moe = build.mesh, build.model.moe
    if mesh.device.type != "cuda":
        return "there is no GPU"
    if mesh.pp.size * mesh.cp.size > 1:
        return "a copy of the network lies on several pipeline stages"
    if stateful_mixers(stages):
        return "layers keep a state of each text, in slots that change from step to step"
    if moe.num_experts and mesh.ep.size * mesh.etp.size > 1 and moe.moe_token_dispatcher_type != "allgather":
        return (
            f"with --moe-token-dispatcher-type {moe.moe_token_dispatcher_type} how many tokens a rank gets is known only as it runs; "
            "choose allgather"
        )
    if moe.num_experts and (build.low is not None or build.kernels.grouped_linear is reference.grouped_linear):
        return "the kernel of the experts reads how many tokens each has; choose --moe-grouped-gemm, in 16 bits or more"
    return ""


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    """One shape. given: int32 [rows * (2 + blocks)], ids, lengths and block tables; logits: [rows, 1, v]."""

    given: Tensor
    repeat: Callable[[], None]
    logits: Tensor


class CapturedGraphs:
    """Captured steps of one network, at most `count` shapes of them: the one longest unused goes.

    most_rows, most_blocks: of a step, and of one text. record: runs what it is given, and returns what repeats it on the same tensors,
    and the tensor that it returns. requested: shapes that were met and not captured.
    """

    def __init__(
        self,
        stage: GPTModel,
        pool: KVCache,
        *,
        block_size: int,
        count: int,
        most_rows: int,
        most_blocks: int,
        record: Recorder | None = None,
    ) -> None:
        self._stage, self._pool, self._block_size, self._count = stage, pool, block_size, count
        self._most_rows, self._most_blocks = most_rows, most_blocks
        self._record = record or devices.CudaGraphPool(pool.device).warm_up_and_capture
        self._kept: OrderedDict[GraphShape, _CapturedGraph] = OrderedDict()
        self.requested: OrderedDict[GraphShape, None] = OrderedDict()
        if pool.paged is not None:
            self.requested.update(dict.fromkeys(self._capture_sizes()))

    @property
    def num_captured(self) -> int:
        """How many shapes have been captured."""
        return len(self._kept)

    def shape(self, texts: int, keys: int) -> GraphShape:
        """The shape of a step of so many texts, of which the longest has so many keys."""
        whole = self._pool.paged is not None  # each row is read as long as it is, in tables as wide as there can be
        pieces = self._stage.build.region.whole_length(1)  # that tokens are cut into between matrices
        rows = -(-_next_power_of_two(texts, 1) // pieces) * pieces
        return rows, self._most_blocks * self._block_size if whole else _next_power_of_two(keys, _FEWEST_KEYS)

    def has_graph(self, shape: GraphShape, *, on_demand: bool) -> bool:
        """Whether a step of this shape can be repeated. on_demand: it is captured now, if it was not."""
        if shape in self._kept:
            self._kept.move_to_end(shape)
            return True
        if on_demand:
            self.capture(shape)
            return True
        self.requested[shape] = None
        return False

    def logits(
        self, shape: GraphShape, ids: Sequence[int], spans: Sequence[Span], awaited: Awaited, sampled: Tensor
    ) -> Tensor:
        """What follows the next token of each text, [texts, 1, v]; good until the next step. ids: those tokens, of which some are
        `awaited` from those that were `sampled`.
        """
        graph, (rows, _), texts = self._kept[shape], shape, len(spans)
        values = np.zeros(graph.given.numel(), np.int32)
        # A row that fills up sees one key, the first block's: of no key, the softmax would be no number.
        values[rows : 2 * rows] = 1
        if texts:
            tables = values[2 * rows :].reshape(rows, -1)
            own, values[rows : rows + texts] = tables_of(spans)
            tables[:texts, : own.shape[1]] = own[:, : tables.shape[1]]
            values[:texts] = ids
        given, *places = devices.upload([values, *np.array(awaited, np.int32).reshape(-1, 2).T], self._pool.device)
        graph.given.copy_(given)
        write_sampled_ids(graph.given[:rows], sampled, *places)
        graph.repeat()
        return graph.logits[:texts]

    def capture(self, shape: GraphShape) -> None:
        """Capture a step of this shape, on rows that hold nothing. All ranks of the network call this together."""
        self.requested.pop(shape, None)
        if len(self._kept) == self._count:
            self._kept.popitem(last=False)
        (rows, keys), device = shape, self._pool.device
        blocks = -(-keys // self._block_size)
        given = torch.zeros(rows * (2 + blocks), dtype=torch.int32, device=device)
        given[rows : 2 * rows] = 1

        def step() -> Tensor:
            ids, lengths, tables = given.split([rows, rows, rows * blocks])
            where = BlockTables(tables.view(rows, blocks), lengths, self._block_size, keys)
            cache = StepCache(self._pool, [(CacheGroup(0, 1, where, True), ())])
            return self._stage(ids=ids.to(torch.int64)[None], positions=cache.positions[None], cache=cache)

        with forbid_host_reads():
            repeat, logits = self._record(step)
        self._kept[shape] = _CapturedGraph(given, repeat, logits)

    def _capture_sizes(self) -> list[GraphShape]:
        """Of steps of 1, 2, 4, ... rows, as many as are kept, the largest first."""
        sizes = [1 << power for power in range((self._most_rows - 1).bit_length() + 1)]
        return list(dict.fromkeys(self.shape(rows, 1) for rows in sizes[::-1]))[: self._count]


def write_sampled_ids(ids: Tensor, sampled: Tensor, places: Tensor, numbers: Tensor) -> None:
    """Write sampled tokens into the ids of the next pass. ids: [t]; sampled: [w]; places: [n], among the ids; numbers: [n], of the tokens."""
    if len(places):
        # What is no token, since logits were no numbers, ends its text as soon as the host hears of it; until then any id will do.
        tokens = sampled.index_select(0, numbers.to(torch.int64)).clamp_(min=0)
        ids.index_copy_(0, places.to(torch.int64), tokens.to(ids.dtype))


def _next_power_of_two(number: int, least: int) -> int:
    """The next power of two from `least` on."""
    return max(least, 1 << (number - 1).bit_length())
