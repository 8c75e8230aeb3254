"""An alert, a silence and a channel to deal with."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from console.alerts.models import Alert, Channel, Silence, Transition
from console.alerts.state.transitions import fingerprint
from console.orgs.models import Org


def make_alert(rule: str, topic: str, org: Org | None = None, **more: Any) -> Alert:
    """One that fires since a minute."""
    now = timezone.now()
    since = now - timedelta(minutes=1)
    labels = more.pop("labels", {})
    values = {
        "state": "firing",
        "severity": "page",
        "begun_at": since,
        "state_since": since,
        "fired_at": since,
        "observed_at": now,
        "sentence": f"{topic} is not well",
        "transition_count": 1,
        **more,
    }
    mark = fingerprint(rule, topic, labels)
    alert = Alert.objects.create(
        rule=rule, topic=topic, org=org, labels=labels, fingerprint=mark, **values
    )
    Transition.objects.create(
        alert=alert,
        number=1,
        episode=1,
        at=since,
        before="pending" if alert.state == "quiet" else "quiet",
        after=alert.state,
        sentence=alert.sentence,
    )
    return alert


def make_silence(matchers: list[str], org: Org | None = None, **more: Any) -> Silence:
    now: datetime = timezone.now()
    values = {
        "starts_at": now - timedelta(minutes=1),
        "ends_at": now + timedelta(hours=1),
        "author": "ada",
        "reason": "new memory",
        **more,
    }
    return Silence.objects.create(matchers=matchers, org=org, **values)


def make_channel(name: str, address: str, org: Org | None = None, **more: Any) -> Channel:
    values = {"kind": "webhook", "shown": "http://…", "min_severity": "notice", **more}
    return Channel.objects.create(name=name, address=address, org=org, **values)
