"""Which matrix products a training step computes: all of the forward pass, and of the backward pass those that a gradient needs.

    y = W x       forward  2 FLOPs an element and token
                  backward 2 for the gradient of W, if W is trained
                           2 for the gradient of x, if something that is trained lies before it

So a frozen matrix costs 4 or 2 and not 6, and layers in front of everything that is trained cost their forward pass alone. Scores
of attention and scans have no weights: 3 times their forward pass, or once. It is autograd's rule by `requires_grad`; where
Megatron counts, it takes everything for trained.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from megatron.core.config.adapters import AdapterPlan, is_trained_parameter, layer_adapter_plans
from megatron.core.config.plan.layers import LayerPlan, mtp_depth_layer_plans, network_layer_plans
from megatron.core.config.plan.linear_layers import EXPERTS, layer_module_path, linear_shapes_of_layer
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.vision import vision_encoder_config
from megatron.core.models.describe import global_parameter_shapes

Trained = Callable[[str], bool]  # whether a parameter whose name begins so is trained
# What lies before a projection of latents, and before scores or a scan, beside the projections that these begin with.
_LATENT = {
    "linear_q_up_proj": ("linear_q_down_proj.", "q_layernorm."),
    "linear_kv_up_proj": ("linear_kv_down_proj.", "kv_layernorm."),
}
_INNER = ("q_layernorm.", "k_layernorm.", "kv_layernorm.", "core_attention.", "conv1d.", "A_log", "D", "dt_bias")


@dataclass(frozen=True, slots=True)
class LayerFlow:
    """FLOPs of a layer's matrices, for each token, with those of cross attention's keys and values apart, which are for each
    token of the memory; how often its scores or scans are computed, of which the forward pass is one; and whether a
    gradient comes out at its output's end.
    """

    matrices: float
    memory_matrices: float
    passes: float
    cross_passes: float
    flows: bool


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """Of a network: its layers, with those of multi-token prediction last, and FLOPs of its other matrices a token.

    head: output layer, with the transform before it. ahead: of all depths, projections and output layers. image: of
    an encoder's patches, for each; encoder: its layers. projector: of one embedding of an image.
    """

    layers: tuple[LayerFlow, ...]
    head: float = 0.0
    ahead: float = 0.0
    patches: float = 0.0
    encoder: tuple[LayerFlow, ...] = ()
    projector: float = 0.0


def product_flops(elements: float, *, trained: bool, flows: bool) -> float:
    """Return the FLOPs a token of a product with a matrix of so many elements. flows: its input has a gradient."""
    return elements * (2 + 2 * trained + 2 * flows)


def _score_passes(queries: bool, keys: bool) -> float:
    """Return how often scores are computed, where queries, or keys and values, have a gradient: each product costs a half."""
    return 1 + 0.5 * (queries or keys) + 0.5 * queries + 1.0 * keys


@lru_cache(maxsize=64)
def gradient_flow(model: ModelConfig) -> GradientFlow:
    """Return which products a training step of a network computes."""
    trained = _trained_prefixes(model)
    encoder, patches, projector, flows = tuple[LayerFlow, ...](), 0.0, 0.0, trained("embedding.")
    if model.architecture.classifies_images or model.has_vision:
        encoder, patches, projector, images = _image_flow(model, trained)
        flows = images or (flows and not model.architecture.classifies_images)
    if model.architecture.classifies_images:
        flows = flows or trained("vision_model.encoder.final_layernorm.")
        elements = vision_encoder_config(model).hidden_size * model.vision.num_classes
        head = product_flops(elements, trained=trained("head."), flows=flows)
        return GradientFlow((), head, 0.0, patches, encoder)
    layers, memory, embedded = list[LayerFlow](), False, flows
    for plan in network_layer_plans(model):
        if plan.has_cross_attention and plan.index == 0:  # where the decoder begins, the encoder's output is its memory
            memory, flows = flows or trained("encoder.final_layernorm."), embedded
        layers.append(_layer_flow(model, plan, layer_module_path(model, plan), trained, flows=flows, memory=memory))
        flows = layers[-1].flows
    stack = "encoder." if model.architecture.predicts_masked_words else "decoder."
    flows = flows or trained(f"{stack}final_layernorm.")
    transform = model.hidden_size**2 if model.architecture.predicts_masked_words else 0
    head = product_flops(transform, trained=trained("lm_head.dense."), flows=flows)
    flows = flows or trained("lm_head.")
    ahead, more = _mtp_flow(model, trained, flows=flows, embedded=embedded)
    return GradientFlow(
        (*layers, *more), head + _output_flops(model, trained, flows=flows), ahead, patches, encoder, projector
    )


def _trained_prefixes(model: ModelConfig) -> Trained:
    """Return whether any parameter whose name begins so is trained; without frozen parameters, always."""
    config = model.adapter
    if not (config.has_adapters or config.freeze):
        return lambda prefix: True
    names = sorted(name for name in global_parameter_shapes(model) if is_trained_parameter(name, config))

    def any_begins_with(prefix: str) -> bool:
        at = bisect_left(names, prefix)
        return at < len(names) and names[at].startswith(prefix)

    return any_begins_with


def _output_flops(model: ModelConfig, trained: Trained, *, flows: bool) -> float:
    """Return the FLOPs of the output layer, whose matrix may be the embedding's."""
    words = 1 if model.reward_head else model.padded_vocab_size
    name = "embedding.word_embeddings." if model.ties_embeddings else "output_layer.weight"
    return product_flops(model.hidden_size * words, trained=trained(name), flows=flows)


