"""Rules about matrices of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.flags.declare import flag_name
from megatron.core.config.mixers.table import attention_of, requested_mixers
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule
from megatron.core.config.settings.run import RunConfig


def _bf16_layer_problems(run: RunConfig) -> Iterator[str]:
    """Yield problems of the layers that are left in bf16."""
    low, num_layers = run.precision.low, run.model.encoder_or_decoder_depth()
    ends = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    negative = [f"{flag_name(name)} {getattr(low, name)}" for name in ends if getattr(low, name) < 0]
    if negative:
        yield f"{', '.join(negative)}: a number of layers is at least 0"
    elif not any(low.is_low_precision_layer(layer, num_layers) for layer in range(num_layers)):
        yield (
            f"--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 leave none of {num_layers} layers to "
            f"{_low_precision_format_flag(run)}; choose fewer"
        )


@config_rule("low-precision", needs_sizes=True)
def low_precision_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Low-precision matmuls have one recipe, and layers that use it."""
    run = s.run
    low = run.precision.low
    if not low.recipe_name:
        return
    if low.fp8_format is not None and low.fp4_format is not None:
        yield "--fp8-format and --fp4-format contradict each other; keep one"
    if run.precision.fp16:
        yield f"--fp16 scales all gradients by one number, and {_low_precision_format_flag(run)} each matrix by its own; choose --bf16"
    yield from _bf16_layer_problems(run)
    if low.fp8_amax_history_len < 1:
        yield f"--fp8-amax-history-len {low.fp8_amax_history_len}: a history holds at least one step; choose 1 or more"
    if run.parallel.hybrid_context_parallel:
        yield (
            f"--hybrid-context-parallel gives ranks different numbers of microbatches, so {_low_precision_format_flag(run)} finds no scales in "
            "common; leave one of them out"
        )
    if low.has_quantized_weights:
        yield from _fp8_param_gather_problems(run)


def _fp8_param_gather_problems(run: RunConfig) -> Iterator[str]:
    """Yield problems of --fp8-param-gather and --fp4-param-gather."""
    low = run.precision.low
    flag, other = (
        ("--fp4-param-gather", "--fp8-param-gather") if low.fp4_format else ("--fp8-param-gather", "--fp4-param-gather")
    )
    if low.fp8_param_gather if low.fp4_format else low.fp4_param_gather:
        yield f"{other} is of weights in another format than --{_recipe_flag(run)} has; give {flag} instead"
    if not run.parallel.use_distributed_optimizer:
        yield f"{flag} is about what --use-distributed-optimizer gathers; add it"
    if run.model.mla.multi_latent_attention:
        yield f"{flag}: --multi-latent-attention reads its weights as they are when it decodes; leave one of them out"
    elsewhere = {
        "--use-precision-aware-optimizer": run.precision.use_precision_aware_optimizer,
        "--optimizer-cpu-offload": run.optimizer.optimizer_cpu_offload,
    }
    if given := " and ".join(name for name, chosen in elsewhere.items() if chosen):
        yield f"{flag} keeps main weights of its own in fp32, which {given} would keep elsewhere; leave one of them out"


@config_rule("low-precision-sizes", needs_sizes=True)
def low_precision_size_problems(s: ConfigRuleInput) -> str:
    """Every tensor rank holds whole scaling blocks of the matrices of low-precision matmuls."""
    multiple, unfit = s.run.precision.low.matrix_size_multiple, dict[str, None]()
    for what, size, ranks in _low_precision_matrix_sizes(s.run):
        if size % ranks == 0 and size // ranks % multiple:  # what cannot be divided is another rule's
            over = f" over {ranks} ranks" if ranks > 1 else ""
            unfit[
                f"{what} is {size // ranks}{over}, no multiple of the {multiple} that --{_recipe_flag(s.run)} needs"
            ] = None
    return "\n  ".join(f"{problem}; choose sizes that are, fewer tensor ranks, or another recipe" for problem in unfit)


def _low_precision_matrix_sizes(run: RunConfig) -> Iterator[tuple[str, int, int]]:
    """Yield (description, size, number of ranks that share it) of each dimension of the matrices in low precision."""
    model, tp, moe = run.model, run.parallel.tp, run.model.moe
    yield f"--hidden-size {model.hidden_size}", model.hidden_size, 1
    for mixer in (attention_of(model), *(one for one in requested_mixers(model) if not one.attends)):
        yield from mixer.matrix_sizes(model, tp)
    yield f"--ffn-hidden-size {model.ffn_hidden_size}", model.ffn_hidden_size, tp
    if moe.num_experts:
        yield (
            f"--moe-ffn-hidden-size {moe.moe_ffn_hidden_size}",
            moe.expert_width,
            run.parallel.expert_tensor_parallel_size or tp,
        )
    if moe.moe_shared_expert_intermediate_size is not None:
        yield "--moe-shared-expert-intermediate-size", moe.moe_shared_expert_intermediate_size, tp


def _low_precision_format_flag(run: RunConfig) -> str:
    """Return which flag chose low precision: --fp8-format or --fp4-format."""
    return "--fp8-format" if run.precision.low.fp8_format else "--fp4-format"


def _recipe_flag(run: RunConfig) -> str:
    """Return the recipe as words without dashes, such as "fp8-recipe mxfp8"."""
    low = run.precision.low
    return f"fp4-recipe {low.recipe_name}" if low.fp4_format else f"fp8-recipe {low.recipe_name}"
