"""Which parameters share a weight decay and a learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.parallel.spec import ParamSpec


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """decays: weight decay applies. decoupled: follows --decoupled-lr. ratio: of its learning rate to that of the others."""

    decays: bool
    decoupled: bool
    ratio: float = 1.0


def group_of(spec: ParamSpec, config: OptimizerConfig) -> Group:
    """Matrices decay; biases and norms do not. Embeddings and the output layer may have a rate of their own, and so may the factors B
    of adapters (LoRA+, Hayou et al., 2024).
    """
    decays = spec.kind in ("matrix", "table", "embedding", "lora_a", "lora_b") or (
        spec.kind == "qk_norm" and config.apply_wd_to_qk_layernorm
    )
    ratio = config.lora_plus_ratio if spec.kind == "lora_b" else 1.0
    return Group(decays, spec.kind == "embedding" and config.decoupled_lr is not None, ratio)


def is_by_muon(spec: ParamSpec, config: OptimizerConfig) -> bool:
    """Whether Muon updates this parameter: matrices of the layers, also those of experts; nothing that is looked up."""
    return config.is_muon and spec.kind == "matrix"
