"""Which parameters share a weight decay and a learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.parallel.spec import ParamSpec


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """decays: weight decay applies. decoupled: follows --decoupled-lr."""

    decays: bool
    decoupled: bool


def group_of(spec: ParamSpec, config: OptimizerConfig) -> Group:
    """Matrices decay; biases and norms do not. Embeddings and the output layer may have a rate of their own."""
    decays = spec.kind in ("matrix", "table", "embedding") or (
        spec.kind == "qk_norm" and config.apply_wd_to_qk_layernorm
    )
    return Group(decays, spec.kind == "embedding" and config.decoupled_lr is not None)


def is_by_muon(spec: ParamSpec, config: OptimizerConfig) -> bool:
    """Whether Muon updates this parameter: matrices of the layers, also those of experts; nothing that is looked up."""
    return config.is_muon and spec.kind == "matrix"
