"""Who is placed across the spine is warned of once, with what is known of it and the suggested fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.test import Client

from console.accounts.principal import SYSTEM
from console.alerts.conditions.condition import Crossing, Snapshot
from console.alerts.models import Alert, Transition
from console.alerts.rules.catalogue import BY_SLUG
from console.alerts.state.lifecycle import Verdict
from console.alerts.suggested_fixes import services as suggested_fixes
from console.alerts.timeline import questions
from console.fleet.models import Node
from console.operations.models import Operation
from console.placement.topology import Tier
from console.sessions.models import Session, Stream
from telemetry.metrics import Kind
from telemetry.shapes import Series
from tests.conftest import People
from tests.console.alerts.evaluations import heard, put
from tests.console.alerts.evaluations import tick as tick_of
from tests.console.alerts.numbers import at, judged, line
from tests.console.alerts.things import make_alert

PLACED, BURST = BY_SLUG["spine-placement"], BY_SLUG["spine-burst"]
PATH = {
    "session": "chat",
    "stream": "full.1",
    "node": "ax1",
    "port_leaf": "l2",
    "nic_leaf": "l1",
    "link": "l2-up",
    "box": "cs1",
}


def tick() -> int:
    return tick_of(PLACED)


def test_a_placement_across_the_spine_warns_once_whatever_flows(chat: Session) -> None:
    heard("driver:job7")
    assert tick() == 1
    alert = Alert.objects.get()
    assert (alert.state, alert.topic, alert.org) == ("firing", "session:chat", chat.org)
    assert alert.labels == {"driver": "job7", "stream": "full.1", "node": "ax1"}
    assert alert.evidence["allowed"] == "yes, by the placement rules"
    assert alert.evidence["why_not_a_rail"] == "nodes with a NIC on its leaf are cordoned"
    assert alert.evidence["shard"] == "job7.full.1"
    for seconds_ago in (0, 300, 0):  # also while the driver is silent
        heard("driver:job7", seconds_ago)
        assert tick() == 0
    heard("web:host")
    labels = tuple(sorted({**PATH, "tier": "spine", "direction": "out"}.items()))
    put("driver:job7", {Series(Kind.COUNTER, "tidegate_driver_path_bytes_total", labels): 5e9})
    assert tick() == 0
    alert.refresh_from_db()
    assert alert.evidence["bytes_in_the_last_hour"] == 5e9
    assert "over l1, the spine, l2-up and l2 to cs1" in alert.sentence
    [(_, address)] = questions(alert)
    assert "topic=driver%3Ajob7" in address
    assert "label=stream%3Afull.1" in address
    Stream.objects.filter(index=1).update(tier=Tier.RAIL.value)
    assert tick() == 1, "bytes of before the move are nobody's placement"
    Stream.objects.filter(index=1).update(tier=Tier.SPINE.value)
    assert tick() == 1
    assert [transition.after for transition in Transition.objects.order_by("number")] == [
        "firing",
        "resolved",
        "firing",
    ]


def test_rules_that_were_made_stricter_are_told(chat: Session) -> None:
    chat.path = "require_rail"
    chat.save()
    tick()
    assert Alert.objects.get().evidence["allowed"] == "no, the placement rules forbid it"


def test_the_alert_says_which_move_would_end_it_and_does_it(
    chat: Session, people: People, browser_of: Callable[..., Client]
) -> None:
    tick()
    alert = Alert.objects.get()
    fix, general = suggested_fixes.suggest(SYSTEM, alert)
    assert fix.text == (
        "Move job7.full.1 from ax1 to ax2, which puts it on a rail. Its job keeps running."
    )
    assert general.text == PLACED.suggested_fix
    page = browser_of(people.on_call).get(f"/alerts/{alert.pk}/").content.decode()
    assert fix.text in page
    assert "Move it now" in page
    assert "Move it now" not in browser_of(people.viewer).get(f"/alerts/{alert.pk}/").content.decode()
    done = browser_of(people.on_call).post(f"/alerts/{alert.pk}/fix/", {"action": "move"})
    operation = Operation.objects.get()
    assert done["Location"] == f"/operations/{operation.pk}/"
    shard = Stream.objects.get(index=1)
    assert shard.next_node
    assert (shard.next_node.name, shard.operation) == ("ax2", operation)


def test_all_streams_of_a_session_are_brought_back_as_one_operation(
    chat: Session, people: People, browser_of: Callable[..., Client]
) -> None:
    """Of the session that has most on a link that is full, or of which too much crosses the spine."""
    Stream.objects.filter(index=2).update(
        tier=Tier.SPINE.value, node=Node.objects.get(name="ax4"), nic_leaf="l4"
    )
    carried = {"bytes_by_session": {"gone": 1e9, "chat": 2e9}}
    full = make_alert("spine-burst", "fleet", labels={"link": "l2-up"}, evidence=carried)
    share = make_alert("spine-share", "session:chat", people.acme)
    for alert in (full, share):
        fix, _ = suggested_fixes.suggest(SYSTEM, alert)
        assert fix.text == "Restore the rails of chat: move 2 streams. Jobs keep running."
        assert {(one.what, one.before, one.after) for one in fix.plan[:-1]} == {
            ("job7.full.1", "ax1", "ax2, on a rail"),
            ("job7.full.2", "ax4", "ax3, on a rail"),
        }
    asked = {"action": "restore-rails"}
    assert browser_of(people.stranger).post(f"/alerts/{share.pk}/fix/", asked).status_code == 404
    assert browser_of(people.viewer).post(f"/alerts/{share.pk}/fix/", asked).status_code == 403
    on_call = browser_of(people.on_call)
    done = on_call.post(f"/alerts/{share.pk}/fix/", asked)
    operation = Operation.objects.get()
    assert (operation.kind, operation.actor_name) == ("session.restore-rails", people.on_call.username)
    assert done["Location"] == f"/operations/{operation.pk}/"
    homes = Stream.objects.exclude(next_node=None).order_by("index")
    assert list(homes.values_list("next_node__name", flat=True)) == ["ax2", "ax3"]

    page = on_call.get(f"/alerts/{share.pk}/").content.decode()
    assert "Restore rails now" not in page, "it is being done"
    assert f'href="/operations/{operation.pk}/"' in page
    live = on_call.get(f"/alerts/{share.pk}/", headers={"HX-Request": "true"}).content.decode()
    assert "<html" not in live
    for told in (
        'id="fixes" hx-swap-oob',
        "In progress: ",
        'id="entries" hx-swap-oob',
        "Applied: Restore the rails",
    ):
        assert told in live, "a page that stays open says so, too"


def test_where_no_move_helps_it_says_why(chat: Session) -> None:
    tick()
    Node.objects.filter(name="ax2").update(state="cordoned")
    assert suggested_fixes.suggest(SYSTEM, Alert.objects.get())[0].text == (
        "No move helps now. ax2 with a NIC on its leaf is cordoned"
    )


def crossing(driver: str, *values: Any, **labels: str) -> Any:
    return line(f"driver:{driver}", *values, **{**PATH, "direction": "out", **labels})


def test_of_drivers_of_no_session_the_paths_that_they_tell_count_but_no_moves() -> None:
    told = [
        crossing("alone", 10, session=""),
        crossing("alone", 5, session="", direction="in"),
        crossing("alone", 7, session="", stream="full.2", direction="pull"),
        crossing("alone", 0, session="", stream="full.3"),
        crossing("job7", 10),
        crossing("ended", 10),  # its job has ended since
    ]
    world = Snapshot(at=at(0), session_drivers=frozenset({"job7"}))
    [found] = judged(PLACED, {"crossing": told}, world)
    assert (found.topic, found.value) == ("driver:alone", 15)
    assert found.evidence["allowed"] == "no session has placement rules for it"


def test_a_stream_that_a_session_has_placed_is_there_without_a_byte() -> None:
    placed = Crossing("chat", "job7", "full.1", "cs1", "ax1", "l2", "l1", allowed=True)
    [found] = judged(PLACED, {"crossing": []}, Snapshot(at=at(0), crossings=(placed,)))
    assert (found.verdict, found.value) == (Verdict.BREACH, 0)


def test_a_link_that_is_full_for_ten_seconds_is_a_burst_of_those_who_filled_it() -> None:
    def burst(*, gbits: dict[str, int], **sessions: list[float | None]) -> Any:
        lines = [
            line("fleet", *steps, link="l2-up", session=session) for session, steps in sessions.items()
        ]
        [found] = judged(BURST, {"crossing": lines}, Snapshot(at=at(0), link_gbits=gbits))
        return found

    full = 45e9  # bytes in ten seconds: 36 Gbit/s
    found = burst(gbits={"l2-up": 80}, chat=[0, full, None], code=[None, full, 0])
    assert (found.verdict, round(found.value)) == (Verdict.BREACH, 72)
    assert set(found.evidence["bytes_by_session"]) == {"chat", "code"}
    assert burst(gbits={"l2-up": 80}, chat=[full, 0], code=[0, full]).verdict is Verdict.OK
    assert burst(gbits={}, chat=[full], code=[full]).verdict is Verdict.OK, "of 100 Gbit/s"


def test_a_session_of_which_one_node_carries_most_is_uneven() -> None:
    def uneven(**nodes: float) -> Any:
        carried = [line("session:chat", moved, node=node) for node, moved in nodes.items()]
        return [one.verdict for one in judged(BY_SLUG["load-uneven"], {"carried": carried})]

    assert uneven(a=9e9, b=1e9) == [Verdict.BREACH]
    assert uneven(a=6e9, b=4e9) == [Verdict.OK]
    assert uneven(a=9e9) == []
    assert uneven(a=900, b=100) == []


def test_the_share_of_the_spine_is_held_against_all_that_was_moved() -> None:
    def share(spine: list[float], everything: list[float]) -> Any:
        tables = {"spine": [line("session:chat", *spine)], "all": [line("session:chat", *everything)]}
        return [one.verdict for one in judged(BY_SLUG["spine-share"], tables)]

    assert share([1e9, 1e9], [5e9, 5e9]) == [Verdict.BREACH]
    assert share([0, 5e8], [5e9, 5e9]) == [Verdict.OK]
    assert share([100], [100]) == []
