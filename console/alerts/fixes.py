"""What would end an alert, with its plan; and what a remedy is, which finds that and does it."""

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
    """The call of the API that does it; `headers` beside the token and the kind of the body."""

    method: Literal["POST", "PUT"]
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fix:
    text: str
    kind: str = ""  # of the remedy that does it; of mere advice none
    button: str = ""
    plan: tuple[Change, ...] = ()
    call: Call | None = None
    refusal: str = ""  # why the one who asks can't do it
    followed_at: str = ""  # the page of the operation that may end it already
    page: str = ""  # the page that it speaks of

    @property
    def can_be_done(self) -> bool:
        return bool(self.kind) and not self.refusal


class Remedy(Protocol):
    def find(self, principal: Principal, alert: Alert) -> Fix | None:
        """What it would do, or why it can't help now; None where it has nothing to do with the case, or
        that is not theirs to see."""

    def do(self, principal: Principal, alert: Alert, reason: str) -> str:
        """Do it now, as it would be found now; the page where it is followed."""
