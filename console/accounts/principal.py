"""The one who asks, and what they may do: the only place where roles are weighed."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from django.core.exceptions import PermissionDenied

from console.accounts.roles import Role

if TYPE_CHECKING:
    from console.accounts.models import ApiToken, User


class Means(enum.StrEnum):
    """How the one who asks was recognised."""

    BROWSER = "browser"
    TOKEN = "token"  # noqa: S105
    JWT = "jwt"
    SYSTEM = "system"


class Refused(PermissionDenied):
    """They may know that it exists, but may not do this to it: 403 with this sentence."""


@dataclass(frozen=True)
class Principal:
    """A user by some means, or the system itself (no user). Immutable; one per request."""

    user: User | None
    means: Means
    memberships: Mapping[int, Role] = field(default_factory=dict)
    token: ApiToken | None = None

    @property
    def name(self) -> str:
        """The name that the audit trail freezes."""
        if self.user is None:
            return "system"
        if self.token is not None:
            return f"{self.user.username} by token {self.token.name}"
        return self.user.username

    @property
    def user_id(self) -> int | None:
        return self.user.pk if self.user else None

    @property
    def read_only(self) -> bool:
        return self.token is not None and self.token.read_only

    @property
    def platform_role(self) -> Role | None:
        """Their role everywhere. A token that is confined to an org has none."""
        return None if self._confined_to is not None else self._own_platform_role

    def role_in(self, org_id: int) -> Role | None:
        """Their role in one org: None for a stranger, who must not even learn that it exists."""
        if self._confined_to not in (None, org_id):
            return None
        held = (self.memberships.get(org_id), self._own_platform_role)
        return max((role for role in held if role is not None), default=None)

    def orgs_where(self, at_least: Role) -> frozenset[int]:
        """The orgs in which their membership alone gives `at_least`."""
        return frozenset(
            org_id
            for org_id, role in self.memberships.items()
            if role >= at_least and self._confined_to in (None, org_id)
        )

    def on_platform(self, at_least: Role) -> bool:
        return self.platform_role is not None and self.platform_role >= at_least

    def check_platform(self, at_least: Role) -> None:
        """Raise Refused unless they hold `at_least` on the whole platform."""
        if not self.on_platform(at_least):
            raise Refused(f"Only a {at_least.label} may do this.")

    def check_may_change(self) -> None:
        """Raise Refused where they came with something that may only read."""
        if self.read_only:
            raise Refused("This token may only read. Make one that may write.")

    @property
    def _own_platform_role(self) -> Role | None:
        if self.user is None:
            return Role.PLATFORM_ADMIN
        return Role(self.user.platform_role) if self.user.platform_role else None

    @property
    def _confined_to(self) -> int | None:
        return self.token.org_id if self.token is not None else None


SYSTEM = Principal(user=None, means=Means.SYSTEM)
