"""The one who asks, and what they may do: the only place where roles are weighed."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TypeVar

from django.core.exceptions import PermissionDenied
from django.http import Http404

from console.accounts.names import ACCOUNT, actor_name
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


@dataclass(frozen=True, slots=True)
class Authority:
    """What doing something took: a role in an org, or on the platform where there is no org."""

    org_id: int | None
    role: Role


class Owned(Protocol):
    """What belongs to an org, or to the platform where there is no org."""

    @property
    def org_id(self) -> int | None: ...


T = TypeVar("T", bound=Owned)


@dataclass(frozen=True)
class Principal:
    """A user by some means, or the system itself (no user). Immutable; one per request."""

    user: User | None
    means: Means
    memberships: Mapping[int, Role] = field(default_factory=dict)
    token: ApiToken | None = None
    expires_at: datetime | None = None  # of a JWT

    @property
    def name(self) -> str:
        """The name that the audit trail freezes."""
        if self.user is None:
            return "system"
        if self.token is not None:
            return actor_name(self.user.username, self.token.name)
        return actor_name(self.user.username)

    @property
    def user_id(self) -> int | None:
        return self.user.pk if self.user else None

    @property
    def owner(self) -> str:
        """As whom they take places and shares: a person is one, however many credentials they have."""
        return f"{ACCOUNT}{self.user_id}"

    @property
    def ends_at(self) -> datetime | None:
        """When their credential ends by itself. None for a browser's session and for the system."""
        return self.token.expires_at if self.token is not None else self.expires_at

    @property
    def credential(self) -> str:
        """The credential, for what is bound to it. All JWTs of a user may do the same: they are one."""
        if self.token is not None:
            return f"{self.means}:{self.token.public_id}"
        return f"{self.means}:{self.user_id}"

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

    def anywhere(self, at_least: Role) -> bool:
        """Whether they hold it on the platform or in any org."""
        return self.on_platform(at_least) or bool(self.orgs_where(at_least))

    def orgs_where(self, at_least: Role) -> frozenset[int]:
        """The orgs in which their membership alone gives `at_least`."""
        return frozenset(
            org_id
            for org_id, role in self.memberships.items()
            if role >= at_least and self._confined_to in (None, org_id)
        )

    def orgs_with(self, at_least: Role) -> frozenset[int] | None:
        """The orgs in which they hold `at_least` by whatever role; None for all of them."""
        if self.on_platform(at_least):
            return None
        confined = self._confined_to
        if confined is None:
            return self.orgs_where(at_least)
        return frozenset([confined] if self.holds(at_least, confined) else [])

    def on_platform(self, at_least: Role) -> bool:
        return self.holds(at_least, None)

    def holds(self, at_least: Role, org_id: int | None) -> bool:
        """Whether they hold `at_least` in an org, or on the platform where there is no org."""
        role = self._role_over(org_id)
        return role is not None and role >= at_least

    def check_platform(self, at_least: Role) -> None:
        """Raise Refused unless they hold `at_least` on the whole platform."""
        if not self.on_platform(at_least):
            raise Refused(f"Only a {at_least.label} may do this.")

    def check(self, needed: Authority, kind: str = "thing") -> None:
        """Raise Http404 where they have no role over it at all, Refused where their role is less."""
        role = self._role_over(needed.org_id)
        if role is None:
            raise Http404(f"There is no such {kind}, or it is not yours to see.")
        if role < needed.role:
            raise Refused(f"This needs the role {needed.role.label}; yours is {role.label}.")

    def checked(self, thing: T | None, at_least: Role, kind: str) -> T:
        """A thing of an org or of the platform, if it is there, for somebody with that role over it.

        A stranger gets Http404, as for what is not there; who may see it but not do this gets Refused.
        """
        if thing is None:
            raise Http404(f"There is no such {kind}, or it is not yours to see.")
        self.check(Authority(thing.org_id, at_least), kind)
        return thing

    def check_may_change(self, on_platform: Role | None = None) -> None:
        """Raise Refused to what may only read and to who lacks this role on the platform."""
        if self.read_only:
            raise Refused("This token may only read. Make one that may write.")
        if on_platform is not None:
            self.check_platform(on_platform)

    def _role_over(self, org_id: int | None) -> Role | None:
        return self.platform_role if org_id is None else self.role_in(org_id)

    @property
    def _own_platform_role(self) -> Role | None:
        if self.user is None:
            return Role.PLATFORM_ADMIN
        return Role(self.user.platform_role) if self.user.platform_role else None

    @property
    def _confined_to(self) -> int | None:
        return self.token.org_id if self.token is not None else None


SYSTEM = Principal(user=None, means=Means.SYSTEM)
