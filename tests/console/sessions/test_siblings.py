"""Siblings: who may borrow columns from whom, and the documents that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext

from console.accounts.roles import Role
from console.control import rounds
from console.control import services as control
from console.control.documents import Compiler, Document
from console.control.models import Change, Target
from console.fleet.models import Driver, Nic, Node, SpineLink
from console.fleet.services import for_change, visible_drivers
from console.operations.models import Operation
from console.orgs.models import Org
from console.placement.rules import Borrow
from console.routing.models import Replica, ServedModel
from console.sessions import desired, driver_orgs, endpoints, siblings
from console.sessions import services as sessions
from console.sessions.changes import driver_removal, jobs, moves
from console.sessions.models import DriverOrg, Job, Phase, RuleSet, Session, SessionBox, Stream
from console.sessions.siblings import Siblings
from inference_brain import desired as of_brains
from kvss_agent import desired as of_agents
from kvss_agent.security.identity import ProcessIdentity, fingerprint
from swdriver_shim import desired as of_drivers
from swdriver_shim.lending import token_for
from tests.conftest import People
from tests.console.operations.runs import run
from tests.console.sessions.fleets import leaf, make_box, make_driver, make_fleet, make_node
from tests.console.sessions.obeying import obeying
from tests.console.sessions.requests import create, set_rules

pytestmark = pytest.mark.django_db

GBIT = 125_000_000
MODEL = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [192, 256]}]}


def lend(name: str, *nodes: str, org: Org | None = None, orgs: Iterable[Org] | None = None) -> Driver:
    """A driver whose job runs with a stream on each of these nodes, in a session of this org. `orgs`:
    those that it may serve; None for all."""
    driver = make_driver(name, MODEL)
    if orgs is not None:
        DriverOrg.objects.filter(driver=driver).delete()
        DriverOrg.objects.bulk_create(DriverOrg(driver=driver, org=one) for one in orgs)
    session = Session.objects.create(name=name, org=org, boxes_desired=1, boxes_min=1, boxes_increment=1)
    box = make_box(f"box-{name}")
    SessionBox.objects.create(session=session, box=box, ready=True)
    job = Job.objects.create(session=session, name="serve", driver=driver, running=True)
    for index, node in enumerate(nodes):
        nic = Nic.objects.select_related("leaf").filter(node__name=node).first()
        assert nic is not None
        Stream.objects.create(
            job=job,
            group="full",
            index=index,
            box=box,
            domain=index,
            wio=3,
            slot_bytes=4096 * (3 + index),
            slots=10,
            node=Node.objects.get(name=node),
            tier=0,
            port_leaf=nic.leaf.name,
            nic_leaf=nic.leaf.name,
        )
    return driver


@pytest.fixture
def fleet(db: None) -> None:
    """`a1` and `a2` have NICs on leaf l1, `b1` on l2; leaves have 400 Gbit/s up."""
    for name, of in (("a1", "l1"), ("a2", "l1"), ("b1", "l2")):
        make_node(name, of)
    for name in ("l1", "l2"):
        SpineLink.objects.create(name=f"{name}-up", leaf=leaf(name), spine="s", gbits=400)


def found() -> dict[str, list[str]]:
    """By driver those that it borrows from."""
    all_of_them = Siblings()
    names = Driver.objects.values_list("name", flat=True)
    return {name: its for name in names if (its := all_of_them.names_of(name))}


def why_none(name: str) -> str:
    return Siblings().why_none(name)


def driver_document(name: str) -> of_drivers.Desired:
    return of_drivers.parse(compiled(name).of_generation(1))


def compiled(name: str) -> Document:
    """The document of a driver."""
    target = Target.objects.get_or_create(kind="driver", name=name)[0]
    return Compiler("driver").compile(name, rounds._bases("driver", [target])[name])


def node_document(name: str) -> of_agents.Desired:
    return of_agents.parse(Compiler("node").compile(name, {}).of_generation(1))


def readers(node: str) -> dict[str, tuple[str, ...]]:
    return {one.name: one.readers for one in node_document(node).shards}


def brain_siblings(*names: str) -> dict[str, tuple[str, ...]]:
    """What brains are told of the siblings of these."""
    model = ServedModel.objects.create(name="chat", model="chat", tokens_max=1000)
    for name in names:
        driver = Driver.objects.get(name=name)
        Replica.objects.create(model=model, name=name, url="http://127.0.0.1:1", driver=driver)
    document = Compiler("brain").compile("east", {"brain": "east"})
    [told] = of_brains.parse(document.of_generation(1)).models
    return {one.driver.name: one.driver.siblings for one in told.replicas if one.driver}


# Who is one


def test_drivers_of_one_model_on_one_leaf_borrow_from_each_other_and_all_are_told(
    fleet: None, tmp_path: Any
) -> None:
    lend("job1", "a1", "a2")
    lend("job2", "a2", "a2")
    lend("alone", "b1", "b1")
    identity = ProcessIdentity.load(tmp_path, "driver:job2")
    Driver.objects.filter(name="job2").update(public_key=identity.public_key_pem)
    assert found() == {"job1": ["job2"], "job2": ["job1"]}

    [sibling] = driver_document("job1").siblings
    assert (sibling.driver, sibling.url) == ("job2", "http://127.0.0.1:9")
    assert sibling.key == fingerprint(identity.public_key_pem)
    assert sibling.token == token_for(control.secret_of("driver", "job2"), "job1")
    first, second = sibling.homes
    assert (first.group, first.index, first.shard) == ("full", 0, "job2.full.0")
    assert (first.path, first.address) == ("leaf", "unix:/nowhere/a2")
    assert first.bytes_per_second == 25 * GBIT
    assert (second.path, second.bytes_per_second) == ("node", None)
    assert driver_document("alone").siblings == ()

    assert readers("a2") == {
        "job1.full.1": ("job2",),
        "job2.full.0": ("job1",),
        "job2.full.1": ("job1",),
    }
    peers = {peer.name: peer.secret for peer in node_document("a1").peers}
    assert peers == {name: control.secret_of("driver", name) for name in ("job1", "job2")}
    assert readers("b1") == {"alone.full.0": (), "alone.full.1": ()}
    assert brain_siblings("job1", "alone") == {"job1": ("job2",), "alone": ()}


def test_documents_without_siblings_are_what_they_were_before(fleet: None) -> None:
    lend("job1", "a1", "a2")
    assert b"siblings" not in compiled("job1").content
    assert b"readers" not in Compiler("node").compile("a1", {}).content


def another_model(_: People) -> None:
    other = {**MODEL, "groups": [{"name": "full", "bytes_per_token": [192, 128]}]}
    Driver.objects.filter(name="job2").update(model=other)


def no_model(_: People) -> None:
    Driver.objects.filter(name="job2").update(model=None)


def not_running(_: People) -> None:
    Job.objects.filter(driver__name="job2").update(running=False)


def no_address(_: People) -> None:
    Driver.objects.filter(name="job2").update(control_url="unix:/nowhere")


def other_shards(_: People) -> None:
    Stream.objects.filter(job__driver__name="job2", index=1).delete()


def no_borrowing(people: People) -> None:
    set_rules(people, borrow="no")


def same_nodes_only(people: People) -> None:
    set_rules(people, borrow="node")


def moving(_: People) -> None:
    begin_to_move("job2")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (another_model, "No other driver runs this model."),
        (no_model, "No other driver runs this model."),
        (not_running, "No other driver runs this model."),
        (no_address, "No other driver runs this model."),
        (other_shards, "The other drivers of this model have other shards."),
        (no_borrowing, "The session rules allow no borrowing."),
        (same_nodes_only, "No other driver of this model is as near as the session rules want it: "),
        (moving, "The streams of its siblings are moving: "),
    ],
)
def test_why_there_is_none(
    fleet: None, people: People, change: Callable[[People], None], why: str
) -> None:
    lend("job1", "a1", "a2")
    lend("job2", "a2", "a2")
    assert why_none("job1") == ""
    change(people)
    assert found() == {}
    assert why_none("job1").startswith(why)
    assert driver_document("job1").siblings == ()


def test_a_driver_without_a_running_job_has_none(fleet: None) -> None:
    make_driver("idle", MODEL)
    lend("job1", "a1", "a2")
    assert (found(), why_none("idle")) == ({}, "It has no running job.")


def test_it_may_serve_all_that_a_sibling_stores(fleet: None, people: People) -> None:
    """It may read any slot of the sibling's shards."""
    acme, globex = people.acme, people.globex
    lend("all", "a1", "a1")
    lend("both", "a1", "a1", orgs=[acme, globex])
    lend("one", "a1", "a1", orgs=[acme])
    lend("other", "a1", "a1", orgs=[globex])
    assert found() == {"all": ["both", "one", "other"], "both": ["one", "other"]}
    assert why_none("one") == (
        "The other drivers of this model may store columns of orgs that it may not serve."
    )
    assert readers("a1")["one.full.0"] == ("all", "both")


