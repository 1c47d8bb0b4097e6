"""Let Megatron Core run on a machine without a GPU: what it asks of CUDA is answered by the CPU.

It names the current CUDA device where it makes tensors, looks at `tensor.type()` to tell fp32 from fp16 parameters, and keeps
random states of a GPU. None of this changes what is computed, nor what is written.
"""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable
from typing import Any

import torch
from releases import module
from torch.overrides import TorchFunctionMode


class OnTheCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU by name."""

    def __torch_function__(
        self, function: Callable, _: Any, arguments: tuple = (), named: dict[str, Any] | None = None
    ) -> Any:
        """The call, with another device."""
        named = dict(named or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*(("cpu" if isinstance(one, str) and one == "cuda" else one) for one in arguments), **named)


def answer_for_cuda() -> None:
    """Call this before megatron.core is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    OnTheCpu().__enter__()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)  # a seed and an offset, as a GPU's
    for name in (
        "synchronize",
        "empty_cache",
        "set_device",
        "reset_peak_memory_stats",
        "_lazy_init",
        "manual_seed",
        "set_rng_state",
    ):
        setattr(torch.cuda, name, lambda *_, **__: None)
    nothing = lambda *_, **__: None  # noqa: E731
    stream = types.SimpleNamespace(wait_stream=nothing, wait_event=nothing, record_event=nothing, synchronize=nothing)
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: stream
    torch.Tensor.cuda = lambda self, *_, **__: self
    kind = torch.Tensor.type

    def type_of(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        found = kind(self, *arguments, **named)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) and "cuda" not in found else found

    torch.Tensor.type = type_of


def forget_statistics() -> None:
    """Megatron Core keeps losses of experts' balance in globals, of the depth of the first network."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker as forget
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        forget = get_moe_layer_wise_logging_tracker().clear
    forget()


def keep_no_random_states() -> None:
    """Of a GPU, after megatron.core is imported; without dropout none is used."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = torch.cuda.get_rng_state
    random._set_cuda_rng_state = torch.cuda.set_rng_state


def multiply_groups() -> None:
    """The grouped product of the package `grouped_gemm`, which needs a GPU, for experts with --moe-grouped-gemm (until 0.16)."""
    try:
        from megatron.core.transformer.moe import experts, grouped_gemm_util
    except ImportError:  # before 0.7 there is none, since 0.19 Transformer Engine's alone
        return

    def gmm(rows: torch.Tensor, matrices: torch.Tensor, sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
        matrices = matrices.transpose(1, 2) if trans_b else matrices
        return torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes.tolist()), matrices)])

    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    grouped_gemm_util.grouped_gemm_is_available = lambda: True
    grouped_gemm_util.ops = types.SimpleNamespace(gmm=gmm)
    forward = experts.GroupedMLP.forward

    def in_any_format(self: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        self.config = copy.copy(self.config)
        self.config.bf16 = True  # that kernel has bf16 only, and looks
        return forward(self, *arguments, **named)

    experts.GroupedMLP.forward = in_any_format


def do_without_transformer_engine() -> None:
    """What Megatron Core leaves to Transformer Engine's kernels alone: heads of latent attention, whose values have a size of their own."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import dot_product_attention

    backends, multi_latent_attention, moe_utils = (
        module(name) for name in ("models.backends", "transformer.multi_latent_attention", "transformer.moe.moe_utils")
    )

    class Attention(dot_product_attention.DotProductAttention):
        """The same product of queries, keys and values; only the shape of its result follows the values."""

        def __init__(
            self, *arguments: Any, k_channels: int | None = None, v_channels: int | None = None, **named: Any
        ) -> None:
            super().__init__(*arguments, **named)
            if v_channels is not None:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    for place in (dot_product_attention, backends, gpt_layer_specs):
        if hasattr(place, "DotProductAttention"):
            place.DotProductAttention = Attention
    if multi_latent_attention and not isinstance(
        getattr(multi_latent_attention, "TELinear", None), type
    ):  # a stand-in that no isinstance() takes
        multi_latent_attention.TELinear = type("TELinear", (), {})
    if moe_utils and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
