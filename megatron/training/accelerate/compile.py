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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron.core.config.settings.compilation import CompileConfig
from megatron.core.kernels import fused, reference, scans
from megatron.core.kernels.table import Kernels
from megatron.core.parallel.main_grad import MainGrad
from megatron.core.tensor_parallel import graph_low_linear
from megatron.core.tensor_parallel.low_precision import Scaling
from megatron.core.tensor_parallel.norm import Norm
from megatron.core.transformer.build import BuildContext
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.layer import Layer
from megatron.core.transformer.mamba import MambaMixer
from megatron.training.trainer import Trainer

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
    "selective_scan": (scans.selective_scan, scans.make_selective_scan, scans.selective_chunk_scan),
    "delta_rule_scan": (scans.delta_rule_scan, scans.make_delta_rule_scan, scans.delta_rule_chunk_scan),
}
_HALVES = {"attention_block": "attention", "mlp_block": "MLP"}
_LIMIT = 64  # graphs of one function: one for each kind of layer, in training, recomputation and evaluation


def graph_obstacles(layer: Layer) -> dict[str, str]:
    """For each half of a layer, by the name of its method, why it is no single graph; an empty string where it is."""
    build, model = layer.build, layer.build.model
    both = {
        "tensor ranks talk inside": build.mesh.tp.group is not None,
        "gradients of weights wait": build.wgrad_store is not None,
        "a library multiplies in low precision": build.low is not None and build.low.kernel is not None,
        "its weights are kept rounded": build.low is not None and build.low.recipe.holds_weights,
        "its weights are quantized": model.adapter.lora_base_quantization != "none",
        "its modules have hooks": any(part._forward_pre_hooks for part in layer.modules() if part is not layer),
        "norms are recomputed": build.recomputes("layernorm"),
    }
    shares_scales = build.low is not None and build.low.recipe.needs_largest and build.mesh.tp_cp.group is not None
    attention = {
        "context ranks talk inside": build.mesh.cp.group is not None or bool(build.mesh.hybrid_cp),
        "its dropout has a random stream of its own": model.attention_dropout > 0,
        "it is recomputed": build.recomputes("core_attn") or build.recomputes("mla_up_proj"),
        "its scores are watched": model.qk_clip,
        "its scan is long": isinstance(layer.token_mixer, (MambaMixer, GatedDeltaNet)),
    }
    return {
        "attention_block": "; ".join(
            why for why, holds in {**both, **attention, "there is none": layer.token_mixer is None}.items() if holds
        ),
        "mlp_block": "; ".join(
            why
            for why, holds in {
                **both,
                "context ranks share its scales": shares_scales,
                "tokens choose experts": layer.plan.mlp == "moe",
                "there is none": layer.mlp is None,
            }.items()
            if holds
        ),
    }


