"""What an engine is made with: checks of its settings, the size of its cache, and the kernel that reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.inference import MOST_CACHE_BYTES, InferenceConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.kernels.choice.table import CANDIDATES, KernelRequirements, select_kernels
from megatron.core.kernels.ops import paged
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.inference import cuda_graphs
from megatron.inference.cache import cache_bytes_per_token
from megatron.inference.model_runner import cached_layers
from megatron.inference.recurrent_states import RecurrentStateDtypes, recurrent_state_bytes, stateful_mixers

_GRAPHS = 16  # shapes of a step


def engine_setting_problems(
    stages: Sequence[GPTModel], config: InferenceConfig, draft: Sequence[GPTModel]
) -> Iterator[str]:
    """Yield why these settings do not fit this network."""
    build, graphs = stages[0].build, config.inference_dynamic_batching_num_cuda_graphs
    if build.mesh.cp.size > 1:
        yield "text is generated without --context-parallel-size; leave it out, since sequences are not cut then"
    if build.model.rope.position_embedding_type == "relative":
        yield "text is not generated with --position-embedding-type relative"
    if stateful_mixers(draft):
        yield "a draft model whose layers keep a state cannot take back what is not accepted; give one with attention alone"
    predicting = [stage.mtp for stage in stages if stage.mtp is not None]
    if config.num_speculative_tokens and not draft and stateful_mixers(predicting):
        yield (
            "--num-speculative-tokens: layers of multi-token prediction that keep a state cannot take back what is not accepted; leave it out, "
            "or give a draft model"
        )
    yield from _speculation_problems(build, config, draft)
    if graphs and (reason := cuda_graphs.graph_capture_obstacle(stages)):
        yield f"--inference-dynamic-batching-num-cuda-graphs {graphs} cannot be had: {reason}; leave it out"


def _speculation_problems(
    build: LayerBuildContext, config: InferenceConfig, draft: Sequence[GPTModel]
) -> Iterator[str]:
    """Yield why speculative decoding cannot run as requested. draft: the stages of the draft model, if there is one."""
    guesses, depths = config.num_speculative_tokens, build.model.mtp.mtp_num_layers or 0
    if draft and not guesses or guesses and not (draft or depths):
        yield (
            "--num-speculative-tokens needs a draft model or multi-token prediction, and a draft model needs "
            "--num-speculative-tokens"
        )
    elif not draft and guesses > depths:
        yield (
            f"--num-speculative-tokens {guesses} is more than the network's {depths} layers of multi-token prediction guess; "
            f"give {depths} or fewer, or a draft"
        )
    if guesses and not draft and build.tp_region.sequence_parallel:
        yield "multi-token prediction guesses without --sequence-parallel; leave it out"
    if draft:
        yield from _draft_problems(draft[0].build.model, build.model, config)


def _draft_problems(draft: ModelConfig, network: ModelConfig, config: InferenceConfig) -> Iterator[str]:
    """Yield why a draft model does not fit the network: vocabulary or positions."""
    if draft.true_vocab_size != network.true_vocab_size:
        yield (
            f"the draft knows {draft.true_vocab_size} ids and the network {network.true_vocab_size}; give a draft "
            "with the same tokenizer"
        )
    longest = config.inference_max_seq_length or network.max_position_embeddings
    if draft.max_position_embeddings < longest:
        yield (
            f"the draft has {draft.max_position_embeddings} positions, fewer than the {longest} of a text; give "
            f"--inference-max-seq-length {draft.max_position_embeddings} or another draft"
        )


def choose_paged_attention(build: LayerBuildContext, config: InferenceConfig) -> Callable[..., Tensor] | None:
    """Return the kernel that reads cache blocks in place (signature of `kernels.paged.attention`, q [b, queries, n,
    d]), after a trial on this device. None: keys are gathered. `ConfigError` if the kernel is inaccurate.
    """
    need, dtype = KernelRequirements(device=build.mesh.device.type, dtype=build.dtype), build.dtype
    offers = tuple(one for one in CANDIDATES if one.op == "paged_attention")
    kernel = select_kernels(need, {"paged_attention": config.inference_paged_attention}, offers).paged_attention
    if kernel is None:
        return None
    heads, groups = build.model.num_attention_heads, build.model.num_query_groups
    repeats = 1 if build.model.mla.multi_latent_attention else heads // groups
    gap = paged.paged_kernel_error(
        kernel, build.mesh.device, dtype, heads=2 * repeats, groups=2, size=build.model.kv_channels
    )
    if gap > paged.TOLERANCE[dtype]:
        raise ConfigError(
            f"--inference-paged-attention {config.inference_paged_attention}: Triton's kernel is {gap:.2g} off its definition on this "
            "device; give --inference-paged-attention gathered"
        )
    return kernel


def max_captured_graphs(stages: Sequence[GPTModel], config: InferenceConfig) -> int:
    """Return the most graphs to keep: as requested, else a default, 0 if they cannot be captured."""
    graphs = config.inference_dynamic_batching_num_cuda_graphs
    return graphs if graphs is not None else 0 if cuda_graphs.graph_capture_obstacle(stages) else _GRAPHS


def state_snapshot_count(stages: Sequence[GPTModel], config: InferenceConfig) -> int | None:
    """Return how many state snapshots are kept, alike on all ranks; None if no layer has a state. Collective."""
    each = max(
        collectives.gather_objects(
            recurrent_state_bytes(stages, RecurrentStateDtypes.from_config(config)), stages[0].build.mesh.world
        )
    )
    if not each:
        return None
    given = config.inference_dynamic_batching_prefix_caching_mamba_gb
    if not config.inference_dynamic_batching_prefix_caching:
        return 0
    return config.inference_max_requests if given is None else int(given * 10**9 // each)


def num_cache_blocks(parts: Sequence[tuple[Sequence[GPTModel], int]], config: InferenceConfig, max_length: int) -> int:
    """Return the number of KV cache blocks, block 0 included, the same on every rank. Collective. parts: (stages, MTP
    depths). max_length: tokens of the longest sequence. `ConfigError` if the given size is too small.
    """
    size = config.inference_dynamic_batching_block_size
    mine = 0
    for stages, depths in parts:
        build, (plans, states) = stages[0].build, cached_layers(stages, depths)
        mine += cache_bytes_per_token(build.model, plans, build.mesh.tp.size, build.dtype, states=states)
    each = max(1, *collectives.gather_objects(mine, build.mesh.world))
    longest = -(-(max_length + config.num_speculative_tokens) // size)
    needed = config.inference_max_requests * longest
    given = config.inference_dynamic_batching_buffer_size_gb
    room = int((given * 10**9 if given else MOST_CACHE_BYTES) // (each * size))
    count = room if given else min(room, needed)
    if count < longest and given:
        raise ConfigError(
            f"--inference-dynamic-batching-buffer-size-gb {given} holds {count * size} tokens, fewer than one text of "
            f"{max_length}; give {longest * size * each / 10**9:.3g} or more, or a shorter --inference-max-seq-length"
        )
    return max(count, longest) + 1


def config_without_caching_and_graphs(config: InferenceConfig, records: bool) -> InferenceConfig:  # noqa: FBT001
    """With `records`, turn prefix caching and CUDA graphs off, so that all tokens pass the routers."""
    if not records:
        return config
    return replace(
        config, inference_dynamic_batching_prefix_caching=False, inference_dynamic_batching_num_cuda_graphs=0
    )
