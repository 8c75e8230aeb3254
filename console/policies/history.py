"""Every version, for people: what it changed, who wanted it, what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.utils import timezone

from console.metrics.services import numbers
from console.orgs.models import Org
from console.policies import documents, sentences, services
from console.policies.models import PolicyVersion
from console.policies.sentences import Difference
from swdriver_shim.daemon.metrics import HIT, REQUESTED
from swdriver_shim.policy import OrgPolicies
from telemetry.queries import Fold
from telemetry.topics import of_org

AROUND: Final = timedelta(hours=1)
_STEP: Final = 60


@dataclass(frozen=True, slots=True)
class Effect:
    """Hit rates in the hour before and after, as far as there is one; None without traffic."""

    before: float | None
    after: float | None

    @property
    def points(self) -> float | None:
        if self.before is None or self.after is None:
            return None
        return 100 * (self.after - self.before)


@dataclass(frozen=True, slots=True)
class Told:
    """One version. `differences` are to the version before, by model where it is of one."""

    version: PolicyVersion
    sentence: str
    differences: list[Difference]
    effect: Effect | None
    is_active: bool

    @property
    def seconds(self) -> float | None:
        """Until the last driver had it."""
        change = self.version.change
        if change is None or change.applied_at is None:
            return None
        return (change.applied_at - change.at).total_seconds()


def told(org: Org, versions: Sequence[PolicyVersion]) -> list[Told]:
    """These versions, which follow one another, the newest first."""
    if not versions:
        return []
    held = services.active_policy(org)
    default = OrgPolicies(policy=held.cluster.policies.default)
    earlier = services.versions_of(org).filter(number__lt=versions[-1].number).first()
    documents_before = [*(each.document for each in versions[1:]), earlier.document if earlier else None]
    ends = [timezone.now(), *(each.made_at for each in versions)]
    return [
        Told(
            version=version,
            sentence=_sentence(version, default),
            differences=_differences(before, version.document, default),
            effect=effect(org, version.made_at, until),
            is_active=version.number == held.number,
        )
        for version, before, until in zip(versions, documents_before, ends, strict=False)
    ]


def _sentence(version: PolicyVersion, default: OrgPolicies) -> str:
    said = documents.read_org(version.document)
    prefix = "" if said else "As the cluster's default says. "
    return prefix + sentences.sentence((said or default).policy)


def _differences(before: str | None, after: str, default: OrgPolicies) -> list[Difference]:
    was = (documents.read_org(before) if before else None) or default
    will = documents.read_org(after) or default
    found = sentences.differences(was.policy, will.policy)
    for model in sorted({*was.models, *will.models}):
        found += [
            (f"{label}, {model}", one, other)
            for label, one, other in sentences.differences(was.of(model), will.of(model))
        ]
        if (model in was.models) != (model in will.models):
            one, other = "as all others", "a policy of its own"
            found.append((model, one, other) if model in will.models else (model, other, one))
    return found


def effect(org: Org, at: datetime, until: datetime) -> Effect:
    """Of a change at that moment: not beyond the next one."""
    end = min(at + AROUND, until)
    return Effect(_hit_rate(org, at - AROUND, at), _hit_rate(org, at, end))


def _hit_rate(org: Org, start: datetime, end: datetime) -> float | None:
    if (end - start).total_seconds() < _STEP:
        return None
    hit, requested = (
        sum(numbers(of_org(org.slug), metric, Fold.SUM, start, end, _STEP))
        for metric in (HIT, REQUESTED)
    )
    return hit / requested if requested else None
