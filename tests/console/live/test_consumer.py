"""A WebSocket in this process: who may connect, what they may watch, what they are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth import SESSION_KEY
from django.contrib.sessions.models import Session
from django.db import connection, transaction

from console.accounts import services as accounts
from console.accounts import tokens
from console.accounts.models import ApiToken, User
from console.live import consumer, hub, services
from console.live.consumer import PATH, websockets
from console.live.outbox import WAITING_MAX
from console.orgs import services as orgs
from telemetry.models import Event
from tests.conftest import People
from tests.live import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

SECONDS = 30.0
HOST = (b"host", b"testserver")
OURS = (b"origin", b"http://testserver")


class Viewer:
    """A client that says what it got. (Channels' own communicator wants daphne.)"""

    def __init__(
        self, *headers: tuple[bytes, bytes], offers: Sequence[str] = (), path: str = PATH
    ) -> None:
        scope = {
            "type": "websocket",
            "path": path,
            "query_string": b"",
            "headers": [HOST, *headers],
            "subprotocols": list(offers),
        }
        untyped: Any = ApplicationCommunicator
        self.wire = untyped(websockets, scope)

    async def connect(self) -> Any:
        """The subprotocol, or False for an upgrade that was refused."""
        await self.wire.send_input({"type": "websocket.connect"})
        answer = await self.wire.receive_output(SECONDS)
        return answer["subprotocol"] if answer["type"] == "websocket.accept" else False

    async def disconnect(self) -> None:
        await self.wire.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wire.wait(SECONDS)

    async def say(self, **message: Any) -> None:
        await self.send(json.dumps(message))

    async def send(self, text: str) -> None:
        await self.wire.send_input({"type": "websocket.receive", "text": text})

    async def hear(self) -> Any:
        """The next frame that is no heartbeat."""
        while True:
            said = json.loads((await self.wire.receive_output(SECONDS))["text"])
            if said["kind"] != "heartbeat":
                return said

    async def hear_change(self, kind: str) -> Any:
        """The next frame that says that something of this kind changed."""
        while True:
            said = await self.hear()
            if kind in said["data"].get("changed", ()):
                return said

    async def closed(self) -> int:
        """With which code, whatever is sent before."""
        while True:
            output = await self.wire.receive_output(SECONDS)
            if output["type"] == "websocket.close":
                return int(output["code"])

    async def watch(self, topic: str, **more: Any) -> Any:
        await self.say(type="subscribe", topic=topic, **more)
        return await self.hear()


Connect = Callable[..., Awaitable[Viewer]]


async def in_database(work: Callable[[], Any]) -> Any:
    return await database_sync_to_async(work, thread_sensitive=False)()


def cookie_of(browser: Any) -> tuple[bytes, bytes]:
    name = settings.SESSION_COOKIE_NAME
    return b"cookie", f"{name}={browser.cookies[name].value}".encode()


@pytest.fixture
async def connect(
    people: People, token_of: Callable[..., str], browser_of: Callable[..., Any]
) -> AsyncIterator[Connect]:
    """Somebody with a token; their connection ends with the test."""
    made: list[Viewer] = []
    # Each of all of them, since a coroutine must not ask the database.
    known = {
        name: await in_database(partial(token_of, getattr(people, name)))
        for name in ("viewer", "org_admin", "stranger", "platform_viewer", "platform_admin")
    }

    async def connect(who: str) -> Viewer:
        viewer = Viewer((b"authorization", f"Bearer {known[who]}".encode()))
        assert await viewer.connect() is None
        made.append(viewer)
        return viewer

    yield connect
    for viewer in made:
        await viewer.disconnect()


def rename(people: People, name: str) -> None:
    admin = people.principal("org_admin")
    with transaction.atomic():
        orgs.update_org(admin, orgs.for_change(admin, "acme"), name=name)


# Who may connect


async def test_a_logged_in_browser_connects_from_our_own_pages_only(
    people: People, browser_of: Callable[..., Any]
) -> None:
    cookie = cookie_of(await in_database(lambda: browser_of(people.viewer)))
    viewer = Viewer(cookie, OURS)
    assert await viewer.connect() is None
    assert (await viewer.watch("org:acme"))["kind"] == "snapshot"
    await viewer.disconnect()
    for origin in (b"https://evil.example", b"http://testserver:81", b"null", b"http://[", b""):
        assert await Viewer(cookie, (b"origin", origin)).connect() is False, origin
    assert await Viewer(cookie).connect() is False


async def test_where_cookies_are_for_tls_pages_of_plain_http_are_not_ours(
    people: People, browser_of: Callable[..., Any], settings: Any
) -> None:
    cookie = cookie_of(await in_database(lambda: browser_of(people.viewer)))
    settings.SESSION_COOKIE_SECURE = True
    assert await Viewer(cookie, OURS).connect() is False
    ours = Viewer(cookie, (b"origin", b"https://testserver"))
    assert await ours.connect() is None
    await ours.disconnect()


async def test_a_token_comes_in_a_header_or_as_a_subprotocol(
    people: People, token_of: Callable[..., str]
) -> None:
    text = await in_database(lambda: token_of(people.viewer, read_only=True))
    viewer = Viewer((b"origin", b"https://elsewhere.example"), offers=["tidegate.v1", f"bearer.{text}"])
    assert await viewer.connect() == "tidegate.v1"
    assert (await viewer.watch("org:acme"))["kind"] == "snapshot"
    await viewer.disconnect()


@pytest.mark.parametrize(
    "headers",
    [
        (OURS,),
        (OURS, (b"cookie", b"tidegate_session=nonsense")),
        (OURS, (b"cookie", b"tidegate_session=" + b"a" * 32)),
        ((b"authorization", b"Bearer tgr_nonsense"),),
        ((b"authorization", b"Bearer \xff"),),
    ],
    ids=["nothing", "nonsense", "unknown session", "unknown token", "no text"],
)
async def test_who_is_not_known_hears_it_from_the_code(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    viewer = Viewer(*headers)
    assert await viewer.connect() is None
    assert await viewer.closed() == 4401
    await viewer.disconnect()


async def test_a_generated_password_opens_nothing(
    people: People, browser_of: Callable[..., Any]
) -> None:
    cookie = cookie_of(await in_database(lambda: browser_of(people.viewer)))
    await in_database(lambda: User.objects.update(must_change_password=True))
    viewer = Viewer(cookie, OURS)
    await viewer.connect()
    assert await viewer.closed() == 4401
    await viewer.disconnect()


async def test_there_is_one_address() -> None:
    assert await Viewer(OURS, path="/ws/v1/nothing").connect() is False


# What they are told


async def test_a_change_is_told_in_the_next_frame(people: People, connect: Connect) -> None:
    viewer = await connect("viewer")
    opening = await viewer.watch("org:acme")
    assert (opening["v"], opening["kind"], opening["topic"]) == (1, "snapshot", "org:acme")
    await in_database(lambda: rename(people, "Acme Ltd"))
    told = await viewer.hear_change("org.update")
    assert (told["kind"], told["seq"]) == ("delta", opening["seq"] + 1)
    [event] = told["data"]["events"]
    assert (event["id"], event["sentence"]) == (told["data"]["event"], "Org Acme Ltd was changed.")
    assert "topics" not in event, "whom else it concerns is not theirs to know"


async def test_who_comes_back_is_told_what_happened_since(people: People, connect: Connect) -> None:
    first = await connect("viewer")
    known = (await first.watch("org:acme"))["data"]["event"]
    await first.disconnect()
    for name in ("One", "Two", "Three"):
        await in_database(partial(rename, people, name))
    again = await (await connect("viewer")).watch("org:acme", since=known)
    told = [event["sentence"] for event in again["data"]["events"]]
    assert told == ["Org One was changed.", "Org Two was changed.", "Org Three was changed."]


async def test_no_org_sees_another(people: People, connect: Connect) -> None:
    stranger, member, platform = [
        await connect(who) for who in ("stranger", "viewer", "platform_viewer")
    ]
    for topic in ("org:acme", "org:nope", "fleet", "node:ax-1", "alerts", "operations", "session:x"):
        refused = await stranger.watch(topic)
        assert (refused["kind"], refused["data"]["reason"]) == ("error", "NotFound"), topic
    assert (await stranger.watch("org:globex"))["kind"] == "snapshot"
    assert (await member.watch("org:acme"))["kind"] == "snapshot"
    assert (await platform.watch("fleet"))["kind"] == "snapshot"
    await in_database(lambda: rename(people, "Acme Ltd"))
    assert (await member.hear_change("org.update"))["topic"] == "org:acme"
    assert (await platform.hear_change("org.update"))["topic"] == "fleet"
    await stranger.say(type="nonsense")  # what it hears next is the answer to this, and nothing before
    assert (await stranger.hear())["kind"] == "error"


async def test_a_hint_is_told_and_an_event_needs_none(connect: Connect) -> None:
    viewer = await connect("platform_viewer")
    await viewer.watch("operations")
    await in_database(lambda: services.publish("operations", "operation"))
    assert (await viewer.hear_change("operation"))["data"].get("events") is None
    await in_database(
        lambda: Event.objects.create(at="2026-11-21T03:00:00Z", kind="silent", topics=["operations"])
    )
    assert len((await viewer.hear_change("silent"))["data"]["events"]) == 1


async def test_a_change_that_is_taken_back_is_not_told(people: People, connect: Connect) -> None:
    def in_vain() -> None:
        with transaction.atomic():
            rename(people, "Never")
            transaction.set_rollback(True)

    viewer = await connect("viewer")
    await viewer.watch("org:acme")
    await in_database(in_vain)
    await in_database(lambda: rename(people, "Acme Ltd"))
    [event] = (await viewer.hear_change("org.update"))["data"]["events"]
    assert event["sentence"] == "Org Acme Ltd was changed."


async def test_what_apps_say_of_a_topic_is_its_state(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    firing = {"firing": 1}
    monkeypatch.setitem(services._snapshots, "alerts", [lambda _who, topic: {"of": topic, **firing}])
    viewer = await connect("platform_viewer")
    assert (await viewer.watch("alerts"))["data"]["state"] == {"of": "alerts", "firing": 1}
    firing["firing"] = 2
    assert (await viewer.hear_change("state"))["data"]["state"]["firing"] == 2


async def test_a_frame_is_made_once_for_all_its_viewers(people: People, connect: Connect) -> None:
    viewers = [await connect("viewer") for _ in range(5)]
    for viewer in viewers:
        await viewer.watch("org:acme")
    made, sent = consumer.COUNTS.made, consumer.COUNTS.sent
    await in_database(lambda: rename(people, "Acme Ltd"))
    told = [await viewer.hear_change("org.update") for viewer in viewers]
    assert told == [told[0]] * 5
    assert consumer.COUNTS.made > made
    await asyncio.to_thread(  # another frame may be on its way
        wait_until,
        "each is sent to all",
        lambda: consumer.COUNTS.sent - sent >= 5 * (consumer.COUNTS.made - made),
    )


async def test_who_unsubscribes_hears_no_more(people: People, connect: Connect) -> None:
    viewer, other = await connect("viewer"), await connect("viewer")
    await viewer.watch("org:acme")
    await other.watch("org:acme")
    await viewer.say(type="unsubscribe", topic="org:acme")
    await viewer.say(type="unsubscribe", topic="org:acme")
    await viewer.say(type="nonsense")
    while (await viewer.hear())["kind"] != "error":
        pass  # a frame of before
    await in_database(lambda: rename(people, "Acme Ltd"))
    await other.hear_change("org.update")
    await viewer.say(type="nonsense")
    assert (await viewer.hear())["kind"] == "error"


# Permission lost


async def test_a_member_who_is_removed_sees_no_more(people: People, connect: Connect) -> None:
    def remove() -> None:
        admin = people.principal("org_admin")
        with transaction.atomic():
            orgs.remove_member(admin, orgs.for_change(admin, "acme"), people.viewer.username)

    viewer, admin = await connect("viewer"), await connect("org_admin")
    await viewer.watch("org:acme")
    await admin.watch("org:acme")
    await in_database(remove)
    assert await viewer.closed() == 4403
    assert (await admin.hear_change("org.member"))["kind"] == "delta", "who still may see it goes on"


async def test_a_token_that_is_revoked_and_a_session_that_is_over_see_no_more(
    people: People, connect: Connect, browser_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "CHECK_SECONDS", 0.05)
    viewer, admin = await connect("viewer"), await connect("org_admin")
    cookie = cookie_of(await in_database(lambda: browser_of(people.org_admin)))
    browser = Viewer(cookie, OURS)
    await browser.connect()
    for one in (viewer, browser, admin):
        await one.watch("org:acme")

    def end_both() -> None:
        owner = people.principal("viewer")
        tokens.revoke(owner, ApiToken.objects.get(user=people.viewer).public_id)
        Session.objects.all().delete()

    await in_database(end_both)
    assert await viewer.closed() == 4401
    assert await browser.closed() == 4401
    await in_database(lambda: rename(people, "Acme Ltd"))
    await admin.hear_change("org.update")
    await browser.disconnect()


async def test_credentials_that_are_revoked_end_connections_at_once(
    people: People, connect: Connect, browser_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "CHECK_SECONDS", 3600.0)
    viewer, other = await connect("viewer"), await connect("org_admin")
    browser = Viewer(cookie_of(await in_database(lambda: browser_of(people.viewer))), OURS)
    await browser.connect()
    for one in (viewer, browser, other):
        await one.watch("org:acme")

    def revoke() -> None:
        accounts.revoke_credentials(people.principal("platform_admin"), people.viewer)

    await in_database(revoke)
    assert await viewer.closed() == 4401
    assert await browser.closed() == 4401
    await in_database(lambda: rename(people, "Acme Ltd"))
    await other.hear_change("org.update")
    await browser.disconnect()


async def test_another_password_ends_other_sessions(
    people: People, browser_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "CHECK_SECONDS", 0.05)
    browser = Viewer(cookie_of(await in_database(lambda: browser_of(people.viewer))), OURS)
    await browser.connect()
    await browser.watch("org:acme")

    def change() -> None:
        user = User.objects.get(pk=people.viewer.pk)
        user.set_password("another horse, another staple")
        user.save()

    await in_database(change)
    assert await browser.closed() == 4401
    await browser.disconnect()
    session = await in_database(lambda: Session.objects.get().get_decoded())
    assert session[SESSION_KEY], "it was only looked at"


# What is out of bounds


@pytest.mark.slow
async def test_a_viewer_that_does_not_read_holds_up_nobody_and_is_closed(
    people: People,
    connect: Connect,
    token_of: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer, "STALL_SECONDS", 3600.0)
    text = await in_database(partial(token_of, people.viewer))
    stalled, reads = Viewer((b"authorization", f"Bearer {text}".encode())), asyncio.Event()
    deliver = stalled.wire.output_queue.put

    async def put(message: dict[str, Any]) -> None:
        if message["type"] == "websocket.send":
            await reads.wait()
        await deliver(message)

    stalled.wire.output_queue.put = put
    await stalled.connect()
    other, skipped = await connect("viewer"), consumer.COUNTS.skipped
    for viewer in (stalled, other):
        await viewer.say(type="subscribe", topic="org:acme")
    await other.hear()
    for number in range(2 * WAITING_MAX):
        await in_database(partial(rename, people, f"Acme {number}"))
        assert (await other.hear_change("org.update"))["topic"] == "org:acme"
    reads.set()
    seqs = []
    while True:
        said = json.loads((await stalled.wire.receive_output(SECONDS))["text"])
        seqs.append(said["seq"])
        if any(one["sentence"] == "Org Acme 15 was changed." for one in said["data"].get("events", ())):
            break
    assert len(seqs) <= WAITING_MAX + 1
    assert seqs[1] > seqs[0] + 1, "it sees that it missed some"
    assert consumer.COUNTS.skipped > skipped
    monkeypatch.setattr(consumer, "STALL_SECONDS", 0.05)
    reads.clear()
    assert await stalled.closed() == 4408
    await stalled.disconnect()


async def test_nonsense_is_refused_with_a_sentence_and_ends_nothing(
    people: People, connect: Connect
) -> None:
    viewer = await connect("viewer")
    await viewer.watch("org:acme")
    for text in (
        "",
        "[]",
        "{",
        "null",
        '{"type":"subscribe"}',
        "\ud800",
        '{"topic":"fleet"}',
        "x" * 5000,
    ):
        await viewer.send(text)
        while (said := await viewer.hear())["kind"] != "error":
            pass
        assert said["data"]["reason"] == "NotUnderstood", text
        assert said["data"]["detail"].endswith(".")
    await viewer.wire.send_input({"type": "websocket.receive", "bytes": b"\x00\xff"})
    while (said := await viewer.hear())["kind"] != "error":
        pass
    assert said["data"]["detail"] == "Send text, not bytes."
    await in_database(lambda: rename(people, "Acme Ltd"))
    await viewer.hear_change("org.update")


async def test_topics_and_messages_of_a_connection_are_bounded(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "SUBSCRIPTIONS_MAX", 2)
    viewer = await connect("platform_viewer")
    for topic in ("fleet", "alerts", "fleet"):
        assert (await viewer.watch(topic))["kind"] == "snapshot"
    await viewer.say(type="subscribe", topic="operations")
    while (said := await viewer.hear())["kind"] != "error":
        pass
    assert said["data"]["reason"] == "TooManyTopics"
    for _ in range(consumer.MESSAGES_MAX * 2):
        await viewer.say(type="unsubscribe", topic="fleet")
    assert await viewer.closed() == 4429


async def test_a_process_takes_so_many_viewers(
    people: People, connect: Connect, token_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "VIEWERS_MAX", consumer.COUNTS.viewers + 1)
    await connect("viewer")
    text = await in_database(lambda: token_of(people.viewer))
    late = Viewer((b"authorization", f"Bearer {text}".encode()))
    await late.connect()
    assert await late.closed() == 1013
    await late.disconnect()


async def test_nobody_takes_the_places_of_others(
    people: People, connect: Connect, token_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many credentials somebody has."""
    monkeypatch.setattr(consumer, "VIEWERS_OF_ONE_MAX", 1)
    first = await connect("viewer")
    text = await in_database(lambda: token_of(people.viewer))
    second = Viewer((b"authorization", f"Bearer {text}".encode()))
    await second.connect()
    assert await second.closed() == 4430
    await second.disconnect()
    assert (await (await connect("org_admin")).watch("org:acme"))["kind"] == "snapshot"
    await first.disconnect()
    assert (await (await connect("viewer")).watch("org:acme"))["kind"] == "snapshot"


async def test_nobody_takes_the_topics_of_others(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by watching nodes that there are not, over however many connections."""
    monkeypatch.setattr(hub, "TOPICS_OF_ONE_MAX", 2)
    first, second = await connect("platform_viewer"), await connect("platform_viewer")
    assert (await first.watch("node:x-1"))["kind"] == "snapshot"
    assert (await second.watch("node:x-2"))["kind"] == "snapshot"
    assert (await second.watch("node:x-1"))["kind"] == "snapshot", "it is read anyway"
    await second.say(type="subscribe", topic="node:x-3")
    while (said := await second.hear())["kind"] != "error":
        pass
    assert said["data"]["reason"] == "TooManyTopics"
    await second.say(type="unsubscribe", topic="node:x-1")
    await second.say(type="subscribe", topic="node:x-3")
    while (said := await second.hear())["kind"] != "error":
        pass
    assert said["data"]["reason"] == "TooManyTopics", "the first still watches it"
    await second.say(type="unsubscribe", topic="node:x-2")
    assert (await second.watch("node:x-3"))["kind"] == "snapshot"
    assert (await (await connect("platform_admin")).watch("node:x-3"))["kind"] == "snapshot"


async def test_a_fault_of_ours_ends_connections_rather_than_leaving_them_silent(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_who: object, _topic: str) -> dict[str, Any]:
        raise KeyError("a bug")

    viewer = await connect("platform_viewer")
    await viewer.watch("operations")
    monkeypatch.setitem(services._snapshots, "operations", [fail])
    assert await viewer.closed() == 1011
    assert "reading for live viewers failed" in caplog.text
    monkeypatch.setitem(services._snapshots, "operations", [])
    again = await connect("platform_viewer")
    assert (await again.watch("operations"))["kind"] == "snapshot"


async def test_viewers_that_go_are_forgotten(connect: Connect) -> None:
    before = consumer.COUNTS.viewers
    viewer = await connect("platform_viewer")
    await viewer.watch("fleet")
    assert consumer.COUNTS.viewers == before + 1
    await viewer.disconnect()
    assert consumer.COUNTS.viewers == before
    assert consumer.COUNTS.topics == 0
    if left := [task for task in asyncio.all_tasks() if "Hub." in repr(task.get_coro())]:
        _, unfinished = await asyncio.wait(left, timeout=SECONDS)
        assert not unfinished


async def test_where_hints_were_lost_everything_counts_as_changed(connect: Connect) -> None:
    viewer = await connect("platform_viewer")
    await viewer.watch("operations")
    await in_database(lambda: _cut("LISTEN"))
    assert (await viewer.hear_change("unknown"))["topic"] == "operations"
    await in_database(lambda: services.publish("operations", "operation"))
    await viewer.hear_change("operation")


def _cut(statement: str) -> None:
    """End the connections whose last statement begins so."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query LIKE %s",
            [f"{statement}%"],
        )
        assert cursor.rowcount >= 1  # one of a test before may be about to end
