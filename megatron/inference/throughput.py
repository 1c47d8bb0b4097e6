"""How many tokens an engine makes in a second."""

from __future__ import annotations

import math
import time

_RATE_SECONDS = 10.0


class TokenRateMeter:
    """Tokens per second, exponentially averaged over the last seconds."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._rate = 0.0

    def add_new_tokens(self, count: int) -> None:
        """Count new tokens."""
        now = time.monotonic()
        self._rate = self._rate * math.exp((self._last - now) / _RATE_SECONDS) + count / _RATE_SECONDS
        self._last = now

    def current_rate(self) -> float:
        """Return the tokens per second averaged over the last seconds."""
        now = time.monotonic()
        seen = 1.0 - math.exp((self._begun - now) / _RATE_SECONDS)  # of the time that counts, how much there has been
        return self._rate * math.exp((self._last - now) / _RATE_SECONDS) / seen if seen > 0.0 else 0.0
