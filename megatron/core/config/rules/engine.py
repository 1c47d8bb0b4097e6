"""Every rule between settings, as a row: a name, when it is broken, and what to say.

All rules are looked at together, so that a launcher is mended once and not five times. Nothing here needs torch or a
process group. `says` gives the numbers and the nearest values that would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import PurePath

from megatron.core.config.flags import ConfigError, spelling
from megatron.core.config.plan import StageSpec, group_problem, layer_rows, partition, virtual_size
from megatron.core.config.rules import attention as attention_rules
from megatron.core.config.rules import context as context_rules
from megatron.core.config.rules import cuda_graphs as graph_rules
from megatron.core.config.rules import experts as expert_rules
from megatron.core.config.rules import latent_attention as latent_rules
from megatron.core.config.rules import optimizer as optimizer_rules
from megatron.core.config.rules import overlap as overlap_rules
from megatron.core.config.rules import precision as low_precision_rules
from megatron.core.config.rules import routing as routing_rules
from megatron.core.config.settings.compilation import compilation
from megatron.core.config.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """What rules look at."""

    run: RunConfig
    world_size: int


@dataclass(frozen=True, slots=True)
class Rule:
    """`says` returns what is wrong and how to mend it, or an empty string. sentence: what holds where it is kept."""

    name: str
    says: Callable[[Setting], str]
    sentence: str = ""


def stages_of(config: RunConfig) -> tuple[StageSpec, ...]:
    """The pipeline stages of a run; `ConfigError` when the layers cannot be split so."""
    model, parallel = config.model, config.parallel
    counted = {"account_for_embedding": parallel.account_for_embedding_in_pipeline_split,
               "account_for_loss": parallel.account_for_loss_in_pipeline_split}
    layout, rows = parallel.pipeline_model_parallel_layout, layer_rows(model)
    chunks = virtual_size(len(rows), pp=parallel.pp, chunks_per_rank=parallel.num_virtual_stages_per_pipeline_rank,
                          layers_per_chunk=parallel.num_layers_per_virtual_pipeline_stage, layout=layout,
                          unsaid=2 if parallel.placement == "v" else 1, **counted)
    return partition(rows, pp=parallel.pp, vpp=chunks, layout=layout, placement=parallel.placement,
                     ends=(parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers), **counted)


def divisors(value: int, limit: int = 6) -> str:
    """The first divisors of a number, as words."""
    found = [str(n) for n in range(1, value + 1) if value % n == 0]
    return ", ".join(found[:limit]) + (", ..." if len(found) > limit else "")


def _missing(setting: Setting) -> str:
    run = setting.run
    required = {"num_layers": run.model, "hidden_size": run.model, "num_attention_heads": run.model,
                "seq_length": run.train, "micro_batch_size": run.train}
    lacking = [name for name, part in required.items() if getattr(part, name) is None]
    taken = any(required[name] is run.model for name in lacking) and not run.checkpoint.use_checkpoint_args
    found = "; --load FOLDER --use-checkpoint-args takes a network's shape from its checkpoint" if taken else ""
    return f"{', '.join(map(spelling, lacking))} must be given{found}" if lacking else ""


def _positive(setting: Setting) -> str:
    run = setting.run
    counts = {"num_layers": run.model, "hidden_size": run.model, "num_attention_heads": run.model, "ffn_hidden_size": run.model,
              "kv_channels": run.model, "num_query_groups": run.model, "make_vocab_size_divisible_by": run.model,
              "tensor_model_parallel_size": run.parallel, "pipeline_model_parallel_size": run.parallel,
              "context_parallel_size": run.parallel, "expert_model_parallel_size": run.parallel,
              "expert_tensor_parallel_size": run.parallel,
              "encoder_num_layers": run.model, "decoder_num_layers": run.model, "decoder_seq_length": run.train,
              "seq_length": run.train, "micro_batch_size": run.train, "global_batch_size": run.train,
              "log_interval": run.log, "save_interval": run.checkpoint, "eval_interval": run.train,
              "save_keep_last": run.checkpoint, "save_retain_interval": run.checkpoint}
    wrong = [f"{spelling(name)} {getattr(part, name)}" for name, part in counts.items()
             if getattr(part, name) is not None and getattr(part, name) < 1]
    return f"{', '.join(wrong)}: each must be at least 1" if wrong else ""


def _world(s: Setting) -> str:
    tp, pp, cp = s.run.parallel.tp, s.run.parallel.pp, s.run.parallel.context_parallel_size
    needed = tp * pp * cp
    if s.world_size % needed == 0:
        return ""
    context = f" x --context-parallel-size {cp}" if cp > 1 else ""
    return (f"{s.world_size} ranks are not a multiple of --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp}{context} = {needed}; start a multiple of {needed} ranks")


def _heads(s: Setting) -> str:
    heads, tp = s.run.model.num_attention_heads, s.run.parallel.tp
    return "" if heads % tp == 0 else (f"--num-attention-heads {heads} cannot be divided over --tensor-model-parallel-size "
                                       f"{tp}; choose a tensor size that divides the heads ({divisors(heads)})")


def _groups(s: Setting) -> str:
    heads, groups, tp = s.run.model.num_attention_heads, s.run.model.num_query_groups, s.run.parallel.tp
    if heads % groups:
        return f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}; choose one of {divisors(heads)}"
    if groups % tp and tp % groups:
        return (f"--num-query-groups {groups} and --tensor-model-parallel-size {tp} do not divide each other; choose a "
                f"tensor size that divides {groups} or is a multiple of it")
    return ""


def _width(s: Setting) -> str:
    ffn, tp = s.run.model.ffn_hidden_size, s.run.parallel.tp
    return "" if ffn % tp == 0 else (f"--ffn-hidden-size {ffn} cannot be divided over --tensor-model-parallel-size {tp}; "
                                     f"choose {ffn // tp * tp or tp} or {-(-ffn // tp) * tp}")


def _head_size(s: Setting) -> str:
    model, latent = s.run.model, s.run.model.mla.multi_latent_attention
    if not latent and model.hidden_size % model.num_attention_heads and model.kv_channels == model.hidden_size // model.num_attention_heads:
        return (f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads {model.num_attention_heads}; "
                f"choose another, or give the size of a head with --kv-channels")
    size = f"{'--qk-pos-emb-head-dim' if latent else '--kv-channels'} {model.rotary_size}"
    if not 0 <= model.rope.rotary_percent <= 1:
        return f"--rotary-percent {model.rope.rotary_percent} is a share of each head; choose one from 0 to 1"
    if model.rotates and int(model.rotary_size * model.rope.rotary_percent) < 2:
        return f"--rotary-percent {model.rope.rotary_percent} of {size} rotates nothing; choose more"
    if model.rotates and int(model.rotary_size * model.rope.rotary_percent) % 2:
        return (f"--rotary-percent {model.rope.rotary_percent} of {size} is an odd number of sizes, and rotations take two; "
                f"choose shares that give an even number")
    return ""


def _positions(s: Setting) -> str:
    longest, length = s.run.model.max_position_embeddings, s.run.train.seq_length
    return "" if longest >= length else (f"--seq-length {length} is longer than --max-position-embeddings {longest}; "
                                         f"give at least {length} positions")


def _sequence_parallel(s: Setting) -> str:
    length, tp = s.run.train.seq_length, s.run.parallel.tp
    if not s.run.parallel.sequence_parallel or length % tp == 0:
        return ""
    return (f"--sequence-parallel cannot cut --seq-length {length} over --tensor-model-parallel-size {tp}; choose "
            f"{length // tp * tp or tp} or {-(-length // tp) * tp}")


def _pipeline(s: Setting) -> str:
    parallel = s.run.parallel
    if parallel.num_layers_per_virtual_pipeline_stage and (parallel.decoder_first_pipeline_num_layers is not None
                                                           or parallel.decoder_last_pipeline_num_layers is not None):
        return ("--num-layers-per-virtual-pipeline-stage needs chunks of one size, which --decoder-first/last-pipeline-"
                "num-layers make uneven; say --num-virtual-stages-per-pipeline-rank instead")
    try:
        stages = stages_of(s.run)
    except ConfigError as error:
        said = "\n  ".join(line.strip() for line in str(error).splitlines()[1:])
        return said.replace("--num-layers ", "--encoder-num-layers + --decoder-num-layers ") if s.run.model.architecture == "t5" else said
    chunks = 2 if parallel.placement == "v" else 1
    if parallel.splits_backward and len(stages) != chunks * parallel.pp:
        count = "one chunk" if chunks == 1 else "two chunks"
        return (f"--pipeline-schedule {parallel.pipeline_schedule} has {count} of layers a rank, and here are {len(stages) // parallel.pp}; "
                "leave out virtual stages, or choose 1f1b, which interleaves them")
    if parallel.pp == 1 and len(stages) > 1:
        asking = [spelling(name) for name in ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
                                              "pipeline_model_parallel_layout") if getattr(parallel, name) is not None]
        return (f"{len(stages)} chunks on a pipeline of one rank have nothing to interleave with; choose "
                f"--pipeline-model-parallel-size 2 or more, or leave out {' and '.join(asking)}")
    return ""


def _batch(s: Setting) -> str:
    train = s.run.train
    unit = train.micro_batch_size * s.run.parallel.data_parallel_size(s.world_size)
    size, evaluated = train.global_batch_size, train.eval_global_batch_size
    if evaluated is not None and unit and (evaluated < 1 or evaluated % unit and not train.decrease_batch_size_if_needed):
        return (f"--eval-global-batch-size {evaluated} is not a multiple of --micro-batch-size {train.micro_batch_size} x data-parallel "
                f"size {unit // train.micro_batch_size} = {unit}; choose {-(-max(evaluated, 1) // unit) * unit}, or leave it out")
    if train.rampup_batch_size or train.step_batch_size_schedule or train.decrease_batch_size_if_needed or not unit or size % unit == 0:
        return ""
    near = " or ".join(str(n) for n in (size // unit * unit, -(-size // unit) * unit) if n)
    return (f"--global-batch-size {size} is not a multiple of --micro-batch-size {train.micro_batch_size} x data-parallel "
            f"size {unit // train.micro_batch_size} = {unit}; choose {near}")


def _interleaved(s: Setting) -> str:
    parallel, train = s.run.parallel, s.run.train
    unit = train.micro_batch_size * parallel.data_parallel_size(s.world_size)
    try:
        chunks = len(stages_of(s.run)) // parallel.pp
    except ConfigError:  # another rule says so
        return ""
    if parallel.pipeline_schedule != "1f1b" or chunks < 2 or parallel.pp == 1 or not unit:
        return ""
    start, step, _ = train.rampup_batch_size if train.rampup_batch_size and len(train.rampup_batch_size) == 3 else (train.global_batch_size, 1, 0)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pp
    sizes = (size for size in range(start, train.global_batch_size + 1, max(1, step)) if size % unit == 0)
    return next(filter(None, (group_problem(parallel.pp, size // unit, group) for size in sizes)), "")


def _duration(s: Setting) -> str:
    train = s.run.train
    if train.train_iters is not None and train.train_samples is not None:
        return "--train-iters and --train-samples both say how long to train; keep one"
    if train.train_iters is None and train.train_samples is None and not train.skip_train:
        return "neither --train-iters nor --train-samples says how long to train; give one (or --skip-train)"
    return ""


def _rate(s: Setting) -> str:
    if s.run.schedule.lr is None and not s.run.train.skip_train:
        return "--lr must be given (or --skip-train)"
    return ""


def _formats(s: Setting) -> str:
    precision = s.run.precision
    chosen = [spelling(name) for name in ("fp16", "bf16", "fp64") if getattr(precision, name)]
    if len(chosen) > 1:
        return f"{' and '.join(chosen)} contradict each other; keep one"
    if precision.loss_scale is not None and not precision.fp16:
        return f"--loss-scale {precision.loss_scale:g} is for --fp16 only; add --fp16 or drop it"
    if precision.grad_reduce_in_bf16 and not precision.bf16:
        return "--grad-reduce-in-bf16 is for --bf16 only; add --bf16 or drop it"
    return ""


def _activations(s: Setting) -> str:
    model = s.run.model
    names = ("swiglu", "quick_geglu", "squared_relu", "relu", "openai_gelu" if not model.geglu else "geglu")
    chosen = [spelling(name) for name in names if getattr(model, name)]
    return f"{' and '.join(chosen)} each choose the activation; keep one" if len(chosen) > 1 else ""


def _recompute(s: Setting) -> str:
    choice = s.run.recompute
    full = choice.recompute_granularity == "full"
    problems = []
    if full and choice.recompute_method is None:
        problems.append("--recompute-granularity full needs --recompute-method uniform or block")
    if not full and choice.recompute_method is not None:
        problems.append(f"--recompute-method {choice.recompute_method} is for --recompute-granularity full only")
    if choice.recompute_num_layers is not None and choice.recompute_num_layers < 1:
        problems.append(f"--recompute-num-layers {choice.recompute_num_layers} must be at least 1")
    if choice.recompute_modules is not None and choice.recompute_granularity != "selective":
        problems.append("--recompute-modules is for --recompute-granularity selective only")
    if choice.distribute_saved_activations and not full:
        problems.append("--distribute-saved-activations is for --recompute-granularity full only")
    if choice.distribute_saved_activations and s.run.parallel.sequence_parallel:
        problems.append("--distribute-saved-activations has nothing to cut under --sequence-parallel; drop one of them")
    return "\n  ".join(problems)


def _fully_sharded(s: Setting) -> str:
    parallel = s.run.parallel
    if not parallel.use_torch_fsdp2:
        alone = parallel.torch_fsdp2_no_reshard_after_forward
        return "--torch-fsdp2-no-reshard-after-forward keeps what --use-torch-fsdp2 has gathered; add it" if alone else ""
    reasons = {"use_distributed_optimizer": "cuts the optimizer state, which is cut already",
               "overlap_grad_reduce": "is for buckets; FSDP2 sums gradients layer by layer, beside the backward pass",
               "overlap_param_gather": "is for buckets; FSDP2 gathers layer by layer, beside the forward pass",
               "ddp_bucket_size": "is for buckets; a layer is what is gathered and summed at once",
               "ddp_num_buckets": "is for buckets; a layer is what is gathered and summed at once",
               "hybrid_context_parallel": "gives ranks different numbers of microbatches, and all must gather a layer as often"}
    problems = [f"{spelling(name)} {why}; leave it out, or --use-torch-fsdp2" for name, why in reasons.items()
                if getattr(parallel, name) not in (False, None)]
    if s.run.train.eval_generate is not None:
        problems.append("--eval-generate lets every data-parallel rank write by itself, and all must gather a layer as often; leave it out, "
                        "or --use-torch-fsdp2")
    if parallel.splits_backward:
        problems.append(f"--pipeline-schedule {parallel.pipeline_schedule} adds to gradients when FSDP2 has summed them; choose 1f1b, or leave out --use-torch-fsdp2")
    return "\n  ".join(problems)


def _vocabulary(s: Setting) -> str:
    model, tp = s.run.model, s.run.parallel.tp
    if model.padded_vocab_size is not None and model.padded_vocab_size % tp:
        return f"--padded-vocab-size {model.padded_vocab_size} is not a multiple of --tensor-model-parallel-size {tp}"
    if model.padded_vocab_size is not None and model.true_vocab_size is not None and model.padded_vocab_size < model.true_vocab_size:
        return f"--padded-vocab-size {model.padded_vocab_size} is smaller than the tokenizer's {model.true_vocab_size} ids"
    return ""


def _data(s: Setting) -> str:
    data = s.run.data
    per_split = data.train_data_path or data.valid_data_path or data.test_data_path or data.per_split_data_args_path
    given = [name for name, value in (("--mock-data", data.mock_data), ("--data-path", data.data_path),
                                      ("--data-args-path", data.data_args_path), ("paths for each split", per_split)) if value]
    if len(given) > 1:
        return f"{' and '.join(given)} each say what to read; keep one"
    if not given:
        return "nothing says what to read; give --data-path, paths for each split, or --mock-data"
    if data.full_validation and data.dataloader_type == "external":
        return ("--full-validation must know how much there is, which the iterables of --dataloader-type external do not "
                "say; choose single or cyclic, or --eval-iters")
    return ""


def _fill(s: Setting) -> str:
    fill = s.run.data.fill
    given = [spelling(field.name) for field in fields(fill)
             if field.name != "fim_data" and getattr(fill, field.name) != field.default]
    if not fill.fim_data:
        return f"{', '.join(given)}: for --fim-data only; add it" if given else ""
    problems = []
    if s.run.data.chat.sft:
        problems.append("--fim-data rearranges documents, and --sft reads conversations; keep one")
    for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
        rate = getattr(fill, name)
        if rate is not None and not 0 <= rate <= 1:
            problems.append(f"{spelling(name)} {rate:g} is a probability, from 0 to 1")
    if fill.fim_fragment_rate is not None and fill.fim_split_sample is None:
        problems.append("--fim-fragment-rate needs --fim-split-sample, which says what cuts a document into fragments")
    return "\n  ".join(problems)


def _chat(s: Setting) -> str:
    data, problems = s.run.data, []
    if not data.chat.sft:
        return ("" if data.chat.sft_tokenizer_prompt_format == "tokenizer"
                else "--sft-tokenizer-prompt-format is for --sft only; add it")
    if data.eod_mask_loss:
        problems.append("--eod-mask-loss has no place under --sft: the loss is on the answers and on the token that ends each; "
                        "leave it out")
    if s.run.tokenizer.chat_template is not None and data.chat.sft_tokenizer_prompt_format != "tokenizer":
        problems.append(f"--chat-template and --sft-tokenizer-prompt-format {data.chat.sft_tokenizer_prompt_format} both say "
                        "how a conversation is written; keep one")
    return "\n  ".join(problems)


def _lengths(s: Setting) -> str:
    """What the lengths and depths of an encoder and a decoder must keep to."""
    model, train, problems = s.run.model, s.run.train, []
    if model.encoder_num_layers is not None and model.encoder_num_layers != model.num_layers:
        problems.append(f"--num-layers {model.num_layers} and --encoder-num-layers {model.encoder_num_layers} both say how deep "
                        "the encoder is; keep one")
    if train.encoder_seq_length is not None and train.encoder_seq_length != train.seq_length:
        problems.append(f"--seq-length {train.seq_length} and --encoder-seq-length {train.encoder_seq_length} both say what the "
                        "encoder reads; keep one")
    if model.architecture != "t5":
        given = {"--decoder-num-layers": model.decoder_num_layers, "--decoder-seq-length": train.decoder_seq_length}
        names = [name for name, value in given.items() if value is not None]
        return "\n  ".join([*problems, *([f"{', '.join(names)}: for pretrain_t5.py only; give --num-layers and --seq-length"]
                                         if names else [])])
    length, tp = train.decoder_seq_length, s.run.parallel.tp
    if model.rope.position_embedding_type == "learned_absolute" and length > model.max_position_embeddings:
        problems.append(f"--decoder-seq-length {length} is longer than --max-position-embeddings {model.max_position_embeddings}; "
                        f"give at least {length} positions")
    if s.run.parallel.sequence_parallel and length % tp:
        problems.append(f"--sequence-parallel cannot cut --decoder-seq-length {length} over --tensor-model-parallel-size {tp}; "
                        f"choose {length // tp * tp or tp} or {-(-length // tp) * tp}")
    if train.seq_length < 4 or length < 4:
        problems.append(f"--encoder-seq-length {train.seq_length} and --decoder-seq-length {length}: each must be at least 4")
    return "\n  ".join(problems)


def _masked_text(s: Setting) -> str:
    """What belongs to masked text, and what to windows of text only."""
    model, data, masking = s.run.model, s.run.data, s.run.data.masking
    if model.architecture == "gpt":
        given = [spelling(field.name) for field in fields(masking) if getattr(masking, field.name) != field.default]
        return f"{', '.join(given)}: for pretrain_bert.py and pretrain_t5.py only; leave out" if given else ""
    problems = []
    if not 0 < masking.mask_prob < 1:
        problems.append(f"--mask-prob {masking.mask_prob:g} hides nothing or everything; choose a share between 0 and 1")
    if not 0 <= masking.short_seq_prob <= 1:
        problems.append(f"--short-seq-prob {masking.short_seq_prob:g} is a probability, from 0 to 1")
    windows = {"reset_position_ids": data.reset_position_ids, "reset_attention_mask": data.reset_attention_mask,
               "eod_mask_loss": data.eod_mask_loss, "dataloader_inter_document_masking": data.dataloader_inter_document_masking,
               "fim_data": data.fill.fim_data, "sft": data.chat.sft}
    names = [spelling(name) for name, on in windows.items() if on]
    if names:
        problems.append(f"{', '.join(names)}: for windows of text, which only pretrain_gpt.py reads; leave out")
    if model.architecture == "bert" and s.run.train.seq_length is not None and s.run.train.seq_length < 5:
        problems.append(f"--seq-length {s.run.train.seq_length} has no room for [CLS], two [SEP] and two texts; give at least 5")
    return "\n  ".join(problems)


def _relative(s: Setting) -> str:
    """T5's bias belongs to T5."""
    model, rope = s.run.model, s.run.model.rope
    if rope.position_embedding_type != "relative":
        return ""
    if model.architecture != "t5":
        return "--position-embedding-type relative is for pretrain_t5.py only; choose learned_absolute or rope"
    if rope.relative_attention_num_buckets < 4 or rope.relative_attention_num_buckets % 4:
        return (f"--relative-attention-num-buckets {rope.relative_attention_num_buckets} must be a multiple of 4: the encoder needs "
                "near and far distances in both directions")
    if rope.relative_attention_max_distance <= rope.relative_attention_num_buckets // 2:
        return (f"--relative-attention-max-distance {rope.relative_attention_max_distance} is told apart by half of "
                f"--relative-attention-num-buckets {rope.relative_attention_num_buckets} already; choose more than half of it")
    return ""


