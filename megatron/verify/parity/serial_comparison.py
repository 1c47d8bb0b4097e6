"""Does a layout compute the same step as one rank? In what two short runs of one config differ, and where the difference begins.

    compare_recorded_runs_to_serial(serial, ranks)     losses, gradient norms, gradients and weights by logical name

Nothing is gathered: each rank's piece is held against the same piece of what one rank computed, found by the boxes of its
parameters and by the places of the sequence that it holds. Where something differs, the forward pass says where first: of
all that goes into modules and comes out, in the order in which one rank computes, the first that differs. If nothing does,
the gradients say it, in the order of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.dist_checkpointing.sharded_state import ShardedTensor, Tree
from megatron.verify.parity.local_ranks import RankFailed, run_on_local_ranks
from megatron.verify.parity.proxy_config import ProxyConfig
from megatron.verify.parity.short_run import (
    STEPS,
    Ranges,
    RecordedActivation,
    ShortRun,
    ShortRunStep,
    run_short_training,
    run_short_training_pickled,
    unpickle_short_run_result,
)

TOLERANCE = 1e-10  # of fp64, relative to the largest value of a tensor
_FLOOR = 1e-3  # the largest value of a tensor counts as at least this share of that of all tensors of its kind
Event = tuple[int, str, str, int]  # (microbatch, module, side, call)


@dataclass(frozen=True, slots=True)
class ParityDifference:
    """How a loss, norm, gradient or weight differs between layout and serial run. kind: one of these. when: the step.
    gap: largest relative difference; inf: ranks disagree, or nothing can be compared. says: in words.
    """

    kind: str
    name: str
    when: str
    gap: float
    says: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.says or f'differs by {self.gap:.3g}'}"


@dataclass(frozen=True, slots=True)
class DivergenceStart:
    """Where two runs begin to differ. during: forward, loss, backward, norm or update. module: the innermost, or ""."""

    during: str
    module: str
    says: str


@dataclass(frozen=True, slots=True)
class LayoutParityResult:
    """Result of comparing a layout with a serial run. checked: every loss, norm, gradient and weight, also equal ones.
    compared: number of activations compared. start: where differences begin, None if there are none.
    """

    checked: tuple[ParityDifference, ...]
    compared: int
    start: DivergenceStart | None
    tolerance: float = TOLERANCE

    @property
    def differences_above_tolerance(self) -> tuple[ParityDifference, ...]:
        """The differences above the tolerance."""
        return tuple(one for one in self.checked if not one.gap <= self.tolerance)

    @property
    def is_within_tolerance(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        return not self.differences_above_tolerance

    def largest_differences(self, count: int = 3) -> list[ParityDifference]:
        """Return the `count` largest differences of each kind."""
        kinds = dict.fromkeys(one.kind for one in self.checked)
        return [
            one
            for kind in kinds
            for one in sorted((one for one in self.checked if one.kind == kind), key=lambda one: -one.gap)[:count]
        ]


def compare_recorded_runs_to_serial(
    serial: ShortRun, ranks: Sequence[ShortRun], *, tolerance: float = TOLERANCE
) -> LayoutParityResult:
    """Compare a layout's ranks with one rank's run, and find where they begin to differ. tolerance: relative."""
    checked, compared, start = [], 0, None
    for number, expected in enumerate(serial.steps):
        theirs = [(rank, rank.steps[number]) for rank in ranks]
        when = f"step {number + 1}"
        differences = [
            *_compare_numbers_with_serial("loss", when, [step.losses for _, step in theirs], expected.losses),
            *_compare_numbers_with_serial(
                "norm", when, [{"grad norm": step.norm} for _, step in theirs], {"grad norm": expected.norm}
            ),
            *_compare_shards_with_serial(
                "gradient", when, [(rank.rank, step.gradients) for rank, step in theirs], expected.gradients
            ),
            *_compare_shards_with_serial(
                "weight", when, [(rank.rank, step.weights) for rank, step in theirs], expected.weights
            ),
        ]
        checked += differences
        if start is None:
            count, start = _first_different_activation(when, expected.seen, theirs, tolerance)
            compared += count
            problems = [one for one in differences if not one.gap <= tolerance]
            start = _loss_or_backward_divergence(problems, expected.seen) if start is None and problems else start
    return LayoutParityResult(tuple(checked), compared, start, tolerance)


def run_layout_parity_check(small: ProxyConfig, limit: float) -> LayoutParityResult | str:
    """Run a proxy config on local processes and serially, and compare; a text instead if a rank failed. limit: seconds."""
    try:
        ranks = run_on_local_ranks(
            run_short_training_pickled, small.world_size, small.config, STEPS, small.finetuning, timeout=limit
        )
    except RankFailed as error:
        return str(error)
    return compare_recorded_runs_to_serial(
        run_short_training(small.serial_config, STEPS, small.finetuning),
        [unpickle_short_run_result(rank) for rank in ranks],
    )


def _compare_numbers_with_serial(
    kind: str, when: str, reports: Sequence[Mapping[str, float]], expected: Mapping[str, float]
) -> list[ParityDifference]:
    """Compare numbers that every rank has (reports, by rank) with the serial run's. when: the step."""
    differences = []
    for name, value in expected.items():
        theirs = [numbers.get(name, float("nan")) for numbers in reports]
        # Ranks that disagree are apart, however little.
        odd = [place for place, one in enumerate(theirs) if one != theirs[0]]
        says = (
            f"{theirs[0]!r} on rank 0, {theirs[odd[0]]!r} on rank {odd[0]}"
            if odd
            else f"{theirs[0]!r}, on one rank {value!r}"
        )
        differences.append(
            ParityDifference(
                kind, name, when, float("inf") if odd else _relative_gap(abs(theirs[0] - value), abs(value)), says
            )
        )
    return differences


