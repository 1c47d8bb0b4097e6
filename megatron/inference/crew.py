"""One forward pass over new tokens of many texts, on all ranks that hold the network.

The ranks keep nothing of a text but its keys and values: each `Order` says all that a pass needs. So only the first rank knows
requests; the others wait for its orders.

    first rank   order -> everyone        stages pass messages on, the last picks tokens        -> first rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.config.plan import LayerPlan, layer_rows
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.executor import Shape, run
from megatron.core.pipeline_parallel.schedules import forward_only
from megatron.core.pipeline_parallel.transfers import Script, script
from megatron.core.transformer.build import Build
from megatron.inference.cache import Pool, Span, bytes_per_token, ordered, step_cache
from megatron.inference.graphs import Recordings
from megatron.inference.sampling import Sampling, penalized, pick, uniform


@dataclass(frozen=True, slots=True)
class Draws:
    """How a text's next tokens are picked. first: number of the first of them. seen: ids that count as repeated; after:
    (id, id) pairs of which the second does not follow the first.
    """

    sampling: Sampling
    seed: int
    first: int
    seen: tuple[int, ...] = ()
    after: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one text. blocks: where the text is stored. wanted: how many of the last places are asked what follows.

    targets: what does follow the first of those, to be scored; at the others a token is picked as `draws` says. scored:
    whether log-probabilities of what is picked are asked for, with the `top` likeliest of them.
    """

    ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    wanted: int = 0
    targets: tuple[int, ...] = ()
    draws: Draws | None = None
    scored: bool = False
    top: int = 0

    @property
    def span(self) -> Span:
        """What of it is stored where."""
        return Span(len(self.ids), self.start, self.blocks)


