"""Tokens of previewed policies: what was previewed is what is applied, or nothing is."""

from __future__ import annotations

import hashlib
from typing import Final

from django.core import signing

from console.operations.services import StalePlan
from console.policies.services import ActivePolicy

HOURS_MAX: Final = 24
_SALT: Final = "console.policies.preview.tokens"


def token_of(held: ActivePolicy, document: str) -> str:
    """For putting this document in force instead of what is held now."""
    return signing.dumps(_facts(held, document), salt=_SALT)


def check(token: str, held: ActivePolicy, document: str) -> None:
    """Raises StalePlan unless this is what was planned, and for what is in force now."""
    try:
        planned = signing.loads(token, salt=_SALT, max_age=HOURS_MAX * 3600)
    except signing.SignatureExpired:
        raise _stale(held, f"The plan is older than {HOURS_MAX} hours. Preview again.") from None
    except signing.BadSignature:
        raise _stale(held, "The plan_token is not valid. Use one from a preview.") from None
    if planned[:3] != _facts(held, document)[:3]:
        raise _stale(held, "The policy or its limits have changed since the preview. Preview again.")
    if planned != _facts(held, document):
        raise _stale(held, "The plan is for another policy than this one. Preview again.")


def _stale(held: ActivePolicy, sentence: str) -> StalePlan:
    return StalePlan(sentence, version=held.number)


def _facts(held: ActivePolicy, document: str) -> list[int | str]:
    digest = hashlib.sha256(document.encode()).hexdigest()
    return [held.org.pk, held.number, held.cluster.number, digest]
