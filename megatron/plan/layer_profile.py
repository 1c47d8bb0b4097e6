"""Time and memory of a layout from dry runs of one layer of each kind, close to what a dry run of all layers finds.

The layers of a network are of few kinds. A rank without a pipeline runs one microbatch of a network with one layer of each kind, and
again with one layer more of a kind (simulate/one_microbatch.py): the difference is what a layer of that kind costs, and the rest is what
the embedding and the output layer cost.

    [embedding][attention + mlp][attention + moe][output]                     one layer of each kind
    [embedding][attention + mlp][attention + moe][attention + moe][output]    less the first: a layer with experts

stage_estimate.py adds these up to the stages of a pipeline. Layouts that differ in pipeline and data-parallel ranks alone share them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.config.settings.optim import BYTES
from megatron.core.config.settings.run import RecomputeConfig, RunConfig
from megatron.plan.cost import rank_time
from megatron.plan.hardware import Hardware
from megatron.plan.simulate.trace import StepEvent, Trace

LAYERS = ("decoder.layers.", "encoder.layers.")
EXPOSED = "gathers and sums of FSDP2"  # a category of time: what of them its layers do not hide
OPERATIONS = (
    "FBW"  # of a pipeline schedule: forward, backward, and gradients of weights where they are an action of their own
)
# Of one microbatch: seconds of each operation under (operation, "seconds"), those of a category under (operation, category), those of
# FSDP2's collectives under (operation, "beside"), and the bytes that are still allocated after it under (operation, "kept").
Cost = defaultdict[tuple[str, str], float]
LayerGroup = tuple[LayerPlan, ...]  # that are recomputed together; else of one layer
LayerRunner = Callable[[RunConfig, int, Sequence[LayerPlan]], Trace]


def total_cost(costs: Iterable[Cost], less: Iterable[Cost] = (), *, share: float = 1.0) -> Cost:
    """Return the sum of costs, less other costs, multiplied by `share`."""
    whole: Cost = defaultdict(float)
    for sign, some in ((share, costs), (-share, less)):
        for cost in some:
            for name, amount in cost.items():
                whole[name] += sign * amount
    return whole


@dataclass(frozen=True, slots=True)
class MicrobatchProfile:
    """One microbatch on a rank with a whole network. embedding: the share of what comes before the layers. forward, backward: the most
    bytes while the embedding, each group of layers, the output layer run. left: bytes that stay until the end of the step.
    """

    whole: Cost
    embedding: Cost
    forward: Sequence[float]
    backward: Sequence[float]
    left: float


@dataclass(frozen=True, slots=True)
class PartProfile:
    """What one microbatch costs in a part of the network: the embedding, a group of layers, the output layer.

    forward, backward: the most bytes while it runs, beyond what is kept of the parts up to this one, and, in a backward pass, of those
    behind it for gradients of weights, and the gradient of its result.
    """

    cost: Cost
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What one microbatch costs on a rank: each kind of group, and what comes before and behind them. left: as in `MicrobatchProfile`."""

    groups: Mapping[LayerGroup, PartProfile]
    embedding: PartProfile
    output: PartProfile
    left: float


