"""Holders of fragments: who is assigned and when, and the documents that say so."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from celery import current_app
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.control import services as control
from console.control.documents import Compiler
from console.control.models import Change
from console.control.observed import Redundancy as Said
from console.control.observed import Shard as ShardSaid
from console.fleet import nodes as fleet_nodes
from console.fleet.descriptions import changes as descriptions
from console.fleet.descriptions.document import dump
from console.fleet.models import Driver, Node
from console.operations.models import Operation
from console.placement.topology import State
from console.sessions import endpoints, holders
from console.sessions import services as sessions
from console.sessions.changes import driver_removal, jobs
from console.sessions.desired import shards_of_node
from console.sessions.fragments import AllFragments
from console.sessions.models import (
    FragmentHolder,
    Phase,
    Stream,
    StreamRedundancy,
)
from console.sessions.plans.snapshot import Snapshot
from console.sessions.steps import redundancy, relocation
from kvss_agent import desired as of_agents
from kvss_agent.redundancy.layout import SLOTS, fragment_slot_bytes
from tests.conftest import People
from tests.console.operations.runs import run
from tests.console.sessions.fleets import make_driver, make_fleet, make_node, waits_for_the_fleet
from tests.console.sessions.obeying import obeying
from tests.console.sessions.redundant import DISK, MODEL, SLOT, report, serve, who
from tests.console.sessions.requests import create, set_rules

pytestmark = pytest.mark.django_db


@pytest.fixture
def fleet(db: None) -> None:
    """Four nodes with a disk of their own, each on a leaf of its own, and one without tier 2."""
    for number in range(1, 5):
        make_node(f"n{number}", f"l{number}", declared=DISK)
    make_node("bare", "l1")


NODES = ("bare", "n1", "n2", "n3", "n4")


def keep(now: datetime | None = None) -> None:
    holders.keep(now or timezone.now())


def document(name: str) -> of_agents.Desired:
    return of_agents.parse(Compiler("node").compile(name, {}).of_generation(1))


def shard(node: str, name: str) -> of_agents.ShardSpec:
    return next(one for one in document(node).shards if one.name == name)


def names(node: str) -> set[str]:
    return {one.name for one in document(node).shards}


def why(driver: str = "job1") -> str:
    found = holders.Assignment(timezone.now())
    [first, *_] = [one for one in found.streams if one.driver == driver]
    return found.division(first).why


def last() -> int:
    return Change.objects.values_list("pk", flat=True).first() or 0


def targets(begin: int) -> set[tuple[str, str]]:
    changes = Change.objects.filter(pk__gt=begin)
    return {(kind, name) for change in changes for kind, name in change.targets}


def lose(name: str, seconds: int) -> None:
    Node.objects.filter(name=name).update(
        state=State.LOST.value,
        held_state="ready",
        last_heartbeat_at=timezone.now() - timedelta(seconds=seconds),
    )


# Documents


def test_a_stream_names_its_holders_and_each_holder_has_a_shard_for_them(
    fleet: None, people: People
) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="2+1")
    assert who() == ["n1", "n2", "n3"]
    told = shard("bare", "job1.full.0").redundancy
    assert told is not None
    assert (told.data, told.parity) == (2, 1)
    assert [(one.address, one.shard) for one in told.holders] == [
        (f"unix:/nowhere/n{number}", f"job1.full.0.f{number - 1}") for number in (1, 2, 3)
    ]
    stream = shard("bare", "job1.full.0")
    for place in range(3):
        small = shard(f"n{place + 1}", f"job1.full.0.f{place}")
        assert (small.driver, small.namespace) == ("job1", stream.namespace)
        assert small.slots == SLOTS
        assert small.slot_bytes == fragment_slot_bytes(SLOT, 2) < SLOT
        assert small.part == f"full.0.{place}-2-1"
        assert small.redundancy is None
    peers = {peer.name: peer.secret for peer in document("n3").peers}
    assert peers == {"job1": control.secret_of("driver", "job1")}
    assert names("n4") == {peer.name for peer in document("n4").peers} == set()


def test_agents_reach_holders_by_their_one_address_whatever_way_streams_take(
    fleet: None, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "_ways", [lambda _, tier: "tcp:a-way:1" if tier else None])
    serve("job1", "bare")
    set_rules(people, redundancy="1+1")
    told = shard("bare", "job1.full.0").redundancy
    assert told is not None
    assert [one.address for one in told.holders] == ["unix:/nowhere/n1", "unix:/nowhere/n2"]


def test_replicas_of_one_model_share_holders_and_each_has_its_own_shards_there(
    fleet: None, people: People
) -> None:
    serve("job1", "bare")
    serve("job2", "n4")
    other = {**MODEL, "revision": "2"}
    serve("other", "bare", model=other)
    set_rules(people, redundancy="1+1")
    assert FragmentHolder.objects.count() == 4
    namespaces = {one.namespace: one.name for one in document("bare").shards}
    own = [
        [row.node.name for row in rows]
        for key, rows in AllFragments().holders.items()
        if namespaces[key.namespace] == "job1.full.0"
    ]
    [[first, second]] = own
    assert names(first) - {"job2.full.0"} == {"job1.full.0.f0", "job2.full.0.f0"}
    assert names(second) - {"job2.full.0"} == {"job1.full.0.f1", "job2.full.0.f1"}
    free = sorted({"n1", "n2", "n3", "n4"} - {first, second})
    others = set().union(*map(names, free)) - {"job2.full.0"}
    assert others == {"other.full.0.f0", "other.full.0.f1"}, "the others have fewer"
    [mine, same] = [shard("bare", "job1.full.0"), shard("n4", "job2.full.0")]
    assert mine.redundancy is not None
    assert same.redundancy is not None
    assert {one.address for one in mine.redundancy.holders} == {
        one.address for one in same.redundancy.holders
    }


def test_without_the_rule_documents_say_nothing_of_it(fleet: None, people: People) -> None:
    serve("job1", "n1", "n2")
    keep()
    assert b"redundancy" not in Compiler("node").compile("n1", {}).content
    assert why() == "The session rules ask for none."
    set_rules(people, redundancy="1+1")
    assert b"redundancy" in Compiler("node").compile("n1", {}).content
    set_rules(people, redundancy="none")
    assert b"redundancy" not in Compiler("node").compile("n1", {}).content
    assert not FragmentHolder.objects.exists()
    assert names("n3") == names("n4") == set()


def test_with_too_few_nodes_there_is_none_and_why(fleet: None, people: People) -> None:
    Node.objects.filter(name="n4").update(declared={"tier2": {**DISK["tier2"], "kind": "s3"}})
    serve("job1", "bare")
    set_rules(people, redundancy="4+1")
    assert why() == "4+1 needs 5 agents with tier 2 on a disk of their own; there are 3."
    assert not FragmentHolder.objects.exists()
    assert shard("bare", "job1.full.0").redundancy is None
    for name in ("n5", "n6"):
        make_node(name, "l1", declared=DISK)
    keep()
    assert len(who()) == 5
    assert why() == ""


def test_a_shard_that_lacks_a_holder_is_told_of_none(fleet: None, people: People) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="2+1")
    Node.objects.filter(name="n2").delete()
    assert shard("bare", "job1.full.0").redundancy is None
    assert names("n1") == set()
    keep()
    assert who() == ["n1", "n4", "n3"]
    assert shard("bare", "job1.full.0").redundancy is not None


def test_while_a_stream_moves_the_node_that_its_driver_uses_is_told(fleet: None, people: People) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="1+1")
    moves_it = Operation.objects.create(
        kind="session.move", target="session:job1", role=0, total=1, sentence="Move it"
    )
    Stream.objects.update(
        next_node=Node.objects.get(name="n4"),
        next_slots=10,
        next_tier=0,
        next_nic_leaf="l4",
        phase=Phase.MAKING,
        operation=moves_it,
    )
    assert shard("bare", "job1.full.0").redundancy is not None
    assert shard("n4", "job1.full.0").redundancy is None
    Stream.objects.update(phase=Phase.MOVING)
    assert shard("bare", "job1.full.0").redundancy is None
    assert shard("n4", "job1.full.0").redundancy is not None
    changes = relocation._Changes()
    changes.goes_on(Stream.objects.select_related("job__driver", "node", "next_node").get())
    assert changes.nodes == {"bare", "n4"}


# Who, and how long


def codes() -> dict[str, str]:
    """By stream."""
    streams = Stream.objects.select_related("job__driver")
    return {one.name: one.code for one in streams}


def told_of_fragments() -> list[tuple[Any, ...]]:
    """Of all drivers but `foundry`."""
    found = []
    for one in (one for node in NODES for one in document(node).shards if one.driver != "foundry"):
        told = one.redundancy
        found.append((one.name, one.part, told and (told.data, told.parity, told.holders)))
    return found


@pytest.mark.parametrize("theirs", ["none", "1+1", "4+1", "8+2"])
def test_no_org_changes_the_redundancy_of_anothers_driver(
    fleet: None, people: People, theirs: str
) -> None:
    """Whether its own rule fits the agents that there are or not."""
    serve("shared", "bare")
    serve("job1", "bare", org=people.acme)
    set_rules(people, redundancy="2+1")
    set_rules(people, people.acme, redundancy="1+1")
    documents = told_of_fragments()
    its = dict(codes())
    assert its == {"shared.full.0": "2+1", "job1.full.0": "1+1"}
    since = dict(FragmentHolder.objects.values_list("pk", "since"))
    serve("foundry", "bare", org=people.globex)
    keep()
    patient = {"replace_lost": False, "replace_lost_after_seconds": 86_400}
    set_rules(people, people.globex, redundancy=theirs, **patient)
    keep()
    assert {name: code for name, code in codes().items() if name in its} == its
    rows = dict(FragmentHolder.objects.filter(pk__in=since).values_list("pk", "since"))
    assert rows == since
    assert told_of_fragments() == documents
    lose(who()[0], 60)
    keep()
    assert {row.node.state for row in FragmentHolder.objects.select_related("node")} == {"ready"}, (
        "nor who waits for a holder"
    )


def test_an_orgs_rule_that_fits_no_agents_leaves_what_the_cluster_asks(
    fleet: None, people: People
) -> None:
    serve("job1", "bare", org=people.acme)
    set_rules(people, people.acme, redundancy="4+1")
    assert codes() == {"job1.full.0": ""}
    four = "4+1 needs 5 agents with tier 2 on a disk of their own; there are 4."
    assert why() == four
    set_rules(people, redundancy="1+1")
    set_rules(people, people.acme, redundancy="4+2")
    assert codes() == {"job1.full.0": "1+1"}
    assert why() == (
        "4+2 needs 6 agents with tier 2 on a disk of their own; there are 4. "
        "Columns have 1+1, as the cluster asks."
    )
    assert holders.missing(timezone.now()) == [("4+2", "1+1", 1, why())]
    told = shard("bare", "job1.full.0").redundancy
    assert told is not None
    assert (told.data, told.parity) == (1, 1)
    for name in ("n5", "n6"):
        make_node(name, "l1", declared=DISK)
    keep()
    assert (codes(), why()) == ({"job1.full.0": "4+2"}, "")
    assert {row.code for row in FragmentHolder.objects.all()} == {"4+2"}
    assert names("n1") == {f"job1.full.0.f{who().index('n1')}"}
    assert holders.missing(timezone.now()) == []


def test_drivers_of_two_codes_of_one_model_have_holders_of_their_own(
    fleet: None, people: People
) -> None:
    serve("job1", "bare", org=people.acme)
    serve("job2", "bare", org=people.globex)
    set_rules(people, people.acme, redundancy="2+1")
    before = last()
    set_rules(people, people.globex, redundancy="1+1")
    assert targets(before) == {("node", name) for name in ("bare", *_holders("1+1"))}
    assert FragmentHolder.objects.count() == 5
    parts = {one.name: one.part for name in _holders("2+1") for one in document(name).shards}
    assert {name: part for name, part in parts.items() if name.startswith("job1")} == {
        f"job1.full.0.f{place}": f"full.0.{place}-2-1" for place in range(3)
    }
    before = last()
    set_rules(people, people.globex, redundancy="2+1")
    assert FragmentHolder.objects.count() == 3
    assert targets(before) >= {("node", name) for name in ("bare", *_holders("2+1"))}, (
        "they let another driver in"
    )
    told = shard("bare", "job2.full.0").redundancy
    assert told is not None
    assert told.data == 2


def _holders(code: str) -> list[str]:
    found = FragmentHolder.objects.filter(code=code).order_by("place")
    return list(found.values_list("node__name", flat=True))


def test_a_lost_holder_is_replaced_once_the_rules_say_so(fleet: None, people: People) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="2+1", replace_lost_after_seconds=60)
    since = FragmentHolder.objects.get(place=0).since
    lose("n2", 59)
    keep()
    assert who() == ["n1", "n2", "n3"]
    lose("n2", 61)
    before = last()
    keep()
    assert who() == ["n1", "n4", "n3"]
    assert FragmentHolder.objects.get(place=0).since == since, "the others stay"
    assert targets(before) == {("node", name) for name in ("bare", "n1", "n2", "n3", "n4")}
    before = last()
    keep()
    assert targets(before) == set()


def test_a_lost_holder_stays_where_the_rules_or_too_many_losses_say_so(
    fleet: None, people: People
) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="1+1", replace_lost=False)
    lose("n2", 9999)
    keep()
    assert who() == ["n1", "n2"]
    lose("n3", 9999)
    set_rules(people, replace_lost=True)
    assert who() == ["n1", "n2"], "two of five are lost at once"
    Node.objects.filter(name="n3").update(state=State.READY.value, held_state="")
    keep()
    assert who() == ["n1", "n3"]


@pytest.mark.parametrize(
    "values",
    [
        {"state": State.DRAINING.value},
        {"state": State.MAINTENANCE.value},
        {"declared": {}},
        {"declared": {"tier2": {"kind": "s3", "bucket": "kv", "cap": "1TiB"}}},
    ],
)
def test_a_holder_that_leaves_is_replaced(fleet: None, people: People, values: dict[str, Any]) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="1+1")
    Node.objects.filter(name="n1").update(**values)
    keep()
    assert who() == ["n3", "n2"]


def test_one_that_is_cordoned_stays(fleet: None, people: People) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="1+1")
    Node.objects.filter(name="n1").update(state=State.CORDONED.value)
    keep()
    assert who() == ["n1", "n2"]


def test_one_that_leaves_stays_while_there_is_no_other(fleet: None, people: People) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="2+1")
    Node.objects.filter(name="n4").delete()
    Node.objects.filter(name="n1").update(state=State.DRAINING.value)
    keep()
    assert who() == ["n1", "n2", "n3"]
    assert why() == (
        "n1 is draining, and no other agent can take its fragments over. "
        "2+1 needs 3 agents with tier 2 on a disk of their own; there are 2."
    )


def test_another_code_is_told_to_those_who_stay(fleet: None, people: People) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="1+1")
    before = last()
    set_rules(people, redundancy="2+1")
    assert who() == ["n1", "n2", "n3"]
    assert {row.code for row in FragmentHolder.objects.all()} == {"2+1"}
    assert targets(before) == {("node", name) for name in ("bare", "n1", "n2", "n3")}
    assert shard("n1", "job1.full.0.f0").part == "full.0.0-2-1"


def test_a_group_whose_name_leaves_no_room_has_none(fleet: None, people: People) -> None:
    name = "g" * 58
    model = {"name": "llama", "groups": [{"name": name, "bytes_per_token": [192]}]}
    serve("job1", "bare", model=model)
    Stream.objects.update(group=name)
    set_rules(people, redundancy="1+1")
    assert not FragmentHolder.objects.exists()
    assert why() == f"The name of group {name} is too long to be that of fragments."
    assert names("bare") == {f"job1.{name}.0"}, "and documents stay valid"


def test_a_driver_with_columns_of_another_size_gets_no_holders(fleet: None, people: People) -> None:
    """Their fragments would overwrite each other; those that were there before keep theirs."""
    serve("job1", "bare")
    set_rules(people, redundancy="1+1")
    serve("job2", "n4")
    Stream.objects.filter(job__driver__name="job2").update(slot_bytes=2 * SLOT)
    keep()
    assert codes() == {"job1.full.0": "1+1", "job2.full.0": ""}
    assert shard("n4", "job2.full.0").redundancy is None
    assert why("job2") == "Another driver of this model and layout has columns of another size."
    assert why("job1") == ""


def test_a_driver_that_tells_of_other_columns_of_the_same_model_harms_none_on_its_nodes(
    fleet: None, people: People
) -> None:
    """Two shards that would write over each other make the document of a node invalid, for everybody."""
    serve("job1", "bare")
    serve("job2", "bare", model={**MODEL, "groups": [{"name": "full", "bytes_per_token": [384, 512]}]})
    Stream.objects.filter(job__driver__name="job2").update(slot_bytes=2 * SLOT)
    set_rules(people, redundancy="1+1")
    assert names("bare") == {"job1.full.0", "job2.full.0"}
    assert [why(name) for name in ("job1", "job2")] == ["", ""], "each has holders of its own"
    for node in ("n1", "n2", "n3"):
        assert document(node).shards


# When


def finish(operation: Operation) -> None:
    with obeying():
        for _ in range(20):
            if run(operation).done:
                break
    assert operation.state == "succeeded"


def start(people: People, name: str) -> None:
    make_driver(name)
    run(create(people, name, boxes=1))
    admin = people.principal("platform_admin")
    with transaction.atomic():
        session = sessions.for_change(admin, name)
        starting = jobs.start_job(admin, session, "serve", Driver.objects.get(name=name))
    finish(starting)


HOLDERS = {("node", "h1"), ("node", "h2")}


@pytest.fixture
def two_jobs(people: People) -> None:
    """`job1` runs, and `h1` and `h2` store its fragments."""
    make_fleet()
    for name in ("h1", "h2"):
        make_node(name, "l9", declared=DISK)
    set_rules(people, redundancy="1+1")
    assert not FragmentHolder.objects.exists()
    start(people, "job1")
    assert set(who()) == {"h1", "h2"}


def test_jobs_that_start_and_end_are_told_to_holders(people: People, two_jobs: None) -> None:
    before = last()
    start(people, "job2")
    assert targets(before) >= HOLDERS
    assert len(names("h1")) == 8
    before = last()
    admin = people.principal("platform_admin")
    with transaction.atomic():
        ending = jobs.end_job(admin, sessions.for_change(admin, "job2"), "serve")
    finish(ending)
    assert targets(before) >= HOLDERS
    assert FragmentHolder.objects.count() == 8, "job1 uses them"
    before = last()
    driver_removal.remove(admin, "job1")
    assert targets(before) >= HOLDERS
    assert not FragmentHolder.objects.exists()


def test_nodes_that_change_have_holders_looked_at(
    fleet: None, people: People, django_capture_on_commit_callbacks: Any
) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="1+1")
    admin = people.principal("platform_admin")
    sent: list[str] = []
    with mock.patch.object(current_app, "send_task", lambda name, *_, **__: sent.append(name)):
        with django_capture_on_commit_callbacks(execute=True):
            node = Node.objects.get(name="n1")
            fleet_nodes.set_state(admin, node, State.DRAINING, reason="disk")
        assert sent.count(holders.KEEP) == 1
        with django_capture_on_commit_callbacks(execute=True):
            text = dump(descriptions.current())
            descriptions.apply(admin, text.replace("cap: 1 T", "cap: 2 T"), reason="new disks")
        assert sent.count(holders.KEEP) == 2


def test_another_tier_2_for_more_holders_than_may_be_lost_says_what_is_lost(
    fleet: None, people: People
) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="2+1")
    assert who() == ["n1", "n2", "n3"]
    report()
    Node.objects.update(public_key="a key")

    def follows(*names: str) -> dict[str, str]:
        before = descriptions.current()
        moved = {"tier2": {**DISK["tier2"], "path": "/srv/kv"}}
        after = {one: {**said, **(moved if one[1] in names else {})} for one, said in before.items()}
        return {one.name: one.follows for one in descriptions.difference(before, after).changes}

    for few in (("n1",), ("n1", "n4")):
        found = follows(*few)
        assert all("is retiring then" in said and "miss" not in said for said in found.values()), found
    found = follows("n1", "n2", "n4")
    lost = "With it 5,000 redundant columns of 1 shard become misses: more of their fragments go than"
    assert {name: lost in said for name, said in found.items()} == {"n1": True, "n2": True, "n4": False}


def test_the_fleet_is_waited_for_in_its_queue(
    fleet: None, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_rules(people, redundancy="2+1")
    timeouts = waits_for_the_fleet(holders, monkeypatch)
    keep()
    assert timeouts == ["30s"]


def test_nothing_is_asked_of_the_database_while_nobody_wants_it(fleet: None) -> None:
    serve("job1", "bare")
    with CaptureQueriesContext(connection) as asked:
        holders.reconcile(timezone.now())
    assert len(asked) == 2
    with CaptureQueriesContext(connection) as asked:
        assert AllFragments().at("n1") == []
        assert AllFragments().bytes_by_node == {}
    assert len(asked) == 2


def test_documents_and_looks_take_as_many_queries_for_many_jobs_as_for_few(
    fleet: None, people: People
) -> None:
    def queries() -> tuple[int, int]:
        compiler = Compiler("node")
        with CaptureQueriesContext(connection) as documents:
            for name in ("n1", "n2", "bare"):
                compiler.compile(name, {})
        with CaptureQueriesContext(connection) as looks:
            keep()
        return len(documents), len(looks)

    for number in (0, 1):
        serve(f"job{number}", "bare")
    set_rules(people, redundancy="1+1")
    queries()  # secrets are made when they are first asked for
    before = queries()
    for number in range(2, 8):
        serve(f"job{number}", "bare")
    keep()
    assert len(names("n1")) == 8
    assert queries() == before


# What else counts shards


def test_what_fragments_take_of_a_nodes_memory_is_not_given_to_streams(
    fleet: None, people: People
) -> None:
    node = Node.objects.get(name="n1")
    free, published = Snapshot.now().fleet.node["n1"].memory_bytes, relocation.published_bytes(node)
    serve("job1", "bare")
    serve("job2", "bare")
    set_rules(people, redundancy="2+1")
    taken = 2 * SLOTS * fragment_slot_bytes(SLOT, 2)
    assert Snapshot.now().fleet.node["n1"].memory_bytes == free - taken
    assert relocation.published_bytes(node) == published + taken
    assert Snapshot.now().fleet.node["n4"].memory_bytes == free


def test_a_purge_waits_until_holders_speak_of_fragments(fleet: None, people: People) -> None:
    serve("job1", "bare")
    set_rules(people, redundancy="1+1")
    assert shards_of_node(Node.objects.get(name="n1")) == {"job1.full.0.f0"}
    assert shards_of_node(Node.objects.get(name="bare")) == {"job1.full.0"}


# What agents say


class Saying:
    """Agents that say this of every shard."""

    def __init__(self, nodes: set[Node], drivers: set[Driver]) -> None:
        assert {node.name for node in nodes} == {"bare"}
        assert not drivers

    def shard_at(self, node: str, name: str) -> ShardSaid:
        assert node == "bare"
        said = Said(
            state="indexing",
            columns=9000,
            incomplete=1204,
            incomplete_at=[0, 1204],
            most_lacking=1,
            repaired=3,
            unreachable=["unix:/nowhere/n1"],
        )
        return ShardSaid(name=name, state="ready", redundancy=said)


def test_what_agents_say_of_redundancy_is_stored_and_forgotten(
    fleet: None, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redundancy, "Observations", Saying)
    serve("job1", "bare")
    assert redundancy.look() == 0
    set_rules(people, redundancy="1+1")
    for _ in range(2):
        assert redundancy.look() == 1
        [row] = StreamRedundancy.objects.all()
        assert (row.stream.name, row.state) == ("job1.full.0", "indexing")
        assert (row.columns, row.incomplete, row.repaired) == (9000, 1204, 3)
        assert (row.incomplete_at, row.most_lacking) == ([0, 1204], 1)
        assert row.unreachable == ["unix:/nowhere/n1"]
    set_rules(people, redundancy="none")
    redundancy.look()
    assert not StreamRedundancy.objects.exists()
