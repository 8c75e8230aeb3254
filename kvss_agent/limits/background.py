"""How fast bytes move that can wait, such as those of a shard that moves to another node.

They share links with evicts and refills, on which a request waits. So they keep to a budget, which is a
part of what the links carry. And they yield: when pieces take longer than the fastest of the last half
minute, somebody else has come onto the way, and most of the time is left to them. Nobody has to be asked
for that, and it holds for links that no description names; but who was there before the first piece is
not noticed, and who stays is taken for the way as it is after that half minute. The budget is what holds
then. To yield takes four times as long as moving at most, so moves come to an end beside any load.

On a busy machine most pieces are slower than the fastest, with nobody else on the way. A transfer that a
request waits for is compared with what is `Usual` instead.

Bytes that several move at once are *booked* before they move. So each knows how long it has to wait, and
can do something else where that is too long. They keep to the budget, and are no measure of others.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

PIECE_SECONDS: Final = 0.02  # what is moved at once takes so long by the budget: others wait behind it
PIECE_BYTES: Final = 4 << 20  # without a budget
CROWDED: Final = 1.5  # so many times as long as the fastest took
YIELD: Final = 4.0  # rest so many times as long as a piece has taken longer
YIELD_SECONDS_MAX: Final = 1.0  # after one piece
LONGER_SECONDS_MIN: Final = 0.001  # less is no sign of anybody
FASTEST_SECONDS: Final = 30.0  # for so long a piece is a measure of others
SAMPLE_SECONDS: Final = 0.25  # what moves in so long is one sample of what is usual
REST_SECONDS_MAX: Final = 3600.0  # that somebody is told to wait

Budget = Callable[[], int | None]  # bytes per second; None: as many as there can be


@dataclass(slots=True)
class Rate:
    """A budget that is told anew at times."""

    bytes_per_second: int | None = None

    def __call__(self) -> int | None:
        return self.bytes_per_second


@dataclass(slots=True)
class Totals:
    """What transfers have moved, and how long they rested. Any thread may add to it."""

    bytes: int = 0
    rested_seconds: dict[str, float] = field(
        default_factory=lambda: {"budget": 0.0, "yield": 0.0}
    )  # for the `budget`, or to `yield`
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int, budget: float, yielded: float) -> None:
        with self._lock:
            self.bytes += size
            self.rested_seconds["budget"] += budget
            self.rested_seconds["yield"] += yielded


class Measure(Protocol):
    """How long pieces take without others on the way."""

    def pace(self, size: int, seconds: float, now: float) -> float:
        """In seconds per byte, with a piece of this size that has taken so long."""


class Fastest:
    """As the fastest of the last half minute."""

    def __init__(self) -> None:
        self._halves: list[tuple[float, float]] = []  # since when, and seconds per byte

    def pace(self, size: int, seconds: float, now: float) -> float:
        pace = seconds / size
        if not self._halves or now - self._halves[-1][0] > FASTEST_SECONDS / 2:
            self._halves = [*self._halves[-1:], (now, pace)]
        since, least = self._halves[-1]
        self._halves[-1] = since, min(least, pace)
        return min(pace for at, pace in self._halves if now - at <= FASTEST_SECONDS)


class Usual:
    """As the median of the last half minute: who comes is noticed until he has been there for the larger
    part of it, and a machine that is busy at times is not taken for him."""

    def __init__(self) -> None:
        self._samples: deque[list[float]] = deque()  # since when, seconds, bytes

    def pace(self, size: int, seconds: float, now: float) -> float:
        samples = self._samples
        while samples and now - samples[0][0] > FASTEST_SECONDS:
            samples.popleft()
        if not samples or now - samples[-1][0] > SAMPLE_SECONDS:
            samples.append([now, 0.0, 0.0])
        samples[-1][1] += seconds
        samples[-1][2] += size
        return statistics.median(took / moved for _, took, moved in samples)


class Background:
    """Of the transfers on one way, piece by piece; any thread may move or `book`. Times are of
    `time.monotonic`."""

    def __init__(
        self,
        budget: Budget = lambda: None,
        totals: Totals | None = None,
        *,
        piece_bytes: int = PIECE_BYTES,
        yields: float = YIELD,
        yield_seconds_max: float = YIELD_SECONDS_MAX,
        measure: Measure | None = None,
    ) -> None:
        """`budget` is asked anew for each piece; without one it has `piece_bytes`. `yields`: rest so
        many times as long as a piece took longer than the `measure`, at most `yield_seconds_max`."""
        self._budget = budget
        self._piece_bytes = piece_bytes
        self._yields, self._yield_seconds_max = yields, yield_seconds_max
        self._totals = totals or Totals()
        self._lock = threading.Lock()  # of all that follows
        self._paid_until = 0.0  # by the budget
        self._paid_by: int | None = None  # the budget that this was reckoned with
        self._yields_until = 0.0
        self._measure = measure or Fastest()

    def piece(self) -> int:
        """How many bytes to move at once."""
        budget = self._budget()
        return self._piece_bytes if budget is None else max(1, int(budget * PIECE_SECONDS))

    def moved(self, size: int, seconds: float, now: float, measure: Measure | None = None) -> None:
        """So many bytes were moved, by a transfer that took so many seconds until now. `measure`: of
        pieces that are moved in another way, and take longer by themselves."""
        if not size:
            return
        with self._lock:
            budget = self._reckoned(now)
            self._pay(size, budget, now - seconds)
            owed = max(0.0, self._paid_until - now) if budget else 0.0
            longer = seconds - size * (measure or self._measure).pace(size, seconds, now)
            yielded = 0.0
            if longer > max(LONGER_SECONDS_MIN, (1 - 1 / CROWDED) * seconds):
                yielded = max(0.0, min(self._yield_seconds_max, self._yields * longer) - owed)
                self._yields_until = max(self._yields_until, now + owed + yielded)
        self._totals.add(size, owed, yielded)

    def rest(self, now: float, moved: int | None = None) -> float:
        """For how long to move nothing yet. With the bytes that were `moved`: of what others have booked
        it waits for as many bytes. So it has half of the budget beside them, and they are late."""
        with self._lock:
            budget = self._reckoned(now)
            paid = self._paid_until - now if budget else 0.0
            if moved is not None and budget:
                paid = min(paid, 2 * moved / budget)
            return max(0.0, paid, self._yields_until - now)

    def book(self, size: int, now: float, most: float = math.inf) -> float | None:
        """For how long to wait before so many bytes are moved: from then on others wait for these, too.
        None, and they are not booked, if that is longer than `most`."""
        with self._lock:
            budget = self._reckoned(now)
            wait = max(0.0, self._paid_until - now) if budget else 0.0
            if wait > most:
                return None
            self._pay(size, budget, now)
        # Of the waits of those that wait beside each other, what each adds.
        self._totals.add(size, min(wait, size / budget) if budget else 0.0, 0.0)
        return wait

    def _reckoned(self, now: float) -> int | None:
        """The budget. With another one what is still to be paid for takes another time. Who has none
        pays nothing, and leaves what others owe as it is."""
        budget, before = self._budget(), self._paid_by
        if budget:
            if before and budget != before and self._paid_until > now:
                self._paid_until = now + (self._paid_until - now) * before / budget
            self._paid_by = budget
        return budget

    def _pay(self, size: int, budget: int | None, since: float) -> None:
        if budget:
            self._paid_until = max(self._paid_until, since) + size / budget