def _norms(s: Setting) -> str:
    model = s.run.model
    if model.norm_after_residual and model.apply_residual_connection_post_layernorm:
        return "--norm-after-residual and --apply-residual-connection-post-layernorm place the norms differently; keep one"
    if model.norm_after_residual and model.fp32_residual_connection:
        return "--fp32-residual-connection has no residual to keep under --norm-after-residual, which norms it; drop one of them"
    if model.architecture != "bert" and (model.norm_after_residual or model.embedding_layernorm):
        return "--norm-after-residual and --embedding-layernorm are for pretrain_bert.py only; leave them out"
    if model.sandwich_norm and (model.norm_after_residual or model.apply_residual_connection_post_layernorm):
        return ("--sandwich-norm has a norm before and behind each sublayer, and --norm-after-residual or "
                "--apply-residual-connection-post-layernorm place them differently; keep one")
    if model.norm_after_sublayer and (model.sandwich_norm or model.norm_after_residual or model.apply_residual_connection_post_layernorm):
        return ("--norm-after-sublayer has one norm, behind each sublayer; --sandwich-norm, --norm-after-residual and "
                "--apply-residual-connection-post-layernorm place norms elsewhere; keep one")
    if model.norm_after_sublayer and model.architecture == "t5":
        return "--norm-after-sublayer knows no norm behind the cross attention of a T5; leave it out"
    if model.sandwich_norm and model.architecture == "t5":
        return "--sandwich-norm knows no norm behind the cross attention of a T5; leave it out"
    if model.kernels.wishes.get("residual_norm", "apart") != "apart" and (not model.sums_before_norms or {"layernorm", "mlp", "moe"} & set(s.run.recompute.recompute_modules or ())):
        return ("--kernel residual_norm=triton sums and norms at once, and here the sum is another, or one of them is recomputed; leave it out")
    if model.softmax_scale is not None and model.softmax_scale <= 0:
        return f"--softmax-scale {model.softmax_scale:g} must be above 0"
    return ""


