"""The metrics of the console itself."""

from __future__ import annotations

from typing import Final

from telemetry.metrics import Catalog

METRICS: Final = Catalog()
SOURCES = METRICS.gauge("tidegate_sources", "Processes last seen within ten seconds.", "kind")
MISSING = METRICS.gauge(
    "tidegate_missing_records", "Records of those that have not arrived: on their way, or lost."
)
STREAM_LENGTH = METRICS.gauge("tidegate_stream_records", "Records in Redis that are not written.")
DEAD_LETTERS = METRICS.gauge(
    "tidegate_dead_letters", "Telemetry of today (UTC) that could not be stored, by cause.", "cause"
)
LINE_AGE = METRICS.gauge(
    "tidegate_line_age_seconds", "How far behind now a level of roll-ups is complete.", "level"
)
ALERTS_AGE = METRICS.gauge(
    "tidegate_alerts_age_seconds", "Since rules were last evaluated. It grows where nobody does it."
)
ALERTS = METRICS.gauge("tidegate_alerts", "Open alerts.", "state", "severity")
NOTIFICATIONS = METRICS.gauge(
    "tidegate_notifications",
    "Notifications that wait, that have waited for five minutes, and that were given up today.",
    "state",
)
TARGETS = METRICS.gauge(
    "tidegate_targets",
    "Agents and drivers that are told what to be: as told, behind, or the fault of their answers.",
    "state",
)
BAD_ANSWERS = METRICS.counter(
    "tidegate_bad_answers_total", "Answers of agents and drivers to the console that were none.", "fault"
)
STORED = METRICS.gauge("tidegate_stored_bytes", "Of numbers in PostgreSQL, with indexes.", "level")
