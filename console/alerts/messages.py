"""What people are told, as each kind of receiver wants to read it. Pure.

Whatever is said of an episode carries its `dedup_key`: who is told twice can know it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from console.alerts.rules import Severity

MARKS: Final = {"firing": "FIRING", "resolved": "RESOLVED", "test": "TEST"}
_PAGERDUTY: Final = {Severity.PAGE: "critical", Severity.TICKET: "warning", Severity.NOTICE: "info"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One alert, as it is to be told."""

    what: str  # firing, resolved or test
    dedup_key: str
    title: str
    subject: str
    sentence: str
    severity: str
    rule: str
    labels: Mapping[str, str]
    since: datetime
    value: float | None
    threshold: float | None
    remedy: str
    address: str  # of its page
    runbook: str  # the address of that

    @property
    def headline(self) -> str:
        return f"{MARKS[self.what]} {self.title}: {self.subject}"


def as_webhook(messages: Sequence[Message]) -> dict[str, Any]:
    return {"version": 1, "what": messages[0].what, "alerts": [_plain(one) for one in messages]}


def _plain(one: Message) -> dict[str, Any]:
    return {
        "dedup_key": one.dedup_key,
        "what": one.what,
        "rule": one.rule,
        "severity": one.severity,
        "title": one.title,
        "subject": one.subject,
        "sentence": one.sentence,
        "labels": dict(one.labels),
        "since": one.since.isoformat(),
        "value": one.value,
        "threshold": one.threshold,
        "remedy": one.remedy,
        "address": one.address,
        "runbook": one.runbook,
    }


def signature(secret: str, body: bytes, at: int) -> str:
    """By which a receiver knows that it was us, and when: so what somebody has recorded is worth nothing
    later. `at`: seconds since 1970. Each attempt is signed anew."""
    signed = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={signed}"


def idempotency_key(messages: Sequence[Message]) -> str:
    """The same for the same messages, however often they are sent."""
    told = [(one.dedup_key, one.what) for one in messages]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


def as_slack(messages: Sequence[Message]) -> dict[str, Any]:
    """Also what Mattermost and others take."""
    lines = []
    for one in messages:
        lines += [f"*{_quoted(one.headline)}*", _quoted(one.sentence)]
        if one.what == "firing" and one.remedy:
            lines.append(f"_{_quoted(one.remedy)}_")
        lines.append(f"<{one.address}|alert> · <{one.runbook}|runbook>")
    return {"text": "\n".join(lines)}


def _quoted(text: str) -> str:
    """So that no name of a node mentions a whole channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def as_pagerduty(one: Message, routing_key: str) -> dict[str, Any]:
    """An event of version 2: what is over resolves what it opened, by the key that both have."""
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
    return f"{MARKS[first.what]} {first.title}: {len(messages)} of them"


def as_text(messages: Sequence[Message]) -> str:
    """The body of an e-mail."""
    parts = []
    for one in messages:
        lines = [one.headline, one.sentence, f"Since {one.since:%Y-%m-%d %H:%M:%S} UTC"]
        if one.what == "firing" and one.remedy:
            lines.append(f"What helps: {one.remedy}")
        parts.append("\n".join([*lines, f"Alert: {one.address}", f"Runbook: {one.runbook}"]))
    return "\n\n".join(parts) + "\n"