def _dropout(s: Setting) -> str:
    wrong = [f"{spelling(name)} {getattr(s.run.model, name)}" for name in ("hidden_dropout", "attention_dropout")
             if not 0.0 <= getattr(s.run.model, name) < 1.0]
    return f"{', '.join(wrong)}: a share from 0 up to, but not, 1" if wrong else ""


def _checkpoints(s: Setting) -> str:
    checkpoint = s.run.checkpoint
    problems = []
    if checkpoint.save_interval is not None and checkpoint.save is None:
        problems.append(f"--save-interval {checkpoint.save_interval} has no folder; give --save")
    if checkpoint.save_retain_interval and checkpoint.save_interval and checkpoint.save_retain_interval % checkpoint.save_interval:
        problems.append(f"--save-retain-interval {checkpoint.save_retain_interval} is not a multiple of --save-interval "
                        f"{checkpoint.save_interval}")
    if checkpoint.require_iteration is not None and checkpoint.load is None:
        problems.append(f"--require-iteration {checkpoint.require_iteration} has no folder to look into; give --load")
    if checkpoint.require_iteration is not None and checkpoint.ckpt_step is not None:
        problems.append(f"--require-iteration {checkpoint.require_iteration} speaks of the newest checkpoint, and --ckpt-step "
                        f"{checkpoint.ckpt_step} chooses one; give one of them")
    if checkpoint.export_hf is not None and checkpoint.save is None:
        problems.append(f"--export-hf {checkpoint.export_hf} follows each save, and there is none; give --save")
    if checkpoint.export_hf_like is not None and checkpoint.export_hf is None:
        problems.append(f"--export-hf-like {checkpoint.export_hf_like} has nothing to go into; give --export-hf")
    if checkpoint.use_checkpoint_args and checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        problems.append("--use-checkpoint-args has no checkpoint to read; give --load or --pretrained-checkpoint")
    return "\n  ".join(problems)


