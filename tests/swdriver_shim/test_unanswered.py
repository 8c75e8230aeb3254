"""A daemon that can't answer now: an engine goes on without it, and does not wait again and again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvss_agent.http import api
from swdriver_shim.adapters import remote
from swdriver_shim.adapters.remote import Refused, RemotePrefixes
from swdriver_shim.desired import GroupSpec, ModelSpec
from tests.hostile.agent import Peer
from tests.hostile.answers import says_json

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
