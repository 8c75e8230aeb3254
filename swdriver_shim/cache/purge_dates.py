"""When an org was purged last, by namespace: what comes back from before is not served."""

from __future__ import annotations

from typing import Final

from swdriver_shim.keys import Namespace

NEVER_YET: Final = float("-inf")
DATES_MAX: Final = 64  # of namespaces of one org; beyond, the oldest holds for all of them


class PurgeDates:
    def __init__(self) -> None:
        self._all = NEVER_YET
        self._single: dict[Namespace, float] = {}  # purged alone since, the oldest first

    def note(self, now: float, namespace: Namespace | None = None) -> None:
        """This namespace is purged now; None for all."""
        if namespace is None:
            self._all = max(self._all, now, *self._single.values())
            self._single.clear()
            return
        self._single[namespace] = max(now, self._single.pop(namespace, NEVER_YET))
        if len(self._single) > DATES_MAX:
            self._all = max(self._all, self._single.pop(next(iter(self._single))))

    def of(self, namespace: Namespace) -> float:
        return max(self._all, self._single.get(namespace, NEVER_YET))

    def __bool__(self) -> bool:
        """Whether anything was purged."""
        return self._all != NEVER_YET or bool(self._single)
