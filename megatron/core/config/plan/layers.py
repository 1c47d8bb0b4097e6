"""One row per layer, and which layers each pipeline stage builds.

A network is a tuple of `LayerPlan` rows. `partition_into_stages` cuts it into `StageSpec`s, which run through the ranks vpp times. `stage_rank_and_chunk`
says where a stage lives: as chunk s // pp of a rank, each time from the first rank on (wrap), or there and back (v):

    12 layers, pp=2, vpp=3      rank 0    stage 0: 0 1      stage 2: 4 5      stage 4: 8 9
                                rank 1    stage 1: 2 3      stage 3: 6 7      stage 5: 10 11

    8 layers, pp=2, v           rank 0    stage 0: 0 1      stage 3: 6 7
                                rank 1    stage 1: 2 3      stage 2: 4 5

A cut is a list of layer counts, one a stage. It comes from an even division (with the embedding and the loss counted as
layers, if asked), from an even division between an uneven first and last rank, or from a layout string. No layer is
ever dropped: what cannot be divided is refused, with every reason and the nearest numbers that can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from megatron.core.config.flags.declare import raise_config_error_if
from megatron.core.config.flags.parse import parse_layer_frequency
from megatron.core.config.mixers.gated_delta_net import DeltaNet
from megatron.core.config.mixers.mixer import Mixer
from megatron.core.config.mixers.table import MIXERS, attention_of, mixer_beside_attention
from megatron.core.config.plan.pattern import mixer_and_mlp_of_symbol
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.parallel import Placement


def stage_rank_and_chunk(stage: int, pp: int, placement: Placement = "wrap") -> tuple[int, int]:
    """Return (pipeline rank, chunk on it) of a stage. placement: wrap, where each chunk begins on the first rank; v,
    where it begins on the rank that the one before ended on.
    """
    chunk, place = divmod(stage, pp)
    return (pp - 1 - place if placement == "v" and chunk % 2 else place), chunk


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer.

    mixer: a row of `MIXERS`, or none. window: (left, right) positions that a query sees beside its own, -1 for all; None: no window.
    parallel_mixer: a mixer whose output is added to that of the first, on the same input, or none. mlp: dense, moe, or none.
    block: the order of norms, sublayers and sums: pre_norm, post_norm, sandwich, after_sublayer or normed_residual.
    """

    index: int
    mixer: str = "attention"
    parallel_mixer: str = "none"
    causal: bool = True
    has_cross_attention: bool = False
    window: tuple[int, int] | None = None
    rope: bool = True
    mlp: str = "dense"
    block: str = "pre_norm"

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Its mixers: one, two in parallel, or none."""
        return tuple(MIXERS[name] for name in (self.mixer, self.parallel_mixer) if name != "none")

    @property
    def has_attention(self) -> bool:
        """Whether a mixer of it is attention, with keys and values that decoding caches."""
        return any(mixer.attends for mixer in self.mixers)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One of `count` pipeline stages: its rank, chunk and layers, and whether it has embedding and output layer.

    has_mtp: whether it has the final norm and the layers of multi-token prediction. placement: of all stages.
    """

    index: int
    count: int
    rank: int
    chunk: int
    layers: tuple[LayerPlan, ...]
    has_embedding: bool
    has_output: bool
    has_mtp: bool = False
    placement: Placement = "wrap"


def uniform_layer_plans(
    num_layers: int, *, causal: bool = True, has_cross_attention: bool = False, block: str = "pre_norm"
) -> tuple[LayerPlan, ...]:
    """Return plans of equal layers of a decoder, an encoder (causal=False), or a decoder with cross attention."""
    return tuple(
        LayerPlan(index, causal=causal, has_cross_attention=has_cross_attention, block=block)
        for index in range(num_layers)
    )


def network_layer_plans(model: ModelConfig) -> tuple[LayerPlan, ...]:
    """Return the plans of all layers of a network; for T5 the encoder's, then the decoder's, each numbered from 0."""
    if model.architecture.is_encoder_decoder:
        block = model.block_of_layer()
        return uniform_layer_plans(model.encoder_num_layers, causal=False, block=block) + uniform_layer_plans(
            model.decoder_num_layers, has_cross_attention=True, block=block
        )
    if model.hybrid.layer_symbols:
        return _hybrid_layer_plans(model, model.hybrid.layer_symbols)
    rows = uniform_layer_plans(model.num_layers, causal=model.architecture.is_decoder_only)
    return tuple(
        replace(
            row,
            mixer=mixer,
            parallel_mixer=mixer_beside_attention(model),
            window=model.parsed_window_size if windowed else None,
            rope=rope,
            mlp="moe" if moe else "dense",
            block=MIXERS[mixer].block_of_layer(model),
        )
        for row, mixer, windowed, rope, moe in zip(
            rows,
            _mixer_of_each_layer(model),
            _is_windowed_by_layer(model),
            _is_rotary_by_layer(model),
            _is_moe_by_layer(model),
            strict=True,
        )
    )


