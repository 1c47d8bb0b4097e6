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

from megatron.core.config.settings.run import ActivationOffloadConfig
from megatron.core.parallel.offload import ActivationOffload, disable_activation_offload, wrap_forward_in_context
from megatron.core.transformer.blocks import Block
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.stack import TransformerStack


def set_up_activation_offload(stage: nn.Module, config: ActivationOffloadConfig, device: torch.device) -> None:
    """Offload activations of a stage as --cpu-offloading-num-layers and --offload-modules ask, if they do."""
    if not config.offloads_activations:
        return
    offload = ActivationOffload(device, config.min_offloaded_tensor_size)
    wrap_forward_in_context(stage, partial(_start_offloaded_forward, offload))
    layers = [layer for layer in stage.modules() if isinstance(layer, Block)]
    chosen = layers[: config.cpu_offloading_num_layers]
    for layer in chosen:
        wrap_forward_in_context(layer, partial(offload.offloading, layer))
    for stack in (part for part in stage.modules() if isinstance(part, TransformerStack)):
        stack.offloading = lambda group: (
            offload.offloading(*group) if any(layer in chosen for layer in group) else nullcontext()
        )
    for layer in layers if config.fine_grained_activation_offloading else ():
        for name, part in _offloadable_modules(layer):
            wrap_forward_in_context(
                part,
                partial(offload.offloading, part) if name in config.offload_modules else disable_activation_offload,
            )


def _start_offloaded_forward(offload: ActivationOffload) -> AbstractContextManager[None]:
    """Start a forward pass of the stage, and return an empty context, as `wrap_forward_in_context` needs one."""
    offload.begin_forward()
    return nullcontext()


def _offloadable_modules(layer: Block) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name for --offload-modules, module) of a layer; "" for a module whose activations are never offloaded."""
    mixer, experts = layer.self_attention or layer.mixer, layer.mlp.experts if isinstance(layer.mlp, MoELayer) else None
    result: list[tuple[str, nn.Module | None]] = [
        ("attn_norm", layer.input_layernorm),
        ("core_attn", mixer),
        ("mlp_norm", layer.pre_mlp_layernorm),
    ]
    if mixer is not None:
        last = "linear_proj" if layer.plan.has_attention else "out_proj"
        result += [("attn_proj", mixer.get_submodule(last))]
        result += [
            ("qkv_linear", part)
            for name, part in mixer.named_children()
            if name.startswith(("linear_", "in_proj")) and name != last
        ]
    if experts is not None:
        result += [("moe_act", experts), ("expert_fc1", experts.linear_fc1), ("", experts.linear_fc2)]
    yield from ((name, part) for name, part in result if part is not None)
