"""How much one source may bring into topics that it shares with others, each hour. Pure.

What is beyond costs that source only: its own numbers are refused, or summed up under `other` where they
would be new series of somebody else's topic. An hour is the coarsest roll-up, so what is admitted within
one bounds every row that is made of it. Each member of the group counts for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from telemetry.emit.transfers import INTERVAL_SECONDS, TRANSFERS_MAX
from telemetry.shapes import SERIES_MAX
from telemetry.store.merge import SERIES_OF_TOPIC_MAX

HOUR_SECONDS: Final = 3600
SHAPES_MAX: Final = 256  # of a source in an hour: it changes with each label that appears
SHAPE_SERIES_MAX: Final = 64 * SERIES_MAX  # of all of its shapes together
SHARE_OF_TOPIC_MAX: Final = SERIES_MAX // 2  # series that one source may add to a topic
TOPICS_OF_SOURCE_MAX: Final = 1024
TOPICS_MAX: Final = 50_000  # of all sources together
LIVES_MAX: Final = 60  # of a source in an hour: it may be started again each minute
# Slowest transfers of a source in an hour: as many as it can measure, also in ten minutes without Redis.
TRANSFERS_OF_SOURCE_MAX: Final = TRANSFERS_MAX * (HOUR_SECONDS + 600) // INTERVAL_SECONDS


class Quotas:
    """What has been admitted in this hour, of series by their hashes: nothing that anybody else forgets
    begins them anew."""

    def __init__(self) -> None:
        self.hour = -1
        self._begin()

    def begin(self, now: float) -> None:
        """Anew, if another hour has begun."""
        if (hour := int(now) // HOUR_SECONDS) != self.hour:
            self.hour = hour
            self._begin()

    def _begin(self) -> None:
        self._shapes: dict[str, dict[bytes, bool]] = {}  # of a source: whether it made sense
        self._shape_series: Counter[str] = Counter()
        self._known: dict[str, set[int]] = {}  # series of a topic
        self._brought: Counter[tuple[str, str]] = Counter()  # series by source and topic
        self._topics: dict[str, set[str]] = {}  # that a source adds to
        self._lives: dict[str, set[str]] = {}  # of a source
        self._transfers: Counter[str] = Counter()  # of a source, that were stored

    def admits_life(self, source: str, life: str) -> bool:
        """Whether the source may have this life, too: each is stored, and its beginning is an event."""
        lives = self._lives.setdefault(source, set())
        if life not in lives and len(lives) < LIVES_MAX:
            lives.add(life)
        return life in lives

    def transfers_left(self, source: str) -> int:
        """How many more of its slowest transfers may be stored."""
        return TRANSFERS_OF_SOURCE_MAX - self._transfers[source]

    def took_transfers(self, stored: Mapping[str, int]) -> None:
        """So many were stored, by source: a transaction that failed stores none."""
        self._transfers.update(stored)

    def may_tell_shape(self, source: str, digest: bytes) -> bool:
        """Whether it is worth while to look at this shape of the source, or at numbers of it."""
        shapes = self._shapes.get(source, {})
        return digest in shapes or (
            len(shapes) < SHAPES_MAX and self._shape_series[source] < SHAPE_SERIES_MAX
        )

    def refuse_shape(self, source: str, digest: bytes) -> None:
        """What the source told as this shape is none. It counts as one."""
        self._shapes.setdefault(source, {})[digest] = False

    def has_refused_shape(self, source: str, digest: bytes) -> bool:
        return self._shapes.get(source, {}).get(digest) is False

    def admits_shape(self, source: str, digest: bytes, series: int) -> bool:
        """Whether the source may tell numbers of this shape. After one that had too many series no new
        one is looked at."""
        if not self.may_tell_shape(source, digest):
            return False
        shapes = self._shapes.setdefault(source, {})
        if digest in shapes:
            return True
        if self._shape_series[source] + series > SHAPE_SERIES_MAX:
            self._shape_series[source] = SHAPE_SERIES_MAX
            return False
        shapes[digest] = True
        self._shape_series[source] += series
        return True

    def admits_topic(self, source: str, topic: str) -> bool:
        """Whether the source may add to this topic of others."""
        topics = self._topics.setdefault(source, set())
        if topic in topics:
            return True
        if len(topics) >= TOPICS_OF_SOURCE_MAX:
            return False
        if topic not in self._known and len(self._known) >= TOPICS_MAX:
            return False
        topics.add(topic)
        self._known.setdefault(topic, set())
        return True

    def refused(self, source: str, topic: str, series: AbstractSet[int]) -> set[int]:
        """Those series that the source may not add to the topic; the others are admitted."""
        known = self._known[topic]
        new = [one for one in series if one not in known]
        room = min(SHARE_OF_TOPIC_MAX - self._brought[source, topic], SERIES_OF_TOPIC_MAX - len(known))
        admitted = new[: max(0, room)]
        known.update(admitted)
        self._brought[source, topic] += len(admitted)
        return set(new[len(admitted) :])
