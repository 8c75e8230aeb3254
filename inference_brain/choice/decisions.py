"""The last decisions of a brain, by request: why this replica, and what became of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from inference_brain.choice.choice import Choice
from inference_brain.choice.explanation import Explanation, explain
from inference_brain.choice.outcome import Outcome

DECISIONS_MAX: Final = 10_000
CANDIDATES_MAX: Final = 16  # whose estimates are kept


class Decisions:
    """Bounded: the oldest are forgotten. A request that is sent again has its last decision only."""

    def __init__(self, size: int = DECISIONS_MAX) -> None:
        if size < 1:
            raise ValueError("a log of decisions has room for one at least")
        self._size = size
        self._kept: OrderedDict[str, tuple[Choice, Outcome | None]] = OrderedDict()
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, request: str, choice: Choice) -> None:
        """The request was sent."""
        if len(choice.estimates) > CANDIDATES_MAX:
            kept = list(choice.estimates[:CANDIDATES_MAX])
            if all(one.name != choice.replica for one in kept):
                kept[-1] = choice.chosen
            choice = choice._replace(estimates=kept)
        self._kept[request] = (choice, None)
        self._kept.move_to_end(request)
        if len(self._kept) > self._size:
            self._kept.popitem(last=False)
            self.forgotten += 1

    def finish(self, request: str, outcome: Outcome) -> None:
        """What became of it; nothing is kept of requests that are forgotten already."""
        if kept := self._kept.get(request):
            self._kept[request] = (kept[0], outcome)

    def find(self, request: str) -> Explanation | None:
        kept = self._kept.get(request)
        return None if kept is None else _named(request, explain(*kept))

    def newest(self, count: int) -> Iterator[Explanation]:
        for request in list(reversed(self._kept))[: max(0, count)]:
            if found := self.find(request):
                yield found


def _named(request: str, explanation: Explanation) -> Explanation:
    return replace(explanation, request=request)
