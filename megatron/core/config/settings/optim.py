"""Number formats, the optimizer, and how its learning rate moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.when import When
from megatron.core.config.settings.low_precision import LowPrecisionConfig

AWARE = When("use_precision_aware_optimizer")
ON_CPU = When("optimizer_cpu_offload")
MUON, LION, ADAFACTOR = (When("update_rules", (name,)) for name in ("muon", "lion", "adafactor"))
SOAP = When("optimizer", ("soap",))

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a number, by torch's name of its format


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """Precision. Number formats of weights, gradients and the loss scale. Without --fp16 or --bf16 everything is
    fp32.
    """

    fp16: bool = flag(False, "weights and activations in fp16, with a loss scale", role="training")
    bf16: bool = flag(False, "weights and activations in bf16", role="training")
    fp64: bool = flag(False, "everything in fp64: slow, for comparing layouts to the last digits", role="training")
    loss_scale: float | None = flag(
        None, "constant loss scale for --fp16; left out: dynamic", role="training", used_with=When("fp16")
    )
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale", role="training")
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale", role="training")
    loss_scale_window: float = flag(1000, "good steps before the dynamic loss scale doubles", role="training")
    hysteresis: int = flag(2, "overflows before the dynamic loss scale halves", role="training")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "gradients are summed in fp32 (always so with --bf16)", role="training"
    )
    grad_reduce_in_bf16: bool = flag(
        False, "gradients are summed over data-parallel ranks in bf16", role="training", used_with=When("bf16")
    )
    use_precision_aware_optimizer: bool = flag(
        False,
        "Adam's state in the formats below; bf16 weights are the upper half of their fp32 main weights",
        role="training",
    )
    main_grads_dtype: Literal["fp32", "bf16"] = flag(
        "fp32",
        "with --use-precision-aware-optimizer: format in which gradients are summed up",
        role="training",
        used_with=AWARE,
    )
    main_params_dtype: Literal["fp32", "fp16"] = flag(
        "fp32", "with --use-precision-aware-optimizer: format of the master weights", role="training", used_with=AWARE
    )
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag(
        "fp32", "with --use-precision-aware-optimizer: format of first moments", role="training", used_with=AWARE
    )
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag(
        "fp32", "with --use-precision-aware-optimizer: format of second moments", role="training", used_with=AWARE
    )
    low: LowPrecisionConfig = LowPrecisionConfig()

    @property
    def param_dtype_name(self) -> str:
        """Name of the torch dtype of weights and activations."""
        chosen = {"float16": self.fp16, "bfloat16": self.bf16, "float64": self.fp64}
        return next((name for name, on in chosen.items() if on), "float32")

    @property
    def gradient_dtype_name(self) -> str:
        """Name of the torch dtype in which gradients are accumulated and reduced."""
        if self.fp64:
            return "float64"
        if self.grad_reduce_in_bf16 or self.main_grads_dtype == "bf16":
            return "bfloat16"
        if self.fp16 and not self.accumulate_allreduce_grads_in_fp32:
            return "float16"
        return "float32"


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Optimizer. The update rule. Weight decay spares biases and other vectors; SGD's enters the momentum, all
    others' is decoupled.
    """

    optimizer: Literal["adam", "sgd", "lion", "adafactor", "muon", "dist_muon", "soap"] = flag(
        "adam", "update rule (adam is AdamW; dist_muon is muon with --use-distributed-optimizer)", role="training"
    )
    weight_decay: float = flag(0.01, "weight decay", role="training")
    start_weight_decay: float | None = flag(
        None, "weight decay at the start, with --weight-decay-incr-style", role="training"
    )
    end_weight_decay: float | None = flag(
        None, "weight decay at the end, with --weight-decay-incr-style", role="training"
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "how weight decay moves", role="training"
    )
    lora_plus_ratio: float = flag(
        1.0,
        "learning rate of the factors B of adapters over that of A (LoRA+, whose paper takes 16)",
        role="training",
        used_with=When("lora_rank"),
    )
    adam_beta1: float = flag(0.9, "decay of the first moment", role="training")
    adam_beta2: float = flag(0.999, "decay of the second moment", role="training")
    adam_eps: float = flag(1e-8, "added to the root of the second moment", role="training")
    sgd_momentum: float = flag(0.9, "momentum of SGD", role="training")
    lion_beta1: float = flag(
        0.95, "Lion: share of the momentum in the direction of a step (its paper: 0.9)", role="training", used_with=LION
    )
    lion_beta2: float = flag(0.98, "Lion: decay of the momentum (its paper: 0.99)", role="training", used_with=LION)
    adafactor_decay_rate: float = flag(
        0.8,
        "Adafactor: in step n the newest squares count n to the power of minus this",
        role="training",
        used_with=ADAFACTOR,
    )
    adafactor_clip_threshold: float = flag(
        1.0, "Adafactor: largest root mean square of a direction", role="training", used_with=ADAFACTOR
    )
    adafactor_min_rms: float = flag(
        1e-3,
        "Adafactor: the rate follows the root mean square of a parameter's weights, but not below this",
        role="training",
        used_with=ADAFACTOR,
    )
    muon_momentum: float = flag(0.9, "Muon: decay of the momentum", role="training", used_with=MUON)
    muon_nesterov: bool = flag(
        False, "Muon: the newest gradient counts twice (Nesterov)", role="training", used_with=MUON
    )
    muon_num_ns_steps: int = flag(5, "Muon: Newton-Schulz steps", role="training", used_with=MUON)
    muon_coefficient_type: Literal["simple", "quintic", "polar_express"] = flag(
        "quintic", "Muon: coefficients of the Newton-Schulz steps", role="training", used_with=MUON
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag(
        "spectral",
        "Muon: an update of out x in is scaled by the root of max(out, in), out/in, or max(1, out/in)",
        role="training",
        used_with=MUON,
    )
    muon_extra_scale_factor: float = flag(
        1.0,
        "Muon: further factor of every update; 0.2 gives about the size of AdamW's",
        role="training",
        used_with=MUON,
    )
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = flag(
        "duplicated",
        "Muon: tensor ranks gather a matrix and each works on all of it, or share the work, or each works on its own "
        "piece as if it were a matrix (blockwise, another result)",
        role="training",
        used_with=MUON,
    )
    muon_split_qkv: bool = flag(
        True,
        "Muon: do not split queries, keys and values into matrices of their own; they are one",
        off="--muon-no-split-qkv",
        role="training",
        used_with=MUON,
    )
    muon_fp32_matmul_prec: Literal["medium", "high"] = flag(
        "medium", "Muon: Newton-Schulz in bf16, or in fp32", role="training", used_with=MUON
    )
    muon_scalar_optimizer: Literal["adam", "lion"] = flag(
        "adam", "Muon: update rule of embeddings, output layer, biases and norms", role="training", used_with=MUON
    )
    soap_shampoo_beta: float = flag(0.95, "SOAP: decay of Shampoo's factors", role="training", used_with=SOAP)
    soap_use_kl_shampoo: bool = flag(
        True,
        "SOAP: Shampoo's factors are sums of g g^T, not divided by each other (KL-Shampoo)",
        role="training",
        used_with=SOAP,
    )
    optimizer_cpu_offload: bool = flag(
        False, "keep main weights and moments in CPU memory, and update them there", role="free"
    )
    optimizer_offload_fraction: float = flag(
        1.0, "with --optimizer-cpu-offload: share of the elements", role="free", used_with=ON_CPU
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False,
        "with --optimizer-cpu-offload: copy gradients and weights beside the update",
        role="free",
        used_with=ON_CPU,
    )
    pin_cpu_grads: bool = flag(
        True, "with --optimizer-cpu-offload: gradients not in pinned memory", role="free", used_with=ON_CPU
    )
    pin_cpu_params: bool = flag(
        True, "with --optimizer-cpu-offload: fp32 weights not in pinned memory", role="free", used_with=ON_CPU
    )
    clip_grad: float = flag(1.0, "largest global norm of the gradient; 0: no clipping", role="training")
    decoupled_lr: float | None = flag(
        None, "learning rate of the embedding and output layer, if another", role="training"
    )
    decoupled_min_lr: float | None = flag(
        None, "smallest learning rate of the embedding and output layer", role="training"
    )
    apply_wd_to_qk_layernorm: bool = flag(False, "weight decay also for the norms of queries and keys", role="training")

    @property
    def updates_whole_matrices(self) -> bool:
        """Whether the matrices of the layers have an update rule that looks at each of them as a whole, such as Muon."""
        return len(self.update_rules) > 1

    @property
    def elementwise_optimizer(self) -> str:
        """The optimizer of all parameters but what a rule for whole matrices updates: adam, sgd, lion or adafactor."""
        return self.update_rules[-1]

    @property
    def update_rules(self) -> tuple[str, ...]:
        """Names of the update rules: of the matrices of the layers, then of all other parameters, if they have another."""
        beside = {
            "muon": self.muon_scalar_optimizer,
            "soap": "adam",
        }  # rule for whole matrices -> that of all other parameters
        name = self.optimizer.removeprefix("dist_")
        return (name, beside[name]) if name in beside else (name,)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Learning rate. Warm-up, then a decay, as functions of the samples trained on."""

    lr: float | None = flag(None, "largest learning rate", role="training")
    min_lr: float = flag(0.0, "smallest learning rate", role="training")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", "shape of the decay", role="training"
    )
    lr_decay_iters: int | None = flag(
        None, "iterations until the smallest rate; left out: --train-iters", role="training"
    )
    lr_decay_samples: int | None = flag(
        None, "samples until the smallest rate; left out: --train-samples", role="training"
    )
    lr_warmup_iters: int = flag(0, "iterations of linear warm-up", role="training")
    lr_warmup_samples: int = flag(0, "samples of linear warm-up", role="training")
    lr_warmup_fraction: float | None = flag(None, "warm-up as a share of the decay's length", role="training")
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", role="training")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "shape of WSD's last phase", role="training"
    )
    lr_wsd_decay_iters: int | None = flag(None, "iterations of WSD's last phase", role="training")
    lr_wsd_decay_samples: int | None = flag(None, "samples of WSD's last phase", role="training")
    override_opt_param_scheduler: bool = flag(
        False, "on resume, the command line's schedule wins", also=("--override-opt_param-scheduler",), role="free"
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "on resume, the checkpoint's schedule wins", also=("--use-checkpoint-opt_param-scheduler",), role="free"
    )