def _faults(s: Setting) -> str:
    faults, train, checkpoint, problems = s.run.faults, s.run.train, s.run.checkpoint, []
    counts = ("straggler_minmax_count", "check_weight_hash_across_dp_replicas_interval", "max_bad_steps")
    wrong = [f"{spelling(name)} {getattr(faults, name)}" for name in counts if getattr(faults, name) is not None and getattr(faults, name) < 1]
    if wrong:
        problems.append(f"{', '.join(wrong)}: each must be at least 1")
    if faults.hang_timeout_minutes is not None and faults.hang_timeout_minutes < 0:
        problems.append(f"--hang-timeout-minutes {faults.hang_timeout_minutes:g} is before the present; 0 stands for never")
    checks = train.check_for_nan_in_loss_and_grad or faults.check_for_spiky_loss or faults.check_for_large_grads
    if faults.on_bad_step is not None and not checks:
        problems.append(f"--on-bad-step {faults.on_bad_step} knows no bad step with --no-check-for-nan-in-loss-and-grad; leave that out, "
                        "or give --check-for-spiky-loss or --check-for-large-grads")
    if faults.on_bad_step == "rollback" and not (checkpoint.save and checkpoint.save_interval and checkpoint.save_optim and checkpoint.save_rng):
        problems.append("--on-bad-step rollback goes back to whole checkpoints of this run; give --save and --save-interval, and neither "
                        "--no-save-optim nor --no-save-rng; or choose skip")
    if faults.on_bad_step == "rollback" and s.run.data.dataloader_type == "external":
        problems.append("--on-bad-step rollback reads data again, which --dataloader-type external cannot; choose skip")
    if faults.error_injection_rate < 0:
        problems.append(f"--error-injection-rate {faults.error_injection_rate} must be 0, for none, or a number of steps")
    if faults.step_rerun == "validate_results" and not checks:
        problems.append("--rerun-mode validate_results knows no bad result with --no-check-for-nan-in-loss-and-grad; leave that out, "
                        "or give --check-for-spiky-loss or --check-for-large-grads")
    if faults.error_injection_rate > 0 and faults.step_rerun != "validate_results":
        problems.append(f"--error-injection-rate {faults.error_injection_rate} is for --rerun-mode validate_results, not {faults.rerun_mode}")
    if faults.step_rerun != "disabled" and s.run.graphs.cuda_graph_impl != "none":
        problems.append(f"--rerun-mode {faults.step_rerun} runs a step twice, which graphs recorded for one pass do not; "
                        "leave out --cuda-graph-impl")
    if faults.bundle_weights and not faults.guards_steps:
        problems.append("--bundle-weights has no bundle to go into; give --on-bad-step")
    if faults.guards_steps and faults.bundle_weights and not (faults.error_dir or checkpoint.save):
        problems.append("--bundle-weights has no folder to go into; give --error-dir or --save")
    return "\n  ".join(problems)


