"""Runs one forward pass over the new tokens of many sequences, on all ranks that hold the network.

Ranks keep no state of a sequence but its keys and values: each `StepInput` holds everything that a pass needs. So only the
first rank (the leader) knows requests; the others wait for its step inputs.

    leader   broadcasts a step input      pipeline stages send hidden states, the last samples tokens      -> leader
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from megatron.adapters.files import LoadedAdapter
from megatron.adapters.serving import AdapterBank
from megatron.core.config.plan.layers import LayerPlan, mtp_depth_layer_plans
from megatron.core.models.embedding import IdsWithImages
from megatron.core.models.gpt import GPTModel
from megatron.core.models.vision import ImageEmbedder
from megatron.core.models.vision_language import VisionLanguageModel
from megatron.core.parallel import collectives
from megatron.core.parallel import device as devices
from megatron.inference.cache import (
    KVCache,
    block_tables_of,
    cache_bytes_per_token,
    group_sequences_by_length,
    make_step_kv_cache,
)
from megatron.inference.cuda_graphs import DecodingGraphs, GraphShape, write_sampled_ids
from megatron.inference.expert_choice_recorder import ExpertChoiceRecorder, Routes, outputs_with_expert_choices
from megatron.inference.forward_passes import run_forward_pipeline
from megatron.inference.recurrent_states import StatePool, StepStateSlots
from megatron.inference.sampled_tokens import SampledTokens, sample_next_tokens
from megatron.inference.step_input import PromptImages, SequenceInput, SequenceStepOutput, StepInput

_KEPT_IMAGES = 64  # prompts whose images stay encoded
Method = TypeVar("Method", bound=Callable[..., Any])


def _on_all_ranks(method: Method) -> Method:
    """Let a method that the leader calls run on all ranks, where the others are in `run_as_follower`."""

    @wraps(method)
    def broadcast_call_and_run(self: ModelRunner, *arguments: Any) -> Any:
        if self.is_leader:
            collectives.broadcast_object((method.__name__, *arguments), self.mesh.world)
        return method(self, *arguments)

    return cast(Method, broadcast_call_and_run)


def cached_layers(stages: Sequence[GPTModel], depths: int) -> tuple[tuple[LayerPlan, ...], int]:
    """Return (layers with cached keys and values, hidden states cached a token) for `depths` of MTP."""
    plans, model = tuple(plan for stage in stages for plan in stage.stage.layers), stages[0].build.model
    if stages[-1].mtp is None:
        return plans, 0
    return plans + tuple(row for depth in range(depths) for row in mtp_depth_layer_plans(model, depth)), depths


class CachedNetwork:
    """This rank's stages of one network, with their KV cache, recurrent states and CUDA graphs. stages: in order, in
    evaluation mode. blocks: of the cache, block_size tokens each; most_blocks: of one sequence; most_rows: sequences of
    a pass. depths: of multi-token prediction used as draft. captured_graphs: most shapes kept as CUDA graphs. paged:
    attention kernel that reads blocks in place; None: keys are gathered.
    """

    def __init__(
        self,
        stages: Sequence[GPTModel],
        *,
        blocks: int,
        block_size: int,
        most_blocks: int,
        most_rows: int,
        depths: int = 0,
        captured_graphs: int = 0,
        paged: Callable[..., Tensor] | None = None,
    ) -> None:
        self.recorder: ExpertChoiceRecorder | None = None  # notes each token's experts, if the caller wants them
        self.routes: Routes = []  # of the rows of the last pass, by the layers of this rank
        self.stages, self.block_size = tuple(stages), block_size
        build = stages[0].build
        self.build, self.mesh = build, build.mesh
        self.adapters = AdapterBank(stages)
        self.state_pool: StatePool | None = None
        self.plans, states = cached_layers(stages, depths)
        self.pool = KVCache(
            build.model,
            self.plans,
            tensor_size=self.mesh.tp.size,
            slots=blocks * block_size,
            dtype=build.dtype,
            device=self.mesh.device,
            states=states,
            paged=paged,
        )
        self.bytes_per_token = cache_bytes_per_token(
            build.model, self.plans, self.mesh.tp.size, build.dtype, states=states
        )
        self.captured_graphs = (
            DecodingGraphs(
                stages[0],
                self.pool,
                block_size=block_size,
                count=captured_graphs,
                most_rows=most_rows,
                most_blocks=most_blocks,
            )
            if captured_graphs
            else None
        )
        self.sampled_before = torch.zeros(0, dtype=torch.int64, device=self.mesh.device)  # that the last pass sampled
        self._image_rows: OrderedDict[bytes, Tensor] = OrderedDict()  # of the images that were encoded last

    def ids_with_image_embeddings(self, ids: Tensor, rows: Sequence[SequenceInput]) -> Tensor | IdsWithImages:
        """Return the ids [1, t] of a pass with the encoded images of its rows; the ids alone without images."""
        stage = self.stages[0]
        image_input = stage.image_input if isinstance(stage, VisionLanguageModel) else None
        if image_input is None or all(row.images is None for row in rows):
            return ids
        encoded: list[Tensor] = []
        slots: list[int] = []
        for row in rows:
            first = sum(map(len, encoded))
            slots += [slot if slot < 0 else first + slot for slot in row.image_slots]
            if row.images is not None:
                encoded.append(self._encode_images(image_input, row.images))
        slots += [-1] * (ids.shape[1] - len(slots))
        return IdsWithImages(
            ids, torch.cat(encoded), devices.copy_arrays_to_device([np.array([slots])], self.mesh.device)[0]
        )

    def _encode_images(self, image_input: ImageEmbedder, images: PromptImages) -> Tensor:
        """Return the embeddings [n * rows, h] of a prompt's images, from a cache by digest."""
        if images.digest not in self._image_rows:
            (pixels,) = devices.copy_arrays_to_device([images.images], self.mesh.device)
            self._image_rows[images.digest] = image_input.encode_images(pixels)
        self._image_rows.move_to_end(images.digest)
        while len(self._image_rows) > _KEPT_IMAGES:
            self._image_rows.popitem(last=False)
        return self._image_rows[images.digest]

    def clear_image_cache(self) -> None:
        """Drop the cached image embeddings."""
        self._image_rows.clear()

    def launch(self, rows_of_all: Sequence[Sequence[SequenceInput]], *, on_demand: bool = True) -> list[SampledTokens]:
        """Run the rows of this rank's replica through the stages, without waiting for the device. rows_of_all: of each
        replica. Return what each microbatch sampled, on the first tensor rank of the last stage; empty ones elsewhere.
        on_demand: capture a missing graph now.
        """
        rows = rows_of_all[self.mesh.dp.rank]
        if (
            shape := self._matching_graph_shape(rows_of_all, on_demand)
        ) is not None and self.captured_graphs is not None:
            ids, awaited = (
                [row.ids[0] for row in rows],
                [(n, row.awaits) for n, row in enumerate(rows) if row.awaits is not None],
            )
            spans = [row.cache_span for row in rows]
            logits = self.captured_graphs.replay_logits(shape, ids, spans, awaited, self.sampled_before)
            sampled = [sample_next_tokens(rows, logits, self.build)]
        else:
            parts = min(self.mesh.pp.size, max(map(len, rows_of_all)))  # so that stages need not wait for each other
            shared = [[replica[part::parts] for replica in rows_of_all] for part in range(parts)]
            steps = [
                _InferenceMicrobatch(self, replicas[self.mesh.dp.rank], self._padded_length(replicas))
                for replicas in shared
            ]
            run_forward_pipeline(self.stages, [(1, step.length) for step in steps], partial(self._run_stage, steps))
            self._collect_expert_choices(steps)
            sampled = [step.sampled for step in steps]
        if len(sampled) == 1:
            self.sampled_before = sampled[0].tokens
        return sampled

    def _run_stage(
        self, steps: Sequence[_InferenceMicrobatch], chunk: GPTModel, microbatch: int, hidden: Tensor | None
    ) -> Any:
        """Run one stage on one microbatch; the last stage samples."""
        step = steps[microbatch]
        self.adapters.select_adapters(step.of_token, step.adapters)
        ids = self.ids_with_image_embeddings(step.ids, step.rows) if chunk.stage.has_embedding else step.ids
        if self.recorder is not None:
            self.recorder.start(chunk)
        output = chunk(ids=ids, hidden=hidden, positions=step.positions, cache=step.cache)
        if self.recorder is not None:
            self.recorder.store(chunk, microbatch, step.length)
        if chunk.stage.has_output and len(step.logit_positions):
            step.sample_tokens(self, output)
        return output

    def _collect_expert_choices(self, steps: Sequence[_InferenceMicrobatch]) -> None:
        """Set `routes` to the experts of each row's tokens in this pass, if they are recorded."""
        if self.recorder is not None:
            self.routes = self.recorder.choices_of_rows(
                [(step.rows, [part + len(steps) * place for place in step.order]) for part, step in enumerate(steps)]
            )

    def _matching_graph_shape(
        self, rows_of_all: Sequence[Sequence[SequenceInput]], on_demand: bool
    ) -> GraphShape | None:
        """Return the shape of the graph for these rows, or None. Replicas that exchange tokens agree on it."""
        graphs, own = self.captured_graphs, self.mesh.dp.rank
        if graphs is None:
            return None
        together = rows_of_all if self.build.model.moe.num_experts else [rows_of_all[own]]
        rows = [row for replica in together for row in replica]
        plain = [len(row.ids) == row.num_sampled == 1 and not row.adapter and row.images is None for row in rows]
        if not plain or not all(plain):
            return None
        self.adapters.select_adapters(None)
        shape = graphs.graph_shape(max(map(len, together)), max(row.cache_span.num_keys for row in rows))
        return shape if graphs.ensure_graph(shape, on_demand=on_demand) else None

    def run(
        self, rows_of_all: Sequence[Sequence[SequenceInput]], *, on_demand: bool = True
    ) -> list[SequenceStepOutput]:
        """Launch a pass and return its outputs: on the first tensor rank of the last stage, empty ones elsewhere."""
        parts = self.launch(rows_of_all, on_demand=on_demand)
        outputs: list[SequenceStepOutput] = [SequenceStepOutput()] * len(rows_of_all[self.mesh.dp.rank])
        for part, sampled in enumerate(parts):
            outputs[part :: len(parts)] = sampled.collect()
        return outputs

    def run_mtp_depth(self, rows_of_all: Sequence[Sequence[SequenceInput]], depth: int) -> list[SequenceStepOutput]:
        """Run the rows of this rank's replica through one depth of multi-token prediction; outputs as those of `run`."""
        stage = self.stages[-1]
        if stage.mtp is None:
            assert not stage.stage.has_output, "the stage that predicts has what predicts ahead"
            return []
        step = _InferenceMicrobatch(self, rows_of_all[self.mesh.dp.rank], self._padded_length(rows_of_all), depth)
        self.adapters.select_adapters(None)  # what is proposed is verified with them
        _, logits = stage.decode_mtp_depth(
            depth, step.cache.mtp_input_hidden_states(), step.ids, step.positions, step.cache
        )
        if len(step.logit_positions):
            step.sample_tokens(self, logits)
        return step.sampled.collect()

    def _padded_length(self, replicas: Sequence[Sequence[SequenceInput]]) -> int:
        """Return a pass's tokens with padding; with experts the same on all replicas, which exchange tokens."""
        together = replicas if self.build.model.moe.num_experts else [replicas[self.mesh.dp.rank]]
        longest = max(1, *(sum(len(row.ids) for row in rows) for rows in together))
        pieces = self.build.tp_region.whole_sequence_length(1)
        return -(-longest // pieces) * pieces


class _InferenceMicrobatch:
    """One microbatch of a pass: its device inputs, tokens in the order of the cache's groups, and what is sampled."""

    def __init__(self, network: CachedNetwork, rows: Sequence[SequenceInput], length: int, depth: int = 0) -> None:
        spans = [row.cache_span for row in rows]
        groups = group_sequences_by_length(spans)
        self.order = [number for group in groups for number in group]
        self.rows = [rows[number] for number in self.order]
        ids = [token for row in self.rows for token in row.ids]
        padding = [0] * (length - len(ids))
        logit_positions, awaited = _logit_and_awaited_positions(self.rows)
        self.length = length
        self.adapters = sorted({row.adapter for row in self.rows})
        of_token = _adapters_of_tokens(self.rows)
        grouped = [[spans[number] for number in group] for group in groups]
        device = network.mesh.device
        known = [np.array(one, np.int32) for one in (ids + padding, logit_positions)]
        known.extend(np.array(awaited, np.int32).reshape(-1, 2).T)
        known += [table for group in grouped for table in block_tables_of(group)]
        slots = StepStateSlots(
            ([rows[n].states for n in group] for group in groups),
            (spans[group[0]].count for group in groups),
            network.state_pool,
        )
        known += slots.arrays_to_upload
        if of_token:
            known.append(np.array(of_token + padding, np.int32))
        given, positions, awaited_at, sampled, *tables = devices.copy_arrays_to_device(known, device)
        self.of_token = tables.pop().to(torch.int64) if of_token else None
        self.ids, self.logit_positions = given.to(torch.int64)[None], positions.to(torch.int64)
        write_sampled_ids(self.ids[0], network.sampled_before, awaited_at, sampled)
        # Ranks hold pieces of the tokens: the positions with logits are chosen at the end.
        self._cut = network.build.tp_region.sequence_parallel
        self.cache = make_step_kv_cache(
            network.pool,
            grouped,
            tables,
            block_size=network.block_size,
            logit_positions=None if self._cut else self.logit_positions,
            total=length,
            depth=depth,
            states=slots.pool_and_groups(tables[2 * len(groups) :]),
        )
        self.positions = self.cache.positions[None]
        self.sampled = SampledTokens(self.rows, self.order)

    def sample_tokens(self, network: CachedNetwork, logits: Tensor) -> None:
        """Sample the next tokens. logits: [w, 1, v/tp] of the positions with logits, or [t, 1, v/tp] of all."""
        chosen = logits[self.logit_positions] if self._cut else logits
        self.sampled = sample_next_tokens(self.rows, chosen, network.build, self.order)


def _adapters_of_tokens(rows: Sequence[SequenceInput]) -> list[int]:
    """Return the adapter number of each token; empty if no row has an adapter."""
    numbers = [row.adapter for row in rows for _ in row.ids]
    return numbers if any(numbers) else []


def _logit_and_awaited_positions(rows: Sequence[SequenceInput]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return (indices of the rows' joined tokens whose logits are needed, (index, index of the sampled token) of ids
    known on the device only).
    """
    logit_positions: list[int] = []
    awaited: list[tuple[int, int]] = []
    end = 0
    for row in rows:
        end += len(row.ids)
        logit_positions += range(end - row.num_logits, end)
        if row.awaits is not None:
            awaited.append((end - 1, row.awaits))
    return logit_positions, awaited


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that may still be running on the device. places: index of each row's first sampled token, if there is one
    rank only. collect: waits, and returns the outputs of each replica's rows.
    """

    places: list[int]
    collect: Callable[[], list[list[SequenceStepOutput]]]


class ModelRunner:
    """Runs steps on all ranks that decode together; the first leads. networks: the network, and perhaps a draft."""

    def __init__(self, networks: Sequence[CachedNetwork]) -> None:
        self.networks = tuple(networks)
        self.mesh = networks[0].mesh
        # In inference mode an operation costs less, but what a network keeps of it, as tables of angles, is no good for training.
        trained = any(
            param.requires_grad for network in networks for stage in network.stages for param in stage.parameters()
        )
        self._without_gradients = torch.no_grad if trained else torch.inference_mode
        self.on_demand = True  # a shape of a step is captured when it is first met

    @contextmanager
    def _grad_mode(self) -> Iterator[None]:
        """Within: no gradients, no cuDNN attention (prompts come in ever new lengths)."""
        with self._without_gradients(), devices.without_cudnn_attention():
            yield

    @property
    def is_leader(self) -> bool:
        """Whether this rank broadcasts the step inputs."""
        return self.mesh.world.is_first

    def launch(self, step: StepInput) -> LaunchedStep:
        """On the leader: run a step on all ranks. A single rank does not wait for its device."""
        assert self.is_leader, "only the leader starts a step"
        if self.mesh.world.size > 1 or step.depth:
            outputs = self._run_step(step, self.on_demand)
            return LaunchedStep([], lambda: outputs)
        network = self.networks[step.network]
        with self._grad_mode():
            (sampled,) = network.launch(step.rows, on_demand=self.on_demand)
        if network.recorder is None:
            return LaunchedStep(sampled.first_token_indices(), lambda: [sampled.collect()])
        parts = [network.routes]
        return LaunchedStep(
            sampled.first_token_indices(), lambda: [outputs_with_expert_choices(sampled.collect(), parts)]
        )

    def run_as_follower(self) -> None:
        """On all other ranks: take part in what the leader does until it shuts down."""
        while (call := collectives.broadcast_object(None, self.mesh.world)) is not None:
            method, *arguments = call
            getattr(self, method)(*arguments)

    @_on_all_ranks
    def set_adapter(self, number: int, adapters: LoadedAdapter | None) -> None:
        """On the leader: load an adapter under a number on all ranks, or with None remove it."""
        self.networks[0].adapters.set_adapter(number, adapters)

    @_on_all_ranks
    def clear_image_cache(self) -> None:
        """On the leader: drop the encoded images on all ranks, as when the weights change."""
        for network in self.networks:
            network.clear_image_cache()

    def num_uncaptured_shapes(self) -> int:
        """On the leader: return how many requested shapes are not captured yet."""
        return sum(len(one.captured_graphs.requested) for one in self.networks if one.captured_graphs is not None)

    def capture_next_graph(self) -> bool:
        """On the leader, while idle: capture one requested shape on all ranks; False if there is none."""
        for number, network in enumerate(self.networks):
            if network.captured_graphs is not None and network.captured_graphs.requested:
                self._capture_graph(number, next(iter(network.captured_graphs.requested)))
                return True
        return False

    @_on_all_ranks
    def _capture_graph(self, number: int, shape: GraphShape) -> None:
        """Capture a step of this shape of a network, given by its index."""
        graphs = self.networks[number].captured_graphs
        assert graphs is not None, "what is captured was asked for"
        self.networks[number].adapters.select_adapters(None)
        with self._grad_mode():
            graphs.capture_graph(shape)

    @_on_all_ranks
    def heartbeat(self) -> None:
        """On the leader, while idle: do nothing on all ranks, so that no other rank's collective times out."""

    def shut_down(self) -> None:
        """On the leader: end `run_as_follower` on the other ranks."""
        collectives.broadcast_object(None, self.mesh.world)

    @_on_all_ranks
    def _run_step(self, step: StepInput, on_demand: bool) -> list[list[SequenceStepOutput]]:  # noqa: FBT001
        """Run a step and return the outputs of each replica's rows, on all ranks. on_demand: its shape may be captured."""
        network = self.networks[step.network]
        with self._grad_mode():
            outputs = (
                network.run_mtp_depth(step.rows, step.depth)
                if step.depth
                else network.run(step.rows, on_demand=on_demand)
            )
        first = self.mesh.tp.is_first and self.mesh.cp.is_first
        own = outputs if network.stages[-1].stage.has_output else None
        routes = [] if step.depth else network.routes
        everyone = collectives.gather_objects((self.mesh.dp.rank, own, routes) if first else None, self.mesh.world)
        parts = [part for part in everyone if part is not None]
        records = network.recorder is not None and not step.depth
        return [_outputs_of_replica(parts, replica, records=records) for replica in range(len(step.rows))]


def _outputs_of_replica(
    parts: Sequence[tuple[int, list[SequenceStepOutput] | None, Routes]], replica: int, *, records: bool
) -> list[SequenceStepOutput]:
    """Return a replica's outputs, with the experts of each token if they are recorded.

    parts: (replica, outputs of its last stage or None, routes) of each pipeline rank.
    """
    own = [(outputs, routes) for number, outputs, routes in parts if number == replica]
    (outputs,) = (outputs for outputs, _ in own if outputs is not None)
    return outputs_with_expert_choices(outputs, [routes for _, routes in own]) if records else outputs
