"""Lost nodes are replaced: what is started, stored and shown. Drivers are answers over HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.test import Client
from django.utils import timezone

from console.accounts.models import User
from console.accounts.principal import SYSTEM
from console.alerts.rules.catalogue import BY_SLUG
from console.alerts.state.lifecycle import Verdict as AlertVerdict
from console.alerts.state.snapshot import take_snapshot
from console.fleet.models import Box, Node, Watch
from console.operations import services as operations
from console.operations.models import Operation
from console.placement.topology import Tier
from console.sessions import services
from console.sessions.changes import jobs, moves, replacements
from console.sessions.changes.replacements import KIND
from console.sessions.models import Job, Loss, Phase, RuleSet, Session, SessionBox, Stream
from console.sessions.steps import relocation
from console.sessions.steps.observations import Observations
from telemetry.models import Event
from tests.conftest import People
from tests.console.operations.runs import run
from tests.console.sessions.fleets import arrive, make_driver, make_fleet, waits_for_the_fleet
from tests.console.sessions.requests import set_rules

pytestmark = pytest.mark.django_db

SLOT_BYTES = 1 << 20


class Answers(ThreadingHTTPServer):
    """A driver's control API, which says the same about all of its shards unless told otherwise."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.states: dict[int, str] = {}
        self.addresses: dict[int, str] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def shown(self) -> bytes:
        shards = [
            {"group": "full", "index": index, "address": address, "state": self.states[index]}
            for index, address in self.addresses.items()
        ]
        return json.dumps({"generation": 1, "observed_generation": 1, "shards": shards}).encode()


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Answers)
        body = self.server.shown()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def driver() -> Iterator[Answers]:
    """The driver `job7` of the session `chat`, whose four streams are on `ax1` to `ax4`, on rails."""
    answers = Answers()
    yield answers
    answers.shutdown()
    answers.server_close()


@pytest.fixture
def chat(people: People, driver: Answers) -> Session:
    make_fleet(boxes=1, memory_bytes=100 * SLOT_BYTES)
    session = Session.objects.create(
        name="chat", org=people.acme, boxes_desired=1, boxes_min=1, boxes_increment=1
    )
    box = Box.objects.get(name="cs1")
    SessionBox.objects.create(session=session, box=box, ready=True)
    made = make_driver("job7", control_url=driver.url)
    job = Job.objects.create(session=session, name="serve", driver=made, running=True)
    for index in range(4):
        node = Node.objects.get(name=f"ax{index + 1}")
        Stream.objects.create(
            job=job,
            group="full",
            index=index,
            box=box,
            domain=index,
            wio=3,
            slot_bytes=SLOT_BYTES,
            slots=40,
            node=node,
            tier=Tier.RAIL.value,
            port_leaf=f"l{index + 1}",
            nic_leaf=f"l{index + 1}",
        )
        driver.addresses[index], driver.states[index] = node.data_address, "here"
    return session


def look(seconds: float = 0.0) -> int:
    """So many seconds after the test has begun, with heartbeats of all nodes that are not lost."""
    now = began[0] + timedelta(seconds=seconds)
    Watch.objects.update_or_create(
        pk=1, defaults={"listening_since": now - timedelta(hours=1), "swept_at": now}
    )
    Node.objects.exclude(name__in=lost_nodes).update(last_heartbeat_at=now)
    Node.objects.filter(name__in=lost_nodes).update(last_heartbeat_at=began[0])
    return replacements.look(now)


lost_nodes: set[str] = set()
began: list[datetime] = []


@pytest.fixture(autouse=True)
def _nobody_is_lost() -> None:
    lost_nodes.clear()
    began[:] = [timezone.now()]


def lose(driver: Answers, *indices: int) -> None:
    for index in indices:
        lost_nodes.add(f"ax{index + 1}")
        driver.states[index] = "lost"


def lost_for_long(driver: Answers, *indices: int) -> int:
    """How many operations began."""
    lose(driver, *indices)
    return sum(look(seconds) for seconds in (12, 14, 16, 18, 20, 22))


