"""Is what a kernel computes right on this device? Forward and backward, against the op's definition in fp64 on the CPU.

A trial holds the sizes and the mask that the run's own settings give, on few and short sequences. Both sides see the same
inputs, rounded to the run's number format; what is compared is the result and the gradient of every input, each by its
largest difference over the largest value of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.plan import network_layer_plans
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.kernels import adamw, paged, reference, scans
from megatron.core.kernels.linear_loss import VocabularyShard
from megatron.core.kernels.low_precision.rounding_check import linear_in_8_bits, reference_low_linear, rounding_error
from megatron.core.kernels.mask import MaskSpec, ScoreModifiers
from megatron.core.kernels.reference import GatingOptions
from megatron.core.kernels.table import CANDIDATES, Candidate, KernelRequirements, Kernels

LONGEST, WIDEST, MOST_HEADS, MOST_EXPERTS, MOST_STATE = 256, 512, 8, 8, 64
# Largest difference over the largest value: some twenty times what sound kernels show at these sizes.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}

Op = Callable[..., Tensor]


class Trial(Protocol):
    """How far a kernel of an op is from the op's definition."""

    @property
    def op(self) -> str:
        """The name in the kernel table."""

    def error(self, kernel: Any, device: torch.device, dtype: torch.dtype) -> float:
        """The largest relative difference; infinite where a value is none."""


@dataclass(frozen=True, slots=True)
class MeasuredTrial:
    """A trial of an op whose result is more than one tensor with gradients. measure: (kernel, device, dtype) -> error."""

    op: str
    measure: Callable[[Any, torch.device, torch.dtype], float]

    def error(self, kernel: Any, device: torch.device, dtype: torch.dtype) -> float:
        """See `Trial`."""
        return self.measure(kernel, device, dtype)


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """One op on made-up inputs. inputs: float tensors with gradients, fp64 on the CPU; call: an op, and inputs anywhere."""

    op: str
    inputs: tuple[Tensor, ...]
    call: Callable[..., Tensor]
    reference: Callable[..., Any]

    def error(self, kernel: Op, device: torch.device, dtype: torch.dtype) -> float:
        """The largest relative difference between a kernel and the reference; infinite where a value is none."""
        rounded = [one.to(dtype) for one in self.inputs]
        result = _result_and_gradients(self.call, kernel, [one.to(device) for one in rounded])
        expected = _result_and_gradients(self.call, self.reference, [one.double() for one in rounded])
        worst = 0.0
        for mine, theirs in zip(result, expected, strict=True):
            gap = (mine.cpu().double() - theirs).abs().max().item() / max(theirs.abs().max().item(), 1e-30)
            worst = max(worst, gap if gap == gap else float("inf"))
        return worst


