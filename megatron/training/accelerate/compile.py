"""--compile: torch's compiler on the layers of this rank's stages.

    Layer.forward            one graph, of which all layers of a kind share the code
    Layer.attention_block, mlp_block a graph each, if only one half of the layer allows it
    kernels                  norm, activation, rotation, convolution, eight chunks of a scan: a graph each, in halves that do not

A graph holds nothing that talks to other ranks, switches random streams or asks a tensor for a size. A half in which that
happens keeps its code, and the small functions between are compiled: so there is no graph break in either case, and what
is compiled can be said before anything runs. Layers are called as ever, hooks and all, and what is compiled is their
`forward`: parameters, their names, and the code that gathers or sums them, are unchanged. Random numbers are eager's own.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron.core.config.settings.compilation import CompileConfig
from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.ops import fused, reference
from megatron.core.kernels.state_space import scans
from megatron.core.parallel.main_grad import MainGrad
from megatron.core.parallel.spec import quantized_storage_of
from megatron.core.tensor_parallel import compiled_low_precision
from megatron.core.tensor_parallel.low_precision import LowPrecisionScaling
from megatron.core.tensor_parallel.norm import Norm
from megatron.core.transformer.blocks import Block
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.mixers.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.mixers.mamba import MambaMixer
from megatron.training.state.hooks import StepHooks
from megatron.training.state.trainer import Trainer

# Ops of several steps, in plain torch: what a compiler makes one kernel of.
_PLAIN: dict[str, tuple[Callable, ...]] = {
    "rms_norm": (reference.rms_norm, fused.rms_norm),
    "activation": (reference.activation,),
    "gated_activation": (reference.gated_activation,),
    "rotary": (reference.rotary,),
    "rotary_qkv": (reference.rotary_qkv,),
    "causal_conv": (scans.causal_conv,),
}
# Scans, of which eight chunks are a graph: a graph of all would grow with the length.
_SCANS: dict[str, tuple[Callable, Callable, Callable]] = {
    "selective_scan": (scans.selective_scan, scans.selective_scan_from_chunk_scan, scans.selective_chunk_scan),
    "delta_rule_scan": (scans.delta_rule_scan, scans.delta_rule_scan_from_chunk_scan, scans.delta_rule_chunk_scan),
}
_HALVES = {"attention_block": "attention", "mlp_block": "MLP"}
_LIMIT = 64  # graphs of one function: one for each kind of layer, in training, recomputation and evaluation


def compile_obstacles_by_method(layer: Block) -> dict[str, str]:
    """Return why each half of a layer cannot be one compiled graph: method name -> reasons, "" if it can."""
    build, model = layer.build, layer.build.model
    both = {
        "tensor ranks talk inside": build.mesh.tp.group is not None,
        "gradients of weights wait": build.wgrad_store is not None,
        "a library multiplies in low precision": build.low is not None and build.low.kernel is not None,
        "its weights are kept rounded": build.low is not None and build.low.recipe.holds_weights,
        "its weights are quantized": any(quantized_storage_of(param) is not None for param in layer.parameters()),
        "its modules have hooks": any(part._forward_pre_hooks for part in layer.modules() if part is not layer),
        "norms are recomputed": build.recomputes_module("layernorm"),
    }
    shares_scales = build.low is not None and build.low.recipe.needs_tensor_amax and build.mesh.tp_cp.group is not None
    attention = {
        "context ranks talk inside": build.mesh.cp.group is not None or bool(build.mesh.hybrid_cp),
        "its dropout has a random stream of its own": model.attention_dropout > 0,
        "it is recomputed": build.recomputes_module("core_attn") or build.recomputes_module("mla_up_proj"),
        "its scores are watched": model.qk_clip,
        "its scan is long": isinstance(layer.token_mixer, (MambaMixer, GatedDeltaNet)),
        "there is none": layer.token_mixer is None,
    }
    mlp = {
        "context ranks share its scales": shares_scales,
        "tokens choose experts": layer.plan.mlp == "moe",
        "there is none": layer.mlp is None,
    }
    halves = {"attention_block": {**both, **attention}, "mlp_block": {**both, **mlp}}
    return {name: "; ".join(why for why, holds in half.items() if holds) for name, half in halves.items()}


class LayerCompiler(StepHooks):
    """Compiles a trainer's layers, each at its first call, and logs it. again: graphs compiled after the first step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._say, config = trainer, trainer.run.print_rank_0, trainer.run.config.compilation
        compile_, kinds = configured_torch_compile(config), Counter[tuple[tuple[str, str], ...]]()
        ops: dict[str, dict[Callable, Callable]] = {
            op: {call: compile_(call) for call in calls} for op, calls in _PLAIN.items()
        }
        ops |= {op: {scan: scan_of(compile_(span))} for op, (scan, scan_of, span) in _SCANS.items()}
        for stage in trainer.stages:
            for layer in (part for part in stage.modules() if isinstance(part, Block)):
                kinds[_compile_layer(layer, compile_, ops)] += 1
        parts = "; ".join(_compiled_layers_text(kind, count) for kind, count in kinds.items())
        self._say(f"compile by {config.compile_backend}: {parts or 'no layers here'}")
        self._first, self.again = True, 0
        # Time, graphs and graph breaks before the step; None between two iterations.
        self._before: tuple[float, int, Counter[str]] | None = None

    def begin_step(self, work: Any) -> None:
        """Note what was compiled before the first pass over the step; a rerun belongs to the same iteration."""
        self._before = self._before or (time.time(), _num_compiled_graphs(), _graph_break_counts_by_reason())

    def after_iteration(self, session: Any) -> None:
        """Log what the first step compiled, and warn once when a later one compiles again."""
        if self._before is None:  # the iteration's data was passed over
            return
        (began, before, broken), self._before = self._before, None
        graphs, breaks = _num_compiled_graphs() - before, _graph_break_counts_by_reason() - broken
        if self._first:
            seconds = sum(one.duration_us or 0 for one in _compilation_records_since(began)) / 1e6
            self._say(
                f"compile: {_count_text(graphs, 'graph')}, {_count_text(breaks.total(), 'graph break')}; first step "
                f"{time.time() - began:.1f} s, of it {seconds:.1f} s in the compiler"
            )
            for reason, count in breaks.items():
                self._say(f"  {count} x {_shorten_break_reason(reason)}")
        elif graphs and not self.again:
            metrics = _compilation_records_since(began)
            reasons = {one.recompile_reason.strip() for one in metrics if one.recompile_reason}
            self._say(
                f"WARNING: iteration {self._trainer.progress.iteration} compiled {_count_text(graphs, 'more graph')}, since {'; '.join(sorted(reasons)) or 'of nothing told'}. "
                "Of later ones nothing is said"
            )
        self.again += 0 if self._first else graphs
        self._first = False


