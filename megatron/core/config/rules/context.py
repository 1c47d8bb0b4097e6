"""Rules about sequences that are cut over ranks; rows of `engine.py`.

Each returns what is wrong and how to mend it, a line each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm

from megatron.core.config.plan.layers import nearest_multiples_text
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig


@config_rule("context", needs_sizes=True)
def context_parallel_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Sequences and heads divide over the context ranks, and the network supports context parallelism."""
    run = s.run
    parallel = run.parallel
    size, length, tp = parallel.context_parallel_size, run.train.seq_length, parallel.tp
    unit = lcm(2 * size, size * tp) if parallel.sequence_parallel else 2 * size
    if size > 1 and length % unit:
        over = f" x --tensor-model-parallel-size {tp}" if unit != 2 * size else ""
        yield (
            f"--seq-length {length} cannot be cut into two chunks for each rank of --context-parallel-size {size}{over}; "
            f"choose {nearest_multiples_text(length, unit)}"
        )
    yield from _cp_comm_type_problems(run)


def _cp_attention_backend_problems(model: ModelConfig, kinds: Sequence[str]) -> Iterator[str]:
    """Yield why the attention backend cannot be used with these kinds of --cp-comm-type."""
    if model.attention_backend == "flash" and {"allgather", "all_gather"} & set(kinds):
        yield "--attention-backend flash takes no mask tensor, which --cp-comm-type allgather gives it; choose p2p or a2a"
    if model.attention_backend in (
        "cudnn",
        "varlen",
        "flash_attn_2",
        "flash_attn_3",
        "transformer_engine",
        "flex",
    ) and set(kinds) != {"a2a"}:
        yield (
            f"--attention-backend {model.attention_backend} is for whole sequences, which only --cp-comm-type a2a gives it; choose "
            "a2a, or --attention-backend fused"
        )


def _cp_comm_type_problems(run: RunConfig) -> Iterator[str]:
    """Yield problems of --cp-comm-type and --hierarchical-context-parallel-sizes."""
    model, parallel = run.model, run.parallel
    size, kinds = parallel.context_parallel_size, parallel.cp_comm_type
    if len(kinds) not in (1, model.num_layers):
        yield f"--cp-comm-type names {len(kinds)} ways; give one for all layers, or one for each of {model.num_layers}"
    inner = 1
    if parallel.hierarchical_context_parallel_sizes is not None:
        given = parallel.hierarchical_context_parallel_sizes
        words = f"--hierarchical-context-parallel-sizes {' '.join(map(str, given))}"
        if len(given) != 2 or min(given) < 1 or given[0] * given[1] != size:
            yield (
                f"{words}: give two sizes, of the inner a2a and of the outer p2p, whose product is "
                f"--context-parallel-size {size}"
            )
        else:
            inner = given[0]
    elif size > 1 and "a2a+p2p" in kinds:
        yield (
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes, the sizes of the inner a2a and of the "
            "outer p2p"
        )
    heads = model.num_attention_heads // parallel.tp
    for kind, ranks in (("a2a", size), ("a2a+p2p", inner)):
        if kind in kinds and heads % ranks:
            yield (
                f"--cp-comm-type {kind} cannot share out {heads} heads a tensor rank to {ranks} ranks; choose sizes that "
                f"divide --num-attention-heads {model.num_attention_heads}, or p2p"
            )
    yield from _cp_attention_backend_problems(model, kinds) if size > 1 else []


@config_rule("hybrid-context", needs_sizes=True)
def hybrid_context_parallel_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Hybrid context parallelism has ranks, data and a loss that support it."""
    run, world_size = s.run, s.world_size
    model, parallel, train = run.model, run.parallel, run.train
    limit = parallel.max_seqlen_per_dp_cp_rank
    if not parallel.hybrid_context_parallel:
        return
    ranks = max(1, parallel.data_parallel_size(world_size))  # too few ranks are refused by another rule
    if limit is None or limit < 1:
        yield (
            "--hybrid-context-parallel needs --max-seqlen-per-dp-cp-rank, the most places of a sequence on one rank, "
            "at least 1"
        )
    else:
        most = limit << (ranks.bit_length() - 1)
        if train.seq_length > most:
            yield (
                f"--max-seqlen-per-dp-cp-rank {limit} on {ranks} data-parallel ranks holds sequences of {most}, but "
                f"--seq-length is {train.seq_length}; give at least {-(-train.seq_length * limit // most)}"
            )
    if parallel.context_parallel_size > 1:
        yield (
            f"--context-parallel-size {parallel.context_parallel_size} cuts every sequence alike, and "
            "--hybrid-context-parallel each by its length; keep one"
        )
    if parallel.pp > 1:
        yield (
            f"--hybrid-context-parallel gives every rank another number of microbatches, which a pipeline of "
            f"{parallel.pp} stages cannot have; choose --pipeline-model-parallel-size 1"
        )
    if not train.calculate_per_token_loss:
        yield "--hybrid-context-parallel takes microbatches apart, of which no mean is left; add --calculate-per-token-loss"
    if not run.data.separates_documents:
        yield (
            "--hybrid-context-parallel takes rows apart into documents; add --reset-attention-mask, "
            "--dataloader-inter-document-masking or --sft"
        )
    if run.data.dataloader_type != "single":
        yield (
            f"--hybrid-context-parallel lets every rank read the whole global batch; --dataloader-type "
            f"{run.data.dataloader_type} does not; choose single"
        )
    if model.moe.num_experts:
        yield (
            "--hybrid-context-parallel gives ranks different numbers of microbatches, which experts over ranks and their "
            "balance cannot have; leave out --num-experts"
        )
    if "a2a+p2p" in parallel.cp_comm_type:
        yield "--cp-comm-type a2a+p2p has two fixed sizes; choose p2p, a2a or allgather for --hybrid-context-parallel"
    most_ranks, heads = 1 << (ranks.bit_length() - 1), model.num_attention_heads // parallel.tp
    if "a2a" in parallel.cp_comm_type and heads % most_ranks:
        yield (
            f"--cp-comm-type a2a cannot share out {heads} heads a tensor rank to blocks of up to {most_ranks} ranks; "
            "choose p2p"
        )