@dataclass(slots=True)
class LayerProfiler:
    """Profiles of the layers of a run's layouts on a machine, each made once. run: see `one_microbatch`."""

    hardware: Hardware
    run: LayerRunner
    profiles: dict[tuple[RunConfig, tuple[LayerGroup, ...]], LayerProfile] = field(default_factory=dict)

    def profile(self, config: RunConfig, world_size: int, groups: Iterable[LayerGroup]) -> LayerProfile:
        """Return the profile of the kinds of these groups under the layout of a resolved config, which recomputes each together."""
        kinds = tuple(dict.fromkeys(groups))
        key = single_stage_config(config, world_size), kinds
        if key not in self.profiles:
            self.profiles[key] = self._run_networks(*key)
        return self.profiles[key]

    def _run_networks(self, config: RunConfig, kinds: Sequence[LayerGroup]) -> LayerProfile:
        """Run a network with one group of each kind, and one with a group more for each."""
        orders = [[*kinds[:place], kind, *kinds[place:]] for place, kind in enumerate(kinds)]
        short, *longs = (self._microbatch(config, order) for order in (kinds, *orders))
        costs = {kind: total_cost([long.whole], [short.whole]) for kind, long in zip(kinds, longs, strict=True)}
        output = total_cost([short.whole], [short.embedding, *costs.values()])
        groups = {}
        for place, (kind, order, long) in enumerate(zip(kinds, orders, longs, strict=True)):
            parts = part_profiles(
                long, [short.embedding, *(costs[one] for one in order), output], message_bytes(config)
            )
            first, second = parts[place + 1 : place + 3]
            groups[kind] = replace(
                first, forward=max(first.forward, second.forward), backward=max(first.backward, second.backward)
            )
        return LayerProfile(groups, parts[0], parts[-1], short.left)

    def _microbatch(self, config: RunConfig, groups: Sequence[LayerGroup]) -> MicrobatchProfile:
        """Run one microbatch of a network of these groups; return what it costs."""
        layers = [replace(plan, index=index) for index, plan in enumerate(chain.from_iterable(groups))]
        samples = config.train.global_batch_size // config.train.micro_batch_size
        ranks = config.parallel.tp * config.parallel.context_parallel_size * samples
        trace = self.run(config, ranks, layers)
        return microbatch_profile(trace, config, self.hardware, [len(group) for group in groups])


def layer_groups(recompute: RecomputeConfig, layers: Sequence[LayerPlan]) -> list[tuple[RecomputeConfig, LayerGroup]]:
    """Return the layers of a stage in groups that are recomputed together, each with how: as TransformerStack does."""
    kinds = [replace(plan, index=0) for plan in layers]  # layers that differ in their number alone cost the same
    size = recompute.recompute_num_layers or 1
    if recompute.recompute_method == "block":
        each = replace(recompute, recompute_method="uniform", recompute_num_layers=1)
        return [(each if place < size else RecomputeConfig(), (kind,)) for place, kind in enumerate(kinds)]
    if recompute.recompute_granularity != "full":
        return [(recompute, (kind,)) for kind in kinds]
    groups = [tuple(kinds[start : start + size]) for start in range(0, len(kinds), size)]
    return [(replace(recompute, recompute_num_layers=len(group)), group) for group in groups]


def single_stage_config(config: RunConfig, world_size: int) -> RunConfig:
    """Return the config of one microbatch on as few ranks as a stage's layers need, without a pipeline."""
    parallel, train = config.parallel, config.train
    copies = parallel.data_parallel_size(world_size)
    if not parallel.use_torch_fsdp2:  # whose layers are gathered over them
        experts = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or parallel.tp)
        ranks = parallel.tp * parallel.context_parallel_size
        copies = next(size for size in range(1, copies + 1) if ranks * size % experts == 0)
    parallel = replace(
        parallel,
        pipeline_model_parallel_size=1,
        num_virtual_stages_per_pipeline_rank=None,
        num_layers_per_virtual_pipeline_stage=None,
        microbatch_group_size_per_virtual_pipeline_stage=None,
        pipeline_model_parallel_layout=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_schedule="zb-h1" if parallel.splits_backward else "1f1b",
        use_distributed_optimizer=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        overlap_moe_expert_parallel_comm=False,
    )
    train = replace(
        train, global_batch_size=copies * train.micro_batch_size, rampup_batch_size=None, step_batch_size_schedule=None
    )
    return replace(config, parallel=parallel, train=train)


def message_bytes(config: RunConfig) -> float:
    """Return the bytes of a stage's result for a microbatch on a rank, and of its gradient."""
    parallel, train = config.parallel, config.train
    rows = (
        train.micro_batch_size * max(train.seq_length, train.decoder_seq_length or 0) / parallel.context_parallel_size
    )
    width = config.model.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    return BYTES[config.precision.param_dtype_name] * rows * width


