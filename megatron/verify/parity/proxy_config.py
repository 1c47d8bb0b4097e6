"""A config made so small that a laptop runs it in seconds, with every feature that its flags choose.

    ranks      each degree above 1 becomes 2, or what its flags need; a pipeline without chunks keeps a middle stage if it fits
    network    the fewest layers that hold every kind of layer and fill every stage; narrow heads, few experts
    batch      several microbatches stay several, and an interleaved schedule has more than one group of them
    numbers    fp64, and nothing that is random, so that two layouts can agree to the last digits

What must be switched off to be comparable, or does not fit on so few ranks, is said: `ConfigChange.lost`. The result is checked by
the rules of any run; sizes are tried until all of them hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron.core.config.flags.declare import ConfigError, config_to_flat_dict, flag_name
from megatron.core.config.mixers.gated_delta_net import DeltaNet
from megatron.core.config.mixers.mamba import Mamba
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.data import DataConfig, TokenizerConfig
from megatron.core.config.settings.kernels import NAMED
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.optim import PrecisionConfig, ScheduleConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.config.settings.run import CheckpointConfig, LogConfig, RecomputeConfig, RunConfig
from megatron.plan.analytic_estimate import num_microbatches
from megatron.plan.repair import format_flag_value
from megatron.plan.setup import RunSetup
from megatron.preference.settings import PreferenceConfig
from megatron.verify.parity.proxy_layers import Values, proxy_depth_settings

VOCABULARY = 90  # ids of the made-up text: not a multiple of anything, so that padding is always at work
HEAD_SIZES = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A setting, before and after. lost: the change takes a feature out of the comparison."""

    name: str
    before: Any
    after: Any
    why: str
    lost: bool = False

    def __str__(self) -> str:
        flag = self.name if self.name in ("ranks", "data-parallel size") else flag_name(self.name)
        before, after = (
            ("nothing" if value in (None, ()) else format_flag_value(value)) for value in (self.before, self.after)
        )
        return f"{flag} {before} -> {after}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The small config, resolved and with a vocabulary, its ranks, and the task of a run of finetune.py."""

    config: RunConfig
    world_size: int
    changes: tuple[ConfigChange, ...]
    finetuning: PreferenceConfig | None = None

    @property
    def serial_config(self) -> RunConfig:
        """The config of the same network and batch on one rank; the split into microbatches stays."""
        moe = replace(
            self.config.model.moe,
            moe_token_dispatcher_type="allgather",
            moe_grouped_gemm=False,
            moe_shared_expert_overlap=False,
        )
        model = replace(self.config.model, moe=moe, padded_vocab_size=None)
        return replace(
            self.config,
            model=model.with_vocabulary(VOCABULARY, 1),
            parallel=ParallelConfig(),
            recompute=RecomputeConfig(),
        )


@dataclass(frozen=True, slots=True)
class ParallelDegrees:
    """Number of ranks on each axis. etp 0: the same as tp."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int = 1
    etp: int = 0

    @property
    def num_ranks(self) -> int:
        """Number of all ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_replicas(self) -> float:
        """Number of ranks that hold the same experts; no integer if the degrees do not fit."""
        return self.tp * self.cp * self.dp / (self.ep * (self.etp or self.tp))


def make_proxy_config(config: RunConfig, world_size: int, *, most_ranks: int = 8) -> ProxyConfig:
    """Return the smallest config with the features of a resolved one that keeps the rules. Raises `ConfigError`."""
    before = _config_without_files(config)
    first: list[str] = []
    for degrees in proxy_degree_candidates(config, world_size, most_ranks):
        for head in HEAD_SIZES:
            values, lost = _proxy_setting_values(before, world_size, degrees, head)
            small = RunSetup(before, world_size).with_values(
                {**values, **{name: value for name, (value, _) in lost.items()}}
            )
            resolved = small.config.resolve(degrees.num_ranks)
            small = RunSetup(resolved, degrees.num_ranks)
            broken = small.find_broken_rules()
            if not broken:
                model = resolved.model.with_vocabulary(VOCABULARY, degrees.tp)
                return ProxyConfig(
                    replace(resolved, model=model),
                    degrees.num_ranks,
                    _reported_changes(config, world_size, small, degrees, lost),
                )
            first = first or [one.says for one in broken]
    raise ConfigError(
        "\n".join(
            [
                f"no small form of this config on at most {most_ranks} ranks keeps the rules; the first that was tried:",
                *(f"  {problem}" for problem in first),
            ]
        )
    )