def kernel_trials(config: RunConfig, need: KernelRequirements) -> Iterator[Trial]:
    """A trial for every op that the run calls, or that decoding with its network does."""
    model, draw = config.model, _Draw(torch.Generator().manual_seed(0))
    width = min(model.hidden_size or WIDEST, WIDEST)
    length = min(config.train.seq_length or LONGEST, LONGEST)
    yield _attention_trial(config, need, draw, length)
    rows = draw(8, 2, width)
    if model.normalization == "LayerNorm":
        yield KernelTrial(
            "layer_norm",
            (rows, 1 + draw(width), draw(width)),
            lambda op, *given: op(*given, model.norm_epsilon),
            reference.layer_norm,
        )
    else:
        yield KernelTrial(
            "rms_norm", (rows, 1 + draw(width)), lambda op, *given: op(*given, model.norm_epsilon), reference.rms_norm
        )
    if model.has_plain_pre_norm:
        shift = (draw(width),) if model.normalization == "LayerNorm" else ()
        yield KernelTrial(
            "residual_norm",
            (rows, draw(8, 2, width), 1 + draw(width), *shift),
            partial(_concat_outputs, epsilon=model.norm_epsilon),
            reference.residual_norm,
        )
    gating = GatingOptions(model.activation_func_clamp_value, model.glu_linear_offset) if model.gated else None
    if model.fuses_bias:
        yield _bias_trial(model, draw, width, gating)
    if gating is not None:
        yield KernelTrial(
            "gated_activation",
            (draw(8, 2, 2 * width),),
            lambda op, x: op(x, model.activation, gating),
            reference.gated_activation,
        )
    else:
        yield KernelTrial("activation", (rows,), lambda op, x: op(x, model.activation), reference.activation)
    yield from _qkv_trials(config, draw, length)
    yield _cross_entropy_trial(config, draw, width)
    if model.moe.num_experts:
        experts, wide = min(model.moe.num_experts, MOST_EXPERTS), min(model.moe.moe_ffn_hidden_size or WIDEST, WIDEST)
        counts = torch.arange(experts) * 3 % 7  # uneven, and one with none
        yield KernelTrial(
            "grouped_linear",
            (draw(int(counts.sum()), width), draw(experts, wide, width) / width**0.5),
            lambda op, x, weight: op(x, weight, counts.to(x.device)),
            reference.grouped_linear,
        )
        yield _permute_trial(draw, width)
    if model.state_mixers:
        yield from _state_trials(model, need, draw, length)
    yield from _update_and_rounding_trials(config, need, draw, width)
    if model.num_attention_heads and model.architecture == "gpt":
        yield _paged_trial(model)


def _update_and_rounding_trials(
    config: RunConfig, need: KernelRequirements, draw: _Draw, width: int
) -> Iterator[Trial]:
    if config.optimizer.elementwise_optimizer == "adam":
        yield MeasuredTrial("adamw", adamw.reference_error)
    if need.low.recipe and need.low.fp4_format is None:
        yield MeasuredTrial("quantise", partial(rounding_error, need.low))
        yield KernelTrial(
            "low_linear",
            (draw(16, 2, width), draw(32, width) / width**0.5, draw(32)),
            partial(linear_in_8_bits, need.low),
            reference_low_linear,
        )


def errors(
    kernels: Kernels, config: RunConfig, need: KernelRequirements, device: torch.device
) -> dict[str, float | str]:
    """Op -> its error, or what the kernel said when it failed."""
    names = {field.name for field in fields(Kernels)}
    assert all(trial.op in names for trial in kernel_trials(config, need)), "a trial is of an op that has kernels"
    return {
        trial.op: trial_error(trial, kernel, device, need)
        for trial in kernel_trials(config, need)
        if (kernel := getattr(kernels, trial.op))
    }


def errors_of_all(
    config: RunConfig, need: KernelRequirements, device: torch.device
) -> dict[tuple[str, str], float | str]:
    """(op, name) -> the error of every kernel that this machine can use for the run, chosen or not."""
    return {
        (trial.op, candidate.name): trial_error(trial, candidate, device, need)
        for trial in kernel_trials(config, need)
        for candidate in CANDIDATES
        if candidate.op == trial.op and not candidate.unsupported_reason(need) and candidate.kernel is not None
    }


def trial_error(trial: Trial, kernel: Candidate | Any, device: torch.device, need: KernelRequirements) -> float | str:
    """The trial's error, or what the kernel said, or its import."""
    try:
        with torch.enable_grad():
            return trial.error(kernel.function if isinstance(kernel, Candidate) else kernel, device, need.dtype)
    except Exception as error:  # noqa: BLE001 - whatever a kernel does, the report tells it
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


@dataclass(frozen=True, slots=True)
class _Draw:
    """Draws normal numbers of any shape, fp64."""

    generator: torch.Generator

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)


