"""Norms, and over which ranks the gradients of their weights are shares of a sum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.config.settings.model import ModelConfig
from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.recompute import recomputable
from megatron.core.parallel.spec import Kind, ParamSpec, constant_initializer, meta_parameter


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension.

    model: says which of them, its epsilon, and whether the stored weight is the scale minus one. sum_over: axes whose
    ranks each see a share of the positions or heads. recomputed: matmuls that save its output may compute it again instead.
    Returns the module's own format whatever the residual's is.
    """

    def __init__(
        self,
        size: int,
        model: ModelConfig,
        *,
        sum_over: tuple[str, ...],
        kernels: Kernels,
        mesh: Mesh,
        dtype: torch.dtype,
        kind: Kind = "vector",
        recomputed: bool = False,
    ) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.epsilon, self.one_plus, self.kernels = model.norm_epsilon, model.apply_layernorm_1p, kernels
        scale = constant_initializer(0.0 if self.one_plus else 1.0)
        self.weight = meta_parameter(ParamSpec((size,), scale, kind, sum_over=sum_over), mesh, dtype)
        shift = ParamSpec((size,), constant_initializer(0.0), kind, sum_over=sum_over)
        self.bias = meta_parameter(shift, mesh, dtype) if model.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., size]; returns the same shape, in the dtype of the weight."""
        return recomputable(self._normalize, x) if self.recomputed else self._normalize(x)

    def _normalize(self, x: Tensor) -> Tensor:
        scale = effective_norm_weight(self.weight, x.dtype, one_plus=self.one_plus)
        x = x.to(scale.dtype)
        if self.bias is None:
            return self.kernels.rms_norm(x, scale, self.epsilon).to(self.weight.dtype)
        return self.kernels.layer_norm(x, scale, self.bias.to(x.dtype), self.epsilon).to(self.weight.dtype)

    def add_and_norm(self, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + update and the norm of the sum, by one kernel. x, update: [..., size], in the dtype of the weight."""
        residual_norm = self.kernels.residual_norm
        assert residual_norm is not None, "layers ask for the sum only where there is a kernel for it"
        return residual_norm(
            x, update, effective_norm_weight(self.weight, x.dtype, one_plus=self.one_plus), self.bias, self.epsilon
        )


def effective_norm_weight(weight: Tensor, dtype: torch.dtype, *, one_plus: bool) -> Tensor:
    """Return the factor [h] of a normalized x: the weight, or with one_plus the weight plus 1, in fp32 or wider.

    In bf16, numbers near 1 are 0.008 apart but much closer near 0: rounding the sum would lose what the weight holds.
    """
    return weight.to(accumulation_dtype_of(dtype)) + 1.0 if one_plus else weight.to(dtype)
