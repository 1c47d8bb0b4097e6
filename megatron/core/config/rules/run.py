"""Rules about batches, duration, number formats and samples of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from megatron.core.config.flags.declare import flag_name
from megatron.core.config.plan.layers import nearest_multiples_text
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule


@config_rule("required")
def _missing_settings_problem(setting: ConfigRuleInput) -> str:
    """Every size that no other setting determines is given."""
    run = setting.run
    of_model = [
        name for name in ("num_layers", "hidden_size", "num_attention_heads") if getattr(run.model, name) is None
    ]
    lacking = of_model + [name for name in ("seq_length", "micro_batch_size") if getattr(run.train, name) is None]
    taken = of_model and not run.checkpoint.use_checkpoint_args
    hint = "; --load FOLDER --use-checkpoint-args takes a network's shape from its checkpoint" if taken else ""
    return f"{', '.join(map(flag_name, lacking))} must be given{hint}" if lacking else ""


@config_rule("positive")
def _positive_sizes_problem(setting: ConfigRuleInput) -> str:
    """Counts and sizes are at least 1."""
    run = setting.run
    counts = (
        (run.model, "num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups"),
        (run.model, "make_vocab_size_divisible_by encoder_num_layers decoder_num_layers"),
        (run.model.hybrid, "mamba_state_dim mamba_head_dim"),
        (run.model.hybrid, "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim"),
        (run.parallel, "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"),
        (run.parallel, "expert_model_parallel_size expert_tensor_parallel_size"),
        (run.train, "seq_length decoder_seq_length micro_batch_size global_batch_size eval_interval"),
        (run.log, "log_interval"),
        (run.checkpoint, "save_interval save_keep_last save_retain_interval"),
    )
    wrong = [
        f"{flag_name(name)} {size}"
        for part, names in counts
        for name in names.split()
        if (size := getattr(part, name)) is not None and size < 1
    ]
    return f"{', '.join(wrong)}: each must be at least 1" if wrong else ""


@config_rule("global-batch", needs_sizes=True)
def _global_batch_problem(s: ConfigRuleInput) -> str:
    """The global batch is a whole number of microbatches on every data-parallel rank."""
    train = s.run.train
    unit = train.micro_batch_size * s.run.parallel.data_parallel_size(s.world_size)
    size, evaluated = train.global_batch_size, train.eval_global_batch_size
    if (
        evaluated is not None
        and unit
        and (evaluated < 1 or evaluated % unit and not train.decrease_batch_size_if_needed)
    ):
        return (
            f"--eval-global-batch-size {evaluated} is not a multiple of --micro-batch-size {train.micro_batch_size} x data-parallel "
            f"size {unit // train.micro_batch_size} = {unit}; choose {-(-max(evaluated, 1) // unit) * unit}, or leave it out"
        )
    if (
        train.rampup_batch_size
        or train.step_batch_size_schedule
        or train.decrease_batch_size_if_needed
        or not unit
        or size % unit == 0
    ):
        return ""
    return (
        f"--global-batch-size {size} is not a multiple of --micro-batch-size {train.micro_batch_size} x data-parallel "
        f"size {unit // train.micro_batch_size} = {unit}; choose {nearest_multiples_text(size, unit)}"
    )


@config_rule("duration")
def _duration_problem(s: ConfigRuleInput) -> Iterator[str]:
    """One flag says how long to train."""
    train = s.run.train
    if train.train_iters is not None and train.train_samples is not None:
        yield "--train-iters and --train-samples both say how long to train; keep one"
    elif train.train_iters is None and train.train_samples is None and not train.skip_train:
        yield "neither --train-iters nor --train-samples says how long to train; give one (or --skip-train)"


@config_rule("learning-rate")
def _learning_rate_problem(s: ConfigRuleInput) -> Iterator[str]:
    """A run that trains has a learning rate."""
    if s.run.schedule.lr is None and not s.run.train.skip_train:
        yield "--lr must be given (or --skip-train)"


@config_rule("number-formats")
def _dtype_flags_problem(s: ConfigRuleInput) -> Iterator[str]:
    """One number format is chosen."""
    precision = s.run.precision
    chosen = [flag_name(name) for name in ("fp16", "bf16", "fp64") if getattr(precision, name)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} contradict each other; keep one"


@config_rule("samples-in-training")
def _eval_generate_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Texts that are generated during training have a valid length and temperature, and whole sequences on each rank."""
    train = s.run.train
    online = s.run.data.multimodal.online_evaluation_config
    if online is not None and s.run.parallel.context_parallel_size > 1:
        yield (
            f"--online-evaluation-config: answers are generated without --context-parallel-size {s.run.parallel.context_parallel_size}; "
            "leave one out"
        )
    if train.eval_generate is None:
        return
    if s.run.parallel.context_parallel_size > 1:
        yield f"--eval-generate: text is generated without --context-parallel-size {s.run.parallel.context_parallel_size}; leave one out"
    if train.eval_generate_tokens < 1:
        yield f"--eval-generate-tokens {train.eval_generate_tokens} are no tokens; give 1 or more"
    if not 0.0 <= train.eval_generate_temperature <= 100.0:
        yield f"--eval-generate-temperature {train.eval_generate_temperature} is no temperature; give one from 0 to 100"


@config_rule("elastic")
def _elastic_problems(s: ConfigRuleInput) -> Iterator[str]:
    """An elastic run keeps its global batch size and has a checkpoint folder to resume from."""
    run = s.run
    if not run.parallel.elastic:
        return
    if (
        run.checkpoint.save is None
        or run.checkpoint.load is None
        or PurePath(run.checkpoint.save) != PurePath(run.checkpoint.load)
    ):
        yield "--elastic goes on from the last checkpoint; give one folder as both --save and --load"
    if run.checkpoint.save_interval is None:
        yield "--elastic does again what was not saved when ranks are lost; give --save-interval"
    if run.data.dataloader_type != "single":
        yield (
            f"--dataloader-type {run.data.dataloader_type} orders samples by the number of ranks, which --elastic changes; "
            "choose single"
        )
    if run.train.decrease_batch_size_if_needed:
        yield "--decrease-batch-size-if-needed changes the global batch with the ranks, and --elastic keeps it; drop one of them"


NEEDS = (_missing_settings_problem, _positive_sizes_problem)