def _hybrid_layer_plans(model: ModelConfig, symbols: str, first: int = 0) -> tuple[LayerPlan, ...]:
    """Return the plans of layers of a hybrid network, one a symbol, numbered from `first`; window and rotary patterns
    begin with the first symbol and count all layers.
    """
    rows, windows, rotations = [], cycle(_is_windowed_by_layer(model)), cycle(_is_rotary_by_layer(model))
    for index, (symbol, windowed, rope) in enumerate(zip(symbols, windows, rotations, strict=False), start=first):
        mixer, mlp = mixer_and_mlp_of_symbol(symbol)
        kind = MIXERS.get(mixer)
        attends = kind is not None and kind.attends
        window = model.parsed_window_size if windowed and attends else None
        block = model.block_of_layer() if kind is None else kind.block_of_layer(model)
        rows.append(LayerPlan(index, mixer, window=window, rope=rope and attends, mlp=mlp, block=block))
    return tuple(rows)


def mtp_depth_layer_plans(model: ModelConfig, depth: int) -> tuple[LayerPlan, ...]:
    """Return the plans of an MTP depth (from 0): those of its symbols, or one like the last layer.

    Patterns of windows and rotations begin anew, as in Megatron: with the first symbol, or with the first depth.
    """
    first = model.num_layers + depth * num_layers_of_mtp_depth(model)
    if model.hybrid.mtp_patterns:
        return _hybrid_layer_plans(model, model.hybrid.mtp_patterns[0], first)
    place = depth % model.num_layers
    window = model.parsed_window_size if _is_windowed_by_layer(model)[place] else None
    like = replace(network_layer_plans(model)[-1], window=window, rope=_is_rotary_by_layer(model)[place])
    return (replace(like, index=first),)


def all_layer_plans(model: ModelConfig) -> tuple[LayerPlan, ...]:
    """Return the plans of the network's layers, then those of its MTP depths."""
    depths = range(model.mtp.mtp_num_layers or 0)
    return network_layer_plans(model) + tuple(plan for depth in depths for plan in mtp_depth_layer_plans(model, depth))


def num_layers_of_mtp_depth(model: ModelConfig) -> int:
    """Return how many layers one depth of multi-token prediction has: one, or in a hybrid network one a symbol."""
    return len(model.hybrid.mtp_patterns[0]) if model.hybrid.mtp_patterns else 1


def _mixer_of_each_layer(model: ModelConfig) -> list[str]:
    """Return the mixer of every layer: the attention variant where --linear-attention-freq does not leave attention."""
    usual = attention_of(model).name
    if model.hybrid.experimental_attention_variant is None:
        return [usual] * model.num_layers
    has_variant = _all_but_every_nth(model, model.hybrid.linear_attention_freq, "--linear-attention-freq")
    return [DeltaNet.name if variant else usual for variant in has_variant]


def _is_windowed_by_layer(model: ModelConfig) -> list[bool]:
    """Return for every layer whether it has a window."""
    windowed = _all_but_every_nth(model, model.window_attn_skip_freq, "--window-attn-skip-freq")
    return [one and model.window_size is not None for one in windowed]


def _is_rotary_by_layer(model: ModelConfig) -> list[bool]:
    """Return for each layer whether it rotates: all but every n-th, counted from one, or those with a 0 in the list."""
    if model.rope.no_rope_freq is None:
        return [True] * model.num_layers
    freq = parse_layer_frequency(model.rope.no_rope_freq, model.num_layers, "--no-rope-freq")
    return (
        [(i + 1) % freq != 0 for i in range(model.num_layers)] if isinstance(freq, int) else [one == 0 for one in freq]
    )


def _is_moe_by_layer(model: ModelConfig) -> list[bool]:
    """Return for every layer whether it has experts: every n-th from the first on, or those with a 1 in the list."""
    if not model.moe.num_experts:
        return [False] * model.num_layers
    freq = parse_layer_frequency(model.moe.moe_layer_freq, model.num_layers, "--moe-layer-freq")
    return [i % freq == 0 for i in range(model.num_layers)] if isinstance(freq, int) else [one == 1 for one in freq]


