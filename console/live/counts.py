"""The metrics of live connections in a web process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from telemetry.histogram import Histogram
from telemetry.metrics import Catalog, Sink

METRICS: Final = Catalog()
VIEWERS = METRICS.gauge("tidegate_live_viewers", "Open WebSockets.")
TOPICS = METRICS.gauge("tidegate_live_topics", "Topics with subscribers.")
LISTENING = METRICS.gauge(
    "tidegate_live_listening", "1 while change hints arrive; without them updates are later."
)
FRAMES = METRICS.counter(
    "tidegate_live_frames_total", "Frames created, and frames sent to clients.", "what"
)
SKIPPED = METRICS.counter(
    "tidegate_live_skipped_frames_total", "Frames not sent to slow clients, which ask again."
)
CLOSED = METRICS.counter(
    "tidegate_live_closed_total", "WebSockets closed by the server, by code.", "code"
)
REFUSED = METRICS.counter(
    "tidegate_live_refused_total", "Refused upgrades and messages, by reason.", "reason"
)
READING = METRICS.histogram("tidegate_live_reading_seconds", "Duration of one read of all topics.")


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
