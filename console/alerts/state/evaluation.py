"""One tick: each rule that is due is evaluated, and its alerts are updated.

Several evaluators may run at the same time. An error in one rule, whatever it is, is stored with that
rule, and does not stop the others.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache
from typing import Final

from django.db import DatabaseError, InterfaceError, connection

from console.alerts.conditions.condition import Finding, Snapshot, name_of
from console.alerts.conditions.reporting import is_silent, telemetry_late_seconds
from console.alerts.models import TEXT_CHARACTERS_MAX, Alert, Evaluation
from console.alerts.rules.catalogue import RULES
from console.alerts.rules.rule import Rule, Scope, delays
from console.alerts.rules.thresholds import RuleThresholds, thresholds_of
from console.alerts.state import suppression
from console.alerts.state.lifecycle import OPEN, Verdict
from console.alerts.state.snapshot import tables, take_snapshot
from console.alerts.state.transitions import fingerprint, first_seen, observe, retire
from console.metrics.services import existing_topics
from console.orgs.models import Org
from console.periodic import is_locked
from console.sessions.models import Session
from console.workloads.models import Workload
from telemetry.metrics import OTHER
from telemetry.queries import Unanswerable
from telemetry.topics import ORG, SESSION, WORKLOAD, of_org, of_session

log = logging.getLogger(__name__)

SILENT_SECONDS: Final = 30.0  # after which the metrics of a topic are no data
TELEMETRY_LATE_SECONDS: Final = 60.0  # after which all metrics are
INSTANCES_OF_TOPIC_MAX: Final = 200  # of a rule, and its others are one alert: see `_bounded`
INSTANCES_MAX: Final = 5000  # of a rule: more breaches are reported as one problem


def tick(at: datetime, rules: Iterable[Rule] = RULES) -> int:
    """Evaluate the rules that are due. Returns the number of state transitions."""
    now = take_snapshot(at)
    chosen = due(rules, now.at)
    stored, done = _stored(chosen), list[Evaluation]()
    try:
        count = sum(_evaluate(rule, now, stored, done) for rule in chosen)
    finally:
        Evaluation.objects.bulk_create(
            done,
            update_conflicts=True,
            unique_fields=["rule"],
            update_fields=["at", "took_ms", "problem"],
        )
    suppression.update(now)
    return count


@dataclass(frozen=True, slots=True)
class _Stored:
    """What is stored of the rules that are due, read at once. An alert that changes meanwhile is seen by
    the next tick: see `transitions`."""

    thresholds: Mapping[str, RuleThresholds]  # by rule, as `open`
    open: Mapping[str, list[Alert]]
    topics: Callable[[str], tuple[str, ...]]  # `existing_topics`, each kind read once


def _stored(rules: Sequence[Rule]) -> _Stored:
    found: dict[str, list[Alert]] = {rule.slug: [] for rule in rules}
    for alert in Alert.objects.filter(rule__in=found, state__in=OPEN).select_related("org"):
        found[alert.rule].append(alert)
    return _Stored(thresholds_of(rules), found, cache(existing_topics))


def due(rules: Iterable[Rule], at: datetime) -> list[Rule]:
    """The rules whose last evaluation is long enough ago, give or take half a tick; or in the future, by
    a clock that was ahead."""
    last = dict(Evaluation.objects.values_list("rule", "at"))
    early = timedelta(seconds=5)
    return [
        rule
        for rule in rules
        if rule.slug not in last
        or not -early <= at - last[rule.slug] < timedelta(seconds=rule.every_seconds) - early
    ]


def _evaluate(rule: Rule, now: Snapshot, stored: _Stored, done: list[Evaluation]) -> int:
    began, count, problem = time.perf_counter(), 0, ""
    try:
        count, problem = _apply(rule, now, stored)
        if problem:
            log.warning("rule %s: %s", rule.slug, problem)
    except Unanswerable as error:
        problem = str(error)
        log.warning("rule %s: %s", rule.slug, problem)
    except Exception as error:  # whatever it is, it is this rule's, and others are evaluated
        if isinstance(error, DatabaseError | InterfaceError) and not connection.is_usable():
            raise  # the database is away: for all rules
        # Members of all orgs read the problem, so it has nothing of what was evaluated.
        if is_locked(error):
            problem = "A table that it reads is locked, as by a migration."
            log.warning("rule %s: %s", rule.slug, problem)
        else:
            problem = f"It stopped with {type(error).__name__}: see the worker's log."
            log.exception("rule %s can't be evaluated", rule.slug)
    took_ms = (time.perf_counter() - began) * 1000
    done.append(
        Evaluation(rule=rule.slug, at=now.at, took_ms=took_ms, problem=problem[:TEXT_CHARACTERS_MAX])
    )
    return count


def _apply(rule: Rule, now: Snapshot, stored: _Stored) -> tuple[int, str]:
    """Evaluate a rule and update its alerts. Returns the number of transitions, and a problem if any."""
    thresholds = stored.thresholds[rule.slug]
    read = tables(rule, now.at.timestamp(), stored.topics)
    findings = rule.condition(read, now, thresholds)
    found = {
        fingerprint(rule.slug, one.topic, one.labels): one
        for one in findings
        if thresholds.enabled(one.topic)
    }
    is_open = {alert.fingerprint for alert in stored.open[rule.slug]}
    found = _bounded(rule, found, is_open)
    breaches = [mark for mark, one in found.items() if one.verdict is Verdict.BREACH]
    if len(breaches) > INSTANCES_MAX:
        most = Counter(found[mark].topic for mark in breaches).most_common(5)
        log.warning("rule %s: most breaches are of %s", rule.slug, most)
        return (
            0,
            f"{len(breaches)} breaches exceed the limit of {INSTANCES_MAX}: the rule is too strict.",
        )
    count, new = 0, set(breaches) - is_open
    closed = Alert.objects.filter(fingerprint__in=new).select_related("org") if new else ()
    known = [*stored.open[rule.slug], *closed]
    orgs = _orgs(
        found[mark].topic for mark in {*new, *(one.fingerprint for one in known)} & found.keys()
    )
    episodes = dict[str, int]()
    for alert in known:
        owner, mark = orgs.get(alert.topic), alert.fingerprint
        if mark in found and alert.org and owner and alert.org != owner:
            episodes[mark] = alert.episode
            retire(alert)
            if found[mark].verdict is Verdict.BREACH:
                new.add(mark)
            if not alert.is_open:
                continue
        finding = found.get(alert.fingerprint) or _not_reported(alert)
        if thresholds.enabled(alert.topic):
            finding = _unless_no_data(rule, finding, now)
        count += observe(alert, finding, delays(thresholds(alert.topic)), now.at)
        new.discard(alert.fingerprint)
    for mark in sorted(new):
        finding = _unless_no_data(rule, found[mark], now)
        org, episode = orgs.get(finding.topic), episodes.get(mark, 0)
        if alert_row := first_seen(rule, finding, org, now.at, episode):
            count += observe(alert_row, finding, delays(thresholds(finding.topic)), now.at)
    return count, ""


def _bounded(rule: Rule, found: Mapping[str, Finding], is_open: set[str]) -> dict[str, Finding]:
    """At most so many breaches of a topic: those that are open and then the worst. The others are one
    finding together, so that the flood of one process leaves room for the alerts of others. Breaches of
    the fleet are of many processes: there may be nearly as many as of a rule."""
    of_topic_max = INSTANCES_MAX - 1 if rule.scope is Scope.FLEET else INSTANCES_OF_TOPIC_MAX
    bounded, by_topic = dict(found), defaultdict[str, list[str]](list)
    for mark, one in found.items():
        if one.verdict is Verdict.BREACH:
            by_topic[one.topic].append(mark)
    for topic, marks in by_topic.items():
        if len(marks) <= of_topic_max:
            continue
        ranked = sorted(marks, key=lambda mark: (mark not in is_open, -(found[mark].value or 0), mark))
        others = ranked[max(of_topic_max, len(is_open.intersection(marks))) :]
        for mark in others:
            del bounded[mark]
        if others:
            worst = found[others[0]]
            sentence = f"{len(others):,} more at {name_of(topic)}, such as: {worst.sentence}"
            rest = replace(worst, sentence=sentence, labels=dict.fromkeys(worst.labels, OTHER))
            bounded[fingerprint(rule.slug, topic, rest.labels)] = rest
    return bounded


def _not_reported(alert: Alert) -> Finding:
    return Finding(alert.topic, Verdict.OK, "the condition is clear", labels=alert.labels)


def _unless_no_data(rule: Rule, finding: Finding, now: Snapshot) -> Finding:
    """The finding, or NO_DATA if its process is not reporting: then its metrics mean nothing."""
    if rule.ignores_missing_data or not (why := _why_no_data(rule, finding.topic, now)):
        return finding
    return replace(finding, verdict=Verdict.NO_DATA, sentence=why)


def _why_no_data(rule: Rule, topic: str, now: Snapshot) -> str:
    if telemetry_late_seconds(now) > TELEMETRY_LATE_SECONDS:
        return "no telemetry arrives from any process"
    if rule.scope in (Scope.NODE, Scope.DRIVER, Scope.BRAIN):
        return f"{name_of(topic)} is not reporting" if is_silent(now, topic, SILENT_SECONDS) else ""
    drivers = [one for one in now.last_seen if one.startswith("driver:")]
    of_drivers = rule.scope in (Scope.ORG, Scope.SESSION)
    if of_drivers and drivers and all(is_silent(now, one, SILENT_SECONDS) for one in drivers):
        return "no driver is reporting"
    return ""


def _orgs(topics: Iterable[str]) -> dict[str, Org]:
    """The org of each topic of an org, a session or a workload. All others belong to the platform."""
    asked = set(topics)
    if not asked:  # of most rules; to make three queries that ask for nothing takes milliseconds
        return {}
    slugs = _names(asked, ORG)
    sessions = Session.objects.filter(name__in=_names(asked, SESSION), org__isnull=False)
    workloads = Workload.objects.filter(name__in=_names(asked, WORKLOAD), org__isnull=False)
    return (
        {of_org(org.slug): org for org in Org.objects.filter(slug__in=slugs)}
        | {of_session(one.name): one.org for one in sessions.select_related("org") if one.org}
        | {one.topic: one.org for one in workloads.select_related("org") if one.org}
    )


def _names(topics: Iterable[str], kind: str) -> set[str]:
    return {name_of(topic) for topic in topics if topic.startswith(f"{kind}:")}
