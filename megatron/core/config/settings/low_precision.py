"""Matrices of 8 and 4 bits: which layers multiply them, in which format, and what shares a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.when import When

LOW = When("low_precision_recipe")
DELAYED = (LOW, When("low_precision_recipe", ("delayed",)))
ENDS = (LOW, When("first_last_layers_bf16"))


@dataclass(frozen=True, slots=True)
class LowPrecisionConfig:
    """Matrices of 8 and 4 bits. The linear layers of transformer layers round what they multiply; everything else
    keeps the format of the run.
    """

    USED_WITH: ClassVar[When] = LOW

    fp8_format: Literal["e4m3", "hybrid"] | None = flag(
        None, "multiply in 8 bits: all in e4m3, or gradients in e5m2 (hybrid)", role="training", used_with=()
    )
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = flag(
        "delayed",
        "what shares a scale: a tensor, by its own largest value (tensorwise) or by those of earlier steps (delayed); 32 "
        "elements in a row (mxfp8); 128 in a row, of weights 128 x 128 (blockwise)",
        role="training",
        used_with=(LOW, When("fp4_format", (None,))),
    )
    fp8_margin: int = flag(
        0,
        "--fp8-recipe delayed: powers of two to stay below the largest number of the format",
        role="training",
        used_with=DELAYED,
    )
    fp8_amax_history_len: int = flag(
        1, "--fp8-recipe delayed: steps whose largest values are kept", role="training", used_with=DELAYED
    )
    fp8_amax_compute_algo: Literal["most_recent", "max"] = flag(
        "most_recent",
        "--fp8-recipe delayed: scale by the last step's largest value, or by the largest of those kept",
        role="training",
        used_with=DELAYED,
    )
    fp8_wgrad: bool = flag(
        True, "do not multiply gradients of weights in 8 or 4 bits; in the format of the run", role="training"
    )
    first_last_layers_bf16: bool = flag(False, "the first and last layers keep the format of the run", role="training")
    num_layers_at_start_in_bf16: int = flag(
        1, "--first-last-layers-bf16: how many at the start", role="training", used_with=ENDS
    )
    num_layers_at_end_in_bf16: int = flag(
        1, "--first-last-layers-bf16: how many at the end", role="training", used_with=ENDS
    )
    fp8_param_gather: bool = flag(
        False,
        "--fp8-format, --use-distributed-optimizer: weights are kept, and gathered, in 8 bits (mxfp8: twice) beside their fp32 main weights",
        role="training",
    )
    fp4_format: Literal["e2m1"] | None = flag(None, "multiply in 4 bits", role="training", used_with=())
    fp4_recipe: Literal["nvfp4"] | None = flag(
        None,
        "how 4 bits are scaled; left out: nvfp4, 16 elements share a scale in e4m3, gradients are rounded by chance",
        role="training",
    )
    fp4_param_gather: bool = flag(
        False,
        "--fp4-format, --use-distributed-optimizer: weights are kept in 4 bits, and gathered in a byte each, beside their fp32 main weights",
        role="training",
    )
    fp8_emulation: bool = flag(
        False, "on a GPU too, compute 8 and 4 bits by rounding and matmuls in fp32; a CPU always does", role="free"
    )

    @property
    def recipe_name(self) -> str:
        """Name of the recipe of low-precision matmuls; empty if there are none."""
        if self.fp4_format is not None:
            return self.fp4_recipe or "nvfp4"
        return self.fp8_recipe if self.fp8_format is not None else ""

    @property
    def has_quantized_weights(self) -> bool:
        """Whether weights are stored in fp8 or fp4."""
        return self.fp8_param_gather or self.fp4_param_gather

    @property
    def scale_block_size(self) -> int:
        """Number of elements of a row that share a scale; 0: the whole tensor does, or there is no low precision."""
        return {"mxfp8": 32, "blockwise": 128, "nvfp4": 16}.get(self.recipe_name, 0)

    @property
    def matrix_size_multiple(self) -> int:
        """What local matrix dimensions must be multiples of: blocks, and 16 for GPUs' fp8; 1 without low precision."""
        return max(16, self.scale_block_size) if self.recipe_name else 1

    def is_low_precision_layer(self, layer: int, num_layers: int) -> bool:
        """Whether a layer, counted from 0, multiplies in 8 or 4 bits. Layers past the last (multi-token prediction) do."""
        if not self.recipe_name:
            return False
        starts, ends = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        return not (self.first_last_layers_bf16 and (layer < starts or num_layers - ends <= layer < num_layers))
