"""What must hold between the settings of optimizers, of the formats of their state, and of what waits in the CPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megatron.core.config.flags.declare import flag_name
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule
from megatron.core.config.settings.optim import OptimizerConfig


def _optimizer_offload_problems(config: OptimizerConfig) -> Iterator[str]:
    """Yield problems of --optimizer-cpu-offload."""
    if config.optimizer_cpu_offload and config.updates_whole_matrices:
        rule = f"--optimizer {config.optimizer}"
        yield f"--optimizer-cpu-offload: the products of matrices of {rule} are no work for a CPU; leave it out, or choose adam"
    if config.optimizer_cpu_offload and config.optimizer == "adafactor":
        yield "--optimizer-cpu-offload moves moments, and --optimizer adafactor keeps next to none; leave it out, or choose adam"
    if not 0.0 <= config.optimizer_offload_fraction <= 1.0:
        yield f"--optimizer-offload-fraction {config.optimizer_offload_fraction:g} is a share, from 0 to 1"


@config_rule("update-rule")
def update_rule_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Settings of optimizers have valid values, and their state is where the optimizer can use it."""
    config = s.run.optimizer
    for name in (field.name for field in fields(OptimizerConfig)):
        if name.startswith("adafactor_") and getattr(config, name) <= 0:
            yield f"{flag_name(name)} {getattr(config, name):g} must be above 0"
    for name in ("lion_beta1", "lion_beta2", "muon_momentum", "soap_shampoo_beta"):
        if not 0.0 <= getattr(config, name) < 1.0:
            yield f"{flag_name(name)} {getattr(config, name):g} is a share from 0 up to, but not, 1"
    if config.muon_num_ns_steps < 1:
        yield f"--muon-num-ns-steps {config.muon_num_ns_steps} makes nothing orthogonal; give 5, or 8 for polar_express"
    if config.muon_extra_scale_factor <= 0:
        yield f"--muon-extra-scale-factor {config.muon_extra_scale_factor:g} must be above 0; 0.2 gives updates of AdamW's size"
    yield from _optimizer_offload_problems(config)


@config_rule("low-precision-state")
def optimizer_dtype_problems(s: ConfigRuleInput) -> Iterator[str]:
    """The number formats of optimizer state fit the optimizer and the weights."""
    run = s.run
    precision = run.precision
    if not precision.use_precision_aware_optimizer:
        return
    if run.optimizer.optimizer != "adam":
        yield f"--use-precision-aware-optimizer keeps the moments of adam, and --optimizer {run.optimizer.optimizer} has others; drop one"
    if run.optimizer.optimizer_cpu_offload:
        yield "--use-precision-aware-optimizer and --optimizer-cpu-offload both make room for the same state; keep one"
    if precision.fp64:
        yield "--use-precision-aware-optimizer computes in fp32, and --fp64 wants more; drop one"
    if precision.main_grads_dtype == "bf16" and not precision.bf16:
        yield "--main-grads-dtype bf16 sums up gradients as --bf16 makes them; add that, or choose fp32"
    if precision.main_params_dtype == "fp16" and not (precision.bf16 or precision.fp16):
        yield "--main-params-dtype fp16 is of main weights beside half-precision weights; add --bf16 or --fp16, or choose fp32"
    if run.parallel.use_torch_fsdp2 and (precision.main_params_dtype == "fp16" or precision.main_grads_dtype == "bf16"):
        yield (
            "--use-torch-fsdp2 has fp32 main weights and gradients, which are all it keeps; leave --main-params-dtype and "
            "--main-grads-dtype at fp32"
        )


@config_rule("activation-offloading")
def activation_offload_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Activation offloading is chosen by one method, and the layers support it."""
    config = s.run.offload
    if config.cpu_offloading_num_layers < 0 or config.min_offloaded_tensor_size < 0:
        yield "--cpu-offloading-num-layers and --min-offloaded-tensor-size: neither is below 0"
    if config.fine_grained_activation_offloading and not config.offload_modules:
        yield "--fine-grained-activation-offloading has no modules; name them with --offload-modules, such as core_attn attn_proj"
    if config.offload_modules and config.cpu_offloading_num_layers > 0:
        yield "--cpu-offloading-num-layers sends away all of a layer, and --offload-modules some of every one; keep one"
    experts = [name for name in config.offload_modules if name in ("expert_fc1", "moe_act")]
    if experts and not s.run.model.moe.num_experts:
        yield f"--offload-modules {' '.join(experts)}: of experts, and there are none; leave out"
    if config.offloads_activations and s.run.compilation.compile:
        yield "--compile decides itself what a layer saves, before it could be sent away; drop it, or activation offloading"