def test_a_node_lets_in_as_many_as_its_document_may_name(
    fleet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lend("job1", "a1", "a1")
    for name in ("job2", "job3"):
        lend(name, "a2", "a2")
    assert readers("a1")["job1.full.0"] == ("job2", "job3")
    monkeypatch.setattr(desired, "SHARDS_MAX", 2)
    assert readers("a1")["job1.full.0"] == ("job2",)
    assert {peer.name for peer in node_document("a2").peers} == {"job2", "job3"}


def test_an_org_that_leaves_is_stored_still_and_served_no_more(fleet: None, people: People) -> None:
    acme, globex = people.acme, people.globex
    lend("job1", "a1", "a1", orgs=[acme])
    lend("job2", "a1", "a1", orgs=[acme, globex])
    DriverOrg.objects.filter(driver__name="job2", org=globex).update(is_leaving=True)
    assert found() == {"job2": ["job1"]}
    DriverOrg.objects.filter(driver__name="job2", org=globex).delete()
    DriverOrg.objects.create(driver=Driver.objects.get(name="job1"), org=globex, is_leaving=True)
    assert found() == {"job1": ["job2"]}


# How far


def test_the_rule_says_how_far_away(fleet: None, people: People) -> None:
    lend("job1", "a1", "a1")
    lend("here", "a1", "a1")
    lend("near", "a1", "a2")
    lend("far", "a2", "b1")
    by_rule = {"no": [], "node": ["here"], "leaf": ["here", "near"], "spine": ["far", "here", "near"]}
    for rule, names in by_rule.items():
        set_rules(people, borrow=rule)
        assert Siblings().names_of("job1") == names
    assert [(one.driver.name, one.far) for one in Siblings().of("job1")] == [
        ("here", Borrow.NODE),
        ("near", Borrow.LEAF),
        ("far", Borrow.SPINE),
    ]


def test_agents_reach_siblings_by_their_one_address_whatever_way_streams_take(
    fleet: None, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "_ways", [lambda _, tier: "tcp:a-way:1" if tier else None])
    lend("job1", "a1", "a1")
    lend("job2", "b1", "b1")
    set_rules(people, borrow="spine")
    [sibling] = driver_document("job1").siblings
    assert {(one.path, one.address) for one in sibling.homes} == {("spine", "unix:/nowhere/b1")}


def test_the_stricter_rule_of_both_orgs_holds(fleet: None, people: People) -> None:
    lend("job1", "a1", "a1", org=people.acme)
    lend("job2", "a2", "a2", org=people.globex)
    assert set(found()) == {"job1", "job2"}
    assert set_rules(people, people.acme, boxes_max=9).borrow == "spine", "it adds nothing by itself"
    assert set(found()) == {"job1", "job2"}
    set_rules(people, people.globex, borrow="node")
    assert found() == {}


def test_the_slowest_link_says_how_fast(fleet: None, people: People) -> None:
    lend("job1", "a1", "a1", org=people.acme)
    lend("job2", "b1", "b1")
    set_rules(people, borrow="spine", moves_percent=50)
    assert speed_of("job1") == 50 * GBIT
    SpineLink.objects.filter(name="l2-up").update(gbits=40)
    assert speed_of("job1") == 20 * GBIT
    set_rules(people, people.acme, moves_percent=10)
    assert (speed_of("job1"), speed_of("job2")) == (4 * GBIT, 20 * GBIT)
    Nic.objects.create(node=Node.objects.get(name="a1"), leaf=leaf("l2"), name="other", gbits=60)
    assert speed_of("job1") == 6 * GBIT, "on a leaf that both are on, the spine is not asked"
    Nic.objects.all().delete()
    SpineLink.objects.all().delete()
    assert speed_of("job1") is None, "nobody has described the links"


def speed_of(name: str) -> int | None:
    [sibling] = Siblings().of(name)
    return sibling.bytes_per_second


def test_each_has_the_nearest_ones_and_lends_to_as_many(
    fleet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "SIBLINGS_MAX", 2)
    for name in ("j1", "j2", "j3", "j4"):
        lend(name, "a1", "a1")
    lend("j5", "a2", "a2")
    assert found() == {
        "j1": ["j2", "j3"],
        "j2": ["j3", "j4"],
        "j3": ["j1", "j4"],
        "j4": ["j1", "j2"],
        "j5": ["j1", "j2"],
    }
    assert [one.driver.name for one in Siblings().of("j4")] == ["j1", "j2"]


def begin_to_move(name: str) -> None:
    """The first stream of this driver."""
    moves_it = Operation.objects.create(
        kind="session.move", target=f"session:{name}", role=0, total=1, sentence="Move it"
    )
    Stream.objects.filter(job__driver__name=name, index=0).update(
        next_node=Node.objects.get(name="b1"),
        next_slots=10,
        next_tier=0,
        next_nic_leaf="l2",
        phase=Phase.MOVING,
        operation=moves_it,
    )


def test_while_its_streams_move_a_driver_neither_lends_nor_borrows(fleet: None) -> None:
    lend("job1", "a1", "a2")
    lend("job2", "a2", "a2")
    begin_to_move("job2")
    assert found() == {}
    assert why_none("job2") == "Its streams are moving: it borrows again when they have arrived."
    assert driver_document("job1").siblings == driver_document("job2").siblings == ()
    assert readers("a1")["job1.full.0"] == ("job2",), "agents are told once it has arrived elsewhere"
    assert readers("b1") == {"job2.full.0": ("job1",)}
    assert ("driver", "job1") in siblings.documents_of("job2")


# Who is told


def targets(begin: int) -> set[tuple[str, str]]:
    """Whose documents have changed since."""
    changes = Change.objects.filter(pk__gt=begin)
    return {(kind, name) for change in changes for kind, name in change.targets}


def last() -> int:
    return Change.objects.values_list("pk", flat=True).first() or 0


NAMED = {("driver", "job1"), ("brain", "*"), *(("node", f"ax{number}") for number in range(1, 5))}


@pytest.fixture
def two_jobs(people: People) -> None:
    """`job1` and `job2` run in sessions of their names, each with a stream on each of four nodes."""
    make_fleet()
    for number in (1, 2):
        make_driver(f"job{number}")
        run(create(people, f"job{number}", boxes=1))
        if number == 1:
            start(people, "job1")


def start(people: People, name: str) -> None:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        session = sessions.for_change(admin, name)
        starting = jobs.start_job(admin, session, "serve", Driver.objects.get(name=name))
    finish(starting)


def finish(operation: Operation) -> None:
    """Agents and drivers are at once what they are told."""
    with obeying():
        for _ in range(20):
            if run(operation).done:
                break
    assert operation.state == "succeeded"


def test_a_job_that_starts_or_ends_is_told_to_siblings_their_nodes_and_brains(
    people: People, two_jobs: None
) -> None:
    before = last()
    start(people, "job2")
    assert targets(before) >= NAMED
    assert found() == {"job1": ["job2"], "job2": ["job1"]}
    before = last()
    admin = people.principal("platform_admin")
    with transaction.atomic():
        ending = jobs.end_job(admin, sessions.for_change(admin, "job2"), "serve")
    finish(ending)
    assert targets(before) >= NAMED
    assert found() == {}


def test_so_is_one_whose_driver_is_removed(people: People, two_jobs: None) -> None:
    start(people, "job2")
    before = last()
    driver_removal.remove(people.principal("platform_admin"), "job2")
    assert targets(before) >= NAMED
    assert ("driver", "job2") not in targets(before)


def test_a_move_is_told_when_it_begins_and_when_it_has_arrived(people: People, two_jobs: None) -> None:
    start(people, "job2")
    make_node("ax5", "l1")
    admin = people.principal("platform_admin")
    before = last()
    with transaction.atomic():
        session = sessions.for_change(admin, "job2")
        stream = sessions.get_stream(session, "job2.full.0")
        operation = moves.move(admin, session, stream, Node.objects.get(name="ax5"))
    finish(operation)
    told = [change.targets for change in Change.objects.filter(pk__gt=before)]
    assert sum(["driver", "job1"] in some for some in told) == 2
    assert targets(before) >= {*NAMED, ("node", "ax5")}
    home, *_ = driver_document("job1").siblings[0].homes
    assert (home.path, home.address) == ("leaf", "unix:/nowhere/ax5")
    assert readers("ax5") == {"job2.full.0": ("job1",)}


def test_other_orgs_are_told(people: People, two_jobs: None) -> None:
    start(people, "job2")
    before = last()
    put(people, "job2", [people.acme, people.globex])
    assert targets(before) >= NAMED
    assert found() == {"job2": ["job1"]}
    before = last()
    put(people, "job2", [people.acme])
    assert ("driver", "job1") in targets(before)


def put(people: People, name: str, orgs: list[Org]) -> None:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        driver = for_change(admin, visible_drivers, name, Role.PLATFORM_ADMIN)
        driver_orgs.set_orgs(admin, driver, orgs)


def test_jobs_without_siblings_tell_nobody_else(people: People, two_jobs: None) -> None:
    Driver.objects.filter(name="job1").update(model=MODEL)
    before = last()
    start(people, "job2")
    assert not targets(before) & {("driver", "job1"), ("brain", "*")}


def test_rules_are_told_to_all(people: People, fleet: None) -> None:
    before = last()
    set_rules(people, borrow="node")
    assert targets(before) == {("node", "*"), ("driver", "*"), ("brain", "*")}
    before = last()
    set_rules(people, moves_percent=7)
    assert targets(before) == {("node", "*"), ("driver", "*")}


def test_documents_take_as_many_queries_for_many_siblings_as_for_few(fleet: None) -> None:
    def queries() -> tuple[int, int, int]:
        counts = []
        for kind, names in (("driver", ["j1", "j2"]), ("node", ["a1", "a2"])):
            compiler = Compiler(kind)
            with CaptureQueriesContext(connection) as asked:
                for name in names:
                    model = {"model": MODEL, "driver": name, "secret": b"s" * 32}
                    compiler.compile(name, model if kind == "driver" else {})
            counts.append(len(asked))
        with CaptureQueriesContext(connection) as asked:
            siblings.documents_of("j1")
        return counts[0], counts[1], len(asked)

    for number in (1, 2):
        lend(f"j{number}", "a1", "a2")
    queries()  # secrets are made when they are first asked for
    before = queries()
    for number in range(3, 9):
        lend(f"j{number}", "a1", "a2")
    assert len(driver_document("j1").siblings) == 7
    assert queries() == before


# The rule


def test_the_rule_over_rest(people: People, api_of: Callable[..., Client]) -> None:
    client = api_of(people.platform_admin)
    address = "/api/v1/session-rules"
    rules = client.get(address).json()
    assert rules["borrow"] == "leaf"

    def put_rules(**values: Any) -> Any:
        body = {**rules, **values}
        headers = {"If-Match": "*", "Idempotency-Key": str(values)}
        sent = {name: value for name, value in body.items() if name != "version"}
        return client.put(address, sent, content_type="application/json", headers=headers)

    assert put_rules(borrow="spine").json()["borrow"] == "spine"
    assert put_rules(borrow=None).json()["borrow"] == "spine", "of a client that does not know it"
    assert put_rules(borrow="moon").status_code == 422
    assert RuleSet.objects.get(org=None).borrow == "spine"


def test_the_rule_on_its_page(people: People, browser_of: Callable[..., Client]) -> None:
    browser = browser_of(people.platform_admin)
    page = browser.get("/session-rules/").content.decode()
    assert "How far drivers copy columns from the memory of other drivers" in page
    assert "on the same node or leaf" in page
    form = {"path": "any", "wait_for_rail_seconds": 0, "boxes_min": 1, "boxes_increment": 1}
    form |= {"grant_percent": 100, "moves_percent": 25, "borrow": "no", "redundancy": "none"}
    form |= {"replace_lost_after_seconds": 20, "version": RuleSet(org=None).version}
    assert browser.post("/session-rules/", {**form, "reason": "quiet"}).status_code == 302
    assert RuleSet.objects.get(org=None).borrow == "no"
    assert "not used" in browser.get("/session-rules/").content.decode()


def test_a_drivers_page_names_its_siblings_or_says_why_there_is_none(
    fleet: None, people: People, browser_of: Callable[..., Client]
) -> None:
    lend("job1", "a1", "a1")
    lend("job2", "a2", "a2")
    browser = browser_of(people.platform_viewer)

    def said() -> str:
        page = browser.get("/fleet/drivers/job1/").content.decode()
        _, _, rest = page.partition("<dt>Siblings</dt>")
        return " ".join(rest.partition("</dd>")[0].split())

    assert "job2</a>" in said()
    assert "over a leaf, at most 2.91 GiB/s" in said()
    set_rules(people, borrow="no")
    assert "The session rules allow no borrowing." in said()
