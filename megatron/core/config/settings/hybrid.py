"""Networks of layers of several kinds: attention, states (Mamba-2, gated delta net), MLPs and experts, in any order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.when import When

MAMBA = When("has_mamba_layers", idle="noted")
DELTA_NET = When("has_delta_net_layers", idle="noted")


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Hybrid networks. Layers with a state in the place of keys and values: Mamba-2 (Dao and Gu, 2024), gated delta
    net (Yang et al., 2024).
    """

    hybrid_layer_pattern: str | None = flag(
        None,
        "layers by symbol, of one residual sum each: M Mamba-2, G gated delta net, * attention, + latent attention, - MLP, E experts; | begins the "
        "next pipeline stage, / the layers of a depth of multi-token prediction",
        role="network",
        also=("--hybrid-override-pattern",),
        used_with=When("architecture", ("gpt",)),
    )
    hybrid_attention_ratio: float = flag(
        0.0,
        "share of --num-layers that is attention, spread evenly; without --hybrid-layer-pattern, which says more",
        role="free",
    )
    hybrid_mlp_ratio: float = flag(
        0.0,
        "share of --num-layers that is MLPs, spread evenly; without --hybrid-layer-pattern, which says more",
        role="free",
    )
    mamba_state_dim: int = flag(128, "Mamba-2: size of the state of each channel", role="network", used_with=MAMBA)
    mamba_head_dim: int = flag(64, "Mamba-2: channels of a head", role="network", used_with=MAMBA)
    mamba_num_groups: int = flag(8, "Mamba-2: groups of heads that share B and C", role="network", used_with=MAMBA)
    mamba_num_heads: int | None = flag(
        None, "Mamba-2: heads; left out: twice the hidden size in channels", role="network", used_with=MAMBA
    )
    mamba_time_step_limit: tuple[float, ...] = flag(
        (), "Mamba-2: smallest and largest time step; left out: any", role="network", used_with=MAMBA
    )
    mamba_output_norm: Literal["after_gate", "before_gate", "none"] = flag(
        "after_gate",
        "Mamba-2: norm of its output, after the gate (Mamba-2), before it, or none (Falcon-H1)",
        role="network",
        used_with=MAMBA,
    )
    parallel_mamba: bool = flag(
        False,
        "every layer has Mamba-2 beside attention, on one norm; their outputs are summed (Falcon-H1)",
        role="network",
    )
    mamba_norm_epsilon: float = flag(
        1e-5, "Mamba-2: epsilon of the norm of its gated output", role="network", used_with=MAMBA
    )
    experimental_attention_variant: Literal["gated_delta_net", "gdn"] | None = flag(
        None,
        "layers that are not left as attention by --linear-attention-freq have a gated delta net",
        role="network",
        used_with=When("hybrid_layer_pattern", (None,)),
    )
    linear_attention_freq: str | None = flag(
        None,
        "--experimental-attention-variant: every n-th layer has attention, or a list such as [1]*3+[0] with 1 for the variant; left out: none has",
        role="network",
        used_with=When("experimental_attention_variant"),
    )
    linear_conv_kernel_dim: int = flag(
        4, "gated delta net: inputs that its convolution sees", role="network", used_with=DELTA_NET
    )
    linear_key_head_dim: int = flag(
        128, "gated delta net: size of a query and key head", role="network", used_with=DELTA_NET
    )
    linear_value_head_dim: int = flag(128, "gated delta net: size of a value head", role="network", used_with=DELTA_NET)
    linear_num_key_heads: int = flag(16, "gated delta net: query and key heads", role="network", used_with=DELTA_NET)
    linear_num_value_heads: int = flag(
        32, "gated delta net: value heads, a multiple of the key heads", role="network", used_with=DELTA_NET
    )

    linear_allow_neg_eigval: bool = flag(
        False,
        "gated delta net: rates of writing go up to two instead of one, so that a state may change its sign (OLMo-hybrid)",
        role="network",
        used_with=DELTA_NET,
    )
    linear_norm_epsilon: float | None = flag(
        None,
        "gated delta net: epsilon of the norm of its heads; left out: --norm-epsilon",
        role="network",
        used_with=DELTA_NET,
    )
    linear_norm_before_sublayer: bool = flag(
        False,
        "layers with a gated delta net have norms before mixer and MLP, and --norm-after-sublayer is for the others (OLMo-hybrid)",
        role="network",
        used_with=(When("norm_after_sublayer"), When("experimental_attention_variant"), DELTA_NET),
    )

    @property
    def layer_symbols(self) -> str:
        """Symbols of all layers, without | and MTP; empty without a pattern."""
        return self._main_pattern.replace("|", "")

    @property
    def stage_symbols(self) -> tuple[str, ...]:
        """The symbols of the layers of each stage that the pattern names, without multi-token prediction."""
        return tuple(self._main_pattern.split("|"))

    @property
    def _main_pattern(self) -> str:
        """The part of the pattern before multi-token prediction."""
        return (self.hybrid_layer_pattern or "").partition("/")[0]

    @property
    def mtp_patterns(self) -> tuple[str, ...]:
        """Symbols of each MTP depth."""
        return tuple((self.hybrid_layer_pattern or "").split("/")[1:])

    @property
    def attention_and_mlp_ratios(self) -> tuple[float, float]:
        """Shares of attention and of MLP layers, by Megatron's old flags."""
        return self.hybrid_attention_ratio, self.hybrid_mlp_ratio

    @property
    def pipeline_layout_text(self) -> str | None:
        """The | of the pattern as a layout for --pipeline-model-parallel-layout; None without |."""
        if "|" not in self._main_pattern:
            return None
        stages = "|".join("t" * len(stage) for stage in self._main_pattern.split("|"))
        return f"E{stages}{'m' * len(self.mtp_patterns)}L"


def hybrid_pattern_from_ratios(layers: int, attention: float, mlp: float) -> str:
    """Return the layer pattern of a hybrid network, one symbol for each layer.

    round(layers * attention) layers of attention (*) are spread evenly, then round(layers * mlp) MLPs (-) evenly over
    the others; the rest is Mamba-2 (M).
    """
    symbols, attending, dense = ["M"] * layers, round(layers * attention), round(layers * mlp)
    if attending:
        step = (layers - attending) / (attending + 1)
        _place_symbol_evenly(symbols, "*", step, step)
    states = symbols.count("M")
    if dense and states:
        step = (states - dense) / dense
        _place_symbol_evenly(symbols, "-", step, step)
    return "".join(symbols)


def _place_symbol_evenly(symbols: list[str], symbol: str, first: float, step: float) -> None:
    """Replace some M by `symbol` in place: the first after about `first` M, each further one after about `step`."""
    left = first
    for index in range(len(symbols)):
        if symbols[index] != "M":
            continue
        if left < 0.5:
            symbols[index] = symbol
            left += step
        else:
            left -= 1