def _heads_and_groups(model: ModelConfig) -> tuple[int, int]:
    """Return the attention heads of the trial, at most MOST_HEADS, and as many groups for them as the network has in proportion."""
    heads = min(model.num_attention_heads or MOST_HEADS, MOST_HEADS)
    if not (model.group_query_attention and model.num_query_groups and model.num_attention_heads):
        return heads, heads
    groups = max(1, heads * model.num_query_groups // model.num_attention_heads)
    return heads, groups if heads % groups == 0 else 1


def _paged_trial(model: ModelConfig) -> Trial:
    heads, groups = _heads_and_groups(model)
    sizes = {"heads": heads, "groups": groups, "size": model.kv_channels or 64}
    return MeasuredTrial(
        "paged_attention", lambda op, device, dtype: paged.max_kernel_error(op, device, dtype, **sizes)
    )


def _attention_trial(config: RunConfig, need: KernelRequirements, draw: _Draw, length: int) -> KernelTrial:
    model = config.model
    heads, groups = _heads_and_groups(model)
    keys, values = model.kv_channels or 64, model.kv_channels or 64
    if model.mla.multi_latent_attention:
        keys, values = model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim, model.mla.v_head_dim
    windows = [plan.window for plan in network_layer_plans(model) if plan.window] if need.window else []
    places = torch.arange(length).expand(2, length)
    mask = MaskSpec(
        causal=model.architecture != "bert",
        window=windows[0] if windows else None,
        documents=places // -(-length // 3) if need.documents else None,
        padding=places < length - length // 4 if need.padding else None,
    )
    scores = ScoreModifiers(softcap=model.attention_logit_softcap if need.softcap else None)

    def call(op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        there = {
            name: value.to(q.device) for name in ("documents", "padding") if (value := getattr(mask, name)) is not None
        }
        return op(q, k, v, replace(mask, **there), 0.0, scores)

    return KernelTrial(
        "attention",
        (draw(length, 2, heads, keys), draw(length, 2, groups, keys), draw(length, 2, groups, values)),
        call,
        reference.attention,
    )


def _cross_entropy_trial(config: RunConfig, draw: _Draw, width: int) -> KernelTrial:
    """A loss whose logits are made in it; some words are padding, and some tokens take no part."""
    tokens, words = 24, 60
    targets = (torch.arange(tokens) * 7 % (words + 1)) - 1
    known = VocabularyShard(0, words, config.model.final_logit_softcap, lambda stated: stated)
    return KernelTrial(
        "cross_entropy",
        (draw(tokens, width), draw(words + 4, width) / width**0.5),
        lambda op, x, weight: op(x, weight, None, targets.to(x.device), known),
        _loss_of_full_logits,
    )


def _loss_of_full_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, words: VocabularyShard
) -> Tensor:
    """What `kernels.linear_loss` computes, of logits that are all there."""
    logits = F.linear(x, weight, bias)[:, : words.valid]
    logits = logits if words.softcap is None else words.softcap * torch.tanh(logits / words.softcap)
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=-1)


def _qkv_trials(config: RunConfig, draw: _Draw, length: int) -> Iterator[Trial]:
    """What happens to queries and keys before attention."""
    if config.model.splits_qkv:
        yield _split_trial(config.model, draw)
    if config.model.uses_rotary:
        yield from _rotary_trials(config, draw, length)


