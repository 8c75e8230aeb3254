"""Drains and upgrades of nodes that have fragments of redundant columns."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from html import unescape
from unittest import mock

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from console.alerts.state.snapshot import take_snapshot
from console.fleet.models import Node
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.operations.models import Operation
from console.placement.topology import State
from console.sessions import holders
from console.sessions.changes import drains
from console.sessions.models import FragmentHolder, Stream, StreamRedundancy
from console.sessions.steps import fragments
from tests.conftest import People
from tests.console.operations.runs import run
from tests.console.sessions.fleets import make_node
from tests.console.sessions.redundant import DISK, have_been_so_for, report, serve, who
from tests.console.sessions.requests import set_rules
from tests.html import compact

pytestmark = pytest.mark.django_db


@pytest.fixture
def fleet(people: People) -> None:
    """`n1`, `n2` and `n3` have the fragments of `job1`, whose stream is on `bare`; `n4` is free."""
    for number in range(1, 5):
        make_node(f"n{number}", f"l{number}", declared=DISK)
    make_node("bare", "l1")
    serve("job1", "bare")
    set_rules(people, redundancy="2+1")
    assert who() == ["n1", "n2", "n3"]
    have_been_so_for(3600)
    report()


def drain(people: People, name: str, *, ignore_redundancy: bool = False) -> Operation:
    on_call = people.principal("platform_on_call")
    return run(drains.drain(on_call, name, ignore_redundancy=ignore_redundancy))


def keep() -> None:
    holders.keep(timezone.now())


def state(name: str) -> str:
    return Node.objects.get(name=name).state


def test_a_drain_ends_when_others_have_the_fragments_of_the_node(fleet: None, people: People) -> None:
    draining = drain(people, "n2")
    assert state("n2") == "draining"
    assert draining.message == "Other agents take over its fragments."
    before = FragmentHolder.objects.latest("since").since.timestamp()
    keep()
    assert who() == ["n1", "n4", "n3"]
    report(holders_since=before)
    assert not run(draining).done, "the agent has not heard of the new holder"
    report(state="indexing")
    assert run(draining).message == "bare can't tell yet about the fragments of job1.full.0: indexing."
    report(5000)
    assert run(draining).message == "5,000 columns of job1.full.0 lack a fragment."
    draining.notes["repair"]["at"] -= 95_000  # so that what the test itself takes is nothing beside it
    draining.save()
    report(1204, unreachable=["unix:/nowhere/n4"])
    waits = run(draining).message
    assert waits.startswith("1,204 columns of job1.full.0 lack a fragment; repaired at ")
    assert re.search(r" at 40\.\d KiB/s, 8 h 2\d min left\. n4 can't be reached\.$", waits), waits
    assert draining.percent == int(100 * (2 + 3796 / 5000) / 3)
    report()
    assert run(draining).state == "succeeded"
    assert state("n2") == "draining"


def test_where_nobody_can_take_over_a_drain_fails_and_changes_nothing(
    fleet: None, people: People
) -> None:
    Node.objects.filter(name="n4").delete()
    on_call = people.principal("platform_on_call")
    with transaction.atomic(), pytest.raises(Impossible) as refused:
        drains.check_drain(on_call, "n2")
    assert state("n2") == "ready"
    draining = drain(people, "n2")
    assert draining.state == "failed"
    assert draining.error == {
        "reason": "TooFewAgents",
        "detail": "n2 is draining, and no other agent can take its fragments over. 2+1 needs 3 agents "
        "with tier 2 on a disk of their own; there are 2. Drain it with `ignore_redundancy` "
        "(`--ignore-redundancy`) to go on all the same.",
    }
    assert draining.error["detail"] == str(refused.value)
    assert (state("n2"), who()) == ("ready", ["n1", "n2", "n3"])
    with transaction.atomic():
        assert drains.check_drain(on_call, "n2", ignore_redundancy=True).waits_for == ""


def test_a_drain_whose_new_holder_goes_away_as_well_fails(fleet: None, people: People) -> None:
    draining = drain(people, "n2")
    Node.objects.filter(name="n4").delete()
    keep()
    assert (run(draining).error or {})["reason"] == "TooFewAgents"
    assert state("n2") == "ready"


def test_a_drain_that_ignores_redundancy_waits_for_nothing(fleet: None, people: People) -> None:
    Node.objects.filter(name="n4").delete()
    StreamRedundancy.objects.all().delete()
    assert drain(people, "n2", ignore_redundancy=True).state == "succeeded"
    assert state("n2") == "draining"


def test_a_second_node_is_not_drained_before_the_first_ones_columns_are_repaired(
    fleet: None, people: People
) -> None:
    make_node("n5", "l5", declared=DISK)
    have_been_so_for(3600)
    drain(people, "n2")
    on_call = people.principal("platform_on_call")
    waits_for = drains.check_drain(on_call, "n1").waits_for
    assert drains.check_drain(on_call, "n1", ignore_redundancy=True).waits_for == ""
    second = drain(people, "n1")
    assert second.message.startswith(f"{waits_for} Cancel this and begin again with ")
    assert second.message.endswith("`ignore_redundancy` (`--ignore-redundancy`) to wait no longer.")
    assert second.message.startswith(
        "Waits for redundancy: columns of job1.full.0 may lack a fragment, "
    )
    assert "at n2 (draining), and 2+1 survives the loss of 1 agent." in second.message
    keep()
    for incomplete in (5000, 1204):
        report(incomplete)
        assert "at n4 (not repaired yet)" in run(second).message
    assert state("n1") == "ready"
    report()
    assert run(second).step == 2
    assert state("n1") == "draining"


def test_the_page_of_a_drain_previews_where_streams_go_and_what_waits_before_it_begins(
    fleet: None, people: People, browser_of: Callable[..., Client]
) -> None:
    browser = browser_of(people.platform_on_call)
    assert 'href="/fleet/nodes/bare/drain/"' in browser.get("/fleet/nodes/bare/").content.decode()

    def preview(name: str, **values: str) -> str:
        part = browser.post(f"/fleet/nodes/{name}/drain/", values, headers={"HX-Request": "true"})
        return compact(part)

    assert "Drain bare" in browser.get("/fleet/nodes/bare/drain/").content.decode()
    stream = Stream.objects.get()
    seen = preview("bare")
    assert re.search(rf"<th [^>]*>{stream.name}</th><td[^>]*>n\d</td>", seen), seen
    report(7)
    assert "7 columns of job1.full.0 lack a fragment" in preview("n1")
    assert "No streams to move." in preview("n1", ignore_redundancy="on")
    Node.objects.exclude(name="bare").update(state="cordoned")
    stays = preview("bare").partition("Streams that stay for now")[2]
    assert "has no node for 10 MiB" in stays
    stranger = browser_of(people.viewer).post("/fleet/nodes/bare/drain/", {"reason": "loud fan"})
    assert stranger.status_code == 404
    assert (state("bare"), Operation.objects.count()) == ("ready", 0)
    begun = browser.post("/fleet/nodes/bare/drain/", {"reason": "loud fan"})
    assert begun.headers["Location"] == f"/operations/{Operation.objects.get().pk}/"
    assert "“Drain bare” is not done yet." in preview("bare")


def test_a_waiting_drain_says_how_many_more_shards_wait_and_the_nodes_page_says_it_too(
    fleet: None, people: People, browser_of: Callable[..., Client]
) -> None:
    report(7)
    serve("job2", "bare")
    keep()
    waiting = drain(people, "n1")
    assert "survives the loss of 1 agent. 1 more shard waits likewise. Cancel this" in waiting.message
    serve("job3", "bare")
    keep()
    message = run(waiting).message
    assert " 2 more shards wait likewise. " in message
    page = browser_of(people.platform_viewer).get("/fleet/nodes/n1/").content.decode()
    assert message in unescape(page)


def test_a_drain_that_waits_for_redundancy_can_be_cancelled(fleet: None, people: People) -> None:
    report(7)
    waiting = drain(people, "n1")
    assert "7 columns of job1.full.0 lack a fragment" in waiting.message
    operations.cancel(people.principal("platform_on_call"), waiting.pk)
    assert run(waiting).state == "cancelled"
    assert state("n1") == "ready"


def test_a_node_without_fragments_is_drained_whatever_others_lack(fleet: None, people: People) -> None:
    report(7)
    assert drain(people, "n4").state == "succeeded"


def test_an_upgraded_node_keeps_its_fragments_and_the_next_one_waits(
    fleet: None, people: People
) -> None:
    on_call = people.principal("platform_on_call")
    upgraded = run(drains.upgrade(on_call, "n2", version="2.0"))
    keep()
    assert (state("n2"), who()) == ("maintenance", ["n1", "n2", "n3"])
    second = run(drains.upgrade(on_call, "n1", version="2.0"))
    assert "at n2 (maintenance)" in second.message
    Node.objects.filter(name="n2").update(software_version="2.0")
    assert run(upgraded).state == "succeeded"
    keep()
    assert who() == ["n1", "n2", "n3"]
    report()
    assert "n2 changed a moment ago; bare looks what job1.full.0 lacks." in run(second).message
    have_been_so_for(20)
    report(3, at="n2")
    assert "3 columns of job1.full.0 lack a fragment" in run(second).message
    report()
    run(second)
    assert state("n1") == "maintenance"


def test_an_upgrade_says_what_the_node_runs_now(fleet: None, people: People) -> None:
    Node.objects.filter(name="n4").update(software_version="1.0")
    upgraded = run(drains.upgrade(people.principal("platform_on_call"), "n4", version="2.0"))
    assert upgraded.message == "Install 2.0 on n4 and start its agent: it runs 1.0."
    Node.objects.filter(name="n4").update(software_version="1.5")
    assert run(upgraded).message == "Install 2.0 on n4 and start its agent: it runs 1.5."
    Node.objects.filter(name="n4").update(software_version="2.0", state="lost", held_state="maintenance")
    assert run(upgraded).message == "n4 has run 2.0, and is lost: start its agent."


def test_a_cordoned_node_is_cordoned_again_when_it_is_upgraded(fleet: None, people: People) -> None:
    Node.objects.filter(name="n4").update(state="cordoned", state_reason="loud fan")
    upgraded = run(drains.upgrade(people.principal("platform_on_call"), "n4", version="2.0"))
    assert state("n4") == "maintenance"
    Node.objects.filter(name="n4").update(software_version="2.0")
    assert run(upgraded).state == "succeeded"
    node = Node.objects.get(name="n4")
    assert (node.state, node.state_reason) == ("cordoned", "loud fan")


def test_a_node_that_is_upgraded_may_be_away_for_longer_than_a_lost_one_but_not_for_ever(
    fleet: None, people: People
) -> None:
    set_rules(people, redundancy="2+1", replace_lost_after_seconds=60)
    run(drains.upgrade(people.principal("platform_on_call"), "n2", version="2.0"))

    def is_silent_for(seconds: float) -> None:
        since = timezone.now() - timedelta(seconds=seconds)
        Node.objects.filter(name="n2").update(last_heartbeat_at=since)
        keep()

    is_silent_for(holders.UPGRADE_SECONDS - 60)
    assert who() == ["n1", "n2", "n3"]
    is_silent_for(holders.UPGRADE_SECONDS + 1)
    assert who() == ["n1", "n4", "n3"]


def test_a_node_is_not_stopped_for_its_upgrade_if_another_was_lost_meanwhile(
    fleet: None, people: People
) -> None:
    """Its streams may take an hour to move."""
    upgraded = drains.upgrade(people.principal("platform_on_call"), "n2", version="2.0")

    is_needed, asked = fragments.why_needed, []

    def why_needed(node: Node) -> str:
        asked.append(node)
        if len(asked) == 2:
            report(unreachable=["unix:/nowhere/n3"])
        return is_needed(node)

    with mock.patch.object(fragments, "why_needed", why_needed):
        assert "at n3 (unreachable)" in run(upgraded).message
    assert state("n2") == "draining"
    report()
    run(upgraded)
    assert state("n2") == "maintenance"


def test_a_busy_shard_ends_a_drain_though_others_lack_something_now_and_then(
    fleet: None, people: People
) -> None:
    draining = drain(people, "n2")
    keep()
    report(3, at="n1")
    assert run(draining).state == "succeeded"


def test_an_agent_of_an_earlier_version_is_named(fleet: None, people: People) -> None:
    report(holders_since=0)
    message = drain(people, "n1").message
    assert "bare can't tell yet about the fragments of job1.full.0: it applies a new" in message
    assert "`ignore_redundancy`" in message


def test_shards_for_which_there_are_too_few_agents_are_told_by_code(fleet: None, people: People) -> None:
    def told() -> list[tuple[str, int, str]]:
        found = take_snapshot(timezone.now()).without_holders
        return [(one.code, one.shards, one.why) for one in found]

    assert told() == []
    set_rules(people, redundancy="4+2")
    why = "4+2 needs 6 agents with tier 2 on a disk of their own; there are 4."
    assert told() == [("4+2", 1, why)]
    set_rules(people, redundancy="none")
    assert told() == []


def test_nodes_with_redundant_streams_are_those_of_rules_that_ask_for_it(
    fleet: None, people: People
) -> None:
    set_rules(people, redundancy="1+1")
    assert take_snapshot(timezone.now()).redundant_nodes == {"bare"}
    set_rules(people, redundancy="none")
    assert take_snapshot(timezone.now()).redundant_nodes == set()


def test_a_lost_node_that_is_drained_is_replaced_at_once(fleet: None, people: People) -> None:
    set_rules(people, redundancy="2+1", replace_lost=False)
    lost = {"state": State.LOST.value, "held_state": "ready"}
    Node.objects.filter(name="n2").update(**lost)
    keep()
    assert who() == ["n1", "n2", "n3"]
    drain(people, "n2")
    keep()
    assert (state("n2"), who()) == ("lost", ["n1", "n4", "n3"])