def _all_but_every_nth(model: ModelConfig, text: str | None, flag: str) -> list[bool]:
    """Return for each layer: all but every n-th, counted from one, or those with a 1 in the list; all if None."""
    if text is None:
        return [True] * model.num_layers
    freq = parse_layer_frequency(text, model.num_layers, flag)
    return (
        [(i + 1) % freq != 0 for i in range(model.num_layers)] if isinstance(freq, int) else [one == 1 for one in freq]
    )


def partition_into_stages(
    layers: Sequence[LayerPlan],
    *,
    pp: int,
    vpp: int = 1,
    ends: tuple[int | None, int | None] = (None, None),
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    layout: str | None = None,
    placement: Placement = "wrap",
) -> tuple[StageSpec, ...]:
    """Cut the layers into pp * vpp stages, in order; `ConfigError` with every reason if that is impossible.

    ends: layers on the first and on the last rank, over all its chunks; the other ranks share the rest evenly.
    account_for_...: count the embedding or the loss as one layer of the even division.
    layout: the whole cut, such as `Et*3|(tt|)*29m|L` (`parse_pipeline_layout`). placement: as in
    `stage_rank_and_chunk`.
    """
    counted = account_for_embedding + account_for_loss
    uneven = ends != (None, None)
    problems = _nonpositive_size_problems(len(layers), pp, vpp)
    if uneven + bool(counted) + (layout is not None) > 1:
        problems.append(
            "the pipeline split is given more than once; keep one of --pipeline-model-parallel-layout, "
            "--decoder-first/last-pipeline-num-layers, --account-for-embedding/loss-in-pipeline-split"
        )
    raise_config_error_if(problems)
    if layout is not None:
        stages = parse_pipeline_layout(layout)
        problems = _pipeline_layout_problems(stages, len(layers), pp, vpp) + _mtp_layout_problems(stages, pp, placement)
        counts = [stage.count("t") for stage in stages]
    elif uneven:
        problems, counts = _uneven_layer_counts(len(layers), pp, vpp, ends, placement)
    else:
        problems, counts = _even_layer_counts(len(layers), pp, vpp, counted)
        counts[0] -= account_for_embedding
        counts[-1] -= account_for_loss
    raise_config_error_if(problems)
    apart = layout is not None and "m" in layout and "m" not in stages[-1]
    return _make_stage_specs(layers, counts, pp, ahead=len(counts) - 1 - apart, placement=placement)


def virtual_pipeline_size(
    num_layers: int,
    *,
    pp: int,
    chunks_per_rank: int | None = None,
    layers_per_chunk: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    layout: str | None = None,
    unsaid: int = 1,
) -> int:
    """Return the number of chunks on each rank, from whichever flag gives it; `unsaid` if none does. `ConfigError` if
    two do, or if it does not divide.

    chunks_per_rank: --num-virtual-stages-per-pipeline-rank; layers_per_chunk: --num-layers-per-virtual-pipeline-stage.
    """
    given = {
        "--num-virtual-stages-per-pipeline-rank": chunks_per_rank,
        "--num-layers-per-virtual-pipeline-stage": layers_per_chunk,
        "--pipeline-model-parallel-layout": layout,
    }
    named = [flag for flag, value in given.items() if value is not None]
    problems = [f"{' and '.join(named)} each say how many chunks a rank has; keep one"] if len(named) > 1 else []
    problems += [
        f"{flag} {value} is not a positive number; leave it out for one chunk"
        for flag, value in given.items()
        if isinstance(value, int) and value < 1
    ]
    problems += _nonpositive_size_problems(num_layers, pp, 1)
    raise_config_error_if(problems)
    if layout is not None:
        stages = len(parse_pipeline_layout(layout))
        raise_config_error_if(_stage_count_problem(stages, pp))
        return stages // pp
    if layers_per_chunk is not None:
        counted = account_for_embedding + account_for_loss
        if (num_layers + counted) % (pp * layers_per_chunk):
            raise_config_error_if(
                [
                    f"{_num_layers_text(num_layers, counted)} cannot be cut into chunks of "
                    f"--num-layers-per-virtual-pipeline-stage {layers_per_chunk} over --pipeline-model-parallel-size "
                    f"{pp}; choose {nearest_multiples_text(num_layers, pp * layers_per_chunk, -counted)} layers"
                ]
            )
        return (num_layers + counted) // (pp * layers_per_chunk)
    return chunks_per_rank or unsaid