def _mtp_flow(model: ModelConfig, trained: Trained, *, flows: bool, embedded: bool) -> tuple[float, list[LayerFlow]]:
    """Return the FLOPs of projections and output layers of all depths, and their layers. embedded: embeddings have a gradient."""
    total, layers = 0.0, []
    for depth in range(model.mtp.mtp_num_layers or 0):
        path = f"mtp.layers.{0 if model.mtp.mtp_use_repeated_layer else depth}."
        # Detached states still take part in autograd.
        joined = flows or embedded or model.mtp.mtp_detach_heads or trained(f"{path}enorm.") or trained(f"{path}hnorm.")
        elements = 2 * model.hidden_size**2
        total += product_flops(elements, trained=trained(f"{path}eh_proj."), flows=joined)
        flows = joined or trained(f"{path}eh_proj.")
        plans = mtp_depth_layer_plans(model, depth)
        for place, plan in enumerate(plans):
            name = f"{path}mtp_model_layer" + (f".layers.{place}" if model.is_hybrid else "")
            layers.append(_layer_flow(model, plan, name, trained, flows=flows))
            flows = layers[-1].flows
        flows = flows or trained(f"{path}final_layernorm.")
        learns: Trained = (lambda _: False) if model.mtp.mtp_detach_heads else trained
        total += _output_flops(model, learns, flows=flows)
    return total, layers


def _image_flow(model: ModelConfig, trained: Trained) -> tuple[tuple[LayerFlow, ...], float, float, bool]:
    """Return the flows of an encoder's layers, FLOPs of a patch and of an embedding's projection, and whether what comes
    out has a gradient.
    """
    vision, encoder = model.vision, vision_encoder_config(model)
    hidden, flows = encoder.hidden_size, trained("vision_model.embedding.")
    pixels = vision.num_channels * vision.patch_dim**2
    patches = product_flops(pixels * hidden, trained=trained("vision_model.embedding.patches."), flows=False)
    layers = []
    for plan in network_layer_plans(encoder):
        layers.append(_layer_flow(encoder, plan, f"vision_model.encoder.layers.{plan.index}", trained, flows=flows))
        flows = layers[-1].flows
    if model.architecture.classifies_images:
        return tuple(layers), patches, 0.0, flows
    flows = flows or trained("vision_model.encoder.final_layernorm.")
    width = vision.vision_projection_hidden_size or model.hidden_size
    inputs = hidden * (vision.pixel_shuffle_factor**2 if vision.pixel_shuffle else 1)
    affine = vision.vision_projection_type == "affine"
    learns = trained("vision_projection.")
    sizes = [inputs * model.hidden_size] if affine else [width * inputs, width * model.hidden_size]
    projector = sum(
        product_flops(size, trained=learns, flows=flows or (learns and place > 0)) for place, size in enumerate(sizes)
    )
    return tuple(layers), patches, projector, flows or learns


