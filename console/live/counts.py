"""What a web process counts of its live viewers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from telemetry.histogram import Histogram
from telemetry.metrics import Catalog, Sink

METRICS: Final = Catalog()
VIEWERS = METRICS.gauge("tidegate_live_viewers", "WebSockets that are open.")
TOPICS = METRICS.gauge("tidegate_live_topics", "Topics that somebody watches.")
LISTENING = METRICS.gauge("tidegate_live_listening", "1 while hints come in; without, news is later.")
FRAMES = METRICS.counter(
    "tidegate_live_frames_total", "Frames made, and frames sent to viewers.", "what"
)
SKIPPED = METRICS.counter(
    "tidegate_live_skipped_frames_total", "Frames that a slow viewer was not sent; it asks again."
)
CLOSED = METRICS.counter("tidegate_live_closed_total", "WebSockets that we closed, by why.", "code")
REFUSED = METRICS.counter(
    "tidegate_live_refused_total", "Upgrades and messages that were refused, by why.", "reason"
)
READING = METRICS.histogram("tidegate_live_reading_seconds", "A round of reading, for all topics.")


@dataclass
class Counts:
    viewers: int = 0
    viewers_of: Counter[str] = field(default_factory=Counter)  # by person
    topics: int = 0
    is_listening: bool = False
    made: int = 0
    sent: int = 0
    skipped: int = 0
    closed: Counter[str] = field(default_factory=Counter)  # by code
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    reading: Histogram = field(default_factory=Histogram)

    def collect(self, into: Sink) -> None:
        """From the emitter's thread."""
        into.put(VIEWERS, [({}, self.viewers)])
        into.put(TOPICS, [({}, self.topics)])
        into.put(LISTENING, [({}, int(self.is_listening))])
        into.put(FRAMES, [({"what": "made"}, self.made), ({"what": "sent"}, self.sent)])
        into.put(SKIPPED, [({}, self.skipped)])
        into.put(CLOSED, [({"code": code}, count) for code, count in self.closed.copy().items()])
        into.put(REFUSED, [({"reason": why}, count) for why, count in self.refused.copy().items()])
        into.put(READING, [({}, self.reading)])