def proxy_degree_candidates(config: RunConfig, world_size: int, most_ranks: int) -> list[ParallelDegrees]:
    """Return degrees to try: those that keep most of the parallelism first, and of equals those with fewest ranks."""
    parallel = config.parallel
    dp = parallel.data_parallel_size(world_size)
    given = ParallelDegrees(
        parallel.tp,
        parallel.pp,
        parallel.context_parallel_size,
        dp,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size or 0,
    )
    chunks = len(stage_specs_of_run(config)) // parallel.pp
    sizes = [range(1, min(size, 4) + 1) for size in (given.tp, given.pp, given.cp, given.dp, given.ep, given.etp)]
    choices = []
    axes = [[size for size in axis if size != 3 or place == 1] for place, axis in enumerate(sizes[:5])]
    for tp, pp, cp, dp, ep in product(*axes):
        for etp in (0,) if not given.etp else (1, 2, 4):
            one = ParallelDegrees(tp, pp, cp, dp, ep, etp)
            if one.num_ranks <= most_ranks and one.expert_replicas == int(one.expert_replicas):
                choices.append(one)
    return sorted(
        choices,
        key=lambda one: (-_kept_parallelism_score(one, given, config, chunks), one.num_ranks, one.pp, one.cp, one.tp),
    )


def _kept_parallelism_score(one: ParallelDegrees, given: ParallelDegrees, config: RunConfig, chunks: int) -> float:
    """Return a score of how much of the layout's parallelism these degrees keep. chunks: of each pipeline rank."""
    weights = {"tp": 8.0, "pp": 7.0, "cp": 6.0, "ep": 6.0, "dp": 5.0}
    total = sum(weight for axis, weight in weights.items() if getattr(given, axis) > 1 and getattr(one, axis) > 1)
    total += 2.0 * (given.expert_replicas > 1 and one.expert_replicas > 1)
    etp, other = (one.etp or one.tp) - one.tp, (given.etp or given.tp) - given.tp
    total += 2.0 * ((etp > 0) - (etp < 0) == (other > 0) - (other < 0)) + ((one.etp > 1) == (given.etp > 1))
    total += 1.0 * (given.pp > 2 and chunks == 1 and one.pp > 2)  # a stage that neither embeds nor predicts
    levels = config.parallel.hierarchical_context_parallel_sizes
    total += 2.0 * (levels is not None and min(levels) > 1 and one.cp == 4)
    total += 2.0 * (config.parallel.hybrid_context_parallel and one.dp == 4)  # blocks of two, and of four
    return total


def _config_without_files(config: RunConfig) -> RunConfig:
    """Return the config on random text, without any files."""
    data = DataConfig(
        mock_data=True,
        reset_position_ids=config.data.restarts_positions,
        reset_attention_mask=config.data.separates_documents,
    )
    return replace(
        config,
        data=data,
        tokenizer=TokenizerConfig(),
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
        precision=PrecisionConfig(fp64=True),
        schedule=ScheduleConfig(lr=1e-2, lr_decay_style="constant"),
    )


