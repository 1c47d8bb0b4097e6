"""Runs one forward pass over the new tokens of many sequences, on all ranks that hold the network.

Ranks keep no state of a sequence but its keys and values: each `StepInput` holds everything that a pass needs. So only the
first rank (the leader) knows requests; the others wait for its step inputs.

    leader   broadcasts a step input      pipeline stages send hidden states, the last samples tokens      -> leader
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.config.plan import LayerPlan, layer_rows
from megatron.core.families.adapter_set import AdapterSet
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.executor import Shape, run
from megatron.core.pipeline_parallel.schedules import forward_only
from megatron.core.pipeline_parallel.transfers import Script, script
from megatron.core.transformer.build import Build
from megatron.inference.adapters import AdapterBank
from megatron.inference.cache import KVCache, Span, bytes_per_token, ordered, step_cache
from megatron.inference.cuda_graphs import CapturedGraphs
from megatron.inference.sampling import Sampling, penalized, pick, uniform


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How the next tokens of a sequence are sampled.

    first: number of the first of them, which selects its random number. seen: ids that the repetition penalty applies to.
    after: (id, id) pairs of which the second is never sampled after the first.
    """

    sampling: Sampling
    seed: int
    first: int
    seen: tuple[int, ...] = ()
    after: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """New tokens of one sequence. start: position of the first of them. blocks: its block table in the KV cache.

    num_logits: for how many of the last positions logits are computed. targets: known next tokens at the first of these, to be
    scored; at the others a token is sampled as `sampling_state` says. scored: whether log-probabilities are returned, with
    those of the `top` likeliest tokens. temperature: divides the logits before these log-probabilities.
    adapter: number of the adapter of all of its tokens; 0: none.
    """

    ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    num_logits: int = 0
    targets: tuple[int, ...] = ()
    sampling_state: SamplingState | None = None
    scored: bool = False
    top: int = 0
    temperature: float = 1.0
    adapter: int = 0

    @property
    def span(self) -> Span:
        """Where its keys and values are in the cache."""
        return Span(len(self.ids), self.start, self.blocks)


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """Next tokens at the positions with logits of a sequence: ids (targets first), and log-probabilities if they were requested."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass of one network. network: its index in the runner. rows: of each data-parallel replica.

    depth: the depth of multi-token prediction to run, whose ids are so many positions ahead of where the rows start; 0: the network.
    """

    network: int
    rows: tuple[tuple[SequenceInput, ...], ...]
    depth: int = 0


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """An adapter that all ranks are to have under a number, or no longer."""

    number: int
    adapters: AdapterSet | None


def stored(stages: Sequence[GPTModel], depths: int) -> tuple[tuple[LayerPlan, ...], int]:
    """(layers whose keys and values this rank stores, hidden states stored per token), with so many depths of multi-token prediction."""
    plans, model = tuple(plan for stage in stages for plan in stage.stage.layers), stages[0].build.model
    if stages[-1].mtp is None:
        return plans, 0
    return plans + tuple(
        replace(layer_rows(model)[-1], index=model.num_layers + depth) for depth in range(depths)
    ), depths