def _samples(s: Setting) -> str:
    train, problems = s.run.train, []
    if train.eval_generate is None:
        given = [spelling(name) for name, usual in (("eval_generate_tokens", 64), ("eval_generate_temperature", 0.0)) if getattr(train, name) != usual]
        return f"{', '.join(given)}: for --eval-generate only; give it a file of prompts" if given else ""
    if s.run.model.architecture != "gpt":
        problems.append("--eval-generate: text is continued by a GPT only; leave it out")
    if s.run.parallel.context_parallel_size > 1:
        problems.append(f"--eval-generate: text is generated without --context-parallel-size {s.run.parallel.context_parallel_size}; leave one out")
    if train.eval_generate_tokens < 1:
        problems.append(f"--eval-generate-tokens {train.eval_generate_tokens} are no tokens; give 1 or more")
    if not 0.0 <= train.eval_generate_temperature <= 100.0:
        problems.append(f"--eval-generate-temperature {train.eval_generate_temperature} is no temperature; give one from 0 to 100")
    return "\n  ".join(problems)


def _elastic(s: Setting) -> str:
    run = s.run
    if not run.parallel.elastic:
        return ""
    problems = []
    if run.checkpoint.save is None or run.checkpoint.load is None or PurePath(run.checkpoint.save) != PurePath(run.checkpoint.load):
        problems.append("--elastic goes on from the last checkpoint; give one folder as both --save and --load")
    if run.checkpoint.save_interval is None:
        problems.append("--elastic does again what was not saved when ranks are lost; give --save-interval")
    if run.data.dataloader_type != "single":
        problems.append(f"--dataloader-type {run.data.dataloader_type} orders samples by the number of ranks, which --elastic changes; "
                        "choose single")
    if run.train.decrease_batch_size_if_needed:
        problems.append("--decrease-batch-size-if-needed changes the global batch with the ranks, and --elastic keeps it; drop one of them")
    return "\n  ".join(problems)


