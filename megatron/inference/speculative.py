"""Speculative decoding: a small draft network, or the network's own layers of multi-token prediction, propose the next tokens,
and the network verifies all proposals in one pass.

A proposal is accepted only where it is the token that the large network samples itself, with the same random number: outputs are the
same with a draft and without, for every setting, and only the number of passes differs. (Leviathan et al., 2023, accept by
rejection sampling instead, which needs the draft's distribution and changes which tokens a seed gives.) The draft samples with the
same random numbers, which makes its proposals likely to agree.

Both networks use the same block table of a sequence, each in a KV cache of its own. So does each depth of multi-token prediction;
the hidden states of the network that it reads are stored beside.

    known          t0 t1 t2 t3           the network has processed t0 to t2, and sampled t3
    depth 1        t1 t2 t3 > g1         the state of t2 and the vector of t3: what comes after t3
    depth 2        t2 t3 g1 > g2         its last key is that of a proposal, and is recomputed when the token is known
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.inference.model_runner import ModelRunner
from megatron.inference.sequence import SequenceState
from megatron.inference.step_input import SequenceInput, StepInput

_DRAFT = 1  # index of the draft among the runner's networks

Shares = Sequence[tuple[SequenceState, int]]


class DraftNetwork:
    """Proposes up to `most` tokens with the second network of a runner. after: banned (id, next id) pairs."""

    def __init__(self, runner: ModelRunner, most: int, after: Sequence[tuple[int, int]]) -> None:
        self._runner, self._most, self._after = runner, most, after

    def set_draft_tokens(self, chosen: Sequence[Shares]) -> int:
        """Set `drafts` of each sequence that decodes in the next step, and prefill the draft's cache for the others;
        return the number of proposals.
        """
        guesses: dict[int, list[int]] = {one.ticket: [] for shares in chosen for one, _ in shares}
        self._draft_pass(chosen, guesses, self._unprocessed_tokens_input)
        for step in range(1, self._most):
            going = [[(one, count) for one, count in shares if one.max_drafts(self._most) > step] for shares in chosen]
            if not any(going):
                break
            self._draft_pass(going, guesses, self._last_proposal_input)
        for shares in chosen:
            for one, _ in shares:
                one.drafts = tuple(guesses[one.ticket])
        return sum(map(len, guesses.values()))

    def _draft_pass(
        self,
        chosen: Sequence[Shares],
        guesses: dict[int, list[int]],
        make: Callable[[SequenceState, int, list[int]], SequenceInput],
    ) -> None:
        """Run the draft over a row of each sequence, made by `make`; append its proposals to `guesses`."""
        rows = [[(one, make(one, count, guesses[one.ticket])) for one, count in shares] for shares in chosen]
        _run_draft_step(self._runner, rows, guesses, network=_DRAFT)

    def _unprocessed_tokens_input(self, one: SequenceState, count: int, _: list[int]) -> SequenceInput:
        """Build the input of the tokens that the network will have processed, and the draft has not."""
        end = one.computed + count
        row = SequenceInput(tuple(one.ids[one.drafted : end]), one.drafted, tuple(one.blocks))
        one.drafted = end
        return _with_sampling(row, one, self._after) if one.max_drafts(self._most) else row

    def _last_proposal_input(self, one: SequenceState, _: int, guessed: list[int]) -> SequenceInput:
        """Build the draft's input of its last proposal, to propose the next."""
        row = SequenceInput((guessed[-1],), len(one.ids) + len(guessed) - 1, tuple(one.blocks))
        one.drafted = row.start + 1
        return _with_sampling(row, one, self._after, guessed)


class MTPDraft:
    """Proposes tokens with the network's MTP layers: depth k the k-th of at most `most` tokens."""

    def __init__(self, runner: ModelRunner, most: int, after: Sequence[tuple[int, int]]) -> None:
        self._runner, self._most, self._after = runner, most, after

    def set_draft_tokens(self, chosen: Sequence[Shares]) -> int:
        """Let each depth process what the network has processed, and set `drafts` of each sequence that decodes in the
        next step; return the number of proposals.
        """
        guesses: dict[int, list[int]] = {one.ticket: [] for shares in chosen for one, _ in shares}
        for depth in range(1, self._most + 1):
            rows = [
                [(one, row) for one, _ in shares if (row := self._depth_input(one, depth, guesses[one.ticket])).ids]
                for shares in chosen
            ]
            if any(rows):
                _run_draft_step(self._runner, rows, guesses, depth=depth)
        for shares in chosen:
            for one, _ in shares:
                one.drafted, one.drafts = one.computed, tuple(guesses[one.ticket])
        return sum(map(len, guesses.values()))

    def _depth_input(self, one: SequenceState, depth: int, guessed: Sequence[int]) -> SequenceInput:
        """Build the input of depth `depth`: ids shifted ahead by `depth`, at positions that it has not computed, or
        computed with a draft token; sampling if the sequence gets its proposal. guessed: of the depths before.
        """
        known = len(one.ids) + len(guessed)
        start, end = max(0, one.drafted - depth + 1), min(one.computed, known - depth)
        ids = tuple(one.ids[start + depth : end + depth]) + tuple(guessed)
        row = SequenceInput(ids[: max(0, end - start)], start, tuple(one.blocks))
        return row if one.max_drafts(self._most) < depth else _with_sampling(row, one, self._after, guessed)


def _run_draft_step(
    runner: ModelRunner,
    rows: Sequence[Sequence[tuple[SequenceState, SequenceInput]]],
    guesses: dict[int, list[int]],
    *,
    network: int = 0,
    depth: int = 0,
) -> None:
    """Run a pass over a row of each sequence, by data-parallel replica; append its proposals to `guesses`, by ticket."""
    step = StepInput(network, tuple(tuple(row for _, row in replica) for replica in rows), depth)
    for replica, outputs in zip(rows, runner.launch(step).collect(), strict=True):
        for (one, _), output in zip(replica, outputs, strict=True):
            # Logits that are not finite give -1; any id will do.
            guesses[one.ticket] += [max(0, token) for token in output.ids]


def _with_sampling(
    row: SequenceInput, one: SequenceState, after: Sequence[tuple[int, int]], guessed: Sequence[int] = ()
) -> SequenceInput:
    """Return a row that also samples the token after its last, which follows the proposals `guessed`."""
    state = one.sampling_state(after)
    state = replace(
        state,
        first=state.first + len(guessed),
        seen=(*state.seen, *guessed) if state.seen else (),
        generated=(*state.generated, *guessed) if state.sampling.penalizes_generated else (),
    )
    return replace(row, num_logits=1, sampling_state=state)
