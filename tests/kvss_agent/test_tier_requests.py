"""What an agent says when tier 2 has to be emptied: done only if nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvss_agent.client import Lost, Miss, NotListed, Purged, ShardClient, TierAnswer, Wanted, interface
from kvss_agent.data_plane import tier_requests as requests
from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.data_plane.wire import Feature
from kvss_agent.shard.seal import Header
from kvss_agent.tier2 import store as store_module
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import Arriving, Failed, Fault, Leaving, Removed
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.store import Tier2
from tests.kvss_agent.plane import PAYLOAD, TAG, Plane, column, kv, running
from tests.kvss_agent.redundancy.one_store import OneStore
from tests.live import wait_until


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


class Slow(Posix):
    """A store whose reads and purges take as long as the test wants."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go_on = threading.Event()
        self.go_on.set()
        self.purges = self.reads = 0
        self.then: Callable[[], None] = lambda: None

    def load_columns(self, columns: Sequence[Arriving]) -> list[Header | Miss | Failed]:
        self.reads += 1
        assert self.go_on.wait(60)
        return super().load_columns(columns)

    def purge(self, scope: Scope) -> Removed:
        self.purges += 1
        assert self.go_on.wait(60)
        self.then()
        return super().purge(scope)


@pytest.fixture
def slow(tmp_path: Path) -> Slow:
    return Slow(tmp_path / "files")


@contextlib.contextmanager
def opened(loop: asyncio.AbstractEventLoop, files: Slow) -> Iterator[Tier2]:
    store = Tier2(files, Caps(1 << 30, 1 << 30))
    asyncio.run_coroutine_threadsafe(store.open(), loop).result()
    try:
        yield store
    finally:
        asyncio.run_coroutine_threadsafe(store.close(), loop).result()


@pytest.fixture
def tier_requests(loop: asyncio.AbstractEventLoop, slow: Slow) -> Iterator[TierRequests]:
    made = TierRequests(loop)
    with opened(loop, slow) as made.store:
        yield made


@pytest.fixture
def plane(tmp_path: Path, tier_requests: TierRequests) -> Iterator[Plane]:
    with running(tmp_path, tier_requests=tier_requests) as made:
        made.add()
        yield made


def keep(client: ShardClient, *names: str) -> None:
    for slot, name in enumerate(names):
        number = client.evict(slot, column(name).key, TAG, 64, kv())
        assert client.spill([Wanted(slot, column(name, number))]) == [TierAnswer.DONE]


def lacks(client: ShardClient, feature: Feature) -> None:
    client.requests.connection.features &= ~feature


@pytest.mark.parametrize("kind", ["shm", "unix"])
def test_while_tier_2_is_on_its_way_nothing_is_said_to_be_gone(
    plane: Plane, tier_requests: TierRequests, kind: str
) -> None:
    with plane.client(kind) as client:
        keep(client, "a", "b")
        store, tier_requests.store = tier_requests.store, None
        assert client.purge(TAG) is None
        assert client.tier_delete([column("a")]) == [Miss.REFUSED]
        tier_requests.store = store
        assert client.exists([column("a"), column("b")]) == [True, True]
        assert client.tier_delete([column("a")]) == [TierAnswer.DONE]
        gone = client.purge(TAG)
        assert gone
        assert gone.files == 1


