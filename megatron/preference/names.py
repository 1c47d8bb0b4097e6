"""Names of the losses, apart from their formulas, so that the command line is read before torch is imported."""

from __future__ import annotations

from typing import Literal

PreferenceLoss = Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero", "simpo", "orpo"]
WITHOUT_REFERENCE = ("simpo", "orpo")
