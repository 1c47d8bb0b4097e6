"""Whether layers are compiled, or recorded as CUDA graphs in training (what that does not go with: rules/cuda_graphs.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.when import When


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """Compilation. Layers as torch's compiler makes them: what stands between two matmuls becomes one kernel. The
    first step takes longer.
    """

    USED_WITH: ClassVar[When] = When("compile")

    compile: bool = flag(
        False,
        "compile the layers with torch.compile; parameters, checkpoints and random numbers stay as they are",
        role="free",
        used_with=(),
    )
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = flag(
        "default",
        "--compile: what the compiler aims at; the second also tries out matmuls at the start, for minutes",
        role="free",
        used_with=(When("compile"), When("compile_backend", ("inductor",))),
    )
    compile_backend: Literal["inductor", "aot_eager"] = flag(
        "inductor",
        "--compile: inductor makes kernels; aot_eager traces the same graphs and runs them as they are, to look for graph breaks",
        role="free",
    )


Module = Literal["attn", "mlp"]
MODULES: tuple[Module, ...] = ("attn", "mlp")


@dataclass(frozen=True, slots=True)
class CudaGraphConfig:
    """CUDA graphs of training. Layers are recorded, forward and backward, and repeated: on a GPU, starting many
    small kernels takes longer than they do.
    """

    USED_WITH: ClassVar[When] = When("cuda_graph_impl", ("local",))

    cuda_graph_impl: Literal["none", "local"] = flag(
        "none", "local: record the layers as CUDA graphs, one for each microbatch under way", role="free", used_with=()
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