# The second half of these rules can only be asked once sizes are known to be there and positive.
NEEDS = (
    Rule("required", _missing, "sizes that follow from nothing else are given"),
    Rule("positive", _positive, "counts and sizes are at least 1"),
)
RULES = (
    Rule("world-size", _world, "the ranks are a multiple of tensor x pipeline x context size"),
    Rule("heads-over-tensor", _heads, "every tensor rank has equally many query heads"),
    Rule("query-groups", _groups, "query heads are shared out evenly to key/value groups, and groups to tensor ranks"),
    Rule("ffn-over-tensor", _width, "the width of the MLP can be divided over the tensor ranks"),
    Rule("head-size", _head_size, "a head has a size, of which rotations take pairs"),
    Rule("positions", _positions, "no sequence is longer than the positions that the network knows"),
    Rule("sequence-parallel", _sequence_parallel, "under sequence parallelism, sequences can be cut over the tensor ranks"),
    Rule("pipeline-split", _pipeline, "the layers can be cut into the pipeline's stages, in one way"),
    Rule("global-batch", _batch, "the global batch is a whole number of microbatches on every data-parallel rank"),
    Rule("interleaved-groups", _interleaved, "virtual stages take microbatches in groups, none of which is shorter than the pipeline"),
    Rule("vocabulary", _vocabulary, "a padded vocabulary holds all ids and can be divided over the tensor ranks"),
    Rule("encoder-and-decoder", _lengths, "encoder and decoder of a T5 have one depth and one length each"),
    Rule("layer-patterns", lambda s: attention_rules.patterns(s.run),
         "what says which layers have a property can be read and has a property to speak of"),
    Rule("attention", lambda s: attention_rules.attention(s.run),
         "variants of attention and of the gated MLP have sound numbers and fit together"),
    Rule("rotations", lambda s: attention_rules.positions(s.run), "rotations are stretched in one way, by sound numbers"),
    Rule("choice-of-experts", lambda s: routing_rules.choice(s.run),
         "a token can choose as many experts as it shall, and the choice can be learned"),
    Rule("balance-of-experts", lambda s: routing_rules.balance(s.run), "ways to balance experts fit together and have a weight each"),
    Rule("experts-over-ranks", lambda s: expert_rules.expert_layout(s.run, s.world_size),
         "experts and their widths can be divided over the ranks"),
    Rule("upcycling", lambda s: routing_rules.upcycling(s.run), "the MLPs of a dense checkpoint can become these experts"),
    Rule("few-bits", lambda s: low_precision_rules.low_precision(s.run),
         "matrices of 8 or 4 bits have one recipe, its settings and no others, and layers that use it"),
    Rule("few-bits-over-tensor", lambda s: low_precision_rules.low_precision_sizes(s.run),
         "every tensor rank holds whole blocks of the matrices that are multiplied in 8 or 4 bits"),
    Rule("context", lambda s: context_rules.context(s.run), "sequences, heads and networks can be cut over the context ranks"),
    Rule("hybrid-context", lambda s: context_rules.hybrid(s.run, s.world_size),
         "sequences cut by their length have ranks, data and a loss that allow it"),
)
ALWAYS = (
    Rule("duration", _duration, "one flag says how long to train"),
    Rule("learning-rate", _rate, "a run that trains has a learning rate"),
    Rule("number-formats", _formats, "one number format is chosen, and what belongs to a format comes with it"),
    Rule("update-rule", lambda s: optimizer_rules.update_rule(s.run), "what is said of an update rule belongs to the one that is chosen"),
    Rule("narrow-state", lambda s: optimizer_rules.narrow_state(s.run), "formats of the optimizer's state fit the update rule and the weights"),
    Rule("activations-aside", lambda s: optimizer_rules.activations_aside(s.run),
         "activations that wait in the CPU's memory are chosen in one way, and can be taken from their layers"),
    Rule("activation", _activations, "one activation is chosen"),
    Rule("recompute", _recompute, "the parts of recomputation belong to the granularity that is chosen"),
    Rule("compilation", lambda s: compilation(s.run.compilation), "what is said of the compiler has one, and kernels to make"),
    Rule("cuda-graphs", lambda s: graph_rules.graphs(s.run), "layers that are recorded as CUDA graphs do the same in every step, and ask the host for nothing"),
    Rule("fully-sharded", _fully_sharded, "FSDP2 is given nothing that it does itself, and no layout that it cannot serve"),
    Rule("overlap", lambda s: overlap_rules.overlap(s.run), "what is overlapped is done at all, in pieces that can be, and buckets have one size"),
    Rule("data", _data, "one thing says what to read"),
    Rule("fill-in-the-middle", _fill, "fill in the middle has its tokens and sound rates"),
    Rule("conversations", _chat, "conversations are written in one way and have their own loss"),
    Rule("masked-text", _masked_text, "masked text and windows of text each have the settings of their own"),
    Rule("relative-positions", _relative, "relative positions belong to T5 and tell distances apart"),
    Rule("kernels", lambda s: "\n  ".join(s.run.model.kernels.problems(compiles=s.run.compilation.compile)), "kernels that are asked for by name are known"),
    Rule("norms", _norms, "norms stand in one place, of the networks that know it"),
    Rule("dropout", _dropout, "dropout is a share below 1"),
    Rule("samples-in-training", _samples, "prompts are continued in training by a network that generates text, in some tokens"),
    Rule("checkpoints", _checkpoints, "what is said of checkpoints has a folder and does not contradict itself"),
    Rule("faults", _faults, "what is said of faults has something to look for, and what it needs to go on"),
    Rule("elastic", _elastic, "a run that fits itself to its ranks keeps its batches and has something to go on from"),
    Rule("experts", lambda s: expert_rules.experts(s.run), "what is said of experts has experts, and the parts it speaks of"),
    Rule("latent-attention", lambda s: latent_rules.latents(s.run),
         "latent attention has sizes and rotations, and nothing that it replaces"),
    Rule("multi-token-prediction", lambda s: latent_rules.ahead(s.run), "multi-token prediction has layers, and tokens to predict"),
)


def broken(config: RunConfig, world_size: int) -> Iterator[tuple[str, str]]:
    """(name, what to say) of every rule that this config breaks. The config is resolved."""
    setting = Setting(config, world_size)
    lacking = [(rule.name, said) for rule in NEEDS if (said := rule.says(setting))]
    yield from lacking
    for rule in ALWAYS + (() if lacking else RULES):
        said = rule.says(setting)
        if said:
            yield rule.name, said
