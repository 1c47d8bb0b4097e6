"""What reinforcement learning keeps on a rank beside the policy in training, by formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.inference import MOST_CACHE_BYTES
from megatron.core.config.settings.optim import BYTES
from megatron.core.config.settings.run import RunConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.models.flops import RankMemory, estimate_memory_by_pipeline_rank
from megatron.rl.algorithms import ALGORITHMS
from megatron.rl.settings import RLConfig, generation_run_config, reference_checkpoint_path
from megatron.training.checkpoint.formats import open_checkpoint

TOGETHER = 64  # sequences decoded at once by each replica


def memory_beside_policy(rl: RLConfig, run: RunConfig, world_size: int) -> Mapping[str, float]:
    """Estimate the bytes on the fullest training rank beside the policy, by part: reference and critic, and, if it also
    generates, the generating copy and the KV cache.

    The KV cache is there while rollouts are sampled; activations are not.
    """
    ranks = _memory_by_pipeline_rank(run, world_size, trains=False)
    weights = BYTES[run.precision.param_dtype_name] * max(rank.parameters for rank in ranks)
    parts: dict[str, float] = {"reference": weights} if reference_checkpoint_path(rl, run) else {}
    if ALGORITHMS[rl.rl_algorithm].has_critic:
        parts["critic"] = max(rank.total for rank in ranks)
    return parts if rl.rl_generation_ranks else {**parts, **generation_memory(rl, run, world_size)}


def generation_memory(rl: RLConfig, run: RunConfig, world_size: int) -> Mapping[str, float]:
    """Estimate the bytes on the fullest generating rank, by part: beside the policy in training, or with
    --rl-generation-ranks all.
    """
    own, parts = rl.rl_generation_ranks, dict[str, float]()
    generating = generation_run_config(run, rl.inference_parallel_sizes) if rl.needs_network_copy(run) else run
    replicas = generating.parallel.data_parallel_size(own or world_size)
    if rl.needs_network_copy(run):
        copies = _memory_by_pipeline_rank(generating, own or world_size, trains=False)
        name = "network that generates" if own else "copy that generates"
        parts[name] = BYTES[run.precision.param_dtype_name] * max(rank.parameters for rank in copies)
    together = min(TOGETHER, -(-rl.rollouts_per_round * (1 + rl.generation_lag * rl.rl_partial_rollouts) // replicas))
    text = run.train.seq_length * _kv_bytes_per_token(generating)
    parts["keys and values"] = min(together * text, max(text, MOST_CACHE_BYTES))
    if scoring := _reward_model_bytes(rl.langrl_env_config):
        parts["reward models of the first rank"] = scoring
    return parts


def generation_rank_memory(rl: RLConfig, run: RunConfig, world_size: int) -> Mapping[str, float]:
    """Estimate the bytes on the fullest rank that only generates, by part; empty without --rl-generation-ranks.
    world_size: ranks that train.
    """
    return generation_memory(rl, run, world_size) if rl.rl_generation_ranks else {}


def train_and_generation_rank_lines(rl: RLConfig, run: RunConfig, world_size: int, hosts: Sequence[str]) -> list[str]:
    """Return lines on which ranks train and generate, their layout and memory. world_size: ranks that train.
    hosts: of all ranks.
    """
    ranks = _memory_by_pipeline_rank(run, world_size)
    training = {"policy in training": max(rank.total for rank in ranks), **memory_beside_policy(rl, run, world_size)}
    generating = generation_run_config(run, rl.inference_parallel_sizes)
    return [
        "who holds what, by the formulas, on the fullest rank of each kind:",
        f"  training: {_ranks_by_host_text(hosts, range(world_size))} ({_layout_text(run, world_size)}): {memory_parts_text(training)}",
        f"  generation: {_ranks_by_host_text(hosts, range(world_size, len(hosts)))} ({_layout_text(generating, rl.rl_generation_ranks)}): "
        f"{memory_parts_text(generation_rank_memory(rl, run, world_size))}; rank {world_size} plays the environments",
    ]


def _memory_by_pipeline_rank(run: RunConfig, world_size: int, *, trains: bool = True) -> tuple[RankMemory, ...]:
    """Estimate the memory of each pipeline rank. trains: with the microbatches of a step, not one."""
    dp = run.parallel.data_parallel_size(world_size)
    count = (run.train.global_batch_size or 1) // (run.train.micro_batch_size * dp) if trains else 1
    return estimate_memory_by_pipeline_rank(
        run, stage_specs_of_run(run), data_parallel_size=dp, num_microbatches=max(1, count)
    )


def _layout_text(run: RunConfig, world_size: int) -> str:
    """Return a mesh's sizes above 1 and its data-parallel size as text."""
    sizes = {
        "tensor": run.parallel.tensor_model_parallel_size,
        "pipeline": run.parallel.pipeline_model_parallel_size,
        "context": run.parallel.context_parallel_size,
        "expert": run.parallel.expert_model_parallel_size,
    }
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return " x ".join([*parts, f"data {run.parallel.data_parallel_size(world_size)}"])


