"""Values under an engine's own keys, on real agents: they come back whole, or not at all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvss_agent.client import Miss
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.data_plane.shard.reads import ShardReader
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.layout import Group, Layout
from swdriver_shim.object_store import TooLarge
from swdriver_shim.objects import LocalObjects, count_leading, object_model
from swdriver_shim.policy import Policy, Rules, Tiers
from tests.kvss_agent.plane import running
from tests.live import wait_until
from tests.swdriver_shim.fleets import Fleet
from tests.swdriver_shim.fleets import driving as driving_prefixes
from tests.swdriver_shim.keeping import BYTES_MAX, FIRST, LAYOUT, keeper, keeping, names, value
from tests.swdriver_shim.prompts import keys
from tests.swdriver_shim.tiers import SOON, kept, tier_requests

SLOTS = 20
KEPT = Policy(tiers=Tiers.TIER2)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running(tmp_path) as plane:
        made = Fleet(plane, LAYOUT)
        made.make(SLOTS)
        yield made


@pytest.mark.parametrize("kind", ["shm", "unix", "tcp"])
def test_what_is_put_comes_back_whole_and_as_long_as_it_was(fleet: Fleet, kind: str) -> None:
    sizes = [1, 63, FIRST - 1, FIRST, FIRST + 1, BYTES_MAX]
    with keeping(fleet, kind) as driver:
        mine = keeper(driver)
        for number, size in enumerate(sizes):
            assert mine.get(names(number)) == [None]
            assert mine.put(names(number), size) == [True]
            assert mine.get(names(number)) == [size]
        every = names(*range(len(sizes)), 99)
        assert mine.get(every) == [*sizes, None]
        assert mine.objects.exists(every) == [*[True] * len(sizes), False]
        assert keeper(driver, "globex").get(every) == [None] * len(every)


def test_many_go_at_once_and_those_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    with running(tmp_path) as plane:
        fleet = Fleet(plane, LAYOUT)
        fleet.make(200)
        with keeping(fleet) as driver:
            mine = keeper(driver)
            assert mine.put(names(*range(0, 150, 2))) == [True] * 75
            other = [memoryview(b"other")] * 150
            assert mine.objects.put(names(*range(150)), other) == [True] * 150
            places = [memoryview(bytearray(BYTES_MAX)) for _ in range(150)]
            lengths = mine.objects.get(names(*range(150)), places)
            assert lengths == [BYTES_MAX, 5] * 75


def test_the_same_key_twice_in_one_call_is_one_object(fleet: Fleet) -> None:
    with keeping(fleet) as driver:
        mine = keeper(driver)
        assert mine.put(names(1, 2, 1)) == [True] * 3
        assert mine.get(names(1, 1, 2, 1)) == [BYTES_MAX] * 4
        assert driver.statistics.groups()[0].used == 2


def test_what_does_not_fit_is_refused_with_the_size_that_would(fleet: Fleet) -> None:
    with keeping(fleet) as driver:
        objects = LocalObjects(driver, keys())
        values = [value(b"a"), memoryview(bytes(BYTES_MAX + 1))]
        with pytest.raises(TooLarge, match=f"has {BYTES_MAX + 1} bytes.*97 bytes per token"):
            objects.put(names(1, 2), values)
        with pytest.raises(ValueError, match="empty"):
            objects.put(names(1), [memoryview(b"")])
        assert driver.objects.too_large == 1
        assert objects.exists(names(1, 2)) == [False, False]
        assert driver.statistics.groups()[0].used == 0


def test_a_place_that_is_too_small_is_a_miss_and_spoils_no_other(fleet: Fleet) -> None:
    for kind in ("shm", "unix"):
        with keeping(fleet, kind) as driver:
            mine = keeper(driver)
            for small in (10, FIRST):
                mine.put(names(1, 2, 3))
                places = [memoryview(bytearray(size)) for size in (BYTES_MAX, small, BYTES_MAX)]
                assert mine.objects.get(names(1, 2, 3), places) == [BYTES_MAX, None, BYTES_MAX]
                assert places[2] == value(b"page-3")


@pytest.mark.parametrize("displacement", ["lru", "cost", "s3fifo", "slru", "lfu"])
def test_the_end_of_a_prompt_goes_before_its_beginning(fleet: Fleet, displacement: str) -> None:
    with keeping(fleet, acme=Policy(displacement=displacement)) as driver:  # type: ignore[arg-type]
        mine = keeper(driver)
        mine.put(names(*range(SLOTS)))
        mine.put(names(*range(100, 105)))
        here = mine.objects.exists(names(*range(SLOTS)))
        assert count_leading(here) == sum(here) == SLOTS - 5
        mine.get(names(*range(15)))
        mine.put(names(*range(200, 210)))
        here = mine.objects.exists(names(*range(15)))
        assert count_leading(here) == sum(here)


def test_without_room_for_all_the_first_are_kept(fleet: Fleet) -> None:
    with keeping(fleet) as driver:
        put = keeper(driver).put(names(*range(SLOTS + 5)))
        assert put == [True] * SLOTS + [False] * 5


def test_a_quota_holds_and_every_miss_has_its_reason(fleet: Fleet) -> None:
    column = LAYOUT.groups[0].column_bytes
    policy = Policy(dram_bytes_max=3 * column, ttl_last_use_seconds=100)
    now = 1000.0
    with keeping(fleet, clock=lambda: now, acme=policy) as driver:
        mine = keeper(driver)
        mine.put(names(1, 2, 3))
        mine.put(names(4))
        assert mine.get(names(1, 2, 3, 4)) == [BYTES_MAX, BYTES_MAX, None, BYTES_MAX]
        assert mine.objects.remove(names(1))
        now += 101
        assert mine.get(names(1, 2, 5)) == [None] * 3
        mine.put(names(6), rules=Rules(no_store=True))
        mine.get(names(6))
        [state] = driver.statistics.orgs()
        c = COLUMN_TOKENS
        assert state.hit_tokens == {"dram": 3 * c}
        assert state.missed_tokens == {
            Reason.QUOTA: c,
            Reason.DELETED: c,
            Reason.EXPIRED: c,
            Reason.NEVER_STORED: c,
            Reason.NO_STORE: c,
        }


def test_clearing_leaves_nothing_of_this_org_and_all_of_the_others(fleet: Fleet) -> None:
    with keeping(fleet, acme=Policy(scrub=True)) as driver:
        mine, other = keeper(driver), keeper(driver, "globex")
        mine.put(names(1, 2))
        other.put(names(1))
        assert mine.objects.clear()
        assert mine.get(names(1, 2)) == [None, None]
        assert other.get(names(1)) == [BYTES_MAX]
        left = [any(shard.arena.slot(n)) for shard in fleet.plane.shards.values() for n in range(SLOTS)]
        assert sum(left) == 2


def test_bytes_that_were_damaged_are_a_miss_and_can_be_put_anew(fleet: Fleet) -> None:
    with keeping(fleet) as driver:
        mine = keeper(driver)
        mine.put(names(1, 2, 3))
        slot = driver.explain(keys().named(names(2)))["objects"][0].slot
        assert slot is not None
        fleet.plane.shards["0.1"].arena.slot(slot)[100] ^= 1
        assert mine.get(names(1, 2, 3)) == [BYTES_MAX, None, BYTES_MAX]
        assert driver.statistics.orgs()[0].missed_tokens == {Reason.SEAL_REFUSED: COLUMN_TOKENS}
        assert mine.put(names(2)) == [True]
        assert mine.get(names(1, 2, 3)) == [BYTES_MAX] * 3


@pytest.mark.parametrize(
    ("miss", "reason"),
    [
        *((miss, Reason.SEAL_REFUSED) for miss in (Miss.TORN, Miss.STALE, Miss.FOREIGN, Miss.CORRUPT)),
        (Miss.LATE, Reason.WRITING),
        *((miss, Reason.AGENT_LOST) for miss in (Miss.ABSENT, Miss.REFUSED, Miss.LOST)),
    ],
)
def test_only_bytes_that_are_damaged_are_said_to_be(
    fleet: Fleet,
    miss: Miss,
    reason: Reason,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of such somebody is woken, and finds in the log what it was: not where an agent was restarted, or
    an evict is still on its way."""
    with keeping(fleet) as driver:
        mine = keeper(driver)
        mine.put(names(1))
        monkeypatch.setattr(ShardReader, "_refill", _missing(miss))
        assert mine.get(names(1)) == [None]
        assert driver.statistics.orgs()[0].missed_tokens == {reason: COLUMN_TOKENS}
    assert (f"not served: {miss}" in caplog.text) == (reason is Reason.SEAL_REFUSED)