def part_profiles(network: MicrobatchProfile, costs: Sequence[Cost], gradient: float) -> list[PartProfile]:
    """Return the parts of a network. costs: of each; gradient: bytes of what a backward pass leaves to the part before."""
    kept = accumulate(cost["F", "kept"] for cost in costs)
    behind = list(accumulate((cost["B", "kept"] for cost in reversed(costs)), initial=0.0))[-2::-1]
    last = len(costs) - 1
    return [
        PartProfile(cost, forward - here, backward - here - later - gradient * (place < last))
        for place, (cost, here, later, forward, backward) in enumerate(
            zip(costs, kept, behind, network.forward, network.backward, strict=True)
        )
    ]


def microbatch_profile(trace: Trace, config: RunConfig, hardware: Hardware, sizes: Sequence[int]) -> MicrobatchProfile:
    """Return what the microbatch of a trace costs. trace: of `one_microbatch`; sizes: layers of each group."""
    events = {op: [event for event in trace.events if event.action == f"{op}0.0"] for op in OPERATIONS}
    begin = events["F"][0].live
    bounds = {op: _bounds_of_groups(events[op], sizes if op == "F" else sizes[::-1]) for op in "FB"}
    ends = [event.live - begin for event in trace.events if event.kind == "action"]
    whole = _seconds(trace, trace.events, config, hardware)
    before, tail = bounds["F"][0], bounds["B"][-1]
    embedding = _seconds(trace, [*events["F"][:before], *events["B"][tail:]], config, hardware)
    names = [event.name for event in trace.events if event.kind == "action"]
    for op in OPERATIONS:
        if f"{op}0.0" in names:
            whole[op, "kept"] = ends[names.index(f"{op}0.0") + 1]
    embedding["F", "kept"] = events["F"][before - 1].live - begin
    if (
        not config.parallel.use_torch_fsdp2
    ):  # what is freed before the first operation of a layer, of which the result is as large
        embedding["F", "kept"] = min(embedding["F", "kept"], events["F"][before].live - begin - message_bytes(config))
    elif config.model.untie_embeddings_and_output_weights:
        embedding["F", "kept"] -= _output_weight_bytes(config)  # which FSDP2 gathers with those of the embedding
    forward, backward = (
        [
            max((event.live - begin for event in events[op][low:high]), default=0)
            for low, high in zip((0, *bounds[op]), (*bounds[op], None))
        ]
        for op in "FB"
    )
    return MicrobatchProfile(whole, embedding, forward, backward[::-1], ends[-1])


def _output_weight_bytes(config: RunConfig) -> float:
    """Return the bytes of a rank's share of the output layer's matrix."""
    size = config.model.padded_vocab_size * config.model.hidden_size / config.parallel.tp
    return size * BYTES[config.precision.param_dtype_name]


def _bounds_of_groups(events: Sequence[StepEvent], sizes: Sequence[int]) -> list[int]:
    """Return the place of the first event of a layer, and of each group the place behind its last. sizes: layers of each, in the
    order of the events.
    """
    places = [place for place, event in enumerate(events) if event.module.startswith(LAYERS)]
    ends = iter(
        {".".join(events[place].module.split(".")[:3]): place + 1 for place in places}.values()
    )  # of each layer
    return [places[0], *(max(islice(ends, size)) for size in sizes)]


def _seconds(trace: Trace, events: Sequence[StepEvent], config: RunConfig, hardware: Hardware) -> Cost:
    """Return the seconds of these events by operation and category."""
    spent = rank_time(replace(trace, events=events), config, hardware).spent
    cost: Cost = defaultdict(float)
    for op in OPERATIONS:
        if f"{op}0" in spent:
            costs = spent[f"{op}0"]
            cost[op, "seconds"], cost[op, "beside"] = costs.seconds - costs.parts[EXPOSED], costs.beside
            for part in costs.parts.keys() - {EXPOSED}:
                cost[op, part] = costs.parts[part]
    return cost