class Compiler:
    """The layers of a trainer, compiled when they are first called, and what became of it.

    again: graphs that were compiled in a later training step than the first.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._say, config = trainer.run.print_rank_0, trainer.run.config.compilation
        compile_, kinds = configured_torch_compile(config), Counter[tuple[tuple[str, str], ...]]()
        ops: dict[str, dict[Callable, Callable]] = {
            op: {call: compile_(call) for call in calls} for op, calls in _PLAIN.items()
        }
        ops |= {op: {scan: scan_of(compile_(span))} for op, (scan, scan_of, span) in _SCANS.items()}
        for stage in trainer.stages:
            for layer in (part for part in stage.modules() if isinstance(part, Layer)):
                kinds[_compile_layer(layer, compile_, ops)] += 1
        self._say(
            f"compile by {config.compile_backend}: "
            + ("; ".join(_describe_layers(kind, count) for kind, count in kinds.items()) or "no layers here")
        )
        self._first, self.again = True, 0

    @contextmanager
    def watch_step(self, iteration: int) -> Iterator[None]:
        """Around a training step: says what the first one compiled, and warns once when a later one compiles."""
        began, before, broken = time.time(), _num_graphs(), _graph_breaks()
        yield
        graphs, breaks = _num_graphs() - before, _graph_breaks() - broken
        if self._first:
            seconds = sum(one.duration_us or 0 for one in _compiled_since(began)) / 1e6
            self._say(
                f"compile: {_count_text(graphs, 'graph')}, {_count_text(breaks.total(), 'graph break')}; first step "
                f"{time.time() - began:.1f} s, of it {seconds:.1f} s in the compiler"
            )
            for reason, count in breaks.items():
                self._say(f"  {count} x {_shorten_reason(reason)}")
        elif graphs and not self.again:
            reasons = {one.recompile_reason.strip() for one in _compiled_since(began) if one.recompile_reason}
            self._say(
                f"WARNING: iteration {iteration} compiled {_count_text(graphs, 'more graph')}, since {'; '.join(sorted(reasons)) or 'of nothing told'}. "
                "Of later ones nothing is said"
            )
        self.again += 0 if self._first else graphs
        self._first = False


def configured_torch_compile(config: CompileConfig) -> Callable[[Callable], Callable]:
    """torch.compile as the flags want it. Dropout draws the numbers that it draws without a compiler."""
    # torch 2.13 takes the limit by call; what is older has a limit of 8, after which a function is no longer compiled.
    known = {"recompile_limit": _LIMIT} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    if config.compile_backend != "inductor":
        return partial(torch.compile, backend=config.compile_backend, **known)
    return partial(
        torch.compile,
        options={**torch._inductor.list_mode_options(config.compile_mode), "fallback_random": True},
        **known,
    )


def _compile_layer(
    layer: Layer, compile_: Callable[[Callable], Callable], ops: dict[str, dict[Callable, Callable]]
) -> tuple[tuple[str, str], ...]:
    """Compile what can be of a layer. Returns its obstacles."""
    why = graph_obstacles(layer)
    whole = [name for name, reason in why.items() if not reason]
    if len(whole) == len(why) and not layer.recomputes_mlp:
        whole = ["forward"]
    for part in layer.modules():
        if isinstance(part, Scaling):
            graph_low_linear.enter_graphs(part)
    if any(why.values()):
        for part in layer.modules():
            if isinstance(build := getattr(part, "build", None), BuildContext):
                vars(part)["build"] = replace(build, kernels=_compiled_kernels(build.kernels, ops))
            if isinstance(part, Norm):
                part.kernels = _compiled_kernels(part.kernels, ops)
    for name in whole:
        setattr(layer, name, _with_fresh_main_grads(layer, compile_(getattr(layer, name))))
    return tuple(why.items())


def _with_fresh_main_grads(layer: Layer, compiled: Callable) -> Callable:
    """The compiled function, given aliases of the layer's main gradients that are this call's alone."""
    sums: list[MainGrad] = [param.main_grad for param in layer.parameters() if hasattr(param, "main_grad")]

    def call(*given: Any, **named: Any) -> Any:
        for one in sums:
            one.refresh_alias()
        return compiled(*given, **named)

    return call


def _compiled_kernels(kernels: Kernels, ops: dict[str, dict[Callable, Callable]]) -> Kernels:
    return replace(kernels, **{op: known.get(getattr(kernels, op), getattr(kernels, op)) for op, known in ops.items()})


def _describe_layers(kind: tuple[tuple[str, str], ...], count: int) -> str:
    layers = _count_text(count, "layer")
    if not any(why for _, why in kind):
        return f"{layers} whole"
    return f"{layers} with " + ", ".join(
        f"{_HALVES[name]} {f'by its kernels ({why})' if why else 'whole'}" for name, why in kind
    )


def _count_text(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _graph_breaks() -> Counter[str]:
    return Counter(torch._dynamo.utils.counters["graph_break"])


def _compiled_since(seconds: float) -> list[Any]:
    """What the compiler notes of each time it worked, since this time of day."""
    return [one for one in torch._dynamo.utils.get_compilation_metrics() if (one.start_time_us or 0) >= seconds * 1e6]


def _shorten_reason(reason: str) -> str:
    """The first line of a reason, and where it was."""
    first, *others = reason.strip().splitlines()
    where = next((line.partition(":")[2].strip() for line in others if "debug context" in line), "")
    return f"{first} ({where})" if where else first
