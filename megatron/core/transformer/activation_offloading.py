"""Activation offloading: saved activations of whole layers, or of modules by Megatron's names, wait in CPU memory.

    attn_norm    input of the norm before attention            core_attn    what attention, or the mixer in its place, saves itself
    qkv_linear   input of queries, keys and values             attn_proj    input of the output projection
    mlp_norm     input of the norm before the MLP              expert_fc1   input of the experts' first matrix
    moe_act      input of the experts' activation

Layers and modules know nothing of it: contexts are set around them. A context around attention covers everything that it saves,
and contexts inside it cover its matrices, since the innermost counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from megatron.core.config.settings.run import OffloadConfig
from megatron.core.parallel.offload import ActivationOffload, without_offload, wrap_forward
from megatron.core.transformer.layer import Layer
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.stack import Stack


def offload_activations(stage: nn.Module, config: OffloadConfig, device: torch.device) -> None:
    """Set up a stage to offload the activations that the config names."""
    if not config.any_offload:
        return
    offload = ActivationOffload(device, config.min_offloaded_tensor_size)
    wrap_forward(stage, partial(_begin_offload, offload))
    layers = [layer for layer in stage.modules() if isinstance(layer, Layer)]
    chosen = layers[: config.cpu_offloading_num_layers]
    for layer in chosen:
        wrap_forward(layer, partial(offload.offloading, layer))
    for stack in (part for part in stage.modules() if isinstance(part, Stack)):
        stack.offloading = lambda group: (
            offload.offloading(*group) if any(layer in chosen for layer in group) else nullcontext()
        )
    for layer in layers if config.fine_grained_activation_offloading else ():
        for name, part in _offloadable_modules(layer):
            wrap_forward(part, partial(offload.offloading, part) if name in config.offload_modules else without_offload)


def _begin_offload(offload: ActivationOffload) -> AbstractContextManager[None]:
    offload.begin()
    return nullcontext()


def _offloadable_modules(layer: Layer) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a layer that have names, and those inside them whose activations are not theirs."""
    mixer, experts = layer.self_attention or layer.mixer, layer.mlp.experts if isinstance(layer.mlp, MoELayer) else None
    result: list[tuple[str, nn.Module | None]] = [
        ("attn_norm", layer.input_layernorm),
        ("core_attn", mixer),
        ("mlp_norm", layer.pre_mlp_layernorm),
    ]
    if mixer is not None:
        last = "linear_proj" if layer.plan.attends else "out_proj"
        result += [("attn_proj", mixer.get_submodule(last))]
        result += [
            ("qkv_linear", part)
            for name, part in mixer.named_children()
            if name.startswith(("linear_", "in_proj")) and name != last
        ]
    if experts is not None:
        result += [("moe_act", experts), ("expert_fc1", experts.linear_fc1), ("", experts.linear_fc2)]
    yield from ((name, part) for name, part in result if part is not None)
