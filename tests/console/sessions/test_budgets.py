"""How fast bytes may move that can wait, so that together they keep to their part of each link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from console.audit.models import AuditEntry
from console.control.documents import Compiler
from console.fleet.models import Nic, Node, SpineLink
from console.operations.models import Operation
from console.orgs.models import Org
from console.sessions import desired
from console.sessions import rules as services
from console.sessions.budgets import Budget, Budgets, Link
from console.sessions.models import Phase, Stream
from kvss_agent import desired as of_agents
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


# Fragments, and what is written to stores

DISK = {"tier2": {"kind": "posix", "path": "/mnt/kv", "cap": "1TiB", "shared": False}}
BUCKET = {"tier2": {"kind": "s3", "bucket": "kv", "cap": "1TiB"}}
NODES = ("ax1", "ax2", "ax3", "ax4")


@pytest.fixture
def redundant(people: People, streams: list[Stream]) -> list[Stream]:
    """The four streams, each of whose columns is stored by three of the four nodes."""
    Node.objects.update(declared=DISK)
    set_rules(people, redundancy="2+1")
    return list(Stream.objects.order_by("index"))


def documents() -> dict[str, dict[str, Any]]:
    """What each stream's node is told of its redundancy."""
    specs = [one for node in NODES for one in desired.streams(node)["shards"]]
    return {one["name"]: one["redundancy"] for one in specs if "redundancy" in one}


def carried(rates: dict[str, int]) -> Counter[Link]:
    """Bytes per second by link, if all agents spill as fast as they may."""
    found: Counter[Link] = Counter()
    for stream in Stream.objects.select_related("job__driver", "node"):
        here = Link(stream.node.name, stream.nic_leaf)
        for holder in documents()[stream.name]["holders"]:
            node = holder["address"].rpartition("/")[2]
            if node == here.node:
                continue
            there = Link(node, f"l{node[-1]}")
            crossed = [here, there]
            if here.leaf != there.leaf:
                crossed += [Link("", here.leaf), Link("", there.leaf)]
            for link in crossed:
                found[link] += rates[stream.name] // 3
    return found


def test_fragments_keep_to_half_of_the_part_of_each_link_whatever_all_agents_do(
    redundant: list[Stream],
) -> None:
    rates = {name: one["bytes_per_second"] for name, one in documents().items()}
    assert len(rates) == 4
    sent = carried(rates)
    for link, rate in sent.items():
        capacity = (100 if link.node else 400) * GBIT
        assert rate <= capacity * 0.25 / 2, link
    fullest = max(rate / ((100 if link.node else 400) * GBIT) for link, rate in sent.items())
    assert fullest > 0.25 / 2 / 2, "and it is used"


def test_a_shard_alone_has_all_of_it_and_another_shares_it(redundant: list[Stream]) -> None:
    Stream.objects.exclude(pk=redundant[0].pk).delete()
    [told] = documents().values()
    others = sum(not one["address"].endswith("/ax1") for one in told["holders"])
    assert told["bytes_per_second"] == pytest.approx(100 * GBIT * 0.25 / 2 / (others / 3), rel=1e-6)
    found = Budgets().of_fragments(redundant[0], 25)
    assert found == Budget(told["bytes_per_second"], Link("ax1", "l1"))
    Nic.objects.filter(node__name=told["holders"][-1]["address"].rpartition("/")[2]).update(gbits=10)
    found = Budgets().of_fragments(redundant[0], 25)
    assert found is not None
    assert found.bytes_per_second == pytest.approx(10 * GBIT * 0.25 / 2 * 3, rel=1e-6)
    assert str(found.link).startswith("the NIC of ax")


def test_moves_change_no_document_of_fragments_and_have_the_other_half(
    redundant: list[Stream],
) -> None:
    before = documents()
    moving = send(redundant[1], "ax2", "l2", Phase.MAKING)
    assert documents() == before
    found = Budgets().of(moving, 100)
    assert found == Budget(50 * GBIT, Link("ax1", "l1"))


def test_without_links_that_are_described_fragments_have_no_budget(redundant: list[Stream]) -> None:
    Nic.objects.all().delete()
    SpineLink.objects.all().delete()
    assert all("bytes_per_second" not in one for one in documents().values())


def test_fragments_follow_the_rules(people: People, redundant: list[Stream]) -> None:
    before = documents()
    set_rules(people, redundancy="2+1", moves_percent=5)
    for name, told in documents().items():
        assert told["bytes_per_second"] == pytest.approx(before[name]["bytes_per_second"] / 5, rel=1e-6)


def test_documents_take_as_many_queries_for_many_fragments_as_for_few(
    people: People, redundant: list[Stream]
) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as found:
            compiler = Compiler("node")
            for node in NODES:
                compiler.compile(node, {})
        return len(found)

    queries()  # which makes secrets
    few = queries()
    for stream in redundant:
        stream.pk, stream.index = None, stream.index + 4
        stream.save()
    set_rules(people, redundancy="1+1")
    set_rules(people, redundancy="2+1")
    assert len(documents()) == 8
    assert queries() == few


def write_rate(node: str) -> int | None:
    tier2 = of_agents.parse(Compiler("node").compile(node, {}).of_generation(1)).tier2
    assert tier2 is not None
    return tier2.write_bytes_per_second


def test_what_is_written_to_a_bucket_shares_the_nics_with_moves(streams: list[Stream]) -> None:
    ax2 = Node.objects.get(name="ax2")
    Nic.objects.create(node=ax2, leaf=leaf("l1"), name="other", gbits=10)
    Node.objects.filter(name="ax2").update(declared=BUCKET)
    assert write_rate("ax2") == 110 * GBIT * 0.25 / 2
    assert Budgets().of(send(streams[1], "ax2", "l2"), 100) == Budget(50 * GBIT, Link("ax2", "l2"))
    Nic.objects.filter(node=ax2).delete()
    assert write_rate("ax2") is None


def test_a_shared_directory_counts_as_far_away_and_a_disk_of_the_nodes_own_does_not(
    streams: list[Stream],
) -> None:
    shared = {"tier2": {"kind": "posix", "path": "/mnt/nfs", "cap": "1TiB"}}
    Node.objects.filter(name="ax2").update(declared=shared)
    Node.objects.filter(name="ax3").update(declared=DISK)
    assert write_rate("ax2") == 100 * GBIT * 0.25 / 2
    assert write_rate("ax3") is None


def test_people_see_how_fast_it_is_written(
    people: People, streams: list[Stream], browser_of: Callable[..., Client]
) -> None:
    Node.objects.filter(name="ax2").update(declared=BUCKET)
    page = browser_of(people.platform_viewer).get("/fleet/nodes/ax2/").content.decode()
    assert "shared with others, written with at most 1.46 GiB/s over its NICs" in " ".join(page.split())
