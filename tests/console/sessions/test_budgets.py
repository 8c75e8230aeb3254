"""How fast streams may move, so that moves together keep to their share of each link."""

from __future__ import annotations

import pytest

from console.audit.models import AuditEntry
from console.fleet.models import Nic, Node, SpineLink
from console.operations.models import Operation
from console.orgs.models import Org
from console.sessions import desired
from console.sessions import rules as services
from console.sessions.budgets import Budget, Budgets, Link
from console.sessions.models import Phase, Stream
from tests.conftest import People
from tests.console.sessions.fleets import leaf, make_across
from tests.console.sessions.requests import set_rules

pytestmark = pytest.mark.django_db

GBIT = 125_000_000


@pytest.fixture
def streams(db: None) -> list[Stream]:
    """Of a fleet whose NICs have 100 Gbit/s, and leaves 400 up."""
    make_across(Org.objects.get_or_create(slug="acme", defaults={"name": "Acme"})[0])
    for name in ("l1", "l2", "l3", "l4"):
        SpineLink.objects.create(name=f"{name}-up", leaf=leaf(name), spine="s", gbits=400)
    return list(Stream.objects.order_by("index"))


def send(stream: Stream, node: str, nic_leaf: str, phase: Phase = Phase.MOVING) -> Stream:
    stream.next_node, stream.next_nic_leaf = Node.objects.get(name=node), nic_leaf
    stream.next_slots, stream.next_tier, stream.phase = stream.slots, 0, phase
    stream.operation = Operation.objects.create(
        kind="session.move", target=f"session:{stream.pk}", role=0, total=1, sentence="Move it"
    )
    stream.save()
    return stream


def told(node: str) -> list[int | None]:
    """What its document says of each stream."""
    return [one.get("pull_bytes_per_second") for one in desired.streams(node)["shards"]]


def test_a_move_has_its_share_of_the_narrowest_link(streams: list[Stream]) -> None:
    moving = send(streams[1], "ax2", "l2")
    found = Budgets().of(moving, 25)
    assert found == Budget(25 * GBIT, Link("ax1", "l1"))
    assert str(found.link) == "the NIC of ax1"
    SpineLink.objects.filter(name="l2-up").update(gbits=40)
    found = Budgets().of(moving, 25)
    assert found is not None
    assert (found.bytes_per_second, str(found.link)) == (10 * GBIT, "a link of l2 to the spine")


def test_moves_over_one_link_share_it(streams: list[Stream]) -> None:
    first = send(streams[1], "ax2", "l2")
    send(streams[2], "ax2", "l2", Phase.MAKING)  # about to
    send(streams[3], "ax4", "l4", Phase.SIZING)  # stays where it is
    assert Budgets().of(first, 100) == Budget(50 * GBIT, Link("ax2", "l2"))


def test_on_one_leaf_the_spine_is_not_asked(streams: list[Stream]) -> None:
    SpineLink.objects.update(gbits=1)
    Nic.objects.create(node=Node.objects.get(name="ax2"), leaf=leaf("l1"), name="other", gbits=10)
    assert Budgets().of(send(streams[1], "ax2", "l1"), 100) == Budget(10 * GBIT, Link("ax2", "l1"))


def test_of_links_that_nobody_has_described_nothing_is_said(streams: list[Stream]) -> None:
    Nic.objects.all().delete()
    SpineLink.objects.all().delete()
    assert Budgets().of(send(streams[1], "ax2", "l2"), 25) is None


def test_the_node_that_it_goes_to_is_told_and_told_anew_when_rules_change(
    people: People, streams: list[Stream]
) -> None:
    send(streams[1], "ax2", "l2")
    assert told("ax2") == [25 * GBIT]
    assert set(told("ax1")) == {None}
    assert Budgets().nodes == {"ax2"}
    rules = set_rules(people, moves_percent=4)
    assert rules.moves_percent == 4
    assert told("ax2") == [4 * GBIT]


def test_rules_of_an_org_add_nothing_unless_they_say_so(people: People, streams: list[Stream]) -> None:
    acme = Org.objects.get(slug="acme")
    send(streams[1], "ax2", "l2")
    set_rules(people, moves_percent=60)
    assert set_rules(people, acme, boxes_max=9).moves_percent == 100
    assert told("ax2") == [60 * GBIT]
    set_rules(people, acme, moves_percent=5)
    assert told("ax2") == [5 * GBIT]


def test_a_change_of_rules_from_before_is_undone_and_leaves_moves_as_they_are(people: People) -> None:
    """Its entry says nothing of them."""
    set_rules(people, moves_percent=40)
    rules = set_rules(people, boxes_max=9)
    entry = AuditEntry.objects.filter(action="rules.update").latest("pk")
    for said in (entry.before or {}, entry.after or {}):
        said.pop("moves_percent")
    services._undo(people.principal("platform_admin"), entry, "too few")
    rules = services.of_cluster()
    assert (rules.boxes_max, rules.moves_percent) == (None, 40)
