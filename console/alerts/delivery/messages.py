"""The body of a notification for each kind of channel. Pure.

All notifications of an episode carry its `dedup_key`, so that a receiver can recognize a repetition.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final

from console.alerts.rules.rule import Severity

MARKS: Final = {"firing": "FIRING", "resolved": "RESOLVED", "test": "TEST"}
_PAGERDUTY: Final = {Severity.PAGE: "critical", Severity.TICKET: "warning", Severity.NOTICE: "info"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One alert in a notification."""

    what: str  # firing, resolved or test
    dedup_key: str
    title: str
    subject: str
    sentence: str
    severity: str
    rule: str
    labels: Mapping[str, str] = field(default_factory=dict)
    since: datetime
    value: float | None = None
    threshold: float | None = None
    suggested_fix: str = ""
    address: str  # URL of its page
    runbook: str  # URL

    @property
    def headline(self) -> str:
        return f"{MARKS[self.what]} {self.title}: {self.subject}"


def as_webhook(messages: Sequence[Message]) -> dict[str, Any]:
    return {"version": 1, "what": messages[0].what, "alerts": [_plain(one) for one in messages]}


def _plain(one: Message) -> dict[str, Any]:
    return {**asdict(one), "since": one.since.isoformat()}


def signature(secret: str, body: bytes, at: int) -> str:
    """Proves to a receiver who sent the body and when, so that a recorded request cannot be replayed
    later. `at` is in seconds since 1970. Each attempt has its own signature."""
    signed = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={signed}"


def idempotency_key(messages: Sequence[Message]) -> str:
    """A key that is the same for every attempt to send the same messages."""
    events = [(one.dedup_key, one.what) for one in messages]
    return hashlib.sha256(json.dumps(events).encode()).hexdigest()[:32]


def as_slack(messages: Sequence[Message]) -> dict[str, Any]:
    """Mattermost and others accept it, too."""
    lines = []
    for one in messages:
        lines += [f"*{_quoted(one.headline)}*", _quoted(one.sentence)]
        if one.what == "firing" and one.suggested_fix:
            lines.append(f"Suggested fix: {_quoted(one.suggested_fix)}")
        lines.append(f"<{one.address}|Alert> · <{one.runbook}|Runbook>")
    return {"text": "\n".join(lines)}


def _quoted(text: str) -> str:
    """Escaped, so that the name of a node cannot mention a whole channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def as_pagerduty(one: Message, routing_key: str) -> dict[str, Any]:
    """An event of the Events API v2. A resolved alert resolves its incident by the shared key."""
    return {
        "routing_key": routing_key,
        "event_action": "resolve" if one.what == "resolved" else "trigger",
        "dedup_key": one.dedup_key,
        "payload": {
            "summary": f"{one.title}: {one.sentence}"[:1024],
            "source": one.subject,
            "severity": _PAGERDUTY[Severity(one.severity)],
            "timestamp": one.since.isoformat(),
            "class": one.rule,
            "custom_details": _plain(one),
        },
        "links": [
            {"href": one.address, "text": "alert"},
            {"href": one.runbook, "text": "runbook"},
        ],
    }


def subject_line(messages: Sequence[Message]) -> str:
    first = messages[0]
    if len(messages) == 1:
        return first.headline
    return f"{MARKS[first.what]} {first.title}: {len(messages)} alerts"


def as_text(messages: Sequence[Message]) -> str:
    """The body of an e-mail."""
    parts = []
    for one in messages:
        lines = [one.headline, one.sentence, f"Since {one.since:%Y-%m-%d %H:%M:%S} UTC"]
        if one.what == "firing" and one.suggested_fix:
            lines.append(f"Suggested fix: {one.suggested_fix}")
        parts.append("\n".join([*lines, f"Alert: {one.address}", f"Runbook: {one.runbook}"]))
    return "\n\n".join(parts) + "\n"
