"""Rollouts as rows of a training step: the same on every rank, from which each takes its own.

    one rollout a row:  | prompt answer . . . . |          packed (--rl-use-sequence-packing):  | prompt answer | prompt answer . |

Row arrays are [rows, s]. Position t of a row holds token t, and everything else there is about token t + 1, which it predicts:

    labels        the next token                      rl_advantage    of the rollout
    loss_mask     1 if the policy sampled that        rl_weight       of the token in the loss; over a step they sum to the number of such tokens
    position_ids, document_ids  of packed rollouts    rl_generation   its log-probability by the generation engine
    rl_answer     number of the rollout in its row    rl_old, rl_reference  by the policy of this round, and by the reference
    rl_place      row * s + position: where values that are computed from the batch belong
    padding_mask  0 behind rollouts, and in empty rows
    rl_routes                     of rollouts with routing replay, the experts of token t in all layers, [rows, layers * k, s]
    rl_value, rl_return  of a critic's state before the token: its value in this round, and what it should have been
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.parallel.mesh import Mesh
from megatron.rl.algorithms import Average
from megatron.rl.rollouts import Rollout
from megatron.training.state.batch import Batch

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class TrainingRollout:
    """A rollout with what the loss needs.

    advantage: of all its tokens; with a critic, its reward. old, reference: log-probabilities of its ids, [tokens]; empty until they are
    known. values, returns, advantages: of each of its ids, [tokens], with a critic only.
    """

    rollout: Rollout
    advantage: float
    old: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedRolloutSlot:
    """Where a rollout lies: its row, its first position there, and its number in the row."""

    row: int
    start: int
    number: int


def assign_rollout_slots(rollouts: Sequence[TrainingRollout], length: int, *, packed: bool) -> list[PackedRolloutSlot]:
    """Assign each rollout a slot in rows of `length` positions; packed: several to a row, longest first into the first
    row with room.
    """
    if not packed:
        return [PackedRolloutSlot(row, 0, 0) for row in range(len(rollouts))]
    slots: list[PackedRolloutSlot | None] = [None] * len(rollouts)
    room: list[int] = []
    numbers: list[int] = []
    for index in sorted(range(len(rollouts)), key=lambda index: (-len(rollouts[index].rollout.ids), index)):
        size = len(rollouts[index].rollout.ids) - 1
        row = next((row for row, left in enumerate(room) if left >= size), len(room))
        if row == len(room):
            room.append(length)
            numbers.append(0)
        slots[index] = PackedRolloutSlot(row, length - room[row], numbers[row])
        room[row] -= size
        numbers[row] += 1
    return [slot for slot in slots if slot is not None]


def build_training_rows(
    rollouts: Sequence[TrainingRollout],
    length: int,
    *,
    average: Average,
    limit: int,
    padding: int,
    packed: bool,
    multiple: int,
) -> Arrays:
    """Return the rows of one optimizer step, padded with empty ones to a multiple of `multiple`, at least that many.

    length: positions of a row. limit: the longest answer, for average "length". padding: the id of positions behind a rollout.
    """
    slots = assign_rollout_slots(rollouts, length, packed=packed)
    count = max(1, -(-(max((slot.row for slot in slots), default=-1) + 1) // multiple)) * multiple
    integers = ("labels", "position_ids", "document_ids", "rl_answer", "loss_mask", "padding_mask")
    floats = ("rl_advantage", "rl_weight", "rl_generation", "rl_old", "rl_reference", "rl_value", "rl_return")
    rows: Arrays = {"tokens": np.full((count, length), padding, np.int64)}
    rows |= {name: np.zeros((count, length), np.int64) for name in integers}
    rows |= {name: np.zeros((count, length), np.float64) for name in floats}
    rows["rl_place"] = np.arange(count * length, dtype=np.int64).reshape(count, length)
    rows["document_ids"][:] = -1
    if (width := max((len(one.rollout.routes[0]) for one in rollouts if one.rollout.routes), default=0)) > 0:
        rows["rl_routes"] = np.zeros((count, width, length), np.int64)
    weights = _token_weights([trained.rollout.num_sampled for trained in rollouts], average, limit)
    for trained, slot, weight in zip(rollouts, slots, weights, strict=True):
        rollout = trained.rollout
        size = len(rollout.ids) - 1
        here = (slot.row, slice(slot.start, slot.start + size))
        rows["tokens"][here], rows["labels"][here] = rollout.ids[:-1], rollout.ids[1:]
        rows["position_ids"][here] = np.arange(size)
        rows["document_ids"][here] = rows["rl_answer"][here] = slot.number
        rows["loss_mask"][here], rows["padding_mask"][here] = rollout.sampled[1:], 1
        if rollout.routes:
            rows["rl_routes"][slot.row, :, slot.start : slot.start + size] = np.array(rollout.routes[:size]).T
        rows["rl_advantage"][here] = trained.advantages[1:] or trained.advantage
        rows["rl_weight"][here] = weight * np.asarray(rollout.sampled[1:], np.float64)
        rows["rl_generation"][here] = rollout.logprobs[1:]
        rows["rl_old"][here] = trained.old[1:] or 0.0
        rows["rl_reference"][here] = trained.reference[1:] or 0.0
        rows["rl_value"][here], rows["rl_return"][here] = trained.values[1:] or 0.0, trained.returns[1:] or 0.0
    return rows


def _token_weights(lengths: Sequence[int], average: Average, limit: int) -> list[float]:
    """Return the weight of each token of each answer. lengths: sampled tokens of each; the weights of all tokens sum to their number."""
    if average == "token":
        return [1.0] * len(lengths)
    answers = sum(length > 0 for length in lengths)
    scale = sum(lengths) / answers if answers else 0.0
    if average == "length":
        # The sum over tokens divided by a constant is no mean; so these weights sum to less than the number of tokens.
        return [scale / limit] * len(lengths)
    return [scale / length if length else 0.0 for length in lengths]


def build_rank_microbatches(rows: Arrays, mesh: Mesh, micro_batch_size: int, *, packed: bool) -> Iterator[Batch]:
    """Yield this rank's microbatches of a step, in order: its data-parallel share of the rows, and its context-parallel
    positions.
    """
    count = len(rows["tokens"]) // (micro_batch_size * mesh.dp.size)
    for microbatch in range(count):
        first = (microbatch * mesh.dp.size + mesh.dp.rank) * micro_batch_size
        chosen = {name: array[first : first + micro_batch_size] for name, array in rows.items()}
        if not packed:
            del chosen["document_ids"], chosen["position_ids"]
        batch = Batch.from_arrays(chosen, mesh.device, positions=packed)
        yield batch.shard_over_context(mesh.cp)


def values_per_rollout(
    rollouts: Sequence[TrainingRollout], rows: Arrays, table: np.ndarray, *, packed: bool
) -> list[tuple[float, ...]]:
    """Return a value for each id of each rollout, 0.0 for the first, from a table over `rl_place`, [rows * s]."""
    length = rows["tokens"].shape[1]
    values = table.reshape(-1, length)
    return [
        (0.0, *values[slot.row, slot.start : slot.start + len(trained.rollout.ids) - 1].tolist())
        for trained, slot in zip(rollouts, assign_rollout_slots(rollouts, length, packed=packed), strict=True)
    ]