@pytest.mark.django_db(transaction=True)
def test_streams_of_a_lost_node_are_placed_on_other_nodes_with_their_reason(
    chat: Session, driver: Answers
) -> None:
    assert look() == 0
    lose(driver, 1)
    assert look(5) == 0
    assert not Loss.objects.exists()  # a heartbeat may be late
    assert look(12) == 0
    assert Loss.objects.get().sentence.startswith("ax2 is lost: it is replaced in ")
    assert look(21) == 1
    operation = Operation.objects.get(kind=KIND)
    assert (operation.target, operation.org_id) == ("session:chat#ax2", chat.org_id)
    assert operation.sentence == "Replace ax2 of chat, which is lost"
    [told] = operation.plan["streams"]
    assert told["stream"] == "job7.full.1"
    assert told["path"] == "leaf"
    assert told["why"] == "ax2 with a NIC on its leaf is lost, or not joined yet"
    assert (told["slots"], told["slots_before"]) == (40, 40)
    stream = Stream.objects.get(index=1)
    assert stream.next_node is not None
    assert stream.next_node.name == told["node"]
    assert (Loss.objects.get().verdict, Loss.objects.get().operation) == ("replacing", operation)
    assert look(23) == 0  # once
    arrive(operation)
    assert run(operation).state == "succeeded"
    operation.refresh_from_db()
    assert operation.response
    assert operation.response["moved"] == 1
    look(25)
    assert Loss.objects.get().verdict == "replaced"
    assert Loss.objects.get().sentence == "ax2 is lost. 1 stream is on other nodes."
    lost_nodes.clear()
    look(27)
    assert not Loss.objects.exists()
    kinds = set(Event.objects.values_list("kind", flat=True))
    assert {KIND, "session.replaced-node", "operation.succeeded"} <= kinds


def test_a_node_that_only_the_console_cannot_reach_keeps_its_streams(
    chat: Session, driver: Answers
) -> None:
    lost_nodes.add("ax2")
    assert sum(look(seconds) for seconds in range(12, 60, 4)) == 0
    assert not Loss.objects.exists()


def test_nothing_is_replaced_while_the_console_has_not_listened(chat: Session, driver: Answers) -> None:
    lose(driver, 1)
    now = began[0] + timedelta(seconds=30)
    Watch.objects.create(pk=1, listening_since=now - timedelta(seconds=3), swept_at=now)
    assert replacements.look(now) == 0
    assert not Loss.objects.exists()


def test_a_stream_that_its_driver_has_back_stays_with_its_memory(chat: Session, driver: Answers) -> None:
    assert lost_for_long(driver, 1) == 1
    operation = Operation.objects.get(kind=KIND)
    driver.states[1] = "here"
    assert run(operation).state == "succeeded"
    assert operation.message == "ax2 is back: 1 stream is still there, with their memory."
    stream = Stream.objects.get(index=1)
    assert (stream.node.name, stream.next_node, stream.phase) == ("ax2", None, Phase.SETTLED)
    look(30)
    assert not Loss.objects.exists()


def test_a_stream_whose_job_ends_meanwhile_has_not_moved(
    people: People, chat: Session, driver: Answers
) -> None:
    assert lost_for_long(driver, 1) == 1
    admin = people.principal("platform_admin")
    with transaction.atomic():
        ending = jobs.end_job(admin, services.for_change(admin, "chat"), "serve")
    operations.advance(ending.pk)
    operation = run(Operation.objects.get(kind=KIND))
    assert (operation.state, operation.message) == ("succeeded", "The job of 1 stream has ended.")
    assert operation.response is not None
    assert operation.response["moved"] == 0
    look(30)
    assert not Loss.objects.exists()


