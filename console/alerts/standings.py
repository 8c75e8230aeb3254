"""Judges of who does not follow its document: by its numbers, and by its answers to the console. Pure.

Both are needed. Who was never reached follows its older document and says that all is well; and who is
asked in vain may still say in its numbers how far it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from console.alerts import judges
from console.alerts.life import Verdict
from console.alerts.rules import Finding, Judge, LimitsOf, Standing, Tables, World, name_of
from telemetry.units import duration


def not_followed(ahead: str, follower: str, kind: str) -> Judge:
    """A breach for each of a kind that is behind, or of which the console gets no valid answer."""
    by_numbers = judges.behind(ahead, follower, "{name} is {value:.0f} documents behind")

    def judge(tables: Tables, world: World, limits: LimitsOf) -> Iterator[Finding]:
        said = {one.topic: one for one in by_numbers(tables, world, limits)}
        known = {topic for topic in world.standings if topic.startswith(f"{kind}:")}
        for topic in sorted({*said, *known}):
            finding = said.get(topic) or Finding(topic, Verdict.FINE, "it follows its document")
            standing = world.standings.get(topic)
            yield _with(finding, standing, world.at) if standing else finding

    return judge


def _with(finding: Finding, standing: Standing, now: datetime) -> Finding:
    """What the console knows of it, beside its own numbers or in place of them."""
    late = standing.told - standing.follows
    if standing.fault:
        finding = replace(finding, verdict=Verdict.BREACH, sentence=_unanswered(finding, standing))
    elif late > 0 and finding.verdict is Verdict.FINE:
        said = f"{name_of(finding.topic)} is {late} documents behind"
        finding = replace(finding, verdict=Verdict.BREACH, sentence=said, value=late, threshold=0)
    return replace(finding, evidence={**finding.evidence, **_evidence(standing, now)})


def _unanswered(finding: Finding, standing: Standing) -> str:
    why = standing.problem.rstrip(".")
    return f"{name_of(finding.topic)} gives the console no valid answer: {why}"


def _evidence(standing: Standing, now: datetime) -> dict[str, Any]:
    return {
        "why": standing.problem,
        "fault": standing.fault,
        "no_valid_answer_since": _moment(standing.faulty_since, now),
        "last_valid_answer": _moment(standing.seen_at, now),
        "follows": f"document {standing.follows} of {standing.told}",
    }


def _moment(at: datetime | None, now: datetime) -> str | None:
    """With its age, as of this evaluation."""
    if at is None:
        return None
    seconds = max(0, round((now - at).total_seconds()))
    return f"{at:%Y-%m-%d %H:%M:%S} UTC, {duration(seconds)} before"