def _relative_gap(distance: float, size: float) -> float:
    return distance / size if size else float("inf") if distance else 0.0


def _compare_shards_with_serial(
    kind: str, when: str, held: Sequence[tuple[int, Tree]], serial: Tree
) -> list[ParityDifference]:
    """Compare tensors held in shards with the serial run's; missing ones and differing replicas count as inf."""
    whole = {name: _assemble_sharded_tensor(placed) for name, placed in serial.items()}
    floor = _FLOOR * max((float(value.abs().max()) for value in whole.values() if value.numel()), default=0.0)
    differences = []
    for name, value in whole.items():
        gap, says = _shard_difference_from_serial(
            kind, value, [(rank, theirs[name]) for rank, theirs in held if name in theirs], floor
        )
        differences.append(ParityDifference(kind, name, when, gap, says))
    more = sorted({name for _, theirs in held for name in theirs} - whole.keys())
    return differences + [
        ParityDifference(kind, name, when, float("inf"), "one rank alone does not have it") for name in more
    ]


def _shard_difference_from_serial(
    kind: str, expected: Tensor, held: Sequence[tuple[int, ShardedTensor]], floor: float
) -> tuple[float, str]:
    """Return (largest difference of shards from the whole, relative to its largest value or `floor`; in words)."""
    assembled = torch.full(expected.shape, float("nan"), dtype=expected.dtype)
    size, gap, says = max(floor, float(expected.abs().max())), 0.0, ""
    for rank, placed in held:
        if tuple(placed.shape) != tuple(expected.shape):
            return float("inf"), (f"has shape {tuple(placed.shape)}, on one rank {tuple(expected.shape)}")
        for box, value in placed.pieces:
            target = assembled[box.slices()]
            known = ~target.isnan()
            if kind == "weight" and not torch.equal(target[known], value[known]):
                return float("inf"), f"its replica on rank {rank} differs from that of an earlier rank"
            there = float((value - expected[box.slices()]).abs().max()) if value.numel() else 0.0
            if not there <= gap:
                gap, says = there, f"differs by {there:.3g} of {float(expected.abs().max()):.3g} on rank {rank}"
            assembled[box.slices()] = value
    if assembled.isnan().any() and not expected.isnan().any():
        missing = int(assembled.isnan().sum())
        return float("inf"), f"{missing} of {assembled.numel()} elements are on no rank, or not a number"
    return _relative_gap(gap, size), says