def _proxy_setting_values(
    config: RunConfig, world_size: int, degrees: ParallelDegrees, head: int
) -> tuple[Values, dict[str, tuple[Any, str]]]:
    """Return (setting -> value of the proxy, setting -> (value, why) of what is lost). head: head size to try."""
    parallel = config.parallel
    chunks = len(stage_specs_of_run(config)) // parallel.pp
    proxy_chunks = min(chunks, 2) if degrees.pp > 1 else 1
    values: Values = {
        "tensor_model_parallel_size": degrees.tp,
        "pipeline_model_parallel_size": degrees.pp,
        "context_parallel_size": degrees.cp,
        "expert_model_parallel_size": degrees.ep,
        "expert_tensor_parallel_size": degrees.etp or None,
        "distributed_timeout_minutes": 2.0,
        "distributed_backend": "auto",
    }
    values |= proxy_depth_settings(config, degrees.pp, proxy_chunks)
    values |= _proxy_widths(config, degrees, head)
    values |= _proxy_state_layer_settings(config, degrees)
    values |= _proxy_lengths(config, degrees)
    values |= _proxy_experts(config, degrees)
    values |= _proxy_batch_settings(config, world_size, degrees, proxy_chunks)
    values |= _proxy_training_settings(config)
    if (
        parallel.ddp_bucket_size
        or parallel.ddp_num_buckets
        or parallel.overlap_grad_reduce
        or parallel.overlap_param_gather
    ):
        values |= {"ddp_bucket_size": 400, "ddp_num_buckets": None}
    return values, _proxy_dropped_settings(config, degrees)


# Sizes.


