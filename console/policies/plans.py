"""Plan tokens: what was looked at is what is applied, or nothing is."""

from __future__ import annotations

import hashlib
from typing import Final

from django.core import signing

from console.policies.services import InForce

HOURS_MAX: Final = 24
_SALT: Final = "console.policies.plans"


class StalePlan(Exception):
    """Why the plan does not hold any more, in a sentence."""


def token_of(held: InForce, document: str) -> str:
    """For putting this document in force instead of what is held now."""
    return signing.dumps(_facts(held, document), salt=_SALT)


def check(token: str, held: InForce, document: str) -> None:
    """Raises StalePlan unless this is what was planned, and for what is in force now."""
    try:
        planned = signing.loads(token, salt=_SALT, max_age=HOURS_MAX * 3600)
    except signing.SignatureExpired:
        raise StalePlan(f"The plan is older than {HOURS_MAX} hours. Make it again.") from None
    except signing.BadSignature:
        raise StalePlan("The plan_token is not one that a preview gave out.") from None
    if planned[:3] != _facts(held, document)[:3]:
        raise StalePlan("The policy or its limits were changed since the plan was made. Make it again.")
    if planned != _facts(held, document):
        raise StalePlan("The plan was made for another policy than this one. Make it again.")


def _facts(held: InForce, document: str) -> list[int | str]:
    digest = hashlib.sha256(document.encode()).hexdigest()
    return [held.org.pk, held.number, held.cluster.number, digest]