def _missing(miss: Miss) -> Callable[..., None]:
    """Of a shard: whatever is read is missed for this reason."""

    def refill(
        _reader: object, _client: object, places: Sequence[int], _: object, __: object, found: list[Any]
    ) -> None:
        for place in places:
            found[place] = miss

    return refill


def test_an_agent_that_is_gone_is_a_miss_and_used_again_when_it_is_back(fleet: Fleet) -> None:
    with keeping(fleet) as driver:
        mine = keeper(driver)
        mine.put(names(1))
        fleet.kill()
        # Until it is noticed, what is in memory is served.
        wait_until("it is noticed", lambda: mine.get(names(1)) == [None])
        assert mine.put(names(2)) == [False]
        fleet.make()
        wait_until(
            "it is used again",
            lambda: mine.put(names(1)) == [True] and mine.get(names(1)) == [BYTES_MAX],
        )


def test_many_at_once_get_their_own_bytes_or_none(fleet: Fleet) -> None:
    wrong: list[BaseException] = []

    with keeping(fleet) as driver:

        def run(seed: int) -> None:
            mine = keeper(driver, f"org{seed % 2}")
            try:
                for turn in range(60):
                    wanted = names(*range(turn % 7, turn % 7 + 6))
                    mine.get(wanted)
                    mine.put(wanted, 1 + 100 * (seed % 2))
                    mine.get(wanted)
            except BaseException as error:
                wrong.append(error)
                raise

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert all(org.hit_tokens["dram"] > 0 for org in driver.statistics.orgs())


