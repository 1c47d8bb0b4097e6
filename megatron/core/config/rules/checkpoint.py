"""Rules about checkpoints and about what a run does when a step is bad."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.flags.declare import flag_name
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule


def _save_best_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Yield problems of --save-best."""
    checkpoint, train = s.run.checkpoint, s.run.train
    if checkpoint.save_best is None:
        return
    if checkpoint.save is None or train.skip_train:
        yield f"--save-best {checkpoint.save_best} keeps a checkpoint of this run; give --save, and no --skip-train"
    if train.eval_iters < 1 and not s.run.data.full_validation:
        yield f"--save-best {checkpoint.save_best} compares evaluations; give --eval-iters, or --full-validation"


@config_rule("checkpoints")
def _checkpoint_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Checkpoint settings have a folder and do not contradict each other."""
    checkpoint = s.run.checkpoint
    yield from _save_best_problems(s)
    if (
        checkpoint.save_retain_interval
        and checkpoint.save_interval
        and checkpoint.save_retain_interval % checkpoint.save_interval
    ):
        yield (
            f"--save-retain-interval {checkpoint.save_retain_interval} is not a multiple of --save-interval "
            f"{checkpoint.save_interval}"
        )
    if checkpoint.require_iteration is not None and checkpoint.ckpt_step is not None:
        yield (
            f"--require-iteration {checkpoint.require_iteration} speaks of the newest checkpoint, and --ckpt-step "
            f"{checkpoint.ckpt_step} chooses one; give one of them"
        )
    if checkpoint.use_checkpoint_args and checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        yield "--use-checkpoint-args has no checkpoint to read; give --load or --pretrained-checkpoint"


def _bad_step_problems(s: ConfigRuleInput, *, checks: bool) -> Iterator[str]:
    """Yield problems of --on-bad-step. checks: whether any check of steps is on."""
    faults, checkpoint = s.run.faults, s.run.checkpoint
    if faults.on_bad_step is not None and not checks:
        yield (
            f"--on-bad-step {faults.on_bad_step} knows no bad step with --no-check-for-nan-in-loss-and-grad; leave that out, "
            "or give --check-for-spiky-loss or --check-for-large-grads"
        )
    if faults.on_bad_step == "rollback" and not (
        checkpoint.save and checkpoint.save_interval and checkpoint.save_optim and checkpoint.save_rng
    ):
        yield (
            "--on-bad-step rollback goes back to whole checkpoints of this run; give --save and --save-interval, and neither "
            "--no-save-optim nor --no-save-rng; or choose skip"
        )
    if faults.on_bad_step == "rollback" and s.run.data.dataloader_type == "external":
        yield "--on-bad-step rollback reads data again, which --dataloader-type external cannot; choose skip"


def _rerun_problems(s: ConfigRuleInput, *, checks: bool) -> Iterator[str]:
    """Yield problems of --rerun-mode and --error-injection-rate. checks: whether any check of steps is on."""
    faults = s.run.faults
    if faults.error_injection_rate < 0:
        yield f"--error-injection-rate {faults.error_injection_rate} must be 0, for none, or a number of steps"
    if faults.effective_rerun_mode == "validate_results" and not checks:
        yield (
            "--rerun-mode validate_results knows no bad result with --no-check-for-nan-in-loss-and-grad; leave that out, "
            "or give --check-for-spiky-loss or --check-for-large-grads"
        )
    if faults.error_injection_rate > 0 and faults.effective_rerun_mode != "validate_results":
        yield f"--error-injection-rate {faults.error_injection_rate} is for --rerun-mode validate_results, not {faults.rerun_mode}"
    if faults.effective_rerun_mode != "disabled" and s.run.graphs.cuda_graph_impl != "none":
        yield (
            f"--rerun-mode {faults.effective_rerun_mode} runs a step twice, which graphs recorded for one pass do not; "
            "leave out --cuda-graph-impl"
        )


@config_rule("faults")
def _fault_tolerance_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Fault tolerance has something to detect, and what it needs to recover."""
    faults, train, checkpoint = s.run.faults, s.run.train, s.run.checkpoint
    counts = ("straggler_minmax_count", "check_weight_hash_across_dp_replicas_interval", "max_bad_steps")
    wrong = [
        f"{flag_name(name)} {getattr(faults, name)}"
        for name in counts
        if getattr(faults, name) is not None and getattr(faults, name) < 1
    ]
    if wrong:
        yield f"{', '.join(wrong)}: each must be at least 1"
    if faults.hang_timeout_minutes is not None and faults.hang_timeout_minutes < 0:
        yield f"--hang-timeout-minutes {faults.hang_timeout_minutes:g} is before the present; 0 stands for never"
    checks = train.check_for_nan_in_loss_and_grad or faults.check_for_spiky_loss or faults.check_for_large_grads
    yield from _bad_step_problems(s, checks=checks)
    yield from _rerun_problems(s, checks=checks)
    if faults.failure_dump_weights and not faults.validates_steps:
        yield "--failure-dump-weights has no failure dump to go into; give --on-bad-step"
    if faults.validates_steps and faults.failure_dump_weights and not (faults.error_dir or checkpoint.save):
        yield "--failure-dump-weights has no folder to go into; give --error-dir or --save"
