"""Number formats, the optimizer, and how its learning rate moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags import flag


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """Precision.

    Number formats of weights, gradients and the loss scale. Without --fp16 or --bf16 everything is fp32.
    """

    fp16: bool = flag(False, "weights and activations in fp16, with a loss scale")
    bf16: bool = flag(False, "weights and activations in bf16")
    fp64: bool = flag(False, "everything in fp64: slow, for comparing layouts to the last digits")
    loss_scale: float | None = flag(None, "constant loss scale for --fp16; left out: dynamic")
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale")
    loss_scale_window: float = flag(1000, "good steps before the dynamic loss scale doubles")
    hysteresis: int = flag(2, "overflows before the dynamic loss scale halves")
    accumulate_allreduce_grads_in_fp32: bool = flag(False, "gradients are summed in fp32 (always so with --bf16)")
    grad_reduce_in_bf16: bool = flag(False, "gradients are summed over data-parallel ranks in bf16")

    @property
    def dtype(self) -> str:
        """Name of the torch dtype of weights and activations."""
        chosen = {"float16": self.fp16, "bfloat16": self.bf16, "float64": self.fp64}
        return next((name for name, on in chosen.items() if on), "float32")

    @property
    def gradient_dtype(self) -> str:
        """Name of the torch dtype in which gradients are accumulated and reduced."""
        if self.fp64:
            return "float64"
        if self.grad_reduce_in_bf16:
            return "bfloat16"
        if self.fp16 and not self.accumulate_allreduce_grads_in_fp32:
            return "float16"
        return "float32"


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Optimizer.

    The update rule. Weight decay spares biases and other vectors; Adam's is decoupled, SGD's enters the momentum.
    """

    optimizer: Literal["adam", "sgd"] = flag("adam", "update rule (adam is AdamW)")
    weight_decay: float = flag(0.01, "weight decay")
    start_weight_decay: float | None = flag(None, "weight decay at the start, with --weight-decay-incr-style")
    end_weight_decay: float | None = flag(None, "weight decay at the end, with --weight-decay-incr-style")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant", "how weight decay moves")
    adam_beta1: float = flag(0.9, "decay of the first moment")
    adam_beta2: float = flag(0.999, "decay of the second moment")
    adam_eps: float = flag(1e-8, "added to the root of the second moment")
    sgd_momentum: float = flag(0.9, "momentum of SGD")
    clip_grad: float = flag(1.0, "largest global norm of the gradient; 0: no clipping")
    decoupled_lr: float | None = flag(None, "learning rate of the embedding and output layer, if another")
    decoupled_min_lr: float | None = flag(None, "smallest learning rate of the embedding and output layer")
    apply_wd_to_qk_layernorm: bool = flag(False, "weight decay also for the norms of queries and keys")


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Learning rate.

    Warm-up, then a decay, as functions of the samples trained on.
    """

    lr: float | None = flag(None, "largest learning rate")
    min_lr: float = flag(0.0, "smallest learning rate")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag("linear", "shape of the decay")
    lr_decay_iters: int | None = flag(None, "iterations until the smallest rate; left out: --train-iters")
    lr_decay_samples: int | None = flag(None, "samples until the smallest rate; left out: --train-samples")
    lr_warmup_iters: int = flag(0, "iterations of linear warm-up")
    lr_warmup_samples: int = flag(0, "samples of linear warm-up")
    lr_warmup_fraction: float | None = flag(None, "warm-up as a share of the decay's length")
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag("exponential", "shape of WSD's last phase")
    lr_wsd_decay_iters: int | None = flag(None, "iterations of WSD's last phase")
    lr_wsd_decay_samples: int | None = flag(None, "samples of WSD's last phase")
    override_opt_param_scheduler: bool = flag(
        False, "on resume, the command line's schedule wins", also=("--override-opt_param-scheduler",))
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "on resume, the checkpoint's schedule wins", also=("--use-checkpoint-opt_param-scheduler",))