def _proxy_state_layer_settings(config: RunConfig, degrees: ParallelDegrees) -> Values:
    """Return small sizes of recurrent-state layers; groups stay fewer or more than the ranks that share a sequence."""
    model, values = config.model, dict[str, Any]()
    hybrid, parallel, mixers = (
        model.hybrid,
        config.parallel,
        {mixer.name for row in network_layer_plans(model) for mixer in row.mixers},
    )
    away = degrees.dp if parallel.hybrid_context_parallel else degrees.cp

    def proxy_num_state_groups(groups: int) -> int:
        """Return the number of groups of the proxy."""
        few = groups // parallel.tp < parallel.context_parallel_size
        return degrees.tp * (1 if few else away) * (1 if groups == parallel.tp else 2 if few and away > 2 else 1)

    if Mamba.name in mixers:
        groups = proxy_num_state_groups(hybrid.mamba_num_groups)
        heads = 2 * degrees.tp * away * max(1, groups // (degrees.tp * away))
        values |= {"mamba_num_groups": groups, "mamba_num_heads": heads, "mamba_head_dim": 4, "mamba_state_dim": 6}
    if DeltaNet.name in mixers:
        keys = proxy_num_state_groups(hybrid.linear_num_key_heads)
        ratio = 1 if hybrid.linear_num_key_heads == hybrid.linear_num_value_heads else 2
        values |= {
            "linear_num_key_heads": keys,
            "linear_num_value_heads": ratio * degrees.tp * away * max(1, keys // (degrees.tp * away)),
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 4,
        }
    return values


def _proxy_num_heads_and_groups(config: RunConfig, degrees: ParallelDegrees, unit: int) -> tuple[int, int]:
    """Return (heads, query groups, 0 if each head has its own keys). unit: ranks that heads are divided over."""
    model, groups, heads = config.model, 0, 0
    if model.group_query_attention and model.num_query_groups < model.num_attention_heads:
        copied = model.num_query_groups < config.parallel.tp  # more tensor ranks than groups: they hold copies
        groups = min(model.num_query_groups, max(1, degrees.tp // 2) if copied else max(2, degrees.tp))
        heads = math.lcm(unit, 2 * groups)
    heads = max(heads, unit)
    return heads * -(-4 // heads), groups


def _proxy_latent_sizes(model: ModelConfig, head: int) -> Values:
    turned = head // 2
    return {
        "q_lora_rank": None if model.mla.q_lora_rank is None else 12,
        "kv_lora_rank": 8,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": turned,
        "v_head_dim": 5 if model.has_uneven_head_sizes else 6 + turned,
    }


def _proxy_mrope_section(given: Sequence[int], pairs: int) -> tuple[int, ...]:
    """Return an mrope_section of so many pairs, for the axes (time, height, width) that the given one uses."""
    used = [place for place, size in enumerate(given) if size] or [0]
    section = [pairs // len(used) if place in used else 0 for place in range(len(given))]
    section[used[0]] += pairs - sum(section)
    return tuple(section)


def _proxy_widths(config: RunConfig, degrees: ParallelDegrees, head: int) -> Values:
    """Return settings of heads, groups and widths. head: head size to try."""
    model, mla = config.model, config.model.mla
    unit = degrees.tp * _num_head_exchange_ranks(config, degrees)
    heads, groups = _proxy_num_heads_and_groups(config, degrees, unit)
    usual = model.kv_channels * model.num_attention_heads == model.hidden_size or mla.multi_latent_attention
    hidden = 32 if heads * head != 32 or usual else 48
    if usual and not mla.multi_latent_attention:
        hidden = heads * head
    values: Values = {
        "num_attention_heads": heads,
        "num_query_groups": groups or heads,
        "hidden_size": hidden,
        "kv_channels": head,
        "ffn_hidden_size": 48,
        "make_vocab_size_divisible_by": 4,
        "padded_vocab_size": None,
        "init_method_std": 0.1,
    }
    if model.group_query_attention and not groups:
        values["num_query_groups"] = heads
    if model.embedding_init_method_std is not None:
        values["embedding_init_method_std"] = 0.1
    if mla.multi_latent_attention:
        values |= _proxy_latent_sizes(model, head)
    if model.rope.mrope_section is not None:
        values["mrope_section"] = _proxy_mrope_section(
            model.rope.mrope_section, int(head * model.rope.rotary_percent) // 2
        )
    if model.rope.position_embedding_type == "relative":
        values |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    return values


def _num_head_exchange_ranks(config: RunConfig, degrees: ParallelDegrees) -> int:
    """Return the number of ranks over which context parallelism exchanges heads (all-to-all), 1 for none."""
    kinds, levels = config.parallel.cp_comm_type, config.parallel.hierarchical_context_parallel_sizes
    if "a2a" in kinds:
        return degrees.dp if config.parallel.hybrid_context_parallel else degrees.cp
    return min(levels[0], 2) if levels is not None and degrees.cp > 1 else 1


def _proxy_lengths(config: RunConfig, degrees: ParallelDegrees) -> Values:
    """Return sequence lengths that the ranks can shard, and windows shorter than they."""
    model, train, parallel = config.model, config.train, config.parallel
    if model.architecture.classifies_images:  # its sequence follows from the image
        return {}
    unit = math.lcm(2 * degrees.cp, degrees.cp * degrees.tp)
    length = unit * -(-16 // unit)
    values: Values = {
        "seq_length": length,
        "encoder_seq_length": None if train.encoder_seq_length is None else length,
        "max_position_embeddings": length if model.max_position_embeddings == train.seq_length else length + 4,
    }
    if model.architecture.is_encoder_decoder:
        values["decoder_seq_length"] = length if train.decoder_seq_length == train.seq_length else length // 2
    if model.parsed_window_size is not None:
        sides = (
            side if side in (-1, 0) else length if side >= train.seq_length else min(side, length // 4)
            for side in model.parsed_window_size
        )
        values["window_size"] = ",".join(map(str, sides))
    levels = parallel.hierarchical_context_parallel_sizes
    if levels is not None:
        inner = 2 if levels[0] > 1 and degrees.cp > 1 else 1
        values["hierarchical_context_parallel_sizes"] = (inner, degrees.cp // inner)
    if parallel.hybrid_context_parallel:
        values["max_seqlen_per_dp_cp_rank"] = -(-length // degrees.dp)
    return values


def _proxy_experts(config: RunConfig, degrees: ParallelDegrees) -> Values:
    """Return settings for few experts, with top-k and groups small but still distinguishable."""
    moe = config.model.moe
    if not moe.num_experts:
        return {}
    topk, groups, taken = moe.moe_router_topk, moe.moe_router_num_groups, moe.moe_router_group_topk
    values: Values = {
        "moe_ffn_hidden_size": 24,
        "moe_use_upcycling": False,
        "moe_upcycling_granularity": 1,
        "moe_router_dtype": None,
    }
    if groups is not None and taken is not None:
        small = min(taken, 2)
        groups = small if groups == taken else 2 * small
        values |= {"moe_router_num_groups": groups, "moe_router_group_topk": small}
        experts, topk = 2 * groups * -(-degrees.ep // (2 * groups)), small * min(2, max(1, topk // taken))
    else:
        experts = max(4, 2 * degrees.ep)
        topk = experts if topk == moe.num_experts else min(topk, 2)
    values |= {"num_experts": experts, "moe_router_topk": topk}
    if moe.moe_shared_expert_intermediate_size is not None:
        values["moe_shared_expert_intermediate_size"] = 16
    return values


def _proxy_batch_settings(config: RunConfig, world_size: int, degrees: ParallelDegrees, proxy_chunks: int) -> Values:
    """Return batch settings with as many microbatches as exercise the schedule of `proxy_chunks` chunks a rank."""
    train, parallel = config.train, config.parallel
    count = num_microbatches(config, world_size)
    values: Values = {
        "micro_batch_size": min(train.micro_batch_size, 2),
        "rampup_batch_size": None,
        "step_batch_size_schedule": None,
        "decrease_batch_size_if_needed": False,
        "train_iters": 8,
        "train_samples": None,
    }
    if proxy_chunks > 1:
        group = parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pp
        small = degrees.pp if group <= parallel.pp else 2 * degrees.pp
        values["microbatch_group_size_per_virtual_pipeline_stage"] = (
            small if parallel.microbatch_group_size_per_virtual_pipeline_stage else None
        )
        count = 2 * small if count >= 2 * group else small
    else:
        values["microbatch_group_size_per_virtual_pipeline_stage"] = None
        count = min(count, (2 if parallel.overlap_moe_expert_parallel_comm else 1) * degrees.pp + 1)
    values["global_batch_size"] = values["micro_batch_size"] * degrees.dp * count
    return values


def _proxy_training_settings(config: RunConfig) -> Values:
    """Return training settings under which an update is visible from the first step, with a gradient that is clipped."""
    optimizer, model = config.optimizer, config.model
    values: Values = {"adam_eps": 1e-6, "skip_train": False, "iterations_to_skip": (), "deterministic_mode": False}
    if optimizer.clip_grad > 0:
        values["clip_grad"] = 0.1
    if optimizer.decoupled_lr is not None:
        values |= {"decoupled_lr": 2e-2, "decoupled_min_lr": None}
    if optimizer.weight_decay_incr_style != "constant":
        values |= {
            "weight_decay": optimizer.end_weight_decay,
            "start_weight_decay": None,
            "end_weight_decay": None,
            "weight_decay_incr_style": "constant",
        }
    if model.qk_clip:
        values["qk_clip_threshold"] = 0.02
    if model.activation_func_clamp_value is not None:
        values["activation_func_clamp_value"] = 0.3
    return values


def _layout_dependent_moe_settings(config: RunConfig, degrees: ParallelDegrees) -> dict[str, tuple[Any, str]]:
    """Return setting -> (value, why) of MoE settings whose results depend on the layout."""
    moe = config.model.moe
    lost: dict[str, tuple[Any, str]] = {}
    if moe.moe_expert_capacity_factor is not None and degrees.tp * degrees.cp > 1:
        why = "what is over capacity depends on how tokens lie on tensor and context ranks"
        lost |= {
            "moe_expert_capacity_factor": (None, why),
            "moe_pad_expert_input_to_capacity": (False, why),
            "moe_token_drop_policy": ("probs", why),
        }
    kinds = moe.moe_router_load_balancing_type
    if moe.num_experts and "global_aux_loss" in kinds and degrees.dp > 1:
        other = next(kind for kind in ("aux_loss", "seq_aux_loss", "none") if kind not in kinds)
        lost["moe_router_load_balancing_type"] = (
            tuple(other if kind == "global_aux_loss" else kind for kind in kinds),
            "it looks at the microbatches so far, which are others on one rank",
        )
    return lost


def _proxy_dropped_gpu_settings(config: RunConfig) -> dict[str, tuple[Any, str]]:
    """Return setting -> (value, why) of kernels and libraries that a CPU does not have."""
    model = config.model
    lost: dict[str, tuple[Any, str]] = {}
    if model.attention_backend not in ("auto", "fused", "unfused", "local"):
        lost["attention_backend"] = ("auto", "this kernel needs a GPU")
    if any(word in _ON_GPUS for word in model.kernels.kernel):
        lost["kernel"] = (
            tuple(word for word in model.kernels.kernel if word not in _ON_GPUS),
            "this kernel needs a GPU",
        )
    if model.moe.requested_dispatch_library == "deepep":
        lost |= {
            "moe_enable_deepep": (False, "DeepEP needs GPUs"),
            "moe_flex_dispatcher_backend": ("alltoall", "DeepEP needs GPUs"),
        }
    return lost


def _proxy_dropped_settings(config: RunConfig, degrees: ParallelDegrees) -> dict[str, tuple[Any, str]]:
    """Return setting -> (value, why) of what two layouts cannot agree on, or a CPU does not have."""
    model, moe = config.model, config.model.moe
    lost: dict[str, tuple[Any, str]] = {}
    random = "random numbers differ between layouts"
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(model, name) and degrees.num_ranks > 1:
            lost[name] = (0.0, random)
    if moe.moe_input_jitter_eps:
        lost["moe_input_jitter_eps"] = (None, random)
    if any("*" in target for target in model.adapter.lora_targets or ()):
        lost["lora_targets"] = (("all-linear",), "the layers that it names are not those of the small network")
    lost |= _layout_dependent_moe_settings(config, degrees)
    if moe.moe_enable_routing_replay:
        lost["moe_enable_routing_replay"] = (False, "choices are not replayed")
    return lost | _proxy_dropped_gpu_settings(config)


_ON_GPUS = ("grouped_linear=torch", *(f"{op}=triton" for op in NAMED))
_FORMATS = ("fp16", "bf16", "fp64", "moe_router_dtype")
_WHY: Mapping[str, str] = {
    "adam_eps": "above the rounding of gradients that are zero",
    "init_method_std": "narrow layers need larger weights",
    "clip_grad": "so that the gradient is clipped",
    "qk_clip_threshold": "so that heads are clipped",
    "activation_func_clamp_value": "so that something is cut off",
    "ddp_bucket_size": "several buckets, which end anywhere",
    "lr": "constant from the first step on, so that the update shows",
}


def _reported_changes(
    config: RunConfig, world_size: int, small: RunSetup, degrees: ParallelDegrees, lost: Mapping[str, tuple[Any, str]]
) -> tuple[ConfigChange, ...]:
    """Return the changes of all settings of layout, network and training between config and proxy."""
    before, after = config_to_flat_dict(config), config_to_flat_dict(small.config)
    data_parallel = config.parallel.data_parallel_size(world_size), degrees.dp
    axes = {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    }
    changes = [ConfigChange("ranks", world_size, degrees.num_ranks, "")] if world_size != degrees.num_ranks else []
    if data_parallel[0] != data_parallel[1]:
        changes.append(
            ConfigChange("data-parallel size", *data_parallel, *_proxy_degree_reason_and_loss(*data_parallel))
        )
    for name in _names_of_reported_settings(config):
        if before[name] != after[name] and name not in lost:
            why = (
                _proxy_degree_reason_and_loss(before[name], after[name])
                if name in axes
                else (_WHY.get(name, ""), False)
            )
            changes.append(ConfigChange(name, before[name], after[name], *why))
    changes += [
        ConfigChange(name, before[name], value, why, lost=True)
        for name, (value, why) in lost.items()
        if before[name] != value
    ]
    return tuple(changes)


def _proxy_degree_reason_and_loss(before: int, after: int) -> tuple[str, bool]:
    """Return (reason, lost). lost: a parallel degree above 1 became 1, so that its form of parallelism is not tested
    any more; reason: that it does not fit, else "".
    """
    return ("does not fit on so few ranks", True) if before > 1 and after == 1 else ("", False)


def _names_of_reported_settings(config: RunConfig) -> Iterator[str]:
    """Yield the settings whose changes are reported: not those of data, files, reports and duration."""
    silent = set(
        """
        train_iters train_samples distributed_timeout_minutes distributed_backend skip_train iterations_to_skip
        make_vocab_size_divisible_by moe_use_upcycling moe_upcycling_granularity true_vocab_size deterministic_mode
        """.split()
    )
    parts = (config.parallel, config.model, config.recompute, config.train, config.optimizer)
    yield from (name for part in parts for name in config_to_flat_dict(part) if name not in silent)
    yield from (*_FORMATS[:3], "lr")
