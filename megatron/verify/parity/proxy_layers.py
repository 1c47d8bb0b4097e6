"""The layers of a proxy config: the fewest that hold every kind of layer and fill every stage, and where stages begin."""

from __future__ import annotations

from typing import Any

from megatron.core.config.plan.layers import LayerPlan, network_layer_plans, parse_pipeline_layout
from megatron.core.config.plan.pattern import layer_symbols, mixer_and_mlp_of_symbol
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.run import RunConfig

Values = dict[str, Any]


def proxy_depth_settings(config: RunConfig, pp: int, chunks: int) -> Values:
    """The fewest layers that fill pp * chunks stages and hold every kind, and where they are cut."""
    model, parallel = config.model, config.parallel
    rows, stages = _layer_kinds(config), pp * chunks
    counted = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    depths = min(model.mtp.mtp_num_layers or 0, 2)
    values: Values = {
        "mtp_num_layers": depths or None,
        "num_virtual_stages_per_pipeline_rank": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
    }
    least = max(len(set(rows)), 2)
    if stages == 1:
        layers = least
        values |= {"account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False}
    elif parallel.pipeline_model_parallel_layout is not None:
        cut = _proxy_pipeline_layout(
            parse_pipeline_layout(parallel.pipeline_model_parallel_layout), stages, least, depths
        )
        layers = "".join(cut).count("t")
        values["pipeline_model_parallel_layout"] = "|".join(cut)
    elif first is not None or last is not None:
        small = _uneven_layers_per_rank(config, pp, chunks)
        layers = sum(small)
        values |= {
            "decoder_first_pipeline_num_layers": None if first is None else small[0],
            "decoder_last_pipeline_num_layers": None if last is None else small[-1],
            "num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None,
        }
    else:
        each = -(-(least + counted) // stages)
        layers = each * stages - counted
        if chunks > 1:
            by_layers = parallel.num_layers_per_virtual_pipeline_stage is not None
            values["num_layers_per_virtual_pipeline_stage" if by_layers else "num_virtual_stages_per_pipeline_rank"] = (
                each if by_layers else chunks
            )
    return values | _proxy_layer_settings(config, layers, rows) | _proxy_recompute_settings(config)


def _uneven_layers_per_rank(config: RunConfig, pp: int, chunks: int) -> list[int]:
    """Return the layers of each pipeline rank if the first or last has another number: one or two a chunk, alike."""
    parallel = config.parallel
    counts = [
        sum(len(stage.layers) for stage in stage_specs_of_run(config) if stage.rank == rank)
        for rank in range(parallel.pp)
    ]
    middle = counts[len(counts) // 2]
    given = {0: parallel.decoder_first_pipeline_num_layers, pp - 1: parallel.decoder_last_pipeline_num_layers}
    ends = {place: count for place, count in given.items() if count is not None}
    if all(count > middle for count in ends.values()):
        return [chunks * (2 if place in ends else 1) for place in range(pp)]
    return [chunks * (1 if ends.get(place, middle) < middle else 2) for place in range(pp)]


def _layer_kinds(config: RunConfig) -> list[tuple[Any, ...]]:
    """Return a row for each layer with what distinguishes kinds of layers."""
    ways = config.parallel.cp_comm_type
    rows = network_layer_plans(config.model)
    return [
        (
            row.mixer,
            row.causal,
            row.has_cross_attention,
            row.window,
            row.rope,
            row.mlp,
            ways[place] if len(ways) == len(rows) else "",
        )
        for place, row in enumerate(rows)
    ]


def _proxy_layer_settings(config: RunConfig, count: int, rows: list[tuple[Any, ...]]) -> Values:
    """Return settings for `count` layers, and for which of them have a property. rows: kinds of the original layers."""
    model = config.model
    if model.architecture.is_encoder_decoder:
        encoder = -(-count // 2)
        return {"num_layers": encoder, "encoder_num_layers": encoder, "decoder_num_layers": count - encoder}
    values: Values = {"num_layers": count}
    picked = _representative_layers(rows, count)
    small = [network_layer_plans(model)[place] for place in picked]
    return (
        values | (_proxy_pattern(config, small) if model.is_hybrid else {}) | _per_layer_settings(config, picked, small)
    )


def _per_layer_settings(config: RunConfig, picked: list[int], small: list[LayerPlan]) -> Values:
    """Return settings that say of each layer if it has a property. picked: original layers; small: their plans."""
    model, values = config.model, dict[str, Any]()
    if model.window_attn_skip_freq is not None:
        values["window_attn_skip_freq"] = _zero_one_list_text([row.window is not None for row in small])
    if model.rope.no_rope_freq is not None:
        values["no_rope_freq"] = _zero_one_list_text([not row.rope for row in small])
    if model.hybrid.experimental_attention_variant is not None:
        values["linear_attention_freq"] = _zero_one_list_text([not row.has_attention for row in small])
    if model.moe.num_experts and not model.is_hybrid:
        every = all(row.mlp == "moe" for row in small)
        values["moe_layer_freq"] = "1" if every else _zero_one_list_text([row.mlp == "moe" for row in small])
    if len(config.parallel.cp_comm_type) > 1:
        values["cp_comm_type"] = tuple(config.parallel.cp_comm_type[place] for place in picked)
    return values


def _proxy_pattern(config: RunConfig, rows: list[LayerPlan]) -> Values:
    """Return the --hybrid-layer-pattern of these layers, with up to two depths of multi-token prediction."""
    model = config.model
    symbols = {mixer_and_mlp_of_symbol(symbol): symbol for symbol in layer_symbols()}
    depths = model.hybrid.mtp_patterns[:2]
    pattern = "/".join(("".join(symbols[row.mixer, row.mlp] for row in rows), *depths))
    return {"hybrid_layer_pattern": pattern, "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0}


def _representative_layers(rows: list[tuple[Any, ...]], count: int) -> list[int]:
    """Return indices of `count` layers: the first of each kind, others spread evenly; repeated if there are too few."""
    picked = {rows.index(kind) for kind in rows}
    spread = [round(place * (len(rows) - 1) / max(1, count - 1)) for place in range(count)]
    for place in [*spread, *range(len(rows))]:
        if len(picked) < count:
            picked.add(place)
    return sorted([*sorted(picked), *[len(rows) - 1] * (count - len(picked))])


def _zero_one_list_text(on: list[bool]) -> str:
    return f"[{','.join(str(int(one)) for one in on)}]"


def _proxy_pipeline_layout(stages: tuple[str, ...], count: int, least: int, depths: int) -> list[str]:
    """Return a pipeline layout of `count` stages: first, last and some between, each with one or two layers."""
    spread = [round(place * (len(stages) - 1) / (count - 1)) for place in range(count)]
    if count > 2 and "m" in stages[-2]:
        spread[-2] = len(stages) - 2
    few = min((stage.count("t") for stage in stages if "t" in stage), default=1)
    small = [_proxy_stage_layout(stages[place], few, depths) for place in spread]
    if depths and not any("m" in stage for stage in small):
        small[-1] = small[-1].replace("L", "m" * depths + "L")
    home = next((place for place, stage in enumerate(small) if "t" in stage), 0)
    missing = least - "".join(small).count("t")
    head = 1 if small[home].startswith("E") else 0
    small[home] = small[home][:head] + "t" * max(0, missing) + small[home][head:]
    return small


def _proxy_stage_layout(stage: str, few: int, depths: int) -> str:
    """Return a stage's layout: one layer if it had `few`, two if more, and `depths` of multi-token prediction."""
    layers = min(2, 1 + (stage.count("t") != few)) if "t" in stage else 0
    ahead = depths if "m" in stage else 0
    return "E" * ("E" in stage) + "t" * layers + "m" * ahead + "L" * ("L" in stage)


def _proxy_recompute_settings(config: RunConfig) -> Values:
    choice = config.recompute
    return (
        {}
        if choice.recompute_num_layers is None
        else {
            "recompute_num_layers": min(choice.recompute_num_layers, 2 if choice.recompute_method == "uniform" else 1)
        }
    )
