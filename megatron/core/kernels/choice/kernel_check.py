"""Is what a kernel computes right on this device? Forward and backward, against the op's definition in fp64 on the CPU.

A trial holds the sizes and the mask that the run's own settings give, on few and short sequences. Both sides see the same
inputs, rounded to the run's number format; what is compared is the result and the gradient of every input, each by its
largest difference over the largest value of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megatron.core.config.mixers.table import recurrent_mixers
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.kernels.choice.table import CANDIDATES, KernelCandidate, KernelRequirements, Kernels
from megatron.core.kernels.low_precision import fp8
from megatron.core.kernels.low_precision.fp8 import E4M3, NumberFormat, QuantizeTransposeKernels
from megatron.core.kernels.low_precision.recipes import OPERANDS, LowPrecisionRecipe, low_precision_recipe_of
from megatron.core.kernels.ops import adamw, paged, reference
from megatron.core.kernels.ops.linear_loss import VocabularyShard
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.reference import GatedActivationOptions
from megatron.core.kernels.state_space import scans

LONGEST, WIDEST, MOST_HEADS, MOST_EXPERTS, MOST_STATE = 256, 512, 8, 8, 64
# Largest difference over the largest value: some twenty times what sound kernels show at these sizes.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}

Op = Callable[..., Tensor]
Draw = Callable[..., Tensor]  # shape -> standard normal numbers, fp64 on the CPU


@dataclass(frozen=True, slots=True)
class OpTrial:
    """A trial of one op of the kernel table. max_error: (kernel, device, dtype of the inputs) -> the largest difference
    between the kernel and the definition of the op, relative to the largest value; infinite if there is a NaN.
    """

    op: str
    max_error: Callable[[Any, torch.device, torch.dtype], float]


def _make_gradient_trial(
    op: str, inputs: tuple[Tensor, ...], call: Callable[..., Tensor], definition: Callable[..., Any]
) -> OpTrial:
    """Return the trial that compares an op's result and the gradients of all inputs with those of its definition.

    inputs: differentiable, fp64 on the CPU, any shape. call: (op, *inputs) -> result as one tensor, with the inputs on
    any device; the definition is called in the same way.
    """

    def max_error(kernel: Op, device: torch.device, dtype: torch.dtype) -> float:
        rounded = [one.to(dtype) for one in inputs]
        result = _result_and_gradients(call, kernel, [one.to(device) for one in rounded])
        expected = _result_and_gradients(call, definition, [one.double() for one in rounded])
        worst = 0.0
        for mine, theirs in zip(result, expected, strict=True):
            gap = (mine.cpu().double() - theirs).abs().max().item() / max(theirs.abs().max().item(), 1e-30)
            worst = max(worst, gap if gap == gap else float("inf"))
        return worst

    return OpTrial(op, max_error)


def trials_for_ops_of_run(config: RunConfig, need: KernelRequirements) -> Iterator[OpTrial]:
    """Yield a trial for every op that training with this config calls, or decoding with its network."""
    model, draw = config.model, _make_seeded_randn(0)
    width = min(model.hidden_size or WIDEST, WIDEST)
    length = min(config.train.seq_length or LONGEST, LONGEST)
    yield _attention_trial(config, need, draw, length)
    rows, is_layer_norm = draw(8, 2, width), model.normalization == "LayerNorm"
    norm = "layer_norm" if is_layer_norm else "rms_norm"
    weights = (1 + draw(width), *((draw(width),) if is_layer_norm else ()))
    yield _make_gradient_trial(
        norm, (rows, *weights), lambda op, *given: op(*given, model.norm_epsilon), getattr(reference, norm)
    )
    if model.has_plain_pre_norm:
        yield _make_gradient_trial(
            "residual_norm",
            (rows, draw(8, 2, width), *weights),
            partial(_call_residual_norm_and_concat, epsilon=model.norm_epsilon),
            reference.residual_norm,
        )
    gating = (
        GatedActivationOptions(model.activation_func_clamp_value, model.glu_linear_offset)
        if model.has_gated_mlp
        else None
    )
    if model.can_fuse_mlp_bias:
        yield _bias_activation_trial(model, draw, width, gating)
    if gating is not None:
        yield _make_gradient_trial(
            "gated_activation",
            (draw(8, 2, 2 * width),),
            lambda op, x: op(x, model.activation_name, gating),
            reference.gated_activation,
        )
    else:
        yield _make_gradient_trial(
            "activation", (rows,), lambda op, x: op(x, model.activation_name), reference.activation
        )
    yield from _qkv_op_trials(config, draw, length)
    yield _cross_entropy_trial(config, draw, width)
    if model.moe.num_experts:
        experts, wide = min(model.moe.num_experts, MOST_EXPERTS), min(model.moe.moe_ffn_hidden_size or WIDEST, WIDEST)
        counts = torch.arange(experts) * 3 % 7  # uneven, and one with none
        yield _make_gradient_trial(
            "grouped_linear",
            (draw(int(counts.sum()), width), draw(experts, wide, width) / width**0.5),
            lambda op, x, weight: op(x, weight, counts.to(x.device)),
            reference.grouped_linear,
        )
        yield _permute_trial(draw, width)
    if recurrent_mixers(model):
        yield from _state_space_trials(model, need, draw, length)
    yield from _adamw_and_fp8_trials(config, need, draw, width)
    if model.num_attention_heads and model.architecture.is_decoder_only:
        heads, groups = _trial_heads_and_groups(model)
        error = partial(paged.paged_kernel_error, heads=heads, groups=groups, size=model.kv_channels or 64)
        yield OpTrial("paged_attention", error)


def _adamw_and_fp8_trials(config: RunConfig, need: KernelRequirements, draw: Draw, width: int) -> Iterator[OpTrial]:
    """Yield the trials of the optimizer's update, and of the fp8 ops if the run has an fp8 recipe."""
    if config.optimizer.elementwise_optimizer == "adam":
        yield OpTrial("adamw", adamw.adamw_kernel_error)
    if need.low.recipe_name and need.low.fp4_format is None:
        yield OpTrial("quantise", partial(quantize_kernel_error, need.low))
        yield _make_gradient_trial(
            "low_linear",
            (draw(16, 2, width), draw(32, width) / width**0.5, draw(32)),
            partial(call_low_linear_kernel, need.low),
            reference_low_linear,
        )


