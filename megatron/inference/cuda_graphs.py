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

from megatron.core.kernels.ops import reference
from megatron.core.kernels.ops.host_read_permission import avoid_host_reads
from megatron.core.kernels.ops.paged import CacheBlockTables
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import device as devices
from megatron.inference.cache import EqualQueryLengthGroup, KVCache, SequenceSpan, StepKVCache, block_tables_of
from megatron.inference.recurrent_states import stateful_mixers

_FEWEST_KEYS = 256  # of a graph
Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
GraphShape = tuple[int, int]  # rows, keys
Awaited = Sequence[tuple[int, int]]


def graph_capture_obstacle(stages: Sequence[GPTModel]) -> str:
    """Return why decoding steps of these stages cannot be captured as CUDA graphs; "" if they can."""
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
class _DecodingGraph:
    """The captured graph of one shape. given: static input int32 [rows * (2 + blocks)], ids, lengths and block tables;
    repeat: replays it; logits: static output [rows, 1, v].
    """

    given: Tensor
    repeat: Callable[[], None]
    logits: Tensor


class DecodingGraphs:
    """Decoding steps of one network captured as CUDA graphs, at most `count` shapes, least recently used evicted.
    most_rows, most_blocks: of a step, and of one sequence. record: captures a function, and returns what replays it and
    its static output. requested: shapes that were met and not captured.
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
        self._kept: OrderedDict[GraphShape, _DecodingGraph] = OrderedDict()
        self.requested: OrderedDict[GraphShape, None] = OrderedDict()
        if pool.paged is not None:
            self.requested.update(dict.fromkeys(self._default_graph_shapes()))

    def graph_shape(self, texts: int, keys: int) -> GraphShape:
        """Return the graph shape (rows, keys) for a step of so many sequences, the longest with so many keys."""
        whole = self._pool.paged is not None  # each row is read as long as it is, in tables as wide as there can be
        pieces = self._stage.build.tp_region.whole_sequence_length(1)  # that tokens are cut into between matrices
        rows = -(-_next_power_of_two(texts, 1) // pieces) * pieces
        return rows, self._most_blocks * self._block_size if whole else _next_power_of_two(keys, _FEWEST_KEYS)

    def ensure_graph(self, shape: GraphShape, *, on_demand: bool) -> bool:
        """Whether a graph of this shape exists; else capture it now (`on_demand`), or add the shape to `requested`."""
        if shape in self._kept:
            self._kept.move_to_end(shape)
            return True
        if on_demand:
            self.capture_graph(shape)
            return True
        self.requested[shape] = None
        return False

    def replay_logits(
        self, shape: GraphShape, ids: Sequence[int], spans: Sequence[SequenceSpan], awaited: Awaited, sampled: Tensor
    ) -> Tensor:
        """Replay the graph and return the logits of each sequence's next token, [texts, 1, v]; valid until the next
        step. ids: the input tokens. awaited: (index among ids, index among `sampled`) of those known on the device
        only. sampled: tokens of the previous pass.
        """
        graph, (rows, _), texts = self._kept[shape], shape, len(spans)
        values = np.zeros(graph.given.numel(), np.int32)
        # A row that fills up sees one key, the first block's: of no key, the softmax would be no number.
        values[rows : 2 * rows] = 1
        if texts:
            tables = values[2 * rows :].reshape(rows, -1)
            own, values[rows : rows + texts] = block_tables_of(spans)
            tables[:texts, : own.shape[1]] = own[:, : tables.shape[1]]
            values[:texts] = ids
        given, *places = devices.copy_arrays_to_device(
            [values, *np.array(awaited, np.int32).reshape(-1, 2).T], self._pool.device
        )
        graph.given.copy_(given)
        write_sampled_ids(graph.given[:rows], sampled, *places)
        graph.repeat()
        return graph.logits[:texts]

    def capture_graph(self, shape: GraphShape) -> None:
        """Capture a step of this shape, on padding rows. Collective over the ranks of the network."""
        self.requested.pop(shape, None)
        if len(self._kept) == self._count:
            self._kept.popitem(last=False)
        (rows, keys), device = shape, self._pool.device
        blocks = -(-keys // self._block_size)
        given = torch.zeros(rows * (2 + blocks), dtype=torch.int32, device=device)
        given[rows : 2 * rows] = 1

        def compute_step_logits() -> Tensor:
            ids, lengths, tables = given.split([rows, rows, rows * blocks])
            where = CacheBlockTables(tables.view(rows, blocks), lengths, self._block_size, keys)
            cache = StepKVCache(self._pool, [(EqualQueryLengthGroup(0, 1, where, True), ())])
            return self._stage(ids=ids.to(torch.int64)[None], positions=cache.positions[None], cache=cache)

        with avoid_host_reads():
            repeat, logits = self._record(compute_step_logits)
        self._kept[shape] = _DecodingGraph(given, repeat, logits)

    def _default_graph_shapes(self) -> list[GraphShape]:
        """Return the shapes of steps of 1, 2, 4, ... rows, the largest first, at most as many as are kept."""
        sizes = [1 << power for power in range((self._most_rows - 1).bit_length() + 1)]
        return list(dict.fromkeys(self.graph_shape(rows, 1) for rows in sizes[::-1]))[: self._count]


def write_sampled_ids(ids: Tensor, sampled: Tensor, places: Tensor, numbers: Tensor) -> None:
    """Write sampled[numbers] into ids[places] of the next pass. ids: [t]; sampled: [w]; both indices: [n]."""
    if len(places):
        # What is no token, since logits were no numbers, ends its text as soon as the host hears of it; until then any id will do.
        tokens = sampled.index_select(0, numbers.to(torch.int64)).clamp_(min=0)
        ids.index_copy_(0, places.to(torch.int64), tokens.to(ids.dtype))


def _next_power_of_two(number: int, least: int) -> int:
    """Return the smallest power of two that is at least `number`, or `least` if that is larger."""
    return max(least, 1 << (number - 1).bit_length())
