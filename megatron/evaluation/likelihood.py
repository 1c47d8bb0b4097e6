"""What a language model says of ids: how likely continuations are, and how it continues; under any layout.

    requests -> inputs that differ -> batches by length -> data ranks share them, stages pass them on -> the same on all ranks

An answer does not depend on the batch it was found in: rows are filled up at their ends, which a causal network does not
see. All ranks are asked the same, and all get every answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.core.config.settings.run import RunConfig
from megatron.core.config.stages import stages_of
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.pipeline_parallel.executor import Shape, run
from megatron.core.pipeline_parallel.schedules import forward_only
from megatron.core.pipeline_parallel.transfers import rank_script
from megatron.core.tensor_parallel.loss import cross_entropy
from megatron.inference.sampling import Sampling, draw
from megatron.training.checkpoint.inference_model import InferenceModel

Ids = tuple[int, ...]
Batch = Sequence[Ids]


class Network(Protocol):
    """What log-likelihoods are asked of: this rank's stages, in evaluation mode. `InferenceModel` is one."""

    @property
    def config(self) -> RunConfig:
        """Its sizes and its layout."""

    @property
    def mesh(self) -> Mesh:
        """Its ranks."""

    @property
    def stages(self) -> Sequence[GPTModel]:
        """Those of this rank, in order."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """At most `rows` inputs together, and at most `tokens` ids, padding included; a single input may be longer."""

    rows: int
    tokens: int | None = None

    def split_into_batches(self, inputs: Sequence[Ids]) -> list[Batch]:
        """Inputs in batches, the longest first."""
        batches: list[list[Ids]] = []
        for ids in sorted(inputs, key=lambda ids: (-len(ids), ids)):
            full = (
                not batches
                or len(batches[-1]) == self.rows
                or (self.tokens is not None and (len(batches[-1]) + 1) * len(batches[-1][0]) > self.tokens)
            )
            if full:
                batches.append([])
            batches[-1].append(ids)
        return list(batches)


@dataclass(frozen=True, slots=True)
class Request:
    """How likely is `continuation` after `context`? Ids, at least one each."""

    context: Ids
    continuation: Ids


@dataclass(frozen=True, slots=True)
class Answer:
    """loglikelihood: sum of the log-probabilities (nats). greedy: whether each token is the likeliest at its place."""

    loglikelihood: float
    greedy: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids: at least one, `num_tokens` fewer than the network has positions. ended: asked of the new ids after each of them.

    seed: of this prompt's draws, whatever else is in its batch.
    """

    ids: Ids
    num_tokens: int
    ended: Callable[[list[int]], bool]
    sampling: Sampling = Sampling(0.0)
    seed: int = 0


def loglikelihoods(loaded: Network, requests: Sequence[Request], *, max_length: int, size: BatchSize) -> list[Answer]:
    """Answers in the order of the requests. What is longer than `max_length` inputs loses its first ids.

    Requests with equal inputs, as answers of a multiple choice that differ in their last id, are computed once.
    """
    inputs = [(request.context + request.continuation)[-(max_length + 1) :][:-1] for request in requests]
    numbers_of: dict[Ids, list[int]] = {}
    for number, ids in enumerate(inputs):
        assert 0 < len(requests[number].continuation) <= len(ids), "a continuation has ids, and fits into the input"
        numbers_of.setdefault(ids, []).append(number)
    axis = loaded.mesh.dp
    results: dict[int, Any] = {}
    batches = size.split_into_batches(list(numbers_of))
    mine = (
        batches[axis.rank :: axis.size]
        if loaded.config.parallel.expert_model_parallel_size == 1
        else _pad_batch_rounds(batches, axis)
    )

    def keep(microbatch: int, logits: Tensor) -> None:
        batch = mine[microbatch]
        numbers = [number for ids in batch for number in numbers_of[ids]]
        rows = [row for row, ids in enumerate(batch) for _ in numbers_of[ids]]
        results.update(
            zip(
                numbers,
                _score_continuations(
                    loaded, logits, rows, [inputs[n] for n in numbers], [requests[n].continuation for n in numbers]
                ),
            )
        )

    with _progress_bar(loaded, mine, "loglikelihoods") as bar:
        forward_batches(loaded, mine, keep, bar)
    gathered = gather_answers(loaded, results)
    return [gathered[number] for number in range(len(requests))]


