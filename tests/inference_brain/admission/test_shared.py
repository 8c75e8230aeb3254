"""Brains that share a real Redis: they divide places, know each other's loads, and do not need it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

import pytest
import redis
from django.conf import settings

from console.stack import redis as redis_server
from inference_brain.admission import (
    Admission,
    Place,
    Reason,
    Rejected,
    Room,
    Shared,
    exchange,
    limits,
    shared,
)
from inference_brain.admission.shared import PREFIX
from inference_brain.choice.candidates import Load
from telemetry.credentials import own_url, rules
from tests import embedded
from tests.inference_brain.admission.tickets import MODEL, Rooms, ticket

TOKEN = "token-of-the-control-api"
LOADS: Mapping[str, Mapping[str, Load]] = {MODEL: {"r1": Load(100.0, 2, 1), "idle": Load()}}


@pytest.fixture
def prefix() -> str:
    return f"tidegate:routing:test-{secrets.token_hex(4)}:"


@contextlib.asynccontextmanager
async def running(url: str, prefix: str, rooms: Rooms, name: str = "b") -> AsyncIterator[Admission]:
    admission = Admission(rooms, name=name, loads=lambda: LOADS)
    admission.share(Shared(url, prefix))
    task = asyncio.create_task(admission.run())
    try:
        async with asyncio.timeout(60):
            while not admission.is_connected:  # noqa: ASYNC110 - as a caller sees it
                await asyncio.sleep(0.01)
        yield admission
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.02)


def placed(admission: Admission) -> int:
    pool = admission.pools.get(MODEL)
    return pool.placed if pool else 0


async def entered(admission: Admission, count: int, **more: object) -> list[Place | Rejected]:
    tickets = [ticket(**more) for _ in range(count)]  # type: ignore[arg-type]
    outcomes = await asyncio.gather(*map(admission.enter, tickets), return_exceptions=True)
    assert all(isinstance(one, Place | Rejected) for one in outcomes), outcomes
    return outcomes  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy answers are late, and then each brain goes on on its own."""
    monkeypatch.setattr(shared, "ANSWER_SECONDS", 20.0)
    monkeypatch.setattr(limits, "FRESH_SECONDS", 3600.0)


async def test_a_limit_holds_over_two_brains(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "WAIT_SECONDS", 20.0)
    rooms, began = Rooms(1000), time.monotonic()
    async with (
        running(settings.REDIS_URL, prefix, rooms) as one,
        running(settings.REDIS_URL, prefix, rooms) as other,
    ):
        outcomes = []
        for admission in (one, other, one, other):
            outcomes += await entered(admission, 10, requests_per_minute=25)
        placed = [outcome for outcome in outcomes if isinstance(outcome, Place)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, Rejected)]
        assert 25 <= len(placed) <= 26 + (time.monotonic() - began) * 25 / 60
        assert {outcome.code for outcome in refused} == {Reason.RATE}


async def test_more_orgs_than_one_question_has_are_asked_about_in_the_next(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is refused by an answer that says nothing of its org."""
    monkeypatch.setattr(shared, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(exchange, "ORGS_MAX", 4)
    async with running(settings.REDIS_URL, prefix, Rooms(1000)) as admission:
        for _ in range(3):  # the first ones have news again, and do not keep the others from being asked
            requests = [
                admission.enter(ticket(org=f"org{one}", requests_per_minute=1000)) for one in range(30)
            ]
            async with asyncio.timeout(60):
                outcomes = await asyncio.gather(*requests, return_exceptions=True)
            assert [one for one in outcomes if not isinstance(one, Place)] == []


async def test_brains_know_what_the_others_have_sent(prefix: str) -> None:
    async with (
        running(settings.REDIS_URL, prefix, Rooms(10)) as one,
        running(settings.REDIS_URL, prefix, Rooms(10)),
    ):
        await until(lambda: one.elsewhere)
        assert one.elsewhere == {(MODEL, "r1"): Load(100.0, 2, 1)}


async def test_the_load_of_a_killed_brain_vanishes(prefix: str) -> None:
    async with running(settings.REDIS_URL, prefix, Rooms(10)) as one:
        async with running(settings.REDIS_URL, prefix, Rooms(10)):
            await until(lambda: one.elsewhere)
        await until(lambda: not one.elsewhere)


async def test_a_greedy_org_at_one_brain_leaves_places_to_the_other(prefix: str) -> None:
    rooms = Rooms(10)
    async with (
        running(settings.REDIS_URL, prefix, rooms, "one") as one,
        running(settings.REDIS_URL, prefix, rooms, "other") as other,
    ):
        greedy = [asyncio.create_task(one.enter(ticket(org="greedy"))) for _ in range(40)]
        await until(lambda: placed(one) == 10)
        small = [asyncio.create_task(other.enter(ticket(org="small"))) for _ in range(20)]
        # Those that leave make room for the other brain, which has a half at the end.
        done = set()
        async with asyncio.timeout(60):
            while placed(other) < 5 or placed(one) > 5:
                for task in greedy:
                    if task.done() and task not in done and placed(one) > 5:
                        done.add(task)
                        task.result().leave(10)
                        break
                await asyncio.sleep(0.02)
        assert placed(one) == 5
        for task in (*greedy, *small):
            task.cancel()


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one that may be stopped."""
    home = tmp_path_factory.mktemp("redis") / "own"
    server = redis_server.prepare(home, users=(), durable=False)
    with embedded.running(server, home.parent / "log"):
        yield server.url


async def test_a_brain_may_do_what_it_needs_with_its_own_redis_user(own_redis: str) -> None:
    client = redis.Redis.from_url(own_redis)
    client.execute_command("ACL", "SETUSER", "brain:east", *rules("brain:east", TOKEN))  # type: ignore[no-untyped-call]
    path = client.connection_pool.connection_kwargs.get("path")
    at = {key: client.connection_pool.connection_kwargs.get(key) for key in ("host", "port")}
    place = f"unix://own@{path}" if path else f"redis://own@{at['host']}:{at['port']}/0"
    url = own_url(place, "brain:east", TOKEN)
    async with running(url, PREFIX, Rooms(10)) as admission:
        assert isinstance((await entered(admission, 1, requests_per_minute=10))[0], Place)
        assert admission.is_connected
    client.close()


@contextlib.contextmanager
def stopped(url: str) -> Iterator[None]:
    client = redis.Redis.from_url(url)
    process = client.info("server")["process_id"]
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)
        client.close()


