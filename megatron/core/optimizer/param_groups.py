"""Parameter groups: which parameters share a weight decay and a learning rate, and which ones Muon updates."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.parallel.spec import ParamSpec


@dataclass(frozen=True, slots=True, order=True)
class ParamGroup:
    """Settings that parameters share.

    decays: weight decay applies. decoupled: --decoupled-lr is the learning rate. ratio: multiplies the learning rate.
    """

    decays: bool
    decoupled: bool
    ratio: float = 1.0


def param_group_of(spec: ParamSpec, config: OptimizerConfig) -> ParamGroup:
    """Return the group of a parameter.

    Weight decay applies to matrices, not to biases and norms. Embeddings and the output layer may have a separate
    learning rate, as may the B factors of adapters (LoRA+, Hayou et al., 2024).
    """
    decays = spec.kind in ("matrix", "table", "embedding", "lora_a", "lora_b", "in_proj", "conv") or (
        spec.kind == "qk_norm" and config.apply_wd_to_qk_layernorm
    )
    ratio = spec.lr_ratio * (config.lora_plus_ratio if spec.kind == "lora_b" else 1.0)
    return ParamGroup(decays, spec.kind == "embedding" and config.decoupled_lr is not None, ratio)


def is_updated_by_muon(spec: ParamSpec, config: OptimizerConfig) -> bool:
    """Return whether Muon updates this parameter: matrices of layers, also of experts, but no embeddings and other
    lookup tables, and no projections and convolutions of state-space mixers.
    """
    return config.is_muon and spec.kind == "matrix"
