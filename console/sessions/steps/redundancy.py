"""What agents say of the redundancy of streams: asked every few seconds, and stored for pages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
    *("state", "reason", "columns", "incomplete", "incomplete_at", "most_lacking"),
    *("repaired", "unreachable", "holders_since", "has_stored", "seen_at"),
)


def look() -> int:
    """Ask the agents whose streams are stored redundantly; how many streams they have told of. What is
    known of others is forgotten."""
    told = _told()
    at, found = timezone.now(), []
    if told:
        nodes = set(told.values())
        facts = Observations(set(reachable_nodes().filter(pk__in=nodes)), set())
        names = dict(Node.objects.filter(pk__in=nodes).values_list("pk", "name"))
        streams = Stream.objects.filter(pk__in=told).select_related("job__driver", "redundancy")
        for stream in streams:
            seen = facts.shard_at(names.get(told[stream.pk], ""), stream.name)
            if seen is not None and seen.redundancy is not None:
                found.append(_row(stream, seen.redundancy))
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


def _told() -> Mapping[int, int]:
    """By redundant stream the node whose agent stores its columns."""
    fragments = AllFragments()
    if not fragments.is_any:
        return {}
    streams = Stream.objects.filter(job__running=True).select_related("job__driver", "node", "next_node")
    return {
        stream.pk: node.pk
        for stream in streams
        for node in (stream.node, stream.next_node)
        if node is not None and fragments.told(stream, node)
    }


def _row(stream: Stream, said: Redundancy) -> StreamRedundancy:
    before = getattr(stream, "redundancy", None)
    return StreamRedundancy(
        stream=stream,
        state=excerpt(said.state, 16),
        reason=excerpt(said.reason, 500),
        columns=said.columns,
        incomplete=said.incomplete,
        incomplete_at=said.incomplete_at,
        most_lacking=said.most_lacking,
        repaired=said.repaired,
        unreachable=[excerpt(one, 500) for one in said.unreachable],
        holders_since=datetime.fromtimestamp(said.holders_since, UTC) if said.holders_since else None,
        has_stored=said.state == READY or bool(before and before.has_stored),
    )
