"""Where Megatron's distributed optimizer keeps a parameter: flat buffers, cut into buckets.

Megatron lays its parameters end to end, the last defined first, each from a multiple of 64 elements on (none of the first
releases did so). A bucket ends where it has grown to --ddp-bucket-size, and around a word embedding that two pipeline
stages share. A buffer says how many elements it has and never which parameter lies where; this is computed here, and
the caller compares the fp32 weights in the buffer with those of the model: what does not agree is not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

WAY_OUT = "load it once in Megatron and save it with --ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable"
ALIGNED, PACKED = 64, 1
_SMALLEST_BUCKET, _BUCKET_OF_A_RANK = 40_000_000, 1_000_000  # elements, where the arguments say nothing


class UnreadableStateError(Exception):
    """Why it cannot be known which part of the optimizer state belongs to which parameter, in a sentence."""


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """Where a parameter lies. bucket: index in the buffer; start, stop: elements in that bucket."""

    bucket: int
    start: int
    stop: int


def spans_in_buckets(
    sizes: Sequence[tuple[str, int]], buckets: Sequence[int], alignment: int = ALIGNED
) -> dict[str, BucketSpan] | None:
    """Return where each parameter lies in buckets of known sizes; None if the parameters do not fill them exactly.

    sizes: (name, number of elements) in the order of definition; buckets: elements of each, without the padding at its
    end.
    """
    spans_by_name, bucket, start = {}, 0, 0
    for name, size in reversed(sizes):
        if bucket == len(buckets) or start + size > buckets[bucket]:
            return None
        spans_by_name[name] = BucketSpan(bucket, start, start + size)
        start = _round_up(start + size, alignment)
        if buckets[bucket] in (spans_by_name[name].stop, start):
            bucket, start = bucket + 1, 0
    return spans_by_name if bucket == len(buckets) else None


def megatron_bucket_sizes(
    sizes: Sequence[tuple[str, int]], largest: int | None, alone: Collection[str], alignment: int = ALIGNED
) -> list[int]:
    """Return the number of elements of each bucket as Megatron cuts them.

    largest: size at which a bucket ends, or None; alone: parameters with a bucket of their own.
    """
    bucket_lengths: list[int] = []
    start, filled = 0, False
    for name, size in reversed(sizes):
        start = _round_up(start, alignment)
        if name in alone and filled:
            bucket_lengths.append(start)
            start = 0
        start, filled = start + size, True
        if name in alone or (largest is not None and start >= largest):
            bucket_lengths.append(start)
            start, filled = 0, False
    return [*bucket_lengths, start] if filled else bucket_lengths


def bucket_size_limit(arguments: dict[str, object], ranks: int) -> int | None:
    """Return the size at which a bucket ends, from the arguments of a run; None if buffers are not cut."""
    if not arguments.get("overlap_grad_reduce"):
        return None
    given = arguments.get("ddp_bucket_size")
    return given if isinstance(given, int) else max(_SMALLEST_BUCKET, _BUCKET_OF_A_RANK * ranks)


def candidate_buffer_layouts(
    sizes: Sequence[tuple[str, int]], total: int, largest: int | None, shared: Collection[str]
) -> Iterator[dict[str, BucketSpan]]:
    """Yield the possible layouts of a buffer whose buckets were joined without their padding, as spans in the joined
    buffer. total: its elements; shared: word embeddings, which have a bucket of their own where two stages hold them.
    """
    tried: list[dict[str, BucketSpan]] = []
    for alignment in (ALIGNED, PACKED):
        for limit in (largest, None):
            for alone in (shared, ()):
                buckets = megatron_bucket_sizes(sizes, limit, alone, alignment)
                inside = spans_in_buckets(sizes, buckets, alignment) if sum(buckets) == total else None
                if inside is None:
                    continue
                before = [sum(buckets[:number]) for number in range(len(buckets))]
                layout = {
                    name: BucketSpan(0, before[span.bucket] + span.start, before[span.bucket] + span.stop)
                    for name, span in inside.items()
                }
                if layout not in tried:
                    tried.append(layout)
                    yield layout


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