def test_what_memory_had_no_room_for_comes_back_from_tier_2_in_time(tmp_path: Path) -> None:
    files = tmp_path / "files"
    with tier_requests(files) as tier, running(tmp_path, tier_requests=tier) as plane:
        fleet = Fleet(plane, LAYOUT)
        fleet.make(SLOTS)
        with keeping(fleet, acme=KEPT) as driver:
            mine = keeper(driver)
            mine.put(names(1, 2, 3), BYTES_MAX)
            mine.get(names(1, 2, 3))
            wait_until("they are kept", lambda: driver.ledger.tier2.spilled.columns == 3)
            assert len(kept(files)) == 6
            pool = driver.ledger.pools[0]
            for slots in (0, SLOTS):
                for shard in plane.shards.values():
                    shard.resize(slots)
                wait_until("the driver follows", lambda: pool.limit == slots)  # noqa: B023
            assert mine.get(names(7, 3, 8, 1), SOON) == [None, BYTES_MAX, None, BYTES_MAX]
            assert mine.objects.exists(names(9, 2), SOON) == [False, True]
            assert mine.get(names(1, 2, 3)) == [BYTES_MAX] * 3
            c = COLUMN_TOKENS
            [state] = driver.statistics.orgs()
            assert state.hit_tokens == {"dram": 6 * c, "tier2": 2 * c}
            assert Counter(state.missed_tokens) == {Reason.NEVER_STORED: 2 * c}
            assert mine.objects.remove(names(3))
            assert mine.get(names(3), SOON) == [None]
            assert mine.objects.clear()
            assert kept(files) == []


def test_prefixes_and_objects_are_told_apart(tmp_path: Path) -> None:
    with running(tmp_path) as plane:
        fleet = Fleet(plane)
        fleet.make()
        with driving_prefixes(fleet) as engine, pytest.raises(ValueError, match="alone"):
            LocalObjects(engine.driver, keys())
    with pytest.raises(ValueError, match="layout of its own"):
        Layout((Group("full", (64,)), Group("objects", (64,), alone=True)))
    with pytest.raises(ValueError, match="no window"):
        Group("objects", (64,), window=64, alone=True)


def test_names_have_keys_of_their_own_for_each_org_and_namespace() -> None:
    made = {keys(org).named(names(1)).keys[0] for org in ("acme", "globex")}
    assert len(made) == 2
    assert keys().named(names(1, 2)).keys == keys().named(names(1, 2)).keys
    assert keys().named(names(1, 2)).tokens == 2 * COLUMN_TOKENS
    assert object_model("llama", 100).shape().groups[0].bytes_per_token == (2,)