class CachedNetwork:
    """This rank's stages of one network, and what they have stored.

    stages: in order, in evaluation mode. blocks: of the cache, block_size tokens each. depths: of multi-token prediction that guess.
    recordings: shapes of a step that are kept recorded, if it can be.
    """

    def __init__(
        self, stages: Sequence[GPTModel], *, blocks: int, block_size: int, depths: int = 0, captured_graphs: int = 0
    ) -> None:
        self.stages, self.block_size = tuple(stages), block_size
        build = stages[0].build
        self.build, self.mesh = build, build.mesh
        self.adapters = AdapterBank(stages)
        self.plans, states = stored(stages, depths)
        self.pool = KVCache(
            build.model,
            self.plans,
            tensor_size=self.mesh.tp.size,
            slots=blocks * block_size,
            dtype=build.dtype,
            device=self.mesh.device,
            states=states,
        )
        self.bytes_per_token = bytes_per_token(build.model, self.plans, self.mesh.tp.size, build.dtype, states=states)
        self.captured_graphs = (
            CapturedGraphs(stages[0], self.pool, block_size=block_size, count=captured_graphs)
            if captured_graphs
            else None
        )
        self._scripts: dict[int, Script] = {}

    def run(self, rows_of_all: Sequence[Sequence[SequenceInput]]) -> list[SequenceOutput]:
        """Run the rows of this rank's replica through the stages; outputs on the first tensor rank of the last stage, else none."""
        rows, axis = rows_of_all[self.mesh.dp.rank], self.mesh.pp
        if self.captured_graphs is not None and rows and all(_is_captured(row) for row in rows):
            return sample_outputs(
                rows, self.captured_graphs.logits([row.ids[0] for row in rows], [row.span for row in rows]), self.build
            )
        parts = min(axis.size, max(map(len, rows_of_all)))  # so that stages need not wait for each other
        shared = [[replica[part::parts] for replica in rows_of_all] for part in range(parts)]
        work = _Work(self, [_Step(self, replicas[self.mesh.dp.rank], self._length(replicas)) for replicas in shared])
        if parts not in self._scripts:
            self._scripts[parts] = script(
                forward_only(axis.size, len(self.stages), parts, self.stages[0].stage.placement), axis.rank
            )
        run(self._scripts[parts], work=work, axis=axis, backward_axis=self.mesh.pp_backward)
        outputs: list[SequenceOutput] = [SequenceOutput()] * len(rows)
        for part, step in enumerate(work.steps):
            outputs[part::parts] = step.outputs
        return outputs

    def look(self, rows_of_all: Sequence[Sequence[SequenceInput]], depth: int) -> list[SequenceOutput]:
        """Run the rows of this rank's replica through one depth of multi-token prediction; outputs as those of `run`."""
        stage = self.stages[-1]
        if stage.mtp is None:
            assert not stage.stage.has_output, "the stage that predicts has what predicts ahead"
            return []
        step = _Step(self, rows_of_all[self.mesh.dp.rank], self._length(rows_of_all), depth)
        self.adapters.choose(None)  # what is proposed is verified with them
        _, logits = stage.predict_depth(depth, step.cache.states(), step.ids, step.positions, step.cache)
        if len(step.logit_positions):
            step.sample(self, logits)
        return step.outputs

    def _length(self, replicas: Sequence[Sequence[SequenceInput]]) -> int:
        """Tokens of a pass with its padding. With experts all replicas pad to the same number, since they exchange tokens."""
        together = replicas if self.build.model.moe.num_experts else [replicas[self.mesh.dp.rank]]
        longest = max(1, *(sum(len(row.ids) for row in rows) for rows in together))
        pieces = self.build.region.whole_length(1)
        return -(-longest // pieces) * pieces


def _is_captured(row: SequenceInput) -> bool:
    """Whether a graph may compute this row: one token of the base, whose logits are asked for."""
    return len(row.ids) == row.num_logits == 1 and not row.adapter


class _Step:
    """One microbatch of a pass: its tokens in the order of the cache's groups, and its outputs."""

    def __init__(self, network: CachedNetwork, rows: Sequence[SequenceInput], length: int, depth: int = 0) -> None:
        spans = [row.span for row in rows]
        groups = ordered(spans)
        self.row_order = [number for group in groups for number in group]
        self.rows = [rows[number] for number in self.row_order]
        device = network.mesh.device
        ids = [token for row in self.rows for token in row.ids]
        places = [place for row in self.rows for place in range(row.start, row.start + len(row.ids))]
        logit_positions: list[int] = []
        end = 0
        for row in self.rows:
            end += len(row.ids)
            logit_positions += range(end - row.num_logits, end)
        filling = [0] * (length - end)
        self.adapters = sorted({row.adapter for row in self.rows})
        self.of_token = (
            torch.tensor([row.adapter for row in self.rows for _ in row.ids] + filling, device=device)
            if any(self.adapters)
            else None
        )
        self.length = length
        self.logit_positions = torch.tensor(logit_positions, dtype=torch.int64, device=device)
        self._cut = (
            network.build.region.sequence_parallel
        )  # ranks hold pieces of the tokens: the positions with logits are chosen at the end
        self.ids = torch.tensor([ids + filling], device=device)
        self.positions = torch.tensor([places + filling], device=device)
        self.cache = step_cache(
            network.pool,
            [[spans[number] for number in group] for group in groups],
            block_size=network.block_size,
            logit_positions=None if self._cut else self.logit_positions,
            total=length,
            depth=depth,
        )
        self.outputs: list[SequenceOutput] = [SequenceOutput()] * len(rows)

    def sample(self, network: CachedNetwork, logits: Tensor) -> None:
        """Sample the next tokens. logits: [w, 1, v/tp] of the positions with logits, or [t, 1, v/tp] of all."""
        for number, output in zip(
            self.row_order,
            sample_outputs(self.rows, logits[self.logit_positions] if self._cut else logits, network.build),
        ):
            self.outputs[number] = output


def sample_outputs(rows: Sequence[SequenceInput], logits: Tensor, build: Build) -> list[SequenceOutput]:
    """Next tokens at the positions with logits of each row, on the first tensor rank; [] on others. logits: [w, 1, v/tp]."""
    axis, size = build.mesh.tp, build.model.true_vocab_size
    whole = collectives.all_gather(logits[:, 0][None], axis).movedim(0, 1).flatten(1)[:, :size]
    if not axis.is_first:
        return []
    outputs, start = [], 0
    for row, picked in zip(
        rows, _sampled_ids(rows, whole if whole.dtype == torch.float64 else whole.float()), strict=True
    ):
        outputs.append(_output_of(row, picked, whole[start : start + row.num_logits] if row.scored else None))
        start += row.num_logits
    return outputs


def _sampled_ids(rows: Sequence[SequenceInput], logits: Tensor) -> list[tuple[int, ...]]:
    """Ids of the next tokens at each row's positions with logits. logits: [w, v], row by row."""
    settings: list[Sampling] = []
    numbers: list[float] = []
    places: list[int] = []
    changed: list[tuple[int, Tensor]] = []
    start = 0
    for row in rows:
        first = start + len(row.targets)
        for place in range(first, start + row.num_logits):
            assert row.sampling_state is not None, "a row that picks tokens says how"
            step = place - first
            settings.append(row.sampling_state.sampling.at(row.sampling_state.first + step))
            numbers.append(
                0.0 if settings[-1].is_greedy else uniform(row.sampling_state.seed, row.sampling_state.first + step)
            )
            places.append(place)
            before = row.ids[: len(row.ids) - row.num_logits + len(row.targets) + step + 1]
            if (scores := _adjusted_logits(row.sampling_state, logits[place], before, step)) is not None:
                changed.append((len(places) - 1, scores))
        start += row.num_logits
    if places:
        chosen = logits if len(places) == len(logits) else logits[torch.tensor(places, device=logits.device)]
        if changed:
            chosen = chosen.index_copy(
                0,
                torch.tensor([place for place, _ in changed], device=logits.device),
                torch.stack([scores for _, scores in changed]),
            )
        tokens = iter(pick(chosen, settings, numbers).tolist())
    return [(*row.targets, *(next(tokens) for _ in range(row.num_logits - len(row.targets)))) for row in rows]


def _adjusted_logits(sampling_state: SamplingState, logits: Tensor, before: Sequence[int], step: int) -> Tensor | None:
    """The logits [v] after repetition penalty and banned successors; None if these change nothing.

    before: the row's ids up to this position, of which the last `step` are not in `sampling_state.seen`.
    """
    banned = [then for first, then in sampling_state.after if before[-1] == first]
    penalty = sampling_state.sampling.repetition_penalty
    if not banned and penalty == 1.0:
        return None
    if penalty != 1.0:
        seen = sorted({*sampling_state.seen, *before[len(before) - step :]})
        logits = penalized(logits, torch.tensor(seen, device=logits.device), penalty)
    return logits.index_fill(0, torch.tensor(banned, dtype=torch.int64, device=logits.device), float("-inf"))


def _output_of(row: SequenceInput, picked: tuple[int, ...], logits: Tensor | None) -> SequenceOutput:
    """The output of a row. logits: [w, v] if it is scored, else None."""
    if logits is None or not picked or min(picked) < 0:
        return SequenceOutput(picked)
    scores = (logits / row.temperature).log_softmax(
        dim=-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32
    )
    mine = scores.gather(1, torch.tensor(picked, device=scores.device)[:, None])[:, 0]
    best = scores.topk(min(row.top, scores.shape[1]), dim=-1)
    top = (
        tuple(tuple(zip(ids, values)) for ids, values in zip(best.indices.tolist(), best.values.tolist()))
        if row.top
        else ()
    )
    return SequenceOutput(picked, tuple(mine.tolist()), top)


@dataclass(slots=True)
class _Work:
    """The executor's view of a pass."""

    network: CachedNetwork
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
        self.network.adapters.choose(step.of_token, step.adapters)
        output = chunk(
            ids=step.ids, hidden=received[0] if received else None, positions=step.positions, cache=step.cache
        )
        if not chunk.stage.has_output:
            return output if isinstance(output, tuple) else (output,)
        if len(step.logit_positions):
            step.sample(self.network, output)
        return ()

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        """Not called: the schedule has no backward passes."""

    def reduce(self, stage: int) -> None:
        """Not called."""


class ModelRunner:
    """The worker group: all ranks that decode together. networks: the network, and its draft network if there is one."""

    def __init__(self, networks: Sequence[CachedNetwork]) -> None:
        self.networks = tuple(networks)
        self.mesh = networks[0].mesh
        # In inference mode an operation costs less, but what a network keeps of it, as tables of angles, is no good for training.
        trained = any(
            param.requires_grad for network in networks for stage in network.stages for param in stage.parameters()
        )
        self._mode = torch.no_grad if trained else torch.inference_mode

    @property
    def is_leader(self) -> bool:
        """Whether this rank broadcasts the step inputs."""
        return self.mesh.world.is_first

    def run(self, step: StepInput) -> list[list[SequenceOutput]]:
        """On the leader: run a step on all ranks; the outputs of each replica's rows."""
        assert self.is_leader, "only the leader starts a step"
        collectives.broadcast_object(step, self.mesh.world)
        return self._execute(step)

    def follow(self) -> None:
        """On all other ranks: run the leader's steps until it shuts down."""
        while (step := collectives.broadcast_object(None, self.mesh.world)) is not None:
            if isinstance(step, AdapterChange):
                self.networks[0].adapters.put(step.number, step.adapters)
            elif step.rows:
                self._execute(step)

    def change(self, change: AdapterChange) -> None:
        """On the leader: give all ranks an adapter of the network, or take it from them."""
        collectives.broadcast_object(change, self.mesh.world)
        self.networks[0].adapters.put(change.number, change.adapters)

    def heartbeat(self) -> None:
        """On the leader, while it is idle: an empty step, so that no other rank's collective times out."""
        collectives.broadcast_object(StepInput(0, ()), self.mesh.world)

    def shut_down(self) -> None:
        """On the leader: end `follow` on the other ranks."""
        collectives.broadcast_object(None, self.mesh.world)

    def _execute(self, step: StepInput) -> list[list[SequenceOutput]]:
        network = self.networks[step.network]
        with self._mode():
            outputs = network.look(step.rows, step.depth) if step.depth else network.run(step.rows)
        speaks = network.stages[-1].stage.has_output and self.mesh.tp.is_first and self.mesh.cp.is_first
        everyone = collectives.gather_objects((self.mesh.dp.rank, outputs) if speaks else None, self.mesh.world)
        by_copy = dict(replies for replies in everyone if replies is not None)
        return [by_copy[replica] for replica in range(len(step.rows))]
