"""A daemon that can't answer now: an engine goes on without it, and does not wait again and again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvss_agent.http import api
from kvss_agent.http.answers import Budget, Fault, Unanswered
from kvss_agent.http.blocking_exchange import BlockingExchange
from swdriver_shim.adapters import remote
from swdriver_shim.adapters.objects_config import Misconfigured, open_objects
from swdriver_shim.adapters.remote import Refused, RemoteObjects, RemotePrefixes
from swdriver_shim.daemon import callers
from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.object_store import TooLarge
from tests.hostile.agent import Peer
from tests.hostile.answers import holds, says_json
from tests.live import wait_until

pytestmark = pytest.mark.usefixtures("patient")
EACH = 16
MODEL = ModelSpec(name="llama", groups=(GroupSpec(name="full", bytes_per_token=(EACH,)),))
PROMPT = [1] * 100


class Clock:
    """Stands still, but for what a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(remote, "time", made)
    return made


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as made:
        yield made


@pytest.fixture
def prefixes(peer: Peer) -> Iterator[RemotePrefixes]:
    made = RemotePrefixes(peer.url, "t" * 40, MODEL)
    yield made
    made.close()


def part(group: int, shard: int, depth: int, tokens: int) -> memoryview:
    return memoryview(bytearray(EACH * tokens))


@pytest.mark.parametrize(
    ("status", "pause_seconds"), [(401, 1.0), (408, 1.0), (409, 1.0), (429, 5.0), (503, 1.0)]
)
def test_a_status_of_a_moment_is_a_miss_and_a_pause(
    peer: Peer, prefixes: RemotePrefixes, clock: Clock, status: int, pause_seconds: float
) -> None:
    peer.answer = says_json({"detail": "Not now."}, status)
    assert prefixes.query(PROMPT) == 0
    assert prefixes.lost_because == f"It answered {status}. Not now."
    assert prefixes.load(PROMPT, part).tokens == 0
    assert prefixes.store(PROMPT, len(PROMPT), part).failed == 2
    prefixes.computed(10, 1.0)
    clock.now += pause_seconds - 0.01
    assert prefixes.query(PROMPT) == 0
    assert len(peer.asked) == 1, "it is left alone for a while"
    clock.now += 0.01
    peer.answer = says_json({"tokens": 64, "asked": 100})
    assert prefixes.query(PROMPT) == 64
    assert prefixes.lost_because is None


def test_a_daemon_that_has_too_much_to_do_is_left_alone_as_long_as_it_says() -> None:
    assert remote.BUSY_SECONDS == api.RETRY_SECONDS


@pytest.mark.parametrize("status", [302, 403, 404, 413, 422])
def test_what_no_waiting_changes_is_raised_but_for_numbers(
    peer: Peer, prefixes: RemotePrefixes, status: int
) -> None:
    peer.answer = says_json({"detail": "Never."}, status)
    with pytest.raises(Refused, match=str(status)):
        prefixes.query(PROMPT)
    with pytest.raises(Refused, match=str(status)):
        prefixes.load(PROMPT, part)
    with pytest.raises(Refused, match=str(status)):
        prefixes.store(PROMPT, len(PROMPT), part)
    prefixes.computed(10, 1.0)
    assert str(status) in (prefixes.lost_because or "")


# One that is frozen: it takes connections, and says nothing


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch, peer: Peer, clock: Clock) -> Peer:
    """It is waited for a moment only. Pauses are the clock's."""
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.4)
    peer.answer = holds
    return peer


def prefill(prefixes: RemotePrefixes) -> None:
    prefixes.load(PROMPT, part)
    for end in (64, 96, 100):
        prefixes.store(PROMPT, end, part)
        prefixes.computed(10, 1.0)


def asked_of(frozen: Peer, at_least: int = 0) -> int:
    """How often it was asked: it may get to know of that when it is waited for no longer."""
    wait_until("it is asked", lambda: len(frozen.asked) >= at_least)
    found = -1
    while found != len(frozen.asked):
        found = len(frozen.asked)
        time.sleep(0.1)
    return found


def test_a_prefill_waits_once_for_a_daemon_that_is_frozen(
    frozen: Peer, prefixes: RemotePrefixes
) -> None:
    prefill(prefixes)
    assert asked_of(frozen, 1) == 1
    assert "has not answered within" in (prefixes.lost_because or "")


