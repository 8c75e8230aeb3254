"""Memory for bodies of requests, shared by orgs."""

from __future__ import annotations

from collections import Counter


class BodyRoom:
    """Memory for bodies of requests that are being read or served, all together. However many an org
    sends, and however slowly, it leaves others as much as it has."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._held: Counter[str] = Counter()  # by org

    def is_enough(self, size: int) -> bool:
        """Whether an org can have so much at all."""
        return 2 * size <= self.most

    def take(self, org: str, size: int) -> bool:
        """False if there is no more; then nothing is taken."""
        held, left = self._held[org], self.most - self.used - size
        if left < 0 or (held and held + size > left):
            return False
        self._held[org] += size
        self.used += size
        return True

    def give_back(self, org: str, size: int) -> None:
        self.used -= size
        self._held[org] -= size
        if not self._held[org]:
            del self._held[org]