def try_chosen_kernels(
    kernels: Kernels, config: RunConfig, need: KernelRequirements, device: torch.device
) -> dict[str, float | str]:
    """Try every chosen kernel: return op -> its relative error, or the message of the exception that it raised. Ops
    that their layers compute themselves are left out.
    """
    names = {field.name for field in fields(Kernels)}
    assert all(trial.op in names for trial in trials_for_ops_of_run(config, need)), (
        "a trial is of an op that has kernels"
    )
    return {
        trial.op: trial_error_or_exception(trial, kernel, device, need)
        for trial in trials_for_ops_of_run(config, need)
        if (kernel := getattr(kernels, trial.op))
    }


def try_usable_kernels(
    config: RunConfig, need: KernelRequirements, device: torch.device
) -> dict[tuple[str, str], float | str]:
    """Try every kernel that this machine can use for the run, chosen or not: return (op, kernel name) -> its relative
    error, or the message of the exception that it raised.
    """
    return {
        (trial.op, candidate.name): trial_error_or_exception(trial, candidate, device, need)
        for trial in trials_for_ops_of_run(config, need)
        for candidate in CANDIDATES
        if candidate.op == trial.op and not candidate.unsupported_reason(need) and candidate.kernel is not None
    }


def trial_error_or_exception(
    trial: OpTrial, kernel: KernelCandidate | Any, device: torch.device, need: KernelRequirements
) -> float | str:
    """Run a trial; return its relative error, or "Type: message" of what it raises. kernel: a callable, or a candidate
    whose kernel is imported here.
    """
    try:
        with torch.enable_grad():
            return trial.max_error(
                kernel.loaded_kernel if isinstance(kernel, KernelCandidate) else kernel, device, need.dtype
            )
    except Exception as error:  # noqa: BLE001 - whatever a kernel does, the report tells it
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _make_seeded_randn(seed: int) -> Draw:
    return partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _trial_heads_and_groups(model: ModelConfig) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads for a trial: at most MOST_HEADS query heads, and key heads in
    the network's proportion.
    """
    heads = min(model.num_attention_heads or MOST_HEADS, MOST_HEADS)
    if not (model.group_query_attention and model.num_query_groups and model.num_attention_heads):
        return heads, heads
    groups = max(1, heads * model.num_query_groups // model.num_attention_heads)
    return heads, groups if heads % groups == 0 else 1


def _attention_trial(config: RunConfig, need: KernelRequirements, draw: Draw, length: int) -> OpTrial:
    """Return the trial of attention with the network's head sizes and the run's mask, on two sequences of this length."""
    model = config.model
    heads, groups = _trial_heads_and_groups(model)
    keys, values = model.kv_channels or 64, model.kv_channels or 64
    if model.mla.multi_latent_attention:
        keys, values = model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim, model.mla.v_head_dim
    windows = [plan.window for plan in network_layer_plans(model) if plan.window] if need.window else []
    places = torch.arange(length).expand(2, length)
    mask = AttentionMaskSpec(
        causal=not model.architecture.predicts_masked_words,
        window=windows[0] if windows else None,
        documents=places // -(-length // 3) if need.documents else None,
        padding=places < length - length // 4 if need.padding else None,
    )
    scores = AttentionScoreModifiers(softcap=model.attention_logit_softcap if need.softcap else None)

    def call_attention(op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call an attention op with the mask moved to the device of q."""
        there = {
            name: value.to(q.device) for name in ("documents", "padding") if (value := getattr(mask, name)) is not None
        }
        return op(q, k, v, replace(mask, **there), 0.0, scores)

    return _make_gradient_trial(
        "attention",
        (draw(length, 2, heads, keys), draw(length, 2, groups, keys), draw(length, 2, groups, values)),
        call_attention,
        reference.softmax_attention,
    )


