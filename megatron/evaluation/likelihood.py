"""What a language model says of ids: how likely continuations are, and how it continues; under any layout.

    requests -> inputs that differ -> batches by length -> data ranks share them, stages pass them on -> the same on all ranks

An answer does not depend on the batch it was found in: rows are filled up at their ends, which a causal network does not
see. All ranks are asked the same, and all get every answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.core.config.plan.layers import stage_rank_and_chunk
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.inference.forward_passes import run_forward_pipeline
from megatron.inference.sampling import SamplingParams, draw_tokens
from megatron.training.checkpoint.inference_model import InferenceModel

Ids = tuple[int, ...]
Batch = Sequence[Ids]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EvaluationBatchLimits:
    """At most `rows` inputs together, and at most `tokens` ids, padding included; a single input may be longer."""

    rows: int
    tokens: int | None = None

    def split_into_batches(self, items: Iterable[T], ids_of: Callable[[T], Ids]) -> list[list[T]]:
        """Split items into batches, those with the longest ids first."""
        batches: list[list[T]] = []
        for item in sorted(items, key=lambda item: (-len(ids_of(item)), ids_of(item))):
            full = (
                not batches
                or len(batches[-1]) == self.rows
                or (self.tokens is not None and (len(batches[-1]) + 1) * len(ids_of(batches[-1][0])) > self.tokens)
            )
            if full:
                batches.append([])
            batches[-1].append(item)
        return batches


@dataclass(frozen=True, slots=True)
class LoglikelihoodRequest:
    """A request for the likelihood of `continuation` after `context`; at least one id each."""

    context: Ids
    continuation: Ids


@dataclass(frozen=True, slots=True)
class ContinuationLikelihood:
    """loglikelihood: sum of log-probabilities (nats). greedy: whether every token is the likeliest."""

    loglikelihood: float
    greedy: bool


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    """A prompt to continue. ids: at least one; with `num_tokens` they must fit the network's positions.
    num_tokens: most new tokens. ended: called with the new ids after each; true ends the text. seed: of this prompt's
    draws, whatever else is in its batch.
    """

    ids: Ids
    num_tokens: int
    ended: Callable[[list[int]], bool]
    sampling: SamplingParams = SamplingParams(0.0)
    seed: int = 0


def continuation_loglikelihoods(
    stages: Sequence[GPTModel],
    requests: Sequence[LoglikelihoodRequest],
    *,
    max_length: int,
    size: EvaluationBatchLimits,
) -> list[ContinuationLikelihood]:
    """Return the likelihood of each request's continuation, in order; the same on all ranks. Collective.

    stages: this rank's, in evaluation mode. An input longer than `max_length` loses its first ids.
    """
    inputs = [(request.context + request.continuation)[-(max_length + 1) :][:-1] for request in requests]
    for ids, request in zip(inputs, requests, strict=True):
        assert 0 < len(request.continuation) <= len(ids), "a continuation has ids, and fits into the input"

    def score_batch_continuations(
        numbers: Sequence[int], rows: Sequence[int], logits: Tensor
    ) -> list[ContinuationLikelihood]:
        continuations = [requests[number].continuation for number in numbers]
        return _score_continuations(stages, logits, rows, [inputs[number] for number in numbers], continuations)

    return score_inputs(stages, inputs, score_batch_continuations, size=size, title="loglikelihoods")


def score_inputs(
    stages: Sequence[GPTModel],
    inputs: Sequence[Ids],
    score: Callable[[Sequence[int], Sequence[int], Tensor], Sequence[Any]],
    *,
    size: EvaluationBatchLimits,
    title: str | None = None,
) -> list[Any]:
    """Run inputs through the network, equal ones once, and return the score of each; the same on all ranks. Collective.

    score: called on the last stage with the numbers of inputs, their rows of a batch, and its logits [s, b, v/tp] (of a
    reward model: scores [b, s]); returns a score for each number. title: of a progress bar.
    """
    numbers_of: dict[Ids, list[int]] = {}
    for number, ids in enumerate(inputs):
        numbers_of.setdefault(ids, []).append(number)
    mesh, results = stages[0].build.mesh, dict[int, Any]()
    batches = size.split_into_batches(numbers_of, lambda ids: ids)
    mine = batches[mesh.dp.rank :: mesh.dp.size] if mesh.ep.size == 1 else _equalize_batch_rounds(batches, mesh.dp)

    def store_scores(microbatch: int, output: Tensor) -> None:
        numbers = [number for ids in mine[microbatch] for number in numbers_of[ids]]
        rows = [row for row, ids in enumerate(mine[microbatch]) for _ in numbers_of[ids]]
        results.update(zip(numbers, score(numbers, rows, output), strict=True))

    with _tqdm_on_first_rank(stages, mine, title) as bar:
        forward_batches(stages, mine, store_scores, bar)
    gathered = gather_results_by_number(stages, results)
    return [gathered[number] for number in range(len(inputs))]


def _equalize_batch_rounds(batches: Sequence[Batch], axis: Axis) -> list[Batch]:
    """Return this rank's batches when ranks share experts: all get equally many, of equal rows and lengths in a round.

    What is missing is filled with the round's longest input.
    """
    mine: list[Batch] = []
    for start in range(0, len(batches), axis.size):
        together = batches[start : start + axis.size]
        rows, longest = max(map(len, together)) + 1, together[0][0]
        local = together[axis.rank] if axis.rank < len(together) else ()
        mine.append([longest] * (rows - len(local)) + list(local))
    return mine


def _score_continuations(
    stages: Sequence[GPTModel], logits: Tensor, rows: Sequence[int], inputs: Sequence[Ids], continuations: Sequence[Ids]
) -> list[ContinuationLikelihood]:
    """Return the likelihood of each continuation from a batch's logits.

    logits: [s, b, v/tp], padded columns included. rows: each request's row of the batch.
    """
    columns = [row for row, ids in zip(rows, continuations, strict=True) for _ in ids]
    places = [
        place
        for ids, continuation in zip(inputs, continuations, strict=True)
        for place in range(len(ids) - len(continuation), len(ids))
    ]
    targets = torch.tensor([token for ids in continuations for token in ids], device=logits.device)
    chosen = logits[torch.tensor(places, device=logits.device), torch.tensor(columns, device=logits.device)]
    axis, true_size = stages[0].build.mesh.tp, stages[0].build.model.true_vocab_size
    right = argmax_token_ids(chosen, axis, true_size) == targets
    losses = vocab_parallel_cross_entropy(chosen[:, None], targets[:, None], axis, true_size)[:, 0]
    lengths = [len(ids) for ids in continuations]
    return [
        ContinuationLikelihood(-float(loss.double().sum()), bool(hits.all()))
        for loss, hits in zip(losses.split(lengths), right.split(lengths))
    ]


def argmax_token_ids(logits: Tensor, axis: Axis, true_vocab_size: int) -> Tensor:
    """Return the id with the largest logit at each position; of equal ones the first. Collective over the tensor axis.

    logits: [..., v/tp], padded columns included. Returns int64 [...].
    """
    columns = logits.shape[-1]
    valid = true_vocab_size - axis.rank * columns
    if valid < columns:
        logits = logits.clone()
        logits[..., max(0, valid) :] = float("-inf")
    largest, place = logits.float().max(dim=-1)
    best = collectives.all_reduce(largest.clone(), axis, "max")
    nowhere = torch.full_like(place, torch.iinfo(torch.int64).max)
    mine = torch.where(largest == best, place + axis.rank * columns, nowhere)
    return -collectives.all_reduce(-mine, axis, "max")


def generate_without_kv_cache(
    loaded: InferenceModel, prompts: Sequence[GenerationPrompt], *, size: EvaluationBatchLimits
) -> list[list[int]]:
    """Return the new ids after each prompt, until it ends, has `num_tokens`, or an id that ends texts comes (included).

    The same on all ranks. Collective. Every step computes the whole text anew, without a KV cache.
    """
    axis, texts = loaded.mesh.dp, dict[int, Any]()
    mine = size.split_into_batches(range(len(prompts)), lambda number: prompts[number].ids)[axis.rank :: axis.size]
    for batch in _tqdm_on_first_rank(loaded.stages, mine, "continuations"):
        texts.update(zip(batch, _generate_batch(loaded, [prompts[number] for number in batch])))
    gathered = gather_results_by_number(loaded.stages, texts)
    return [gathered[number] for number in range(len(prompts))]


def _generate_batch(loaded: InferenceModel, prompts: Sequence[GenerationPrompt]) -> list[list[int]]:
    """The new ids of one batch; the same on every stage and tensor rank."""
    new: list[list[int]] = [[] for _ in prompts]
    draws = [torch.Generator(loaded.mesh.device).manual_seed(prompt.seed) for prompt in prompts]
    active, axis = list(range(len(prompts))), loaded.mesh.pp
    last_rank, _ = stage_rank_and_chunk(axis.size * len(loaded.stages) - 1, axis.size, loaded.stages[0].stage.placement)
    ends = (loaded.tokenizer.eod, *loaded.tokenizer.end_ids)
    while active := [row for row in active if not _continuation_has_ended(prompts[row], new[row], ends)]:
        texts = [prompts[row].ids + tuple(new[row]) for row in active]
        tokens = torch.zeros(len(active), dtype=torch.int64, device=loaded.mesh.device)

        def draw_next_tokens(_: int, logits: Tensor) -> None:
            places = torch.tensor([len(text) - 1 for text in texts], device=logits.device)
            last = _gather_logits(loaded, logits[places, torch.arange(len(texts), device=logits.device)])
            for place, row in enumerate(active):
                tokens[place] = draw_tokens(last[place : place + 1], prompts[row].sampling, draws[row])[0]

        forward_batches(loaded.stages, [texts], draw_next_tokens)
        collectives.broadcast(tokens, axis, last_rank)
        for row, token in zip(active, tokens.tolist()):
            new[row].append(token)
    return new


def _continuation_has_ended(prompt: GenerationPrompt, new: list[int], ends: Collection[int]) -> bool:
    """Return whether a prompt has all its new tokens, or is ended, as by one of the ids `ends`."""
    return len(new) == prompt.num_tokens or bool(new) and (new[-1] in ends or prompt.ended(new))


def _gather_logits(loaded: InferenceModel, logits: Tensor) -> Tensor:
    """All-gather logits [b, v/tp] to [b, v] without padding, in fp32 (fp64 for fp64), on every tensor rank."""
    whole = collectives.all_gather(logits.t().contiguous(), loaded.mesh.tp).t()[
        :, : loaded.config.model.true_vocab_size
    ]
    return whole if whole.dtype == torch.float64 else whole.float()


def forward_batches(
    stages: Sequence[GPTModel], batches: Sequence[Batch], keep: Callable[[int, Tensor], None], bar: tqdm | None = None
) -> None:
    """Run all batches through all pipeline stages. Collective.

    batches: lists of ids, the longest first, padded to its length. keep: called on the last stage with the number of a
    batch and its logits [s, b, v/tp] (of a reward model: scores [b, s]). bar: advanced for each batch.
    """
    pieces = stages[0].build.tp_region.whole_sequence_length(1)  # that sequence parallelism divides a length into
    lengths = [-(-len(batch[0]) // pieces) * pieces for batch in batches]

    def run_stage(chunk: GPTModel, microbatch: int, hidden: Tensor | None) -> Any:
        rows = [ids + (0,) * (lengths[microbatch] - len(ids)) for ids in batches[microbatch]]
        output = chunk(ids=torch.tensor(rows, device=chunk.build.mesh.device), hidden=hidden)
        if bar is not None and chunk is stages[0]:
            bar.update()
        if chunk.stage.has_output:
            keep(microbatch, output)
        return output

    if batches:
        run_forward_pipeline(stages, [(len(batch), length) for batch, length in zip(batches, lengths)], run_stage)


def _tqdm_on_first_rank(stages: Sequence[GPTModel], batches: Sequence[Any], title: str | None) -> tqdm:
    """Return a progress bar over batches, shown on the first rank and on terminals only, if it has a title."""
    visible = title is not None and stages[0].build.mesh.world.is_first
    return tqdm(batches, desc=title, disable=None if visible else True)


def gather_results_by_number(stages: Sequence[GPTModel], local: dict[int, Any]) -> dict[int, Any]:
    """Return all replicas' results by number, on all ranks. local: of the last stage's first tensor rank."""
    mesh = stages[0].build.mesh
    speaks = stages[-1].stage.has_output and mesh.tp.is_first
    everyone = collectives.gather_objects(local if speaks else {}, mesh.world)
    return {number: answer for theirs in everyone for number, answer in theirs.items()}