def _pad_batch_rounds(batches: Sequence[Batch], axis: Axis) -> list[Batch]:
    """This rank's batches where ranks share experts: all have equally many, and each round the same rows and length.

    What is missing is filled with the round's longest input, whose answer then comes more than once.
    """
    mine: list[Batch] = []
    for start in range(0, len(batches), axis.size):
        together = batches[start : start + axis.size]
        rows, longest = max(map(len, together)) + 1, together[0][0]
        local = together[axis.rank] if axis.rank < len(together) else ()
        mine.append([longest] * (rows - len(local)) + list(local))
    return mine


def _score_continuations(
    loaded: Network, logits: Tensor, rows: Sequence[int], inputs: Sequence[Ids], continuations: Sequence[Ids]
) -> list[Answer]:
    """logits: [s, b, v/tp], padded columns included; rows: each request's row of the batch. Only asked places are looked at."""
    columns = [row for row, ids in zip(rows, continuations, strict=True) for _ in ids]
    places = [
        place
        for ids, continuation in zip(inputs, continuations, strict=True)
        for place in range(len(ids) - len(continuation), len(ids))
    ]
    targets = torch.tensor([token for ids in continuations for token in ids], device=logits.device)
    chosen = logits[torch.tensor(places, device=logits.device), torch.tensor(columns, device=logits.device)]
    axis, true_size = loaded.mesh.tp, loaded.config.model.true_vocab_size
    right = argmax_ids(chosen, axis, true_size) == targets
    losses = cross_entropy(chosen[:, None], targets[:, None], axis, true_size)[:, 0]
    lengths = [len(ids) for ids in continuations]
    return [
        Answer(-float(loss.double().sum()), bool(hits.all()))
        for loss, hits in zip(losses.split(lengths), right.split(lengths))
    ]


def argmax_ids(logits: Tensor, axis: Axis, true_vocab_size: int) -> Tensor:
    """The id with the largest logit at each place; the first, where several are equal.

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


def generate_continuations(loaded: InferenceModel, prompts: Sequence[Prompt], *, size: BatchSize) -> list[list[int]]:
    """New ids after each prompt, until it is ended or has its number of them; the end of document is the last, if it comes.

    Every step computes the whole of each text anew.
    """
    numbers: dict[Ids, list[int]] = {}
    for number, prompt in enumerate(prompts):
        numbers.setdefault(prompt.ids, []).append(number)
    axis = loaded.mesh.dp
    texts: dict[int, Any] = {}
    batches = size.split_into_batches([prompt.ids for prompt in prompts])
    places = [[numbers[ids].pop(0) for ids in batch] for batch in batches]
    mine = places[axis.rank :: axis.size]
    for batch in _progress_bar(loaded, mine, "continuations"):
        texts.update(zip(batch, _generate_batch(loaded, [prompts[number] for number in batch])))
    gathered = gather_answers(loaded, texts)
    return [gathered[number] for number in range(len(prompts))]


def _generate_batch(loaded: InferenceModel, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The new ids of one batch; the same on every stage and tensor rank."""
    new: list[list[int]] = [[] for _ in prompts]
    draws = [torch.Generator(loaded.mesh.device).manual_seed(prompt.seed) for prompt in prompts]
    active = list(range(len(prompts)))
    while active := [row for row in active if not _is_over(prompts[row], new[row], loaded.tokenizer.eod)]:
        texts = [prompts[row].ids + tuple(new[row]) for row in active]
        tokens = torch.zeros(len(active), dtype=torch.int64, device=loaded.mesh.device)

        def keep(_: int, logits: Tensor) -> None:
            places = torch.tensor([len(text) - 1 for text in texts], device=logits.device)
            last = _gather_logits(loaded, logits[places, torch.arange(len(texts), device=logits.device)])
            for place, row in enumerate(active):
                tokens[place] = draw(last[place : place + 1], prompts[row].sampling, draws[row])[0]

        forward_batches(loaded, [texts], keep)
        collectives.broadcast(tokens, loaded.mesh.pp, stages_of(loaded.config)[-1].rank)
        for row, token in zip(active, tokens.tolist()):
            new[row].append(token)
    return new


