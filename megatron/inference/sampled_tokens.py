"""The next tokens of a pass: sampled from its logits, scored, and copied to the host while the device goes on."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel import device as devices
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.inference.sampling import (
    SamplingParams,
    apply_presence_and_frequency_penalty,
    apply_repetition_penalty,
    sample_by_uniform_numbers,
    uniform_random,
)
from megatron.inference.step_input import SamplingState, SequenceInput, SequenceStepOutput


class SampledTokens:
    """What a pass has sampled, while it is copied to the host. tokens: sampled ids, int64 [w] on the device, row by
    row. rows: of the pass; order: index of each among the caller's rows. scores: log-probabilities [w'] at all
    positions of the rows that are scored; best: (ids, log-probabilities) of the likeliest there, [w', top]. Without
    tokens: nothing was sampled on this rank.
    """

    def __init__(
        self,
        rows: Sequence[SequenceInput],
        order: Sequence[int],
        tokens: Tensor | None = None,
        scores: Tensor | None = None,
        best: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._rows, self._order, self._empty = rows, order, tokens is None
        self.tokens = torch.zeros(0, dtype=torch.int64) if tokens is None else tokens
        self._scored, self._best = scores is not None, best is not None
        tensors = [self.tokens, *(() if scores is None else (scores,)), *(best or ())]
        self._coming = devices.DeviceToHostCopy(tensors, self.tokens.device)

    def first_token_indices(self) -> list[int]:
        """Return for each of the caller's rows the index of its first sampled token."""
        result, start = [0] * len(self._rows), 0
        for number, row in zip(self._order, self._rows, strict=True):
            result[number] = start
            start += row.num_sampled
        return result

    def collect(self) -> list[SequenceStepOutput]:
        """Wait for the copy; return the outputs of the caller's rows, empty ones on a rank that samples nothing."""
        outputs = [SequenceStepOutput()] * len(self._rows)
        if self._empty:
            return outputs
        arrived = iter(self._coming.wait())
        tokens = iter(next(arrived).tolist())
        scores = next(arrived).tolist() if self._scored else []
        best = list(zip(next(arrived).tolist(), next(arrived).tolist(), strict=True)) if self._best else []
        start = 0
        for number, row in zip(self._order, self._rows, strict=True):
            ids = (*row.targets, *itertools.islice(tokens, row.num_sampled))
            mine = slice(start, start + row.num_logits)
            start += row.num_logits if row.scored else 0
            if not row.scored or not ids or min(ids) < 0:
                outputs[number] = SequenceStepOutput(ids)
                continue
            top = [tuple(zip(words[: row.top], values[: row.top])) for words, values in best[mine]] if row.top else ()
            outputs[number] = SequenceStepOutput(ids, tuple(scores[mine]), tuple(top))
        return outputs


def sample_next_tokens(
    rows: Sequence[SequenceInput], logits: Tensor, build: LayerBuildContext, order: Sequence[int] | None = None
) -> SampledTokens:
    """Sample the next tokens at the positions with logits of each row, on the first tensor rank, without waiting for
    the device. logits: [w, 1, v/tp], row by row. order: index of each row among the caller's; None: the same order.
    """
    axis, size = build.mesh.tp, build.model.true_vocab_size
    order = range(len(rows)) if order is None else order
    whole = collectives.all_gather(logits[:, 0][None], axis).movedim(0, 1).flatten(1)[:, :size]
    if not axis.is_first:
        return SampledTokens(rows, order)
    tokens = _sampled_ids(rows, whole if whole.dtype == torch.float64 else whole.float())
    if not any(row.scored and row.num_logits for row in rows):
        return SampledTokens(rows, order, tokens)
    return SampledTokens(rows, order, tokens, *_logprobs_of(rows, whole, tokens))


def _sampled_ids(rows: Sequence[SequenceInput], logits: Tensor) -> Tensor:
    """Sample the next tokens, int64 [w'], at the positions that have no given target. logits: [w, v], row by row."""
    settings: list[SamplingParams] = []
    numbers: list[float] = []
    places: list[int] = []
    changed: list[tuple[int, Tensor]] = []
    start = 0
    for row in rows:
        first = start + len(row.targets)
        for place in range(first, start + row.num_logits):
            assert row.sampling_state is not None, "a row that picks tokens says how"
            step = place - first
            settings.append(row.sampling_state.sampling.params_for_token(row.sampling_state.first + step))
            numbers.append(
                0.0
                if settings[-1].is_greedy
                else uniform_random(row.sampling_state.seed, row.sampling_state.first + step)
            )
            places.append(place)
            before = row.ids[: len(row.ids) - row.num_logits + len(row.targets) + step + 1]
            if (scores := _logits_with_penalty_and_bans(row.sampling_state, logits[place], before, step)) is not None:
                changed.append((len(places) - 1, scores))
        start += row.num_logits
    if not places:
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    chosen = logits if len(places) == len(logits) else logits[_upload_indices(places, logits.device)]
    if changed:
        chosen = chosen.index_copy(
            0,
            _upload_indices([place for place, _ in changed], logits.device),
            torch.stack([scores for _, scores in changed]),
        )
    return sample_by_uniform_numbers(chosen, settings, numbers)


def _upload_indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy indices to the device, int64 [n]."""
    return devices.copy_arrays_to_device([np.array(numbers, np.int64)], device)[0]


def _logits_with_penalty_and_bans(
    sampling_state: SamplingState, logits: Tensor, before: Sequence[int], step: int
) -> Tensor | None:
    """Return the logits [v] after penalties and banned successors, or None if these change nothing. before: the row's ids
    up to this position, of which the last `step` are not in `seen` and `generated` of the state.
    """
    banned = [then for first, then in sampling_state.after if before[-1] == first]
    sampling, latest = sampling_state.sampling, before[len(before) - step :]
    if not banned and not sampling.depends_on_ids:
        return None
    if sampling.repetition_penalty != 1.0:
        seen = sorted({*sampling_state.seen, *latest})
        logits = apply_repetition_penalty(logits, _upload_indices(seen, logits.device), sampling.repetition_penalty)
    if sampling.penalizes_generated:
        counts = Counter((*sampling_state.generated, *latest))
        logits = apply_presence_and_frequency_penalty(
            logits,
            _upload_indices([*counts], logits.device),
            _upload_indices([*counts.values()], logits.device),
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )
    return logits.index_fill(0, _upload_indices(banned, logits.device), float("-inf"))


def _merge_targets_and_sampled(rows: Sequence[SequenceInput], tokens: Tensor) -> Tensor:
    """Return the ids [w] at all positions with logits: given targets, and between them the sampled tokens [n]."""
    if not any(row.targets for row in rows):
        return tokens
    known = [token for row in rows for token in (*row.targets, *[-1] * row.num_sampled)]
    sampled = [place for place, token in enumerate(known) if token < 0]
    ids = _upload_indices(known, tokens.device).clone()
    return ids.index_copy_(0, _upload_indices(sampled, tokens.device), tokens)


def _logprobs_of(
    rows: Sequence[SequenceInput], logits: Tensor, tokens: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return log-probabilities of the tokens at all positions of the rows that are scored, [w'], and (ids,
    log-probabilities) of the likeliest there, [w', top] each, or None if no row wants them. logits: [w, v]; tokens: [n]
    sampled.
    """
    ids = _merge_targets_and_sampled(rows, tokens)
    pieces, start = list[tuple[Tensor, Tensor]](), 0
    for (is_scored, temperature), group in itertools.groupby(rows, lambda row: (row.scored, row.temperature)):
        mine = slice(start, start + sum(row.num_logits for row in group))
        start = mine.stop
        if is_scored:
            pieces.append((logits[mine] if temperature == 1.0 else logits[mine] / temperature, ids[mine]))
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scores = torch.cat([scaled for scaled, _ in pieces]).log_softmax(dim=-1, dtype=wide)
    scored_ids = torch.cat([own for _, own in pieces]).clamp(min=0)  # -1: no numbers, and nobody reads its score
    most = min(max(row.top for row in rows), scores.shape[1])
    best = scores.topk(most, dim=-1) if most else None
    return scores.gather(1, scored_ids[:, None])[:, 0], None if best is None else (best.indices, best.values)
