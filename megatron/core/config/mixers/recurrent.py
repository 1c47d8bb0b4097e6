"""What mixers with a recurrent state have in common: a projection, a causal convolution, a scan over the state, a gated norm, a projection."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.mixers.mixer import LinearShape, Mixer
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.optim import BYTES
from megatron.core.config.settings.parallel import can_exchange_heads
from megatron.core.config.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class RecurrentCounts:
    """What is counted of such a mixer. heads, groups: what tensor and context ranks divide; heads of a group, or of a key, share it.

    parts: the first projection's outputs, (name, size) each. inner_size: width of all heads, the last projection's input. conv_width: inputs that
    the convolution sees. state_elements: of all heads. widened: elements that scan and gated norm save in fp32 or wider, without and with
    half precision.
    """

    heads: int
    groups: int
    parts: tuple[tuple[str, int], ...]
    inner_size: int
    conv_width: int
    conv_channels: int
    state_elements: int
    widened: tuple[int, int]


class RecurrentMixer(Mixer):
    """A mixer whose past is a state of constant size. heads_flag, groups_flag: which settings its heads and their groups come from."""

    heads_flag: ClassVar[str]
    groups_flag: ClassVar[str]

    @abstractmethod
    def counts(self, model: ModelConfig) -> RecurrentCounts:
        """Return its sizes in a network."""

    def linear_shapes(self, model: ModelConfig) -> Mapping[str, LinearShape]:
        """Return the shapes of the two projections."""
        counts = self.counts(model)
        return {
            "in_proj": LinearShape(model.hidden_size, counts.parts),
            "out_proj": LinearShape(counts.inner_size, (("", model.hidden_size),)),
        }

    def forward_flops_per_token(self, model: ModelConfig, keys: float) -> float:
        """Return 2 FLOPs for each tap and channel of the convolution, and 7 for each element of the state."""
        counts = self.counts(model)
        return 2 * counts.conv_width * counts.conv_channels + 7 * counts.state_elements

    def saved_bytes_per_token(self, config: RunConfig) -> float:
        """Return the bytes of the convolution's input, output and SiLU of it, and of scan and gated norm in fp32 or wider, with
        copies of half-precision tensors. Scans keep a state every 512 tokens.
        """
        counts, length = self.counts(config.model), config.train.seq_length
        size = BYTES[config.precision.param_dtype_name]
        wide, outputs = max(4, size), sum(width for _, width in counts.parts)
        half = size < wide
        # In half precision the gate is copied, and the projection is not needed; else the gate is a view that keeps all of it.
        kept = size * (3 * counts.conv_channels + counts.inner_size + (0 if half else outputs))
        spans = max(0, -(-length // 512) - 1)  # of which each but the first begins with a state
        widened = counts.widened[half] + counts.state_elements * spans / length
        return (kept + wide * widened) / config.parallel.tp

    def matrix_sizes(self, model: ModelConfig, tp: int) -> Iterator[tuple[str, int, int]]:
        """Yield the widths of both projections."""
        first, last = self.linear_shapes(model).values()
        yield f"the first projection of {self.title}", first.outputs, tp
        yield f"the width of all heads of {self.title}", last.inputs, tp

    def problems(self, run: RunConfig) -> Iterator[str]:
        """Yield why heads and groups cannot be divided over groups, tensor or context ranks."""
        if not self.is_requested(run.model):
            return
        counts, tp = self.counts(run.model), run.parallel.tp
        heads, groups = counts.heads, counts.groups
        named = f"{self.heads_flag} {heads} and {self.groups_flag} {groups}"
        if heads < 1 or groups < 1 or heads % groups:
            yield f"{named}: each group serves as many heads; choose a multiple, of at least 1"
            return
        if heads % tp or groups % tp:
            yield f"{named} cannot be divided over --tensor-model-parallel-size {tp}; choose a size that divides both"
            return
        size = run.parallel.context_parallel_size
        if run.parallel.state_comm_type == "a2a" and not can_exchange_heads(size, heads // tp, groups // tp):
            yield (
                f"{named}: --context-parallel-size {size} does not divide the {heads // tp} heads of a tensor rank, or not its groups; choose "
                "--state-comm-type states or auto"
            )
