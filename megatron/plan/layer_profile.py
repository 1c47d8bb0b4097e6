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

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.config.settings.run import RecomputeConfig, RunConfig
from megatron.core.models.flops import BYTES
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
class PassPeaks:
    """The most bytes that the parts of a pass hold beside what they keep: the embedding, the layers, the output layer.

    In a forward pass beyond what is allocated when the part ends, in a backward pass beyond what was when it began.
    """

    embedding: float
    layers: float
    output: float


@dataclass(frozen=True, slots=True)
class MicrobatchProfile:
    """One microbatch on a rank with a whole network. embedding: the share of what comes before the layers; freed: bytes by which the
    output layer's backward pass changes what is allocated. left: bytes that stay until the end of the step.
    """

    whole: Cost
    embedding: Cost
    forward: PassPeaks
    backward: PassPeaks
    freed: float
    left: float


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What one microbatch costs on a rank: each kind of layer, and what comes before and behind them. short, long: the networks that
    were run, of which the short one has `depth` layers.
    """

    layers: Mapping[LayerPlan, Cost]
    embedding: Cost
    output: Cost
    depth: int
    short: MicrobatchProfile
    long: MicrobatchProfile


@dataclass(slots=True)
class LayerProfiler:
    """Profiles of the layers of a run's layouts on a machine, each made once. run: see `one_microbatch`."""

    hardware: Hardware
    run: LayerRunner
    profiles: dict[RunConfig, LayerProfile] = field(default_factory=dict)

    def profile(self, config: RunConfig, world_size: int, plans: Iterable[LayerPlan]) -> LayerProfile:
        """Return the profile of the kinds of these layers under the layout of a resolved config."""
        alone = single_stage_config(config, world_size)
        if alone not in self.profiles:
            kinds = tuple(dict.fromkeys(map(layer_kind, plans)))
            each = [kind for kind in kinds for _ in range(config.recompute.recompute_num_layers or 1)]
            short, layers = self._microbatch(alone, each), {}
            for kind in kinds:
                group = [kind] * each.count(kind)
                long = self._microbatch(alone, [*each, *group])
                layers[kind] = total_cost([long.whole], [short.whole], share=1 / len(group))
            output = total_cost([short.whole], [short.embedding, *(layers[kind] for kind in each)])
            self.profiles[alone] = LayerProfile(layers, short.embedding, output, len(each), short, long)
        return self.profiles[alone]

    def _microbatch(self, config: RunConfig, kinds: Sequence[LayerPlan]) -> MicrobatchProfile:
        """Run one microbatch of a network of these layers; return what it costs."""
        layers = [replace(kind, index=index) for index, kind in enumerate(kinds)]
        samples = config.train.global_batch_size // config.train.micro_batch_size
        ranks = config.parallel.tp * config.parallel.context_parallel_size * samples
        return microbatch_profile(self.run(config, ranks, layers), config, self.hardware)


def layer_kind(plan: LayerPlan) -> LayerPlan:
    """Return what layers that cost the same have in common: all but their number."""
    return replace(plan, index=0)


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


def recompute_of_first_and_other_layers(recompute: RecomputeConfig) -> tuple[RecomputeConfig, RecomputeConfig]:
    """Return how the layers that --recompute-method block counts are recomputed, and how the others; else the same twice."""
    if recompute.recompute_method != "block":
        return recompute, recompute
    each = replace(recompute, recompute_method="uniform", recompute_num_layers=1)
    return each, RecomputeConfig()


def microbatch_profile(trace: Trace, config: RunConfig, hardware: Hardware) -> MicrobatchProfile:
    """Return what the microbatch of a trace costs. trace: of `one_microbatch`."""
    events = {op: [event for event in trace.events if event.action == f"{op}0.0"] for op in OPERATIONS}
    begin = events["F"][0].live
    bounds = {op: _bounds_of_layers(events[op]) for op in "FB"}
    ends = [event.live - begin for event in trace.events if event.kind == "action"]
    (before, behind), (head, tail) = bounds["F"], bounds["B"]
    whole = _seconds(trace, trace.events, config, hardware)
    embedding = _seconds(trace, [*events["F"][:before], *events["B"][tail:]], config, hardware)
    names = [event.name for event in trace.events if event.kind == "action"]
    for op in OPERATIONS:
        if f"{op}0.0" in names:
            whole[op, "kept"] = ends[names.index(f"{op}0.0") + 1]
    embedding["F", "kept"] = events["F"][before - 1].live - begin
    if config.parallel.use_torch_fsdp2 and config.model.untie_embeddings_and_output_weights:
        embedding["F", "kept"] -= _output_weight_bytes(config)  # which FSDP2 gathers with those of the embedding
    return MicrobatchProfile(
        whole,
        embedding,
        PassPeaks(
            *(
                _most(events["F"][low:high]) - _last(events["F"][low:high])
                for low, high in ((0, before), (before, behind), (behind, None))
            )
        ),
        PassPeaks(
            *(
                _most(events["B"][low:high]) - events["B"][max(0, low - 1)].live
                for low, high in ((tail, None), (head, tail), (0, head))
            )
        ),
        events["B"][max(0, head - 1)].live - events["B"][0].live,
        ends[-1],
    )


def _output_weight_bytes(config: RunConfig) -> float:
    """Return the bytes of a rank's share of the output layer's matrix."""
    size = config.model.padded_vocab_size * config.model.hidden_size / config.parallel.tp
    return size * BYTES[config.precision.param_dtype_name]


def _bounds_of_layers(events: Sequence[StepEvent]) -> tuple[int, int]:
    """Return the first place of an event of a layer, and the place behind the last."""
    places = [place for place, event in enumerate(events) if event.module.startswith(LAYERS)]
    return places[0], places[-1] + 1


def _most(events: Sequence[StepEvent]) -> int:
    return max((event.live for event in events), default=0)


def _last(events: Sequence[StepEvent]) -> int:
    return events[-1].live if events else 0


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
