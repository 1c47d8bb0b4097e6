"""Whether layers are compiled, and how; and the rule that goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags import flag


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """Compilation.

    Layers as torch's compiler makes them: what stands between two matmuls becomes one kernel. The first step takes longer.
    """

    compile: bool = flag(
        False,
        "compile the layers with torch.compile; parameters, checkpoints and random numbers stay as they are",
        role="free",
    )
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = flag(
        "default",
        "--compile: what the compiler aims at; the second also tries out matmuls at the start, for minutes",
        role="free",
    )
    compile_backend: Literal["inductor", "aot_eager"] = flag(
        "inductor",
        "--compile: inductor makes kernels; aot_eager traces the same graphs and runs them as they are, to look for graph breaks",
        role="free",
    )
