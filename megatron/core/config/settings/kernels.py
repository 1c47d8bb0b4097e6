"""Which kernel computes what. The table of all kernels is core/kernels/choice/table.py; this file has their names alone, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags.declare import flag

# Operations that have no flag of their own, and what can be asked for. A test holds it and the table together.
NAMED: Mapping[str, tuple[str, ...]] = {
    "layer_norm": ("torch", "triton"),
    "rms_norm": ("torch", "triton", "reference"),
    "gated_activation": ("triton", "torch"),
    "bias_activation": ("triton", "apart"),
    "rotary": ("triton", "torch"),
    "rotary_qkv": ("triton", "torch"),
    "split_qkv": ("triton", "apart"),
    "grouped_linear": ("torch", "grouped", "loop"),
    "permute": ("torch", "triton"),
    "residual_norm": ("apart", "triton"),
    "low_linear": ("own", "torchao"),
    "causal_conv": ("torch", "triton", "causal_conv1d"),
    "selective_scan": ("torch", "triton", "mamba_ssm"),
    "delta_rule_scan": ("torch", "triton", "fla"),
    "quantise": ("triton", "torch"),
    "adamw": ("triton", "torch"),
}


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Kernels. How operations are computed; whatever is chosen computes the same function. Left out, the machine
    decides.
    """

    kernel: tuple[str, ...] = flag(
        (),
        f"kernels to use, each as OPERATION=NAME, such as rms_norm=triton; operations: {', '.join(NAMED)}",
        role="free",
    )
    cross_entropy_fusion_impl: Literal["auto", "native", "linear", "triton"] = flag(
        "auto",
        "the loss of logits that are all there (native), or of blocks of them, which are made, used and forgotten (linear; triton: "
        "with Triton's kernels for their softmax)",
        role="free",
    )

    transformer_impl: Literal["local", "transformer_engine"] = flag(
        "local",
        "transformer_engine: what that library can compute, which is attention, it computes where it is installed; layers are ours",
        role="free",
    )

    @property
    def preferred_library(self) -> str:
        """Name of the library whose kernels are preferred where they apply; empty: none."""
        return "" if self.transformer_impl == "local" else self.transformer_impl

    @property
    def requested_kernels(self) -> dict[str, str]:
        """Operation -> name of the kernel requested by --kernel, and the fusion of the cross entropy."""
        return dict(word.split("=", 1) for word in self.kernel if "=" in word) | {
            "cross_entropy": self.cross_entropy_fusion_impl
        }

    def kernel_flag_problems(self, *, compiles: bool) -> Iterator[str]:
        """Yield what is wrong with the words of --kernel. compiles: whether layers are compiled."""
        seen: list[str] = []
        for word in self.kernel:
            op, _, name = word.partition("=")
            if op not in NAMED:
                yield f"--kernel {word} names no operation that kernels are chosen for so; write OPERATION=NAME, of {', '.join(NAMED)}"
            elif name not in NAMED[op]:
                yield f"--kernel {word}: no such kernel; choose of {', '.join(f'{op}={known}' for known in NAMED[op])}"
            elif compiles and name == "triton" and op not in ("quantise", "adamw"):
                yield f"--kernel {word} and --compile both make that kernel; drop one of them"
            elif op in seen:
                yield f"--kernel {word}: another kernel was given for {op} before; keep one"
            seen.append(op)