def _ranks_by_host_text(hosts: Sequence[str], ranks: range) -> str:
    """Return which ranks are on which host as text: "ranks 0 to 7 on a, 8 to 15 on b"."""
    parts: list[str] = []
    for host, group in itertools.groupby(ranks, key=lambda rank: hosts[rank]):
        held = list(group)
        parts.append(f"{held[0]} to {held[-1]} on {host}" if len(held) > 1 else f"{held[0]} on {host}")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def fullest_rank_min_memory_by_part(rl: RLConfig, run: RunConfig, world_size: int) -> Mapping[str, float]:
    """Estimate the least bytes that the fullest rank needs, by part: in training or in generation, whichever is more."""
    ranks = _memory_by_pipeline_rank(run, world_size)
    fullest = max(ranks, key=lambda rank: rank.total)
    beside = dict(memory_beside_policy(rl, run, world_size))
    cache = beside.pop("keys and values", 0.0)
    training = {"policy in training": fullest.total, **beside}
    if rl.rl_offload_inference_model_weights_when_idle:
        training.pop("copy that generates", None)
    held = fullest.weights_and_optimizer
    if rl.rl_offload_optimizer_during_inference:
        held = BYTES[run.precision.param_dtype_name] * fullest.parameters
    generating: Mapping[str, float] = {"policy while it generates": held, **beside, "keys and values": cache}
    if rl.rl_generation_ranks:
        generating = generation_rank_memory(rl, run, world_size)
    return max(training, generating, key=lambda parts: sum(parts.values()))


def memory_problem(rl: RLConfig, run: RunConfig, world_size: int, memory: float) -> str:
    """Return a message if a rank needs more than its device's `memory` bytes, else ""."""
    parts = fullest_rank_min_memory_by_part(rl, run, world_size)
    if sum(parts.values()) <= memory:
        return ""
    return (
        run_does_not_fit_message(parts, memory) + ", --rl-offload-optimizer-during-inference, or a shorter --seq-length"
    )


def run_does_not_fit_message(parts: Mapping[str, float], memory: float) -> str:
    """Return the message that a run does not fit. parts: bytes by part."""
    return (
        f"the fullest rank needs at least {sum(parts.values()) / 2**30:.2f} GiB ({memory_parts_text(parts)}), and its device has {memory / 2**30:.2f} GiB "
        "for tensors; give more ranks, a larger --tensor-model-parallel-size or --pipeline-model-parallel-size, --use-distributed-optimizer"
    )


def _reward_model_bytes(path: str | None) -> float:
    """Return the bytes of the weights of all reward models in an environment file; 0 if it cannot be read."""
    try:
        entries = yaml.safe_load(Path(path or "").read_text(encoding="utf-8"))
        requested = [one["agent_args"] for one in entries if one.get("agent_type") == "reward_model"]
        formats = [
            one
            for arguments in requested
            for name, one in open_checkpoint(arguments["model"]).formats.items()
            if name.startswith("model.")
        ]
    except (OSError, ValueError, yaml.YAMLError, TypeError, AttributeError, KeyError, CheckpointError, ConfigError):
        return 0.0  # the run says what is wrong with it
    return float(sum(math.prod(one.shape) * one.dtype.itemsize for one in formats))


def _kv_bytes_per_token(run: RunConfig) -> float:
    """Return the bytes of a token's keys and values on the pipeline rank with most layers."""
    model, parallel = run.model, run.parallel
    if model.mla.multi_latent_attention:
        each: float = model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim
    else:
        groups = model.num_query_groups if model.group_query_attention else model.num_attention_heads
        assert groups is not None and model.kv_channels is not None, "a config that holds says them"
        each = 2.0 * max(1, groups // parallel.tensor_model_parallel_size) * model.kv_channels
    layers = max(sum(len(s.layers) for s in stage_specs_of_run(run) if s.rank == rank) for rank in range(parallel.pp))
    return layers * each * BYTES[run.precision.param_dtype_name]


def memory_parts_text(parts: Mapping[str, float]) -> str:
    """Return bytes by part as one line, in MiB or GiB."""
    return ", ".join(
        f"{name} {size / 2**30:.2f} GiB" if size >= 2**30 else f"{name} {size / 2**20:.2f} MiB"
        for name, size in parts.items()
    )
