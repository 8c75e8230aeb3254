"""One change for many orgs: looked at together, and made together or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import transaction

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.operations.services import StalePlan
from console.orgs.models import Org
from console.orgs.services import for_change_of_all, get_orgs
from console.policies import documents, sentences, services
from console.policies.services import ActivePolicy
from swdriver_shim.policy import OrgPolicies, Policy

ORGS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Planned:
    """What it would do to one org, or why it may not; `saved` once it has."""

    held: ActivePolicy
    wanted: OrgPolicies
    refused: list[str]
    saved: ActivePolicy | None = None

    @property
    def org(self) -> Org:
        return self.held.org

    @property
    def active(self) -> ActivePolicy:
        return self.saved or self.held

    @property
    def differences(self) -> list[sentences.Difference]:
        return sentences.differences(self.held.said.policy, self.wanted.policy)

    @property
    def sentence(self) -> str:
        return sentences.sentence(self.wanted.policy)


def plan(principal: Principal, slugs: Iterable[str], changes: Mapping[str, Any]) -> list[Planned]:
    """For each org, in order of slugs: policies of single models stay as they are.

    Raises Http404 or Refused, as for each of them alone, and documents.Malformed for what is no policy.
    """
    orgs = get_orgs(principal, _few(slugs), Role.ORG_ADMIN)
    return [_planned(held, changes) for held in services.active_policies(orgs)]


def _few(slugs: Iterable[str]) -> set[str]:
    """Raises ValidationError for more than one change may be for."""
    found = set(slugs)
    if len(found) > ORGS_MAX:
        raise ValidationError(f"At most {ORGS_MAX} orgs at a time.")
    return found


def _planned(held: ActivePolicy, changes: Mapping[str, Any]) -> Planned:
    said = held.said
    fields = {**documents.spelled_out(said.policy), **changes}
    wanted = OrgPolicies(policy=documents.read_struct(fields, Policy), models=said.models)
    refused = [str(problem) for problem in documents.problems(wanted, held.cluster.policies.limits)]
    return Planned(held, wanted, refused)


def token_of(planned: Sequence[Planned]) -> str:
    """Another one as soon as any of it is another one."""
    facts = [
        (one.org.slug, one.held.number, one.held.cluster.number, documents.write(one.wanted))
        for one in planned
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@transaction.atomic
def save(
    principal: Principal,
    slugs: Iterable[str],
    changes: Mapping[str, Any],
    *,
    reason: str,
    token: str | None = None,
) -> list[Planned]:
    """A new version for each org that it changes; those for which it changes nothing keep theirs.

    Raises what `plan` does; ValidationError where a limit refuses one of them; StalePlan for a token of
    another plan than the one now.
    """
    orgs = for_change_of_all(principal, _few(slugs))
    cluster = services.settled_cluster()
    planned = [_planned(held, changes) for held in services.active_policies(orgs, cluster)]
    if token is not None and token != token_of(planned):
        raise StalePlan
    refused = [f"{one.org.name}: {sentence}" for one in planned for sentence in one.refused]
    if refused:
        raise ValidationError(refused[:20])
    return [replace(one, saved=_saved(principal, one, reason)) for one in planned]


def _saved(principal: Principal, one: Planned, reason: str) -> ActivePolicy:
    """Where nothing changes, an org that follows the default goes on to follow it."""
    if one.wanted == one.held.said:
        return one.held
    return services.replace(principal, one.held, one.wanted, reason=reason)
