"""One tick: each rule that is due reads, judges, and what it found is taken down.

Any number of evaluators may be at it. What stops one rule is noted with it, and stops no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from console.alerts import hiding, world
from console.alerts.catalogue import RULES
from console.alerts.flipping import fingerprint, first_seen, observe
from console.alerts.life import OPEN, Verdict
from console.alerts.limits import limits_of
from console.alerts.models import SENTENCE_CHARACTERS_MAX, Alert, Evaluation
from console.alerts.rules import Finding, Rule, Scope, World, name_of, patience
from console.alerts.silence import is_silent, numbers_late_seconds
from console.orgs.models import Org
from console.sessions.models import Session
from telemetry.queries import Unanswerable
from telemetry.topics import ORG, SESSION, of_org, of_session

log = logging.getLogger(__name__)

UNHEARD_SECONDS: Final = 30.0  # from when on the numbers of a topic say nothing
NUMBERS_LATE_SECONDS: Final = 60.0  # and those of all
INSTANCES_MAX: Final = 5000  # of a rule: more breaches than that are one disaster, and told as such


def tick(at: datetime, rules: Iterable[Rule] = RULES) -> int:
    """Evaluate what is due; the number of alerts whose state it changed."""
    now = world.world(at)
    flips = sum(_evaluate(rule, now) for rule in due(rules, now.at))
    hiding.update(now)
    return flips


def due(rules: Iterable[Rule], at: datetime) -> list[Rule]:
    """Those whose last evaluation is long enough ago: half a tick early is not too early."""
    last = dict(Evaluation.objects.values_list("rule", "at"))
    early = timedelta(seconds=5)
    return [
        rule
        for rule in rules
        if rule.slug not in last or at - last[rule.slug] >= timedelta(seconds=rule.every_seconds) - early
    ]


def _evaluate(rule: Rule, now: World) -> int:
    began, flips, problem = time.perf_counter(), 0, ""
    try:
        flips, problem = _apply(rule, now)
    except Unanswerable as error:
        problem = str(error)
    if problem:
        log.warning("rule %s: %s", rule.slug, problem)
    took_ms = (time.perf_counter() - began) * 1000
    Evaluation.objects.update_or_create(
        rule=rule.slug,
        defaults={"at": now.at, "took_ms": took_ms, "problem": problem[:SENTENCE_CHARACTERS_MAX]},
    )
    return flips


def _apply(rule: Rule, now: World) -> tuple[int, str]:
    """Judge, and hold it against what is there. How many flips that made, and what there is to say."""
    limits = limits_of(rule)
    judged = rule.judge(world.tables(rule, now.at.timestamp()), now, limits)
    found = {
        fingerprint(rule.slug, one.topic, one.labels): one for one in judged if limits.enabled(one.topic)
    }
    breaches = [mark for mark, one in found.items() if one.verdict is Verdict.BREACH]
    if len(breaches) > INSTANCES_MAX:
        return (
            0,
            f"{len(breaches)} breaches at once are more than {INSTANCES_MAX}: the rule is too strict.",
        )
    alerts = Alert.objects.filter(rule=rule.slug)
    known = alerts.filter(state__in=OPEN) | alerts.filter(fingerprint__in=breaches)
    flips, orgs, new = 0, _orgs(found), set(breaches)
    for alert in known.select_related("org"):
        finding = found.get(alert.fingerprint) or _unmentioned(alert)
        if limits.enabled(alert.topic):
            finding = _as_certain(rule, finding, now)
        flips += observe(alert, finding, patience(limits(alert.topic)), now.at)
        new.discard(alert.fingerprint)
    for mark in sorted(new):
        finding = _as_certain(rule, found[mark], now)
        if fresh := first_seen(rule, finding, orgs.get(finding.topic), now.at):
            flips += observe(fresh, finding, patience(limits(finding.topic)), now.at)
    return flips, ""


def _unmentioned(alert: Alert) -> Finding:
    return Finding(alert.topic, Verdict.FINE, "it is not seen any more", labels=alert.labels)


def _as_certain(rule: Rule, finding: Finding, now: World) -> Finding:
    """The finding, or that nothing is known: numbers of who is silent tell nothing, good or bad."""
    if rule.outlives_silence or not (why := _why_unknown(rule, finding.topic, now)):
        return finding
    return replace(finding, verdict=Verdict.NO_DATA, sentence=why)


def _why_unknown(rule: Rule, topic: str, now: World) -> str:
    if numbers_late_seconds(now) > NUMBERS_LATE_SECONDS:
        return "no numbers arrive, of anybody"
    if rule.scope in (Scope.NODE, Scope.DRIVER):
        return "it is silent" if is_silent(now, topic, UNHEARD_SECONDS) else ""
    drivers = [one for one in now.heard if one.startswith("driver:")]
    of_drivers = rule.scope in (Scope.ORG, Scope.SESSION)
    if of_drivers and drivers and all(is_silent(now, one, UNHEARD_SECONDS) for one in drivers):
        return "all drivers are silent"
    return ""


def _orgs(found: Mapping[str, Finding]) -> dict[str, Org]:
    """By topic: whose org it is, or whose session. All else concerns the platform."""
    slugs = _names(found, ORG)
    sessions = Session.objects.filter(name__in=_names(found, SESSION), org__isnull=False)
    return {of_org(org.slug): org for org in Org.objects.filter(slug__in=slugs)} | {
        of_session(one.name): one.org for one in sessions.select_related("org") if one.org
    }


def _names(found: Mapping[str, Finding], kind: str) -> set[str]:
    return {name_of(one.topic) for one in found.values() if one.topic.startswith(f"{kind}:")}