def configured_torch_compile(config: CompileConfig) -> Callable[[Callable], Callable]:
    """Return torch.compile with the flags' backend, mode and recompile limit; dropout draws eager's random numbers."""
    # torch 2.13 takes the limit by call; what is older has a limit of 8, after which a function is no longer compiled.
    known = {"recompile_limit": _LIMIT} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    if config.compile_backend != "inductor":
        return partial(torch.compile, backend=config.compile_backend, **known)
    options = {**torch._inductor.list_mode_options(config.compile_mode), "fallback_random": True}
    return partial(torch.compile, options=options, **known)


def _compile_layer(
    layer: Block, compile_: Callable[[Callable], Callable], ops: dict[str, dict[Callable, Callable]]
) -> tuple[tuple[str, str], ...]:
    """Compile what can be compiled of a layer, in place. Return its obstacles, (method name, reasons) pairs."""
    why = compile_obstacles_by_method(layer)
    whole = [name for name, reason in why.items() if not reason]
    if len(whole) == len(why) and not layer.recomputes_mlp:
        whole = ["forward"]
    for part in layer.modules():
        if isinstance(part, LowPrecisionScaling):
            compiled_low_precision.register_scaling_for_compile(part)
    if any(why.values()):
        for part in layer.modules():
            if isinstance(build := getattr(part, "build", None), LayerBuildContext):
                vars(part)["build"] = replace(build, kernels=_compiled_kernels(build.kernels, ops))
            if isinstance(part, Norm):
                part.kernels = _compiled_kernels(part.kernels, ops)
    for name in whole:
        setattr(layer, name, _wrap_with_main_grad_refresh(layer, compile_(getattr(layer, name))))
    return tuple(why.items())


def _wrap_with_main_grad_refresh(layer: Block, compiled: Callable) -> Callable:
    """Wrap a compiled function so that each call first gives the layer's main gradients new aliases."""
    sums: list[MainGrad] = [param.main_grad for param in layer.parameters() if hasattr(param, "main_grad")]

    def refresh_main_grads_and_call(*given: Any, **named: Any) -> Any:
        for one in sums:
            one.renew_version_counter()
        return compiled(*given, **named)

    return refresh_main_grads_and_call


def _compiled_kernels(kernels: Kernels, ops: dict[str, dict[Callable, Callable]]) -> Kernels:
    """Return the kernels with those ops replaced that `ops` has a compiled version of."""
    return replace(kernels, **{op: known.get(getattr(kernels, op), getattr(kernels, op)) for op, known in ops.items()})


def _compiled_layers_text(kind: tuple[tuple[str, str], ...], count: int) -> str:
    """Say how `count` layers with these obstacles are compiled: whole, or which half of them by its kernels."""
    layers = _count_text(count, "layer")
    if not any(why for _, why in kind):
        return f"{layers} whole"
    return f"{layers} with " + ", ".join(
        f"{_HALVES[name]} {f'by its kernels ({why})' if why else 'whole'}" for name, why in kind
    )


def _count_text(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _num_compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _graph_break_counts_by_reason() -> Counter[str]:
    """Return the graph breaks of torch.compile in this process, counted by reason."""
    return Counter(torch._dynamo.utils.counters["graph_break"])


def _compilation_records_since(seconds: float) -> list[Any]:
    """Return torch.compile's metrics (CompilationMetrics) of each compilation since this time.time()."""
    return [one for one in torch._dynamo.utils.get_compilation_metrics() if (one.start_time_us or 0) >= seconds * 1e6]


def _shorten_break_reason(reason: str) -> str:
    """Return the first line of a graph break's reason and, if it is known, where in the code it was."""
    first, *others = reason.strip().splitlines()
    where = next((line.partition(":")[2].strip() for line in others if "debug context" in line), "")
    return f"{first} ({where})" if where else first
