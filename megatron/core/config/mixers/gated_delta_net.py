"""The gated delta net, a state of keys and values (Yang et al., 2024, arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.mixers.recurrent import RecurrentCounts, RecurrentMixer
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig


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


class DeltaNet(RecurrentMixer):
    """The gated delta net, by a layer pattern or in the place of attention."""

    name, symbol, title = "gated_delta_net", "G", "a gated delta net"
    kernel_ops = frozenset({"causal_conv", "delta_rule_scan"})
    heads_flag, groups_flag = "--linear-num-value-heads", "--linear-num-key-heads"

    def is_requested(self, model: ModelConfig) -> bool:
        """Whether the settings ask for it."""
        return super().is_requested(model) or model.hybrid.experimental_attention_variant is not None

    def counts(self, model: ModelConfig) -> RecurrentCounts:
        """Return its sizes in a network."""
        sizes = DeltaNetSizes.from_model(model)
        keys, values = sizes.key_heads * sizes.key_size, sizes.value_heads * sizes.value_size
        heads, in_fp32 = sizes.value_heads, 5 * sizes.value_heads + 2 * sizes.key_heads
        return RecurrentCounts(
            heads=heads,
            groups=sizes.key_heads,
            parts=(("q", keys), ("k", keys), ("v", values), ("z", values), ("b", heads), ("a", heads)),
            inner_size=values,
            conv_width=sizes.conv_width,
            conv_channels=2 * keys + values,
            state_elements=values * sizes.key_size,
            widened=(4 * values + 2 * keys + in_fp32, 5 * values + 4 * keys + in_fp32),
        )

    def block_of_layer(self, model: ModelConfig) -> str:
        """Return the order of its layers, in which --linear-norm-before-sublayer keeps norms before sublayers."""
        return model.block_of_layer(norms_before=model.hybrid.linear_norm_before_sublayer)

    def problems(self, run: RunConfig) -> Iterator[str]:
        """Yield problems of heads and of the norm."""
        yield from super().problems(run)
        epsilon = run.model.hybrid.linear_norm_epsilon
        if epsilon is not None and epsilon <= 0:
            yield f"--linear-norm-epsilon {epsilon:g} is no positive number; choose one such as 1e-5, or leave it out"
