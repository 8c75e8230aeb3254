"""What was used in the last minute, by second."""

from __future__ import annotations

from typing import Final

WINDOW_SECONDS: Final = 61  # a whole minute before the present second


class Window:
    """Requests and tokens of one org in one brain."""

    def __init__(self) -> None:
        self.seconds: dict[int, tuple[float, float]] = {}

    def add(self, second: int, requests: float, tokens: float) -> None:
        before = self.seconds.get(second, (0, 0))
        self.seconds[second] = (before[0] + requests, before[1] + tokens)

    def sums(self, now: float) -> tuple[float, float]:
        self.forget(int(now))
        values = self.seconds.values()
        return max(0, sum(one[0] for one in values)), max(0, sum(one[1] for one in values))

    def wait(self, now: float, kind: int, excess: float) -> float:
        """Seconds until so much has left the window."""
        for second in sorted(self.seconds):
            excess -= self.seconds[second][kind]
            if excess <= 0:
                return max(1.0, second + WINDOW_SECONDS - now)
        return float(WINDOW_SECONDS)

    def forget(self, second: int) -> None:
        """Drop what has left the window by this second."""
        for old in [one for one in self.seconds if one <= second - WINDOW_SECONDS]:
            del self.seconds[old]