def parse_pipeline_layout(layout: str) -> tuple[str, ...]:
    """Parse a layout string to one string of letters for each stage: `Et*3|(tt|)*2L` is Ettt, tt, tt, L.

    Letters: E embedding, t layer, m layer of multi-token prediction, L output layer and loss. `|` begins the next
    stage; `x*n` and `(...)*n` repeat; commas and blanks are ignored. Raises `ConfigError` for anything else.
    """
    groups, problems = [[""]], []
    for token in re.findall(r"\*\d+|.", re.sub(r"[\s,]", "", layout)):
        if token == "(":
            groups.append([""])
        elif token == ")" and len(groups) > 1:
            inner = "".join(groups.pop())
            groups[-1].append(inner)
        elif re.fullmatch(r"\*\d+", token) and groups[-1][-1]:
            groups[-1][-1] *= int(token[1:])
        elif token in "EtmL|":
            groups[-1].append(token)
        else:
            problems.append(f"{token!r} has no meaning there; use E t m L | ( ) and *n after a letter or a group")
    if len(groups) > 1:
        problems.append("a '(' is never closed")
    raise_config_error_if(f"--pipeline-model-parallel-layout {layout}: {problem}" for problem in problems)
    return tuple("".join(groups[0]).split("|"))


def _even_layer_counts(num_layers: int, pp: int, vpp: int, counted: int) -> tuple[list[str], list[int]]:
    """Return problems, and the same number of layers for every stage; `counted` of them are the embedding and the loss."""
    problems = []
    if (num_layers + counted) % (pp * vpp):
        problems.append(
            f"{_num_layers_text(num_layers, counted)} cannot be divided over {_num_pipeline_ranks_text(pp, vpp)}; choose "
            f"{nearest_multiples_text(num_layers, pp * vpp, -counted)} layers, or say how to cut with "
            "--pipeline-model-parallel-layout"
        )
    return problems, [(num_layers + counted) // (pp * vpp)] * (pp * vpp)


def _uneven_layer_counts(
    num_layers: int, pp: int, vpp: int, given: tuple[int | None, int | None], placement: Placement
) -> tuple[list[str], list[int]]:
    """Return problems, and the number of layers of each stage.

    given: layers of the first and the last rank over all chunks, or None; the other ranks share the rest evenly.
    """
    first, last = given
    ends = {
        flag: value
        for flag, value in (
            ("--decoder-first-pipeline-num-layers", first),
            ("--decoder-last-pipeline-num-layers", last),
        )
        if value is not None
    }
    problems = [
        f"{flag} {value} cannot be divided over {vpp} chunks of at least one layer; choose {nearest_multiples_text(value, vpp)}"
        for flag, value in ends.items()
        if value < 1 or value % vpp
    ]
    rest, ranks = num_layers - sum(ends.values()), pp - len(ends)
    problems += _uneven_rest_problems(num_layers, pp, vpp, ends)
    per_rank = [rest // max(ranks, 1)] * pp
    per_rank[0] = per_rank[0] if first is None else first
    per_rank[-1] = per_rank[-1] if last is None else last
    return problems, [per_rank[stage_rank_and_chunk(stage, pp, placement)[0]] // vpp for stage in range(pp * vpp)]


def _uneven_rest_problems(num_layers: int, pp: int, vpp: int, ends: Mapping[str, int]) -> list[str]:
    """Why the layers that `ends` (flag -> count of the first or last rank) leave cannot be divided over the other ranks."""
    words = " and ".join(f"{flag} {value}" for flag, value in ends.items())
    rest, ranks = num_layers - sum(ends.values()), pp - len(ends)
    if ranks < 0:
        return [f"{words} speak of {len(ends)} ranks, but --pipeline-model-parallel-size is {pp}"]
    if ranks == 0 and rest:
        return [
            f"{words} cover every rank of --pipeline-model-parallel-size {pp}, but leave {rest} of "
            f"--num-layers {num_layers}; choose --num-layers {num_layers - rest}"
        ]
    if ranks and (rest < 1 or rest % (ranks * vpp)):
        return [
            f"{words} leave {rest} of --num-layers {num_layers}, which cannot be divided over the other "
            f"{_num_pipeline_ranks_text(ranks, vpp)}; choose --num-layers {nearest_multiples_text(num_layers, ranks * vpp, num_layers - rest)}"
        ]
    return []


def _pipeline_layout_problems(stages: tuple[str, ...], num_layers: int, pp: int, vpp: int) -> list[str]:
    """Return why a parsed layout does not fit the network and the pipeline, a text each."""
    letters, sections = "".join(stages), []
    if letters.count("E") != 1 or not stages[0].startswith("E"):
        sections.append("E must stand once, at the very beginning")
    if letters.count("L") != 1 or not stages[-1].endswith("L"):
        sections.append("L must stand once, at the very end")
    if letters.count("t") != num_layers:
        sections.append(f"it has {letters.count('t')} t, but --num-layers is {num_layers}")
    problems = [f"--pipeline-model-parallel-layout {'|'.join(stages)}: {reason}" for reason in sections]
    if len(stages) != pp * vpp:
        problems += _stage_count_problem(len(stages), pp) or [
            f"--pipeline-model-parallel-layout: {len(stages)} stages, but {_num_pipeline_ranks_text(pp, vpp)} make {pp * vpp}"
        ]
    return problems


def _mtp_layout_problems(stages: tuple[str, ...], pp: int, placement: Placement) -> list[str]:
    """Return why the m of a parsed layout are at impossible places, a text each."""
    letters, homes = "".join(stages), [index for index, stage in enumerate(stages) if "m" in stage]
    layout = f"--pipeline-model-parallel-layout {'|'.join(stages)}"
    if not homes:
        return []
    if len(homes) > 1 or "m" in letters[: letters.rfind("t")] or homes[0] < len(stages) - 2:
        return [
            f"{layout}: all m must stand in one stage behind the last t, which is that of L or the one before it: what they "
            "make goes to L only"
        ]
    if len(stages) - 1 > homes[0] > 0 and stage_rank_and_chunk(homes[0], pp, placement)[0] == 0:
        return [
            f"{layout}: the stage of m is on the rank of the embedding, of which it needs a copy; choose "
            "--pipeline-model-parallel-size 3 or more, or put m beside L"
        ]
    return []


def _stage_count_problem(stages: int, pp: int) -> list[str]:
    """Return why a layout with so many stages cannot be placed on `pp` ranks, as a list of one text, or an empty list."""
    if stages % pp == 0:
        return []
    return [
        f"--pipeline-model-parallel-layout: {stages} stages are not a multiple of --pipeline-model-parallel-size {pp}; "
        f"write {nearest_multiples_text(stages, pp)} stages"
    ]


def _nonpositive_size_problems(num_layers: int, pp: int, vpp: int) -> list[str]:
    """Return a text for each of these sizes that is not positive."""
    sizes = {"--num-layers": num_layers, "--pipeline-model-parallel-size": pp, "the number of chunks a rank": vpp}
    return [f"{name} {size} is not a positive number" for name, size in sizes.items() if size < 1]


def _make_stage_specs(
    layers: Sequence[LayerPlan], counts: Sequence[int], pp: int, *, ahead: int, placement: Placement
) -> tuple[StageSpec, ...]:
    """Return stages with these numbers of layers. ahead: index of the stage with the final norm and MTP layers."""
    assert sum(counts) == len(layers) and min(counts) >= 0, f"stages of {counts} layers do not make {len(layers)}"
    specs, start = [], 0
    for index, count in enumerate(counts):
        own = tuple(layers[start : start + count])
        rank, chunk = stage_rank_and_chunk(index, pp, placement)
        specs.append(
            StageSpec(
                index=index,
                count=len(counts),
                rank=rank,
                chunk=chunk,
                layers=own,
                has_embedding=index == 0,
                has_output=index == len(counts) - 1,
                has_mtp=index == ahead,
                placement=placement,
            )
        )
        start += count
    return tuple(specs)


def _num_layers_text(num_layers: int, counted: int) -> str:
    extra = f" and {counted} for the embedding or the loss, {num_layers + counted} in all," if counted else ""
    return f"--num-layers {num_layers}{extra}"


def _num_pipeline_ranks_text(ranks: int, vpp: int) -> str:
    return f"{ranks} pipeline ranks" + (f" with {vpp} chunks each" if vpp > 1 else "")


def nearest_multiples_text(value: int, step: int, offset: int = 0) -> str:
    """The closest positive offset + k * step, k >= 1, on both sides of `value`, as words: `28 or 32`."""
    below = max(1, (value - offset) // step)
    return " or ".join(str(number) for k in (below, below + 1) if (number := offset + k * step) > 0)


def microbatch_group_problem(pp: int, m: int, group: int) -> str:
    """Return why m microbatches cannot be interleaved in groups of this size, or ""; a single group always can."""
    flag = f"--microbatch-group-size-per-virtual-pipeline-stage {group}"
    if group < pp:
        return f"{flag} is smaller than --pipeline-model-parallel-size {pp}; leave it out or choose {pp} or more"
    if m > group and 0 < m % group < pp:
        full = m - m % group
        return (
            f"{flag} leaves a last group of {m % group} of {m} microbatches, smaller than --pipeline-model-parallel-size {pp}, "
            f"which can deadlock; choose --global-batch-size so that a step has {full} or {full + pp} microbatches"
        )
    return ""
