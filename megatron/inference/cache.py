"""Keys and values of texts, in blocks, and attention over them.

    step of 5 tokens:    a a a | b | c          new tokens of three texts, end to end
    tables:              a: 5 2   b: 7 3 1   c: 4
    groups:              {a}, {b, c}            texts with as many new tokens, and about as many old ones

The kernel sees each group as a batch whose keys end together: the last query of a row stands at its last key, so causality
and windows hold row by row, and what a shorter row lacks in front is left out as padding.

Where blocks of a text stand side by side, and those of the next text as long as far behind it again, the pool itself is such a
batch, and nothing is copied:

    pool:   . a a a a . . b b b b . . c c c c . .      one view [3 texts, 4 keys]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.config.settings.model import ModelConfig
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.paged import CacheBlockTables
from megatron.core.transformer.context.cache import Mix, StatefulMixer
from megatron.inference.recurrent_states import EqualLengthGroup, StatePool

_SHORT = 128  # keys that a row may be filled up with, however few its own are
_ALL = 2**62  # keys
_CALL = 50_000  # numbers that a CPU copies in the time of one more call of the kernel


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """New tokens of one sequence in a step: `count` of them after `start` cached ones. blocks: its block table."""

    count: int
    start: int
    blocks: tuple[int, ...]

    @property
    def num_keys(self) -> int:
        """Number of keys that the last new token attends to."""
        return self.start + self.count


def cached_heads_and_sizes(model: ModelConfig, plan: LayerPlan, tensor_size: int) -> tuple[tuple[int, int], ...]:
    """Return (heads, head size) of everything that a layer caches of a token on one rank; empty without attention."""
    return tuple(pair for mixer in plan.mixers for pair in mixer.cached_heads(model, tensor_size))


def cache_bytes_per_token(
    model: ModelConfig, plans: Sequence[LayerPlan], tensor_size: int, dtype: torch.dtype, *, states: int = 0
) -> int:
    """Return a token's cache bytes on one rank, for these layers and `states` hidden states for MTP."""
    return dtype.itemsize * (
        states * model.hidden_size
        + sum(heads * size for plan in plans for heads, size in cached_heads_and_sizes(model, plan, tensor_size))
    )


class KVCache:
    """The paged KV cache of one rank: for each layer a tensor [slots, heads * size] of keys, and one of values. Slot i
    of block b is b * block_size + i. width: numbers cached per token and layer, on average. states: hidden states for
    each depth of multi-token prediction, [slots, h]. paged: attention kernel that reads blocks in place
    (kernels/ops/paged.py); None: keys are gathered for the layers' own kernel.
    """

    def __init__(
        self,
        model: ModelConfig,
        plans: Sequence[LayerPlan],
        *,
        tensor_size: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        states: int = 0,
        paged: Callable[..., Tensor] | None = None,
    ) -> None:
        self.device, self.paged = device, paged
        self.states = tuple(torch.zeros(slots, model.hidden_size, dtype=dtype, device=device) for _ in range(states))
        self.width = sum(
            sum(heads * size for heads, size in cached_heads_and_sizes(model, plan, tensor_size)) for plan in plans
        ) // max(1, len(plans))
        self.first_ahead = model.num_layers
        self.layers = {
            plan.index: tuple(
                torch.empty(slots, heads * size, dtype=dtype, device=device)
                for heads, size in cached_heads_and_sizes(model, plan, tensor_size)
            )
            for plan in plans
        }
        for tensors in self.layers.values():
            for tensor in tensors:
                # Read in the place of keys that a shorter row lacks; no other slot is read before it is written.
                tensor[0] = 0.0


