"""Attention by the packages flash-attn (Dao, 2023) and flash-attn 3 for Hopper (Shah et al., 2024), where they are installed.

    flash_attn             --attention-backend flash_attn_2
    flash_attn_interface   --attention-backend flash_attn_3

Both take windows and caps as they are, and documents as sequences of different lengths laid end to end (`kernels/ops/packed_document_starts.py`): no mask tensor is made.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.ops import fused
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.packed_document_starts import document_starts_from_ids
from megatron.core.kernels.ops.requirements import HALF_FORMATS, KernelRequirements, first_reason

PACKAGES = {2: "flash_attn", 3: "flash_attn_interface"}


def is_flash_attn_installed(version: int) -> bool:
    """Whether the package of this version (2 or 3) of flash-attn is installed."""
    return find_spec(PACKAGES[version]) is not None


def is_hopper_gpu() -> bool:
    """Whether this process's GPU is a Hopper, for which flash-attn 3 is made."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def attention_by_flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    dropout: float = 0.0,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
    *,
    version: int,
) -> Tensor:
    """Compute `reference.attention` by flash-attn 2 or 3. q: [queries, b, n, d]; k: [keys, b, g, d]; v: [keys, b, g,
    dv]. Returns [queries, b, n * dv].

    The tokens of a document must be contiguous. No bias or sink. Masks with padding or explicit positions, and
    documents where queries are not all keys, are passed to `fused.attention`. Version 3 has no dropout.
    """
    apart = mask.documents is not None
    if (
        mask.padding is not None
        or mask.query_places is not None
        or (apart and (len(q) != len(k) or mask.query_documents is not None))
    ):
        return fused.attention_by_sdpa(q, k, v, mask, dropout, scores)
    assert scores.bias is None and scores.sink is None, "the table offers it for neither biases nor sinks"
    how: dict[str, Any] = {
        "softmax_scale": scores.scale,
        "causal": mask.causal,
        "window_size": mask.window or (-1, -1),
        "softcap": scores.softcap or 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if version == 2:
        how["dropout_p"] = dropout
    library, batch = import_module(PACKAGES[version]), q.shape[1]
    rows = [x.transpose(0, 1) for x in (q, k, v)]
    if mask.documents is None:
        output = _first_output(library.flash_attn_func(*rows, **how))
    else:
        known = document_starts_from_ids(mask.documents, mask.starts)
        starts, longest = known.places, known.longest
        flat = [x.flatten(0, 1) for x in rows]
        output = _first_output(
            library.flash_attn_varlen_func(
                *flat, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest, **how
            )
        ).unflatten(0, (batch, -1))
    return output.transpose(0, 1).flatten(2)


def flash_attn_unsupported_reason(version: int, need: KernelRequirements) -> str:
    """Return why this version of flash-attn cannot be used; "" if it can."""
    if need.device != "cuda":
        return "it needs a CUDA device"
    if not is_flash_attn_installed(version):
        return f"the package {PACKAGES[version]} is not installed (github.com/Dao-AILab/flash-attention)"
    keys, values = need.head_sizes
    return first_reason(
        {
            "version 3 is for Hopper GPUs": version == 3 and not is_hopper_gpu(),
            "it needs fp16 or bf16": need.dtype not in HALF_FORMATS,
            f"its heads have at most 256 sizes, not {max(keys, values)}": max(keys, values) > 256,
            "it needs values of the size of keys": version == 2 and keys != values,
            "version 3 has no dropout": version == 3 and need.attention_dropout > 0,
            "padding is left out by a mask tensor": need.padding,
            "it has no sinks": need.sinks,
            "it adds nothing to scores": need.biased_scores,
        }
    )


def _first_output(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the output itself from the result of flash-attn, which in some versions is a tuple that begins with it."""
    return output if isinstance(output, Tensor) else output[0]
