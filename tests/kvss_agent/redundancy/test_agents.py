"""Real agents that store columns for each other, and what is left when some of them die."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvss_agent.borrowing import STALL_SECONDS
from kvss_agent.client import Miss, Recalled, TierAnswer, Wanted
from kvss_agent.tier2.parts.spills import REST_SECONDS_MAX
from tests.kvss_agent.plane import PAYLOAD, TAG, column, kv, place
from tests.kvss_agent.process import agent
from tests.kvss_agent.redundancy.fleets import COUNT, DATA, TCP, Fleet, recall, store
from tests.live import wait_until


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(agent(tmp_path / name, *TCP)) for name in ("home", "a", "b", "c", "d")
        ]
        made = Fleet(agents[0], agents[1:4], tmp_path)
        made.tell()
        made.wait_until_ready()
        yield made


def test_any_agent_may_die_and_every_column_comes_back_the_same(fleet: Fleet) -> None:
    with fleet.home.client() as client:
        contents = store(client)
        assert not list(fleet.store_of(fleet.home).glob("*/*/*/*"))
        assert recall(client) == contents
        counts = fleet.counts()
        assert counts["holder_faults"] == 0
        assert counts["parity_reads"] <= fleet.redundancy()["hedges"], "none but those that were late"
        for holder in fleet.holders:
            holder.kill()
            assert recall(client) == contents
            assert client.exists([column("0"), column("none")]) == [True, False]
            fleet.restart(holder)
            fleet.wait_until_ready()


def test_two_deaths_are_misses_with_their_reason_and_never_other_bytes(fleet: Fleet) -> None:
    with fleet.home.client() as client:
        contents = store(client)
        fleet.holders[0].kill()
        assert recall(client) == contents
        assert fleet.counts()["parity_reads"] == COUNT
        assert fleet.counts()["holder_faults"] > 0
        fleet.holders[1].kill()
        assert set(recall(client)) == {Miss.LOST}
        assert fleet.redundancy()["unreachable"]
        fleet.restart(*fleet.holders[:2])
        fleet.wait_until_ready()
        assert recall(client) == contents


@pytest.mark.parametrize("place", [0, DATA], ids=["with data", "with parity"])
def test_nobody_waits_for_a_holder_that_stands_still_until_it_is_lost(fleet: Fleet, place: int) -> None:
    with fleet.home.client() as client:
        contents = store(client)
        stopped = fleet.holders[place]
        stopped.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        try:
            assert recall(client) == contents
            given_up = fleet.counts()["holder_faults"]
            assert not given_up or time.monotonic() - began > STALL_SECONDS, "it was waited for too long"
            told = fleet.redundancy()
            address = f"tcp:127.0.0.1:{stopped.tcp}"
            assert place == DATA or (told["hedges"] > 0 and address in told["late"])
            assert recall(client) == contents
            wait_until("it has been given up", lambda: fleet.counts()["holder_faults"] > 0)
            assert recall(client) == contents
        finally:
            stopped.process.send_signal(signal.SIGCONT)

        def is_prompt() -> bool:
            assert recall(client) == contents
            return not fleet.redundancy()["late"]

        wait_until("a probe has been answered", is_prompt, 60)
        assert fleet.redundancy()["incomplete"] == 0, "late is not lost"


def test_a_home_that_dies_costs_no_column(fleet: Fleet) -> None:
    """Another agent becomes the home of the shard, and finds what the fragments make."""
    with fleet.home.client() as client:
        contents = store(client)
    before, other = fleet.home, fleet.holders[1]
    before.kill()
    fleet.tell(home=other)
    fleet.wait_until_ready()
    assert fleet.redundancy()["columns"] == COUNT
    with other.client() as client:
        assert recall(client) == contents


def test_a_holder_that_is_replaced_gets_its_fragments_again(fleet: Fleet, tmp_path: Path) -> None:
    with fleet.home.client() as client:
        contents = store(client)
        lost = fleet.holders[1]
        lost.kill()
        shutil.rmtree(fleet.store_of(lost))
        with agent(tmp_path / "new", *TCP) as new:
            fleet.since[new.directory] = 1_700_000_000.123456
            assert fleet.redundancy()["holders_since"] == 0
            fleet.tell(holders=[fleet.holders[0], new, fleet.holders[2]])
            wait_until("they are applied", lambda: fleet.redundancy()["holders_since"])
            assert fleet.redundancy()["holders_since"] == fleet.since[new.directory]
            fleet.wait_until_ready()
            wait_until("all is repaired", lambda: fleet.redundancy()["incomplete"] == 0)
            assert fleet.redundancy()["repaired"] == COUNT
            fleet.holders[0].kill()
            assert recall(client) == contents


def test_a_delete_and_a_purge_leave_no_fragment(fleet: Fleet) -> None:
    with fleet.home.client() as client:
        store(client)
        assert client.tier_delete([column("0")]) == [TierAnswer.DONE]
        assert client.exists([column("0"), column("1")]) == [False, True]
        assert client.purge(TAG) is not None
        assert not client.exists([column("1")])[0]
    left = [path for one in fleet.holders for path in fleet.store_of(one).glob("*/*/*/*")]
    assert not left


def test_a_purge_is_not_confirmed_while_a_holder_is_away(fleet: Fleet) -> None:
    with fleet.home.client() as client:
        store(client, 2)
        fleet.holders[0].kill()
        assert client.purge(TAG) is None
        fleet.restart(fleet.holders[0])
        fleet.wait_until_ready()
        assert client.purge(TAG) is not None
    assert not [path for one in fleet.holders for path in fleet.store_of(one).glob("*/*/*/*")]


def test_what_holders_can_t_take_is_stored_alone(fleet: Fleet) -> None:
    for holder in fleet.holders[:2]:
        holder.kill()
    with fleet.home.client() as client:
        contents = store(client, 2)
        assert len(list(fleet.store_of(fleet.home).glob("*/*/*/*"))) == 2
        assert recall(client, 2) == contents
    metrics = fleet.home.http.get("/metrics").text
    assert 'kvss_redundancy_stored_alone_total{why="failed"} 2' in metrics


def test_a_burst_of_spills_keeps_to_its_budget_and_evicts_go_on_beside_it(fleet: Fleet) -> None:
    """What the links to holders have no room for is stored at home, and nothing is lost."""
    bytes_per_second, count = 500_000, 24
    fleet.redundant["bytes_per_second"] = bytes_per_second
    fleet.tell()
    evicts = 0
    with fleet.home.client() as client, ThreadPoolExecutor() as pool:
        contents = [kv() for _ in range(count)]
        numbers = [
            client.evict(slot, column(str(slot)).key, TAG, 64, content)
            for slot, content in enumerate(contents)
        ]
        asked = [Wanted(slot, column(str(slot), number)) for slot, number in enumerate(numbers)]
        burst = pool.submit(client.spill, asked, notes=[7] * count, redundant=True)
        while not burst.done():
            client.evict(count, column(f"beside-{evicts}").key, TAG, 64, kv())
            evicts += 1
        assert burst.result() == [TierAnswer.DONE] * count
        alone = len(list(fleet.store_of(fleet.home).glob("*/*/*/*")))
        sent = sum(
            path.stat().st_size for one in fleet.holders for path in fleet.store_of(one).glob("*/*/*/*")
        )
        allowed = bytes_per_second * REST_SECONDS_MAX
        assert allowed / 2 < sent < 1.5 * allowed, "and each fragment is whole pages"
        assert 0 < alone < count
        assert evicts > 10
        assert client.delete(range(count + 1)) is None
        assert recall(client, count) == [bytes(one) for one in contents]
    page = fleet.home.http.get("/metrics").text
    assert f'kvss_redundancy_stored_alone_total{{why="over_budget"}} {alone}' in page
    assert f'kvss_redundancy_spills_total{{outcome="late"}} {alone}' in page
    assert 'kvss_background_bytes_total{what="holders"} 0' not in page
    assert 'kvss_background_rests_seconds_total{what="holders",why="budget"} 0' not in page


def test_an_encrypted_column_is_encrypted_in_every_fragment(fleet: Fleet) -> None:
    key, secret_text = b"k" * 32, b"what nobody else may read" * 1000
    payload = memoryview(secret_text.ljust(PAYLOAD, b"."))
    with fleet.home.client() as client:
        number = client.evict(0, column("x").key, TAG, 64, payload)
        wanted = [Wanted(0, column("x", number))]
        assert client.spill(wanted, data_key=key, redundant=True) == [TierAnswer.DONE]
        for one in fleet.holders:
            for path in fleet.store_of(one).glob("*/*/*/*"):
                assert b"nobody else" not in path.read_bytes()
        fleet.holders[0].kill()
        client.delete([0])
        (found,) = client.recall([Wanted(1, column("x"))], data_key=key)
        assert isinstance(found, Recalled)
        into = place()
        client.refill([Wanted(1, column("x", found.number))], [into])
        assert into == payload
        assert client.recall([Wanted(2, column("x"))], data_key=b"z" * 32) == [Miss.CORRUPT]