@pytest.mark.slow
async def test_without_redis_requests_go_on_and_one_alone_waits_for_it(
    prefix: str, own_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "WAIT_SECONDS", 1.0)  # far longer than anything but this wait takes
    monkeypatch.setattr(shared, "ANSWER_SECONDS", 5.0)
    async with running(own_redis, prefix, Rooms(1000)) as admission:
        await entered(admission, 5, requests_per_minute=1000)
        with stopped(own_redis):
            waited = 0
            for number in range(60):
                began = time.monotonic()
                # Of another org each time, for which nothing was granted yet.
                more = {"org": f"org-{number}", "requests_per_minute": 1000}
                outcome = (await entered(admission, 1, **more))[0]
                waited += time.monotonic() - began >= shared.WAIT_SECONDS
                assert isinstance(outcome, Place)
                outcome.leave(1)
                await asyncio.sleep(0.01)
            assert waited < 6, "of a dozen that could before Redis counts as away"
            await until(lambda: not admission.is_connected)
        await until(lambda: admission.is_connected)
        assert isinstance((await entered(admission, 1, requests_per_minute=1000))[0], Place)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """All that brains have asked Redis."""
    questions: list[tuple[bytes, bytes]] = []
    ask = Shared.ask

    async def noted(self: Shared, question: tuple[bytes, bytes]) -> Sequence[int | bytes]:
        questions.append(question)
        return await ask(self, question)

    monkeypatch.setattr(Shared, "ask", noted)
    return questions


async def test_a_brain_alone_rests_until_something_waits(
    prefix: str, asked: list[tuple[bytes, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for nothing of which nothing comes; but who waits for room gets it once there is some."""
    monkeypatch.setattr(shared, "REST_SECONDS", 3600.0)
    rooms = Rooms(1)
    async with running(settings.REDIS_URL, prefix, rooms) as admission:
        await until(lambda: admission._rounds and admission._rounds._rests)
        await entered(admission, 1)
        count = len(asked)
        second = asyncio.create_task(admission.enter(ticket()))
        await until(lambda: len(asked) > count + 5)  # it does not rest while one waits
        assert count <= 2, "the first request found room at once"
        rooms.one = Room(2, 1 << 30)
        assert isinstance(await asyncio.wait_for(second, 60), Place)


async def test_a_brain_alone_with_many_requests_rests_no_more(
    prefix: str, asked: list[tuple[bytes, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it asked after every third request, hundreds of times a second."""
    monkeypatch.setattr(shared, "REST_SECONDS", 3600.0)
    async with running(settings.REDIS_URL, prefix, Rooms(1000)) as admission:
        await until(lambda: admission._rounds and admission._rounds._rests)
        monkeypatch.setattr(shared, "PERIOD_SECONDS", 3600.0)
        count = len(asked)
        for _ in range(10):
            await entered(admission, 3)
            await until(lambda: len(asked) > count)
            await asyncio.sleep(0.02)
        assert len(asked) == count + 1


async def test_a_brain_that_has_requests_tells_the_others(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "REST_SECONDS", 3600.0)
    async with (
        running(settings.REDIS_URL, prefix, Rooms(10), "first"),
        running(settings.REDIS_URL, prefix, Rooms(10), "second") as second,
    ):
        await until(lambda: second._rounds and second._rounds._rests)
        assert second.limits.brains == 2
        await entered(second, 1)
        await until(lambda: second._rounds and not second._rounds._rests)


async def test_redis_that_was_emptied_is_told_again(prefix: str) -> None:
    client = redis.Redis.from_url(settings.REDIS_URL)
    async with running(settings.REDIS_URL, prefix, Rooms(10)) as admission:
        await entered(admission, 3, requests_per_minute=10)
        for key in client.scan_iter(f"{prefix}*"):
            client.delete(key)
        client.script_flush()
        await until(lambda: [*client.scan_iter(f"{prefix}*")])
        assert isinstance((await entered(admission, 1, requests_per_minute=10))[0], Place)
        assert admission.is_connected
    client.close()
