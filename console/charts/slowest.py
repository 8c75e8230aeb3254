"""The slowest transfers behind a heat map, without what the principal may not see."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.charts.ranges import Range
from console.metrics.services import check_topic
from console.orgs.services import visible_orgs
from console.sessions.services import visible_sessions
from console.visibility import Sight
from telemetry.ingest.slowest import slowest_of
from telemetry.models import SlowTransfer

ROWS_MAX: Final = 50
CELL_SECONDS_MIN: Final = 10  # a step of a chart
Direction = Literal["", "out", "in"]
# The direction of a metric's transfers.
DIRECTIONS: Final[dict[str, Direction]] = {
    "swdriver_refill_seconds": "in",
    "kvss_refill_seconds": "in",
    "swdriver_evict_seconds": "out",
    "kvss_evict_seconds": "out",
    "tidegate_driver_path_seconds": "",
}


@dataclass(frozen=True, slots=True)
class Behind:
    """Transfers, and the sessions of them that the principal may see."""

    transfers: list[SlowTransfer]
    sessions: frozenset[str]


def behind(
    principal: Principal,
    topic: str,
    over: Range,
    *,
    direction: Direction = "",
    seconds_max: float | None = None,
    limit: int = ROWS_MAX,
) -> Behind:
    """The slowest transfers of a topic, of orgs they may see. Raises Http404 for a topic they may not
    see."""
    check_topic(principal, topic)
    orgs = None
    if not principal.on_platform(Role.VIEWER):
        orgs = list(visible_orgs(principal).values_list("slug", flat=True))
    since, until = (datetime.fromtimestamp(at, UTC) for at in (over.start, over.end))
    found = list(
        slowest_of(topic, since, until, direction=direction, seconds_max=seconds_max, orgs=orgs)[:limit]
    )
    named = visible_sessions(principal).filter(name__in={one.session for one in found})
    sessions, sight = frozenset(named.values_list("name", flat=True)), Sight(principal)
    for one in found:
        _hide(one, sight, sessions)
    return Behind(found, sessions)


def _hide(one: SlowTransfer, sight: Sight, sessions: Collection[str]) -> None:
    """Remove session, driver, stream, node and link of a transfer by a driver they may not see. Its size
    and duration stay."""
    if sight.knows_driver(one.driver):
        return
    one.driver = one.stream = one.node = one.nic_leaf = one.link = ""
    one.slot_first = one.slot_last = 0
    if one.session not in sessions:
        one.session = ""
