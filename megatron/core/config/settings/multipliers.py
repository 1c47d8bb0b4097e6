"""Fixed factors of what parts of a network make, by which networks of several widths train alike (muP; Falcon-H1)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from megatron.core.config.flags.declare import flag, flag_name

MIXER_PARTS, MLP_PARTS = ("z", "x", "B", "C", "dt"), ("gate", "output")


@dataclass(frozen=True, slots=True)
class MultiplierConfig:
    """Multipliers. Fixed factors of what parts of a network make (Yang et al., 2022, arXiv 2203.03466; Falcon-H1
    has all of them). Left out, one.
    """

    embedding_multiplier: float = flag(1.0, "factor of the embeddings", role="network")
    lm_head_multiplier: float = flag(1.0, "factor of the logits", role="network")
    attention_in_multiplier: float = flag(1.0, "factor of the input of attention", role="network")
    key_multiplier: float = flag(1.0, "factor of the keys of attention", role="network")
    attention_out_multiplier: float = flag(1.0, "factor of the output of attention", role="network")
    ssm_in_multiplier: float = flag(1.0, "factor of the input of Mamba-2", role="network")
    ssm_multipliers: tuple[float, ...] = flag(
        (), "factors of what Mamba-2's first matrix makes: z, x, B, C and dt", role="network"
    )
    ssm_out_multiplier: float = flag(1.0, "factor of the output of Mamba-2", role="network")
    mlp_multipliers: tuple[float, ...] = flag(
        (), "factors of the gate of MLPs, before its activation, and of their output", role="network"
    )

    @property
    def mamba_factors(self) -> tuple[float, ...]:
        """Factors of z, x, B, C and dt of Mamba-2, each times that of its input; empty if all are one."""
        values = tuple(self.ssm_in_multiplier * one for one in self.ssm_multipliers or (1.0,) * len(MIXER_PARTS))
        return values if set(values) != {1.0} else ()

    @property
    def mlp_factors(self) -> tuple[float, float]:
        """Factors of an MLP's gate, and of its output."""
        gate, output = self.mlp_multipliers or (1.0, 1.0)
        return gate, output

    @property
    def given_flags(self) -> list[str]:
        """The flags of factors that are not at their defaults."""
        return [flag_name(field.name) for field in fields(self) if getattr(self, field.name) != field.default]

    def multiplier_problems(self) -> Iterator[str]:
        """Yield which flags have a wrong number of factors, or factors that are 0 or not finite."""
        parts = {"ssm_multipliers": MIXER_PARTS, "mlp_multipliers": MLP_PARTS}
        for field in fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value,)
            if field.name in parts and value and len(value) != len(parts[field.name]):
                yield f"{flag_name(field.name)} has {len(value)} factors; give one each of {', '.join(parts[field.name])}, or none"
            elif any(not math.isfinite(one) or one == 0 for one in values):
                yield f"{flag_name(field.name)} {' '.join(f'{one:g}' for one in values)}: a factor is a number other than 0"