def _is_over(prompt: Prompt, new: list[int], eod: int) -> bool:
    return len(new) == prompt.num_tokens or bool(new) and (new[-1] == eod or prompt.ended(new))


def _gather_logits(loaded: InferenceModel, logits: Tensor) -> Tensor:
    """logits: [b, v/tp]. Returns [b, v] without padding, in fp32 (fp64 for fp64), the same on every tensor rank."""
    whole = collectives.all_gather(logits.t().contiguous(), loaded.mesh.tp).t()[
        :, : loaded.config.model.true_vocab_size
    ]
    return whole if whole.dtype == torch.float64 else whole.float()


@dataclass(slots=True)
class _Pass:
    """The executor's view of a forward pass over batches. keep: takes the number of a batch and its logits, on the last stage."""

    loaded: Network
    batches: Sequence[Batch]
    keep: Callable[[int, Tensor], None]
    bar: tqdm | None = None

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.loaded.mesh.device

    def input_specs(self, stage: int, microbatch: int) -> tuple[Shape, ...]:
        """The message of the stage before."""
        batch = self.batches[microbatch]
        chunk = self.loaded.stages[stage // self.loaded.mesh.pp.size]
        return (chunk.message_shape(len(batch), self._padded_length(batch)),) * chunk.num_received_states

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One stage on one batch; rows are filled up to the length of the first, the longest."""
        chunk, batch = self.loaded.stages[stage // self.loaded.mesh.pp.size], self.batches[microbatch]
        ids = torch.tensor([ids + (0,) * (self._padded_length(batch) - len(ids)) for ids in batch], device=self.device)
        output = chunk(ids=ids, hidden=received[0] if received else None)
        if self.bar is not None and chunk is self.loaded.stages[0]:
            self.bar.update()
        if not chunk.stage.has_output:
            return (output,)
        self.keep(microbatch, output)
        return ()

    def _padded_length(self, batch: Batch) -> int:
        """Of the longest input, and such that tensor ranks can cut it where they do."""
        parallel = self.loaded.config.parallel
        piece = parallel.tp if parallel.sequence_parallel else 1
        return -(-len(batch[0]) // piece) * piece

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        """Never asked: the plan has no backward passes."""

    def reduce(self, stage: int) -> None:
        """Never asked."""


def forward_batches(
    loaded: Network, batches: Sequence[Batch], keep: Callable[[int, Tensor], None], bar: tqdm | None = None
) -> None:
    """Run all batches through all stages. keep: takes the number of a batch and its logits [s, b, v/tp] (or scores [b, s]), on the last stage.

    Inputs are lists of ids, the longest of a batch first.
    """
    axis = loaded.mesh.pp
    if batches:
        plan = rank_script(
            forward_only(axis.size, len(loaded.stages), len(batches), loaded.config.parallel.stage_placement), axis.rank
        )
        run(plan, work=_Pass(loaded, batches, keep, bar), axis=axis, backward_axis=loaded.mesh.pp_backward)


def _progress_bar(loaded: Network, batches: Sequence[Any], title: str) -> tqdm:
    """A progress bar over batches, on the first rank and on terminals only."""
    return tqdm(batches, desc=title, disable=None if loaded.mesh.world.is_first else True)


def gather_answers(loaded: Network, local: dict[int, Any]) -> dict[int, Any]:
    """What the ranks found, of all data ranks, on all ranks."""
    speaks = loaded.stages[-1].stage.has_output and loaded.mesh.tp.is_first
    everyone = collectives.gather_objects(local if speaks else {}, loaded.mesh.world)
    return {number: answer for theirs in everyone for number, answer in theirs.items()}
