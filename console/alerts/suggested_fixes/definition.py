"""A suggested fix with its plan, and the action that applies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from console.accounts.principal import Principal
from console.alerts.models import Alert


@dataclass(frozen=True, slots=True)
class Change:
    """A line of a plan."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Call:
    """The API request that applies a fix. `headers` are those besides token and content type."""

    method: Literal["POST", "PUT"]
    path: str  # after /api/v1
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SuggestedFix:
    text: str
    action: str = ""  # its name; empty for plain advice
    button: str = ""
    plan: tuple[Change, ...] = ()
    call: Call | None = None
    refusal: str = ""  # why this principal cannot apply it
    operation_page: str = ""  # of the running operation that may fix the alert
    page: str = ""  # the page that the text mentions

    @property
    def can_apply(self) -> bool:
        return bool(self.action) and not self.refusal


class Action(Protocol):
    def suggest(self, principal: Principal, alert: Alert) -> SuggestedFix | None:
        """What the action would do now, or why it cannot help. None if it does not apply to the alert,
        or the principal may not see the object."""

    def apply(self, principal: Principal, alert: Alert, reason: str) -> str:
        """Apply the fix as it would be suggested now. Returns the page that shows the result."""