def _cross_entropy_trial(config: RunConfig, draw: Draw, width: int) -> OpTrial:
    """Return the trial of cross entropy from hidden states [24, width] and an output matrix of 60 words and 4 rows of
    padding; some tokens are ignored.
    """
    tokens, words = 24, 60
    targets = (torch.arange(tokens) * 7 % (words + 1)) - 1
    known = VocabularyShard(0, words, config.model.final_logit_softcap, lambda stated: stated)
    return _make_gradient_trial(
        "cross_entropy",
        (draw(tokens, width), draw(words + 4, width) / width**0.5),
        lambda op, x, weight: op(x, weight, None, targets.to(x.device), known),
        _reference_cross_entropy,
    )


def _reference_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, words: VocabularyShard
) -> Tensor:
    """Compute the cross entropy of every token, [t], from the full matrix of logits; arguments as of
    `linear_loss.blockwise_linear_cross_entropy`.
    """
    logits = F.linear(x, weight, bias)[:, : words.valid]
    logits = logits if words.softcap is None else words.softcap * torch.tanh(logits / words.softcap)
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=-1)


def _qkv_op_trials(config: RunConfig, draw: Draw, length: int) -> Iterator[OpTrial]:
    """Yield the trials of the ops between QKV projection and attention that the network uses: splitting heads and
    rotary embedding.
    """
    if config.model.splits_qkv_unrotated:
        yield _split_qkv_trial(config.model, draw)
    if config.model.uses_rotary:
        yield from _rotary_trials(config, draw, length)