@dataclass(frozen=True, slots=True)
class Found:
    """What follows the wanted places of a row: ids (targets first), and log-probabilities if they were asked for."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """One pass of one network of the crew. rows: for each copy of the network (data rank) its own. depth: of multi-token prediction
    if that is to be run, whose ids stand so many places ahead of where the rows start; 0: the network itself.
    """

    network: int
    rows: tuple[tuple[Row, ...], ...]
    depth: int = 0


def stored(stages: Sequence[GPTModel], depths: int) -> tuple[tuple[LayerPlan, ...], int]:
    """(layers whose keys and values this rank stores, states of a token beside them), if so many depths guess."""
    plans, model = tuple(plan for stage in stages for plan in stage.stage.layers), stages[0].build.model
    if stages[-1].mtp is None:
        return plans, 0
    return plans + tuple(replace(layer_rows(model)[-1], index=model.num_layers + depth) for depth in range(depths)), depths


class Network:
    """This rank's stages of one network, and what they have stored.

    stages: in order, in evaluation mode. blocks: of the cache, block_size tokens each. depths: of multi-token prediction that guess.
    recordings: shapes of a step that are kept recorded, if it can be.
    """

    def __init__(self, stages: Sequence[GPTModel], *, blocks: int, block_size: int, depths: int = 0, recordings: int = 0) -> None:
        self.stages, self.block_size = tuple(stages), block_size
        build = stages[0].build
        self.build, self.mesh = build, build.mesh
        self.plans, states = stored(stages, depths)
        self.pool = Pool(build.model, self.plans, tensor_size=self.mesh.tp.size, slots=blocks * block_size, dtype=build.dtype,
                         device=self.mesh.device, states=states)
        self.bytes_per_token = bytes_per_token(build.model, self.plans, self.mesh.tp.size, build.dtype, states=states)
        self.recordings = Recordings(stages[0], self.pool, block_size=block_size, count=recordings) if recordings else None
        self._scripts: dict[int, Script] = {}

    def run(self, rows_of_all: Sequence[Sequence[Row]]) -> list[Found]:
        """Pass the rows of this rank's copy through the stages; what was found, on the first tensor rank of the last stage."""
        rows, axis = rows_of_all[self.mesh.dp.rank], self.mesh.pp
        if self.recordings is not None and rows and all(len(row.ids) == row.wanted == 1 for row in rows):
            return judged(rows, self.recordings.logits([row.ids[0] for row in rows], [row.span for row in rows]), self.build)
        parts = min(axis.size, max(map(len, rows_of_all)))  # so that stages need not wait for each other
        shared = [[copy[part::parts] for copy in rows_of_all] for part in range(parts)]
        work = _Work(self, [_Step(self, copies[self.mesh.dp.rank], self._length(copies)) for copies in shared])
        if parts not in self._scripts:
            self._scripts[parts] = script(forward_only(axis.size, len(self.stages), parts, self.stages[0].stage.placement), axis.rank)
        run(self._scripts[parts], work=work, axis=axis, backward_axis=self.mesh.pp_backward)
        found: list[Found] = [Found()] * len(rows)
        for part, step in enumerate(work.steps):
            found[part::parts] = step.found
        return found

    def look(self, rows_of_all: Sequence[Sequence[Row]], depth: int) -> list[Found]:
        """Pass the rows of this rank's copy through one depth of multi-token prediction; what was found, as `run` says."""
        stage = self.stages[-1]
        if stage.mtp is None:
            assert not stage.stage.heads, "the stage that predicts has what predicts ahead"
            return []
        step = _Step(self, rows_of_all[self.mesh.dp.rank], self._length(rows_of_all), depth)
        _, logits = stage.look(depth, step.cache.states(), step.ids, step.positions, step.cache)
        if len(step.wanted):
            step.judge(self, logits)
        return step.found

    def _length(self, copies: Sequence[Sequence[Row]]) -> int:
        """Tokens of a pass, with what fills it: experts are shared by copies, which exchange as many tokens each."""
        together = copies if self.build.model.moe.num_experts else [copies[self.mesh.dp.rank]]
        longest = max(1, *(sum(len(row.ids) for row in rows) for rows in together))
        pieces = self.build.region.whole_length(1)
        return -(-longest // pieces) * pieces


class _Step:
    """One microbatch of a pass: its tokens in the order of the cache's groups, and what was found."""

    def __init__(self, network: Network, rows: Sequence[Row], length: int, depth: int = 0) -> None:
        spans = [row.span for row in rows]
        groups = ordered(spans)
        self.order = [number for group in groups for number in group]
        self.rows = [rows[number] for number in self.order]
        device = network.mesh.device
        ids = [token for row in self.rows for token in row.ids]
        places = [place for row in self.rows for place in range(row.start, row.start + len(row.ids))]
        wanted, end = [], 0
        for row in self.rows:
            end += len(row.ids)
            wanted += range(end - row.wanted, end)
        filling = [0] * (length - end)
        self.length = length
        self.wanted = torch.tensor(wanted, dtype=torch.int64, device=device)
        self._cut = network.build.region.sequence_parallel  # ranks hold pieces of the tokens: what is wanted is chosen at the end
        self.ids = torch.tensor([ids + filling], device=device)
        self.positions = torch.tensor([places + filling], device=device)
        self.cache = step_cache(network.pool, [[spans[number] for number in group] for group in groups], block_size=network.block_size,
                                wanted=None if self._cut else self.wanted, total=length, depth=depth)
        self.found: list[Found] = [Found()] * len(rows)

    def judge(self, network: Network, logits: Tensor) -> None:
        """logits: [w, 1, v/tp] of the wanted places, or [t, 1, v/tp] of all."""
        for number, found in zip(self.order, judged(self.rows, logits[self.wanted] if self._cut else logits, network.build)):
            self.found[number] = found


def judged(rows: Sequence[Row], logits: Tensor, build: Build) -> list[Found]:
    """What follows the wanted places of each row, on the first tensor rank; nothing on others. logits: [w, 1, v/tp]."""
    axis, size = build.mesh.tp, build.model.true_vocab_size
    whole = collectives.all_gather(logits[:, 0][None], axis).movedim(0, 1).flatten(1)[:, :size]
    if not axis.is_first:
        return []
    found, start = [], 0
    for row, picked in zip(rows, _picked(rows, whole if whole.dtype == torch.float64 else whole.float()), strict=True):
        found.append(_report(row, picked, whole[start:start + row.wanted] if row.scored else None))
        start += row.wanted
    return found


def _picked(rows: Sequence[Row], logits: Tensor) -> list[tuple[int, ...]]:
    """What follows each row's wanted places. logits: [w, v], row by row."""
    settings: list[Sampling] = []
    numbers: list[float] = []
    places: list[int] = []
    changed: list[tuple[int, Tensor]] = []
    start = 0
    for row in rows:
        first = start + len(row.targets)
        for place in range(first, start + row.wanted):
            assert row.draws is not None, "a row that picks tokens says how"
            step = place - first
            settings.append(row.draws.sampling.at(row.draws.first + step))
            numbers.append(0.0 if settings[-1].is_greedy else uniform(row.draws.seed, row.draws.first + step))
            places.append(place)
            before = row.ids[:len(row.ids) - row.wanted + len(row.targets) + step + 1]
            if (scores := _adjusted(row.draws, logits[place], before, step)) is not None:
                changed.append((len(places) - 1, scores))
        start += row.wanted
    if places:
        chosen = logits if len(places) == len(logits) else logits[torch.tensor(places, device=logits.device)]
        if changed:
            chosen = chosen.index_copy(0, torch.tensor([place for place, _ in changed], device=logits.device),
                                       torch.stack([scores for _, scores in changed]))
        tokens = iter(pick(chosen, settings, numbers).tolist())
    return [(*row.targets, *(next(tokens) for _ in range(row.wanted - len(row.targets)))) for row in rows]


def _adjusted(draws: Draws, logits: Tensor, before: Sequence[int], step: int) -> Tensor | None:
    """The logits [v] with what they depend on of the text; None where nothing changes. before: the row's ids up to this place,
    of which the last `step` are not among `draws.seen`.
    """
    banned = [then for first, then in draws.after if before[-1] == first]
    penalty = draws.sampling.repetition_penalty
    if not banned and penalty == 1.0:
        return None
    if penalty != 1.0:
        seen = sorted({*draws.seen, *before[len(before) - step:]})
        logits = penalized(logits, torch.tensor(seen, device=logits.device), penalty)
    return logits.index_fill(0, torch.tensor(banned, dtype=torch.int64, device=logits.device), float("-inf"))


def _report(row: Row, picked: tuple[int, ...], logits: Tensor | None) -> Found:
    """What was found for a row. logits: [wanted, v] when it is to be scored."""
    if logits is None or not picked or min(picked) < 0:
        return Found(picked)
    scores = logits.log_softmax(dim=-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    mine = scores.gather(1, torch.tensor(picked, device=scores.device)[:, None])[:, 0]
    best = scores.topk(min(row.top, scores.shape[1]), dim=-1)
    top = tuple(tuple(zip(ids, values)) for ids, values in zip(best.indices.tolist(), best.values.tolist())) if row.top else ()
    return Found(picked, tuple(mine.tolist()), top)


@dataclass(slots=True)
class _Work:
    """The executor's view of a pass."""

    network: Network
    steps: list[_Step]

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.network.mesh.device

    def receives(self, stage: int, microbatch: int) -> tuple[Shape, ...]:
        """The message of the stage before."""
        chunk = self.network.stages[stage // self.network.mesh.pp.size]
        return (chunk.message_shape(1, self.steps[microbatch].length),) * chunk.states

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One stage on one microbatch."""
        chunk, step = self.network.stages[stage // self.network.mesh.pp.size], self.steps[microbatch]
        output = chunk(ids=step.ids, hidden=received[0] if received else None, positions=step.positions, cache=step.cache)
        if not chunk.stage.heads:
            return output if isinstance(output, tuple) else (output,)
        if len(step.wanted):
            step.judge(self.network, output)
        return ()

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        """Never asked: the plan has no backward passes."""

    def reduce(self, stage: int) -> None:
        """Never asked."""


class Crew:
    """All ranks that decode together. networks: the one that is asked, and drafts if there are any."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self.networks = tuple(networks)
        self.mesh = networks[0].mesh
        # In inference mode an operation costs less, but what a network keeps of it, as tables of angles, is no good for training.
        trained = any(param.requires_grad for network in networks for stage in network.stages for param in stage.parameters())
        self._mode = torch.no_grad if trained else torch.inference_mode

    @property
    def leads(self) -> bool:
        """Whether this rank gives the orders."""
        return self.mesh.world.is_first

    def run(self, order: Order) -> list[list[Found]]:
        """On the first rank: have an order carried out; what was found for the rows of each copy."""
        assert self.leads, "the first rank gives the orders"
        collectives.broadcast_object(order, self.mesh.world)
        return self._carry_out(order)

    def follow(self) -> None:
        """On all other ranks: carry out orders until there are no more."""
        while (order := collectives.broadcast_object(None, self.mesh.world)) is not None:
            if order.rows:
                self._carry_out(order)

    def beat(self) -> None:
        """Show the other ranks that the first is still there, so that none gives up while nothing is asked."""
        collectives.broadcast_object(Order(0, ()), self.mesh.world)

    def dismiss(self) -> None:
        """No more orders come."""
        collectives.broadcast_object(None, self.mesh.world)

    def _carry_out(self, order: Order) -> list[list[Found]]:
        network = self.networks[order.network]
        with self._mode():
            found = network.look(order.rows, order.depth) if order.depth else network.run(order.rows)
        speaks = network.stages[-1].stage.heads and self.mesh.tp.is_first and self.mesh.cp.is_first
        everyone = collectives.gather_objects((self.mesh.dp.rank, found) if speaks else None, self.mesh.world)
        by_copy = dict(said for said in everyone if said is not None)
        return [by_copy[copy] for copy in range(len(order.rows))]