def test_a_stream_that_ends_with_its_job_while_its_driver_is_asked_is_not_stored_again(
    chat: Session, driver: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lost_for_long(driver, 1) == 1
    driver.states[1] = "here"

    def asked(*who: Any) -> Observations:
        facts = Observations(*who)
        Job.objects.all().delete()
        return facts

    monkeypatch.setattr(replacements, "Observations", asked)
    operation = run(Operation.objects.get(kind=KIND))
    assert not Stream.objects.exists()
    assert (operation.state, operation.message) == ("succeeded", "The job of 1 stream has ended.")


@pytest.mark.django_db(transaction=True)
def test_a_job_can_end_while_agents_of_new_nodes_are_asked(
    chat: Session, driver: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes up to seconds, and as long no stream is locked."""
    assert lost_for_long(driver, 1) == 1
    free: list[int] = []

    def lock_all() -> None:
        with transaction.atomic(), contextlib.suppress(OperationalError):
            free.append(len(Stream.objects.select_for_update(nowait=True)))
        connection.close()

    def asked(*who: Any) -> Observations:
        beside = threading.Thread(target=lock_all)
        beside.start()
        beside.join()
        return Observations(*who)

    monkeypatch.setattr(relocation, "Observations", asked)
    operations.advance(Operation.objects.get(kind=KIND).pk)
    assert free == [4]


def test_a_stream_whose_new_node_is_lost_as_well_is_planned_again(
    chat: Session, driver: Answers
) -> None:
    assert lost_for_long(driver, 1) == 1
    operation = Operation.objects.get(kind=KIND)
    target = operation.plan["streams"][0]["node"]
    Node.objects.filter(name=target).update(state="lost", held_state="ready")
    lost_nodes.add(target)
    assert run(operation).state == "succeeded"
    assert Stream.objects.get(index=1).next_node is None
    assert look(36) == 1
    again = Operation.objects.filter(kind=KIND).latest("created_at")
    assert again.plan["streams"][0]["node"] not in ("ax2", target)


def test_without_room_it_gets_fewer_slots_and_without_any_a_person_is_told(
    chat: Session, driver: Answers
) -> None:
    Node.objects.update(memory_bytes=65 * SLOT_BYTES)
    assert lost_for_long(driver, 1) == 1
    [told] = Operation.objects.get(kind=KIND).plan["streams"]
    assert (told["slots"], told["slots_before"]) == (20, 40)


def test_the_fleet_is_waited_for_in_its_queue(
    chat: Session, driver: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = waits_for_the_fleet(replacements, monkeypatch)
    lose(driver, 1)
    look(12)
    assert timeouts == ["30s"]


def test_without_a_place_a_person_is_told_why(chat: Session, driver: Answers) -> None:
    Node.objects.update(memory_bytes=41 * SLOT_BYTES)
    assert lost_for_long(driver, 1) == 0
    assert not Operation.objects.filter(kind=KIND).exists()
    loss = Loss.objects.get()
    assert loss.verdict == "blocked"
    assert "has no node for 40 MiB" in loss.sentence
    assert "lacks" in loss.sentence
    told = take_snapshot(timezone.now())
    [finding] = BY_SLUG["lost-node-not-replaced"].condition({}, told, lambda _: {})
    assert (finding.topic, finding.verdict) == ("session:chat", AlertVerdict.BREACH)
    assert finding.labels == {"node": "ax2"}
    assert finding.sentence.startswith("ax2 is lost, and its streams can't be placed anew")
    assert Event.objects.filter(kind="session.lost-node").count() == 1


def test_rules_about_paths_hold(people: People, chat: Session, driver: Answers) -> None:
    set_rules(people, path="require_rail")
    assert lost_for_long(driver, 1) == 0
    assert Loss.objects.get().verdict == "blocked"


def test_an_org_can_switch_it_off(people: People, chat: Session, driver: Answers) -> None:
    set_rules(people, people.acme, replace_lost=False)
    assert lost_for_long(driver, 1) == 0
    assert "the rules say not to replace it" in Loss.objects.get().sentence


def test_an_org_can_only_wait_longer(people: People, chat: Session, driver: Answers) -> None:
    set_rules(people, people.acme, replace_lost_after_seconds=60)
    assert lost_for_long(driver, 1) == 0
    assert look(61) == 1
    RuleSet.objects.all().delete()
    assert RuleSet().replace_lost_after_seconds == 20


def test_one_that_was_cancelled_is_not_started_again(chat: Session, driver: Answers) -> None:
    assert lost_for_long(driver, 1) == 1
    operation = Operation.objects.get(kind=KIND)
    operations.cancel(SYSTEM, operation.pk)
    assert run(operation).state == "cancelled"
    assert look(30) == 0
    assert "It was cancelled" in Loss.objects.get().sentence


def test_a_move_off_a_lost_node_that_waits_for_ever_is_told_a_person(
    people: People, chat: Session, driver: Answers
) -> None:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        session = services.for_change(admin, "chat")
        stream = services.get_stream(session, "job7.full.0")
        moving = moves.move(admin, session, stream, Node.objects.get(name="ax2"))
    assert lost_for_long(driver, 0) == 0
    assert Loss.objects.get().verdict == "replacing"
    look(200)
    assert Loss.objects.get().verdict == "blocked"
    assert "has not moved job7.full.0 yet" in Loss.objects.get().sentence
    Operation.objects.filter(pk=moving.pk).update(state="stuck")
    look(202)
    assert "is stuck: retry it" in Loss.objects.get().sentence


def test_half_of_the_nodes_at_once_wait_for_a_person(chat: Session, driver: Answers) -> None:
    assert lost_for_long(driver, 1, 2) == 0
    assert {loss.verdict for loss in Loss.objects.all()} == {"blocked"}


def test_a_session_that_waits_for_memory_has_its_lost_node_replaced(
    chat: Session, driver: Answers
) -> None:
    operations_on_it = Operation.objects.create(
        kind="session.resize",
        target="session:chat",
        sentence="Resize session chat",
        total=3,
        role=20,
        actor_name="ada",
        org_id=chat.org_id,
    )
    assert lost_for_long(driver, 1) == 1
    assert not operations_on_it.done


def test_a_session_whose_lost_node_is_not_replaced_is_not_shown_as_ready(
    people: People, chat: Session, driver: Answers, browser_of: Callable[[User], Client]
) -> None:
    viewer = browser_of(people.viewer)

    def shown() -> list[str]:
        pages = [viewer.get(address).content.decode() for address in ("/sessions/", "/sessions/chat/")]
        return [text for text in ("ready", "node lost") for page in pages if f">{text}</span>" in page]

    assert shown() == ["ready", "ready"]
    Node.objects.filter(name="ax2").update(state="lost", held_state="ready")
    loss = Loss.objects.create(
        session=chat, node=Node.objects.get(name="ax2"), since=timezone.now(), verdict="blocked"
    )
    assert shown() == ["node lost", "node lost"]
    assert 'status--bad">lost</span>' in viewer.get("/sessions/chat/").content.decode(), "its streams"
    Loss.objects.filter(pk=loss.pk).update(verdict="replaced")
    assert shown() == ["ready", "ready"]


def test_pages_and_the_api_show_it(
    people: People,
    chat: Session,
    driver: Answers,
    browser_of: Callable[[User], Client],
    api_of: Callable[..., Client],
) -> None:
    lost_for_long(driver, 1)
    member, api = browser_of(people.viewer), api_of(people.viewer)
    page = member.get("/sessions/chat/").content.decode()
    assert "Replace ax2 of chat, which is lost" in page
    assert "has sent no heartbeat for" in page
    shown = api.get("/api/v1/sessions/chat").json()["lost_nodes"]
    assert [(one["node"], one["replacement"]) for one in shown] == [("ax2", "replacing")]
    operation = Operation.objects.get(kind=KIND)
    listed = api.get("/api/v1/operations?target=session:chat").json()["items"]
    assert [one["id"] for one in listed] == [str(operation.pk)]
    arrive(operation)
    run(operation)
    look(30)
    Node.objects.filter(name="ax2").update(state="lost", held_state="ready")
    platform = browser_of(people.platform_viewer)
    for address in ("/fleet/", "/fleet/nodes/", "/fleet/nodes/ax2/"):
        assert "lost, replaced" in platform.get(address).content.decode(), address
