"""Control in plain text, and a process that holds up the replacement of a root, are alerts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.alerts.conditions.condition import Snapshot
from console.alerts.models import Alert
from console.alerts.rules.catalogue import BY_SLUG
from console.alerts.state import snapshot
from console.alerts.state.evaluation import tick
from console.alerts.state.lifecycle import Verdict
from console.authority import services as authority
from console.authority.models import Authority
from console.fleet.models import Driver
from tests.console.alerts.numbers import at, judged
from tests.console.control.drivers import join

PLAIN, ROOT = BY_SLUG["control-plaintext"], BY_SLUG["root-replacement-stalled"]


def test_the_setting_is_a_breach_whether_or_not_anybody_is_asked_so() -> None:
    for names, said in (((), "no processes called"), (("node ax-1",), "1 process called")):
        [one] = judged(PLAIN, {}, Snapshot(at=at(0), plaintext_control=True, plaintext_targets=names))
        assert (one.verdict, said in one.sentence) == (Verdict.BREACH, True)
        assert one.evidence == {"called_over_plaintext_http": ", ".join(names)}
    [one] = judged(PLAIN, {}, Snapshot(at=at(0)))
    assert one.verdict is Verdict.OK


def test_each_that_does_not_follow_is_named_while_a_root_is_replaced() -> None:
    names = ("driver job7", "node ax-1")
    now = Snapshot(at=at(0), root_replacement_since=at(-600), root_replacement_pending=names)
    found = judged(ROOT, {}, now)
    assert [one.labels for one in found] == [{"process": name} for name in names]
    assert all(one.verdict is Verdict.BREACH for one in found)
    assert found[0].evidence == {"step_since": "2026-11-21 11:50:00 UTC", "seconds": 600}
    assert judged(ROOT, {}, Snapshot(at=at(0))) == []


@pytest.mark.django_db
def test_both_are_seen_as_they_are_and_end_with_their_cause(settings: Any) -> None:
    join("job7", "http://10.0.0.7:8420", public_key="a key")
    join("job8", "http://127.0.0.1:8420", public_key="a key")
    _ = authority.bundle()
    now = snapshot.take_snapshot(timezone.now())
    assert (now.plaintext_control, now.root_replacement_since) == (False, None)
    assert now.root_replacement_pending == (), "before a root is replaced nobody holds anything up"

    settings.PLAIN_CONTROL = True
    authority.begin_rotation(SYSTEM)
    Driver.objects.filter(name="job8").update(trusts=authority.bundle().digest)
    now = snapshot.take_snapshot(timezone.now())
    assert now.plaintext_targets == ("driver job7",)
    assert now.root_replacement_pending == ("driver job7",)
    assert now.root_replacement_since == Authority.objects.get(state="next").state_since

    began = timezone.now()
    for seconds in (0, 310):
        tick(began + timedelta(seconds=seconds), [PLAIN, ROOT])
    firing = Alert.objects.filter(state="firing")
    assert set(firing.values_list("rule", flat=True)) == {
        "control-plaintext",
        "root-replacement-stalled",
    }
    settings.PLAIN_CONTROL = False
    Driver.objects.update(trusts=authority.bundle().digest)
    tick(began + timedelta(seconds=400), [PLAIN, ROOT])
    assert not Alert.objects.filter(state="firing").exists()