def _layer_flow(
    model: ModelConfig, plan: LayerPlan, path: str, trained: Trained, *, flows: bool, memory: bool = False
) -> LayerFlow:
    """Return what a layer computes. path: its name. flows, memory: its input, and the memory, have a gradient."""
    # Layers that predict further ahead have no adapters.
    adapters = layer_adapter_plans(model, plan) if path == layer_module_path(model, plan) else ()
    layer = _Layer(model, plan, path, trained, adapters)
    total, passes = layer.mixers(flows)
    stream = flows or layer.learns(
        "input_layernorm.", "self_attention.", "mixer.", "post_attention", "attention_scale."
    )
    beside, crossed = 0.0, 1.0
    if plan.has_cross_attention:
        cross, beside, crossed = layer.cross_attention(stream, memory)
        total += cross
        stream = stream or memory or layer.learns("pre_cross_attn_layernorm.", "cross_attention.")
    total += layer.mlp(stream or layer.learns("pre_mlp_layernorm."))
    return LayerFlow(total, beside, passes, crossed, flows or memory or trained(f"{path}."))


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, whose products are added up part by part."""

    model: ModelConfig
    plan: LayerPlan
    path: str
    trained: Trained
    adapters: tuple[AdapterPlan, ...]

    def learns(self, *parts: str) -> bool:
        """Whether any parameter of the layer is trained whose name in it begins like one of these."""
        return any(self.trained(f"{self.path}.{part}") for part in parts)

    def product(self, name: str, flows: bool) -> float:
        """Return the FLOPs of a linear layer with its adapters, of experts for each that a token uses."""
        shape = linear_shapes_of_layer(self.model, self.plan)[name]
        total = product_flops(shape.inputs * shape.outputs, trained=self.learns(f"{name}.weight"), flows=flows)
        learns = self.learns(f"{name}.adapter.")
        for adapter in (one for one in self.adapters if one.linear == name):
            _, rows = shape.row_offset_and_count_of_part(adapter.part)
            total += product_flops(shape.inputs * adapter.rank, trained=learns, flows=flows)
            total += product_flops(rows * adapter.rank, trained=learns, flows=flows or learns)
        return total * (self.model.moe.moe_router_topk if EXPERTS in f".{name}" else 1)

    def mixers(self, flows: bool) -> tuple[float, float]:
        """Return the FLOPs of the mixers' matrices, and how often scores or scans are computed. flows: of the input."""
        total, passes, normed = 0.0, 1.0, flows or self.learns("input_layernorm.")
        for mixer in self.plan.mixers:
            here = f"{mixer.module}."
            *first, last = (f"{here}{name}" for name in mixer.linear_shapes(self.model))
            for name in first:
                before = (f"{here}{part}" for part in _LATENT.get(name.removeprefix(here), ()))
                total += self.product(name, normed or self.learns(*before))
            inner = normed or self.learns(*first, *(f"{here}{part}" for part in _INNER))
            passes = max(passes, 3.0 if inner else 1.0)
            if (sides := mixer.query_and_key_parameters) is not None:
                passes = _score_passes(*(normed or self.learns(*(f"{here}{part}" for part in side)) for side in sides))
            total += self.product(last, inner or self.learns(f"{here}norm.", f"{here}out_norm."))
        return total, passes

    def cross_attention(self, stream: bool, memory: bool) -> tuple[float, float, float]:
        """Return the FLOPs of a token, those of a token of the memory, and how often scores are computed."""
        normed, here = stream or self.learns("pre_cross_attn_layernorm."), "cross_attention.linear_"
        queries, keys = normed or self.learns(f"{here}q."), memory or self.learns(f"{here}kv.")
        total = self.product(f"{here}q", normed) + self.product(f"{here}proj", queries or keys)
        return total, self.product(f"{here}kv", memory), _score_passes(queries, keys)

    def mlp(self, normed: bool) -> float:
        """Return the FLOPs of the MLP, or of router and experts. normed: its input has a gradient."""
        total, hidden, moe = 0.0, self.model.hidden_size, self.model.moe
        router = self.plan.mlp == "moe" and self.learns("mlp.router.")
        if self.plan.mlp == "moe":
            gate = self.learns("mlp.shared_experts.gate_weight")
            total += product_flops(hidden * moe.num_experts_or_zero, trained=router, flows=normed)
            total += product_flops(hidden * moe.moe_shared_expert_gate, trained=gate, flows=normed)
        for name in linear_shapes_of_layer(self.model, self.plan):
            first, last = name.replace("linear_fc2", "linear_fc1"), name.endswith("linear_fc2")
            if name.startswith("mlp."):
                # The weight of an expert multiplies what goes into its second matrix.
                weighed = router and EXPERTS in f".{name}"
                total += self.product(name, normed or (last and (weighed or self.learns(f"{first}."))))
        return total
