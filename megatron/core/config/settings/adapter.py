"""Adapters: small matrices beside the linear layers of a network, which are trained in the place of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.when import When


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Adapters and frozen weights. LoRA: beside a linear layer W stands (alpha / rank) B A, of two narrow matrices;
    these are trained, and the network is frozen.
    """

    USED_WITH: ClassVar[When] = When("lora_rank")

    lora_rank: int | None = flag(
        None,
        "rank of the adapters; the weights of the network are then frozen. Left out: no adapters",
        role="adaptable",
        used_with=(),
    )
    lora_alpha: float | None = flag(
        None, "an adapter's product is multiplied by this over its rank; left out: the rank", role="adaptable"
    )
    lora_dropout: float = flag(0.0, "dropout of an adapter's input", role="training")
    lora_targets: tuple[str, ...] = flag(
        ("all-linear",),
        "linear layers with an adapter: names of projections (q_proj, gate_proj, ...), of our matrices (linear_qkv: q, k and v share A), "
        "endings of full names or patterns with * (layers.0.*); NAME=RANK or NAME=RANK:ALPHA for another rank",
        role="adaptable",
    )
    lora_rslora: bool = flag(False, "multiply by alpha over the root of the rank (rsLoRA)", role="adaptable")
    dora: bool = flag(
        False, "train the length of each row of an adapted matrix apart from its direction (DoRA)", role="adaptable"
    )
    lora_base_quantization: Literal["none", "nf4", "int8"] = flag(
        "none",
        "format in which the frozen matrices under adapters are held: nf4 (4 bits, QLoRA) or int8, in blocks of 64 with doubly quantized scales",
        role="adaptable",
    )
    lora_modules_to_save: tuple[str, ...] = flag(
        (), "parameters that are trained beside the adapters and saved with them, by patterns of names", role="training"
    )
    freeze: tuple[str, ...] = flag(
        (),
        "parameters that are not trained, by patterns of names such as embedding.* or *.layers.0.*",
        role="training",
        used_with=(),
    )

    @property
    def has_adapters(self) -> bool:
        """Whether there are adapters."""
        return self.lora_rank is not None
