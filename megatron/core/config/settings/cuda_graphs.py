"""Whether layers are recorded as CUDA graphs in training. What they do not go with: rules/cuda_graphs.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags import flag

Module = Literal["attn", "mlp"]
MODULES: tuple[Module, ...] = ("attn", "mlp")


@dataclass(frozen=True, slots=True)
class CudaGraphConfig:
    """CUDA graphs of training.

    Layers are recorded, forward and backward, and repeated: on a GPU, starting many small kernels takes longer than they do.
    """

    cuda_graph_impl: Literal["none", "local"] = flag(
        "none", "local: record the layers as CUDA graphs, one for each microbatch under way", role="free"
    )
    cuda_graph_modules: tuple[Module, ...] = flag(
        (),
        "halves of layers that are recorded, with the norm before each; left out: both, but no experts",
        also=("--cuda-graph-scope",),
        role="free",
    )
    cuda_graph_warmup_steps: int = flag(
        3, "training steps before they are recorded, in which libraries make their plans", role="free"
    )

    @property
    def captured_modules(self) -> tuple[Module, ...]:
        """Halves of layers that are captured."""
        return self.cuda_graph_modules or MODULES
