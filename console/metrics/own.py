"""The metrics of the console itself."""

from __future__ import annotations

from typing import Final

from telemetry.metrics import Catalog

METRICS: Final = Catalog()
SOURCES = METRICS.gauge("tidegate_sources", "Processes last seen within ten seconds.", "kind")
MISSING = METRICS.gauge(
    "tidegate_missing_records", "Records of these processes that have not arrived: in transit, or lost."
)
STREAM_LENGTH = METRICS.gauge("tidegate_stream_records", "Records in Redis that are not stored yet.")
DEAD_LETTERS = METRICS.gauge(
    "tidegate_dead_letters", "Telemetry of today (UTC) that could not be stored, by cause.", "cause"
)
LINE_AGE = METRICS.gauge(
    "tidegate_line_age_seconds", "How far the watermark of a roll-up level is behind.", "level"
)
ALERTS_AGE = METRICS.gauge("tidegate_alerts_age_seconds", "Time since all rules were last evaluated.")
ALERTS = METRICS.gauge("tidegate_alerts", "Open alerts.", "state", "severity")
NOTIFICATIONS = METRICS.gauge(
    "tidegate_notifications",
    "Notifications that wait, that have waited for five minutes, and that failed within a day.",
    "state",
)
TARGETS = METRICS.gauge(
    "tidegate_targets",
    "Agents and drivers with a desired state: applied, behind, or the fault of their answers.",
    "state",
)
BAD_ANSWERS = METRICS.counter(
    "tidegate_bad_answers_total", "Invalid answers of agents and drivers to the console.", "fault"
)
STORED = METRICS.gauge(
    "tidegate_stored_bytes", "Size of telemetry in PostgreSQL, with indexes.", "level"
)
