"""Rules about how layers, heads and sequences are divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.flags.declare import ConfigError, flag_name
from megatron.core.config.plan.layers import microbatch_group_problem, nearest_multiples_text
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule, division_problem, divisors_text
from megatron.core.config.settings.parallel import ParallelConfig


@config_rule("world-size", needs_sizes=True)
def _world_size_problem(s: ConfigRuleInput) -> Iterator[str]:
    """The ranks are a multiple of tensor x pipeline x context size."""
    tp, pp, cp = s.run.parallel.tp, s.run.parallel.pp, s.run.parallel.context_parallel_size
    needed = tp * pp * cp
    context = f" x --context-parallel-size {cp}" if cp > 1 else ""
    if s.world_size % needed:
        yield (
            f"{s.world_size} ranks are not a multiple of --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp}{context} = {needed}; start a multiple of {needed} ranks"
        )


@config_rule("heads-over-tensor", needs_sizes=True)
def _attention_heads_problem(s: ConfigRuleInput) -> Iterator[str]:
    """Every tensor rank has the same number of query heads."""
    heads, tp = s.run.model.num_attention_heads, s.run.parallel.tp
    if heads % tp:
        yield (
            f"--num-attention-heads {heads} cannot be divided over --tensor-model-parallel-size "
            f"{tp}; choose a tensor size that divides the heads ({divisors_text(heads)})"
        )


@config_rule("query-groups", needs_sizes=True)
def _query_groups_problem(s: ConfigRuleInput) -> Iterator[str]:
    """Query heads are shared out evenly to key/value groups, and groups to tensor ranks."""
    heads, groups, tp = s.run.model.num_attention_heads, s.run.model.num_query_groups, s.run.parallel.tp
    if heads % groups:
        yield f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}; choose one of {divisors_text(heads)}"
    elif groups % tp and tp % groups:
        yield (
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tp} do not divide each other; choose a "
            f"tensor size that divides {groups} or is a multiple of it"
        )


@config_rule("ffn-over-tensor", needs_sizes=True)
def _ffn_width_problem(s: ConfigRuleInput) -> Iterator[str]:
    """The width of the MLP can be divided over the tensor ranks."""
    ffn, tp = s.run.model.ffn_hidden_size, s.run.parallel.tp
    yield from division_problem("--ffn-hidden-size", ffn, f"--tensor-model-parallel-size {tp}", tp)


@config_rule("head-size", needs_sizes=True)
def _head_size_problem(s: ConfigRuleInput) -> str:
    """The size of a head is known, and rotary embeddings divide it into pairs."""
    model, latent = s.run.model, s.run.model.mla.multi_latent_attention
    if (
        not latent
        and model.hidden_size % model.num_attention_heads
        and model.kv_channels == model.hidden_size // model.num_attention_heads
    ):
        return (
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads {model.num_attention_heads}; "
            f"choose another, or give the size of a head with --kv-channels"
        )
    size = f"{'--qk-pos-emb-head-dim' if latent else '--kv-channels'} {model.head_size_before_rotary_percent}"
    if not 0 <= model.rope.rotary_percent <= 1:
        return f"--rotary-percent {model.rope.rotary_percent} is a share of each head; choose one from 0 to 1"
    if model.uses_rotary and int(model.head_size_before_rotary_percent * model.rope.rotary_percent) < 2:
        return f"--rotary-percent {model.rope.rotary_percent} of {size} rotates nothing; choose more"
    if model.uses_rotary and int(model.head_size_before_rotary_percent * model.rope.rotary_percent) % 2:
        return (
            f"--rotary-percent {model.rope.rotary_percent} of {size} is an odd number of sizes, and rotations take two; "
            f"choose shares that give an even number"
        )
    return ""


@config_rule("sequence-parallel", needs_sizes=True)
def _sequence_parallel_problem(s: ConfigRuleInput) -> Iterator[str]:
    """Sequence parallelism divides the sequence length over the tensor ranks."""
    length, tp = s.run.train.seq_length, s.run.parallel.tp
    if s.run.parallel.sequence_parallel and length % tp:
        yield (
            f"--sequence-parallel cannot cut --seq-length {length} over --tensor-model-parallel-size {tp}; choose "
            f"{nearest_multiples_text(length, tp)}"
        )


_EMPTY_STAGES = "; an | at an end of the pattern, or beside another, makes a stage without layers"


@config_rule("pipeline-split", needs_sizes=True)
def _pipeline_split_problem(s: ConfigRuleInput) -> str:
    """The layers divide into the stages of the pipeline, by one method."""
    parallel = s.run.parallel
    if parallel.num_layers_per_virtual_pipeline_stage and (
        parallel.decoder_first_pipeline_num_layers is not None or parallel.decoder_last_pipeline_num_layers is not None
    ):
        return (
            "--num-layers-per-virtual-pipeline-stage needs chunks of one size, which --decoder-first/last-pipeline-"
            "num-layers make uneven; say --num-virtual-stages-per-pipeline-rank instead"
        )
    try:
        stages = stage_specs_of_run(s.run)
    except ConfigError as error:
        reasons, model = "\n  ".join(line.strip() for line in str(error).splitlines()[1:]), s.run.model
        if model.architecture.is_encoder_decoder:
            return reasons.replace("--num-layers ", "--encoder-num-layers + --decoder-num-layers ")
        if model.hybrid.layer_symbols and model.hybrid.pipeline_layout_text == parallel.pipeline_model_parallel_layout:
            hint = _EMPTY_STAGES * ("" in model.hybrid.stage_symbols)
            return reasons.replace("--pipeline-model-parallel-layout", "| in --hybrid-layer-pattern") + hint
        return reasons
    chunks = 2 if parallel.stage_placement == "v" else 1
    if parallel.splits_backward and len(stages) != chunks * parallel.pp:
        count = "one chunk" if chunks == 1 else "two chunks"
        return (
            f"--pipeline-schedule {parallel.pipeline_schedule} has {count} of layers a rank, and here are {len(stages) // parallel.pp}; "
            "leave out virtual stages, or choose 1f1b, which interleaves them"
        )
    if parallel.pp == 1 and len(stages) > 1:
        return (
            f"{len(stages)} chunks on a pipeline of one rank have nothing to interleave with; choose "
            f"--pipeline-model-parallel-size 2 or more, or leave out {' and '.join(_flags_of_chunks(parallel))}"
        )
    return ""


def _flags_of_chunks(parallel: ParallelConfig) -> Iterator[str]:
    """Yield the given flags by which a rank has several chunks of layers."""
    for name in (
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
        "pipeline_model_parallel_layout",
    ):
        if getattr(parallel, name) is not None:
            yield flag_name(name)


@config_rule("interleaved-groups", needs_sizes=True)
def _interleaving_problem(s: ConfigRuleInput) -> str:
    """Virtual stages take microbatches in groups, none of which is shorter than the pipeline."""
    parallel, train = s.run.parallel, s.run.train
    unit = train.micro_batch_size * parallel.data_parallel_size(s.world_size)
    try:
        chunks = len(stage_specs_of_run(s.run)) // parallel.pp
    except ConfigError:  # another rule says so
        return ""
    if parallel.pipeline_schedule != "1f1b" or chunks < 2 or parallel.pp == 1 or not unit:
        return ""
    start, step, _ = (
        train.rampup_batch_size
        if train.rampup_batch_size and len(train.rampup_batch_size) == 3
        else (train.global_batch_size, 1, 0)
    )
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pp
    sizes = (size for size in range(start, train.global_batch_size + 1, max(1, step)) if size % unit == 0)
    return next(filter(None, (microbatch_group_problem(parallel.pp, size // unit, group) for size in sizes)), "")


@config_rule("vocabulary", needs_sizes=True)
def _padded_vocabulary_problem(s: ConfigRuleInput) -> Iterator[str]:
    """A padded vocabulary holds all ids and can be divided over the tensor ranks."""
    padded, true, tp = s.run.model.padded_vocab_size, s.run.model.true_vocab_size, s.run.parallel.tp
    if padded is not None and padded % tp:
        yield f"--padded-vocab-size {padded} is not a multiple of --tensor-model-parallel-size {tp}"
    elif padded is not None and true is not None and padded < true:
        yield f"--padded-vocab-size {padded} is smaller than the tokenizer's {true} ids"


@config_rule("fully-sharded")
def _fsdp_problems(s: ConfigRuleInput) -> Iterator[str]:
    """FSDP2 is not combined with what it does itself, or with a layout that it does not support."""
    parallel = s.run.parallel
    if not parallel.use_torch_fsdp2:
        return
    reasons = {
        "use_distributed_optimizer": "cuts the optimizer state, which is cut already",
        "overlap_grad_reduce": "is for buckets; FSDP2 sums gradients layer by layer, beside the backward pass",
        "overlap_param_gather": "is for buckets; FSDP2 gathers layer by layer, beside the forward pass",
        "ddp_bucket_size": "is for buckets; a layer is what is gathered and summed at once",
        "ddp_num_buckets": "is for buckets; a layer is what is gathered and summed at once",
        "hybrid_context_parallel": "gives ranks different numbers of microbatches, and all must gather a layer as often",
    }
    writes = "lets every data-parallel rank write by itself, and all must gather a layer as often"
    given = {name: (getattr(parallel, name), why) for name, why in reasons.items()} | {
        "eval_generate": (s.run.train.eval_generate, writes),
        "online_evaluation_config": (s.run.data.multimodal.online_evaluation_config, writes),
    }
    yield from [
        f"{flag_name(name)} {why}; leave it out, or --use-torch-fsdp2"
        for name, (value, why) in given.items()
        if value not in (False, None)
    ]
    if parallel.splits_backward:
        yield f"--pipeline-schedule {parallel.pipeline_schedule} adds to gradients when FSDP2 has summed them; choose 1f1b, or leave out --use-torch-fsdp2"
