"""What evaluations are about, as it is now: numbers, who was heard, who is registered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from django.conf import settings
from django.db import connection
from django.db.models import Max, Sum

from console.alerts.rules import Crossing, Rule, Standing, Tables, World, question
from console.authority import services as authority
from console.control.models import Kind, Target
from console.control.services import in_the_open
from console.fleet.models import Driver, Nic, Node, Removed, SpineLink
from console.metrics.catalog import METRICS
from console.placement import sentences
from console.placement.topology import State, Tier
from console.sessions.models import Job, Stream
from console.sessions.rules import effective_rules
from telemetry.ingest.sources import ALIVE
from telemetry.models import Source
from telemetry.queries import ask
from telemetry.topics import of_source

SERIES_MAX: Final = 100_000  # of a reading
CROSSINGS_MAX: Final = 5_000


def world(now: datetime) -> World:
    resting = Node.objects.filter(state=State.MAINTENANCE.value).values_list("name", flat=True)
    removed = Removed.objects.filter(kind="node").exclude(name__in=Node.objects.values("name"))
    told = dict(Source.objects.values_list("topic").annotate(Max("seen_at")).order_by())
    nobody_misses = {*resting, *removed.values_list("name", flat=True)}
    left_out = {of_source("agent", name) for name in nobody_misses}
    leaves: dict[str, tuple[str, ...]] = {}
    for node, leaf in Nic.objects.order_by("leaf__name").values_list("node__name", "leaf__name"):
        topic = of_source("agent", node)
        if topic not in left_out:
            leaves[topic] = (*leaves.get(topic, ()), leaf)
    replaced_since = authority.replaced_since()
    return World(
        at=now,
        heard={topic: at for topic, at in told.items() if topic not in left_out},
        expected={topic: at for topic, at in _joined() if topic not in left_out},
        leaves={node: tuple(dict.fromkeys(its)) for node, its in leaves.items()},
        crossings=_crossings(),
        drivers_of_sessions=frozenset(Job.objects.values_list("driver__name", flat=True)),
        link_gbits=dict(SpineLink.objects.values_list("name", "gbits")),
        standings={topic: one for topic, one in _standings() if topic not in left_out},
        plain_control=settings.PLAIN_CONTROL,
        in_the_open=tuple(in_the_open()) if settings.PLAIN_CONTROL else (),
        root_replaced_since=replaced_since,
        root_not_followed=tuple(authority.following().behind) if replaced_since else (),
        missing_records=_missing_records(now),
        rolled_up_to=_rolled_up_to(),
    )


def _joined() -> Iterator[tuple[str, datetime]]:
    for kind, model in (("agent", Node), ("driver", Driver)):
        for name, joined_at in model.objects.values_list("name", "joined_at"):
            if joined_at:
                yield of_source(kind, name), joined_at


def _crossings() -> tuple[Crossing, ...]:
    """The shards of sessions that are placed across the spine, with what their rules say of it."""
    across = Stream.objects.filter(tier=Tier.SPINE.value)
    related = ("job__session__org", "job__driver", "box", "node")
    found, worst = list[Crossing](), dict[int, Tier]()
    for shard in across.select_related(*related).order_by("pk")[:CROSSINGS_MAX]:
        session = shard.job.session
        if session.pk not in worst:
            worst[session.pk] = effective_rules(session.org, session.path).limit(math.inf).worst
        found.append(
            Crossing(
                session=session.name,
                driver=shard.job.driver.name,
                stream=f"{shard.group}.{shard.index}",
                box=shard.box.name,
                node=shard.node.name,
                port_leaf=shard.port_leaf,
                nic_leaf=shard.nic_leaf,
                shard=shard.name,
                allowed=worst[session.pk] >= Tier.SPINE,
                why=sentences.unnamed(shard.why),  # evidence is for all who see the alert
            )
        )
    return tuple(found)


def _standings() -> Iterator[tuple[str, Standing]]:
    source = {Kind.NODE.value: "agent", Kind.DRIVER.value: "driver"}
    for one in Target.objects.filter(generation__gt=0).defer("secret", "digest"):
        yield (
            of_source(source[one.kind], one.name),
            Standing(
                told=one.generation,
                follows=one.observed_generation,
                problem=one.problem,
                fault=one.fault,
                faulty_since=one.bad_since,
                seen_at=one.observed_at,
            ),
        )


def _missing_records(now: datetime) -> int:
    alive = Source.objects.filter(seen_at__gt=now - ALIVE)
    return int(alive.aggregate(sum=Sum("missing"))["sum"] or 0)


def _rolled_up_to() -> datetime | None:
    """Up to when steps of ten seconds are complete; None before anything was."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT at FROM telemetry_line WHERE level = '10s' AND at > 0")
        row = cursor.fetchone()
    return datetime.fromtimestamp(row[0], UTC) if row else None


def tables(rule: Rule, now: float) -> Tables:
    """What the rule reads. Raises telemetry.queries.Unanswerable."""
    return {
        name: ask(question(reading, METRICS, now), now, SERIES_MAX).lines
        for name, reading in rule.readings.items()
    }
