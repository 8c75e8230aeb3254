"""What a policy would do to the hits that brains route requests for.

Nobody keeps which columns each request was sent for. What is known is how many tokens brains expected in
caches, and which part of an org's hits a replay of its traffic loses under the policy. That part of the
expected tokens is taken to be absent: requests that brains would then send elsewhere are not predicted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from console.orgs.models import Org
from console.policies.preview.estimates import Foretold
from console.routing import traffic
from console.routing.models import Replica
from swdriver_shim.policy import OrgPolicies
from telemetry.queries import Unanswerable

log = logging.getLogger(__name__)

SECONDS: Final = 3600  # of routing that is looked at


@dataclass(frozen=True, slots=True)
class RoutedHits:
    """Prompt tokens: expected in caches by brains in the last `seconds`, and of those absent under the
    policy; negative if more would be there. `error_tokens`: of sampling, two standard errors."""

    seconds: int
    expected_tokens: int
    absent_tokens: int
    error_tokens: int


def routed_hits(
    org: Org, told: Foretold, now: OrgPolicies, proposed: OrgPolicies, model: str = ""
) -> RoutedHits | None:
    """Of the models that the preview is of: see `foretell`. None if the preview or routing has no
    hits, or too many models to tell apart."""
    was, will = told.preview.now, told.preview.proposed
    if not was.hit_rate or will.hit_rate is None:
        return None
    served = _served(model, {*now.models, *proposed.models})
    try:
        hits = traffic.expected_hits(org.slug, SECONDS)
    except Unanswerable as error:
        log.warning("Expected hits of %s are not known: %s", org.slug, error)
        return None
    expected = sum(tokens for name, tokens in hits.items() if name in served)
    if expected < 1:
        return None
    return RoutedHits(
        SECONDS,
        round(expected),
        round(expected * (1.0 - will.hit_rate / was.hit_rate)),
        round(expected * will.error / was.hit_rate),
    )


def _served(model: str, own: set[str]) -> set[str]:
    """What clients call the models whose drivers run this one; without it, one that has no policy of its
    own."""
    pairs = Replica.objects.exclude(driver=None).values_list("model__model", "driver__model__name")
    return {name for name, runs in pairs.distinct() if (runs == model if model else runs not in own)}