def _rotary_trials(config: RunConfig, draw: Draw, length: int) -> Iterator[OpTrial]:
    """Yield the trial of rotary embedding, and if the network uses it, of rotary embedding of a fused QKV projection."""
    rope, pairs, size = (
        config.model.rope,
        config.model.has_interleaved_rotary,
        config.model.head_size_before_rotary_percent or 64,
    )
    turned = max(2, int(size * rope.rotary_percent) // 2 * 2)
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (
        torch.arange(turned // 2, dtype=torch.float64) / (turned // 2)
    )
    angles = (angles.repeat_interleave(2, -1) if pairs else angles.repeat(1, 2))[:, None, None]

    def cos_and_sin(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines on the device of x."""
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        return angles.cos().to(x.device, kind), angles.sin().to(x.device, kind)

    def call_rotary_qkv(op: Callable[..., tuple[Tensor, ...]], x: Tensor) -> Tensor:
        """Call a rotary_qkv op and return its parts as one vector."""
        return torch.cat([part.flatten() for part in op(x, counts, *cos_and_sin(x), pairs)])

    yield _make_gradient_trial(
        "rotary",
        (draw(length, 2, 2, max(size, turned)),),
        lambda op, x: op(x, *cos_and_sin(x), pairs),
        reference.rotary,
    )
    if config.model.rotates_fused_qkv:
        heads, groups = _trial_heads_and_groups(config.model)
        counts = heads, *((heads,) if config.model.attention_output_gate else ()), groups, groups
        yield _make_gradient_trial(
            "rotary_qkv", (draw(length, 2, sum(counts), max(size, turned)),), call_rotary_qkv, reference.rotary_qkv
        )


def _split_qkv_trial(model: ModelConfig, draw: Draw) -> OpTrial:
    """Return the trial of splitting a fused QKV projection [40, 2, heads, d], with its bias if it has one; it has more
    tokens than one program of the Triton kernel handles.
    """
    (heads, groups), size = _trial_heads_and_groups(model), model.kv_channels or 64
    counts = heads, *((heads,) if model.attention_output_gate else ()), groups, groups
    bias = (draw(sum(counts) * size),) if model.has_qkv_bias else ()

    def call_split_qkv(op: Callable[..., tuple[Tensor, ...]], x: Tensor, bias: Tensor | None = None) -> Tensor:
        # Gradients lie as those of attention do, [b, n, s, d].
        return torch.cat([part.permute(1, 2, 0, 3).flatten() for part in op(x, counts, bias)])

    return _make_gradient_trial(
        "split_qkv", (draw(40, 2, sum(counts), size), *bias), call_split_qkv, reference.split_qkv
    )


def _bias_activation_trial(
    model: ModelConfig, draw: Draw, width: int, gating: GatedActivationOptions | None
) -> OpTrial:
    """Return the trial of an activation of x + bias; for a network with experts also with one bias for each of three
    experts, the second of which has no rows.
    """
    wide = width if gating is None else 2 * width
    experts = (draw(3, wide),) if model.moe.num_experts else ()

    def call_bias_activation(op: Op, x: Tensor, bias: Tensor, *biases: Tensor) -> Tensor:
        counts = torch.tensor([67, 0, 13]).to(x.device)
        of_experts = [op(x.flatten(0, 1), one, model.activation_name, gating, counts).flatten() for one in biases]
        return torch.cat([op(x, bias, model.activation_name, gating).flatten(), *of_experts])

    rows = draw(40, 2, wide)  # more than one program sums
    return _make_gradient_trial(
        "bias_activation", (rows, draw(wide), *experts), call_bias_activation, reference.bias_activation
    )


def _permute_trial(draw: Draw, width: int) -> OpTrial:
    """Return the trial of permuting tokens to experts and back: 6 tokens with 2 choices each, one of which is dropped,
    and 14 rows, three of which are empty.
    """
    rows = torch.tensor([12, 3, 0, 7, 5, 12, 1, 10, 8, 12, 2, 9, 6, 4])  # the choice that a row is
    places = torch.full((13,), 14).scatter(0, rows, torch.arange(14))[:-1].view(6, 2)

    def permute_and_back(op: Op, x: Tensor) -> Tensor:
        there, tokens = places.to(x.device), (rows // 2)[:, None].to(x.device)
        return op(op(x, tokens, there, True, True), there, tokens, True, True)

    return _make_gradient_trial("permute", (draw(6, width),), permute_and_back, _permute_reference)


def _permute_reference(values: Tensor, places: Tensor, back: Tensor, empties: bool, losses: bool) -> Tensor:
    """Compute `kernels.permute` in torch: add a row of zeros for the index one past the end, gather rows and sum them."""
    return torch.cat((values, values.new_zeros(1, values.shape[1])))[places].sum(1)


def _state_space_trials(model: ModelConfig, need: KernelRequirements, draw: Draw, length: int) -> Iterator[OpTrial]:
    """Yield the trials of causal convolution and scans for the mixers that the network has, with 4 heads in 2 groups."""
    hybrid, ops = model.hybrid, {op for mixer in recurrent_mixers(model) for op in mixer.kernel_ops}
    segments = (torch.arange(length) * 3 // length).expand(2, length) if need.documents else None

    def segment_ids_on_device(device: torch.device) -> Tensor | None:
        return None if segments is None else segments.to(device)

    def call_causal_conv(op: Op, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return op(x, weight, bias, segment_ids_on_device(x.device))

    yield _make_gradient_trial(
        "causal_conv",
        (draw(length, 2, 24), draw(24, hybrid.linear_conv_kernel_dim), draw(24)),
        call_causal_conv,
        _causal_conv_reference,
    )
    if "selective_scan" in ops:
        size, depth = (min(one, MOST_STATE) for one in (hybrid.mamba_head_dim, hybrid.mamba_state_dim))

        def call_selective_scan(
            op: Callable[..., Any], x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor
        ) -> Tensor:
            return _concat_output_and_state(
                op(x, F.softplus(dt - 2), -a.exp(), b, c, segments=segment_ids_on_device(x.device))
            )

        yield _make_gradient_trial(
            "selective_scan",
            (draw(length, 2, 4, size), draw(length, 2, 4), draw(4), *(draw(length, 2, 2, depth) for _ in "bc")),
            call_selective_scan,
            partial(_scan_token_by_token, scans.selective_scan_step, (4, size, depth), per_token=(0, 1, 3, 4)),
        )
    if "delta_rule_scan" in ops:
        keys, values = (min(one, MOST_STATE) for one in (hybrid.linear_key_head_dim, hybrid.linear_value_head_dim))

        def call_delta_rule_scan(
            op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
        ) -> Tensor:
            q, k = (F.normalize(each, dim=-1) for each in (q, k))
            return _concat_output_and_state(
                op(q, k, v, -F.softplus(g), beta.sigmoid(), segments=segment_ids_on_device(q.device))
            )

        yield _make_gradient_trial(
            "delta_rule_scan",
            (
                *(draw(length, 2, 2, keys) for _ in "qk"),
                draw(length, 2, 4, values),
                *(draw(length, 2, 4) for _ in "gb"),
            ),
            call_delta_rule_scan,
            partial(_scan_token_by_token, scans.delta_rule_step, (4, keys, values), per_token=(0, 1, 2, 3, 4)),
        )


def _concat_output_and_state(result: tuple[Tensor, Tensor]) -> Tensor:
    """Return the output and the last state of a scan as one vector, in the dtype of the output."""
    return torch.cat([one.flatten().to(result[0].dtype) for one in result])


def _causal_conv_reference(x: Tensor, weight: Tensor, bias: Tensor, segments: Tensor | None) -> Tensor:
    """Compute `scans.causal_conv` by torch's convolution of each segment by itself. x: [s, b, c]; weight: [c, width];
    segments: the same for all b.
    """
    bounds = [0, *((segments[0].diff() != 0).nonzero().flatten() + 1).tolist()] if segments is not None else [0]
    pieces = [x[start:end] for start, end in zip(bounds, [*bounds[1:], len(x)], strict=True)]
    padded = [F.pad(one.permute(1, 2, 0), (weight.shape[1] - 1, 0)) for one in pieces]
    return F.silu(torch.cat([F.conv1d(one, weight[:, None], bias, groups=len(weight)) for one in padded], -1)).permute(
        2, 0, 1
    )


def _scan_token_by_token(
    step: Callable[..., tuple[Tensor, Tensor]],
    shape: tuple[int, ...],
    *inputs: Tensor,
    per_token: tuple[int, ...],
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute a scan one token at a time, and return outputs [s, ...] and the last state [b, *shape]. The state starts
    from zero in each segment.

    step: computes one token: (*inputs of the token, state) -> (output, new state). shape: of the state.
    per_token: indices of the inputs that are [s, ...]; the others are the same for all tokens.
    """
    state, outputs = inputs[0].new_zeros((inputs[0].shape[1], *shape)), []
    for place in range(len(inputs[0])):
        if segments is not None and place and bool(segments[0, place] != segments[0, place - 1]):
            state = torch.zeros_like(state)
        given = [one[place] if number in per_token else one for number, one in enumerate(inputs)]
        output, state = step(*given, state)
        outputs.append(output)
    return torch.stack(outputs), state


def _call_residual_norm_and_concat(
    op: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    update: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    epsilon: float,
) -> Tensor:
    """Call a residual_norm op and return the sum and its norm, concatenated along the first dimension."""
    return torch.cat(op(x, update, weight, bias, epsilon))


def _result_and_gradients(call: Callable[..., Tensor], op: Op, inputs: list[Tensor]) -> list[Tensor]:
    """Return the result of call(op, *inputs) and the gradients of all inputs, for a random gradient of the result."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    result = call(op, *leaves)
    pull = _make_seeded_randn(1)(*result.shape)
    gradients = torch.autograd.grad(result, leaves, pull.to(result.device, result.dtype))
    return [result.detach(), *gradients]


def quantize_kernel_error(
    low: LowPrecisionConfig, kernel: QuantizeTransposeKernels, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the largest error of a quantization kernel over all operands of the config's recipe and their transposes,
    for a random matrix [130, 70] in `dtype`.

    The error is the norm of the difference from the definition, over the norm of the matrix. Devices may round a few
    values differently, which makes some hundredths.
    """
    recipe = low_precision_recipe_of(low, torch.device("cpu"))
    assert recipe is not None, "something is multiplied in 8 bits"
    x = torch.randn(130, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] *= 100
    return max(_quantized_operand_error(recipe, operand, kernel, x, device) for operand in OPERANDS)


def _quantized_operand_error(
    recipe: LowPrecisionRecipe, operand: Any, kernel: QuantizeTransposeKernels, x: Tensor, device: torch.device
) -> float:
    """Return the larger error of the quantized x and its quantized transpose, as of `quantize_kernel_error`; infinite
    if there is a NaN.
    """
    number, there = recipe.backward if operand == "gradient" else recipe.forward, x.to(device)
    if recipe.has_single_tensor_scale:
        rounded = kernel.quantize_per_tensor(there, number, kernel.largest_of(there), margin=recipe.margin)
    else:
        rounded = kernel.quantize_per_block(there, number, recipe.block_shape_of(operand))
    worst = 0.0
    for mine, theirs in zip(
        rounded, recipe.quantise_with_transpose(operand, x, recipe.amax_or_partial_amaxes(x)), strict=True
    ):
        assert mine is not None and theirs is not None, "both are asked for"
        expected = theirs.dequantize(torch.float64)
        gap = ((mine.dequantize(torch.float32).cpu().double() - expected).norm() / expected.norm()).item()
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


class _ReferenceFp8Linear(Function):
    """The autograd function of `reference_low_linear` without bias: x W^T and its two gradients, all with operands
    rounded to fp8 with one scale for each tensor.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, backward: NumberFormat) -> Tensor:
        context.save_for_backward(x, weight)
        context.number = backward
        return _fake_quantize(x, E4M3) @ _fake_quantize(weight, E4M3).t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = context.saved_tensors
        pull = _fake_quantize(gradient, context.number)
        return (
            pull @ _fake_quantize(weight, E4M3),
            pull.flatten(0, -2).t() @ _fake_quantize(x, E4M3).flatten(0, -2),
            None,
        )


def _fake_quantize(x: Tensor, number: NumberFormat) -> Tensor:
    """Quantize x [..., k] with one scale and dequantize it again: return the rounded values in the dtype of x."""
    scale = fp8.quantization_scale(fp8.tensor_amax(x).float(), number)
    return fp8.quantize_per_tensor(x.flatten(0, -2).float(), number, scale).dequantize(x.dtype).view_as(x)


def reference_low_linear(x: Tensor, weight: Tensor, bias: Tensor, backward: NumberFormat, *, emulated: bool) -> Tensor:
    """Return x W^T + b, [.., out], with the operands of the forward product and of both gradient products rounded to
    fp8; this defines the op low_linear. x: [.., in]; weight: [out, in]; bias: [out]; backward: number format of
    gradients; emulated: ignored.
    """
    del emulated
    return _ReferenceFp8Linear.apply(x, weight, backward) + bias


def call_low_linear_kernel(
    low: LowPrecisionConfig, op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Call a kernel `op` of low_linear as a run with this config does. x: [.., in]; weight: [out, in]; bias: [out];
    returns [.., out].
    """
    recipe = low_precision_recipe_of(low, x.device)
    assert recipe is not None, "something is multiplied in 8 bits"
    return op(x, weight, bias, recipe.backward, emulated=not recipe.native)