@dataclass(frozen=True, slots=True)
class EqualQueryLengthGroup:
    """Sequences of a step with equally many new tokens, end to end from token `first` on. queries: new tokens of each.
    ragged: some have fewer keys than `where.longest`. slots: of `slots_of_last_positions`, by number of keys.
    """

    first: int
    queries: int
    where: CacheBlockTables
    ragged: bool
    slots: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return self.where.tables.shape[0]

    @property
    def positions(self) -> Tensor:
        """Positions of the new tokens, int64 [b, queries]."""
        return self.where.lengths[:, None] + torch.arange(-self.queries, 0, device=self.where.lengths.device)

    def last_keys_and_values(self, stored: Sequence[Tensor], seen: int) -> tuple[list[Tensor], Tensor | None]:
        """Gather the last `seen` keys and values of each sequence, [b, keys, heads * size]; padding mask or None."""
        count = min(seen, self.where.longest)
        if count not in self.slots:  # all layers have the same
            self.slots[count] = self.where.slots_of_last_positions(count)
        slots, there = self.slots[count]
        fetched = [pool.index_select(0, slots.reshape(-1)).view(*slots.shape, -1) for pool in stored]
        return fetched, there if self.ragged else None


@dataclass(frozen=True, slots=True)
class _ContiguousCacheView:
    """A strided batch of keys in the pool: `rows` times `length` from slot `start` on, `step` slots apart."""

    first: int
    queries: int
    rows: int
    length: int
    start: int
    step: int

    def last_keys_and_values(self, stored: Sequence[Tensor], seen: int) -> tuple[list[Tensor], None]:
        """Return the last `seen` keys and values as views of the pool, [b, keys, heads * size]; no padding."""
        count = min(seen, self.length)
        first = self.start + self.length - count
        return [
            pool.as_strided(
                (self.rows, count, pool.shape[1]), (self.step * pool.shape[1], pool.shape[1], 1), first * pool.shape[1]
            )
            for pool in stored
        ], None


def group_sequences_by_length(spans: Sequence[SequenceSpan]) -> list[list[int]]:
    """Return indices of spans with equally many new tokens and about as many keys, by group, in a step's order."""
    groups: list[list[int]] = []
    for number in sorted(
        range(len(spans)), key=lambda number: (-spans[number].count, -spans[number].num_keys, spans[number].blocks[:1])
    ):
        span, first = spans[number], spans[groups[-1][0]] if groups else None
        if first is not None and first.count == span.count and first.num_keys <= max(2 * span.num_keys, _SHORT):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