def test_it_is_asked_less_and_less_until_it_answers(
    frozen: Peer, prefixes: RemotePrefixes, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes.query(PROMPT)
    for asked, pause_seconds in enumerate((5.0, 10.0, 20.0, 40.0, 60.0, 60.0), 1):
        clock.now += pause_seconds - 0.1
        prefixes.query(PROMPT)
        assert asked_of(frozen, asked) == asked
        clock.now += 0.1
        prefixes.query(PROMPT)
        assert asked_of(frozen, asked + 1) == asked + 1
    clock.now += 60.0
    frozen.answer = says_json({"tokens": 64, "asked": 100})
    with monkeypatch.context() as waits:
        waits.setattr(remote, "ANSWER_SECONDS", 30.0)
        assert prefixes.query(PROMPT) == 64
    frozen.answer = holds
    asked = asked_of(frozen)
    prefixes.query(PROMPT)
    clock.now += 5.0
    prefixes.query(PROMPT)
    assert asked_of(frozen, asked + 2) == asked + 2


def test_threads_that_wait_together_make_one_pause(
    frozen: Peer, prefixes: RemotePrefixes, clock: Clock
) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(prefixes.query, [PROMPT] * 8))
    asked = asked_of(frozen, 1)
    clock.now += 5.0
    prefixes.query(PROMPT)
    assert asked_of(frozen, asked + 1) == asked + 1
    clock.now += 10.0
    prefixes.query(PROMPT)
    assert asked_of(frozen, asked + 2) == asked + 2


def test_an_engine_that_starts_before_its_daemon_misses_what_is_too_large(
    peer: Peer, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While it serves, an error would reach nobody who could configure it."""
    (tmp_path / "token").write_text("t" * 40)
    at_daemon = {"url": peer.url, "token_file": str(tmp_path / "token")}
    peer.answer = says_json({"detail": "There is no document."}, 409)
    opened = open_objects(at_daemon, value_bytes=1000)
    objects = opened.objects
    assert isinstance(objects, RemoteObjects)
    clock.now += 5.0
    peer.answer = says_json({"exists": [], "value_bytes_max": 960})
    caplog.clear()
    for _ in range(2):
        assert objects.put([b"k", b"l"], [VALUE, VALUE]) == [False, False]
        assert "bytes_per_token in its document has to add up to 16" in (objects.lost_because or "")
        objects.exists([])
        assert objects.lost_because is None
    assert len(caplog.messages) == 1, "it is said once"
    with pytest.raises(ValueError, match="empty"):
        objects.put([b"k"], [VALUE[:0]])
    opened.close()
    with pytest.raises(Misconfigured, match="960"):
        open_objects(at_daemon, value_bytes=1000)
    with contextlib.closing(open_objects(at_daemon)) as opened, pytest.raises(TooLarge):
        opened.objects.put([b"k"], [VALUE])


VALUE = memoryview(bytes(1000))


@pytest.mark.parametrize(
    ("ask", "seconds"),
    [
        (lambda prefixes, _: prefixes.query(PROMPT), 0.0),
        (lambda prefixes, _: prefixes.computed(10, 1.0), 0.0),
        (lambda prefixes, _: prefixes.load(PROMPT, part), 1.6),
        (lambda prefixes, _: prefixes.load(PROMPT, part, 0.5), 0.5 + 1.6),
        (lambda _, objects: objects.exists([b"k"], 0.25), 0.25),
        (lambda _, objects: objects.get([b"k"] * 3, [VALUE] * 3, 0.25), 0.25 + 3.0),
        (lambda _, objects: objects.put([b"k"] * 3, [VALUE] * 3), 3.0),
        (lambda _, objects: objects.remove([b"k"]), callers.PURGE_SECONDS_MAX),
        (lambda _, objects: objects.clear(), callers.PURGE_SECONDS_MAX),
    ],
)
def test_each_verb_has_as_long_as_it_needs(
    prefixes: RemotePrefixes,
    peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[RemotePrefixes, RemoteObjects], object],
    seconds: float,
) -> None:
    """At a thousand bytes per second; numbers of tokens and keys are bytes as well."""
    monkeypatch.setattr(remote, "BYTES_PER_SECOND_MIN", 1000)
    budgets = list[float]()

    def late(_daemon: object, _method: str, _path: str, _token: str, budget: Budget, *_: object) -> None:
        budgets.append(budget.seconds)
        raise Unanswered(Fault.LATE, "It is late.")

    objects = RemoteObjects(peer.url, "t" * 40)
    monkeypatch.setattr(objects, "_value_bytes_max", 1000)
    monkeypatch.setattr(BlockingExchange, "ask", late)
    ask(prefixes, objects)
    [found] = budgets
    assert seconds <= found - remote.ANSWER_SECONDS < seconds + 0.7