def _assemble_sharded_tensor(placed: ShardedTensor) -> Tensor:
    """Return the whole tensor of a `ShardedTensor`'s pieces, NaN where there is none."""
    value = torch.full(tuple(placed.shape), float("nan"), dtype=placed.dtype)
    for box, piece in placed.pieces:
        value[box.slices()] = piece
    return value


# Where it begins.


def _first_different_activation(
    when: str, serial: Sequence[RecordedActivation], ranks: Sequence[tuple[ShortRun, ShortRunStep]], tolerance: float
) -> tuple[int, DivergenceStart | None]:
    """Return (number of activations compared, the first that differs in the order of the serial forward pass, or None)."""
    theirs: dict[Event, list[tuple[ShortRun, RecordedActivation]]] = {}
    for rank, step in ranks:
        for seen in step.seen:
            theirs.setdefault(_recorded_activation_key(seen), []).append((rank, seen))
    compared, before = 0, None  # before: the last that agrees
    for expected in sorted(serial, key=lambda seen: seen.microbatch):  # stable: within a microbatch, as it happened
        # Rows of experts stand in the order in which they arrived.
        others = theirs.get(_recorded_activation_key(expected), ()) if ".experts." not in f"{expected.module}." else ()
        gaps = [
            (gap, rank, seen) for rank, seen in others if (gap := _activation_gap(expected, rank, seen)) is not None
        ]
        compared += len(gaps)
        wrong = [(gap, rank, seen) for gap, rank, seen in gaps if not gap <= tolerance]
        if wrong:
            gap, rank, seen = wrong[0]
            where = f"{when}, microbatch {expected.microbatch}, rank {rank.rank}: differs by {gap:.3g}"
            return compared, _describe_forward_divergence(expected, seen, before, where)
        if gaps:
            before = gaps[0][2]
    return compared, None


def _recorded_activation_key(seen: RecordedActivation) -> Event:
    """Return what identifies an activation on all ranks: (microbatch, module, side, call)."""
    return seen.microbatch, seen.module, seen.side, seen.call


def _activation_gap(expected: RecordedActivation, rank: ShortRun, seen: RecordedActivation) -> float | None:
    """Return how far a rank's activation is from its part of the serial one, relatively; None if that is unknown."""
    piece = _local_part(expected.value, seen.value, rank.place, seen.columns)
    if piece is None:
        return None
    size = float(expected.value.abs().max()) if expected.value.numel() else 0.0
    return _relative_gap(float((piece - seen.value).abs().max()) if piece.numel() else 0.0, max(size, 1e-6))