def _rotary_trials(config: RunConfig, draw: _Draw, length: int) -> Iterator[Trial]:
    rope, pairs, size = config.model.rope, config.model.has_interleaved_rotary, config.model.rotary_size or 64
    turned = max(2, int(size * rope.rotary_percent) // 2 * 2)
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (
        torch.arange(turned // 2, dtype=torch.float64) / (turned // 2)
    )
    angles = (angles.repeat_interleave(2, -1) if pairs else angles.repeat(1, 2))[:, None, None]

    def tables(x: Tensor) -> tuple[Tensor, Tensor]:
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        return angles.cos().to(x.device, kind), angles.sin().to(x.device, kind)

    def fused(op: Callable[..., tuple[Tensor, ...]], x: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in op(x, counts, *tables(x), pairs)])

    yield KernelTrial(
        "rotary", (draw(length, 2, 2, max(size, turned)),), lambda op, x: op(x, *tables(x), pairs), reference.rotary
    )
    if config.model.applies_rope_to_qkv:
        heads, groups = _heads_and_groups(config.model)
        counts = heads, *((heads,) if config.model.attention_output_gate else ()), groups, groups
        yield KernelTrial("rotary_qkv", (draw(length, 2, sum(counts), max(size, turned)),), fused, reference.rotary_qkv)


def _split_trial(model: ModelConfig, draw: _Draw) -> KernelTrial:
    """Heads of a fused projection, with its bias if it has one: more tokens than one program joins."""
    (heads, groups), size = _heads_and_groups(model), model.kv_channels or 64
    counts = heads, *((heads,) if model.attention_output_gate else ()), groups, groups
    bias = (draw(sum(counts) * size),) if model.has_qkv_bias else ()

    def call(op: Callable[..., tuple[Tensor, ...]], x: Tensor, bias: Tensor | None = None) -> Tensor:
        # Gradients lie as those of attention do, [b, n, s, d].
        return torch.cat([part.permute(1, 2, 0, 3).flatten() for part in op(x, counts, bias)])

    return KernelTrial("split_qkv", (draw(40, 2, sum(counts), size), *bias), call, reference.split_qkv)


def _bias_trial(model: ModelConfig, draw: _Draw, width: int, gating: GatingOptions | None) -> KernelTrial:
    """An MLP's bias and, where there are experts, one for each of three, the second of which has no rows."""
    wide = width if gating is None else 2 * width
    experts = (draw(3, wide),) if model.moe.num_experts else ()

    def call(op: Op, x: Tensor, bias: Tensor, *biases: Tensor) -> Tensor:
        counts = torch.tensor([67, 0, 13]).to(x.device)
        of_experts = [op(x.flatten(0, 1), one, model.activation, gating, counts).flatten() for one in biases]
        return torch.cat([op(x, bias, model.activation, gating).flatten(), *of_experts])

    rows = draw(40, 2, wide)  # more than one program sums
    return KernelTrial("bias_activation", (rows, draw(wide), *experts), call, reference.bias_activation)


def _permute_trial(draw: _Draw, width: int) -> KernelTrial:
    """12 choices of 6 tokens, of which one is dropped, among 14 rows, of which three are empty."""
    rows = torch.tensor([12, 3, 0, 7, 5, 12, 1, 10, 8, 12, 2, 9, 6, 4])  # the choice that a row is
    places = torch.full((13,), 14).scatter(0, rows, torch.arange(14))[:-1].view(6, 2)

    def call(op: Op, x: Tensor) -> Tensor:
        there, tokens = places.to(x.device), (rows // 2)[:, None].to(x.device)
        return op(op(x, tokens, there, True, True), there, tokens, True, True)

    return KernelTrial("permute", (draw(6, width),), call, _permute_reference)


def _permute_reference(values: Tensor, places: Tensor, back: Tensor, empties: bool, losses: bool) -> Tensor:
    """What `kernels.permute` computes: sums of rows, of which the one past the end is zero."""
    return torch.cat((values, values.new_zeros(1, values.shape[1])))[places].sum(1)


def _state_trials(model: ModelConfig, need: KernelRequirements, draw: _Draw, length: int) -> Iterator[KernelTrial]:
    """The convolution and the scans of layers with a state, on 4 heads in 2 groups."""
    hybrid, segments = model.hybrid, (torch.arange(length) * 3 // length).expand(2, length) if need.documents else None

    def conv(op: Op, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return op(x, weight, bias, _to_device_of(segments, x))

    yield KernelTrial(
        "causal_conv",
        (draw(length, 2, 24), draw(24, hybrid.linear_conv_kernel_dim), draw(24)),
        conv,
        _causal_conv_reference,
    )
    if "mamba" in model.state_mixers:
        size, depth = (min(one, MOST_STATE) for one in (hybrid.mamba_head_dim, hybrid.mamba_state_dim))

        def selective(op: Callable[..., Any], x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return _flatten_output_and_state(
                op(x, F.softplus(dt - 2), -a.exp(), b, c, segments=_to_device_of(segments, x))
            )

        yield KernelTrial(
            "selective_scan",
            (draw(length, 2, 4, size), draw(length, 2, 4), draw(4), *(draw(length, 2, 2, depth) for _ in "bc")),
            selective,
            partial(_token_by_token, scans.selective_step, (4, size, depth), per_token=(0, 1, 3, 4)),
        )
    if "gated_delta_net" in model.state_mixers:
        keys, values = (min(one, MOST_STATE) for one in (hybrid.linear_key_head_dim, hybrid.linear_value_head_dim))

        def delta(op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            q, k = (F.normalize(each, dim=-1) for each in (q, k))
            return _flatten_output_and_state(
                op(q, k, v, -F.softplus(g), beta.sigmoid(), segments=_to_device_of(segments, q))
            )

        yield KernelTrial(
            "delta_rule_scan",
            (
                *(draw(length, 2, 2, keys) for _ in "qk"),
                draw(length, 2, 4, values),
                *(draw(length, 2, 4) for _ in "gb"),
            ),
            delta,
            partial(_token_by_token, scans.delta_rule_step, (4, keys, values), per_token=(0, 1, 2, 3, 4)),
        )


def _to_device_of(segments: Tensor | None, like: Tensor) -> Tensor | None:
    return None if segments is None else segments.to(like.device)


def _flatten_output_and_state(result: tuple[Tensor, Tensor]) -> Tensor:
    """The outputs and the last state as one vector, in the format of the outputs."""
    return torch.cat([one.flatten().to(result[0].dtype) for one in result])


def _causal_conv_reference(x: Tensor, weight: Tensor, bias: Tensor, segments: Tensor | None) -> Tensor:
    """What `scans.causal_conv` computes, by torch's convolution over each segment by itself. x: [s, b, c]; weight: [c, width]."""
    bounds = [0, *((segments[0].diff() != 0).nonzero().flatten() + 1).tolist()] if segments is not None else [0]
    pieces = [x[start:end] for start, end in zip(bounds, [*bounds[1:], len(x)], strict=True)]
    padded = [F.pad(one.permute(1, 2, 0), (weight.shape[1] - 1, 0)) for one in pieces]
    return F.silu(torch.cat([F.conv1d(one, weight[:, None], bias, groups=len(weight)) for one in padded], -1)).permute(
        2, 0, 1
    )


def _token_by_token(
    step: Callable[..., tuple[Tensor, Tensor]],
    shape: tuple[int, ...],
    *inputs: Tensor,
    per_token: tuple[int, ...],
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A scan by its recurrence, with a state [b, *shape] that begins anew in each segment. per_token: inputs that are [s, ...]."""
    state, outputs = inputs[0].new_zeros((inputs[0].shape[1], *shape)), []
    for place in range(len(inputs[0])):
        if segments is not None and place and bool(segments[0, place] != segments[0, place - 1]):
            state = torch.zeros_like(state)
        given = [one[place] if number in per_token else one for number, one in enumerate(inputs)]
        output, state = step(*given, state)
        outputs.append(output)
    return torch.stack(outputs), state


def _concat_outputs(
    op: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    update: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    epsilon: float,
) -> Tensor:
    return torch.cat(op(x, update, weight, bias, epsilon))


def _result_and_gradients(call: Callable[..., Tensor], op: Op, inputs: list[Tensor]) -> list[Tensor]:
    """The result and the gradients of all inputs, for a made-up gradient of the result."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    result = call(op, *leaves)
    pull = _Draw(torch.Generator().manual_seed(1))(*result.shape)
    gradients = torch.autograd.grad(result, leaves, pull.to(result.device, result.dtype))
    return [result.detach(), *gradients]
