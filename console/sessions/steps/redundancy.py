"""What agents say of the redundancy of streams: asked every few seconds, and stored for pages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import IntegrityError, transaction
from django.utils import timezone

from console.control.observed import Redundancy
from console.fleet.models import Node
from console.fleet.services import reachable_nodes
from console.sessions.fragments import AllFragments
from console.sessions.models import Stream, StreamRedundancy
from console.sessions.plans.margins import READY
from console.sessions.steps.observations import Observations
from telemetry.decoder import excerpt

log = logging.getLogger(__name__)

FIELDS = (
    *("state", "reason", "columns", "incomplete", "repaired", "unreachable"),
    *("complete_up_to", "seen_at"),
)


@dataclass(frozen=True, slots=True)
class _Told:
    """Of a redundant stream: whose agent stores its columns, and when its newest holder came."""

    node: int
    holders_since: datetime


def look() -> int:
    """Ask the agents whose streams are stored redundantly; how many streams they have told of. What is
    known of others is forgotten."""
    told = _told()
    at, found = timezone.now(), []
    if told:
        nodes = {one.node for one in told.values()}
        facts = Observations(set(reachable_nodes().filter(pk__in=nodes)), set())
        names = dict(Node.objects.filter(pk__in=nodes).values_list("pk", "name"))
        streams = Stream.objects.filter(pk__in=told).select_related("job__driver", "redundancy")
        for stream in streams:
            seen = facts.shard_at(names.get(told[stream.pk].node, ""), stream.name)
            if seen is not None and seen.redundancy is not None:
                found.append(_row(stream, seen.redundancy, told[stream.pk].holders_since))
    for row in found:
        row.seen_at = at
    try:
        with transaction.atomic():
            StreamRedundancy.objects.exclude(stream__in=told).delete()
            StreamRedundancy.objects.bulk_create(
                found, update_conflicts=True, unique_fields=["stream"], update_fields=FIELDS
            )
    except IntegrityError:
        log.info("A stream has ended while its agent was asked: the next look stores what is so.")
    return len(found)


def _told() -> Mapping[int, _Told]:
    """By redundant stream."""
    fragments = AllFragments()
    if not fragments.is_any:
        return {}
    streams = Stream.objects.filter(job__running=True).select_related("job__driver", "node", "next_node")
    return {
        stream.pk: _Told(node.pk, max(one.since for one in holders))
        for stream in streams
        for node in (stream.node, stream.next_node)
        if node is not None
        and fragments.told(stream, node)
        and (holders := fragments.holders_of_stream(stream))
    }


def _row(stream: Stream, said: Redundancy, holders_since: datetime) -> StreamRedundancy:
    before = getattr(stream, "redundancy", None)
    complete_up_to = before.complete_up_to if before else None
    is_of_these = datetime.fromtimestamp(said.holders_since, UTC) == holders_since
    if is_of_these and said.state == READY and not said.incomplete and not said.unreachable:
        complete_up_to = holders_since
    return StreamRedundancy(
        stream=stream,
        state=excerpt(said.state, 16),
        reason=excerpt(said.reason, 500),
        columns=said.columns,
        incomplete=said.incomplete,
        repaired=said.repaired,
        unreachable=[excerpt(one, 500) for one in said.unreachable],
        complete_up_to=complete_up_to,
    )