def _local_part(
    whole: Tensor, local: Tensor, place: Mapping[str, tuple[int, int]], columns: Ranges | None
) -> Tensor | None:
    """Return the part of a whole activation that lies on a rank, or None if unknown. Both are [s, b, h] or [s, b, n,
    d], or [b, s], or have one shape. A sequence is cut in a zigzag over cp, and further over tp; columns and heads are
    cut over tp.
    """
    if whole.shape == local.shape:
        return whole
    if whole.dim() != local.dim():
        return None
    (tp, tp_size), (cp, cp_size) = place["tp"], place["cp"]
    along = 1 if whole.dim() == 2 else 0
    if local.shape[along] != whole.shape[along]:
        if cp_size > 1:
            whole = Zigzag(whole.shape[along], cp_size).shard(whole, cp, dim=along)
        if local.shape[along] * tp_size == whole.shape[along] != local.shape[along]:
            whole = whole.chunk(tp_size, dim=along)[tp]
    across = {3: 2, 4: 2}.get(whole.dim())
    if across is not None and local.shape[across] != whole.shape[across]:
        width = local.shape[across]
        if columns is not None and sum(high - low for low, high in columns) == width:
            whole = torch.cat([whole.narrow(across, low, high - low) for low, high in columns], dim=across)
        elif width * tp_size % whole.shape[across] == 0:
            copies = width * tp_size // whole.shape[across]
            whole = whole.narrow(across, tp // copies * width, width)
    return whole if whole.shape == local.shape else None


def _describe_forward_divergence(
    expected: RecordedActivation, seen: RecordedActivation, before: RecordedActivation | None, where: str
) -> DivergenceStart:
    """Describe the first activation that differs. before: the last that agrees. where: step, microbatch, rank."""
    if before is not None and before.microbatch != expected.microbatch:
        before = None
    after = f"; the {before.side} of {before.module}, just before it, agrees" if before is not None else ""
    between = before is not None and before.stage != seen.stage
    if expected.side == "output":
        return DivergenceStart("forward", expected.module, f"the output of {expected.module} ({where}){after}")
    # An input that is wrong was made by who calls the module, after what went before it.
    module = expected.module if between else _parent_module_name(expected.module)
    message = (
        f", which a message brings from stage {before.stage} to stage {seen.stage}"
        if before is not None and between
        else ""
    )
    return DivergenceStart("forward", module, f"the input of {expected.module}{message} ({where}){after}")


def _parent_module_name(module: str) -> str:
    """Return the name of the module that calls this one; lists of layers are skipped."""
    parts = module.split(".")[:-1]
    return ".".join(parts[:-1] if parts and parts[-1] == "layers" else parts)


def _loss_or_backward_divergence(
    problems: Sequence[ParityDifference], seen: Sequence[RecordedActivation]
) -> DivergenceStart:
    """Say where a step diverges in which all activations agree: loss, backward pass, norm or update."""
    of = {kind: [one for one in problems if one.kind == kind] for kind in ("loss", "gradient", "norm", "weight")}
    if of["gradient"]:
        order = _module_order(seen)
        first = min(of["gradient"], key=lambda one: _backward_order_of(one.name, order))
        return DivergenceStart(
            "backward",
            first.name.rpartition(".")[0],
            f"{first} ({first.when}); it is the first in the order of the backward pass, and all activations agree",
        )
    if of["loss"]:
        return DivergenceStart(
            "loss",
            "",
            f"{of['loss'][0]} ({of['loss'][0].when}); all activations agree, so it is in how losses of ranks come together",
        )
    if of["norm"]:
        return DivergenceStart(
            "norm",
            "",
            f"{of['norm'][0]} ({of['norm'][0].when}); all gradients agree, so it is in what the norm counts, or in the number "
            "of tokens",
        )
    worst = max(of["weight"], key=lambda one: one.gap)
    modules = {one.name.rpartition(".")[0] for one in of["weight"]}
    return DivergenceStart(
        "update",
        modules.pop() if len(modules) == 1 else "",
        f"{worst} ({worst.when}), of {len(of['weight'])} that differ; gradients and their norm agree, so it is in the update",
    )


def _backward_order_of(name: str, order: Mapping[str, int]) -> int:
    """Return a sort key of when the backward pass reaches a parameter: the last module of the forward pass first."""
    module = name.rpartition(".")[0]
    while module and module not in order:
        module = module.rpartition(".")[0]
    return -order.get(module, -1)


def _module_order(seen: Iterable[RecordedActivation]) -> dict[str, int]:
    """Return module -> its index in the forward pass of a microbatch, by its last output."""
    return {one.module: place for place, one in enumerate(seen) if one.side == "output" and one.microbatch == 0}
