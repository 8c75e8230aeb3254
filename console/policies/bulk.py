"""One change for many orgs: looked at together, and made together or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import transaction

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.operations.services import StalePlan
from console.orgs.models import Org
from console.orgs.services import for_change, get_org
from console.policies import documents, sentences, services
from console.policies.services import ActivePolicy
from swdriver_shim.policy import OrgPolicies, Policy

ORGS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Planned:
    """What it would do to one org, or why it may not."""

    held: ActivePolicy
    wanted: OrgPolicies
    refused: list[str]

    @property
    def org(self) -> Org:
        return self.held.org

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
    listed = sorted(set(slugs))
    if len(listed) > ORGS_MAX:
        raise ValidationError(f"At most {ORGS_MAX} orgs at a time.")
    orgs = [get_org(principal, slug, Role.ORG_ADMIN) for slug in listed]
    return [_planned(held, changes) for held in services.active_policies(orgs)]


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
) -> list[ActivePolicy]:
    """A new version for each org that it changes; those for which it changes nothing keep theirs.

    Raises what `plan` does; ValidationError where a limit refuses one of them; StalePlan for a token of
    another plan than the one now.
    """
    for slug in sorted(set(slugs)):  # held in one order, so that two never wait for each other
        for_change(principal, slug)
    planned = plan(principal, slugs, changes)
    if token is not None and token != token_of(planned):
        raise StalePlan
    refused = [f"{one.org.name}: {sentence}" for one in planned for sentence in one.refused]
    if refused:
        raise ValidationError(refused[:20])
    return [services.set_policy(principal, one.org, one.wanted, reason=reason) for one in planned]
