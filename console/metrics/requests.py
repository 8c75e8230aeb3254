"""The metrics of requests in a web process, which `console.guard` counts."""

from __future__ import annotations

from typing import Final

from telemetry.metrics import Catalog

METRICS: Final = Catalog()
CONNECTIONS = METRICS.gauge(
    "tidegate_web_connections", "Connections, by whether a credential was shown on them.", "peer"
)
ENDED = METRICS.counter(
    "tidegate_web_connections_ended_total", "Connections that were ended, by the bound.", "bound"
)
UNDER_WAY = METRICS.gauge(
    "tidegate_web_requests", "Requests that are answered and that wait for a place.", "peer", "state"
)
TURNED_AWAY = METRICS.counter(
    "tidegate_web_requests_refused_total", "Requests that never came to a view, by why.", "reason"
)
HASHES = METRICS.gauge(
    "tidegate_password_hashes", "Passwords that are hashed, and that wait for it.", "state"
)
HASHES_REFUSED = METRICS.counter(
    "tidegate_password_hashes_refused_total", "Passwords that could not be hashed in time."
)