class StepKVCache:
    """The `DecodingCache` of one forward pass. logit_positions: token indices whose logits are needed, None for all;
    filling: number of padding tokens at the end. depth: of multi-token prediction, 0 for the network itself. states:
    pool of recurrent states, and the groups' slots. positions: of the tokens, [t].
    """

    def __init__(
        self,
        pool: KVCache,
        groups: Sequence[tuple[EqualQueryLengthGroup, Sequence[_ContiguousCacheView]]],
        *,
        logit_positions: Tensor | None = None,
        filling: int = 0,
        depth: int = 0,
        states: tuple[StatePool, Sequence[EqualLengthGroup]] | None = None,
    ) -> None:
        self._state_slots = states
        self._pool, self._logit_positions, self._filling, self._depth = pool, logit_positions, filling, depth
        self._groups = [one for group, views in groups for one in (views or (group,))]
        places = [group.positions for group, _ in groups]
        nowhere = [torch.zeros(filling, dtype=torch.int64, device=pool.device)] if filling else []
        new = [group.where.slots_of_positions(at).reshape(-1) for (group, _), at in zip(groups, places, strict=True)]
        self._new = _concat_outputs([*new, *nowhere])
        self.positions = _concat_outputs([*(at.reshape(-1) for at in places), *nowhere])

    def mtp_input_hidden_states(self) -> Tensor:
        """Return the hidden states that this pass's depth reads of its tokens, [t, 1, h]."""
        return self._pool.states[self._depth - 1].index_select(0, self._new)[:, None]

    def run_from_states(self, mixer: StatefulMixer, parts: Sequence[Tensor], mix: Mix) -> Tensor:
        """Run a stateful mixer on the new tokens, group by group, updating states. parts, result: [t, 1, ...]."""
        assert self._state_slots is not None, "a network whose layers have states has slots for them"
        pool, groups = self._state_slots
        outputs = [group.scan(pool, mixer, parts, mix) for group in groups]
        if self._filling:
            # Without a text, what the mixer makes of one padding token has the shape: keys and values may differ in heads and size.
            like = outputs[0] if outputs else mix([part[:1] for part in parts], mixer.initial_state(1))[0]
            outputs.append(like.new_zeros((self._filling, *like.shape[1:])))
        return _concat_outputs(outputs)

    def cached_cross_attention_kv(self, layer: object, make: Callable[[], Tensor]) -> Tensor:
        """Raise: a decoder without cross attention has no encoder output [s, b, h]."""
        raise AssertionError("a decoder alone has no memory")

    def select_logit_states(self, x: Tensor) -> Tensor:
        """Store the hidden states x [t, 1, h] for the next MTP depth; return those that need logits, [w, 1, h]."""
        if self._depth < len(self._pool.states):
            self._pool.states[self._depth].index_copy_(0, self._new, x[:, 0].to(self._pool.states[0].dtype))
        return x if self._logit_positions is None else x.index_select(0, self._logit_positions)

    def wrap_attention_kernel(self, layer: int, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return an attention function that stores new keys and values in the cache and lets the new tokens ([t, 1, n,
        d]) of all sequences attend to the stored ones by `kernel`.
        """
        # One layer may serve all depths; what it stores of each is another thing.
        stored = self._pool.layers[self._pool.first_ahead + self._depth - 1 if self._depth else layer]

        def attend_with_cache(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            mask: AttentionMaskSpec,
            dropout: float = 0.0,
            scores: AttentionScoreModifiers = AttentionScoreModifiers(),
        ) -> Tensor:
            assert dropout == 0.0 and scores.bias is None, (
                "texts are decoded without dropout and without a bias of the scores"
            )
            # Latent attention stores what its values are the beginning of.
            for pool, new in zip(stored, (k, v), strict=False):
                pool.index_copy_(0, self._new, new[:, 0].flatten(1))
            paged = self._pool.paged
            outputs = [
                _attend_sequence_group(group, stored, kernel, q, v, mask, scores)
                if paged is None or isinstance(group, _ContiguousCacheView)
                else _attend_paged(group, stored, paged, q, v, mask, scores)
                for group in self._groups
            ]
            if self._filling:
                outputs.append(v.new_zeros(self._filling, 1, q.shape[2] * v.shape[3]))
            return _concat_outputs(outputs)

        return attend_with_cache


def block_tables_of(spans: Sequence[SequenceSpan]) -> tuple[np.ndarray, np.ndarray]:
    """Return block tables of a group, int32 [b, blocks], and the number of keys of each sequence, int32 [b]."""
    tables = np.zeros((len(spans), max(len(span.blocks) for span in spans)), np.int32)
    for row, span in enumerate(spans):
        tables[row, : len(span.blocks)] = span.blocks
    return tables, np.array([span.num_keys for span in spans], np.int32)


def make_step_kv_cache(
    pool: KVCache,
    groups: Sequence[Sequence[SequenceSpan]],
    tables: Sequence[Tensor],
    *,
    block_size: int,
    logit_positions: Tensor | None,
    total: int,
    depth: int = 0,
    states: tuple[StatePool, Sequence[EqualLengthGroup]] | None = None,
) -> StepKVCache:
    """Make the cache of a forward pass over `total` tokens: those of the spans, in the order of `group_sequences_by_length`, then
    padding.
    tables: of each group int32 [b, blocks] and [b], as `block_tables_of` returns them. logit_positions: [positions],
    the tokens whose logits are needed; None: all. states: pool of recurrent states, and the slots of each group.
    """
    step_groups: list[tuple[EqualQueryLengthGroup, Sequence[_ContiguousCacheView]]] = []
    first = 0
    for number, spans in enumerate(groups):
        longest, count = max(span.num_keys for span in spans), spans[0].count
        where = CacheBlockTables(tables[2 * number], tables[2 * number + 1], block_size, longest)
        group = EqualQueryLengthGroup(first, count, where, min(span.num_keys for span in spans) < longest)
        # Prompts that begin here are attention of a sequence to itself, which kernels for training do best.
        begins = count > 1 and all(span.start == 0 for span in spans)
        views = _contiguous_cache_views(spans, block_size, first) if pool.paged is None or begins else []
        copied = len(spans) * longest * pool.width if pool.device.type == "cpu" else 0
        few = len(views) == 1 or len(views) * _CALL < copied
        step_groups.append((group, views if few else ()))
        first += len(spans) * count
    return StepKVCache(
        pool, step_groups, logit_positions=logit_positions, filling=total - first, depth=depth, states=states
    )


def _contiguous_cache_views(spans: Sequence[SequenceSpan], block_size: int, first: int) -> list[_ContiguousCacheView]:
    """Return a group as few views of the pool, in this order; empty if a sequence's blocks are not contiguous."""
    views: list[_ContiguousCacheView] = []
    for row, span in enumerate(spans):
        blocks = span.blocks[: -(-span.num_keys // block_size)]
        if blocks != tuple(range(blocks[0], blocks[0] + len(blocks))):
            return []
        start, last = blocks[0] * block_size, views[-1] if views else None
        step = 0 if last is None else start - last.start - (last.rows - 1) * last.step
        if last is not None and span.num_keys == last.length and step > 0 and (last.rows == 1 or step == last.step):
            views[-1] = replace(last, rows=last.rows + 1, step=step)
        else:
            views.append(_ContiguousCacheView(first + row * span.count, span.count, 1, span.num_keys, start, 0))
    return views


def _attend_sequence_group(
    group: EqualQueryLengthGroup | _ContiguousCacheView,
    stored: Sequence[Tensor],
    kernel: Callable[..., Tensor],
    q: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    scores: AttentionScoreModifiers,
) -> Tensor:
    """Apply the kernel to one group. q: [t, 1, n, d] of all groups; returns [b * queries, 1, n * dv]."""
    reach = -1 if mask.window is None else mask.window[0]
    windowed = reach >= 0
    # What no query of the group sees need not be fetched.
    fetched, padding = group.last_keys_and_values(stored, reach + group.queries if windowed else _ALL)
    rows, heads = fetched[0].shape[0], v.shape[2]
    k = fetched[0].unflatten(2, (heads, -1)).transpose(0, 1)
    values = fetched[1].unflatten(2, (heads, -1)).transpose(0, 1) if len(fetched) == 2 else k[..., : v.shape[-1]]
    queries = q[group.first : group.first + rows * group.queries, 0].unflatten(0, (rows, group.queries)).transpose(0, 1)
    # A single query stands at the last key, so that it sees all of them.
    causal = mask.causal and group.queries > 1
    window = mask.window if group.queries > 1 else None
    folds = group.queries == 1 and heads < q.shape[2] and scores.sink is None
    if folds:  # the heads of a group are as many queries of one head, so that no key is repeated for each
        queries = queries[0].unflatten(1, (heads, -1)).permute(2, 0, 1, 3)
    output = kernel(queries, k, values, AttentionMaskSpec(causal=causal, window=window, padding=padding), 0.0, scores)
    if folds:
        return output.unflatten(2, (heads, -1)).permute(1, 2, 0, 3).reshape(rows, 1, -1)
    return output.transpose(0, 1).reshape(rows * group.queries, 1, -1)


def _attend_paged(
    group: EqualQueryLengthGroup,
    stored: Sequence[Tensor],
    kernel: Callable[..., Tensor],
    q: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    scores: AttentionScoreModifiers,
) -> Tensor:
    """Apply a kernel that reads blocks in place to one group. q: [t, 1, n, d]; returns [b * queries, 1, n * dv]."""
    queries = q[group.first : group.first + group.num_sequences * group.queries, 0].unflatten(
        0, (group.num_sequences, group.queries)
    )
    k = stored[0].unflatten(1, (v.shape[2], -1))
    values = stored[1].unflatten(1, (v.shape[2], -1)) if len(stored) == 2 else k[..., : v.shape[-1]]
    window = None if mask.window is None or mask.window[0] < 0 else mask.window[0]
    return kernel(queries, k, values, group.where, window=window, scores=scores).view(
        group.num_sequences * group.queries, 1, -1
    )


def _concat_outputs(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
