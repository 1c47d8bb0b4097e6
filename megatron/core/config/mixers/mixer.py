"""What one kind of sequence mixer says of itself: the base class of the rows of `MIXERS` (table.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Input size of a linear layer, and its fused output parts, (name, size) each; an unfused one has one part, ""."""

    inputs: int
    parts: tuple[tuple[str, int], ...]

    @property
    def outputs(self) -> int:
        """Size of the whole output."""
        return sum(size for _, size in self.parts)

    def row_offset_and_count_of_part(self, part: str) -> tuple[int, int]:
        """Return first row and number of rows of a part of the matrix; of all rows for ""."""
        first = 0
        for name, size in self.parts if part else ():
            if name == part:
                return first, size
            first += size
        return 0, self.outputs


class Mixer(ABC):
    """What one kind of sequence mixer needs and costs. Sizes are of the whole network, not of a rank.

    name: in a `LayerPlan`. symbol: in --hybrid-layer-pattern. title: in messages. module: name of the module in its layer, which is
    Megatron's. attends: it has keys and values, which decoding caches, and masks. kernel_ops: operations with kernels of its own.
    """

    name: ClassVar[str]
    symbol: ClassVar[str]
    title: ClassVar[str]
    module: ClassVar[str] = "self_attention"
    attends: ClassVar[bool] = False
    kernel_ops: ClassVar[frozenset[str]] = frozenset()
    # Beginnings of parameter names before queries, and before keys and values, where these come from matrices of their own.
    query_and_key_parameters: ClassVar[tuple[tuple[str, ...], tuple[str, ...]] | None] = None

    def is_requested(self, model: ModelConfig) -> bool:
        """Whether the settings ask for it. Unlike plans of layers, this is known before all sizes are."""
        return self.symbol in model.hybrid.layer_symbols + "".join(model.hybrid.mtp_patterns)

    @abstractmethod
    def linear_shapes(self, model: ModelConfig) -> Mapping[str, LinearShape]:
        """Return the shape of every linear layer by its name in the module, the output's last."""

    @abstractmethod
    def forward_flops_per_token(self, model: ModelConfig, keys: float) -> float:
        """Return the FLOPs of the forward pass beyond its matrices. keys: how many a query sees on average."""

    @abstractmethod
    def saved_bytes_per_token(self, config: RunConfig) -> float:
        """Return the bytes that a tensor rank saves for the backward pass, beside the mixer's input."""

    @abstractmethod
    def matrix_sizes(self, model: ModelConfig, tp: int) -> Iterator[tuple[str, int, int]]:
        """Yield (description, size, number of ranks that share it) of each dimension of its matrices but the hidden size."""

    def cached_heads(self, model: ModelConfig, tp: int) -> tuple[tuple[int, int], ...]:
        """Return (heads, head size) of everything that decoding caches of a token on one of `tp` ranks."""
        return ()

    def block_of_layer(self, model: ModelConfig) -> str:
        """Return in which order norms, sublayers and sums stand in its layers."""
        return model.block_of_layer()

    def problems(self, run: RunConfig) -> Iterator[str]:
        """Yield which of its settings are wrong or do not fit the layout. Also called for networks without it."""
        yield from ()
