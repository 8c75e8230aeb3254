"""The slowest transfers, kept for some hours and found by who they are of."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

from django.db.models import QuerySet

from telemetry.emit.transfers import Transfer
from telemetry.models import SlowTransfer
from telemetry.topics import FLEET, ORG, kind_of

_FIELDS: Final = {"org": "org", "node": "node", "driver": "driver", "session": "session"}


def store_slowest(driver: str, transfers: Iterable[Transfer]) -> None:
    """Within the transaction of the record that they came with."""
    SlowTransfer.objects.bulk_create(
        [
            SlowTransfer(
                at=datetime.fromtimestamp(one.at, UTC),
                driver=driver,
                **{name: getattr(one, name) for name in one.__struct_fields__ if name != "at"},
            )
            for one in transfers
        ]
    )


def slowest_of(
    topic: str,
    since: datetime,
    until: datetime,
    *,
    direction: str = "",
    seconds_max: float | None = None,
    orgs: Collection[str] | None = None,
) -> QuerySet[SlowTransfer]:
    """Of a topic, the slowest first; of what nobody counts transfers of, none. `seconds_max`: leaves out
    what took longer. `orgs`: only theirs."""
    found = _of(topic).filter(at__gte=since, at__lt=until)
    if direction:
        found = found.filter(direction=direction)
    if seconds_max is not None:
        found = found.filter(seconds__lte=seconds_max)
    if orgs is not None:
        found = found.filter(org__in=orgs)
    return found.order_by("-seconds", "pk")


def _of(topic: str) -> QuerySet[SlowTransfer]:
    if topic == FLEET:
        return SlowTransfer.objects.all()
    field = _FIELDS.get(kind_of(topic))
    if field is None:
        return SlowTransfer.objects.none()
    return SlowTransfer.objects.filter(**{field: topic.partition(":")[2]})


def free_transfers(topic: str) -> None:
    """Delete those of an org. Those of a session stay with their org, and are of no session then."""
    if kind_of(topic) == ORG:
        _of(topic).delete()
    elif field := _FIELDS.get(kind_of(topic)):
        _of(topic).update(**{field: ""})


def forget_old_transfers(now: datetime, hours: int) -> int:
    deleted, _ = SlowTransfer.objects.filter(at__lt=now - timedelta(hours=hours)).delete()
    return deleted
