"""What an agent says when tier 2 has to be emptied: done only if nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent.client import Miss, Purged, ShardClient, TierAnswer, Wanted
from kvss_agent.client.tiered import TieredClient
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.store import Tier2
from kvss_agent.tiering import LoopTiering
from kvss_agent.wire import Feature
from tests.kvss_agent.plane import TAG, Plane, column, kv, running


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


@contextlib.contextmanager
def opened(loop: asyncio.AbstractEventLoop, files: Path) -> Iterator[Tier2]:
    store = Tier2(Posix(files), Caps(1 << 30, 1 << 30))
    asyncio.run_coroutine_threadsafe(store.open(), loop).result()
    try:
        yield store
    finally:
        asyncio.run_coroutine_threadsafe(store.close(), loop).result()


@pytest.fixture
def tiering(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> Iterator[LoopTiering]:
    made = LoopTiering(loop)
    with opened(loop, tmp_path / "files") as made.store:
        yield made


@pytest.fixture
def plane(tmp_path: Path, tiering: LoopTiering) -> Iterator[Plane]:
    with running(tmp_path, tiering=tiering) as made:
        made.add()
        yield made


def keep(client: ShardClient, *names: str) -> None:
    for slot, name in enumerate(names):
        number = client.evict(slot, column(name).key, TAG, 64, kv())
        assert client.spill([Wanted(slot, column(name, number))]) == [TierAnswer.DONE]


def lacks(client: ShardClient, feature: Feature) -> None:
    assert isinstance(client, TieredClient)
    client.requests.line.features &= ~feature


@pytest.mark.parametrize("kind", ["shm", "unix"])
def test_while_tier_2_is_on_its_way_nothing_is_said_to_be_gone(
    plane: Plane, tiering: LoopTiering, kind: str
) -> None:
    with plane.client(kind) as client:
        keep(client, "a", "b")
        store, tiering.store = tiering.store, None
        assert client.purge(TAG) is None
        assert client.forget([column("a")]) == [Miss.REFUSED]
        tiering.store = store
        assert client.exists([column("a"), column("b")]) == [True, True]
        assert client.forget([column("a")]) == [TierAnswer.DONE]
        gone = client.purge(TAG)
        assert gone
        assert gone.files == 1


def test_where_tier_2_is_off_nothing_is_left_of_anything(plane: Plane, tiering: LoopTiering) -> None:
    store, tiering.store, tiering.is_off = tiering.store, None, True
    with plane.client() as client:
        number = client.evict(0, column("a").key, TAG, 64, kv())
        assert client.purge(TAG) == Purged(0, 0)
        assert client.forget([column("a"), column("b")]) == [TierAnswer.DONE] * 2
        assert client.exists([column("a")]) == [False]
        assert client.spill([Wanted(0, column("a", number))]) == [Miss.REFUSED]
        assert client.recall([Wanted(1, column("a"))]) == [Miss.REFUSED]
    tiering.store = store


def test_an_agent_that_never_has_a_tier_2_has_nothing_to_remove(tmp_path: Path) -> None:
    with running(tmp_path) as plane:
        plane.add()
        with plane.client() as client:
            assert client.purge(TAG) == Purged(0, 0)
            assert client.forget([column("a"), column("b")]) == [TierAnswer.DONE] * 2


def test_an_older_agent_that_cannot_purge_has_not_purged(plane: Plane) -> None:
    with plane.client() as client:
        keep(client, "a")
        lacks(client, Feature.PURGE)
        assert client.purge(TAG) is None
        assert client.exists([column("a")]) == [True]


def test_a_request_that_is_one_too_many_is_not_done(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plane.client() as client:
        keep(client, "a")
        monkeypatch.setattr("kvss_agent.connection.TIERING_MAX", 0)
        assert client.purge(TAG) is None
        assert client.forget([column("a")]) == [Miss.REFUSED]
