"""Who does not follow its document: told by its numbers, by its answers to the console, or by both."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from console.alerts.conditions.condition import Finding, Snapshot, TargetState
from console.alerts.rules.catalogue import BY_SLUG
from console.alerts.state import snapshot
from console.alerts.state.lifecycle import Verdict
from console.control.models import Target
from tests.console.alerts.numbers import at, judged, line

TABLES = {
    "desired": [line("node:a", 7), line("node:b", 8)],
    "observed": [line("node:a", 7), line("node:b", 7)],
}


def found(**targets: TargetState) -> dict[str, Finding]:
    now = Snapshot(at=at(0), targets={f"node:{name}": one for name, one in targets.items()})
    return {one.topic: one for one in judged(BY_SLUG["desired-not-applied"], TABLES, now)}


def test_who_gives_no_valid_answer_is_named_with_why_and_since_when() -> None:
    """By its own numbers it follows what it was told last; it can't be told what is newer."""
    standing = TargetState(
        desired=9,
        observed=7,
        problem="Its answer has 64 MiB; at most 1 MiB is read.",
        fault="too_long",
        fault_since=at(-300),
        answered_at=at(-310),
    )
    one = found(a=standing)["node:a"]
    assert one.verdict is Verdict.BREACH
    assert one.sentence == (
        "a gives the console no valid answer: Its answer has 64 MiB; at most 1 MiB is read"
    )
    assert one.evidence == {
        "reason": "Its answer has 64 MiB; at most 1 MiB is read.",
        "fault": "too_long",
        "no_valid_answer_since": "2026-11-21 11:55:00 UTC, 5 min ago",
        "last_valid_answer": "2026-11-21 11:54:50 UTC, 5 min 10 s ago",
        "generation": "7 of 9",
    }


def test_who_refuses_a_document_is_behind_though_its_numbers_do_not_show_it() -> None:
    standing = TargetState(desired=9, observed=7, problem="It answered 422. No.", answered_at=at(-5))
    one = found(a=standing)["node:a"]
    assert (one.verdict, one.sentence) == (Verdict.BREACH, "a is behind its desired generation by 2")
    assert one.evidence["reason"] == "It answered 422. No."


def test_its_numbers_are_enough_and_are_given_their_reason() -> None:
    alone = found()
    assert [alone[topic].verdict for topic in ("node:a", "node:b")] == [Verdict.OK, Verdict.BREACH]
    both = found(a=TargetState(7, 7), b=TargetState(8, 7, "full.0: 3 GiB are not there."))
    assert [both[topic].verdict for topic in ("node:a", "node:b")] == [Verdict.OK, Verdict.BREACH]
    assert both["node:b"].evidence["reason"] == "full.0: 3 GiB are not there."


def test_one_that_tells_no_numbers_is_judged_by_its_answers() -> None:
    standing = TargetState(1, 0, "It does not answer.", "unreached", at(-200))
    assert found(c=standing)["node:c"].verdict is Verdict.BREACH
    assert found(c=TargetState(1, 1))["node:c"].verdict is Verdict.OK


@pytest.mark.django_db
def test_it_is_known_of_everybody_who_was_ever_told_something() -> None:
    looked_at = timezone.now()
    since = looked_at - timedelta(minutes=4)
    Target.objects.create(kind="node", name="never-told")
    Target.objects.create(
        kind="driver",
        name="job7",
        generation=3,
        observed_generation=2,
        problem="Its certificate is of another authority.",
        fault="untrusted",
        bad_since=since,
    )
    now = snapshot.take_snapshot(looked_at)
    assert now.targets == {
        "driver:job7": TargetState(
            3, 2, "Its certificate is of another authority.", "untrusted", since, None
        )
    }
    [one] = judged(BY_SLUG["driver-behind"], {"desired": [], "observed": []}, now)
    assert one.evidence["no_valid_answer_since"].endswith("UTC, 4 min ago")