@pytest.mark.parametrize("verb", ["exists", "listed"])
def test_what_nobody_has_foreseen_is_in_the_log(
    plane: Plane,
    tier_requests: TierRequests,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(*_: object) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(tier_requests.store, verb, fails)
    with plane.client() as client:
        if verb == "exists":
            assert client.exists([column("a")]) == [False]
        else:
            with pytest.raises(NotListed):
                list(client.listed())
    assert "a fault of ours" in caplog.text


def test_where_tier_2_is_off_nothing_is_left_of_anything(
    plane: Plane, tier_requests: TierRequests
) -> None:
    store, tier_requests.store, tier_requests.is_off = tier_requests.store, None, True
    with plane.client() as client:
        number = client.evict(0, column("a").key, TAG, 64, kv())
        assert client.purge(TAG) == Purged(0, 0)
        assert client.tier_delete([column("a"), column("b")]) == [TierAnswer.DONE] * 2
        assert client.exists([column("a")]) == [False]
        assert client.spill([Wanted(0, column("a", number))]) == [Miss.REFUSED]
        assert client.recall([Wanted(1, column("a"))]) == [Miss.REFUSED]
    tier_requests.store = store


def test_a_shard_s_columns_in_tier_2_are_listed_in_order_over_several_pages(
    plane: Plane, tier_requests: TierRequests
) -> None:
    tier_requests.page = 3
    names = [f"{number:02}" for number in range(8)]
    with plane.client() as client:
        keep(client, *reversed(names))
        listed = list(client.listed())
        assert [one.key for one in listed] == [column(name).key for name in names]
        assert {one.tag for one in listed} == {TAG}
        assert all(one.bytes > PAYLOAD and abs(one.seconds - time.time()) < 60 for one in listed)


@pytest.mark.parametrize(("bound", "most"), [("LISTED_MAX", 7), ("LISTING_SECONDS_MAX", 0.0)])
def test_a_list_has_an_end(
    plane: Plane, tier_requests: TierRequests, monkeypatch: pytest.MonkeyPatch, bound: str, most: float
) -> None:
    """Columns and time are counted over all pages."""
    tier_requests.page = 3
    with plane.client() as client:
        keep(client, *(f"{number:02}" for number in range(8)))
        monkeypatch.setattr(interface, bound, most)
        with pytest.raises(NotListed, match="does not come to an end"):
            list(client.listed())


def test_a_file_from_before_1970_is_listed(plane: Plane, tier_requests: TierRequests) -> None:
    with plane.client() as client:
        keep(client, "a")
        assert tier_requests.store
        index = tier_requests.store._state.index
        [address] = index.known()
        index._orgs[TAG].note(address, -5.0)
        assert [one.seconds for one in client.listed()] == [0]


async def test_others_have_their_turn_while_columns_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_LISTED_AT_ONCE", 10)
    store = Tier2(Posix(tmp_path), Caps(1 << 30, 1 << 30))
    index = store._state.index
    for number in range(100):
        index.adopt(Address(bytes(16), TAG, number.to_bytes(16, "big"), "full.0"), 4096)
    listing = asyncio.create_task(store.listed(bytes(16), "full.0"))
    turns = 0
    while not listing.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 10
    assert len(await listing) == 100
    assert await store.listed(bytes(16), "full.1") == []
    await store.close()


def test_while_tier_2_is_not_open_no_list_is_empty(plane: Plane, tier_requests: TierRequests) -> None:
    with plane.client() as client:
        keep(client, "a")
        store, tier_requests.store = tier_requests.store, None
        with pytest.raises(NotListed):
            list(client.listed())
        tier_requests.store = store
        lacks(client, Feature.REDUNDANCY)
        with pytest.raises(NotListed):
            list(client.listed())


def test_an_agent_that_never_has_a_tier_2_has_nothing_to_remove(tmp_path: Path) -> None:
    with running(tmp_path) as plane:
        plane.add()
        with plane.client() as client:
            assert client.purge(TAG) == Purged(0, 0)
            assert client.tier_delete([column("a"), column("b")]) == [TierAnswer.DONE] * 2


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
        monkeypatch.setattr("kvss_agent.data_plane.connection.TIER_REQUESTS_MAX", 0)
        assert client.purge(TAG) is None
        assert client.tier_delete([column("a")]) == [Miss.REFUSED]


@pytest.mark.parametrize("kind", ["shm", "unix"])
def test_what_comes_back_for_somebody_who_has_left_stays_nowhere(
    plane: Plane, slow: Slow, kind: str
) -> None:
    """A driver that connects anew empties its slots, and with memory shared it asks nobody."""
    memory = plane.shards["s"].arena.slot(5)
    with plane.client(kind) as client, ThreadPoolExecutor(1) as other:
        keep(client, "a")
        slow.go_on.clear()
        recall = other.submit(client.recall, [Wanted(5, column("a"))])
        wait_until("it is under way", lambda: slow.reads == 1)
        client.close()
        with pytest.raises(Lost):
            recall.result()
    wait_until("nobody is connected", lambda: plane.shards["s"].state()["connections"] == 0)
    with plane.client(kind) as client:
        client.delete([5])
        slow.go_on.set()
        wait_until("it has come", lambda: plane.shards["s"].state()["leases"] == 0)
        assert not any(memory)


def is_over(tier_requests: TierRequests) -> None:
    wait_until("nothing is being purged", lambda: not tier_requests._purges)


def test_a_purge_that_takes_long_goes_on_and_its_receipt_lacks_nothing(
    plane: Plane, tier_requests: TierRequests, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PURGE_ANSWER_SECONDS", 0.05)
    with plane.client() as client:
        keep(client, "a", "b")
        slow.go_on.clear()
        assert [client.purge(TAG) for _ in range(3)] == [None] * 3
        wait_until("it is under way", lambda: slow.purges == 1)
        assert client.purge(b"another tag".ljust(16, b"\0")) is None
        wait_until(
            "it is under way", lambda: slow.purges == 2
        )  # the first is one, however often one asks
        monkeypatch.setattr(requests, "PURGE_ANSWER_SECONDS", 60.0)
        slow.go_on.set()
        is_over(tier_requests)
        assert client.exists([column("a"), column("b")]) == [False, False]
        keep(client, "c")
        gone = client.purge(TAG)
        assert client.exists([column("c")]) == [False], "an old receipt would say nothing of this one"
        assert gone
        assert gone.files == 3
        assert client.purge(TAG) == Purged(0, 0), "told once"


def test_a_purge_that_several_ask_for_is_counted_for_one_of_them(
    plane: Plane, tier_requests: TierRequests, slow: Slow
) -> None:
    plane.add("t")
    with plane.client() as client, plane.client(shard="t") as other, ThreadPoolExecutor() as threads:
        keep(client, "a")
        keep(other, "b")
        slow.go_on.clear()
        asked = [threads.submit(one.purge, TAG) for one in (client, other, client)]
        wait_until("it is under way", lambda: bool(tier_requests._purges))
        slow.go_on.set()
        receipts = [one.result() for one in asked]
        assert all(receipts)
        assert sum(gone.files for gone in receipts if gone) == 2


def test_a_purge_that_fails_behind_everybody_s_back_is_repeated(
    plane: Plane,
    tier_requests: TierRequests,
    slow: Slow,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise Failed(Fault.IO_ERROR, "a bad sector")

    monkeypatch.setattr(requests, "PURGE_ANSWER_SECONDS", 0.05)
    with plane.client() as client:
        keep(client, "a")
        slow.go_on.clear()
        slow.then = fail
        assert client.purge(TAG) is None
        monkeypatch.setattr(requests, "PURGE_ANSWER_SECONDS", 60.0)
        slow.go_on.set()
        is_over(tier_requests)
        assert client.exists([column("a")]) == [True]
        slow.then = lambda: None
        gone = client.purge(TAG)
        assert gone
        assert gone.files == 1
    told = [one.getMessage() for one in caplog.records if one.levelno > logging.INFO]
    assert told == ["Tier 2: io-error: a bad sector"], "for who looks there, and no traceback"


def test_another_store_has_a_purge_of_its_own(
    plane: Plane,
    tier_requests: TierRequests,
    slow: Slow,
    loop: asyncio.AbstractEventLoop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvss_agent.data_plane.tier_requests.PURGE_ANSWER_SECONDS", 0.05)
    first = tier_requests.store
    with plane.client() as client, opened(loop, Slow(tmp_path / "others")) as tier_requests.store:
        keep(client, "a")
        other, tier_requests.store = tier_requests.store, first
        keep(client, "a", "b")
        slow.go_on.clear()
        assert client.purge(TAG) is None
        tier_requests.store = other
        assert client.exists([column("a")]) == [True]
        monkeypatch.setattr("kvss_agent.data_plane.tier_requests.PURGE_ANSWER_SECONDS", 60)
        gone = client.purge(TAG)
        assert gone
        assert gone.files == 1
        assert client.exists([column("a")]) == [False]
        slow.go_on.set()
        is_over(tier_requests)
        tier_requests.store, tier_requests.is_off = None, True
        gone = client.purge(TAG)
        assert gone
        assert gone.files == 2, "and nobody was told"
    tier_requests.store = first


def test_purges_that_run_on_and_receipts_that_nobody_fetches_are_few(
    plane: Plane, tier_requests: TierRequests, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvss_agent.data_plane.tier_requests.PURGE_ANSWER_SECONDS", 0.02)
    monkeypatch.setattr("kvss_agent.data_plane.tier_requests.PURGES_MAX", 2)
    with plane.client() as client:
        slow.go_on.clear()
        for number in range(4):
            assert client.purge(bytes([number]) * 16) is None
        assert len(tier_requests._purges) == 2
        slow.go_on.set()
        is_over(tier_requests)
        slow.go_on.clear()
        assert client.purge(bytes([9]) * 16) is None
        slow.go_on.set()
        is_over(tier_requests)
        wait_until("the oldest is let go of", lambda: len(tier_requests._unreported) == 2)


class Failing(Slow):
    """It takes as long as the test wants to write, and then fails."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.writes = 0

    def store_columns(self, columns: Sequence[Leaving]) -> list[Miss | Failed | None]:
        self.writes += 1
        assert self.go_on.wait(60)
        return [Failed(Fault.UNREACHABLE, "too few agents") for _ in columns]


@pytest.mark.parametrize("removes", [True, False])
def test_what_holders_do_not_take_is_not_stored_alone_once_it_was_removed(
    loop: asyncio.AbstractEventLoop, slow: Slow, tmp_path: Path, *, removes: bool
) -> None:
    holders = Failing(tmp_path / "holders")
    holders.go_on.clear()
    with opened(loop, holders) as redundant:
        requests = TierRequests(loop, redundant=OneStore(redundant))
        with (
            opened(loop, slow) as requests.store,
            running(tmp_path, tier_requests=requests) as plane,
            ThreadPoolExecutor(2) as threads,
        ):
            plane.add()
            with plane.client() as client:
                number = client.evict(0, column("a").key, TAG, 64, kv())
                wanted = [Wanted(0, column("a", number))]
                spill = threads.submit(client.spill, wanted, redundant=True)
                wait_until("it is written", lambda: holders.writes == 1)
                purge = threads.submit(client.purge, TAG) if removes else None
                if removes:
                    wait_until("the own store is empty", lambda: slow.purges == 1)
                holders.go_on.set()
                (answer,) = spill.result()
                assert answer is (TierAnswer.FAILED if removes else TierAnswer.DONE)
                if purge:
                    assert purge.result() is not None
                assert client.exists([column("a")]) == [not removes]
