"""Reads a `Snapshot` of the fleet, and the metrics that rules query."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import starmap
from typing import Final

from django.conf import settings
from django.db import connection
from django.db.models import Count, Max, Min, Q, Sum

from console.alerts.conditions.condition import (
    Crossing,
    LostNode,
    RolloutState,
    Snapshot,
    Tables,
    TargetState,
    WithoutHolders,
    WorkloadState,
)
from console.alerts.rules.rule import Rule
from console.alerts.state.transitions import LONG_AGO
from console.authority import services as authority
from console.control.models import Target
from console.control.services import in_the_open
from console.fleet.models import MODELS, Nic, Node, Removed, SpineLink
from console.metrics.catalog import METRICS
from console.placement import sentences
from console.placement.topology import State, Tier
from console.routing.models import Replica
from console.sessions import holders
from console.sessions.models import Job, Loss, Stream
from console.sessions.rules import effective_rules
from console.workloads.leader.conditions import CLUSTER_UNKNOWN, READY
from console.workloads.leader.election import ORCHESTRATORS, is_led
from console.workloads.models import Condition, Instance, Rollout, Workload
from telemetry.ingest.sources import ALIVE
from telemetry.models import Source
from telemetry.queries import ask
from telemetry.topics import of_source

SERIES_MAX: Final = 100_000  # of a query
SERIES_OF_TOPIC_MAX: Final = 5_000
CROSSINGS_MAX: Final = 5_000
INSTANCES_TOLD: Final = 10  # of a workload


def take_snapshot(now: datetime) -> Snapshot:
    maintenance = Node.objects.filter(state=State.MAINTENANCE.value).values_list("name", flat=True)
    removed = Removed.objects.filter(kind="node").exclude(name__in=Node.objects.values("name"))
    names = {*maintenance, *removed.values_list("name", flat=True)}
    left_out = {of_source("agent", name) for name in names}
    last_seen = dict(Source.objects.values_list("topic").annotate(Max("seen_at")).order_by())
    leaves: dict[str, tuple[str, ...]] = {}
    for node, leaf in Nic.objects.order_by("leaf__name").values_list("node__name", "leaf__name"):
        topic = of_source("agent", node)
        if topic not in left_out:
            leaves[topic] = (*leaves.get(topic, ()), leaf)
    replacement_since = authority.replaced_since()
    return Snapshot(
        at=now,
        last_seen={topic: min(at, now) for topic, at in last_seen.items() if topic not in left_out},
        joined={topic: at for topic, at in _joined() if topic not in left_out},
        leaves={node: tuple(dict.fromkeys(names)) for node, names in leaves.items()},
        crossings=_crossings(),
        session_drivers=frozenset(Job.objects.values_list("driver__name", flat=True)),
        lost_nodes=_lost_nodes(),
        without_holders=tuple(starmap(WithoutHolders, holders.missing(now))),
        redundant_nodes=frozenset(Stream.objects.exclude(code="").values_list("node__name", flat=True)),
        replicas=frozenset(Replica.objects.values_list("model__model", "name")),
        link_gbits=dict(SpineLink.objects.values_list("name", "gbits")),
        targets={topic: one for topic, one in _targets() if topic not in left_out},
        plaintext_control=settings.PLAIN_CONTROL,
        plaintext_targets=tuple(in_the_open()) if settings.PLAIN_CONTROL else (),
        root_replacement_since=replacement_since,
        root_replacement_pending=tuple(authority.following().behind) if replacement_since else (),
        missing_records=_missing_records(now),
        not_received=_not_received(now),
        rolled_up_to=_rolled_up_to(),
        workloads=_workloads(),
        has_leader=is_led(ORCHESTRATORS),
        cluster_silent_since=_cluster_silent_since(),
    )


def _joined() -> Iterator[tuple[str, datetime]]:
    for kind, model in MODELS.items():
        for name, joined_at in model.objects.values_list("name", "joined_at"):
            if joined_at:
                yield of_source(kind, name), joined_at


def _crossings() -> tuple[Crossing, ...]:
    """The streams of sessions that are placed across the spine, and whether their rules allow it."""
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
                why=sentences.unnamed(shard.why),  # everybody who sees the alert sees its evidence
            )
        )
    return tuple(found)


def _lost_nodes() -> tuple[LostNode, ...]:
    return tuple(
        LostNode(loss.session.name, loss.node.name, loss.verdict, loss.sentence, loss.since)
        for loss in Loss.objects.select_related("session", "node")
    )


def _targets() -> Iterator[tuple[str, TargetState]]:
    for one in Target.objects.filter(generation__gt=0).defer("secret", "digest"):
        state = TargetState(
            desired=one.generation,
            observed=one.observed_generation,
            problem=one.problem,
            fault=one.fault,
            fault_since=one.bad_since,
            answered_at=one.observed_at,
        )
        yield of_source(one.kind, one.name), state


def _workloads() -> tuple[WorkloadState, ...]:
    """With their condition, their latest rollout and their instances."""
    running = Q(instances__ended_at=None, instances__serving=True)
    latest = Rollout.objects.order_by("workload_id", "-pk").distinct("workload_id")
    rollouts = {one.workload_id: one for one in latest.select_related("to_revision")}
    ready = {one.workload_id: one for one in Condition.objects.filter(type=READY, status="False")}
    starting = defaultdict[int, list[str]](list)
    waiting = Instance.objects.filter(ended_at=None).exclude(state="ready").order_by("name")
    for instance in waiting.filter(workload__in=ready):
        starting[instance.workload_id].append(f"{instance.name} {instance.state}")
    found = Workload.objects.filter(deleting=False).order_by("name")
    return tuple(
        WorkloadState(
            name=one.name,
            replicas=one.replicas,
            ready_replicas=one.serving_count,
            not_ready_since=condition.since if (condition := ready.get(one.pk)) else None,
            reason=condition.reason if condition else "",
            message=condition.message if condition else "",
            instances=tuple(starting[one.pk][:INSTANCES_TOLD]),
            rollout=_rollout(rollouts[one.pk]) if one.pk in rollouts else None,
        )
        for one in found.annotate(serving_count=Count("instances", filter=running))
    )


def _rollout(one: Rollout) -> RolloutState:
    return RolloutState(
        revision=one.to_revision.number,
        phase=one.phase,
        reason=one.reason,
        sentence=one.sentence,
        switched=one.switched,
        total=one.total,
        started_at=one.started_at,
        ended_at=one.ended_at,
    )


def _cluster_silent_since() -> datetime | None:
    silent = Condition.objects.filter(reason=CLUSTER_UNKNOWN, workload__deleting=False)
    since: datetime | None = silent.aggregate(since=Min("since"))["since"]
    return since


def _missing_records(now: datetime) -> int:
    alive = Source.objects.filter(seen_at__gt=now - ALIVE)
    return int(alive.aggregate(sum=Sum("missing"))["sum"] or 0)


def _not_received(now: datetime) -> tuple[datetime, datetime] | None:
    """From the last report of former ingests, if any are known, until the start of the oldest that runs.
    None if none reports."""
    ingests, since = Source.objects.filter(kind="ingest"), now - ALIVE
    running = ingests.filter(seen_at__gt=since, started_at__lte=now).aggregate(at=Min("started_at"))
    former = ingests.filter(seen_at__lte=since).aggregate(at=Max("seen_at"))
    return running["at"] and (former["at"] or LONG_AGO, running["at"])


def _rolled_up_to() -> datetime | None:
    """The end of the last complete ten-second step; None before there is one."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT at FROM telemetry_watermark WHERE level = '10s' AND at > 0")
        row = cursor.fetchone()
    return datetime.fromtimestamp(row[0], UTC) if row else None


def tables(rule: Rule, now: float, existing: Callable[[str], tuple[str, ...]]) -> Tables:
    """The results of a rule's queries, about what exists: see `existing_topics`. Raises
    telemetry.queries.Unanswerable."""
    found = {}
    for name, query in rule.queries.items():
        question = query.question(METRICS, now)
        if question.topic.endswith("*"):
            question = replace(question, topics=existing(question.topic))
        found[name] = ask(question, now, SERIES_MAX, SERIES_OF_TOPIC_MAX).lines
    return found
