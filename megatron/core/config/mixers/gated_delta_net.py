"""The gated delta net, a state of keys and values (Yang et al., 2024, arXiv 2412.06464): its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.settings.model import ModelConfig


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    """Sizes of the mixer: number of key heads (each serves as many value heads) and of value heads, and size of one of each.

    largest_rate: of writing; above one, a state may change its sign (Grazzi et al., 2024, arXiv 2411.12537).
    """

    key_heads: int = 16
    value_heads: int = 32
    key_size: int = 128
    value_size: int = 128
    conv_width: int = 4
    largest_rate: float = 1.0

    @staticmethod
    def from_model(model: ModelConfig) -> DeltaNetSizes:
        """Return the sizes from the --linear-* settings of a network."""
        hybrid = model.hybrid
        return DeltaNetSizes(
            hybrid.linear_num_key_heads,
            hybrid.linear_num_value_heads,
            hybrid.linear_key_head_dim,
            hybrid.linear_value_head_dim,
            hybrid.linear_conv_kernel_dim,
            2.0 if hybrid.linear_allow_neg_eigval else 1.0,
        )
