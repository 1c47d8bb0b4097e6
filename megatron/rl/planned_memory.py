"""What reinforcement learning keeps on a rank beside the policy in training, by formulas."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.config.settings.run import RunConfig
from megatron.core.config.stages import stages_of
from megatron.core.models.flops import BYTES, rank_memory
from megatron.rl.algorithms import ALGORITHMS
from megatron.rl.settings import RLConfig, generation_config, reference_folder

TOGETHER = 64  # sequences decoded at once by each replica


def memory_beside(rl: RLConfig, run: RunConfig, world_size: int) -> Mapping[str, float]:
    """Return bytes of the fullest rank: of the reference, the critic, the copy that generates, and the cache of keys and values.

    The cache is there while rollouts are sampled, and the activations of training are not.
    """
    size, dp = BYTES[run.precision.dtype], run.parallel.data_parallel_size(world_size)
    ranks = rank_memory(run, stages_of(run), data_parallel_size=dp, num_microbatches=1)
    weights = size * max(rank.parameters for rank in ranks)
    parts: dict[str, float] = {"reference": weights} if reference_folder(rl, run) else {}
    if ALGORITHMS[rl.rl_algorithm].has_critic:
        parts["critic"] = max(rank.total for rank in ranks)
    generating = generation_config(run, rl.inference_sizes) if rl.copies_network(run) else run
    replicas = generating.parallel.data_parallel_size(world_size)
    if rl.copies_network(run):
        copies = rank_memory(generating, stages_of(generating), data_parallel_size=replicas, num_microbatches=1)
        parts["copy that generates"] = size * max(rank.parameters for rank in copies)
    together = min(TOGETHER, -(-rl.rollouts_per_round * (1 + rl.lag * rl.rl_partial_rollouts) // replicas))
    parts["keys and values"] = together * run.train.seq_length * _bytes_per_token(generating)
    return parts


def _bytes_per_token(run: RunConfig) -> float:
    """Bytes of a token's keys and values on the rank that has most layers."""
    model, parallel = run.model, run.parallel
    if model.mla.multi_latent_attention:
        each: float = model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim
    else:
        groups = model.num_query_groups if model.group_query_attention else model.num_attention_heads
        assert groups is not None and model.kv_channels is not None, "a config that holds says them"
        each = 2.0 * max(1, groups // parallel.tensor_model_parallel_size) * model.kv_channels
    layers = max(sum(len(s.layers) for s in stages_of(run) if s.rank == rank) for rank in range(parallel.pp))
    return layers * each * BYTES[run.precision.dtype]


def memory_line(parts: Mapping[str, float]) -> str:
    """The parts in a line, in MiB."""
    return ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in parts.items())
