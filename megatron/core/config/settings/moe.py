"""Mixture of experts: how many, where, how tokens choose, and how the choice is kept even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.when import When

EXPERTS = When("num_experts")
SHARED = When("moe_shared_expert_intermediate_size")
LIMITED = When("moe_expert_capacity_factor")
FLEX = When("moe_token_dispatcher_type", ("flex",))


Balance = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Mixture of experts. Layers whose MLP is many small ones, of which each token uses a few."""

    USED_WITH: ClassVar[When] = EXPERTS

    num_experts: int | None = flag(
        None, "experts in each such layer; left out: none has any", role="network", used_with=()
    )
    moe_layer_freq: str = flag(
        "1",
        "layers with experts: every n-th from the first on, or a list such as [0]*1+[1]*26",
        role="network",
        used_with=(EXPERTS, When("hybrid_layer_pattern", (None,))),
    )
    moe_ffn_hidden_size: int | None = flag(None, "width of one expert; left out: --ffn-hidden-size", role="network")
    moe_router_topk: int = flag(2, "experts that each token uses", role="network")
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = flag(
        "softmax", "how scores become weights", role="network"
    )
    moe_router_pre_softmax: bool = flag(
        False,
        "weights are shares among all experts, not among the chosen ones",
        role="network",
        used_with=(EXPERTS, When("moe_router_score_function", ("softmax",), idle="noted")),
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None, "factor of the weights of the chosen experts", role="network"
    )
    moe_router_num_groups: int | None = flag(None, "groups of experts of which a token uses only some", role="network")
    moe_router_group_topk: int | None = flag(
        None,
        "groups that each token may use",
        role="network",
        used_with=(EXPERTS, When("moe_router_num_groups", idle="noted")),
    )
    moe_router_group_score: Literal["sum", "max"] = flag(
        "sum",
        "score of a group: the sum of its best (DeepSeek-V3), or the best (DeepSeek-V2)",
        role="network",
        used_with=(EXPERTS, When("moe_router_num_groups", idle="noted")),
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "balance by a number a expert that takes part in choosing only", role="network"
    )
    moe_router_bias_update_rate: float = flag(0.001, "step of that number, after each optimizer step", role="training")
    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(
        None, "format of the router's scores; left out: fp32, or fp64 with --fp64", role="training"
    )
    moe_router_load_balancing_type: tuple[Balance, ...] = flag(
        ("aux_loss",), "ways to keep the choice even", role="training"
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), "weight of each balancing loss", role="training")
    moe_z_loss_coeff: float | None = flag(None, "weight of the squared size of the router's scores", role="training")
    moe_input_jitter_eps: float | None = flag(None, "noise of the router's input, as a share of it", role="training")
    moe_router_force_load_balancing: bool = flag(False, "choose at random, for measurements", role="training")
    moe_enable_routing_replay: bool = flag(
        False,
        "keep each choice of experts, so that a step can be run again with the same; in train_rl.py: train with those of generation",
        role="free",
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag(
        "allgather",
        "how tokens reach their experts; flex: by a library where one serves, else as alltoall",
        role="free",
    )
    moe_flex_dispatcher_backend: Literal["auto", "deepep", "alltoall"] = flag(
        "auto",
        "what sends tokens with flex; auto: DeepEP where it is installed and fits, and the log says why not",
        role="free",
        used_with=(EXPERTS, FLEX),
    )
    moe_enable_deepep: bool = flag(
        False, "as --moe-flex-dispatcher-backend deepep", role="free", used_with=(EXPERTS, FLEX)
    )
    moe_grouped_gemm: bool = flag(
        False, "experts of a rank are one grouped matmul; without it, one matmul each", role="free"
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "width of the expert that every token uses; left out: none", role="network"
    )
    moe_shared_expert_gate: bool = flag(
        False, "a sigmoid of the token weighs the shared expert", role="network", used_with=(EXPERTS, SHARED)
    )
    moe_shared_expert_overlap: bool = flag(
        False, "run the shared expert while tokens travel", role="free", used_with=(EXPERTS, SHARED)
    )
    moe_expert_capacity_factor: float | None = flag(
        None, "tokens an expert takes, over its even share; left out: all that come", role="training"
    )
    moe_pad_expert_input_to_capacity: bool = flag(
        False, "fill every expert's input up to its capacity", role="free", used_with=(EXPERTS, LIMITED)
    )
    moe_token_drop_policy: Literal["probs", "position"] = flag(
        "probs",
        "what an expert over capacity drops: what has least weight, or what comes last",
        role="training",
        used_with=(EXPERTS, LIMITED),
    )
    moe_use_upcycling: bool = flag(
        False,
        "load a dense checkpoint, each expert a copy of its MLP",
        role="free",
        used_with=When("num_experts", idle="noted"),
    )
    moe_upcycling_granularity: int = flag(
        1,
        "--moe-use-upcycling: experts that one MLP is cut into",
        role="free",
        used_with=(When("num_experts", idle="noted")),
    )
    moe_per_layer_logging: bool = flag(False, "report balance layer by layer", role="free")

    @property
    def num_experts_or_zero(self) -> int:
        """Number of experts of an MoE layer; 0 without experts."""
        return self.num_experts or 0

    @property
    def expert_width(self) -> int:
        """Width of one expert's MLP; 0 where there are none."""
        return self.moe_ffn_hidden_size or 0

    @property
    def requested_dispatch_library(self) -> str:
        """Name of the library that is requested for token dispatch; "" if none is."""
        if not self.num_experts or self.moe_token_dispatcher_type != "flex":
            return ""
        return "deepep" if self.moe_enable_deepep else self.moe_flex_dispatcher_backend

    @property
    def balancing_losses(self) -> tuple[tuple[str, float], ...]:
        """(kind, weight) of every balancing loss; one weight serves all kinds if only one is given."""
        kinds, weights = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        return tuple(zip(kinds, weights * len(kinds) if len(weights) == 1 else weights, strict=True))

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether MoE layers have balancing losses or a z-loss with a weight."""
        return bool(self.num_experts) and (
            any(weight for _, weight in self.balancing_losses) or bool(self.moe_z_loss_coeff)
        )
