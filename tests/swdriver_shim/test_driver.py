"""The driver on real agents: bytes go out, come back, expire, move, and are never anybody else's."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvss_agent.client import (
    Evict,
    Lost,
    Miss,
    ShardClient,
    StreamClient,
)
from kvss_agent.data_plane.breach import Cause
from swdriver_shim.cache import prompt_deletes
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.misses import KeyedColumn
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.request_log import PromptKeys
from swdriver_shim.data_plane.agent_control import PullResult
from swdriver_shim.data_plane.shard import Shard, connections, moves
from swdriver_shim.data_plane.shard.columns import RecallColumn, RefillColumn
from swdriver_shim.decider.decider import COLUMNS_AT_ONCE
from swdriver_shim.driver import Driver
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import Keys, Prompt
from swdriver_shim.policy import Policy
from tests.live import wait_until
from tests.swdriver_shim.fleets import PULLED, C, Engine, Fleet, driving, pull_with, tokens
from tests.swdriver_shim.prompts import LAYOUT, prompt


@pytest.mark.parametrize("kind", ["shm", "unix", "tcp"])
def test_what_is_stored_comes_back_over_every_transport(fleet: Fleet, kind: str) -> None:
    with driving(fleet, kind) as engine:
        asked = prompt(tokens(1, 2, 3, rest=10))
        assert engine.load(asked) == 0
        assert engine.store(asked) == 4 + 4
        assert engine.load(asked) == asked.tokens
        asked.extend([5] * 100)
        assert engine.load(asked) == 3 * C + 10
        engine.store(asked)
        assert engine.load(asked) == asked.tokens
        assert engine.load(prompt(tokens(1, 2, 3), "globex")) == 0


def test_many_requests_at_once_get_their_own_bytes_or_none(fleet: Fleet) -> None:
    wrong: list[BaseException] = []

    def run(engine: Engine, seed: int) -> None:
        try:
            for turn in range(40):
                asked = prompt(tokens(seed % 2, turn % 3, seed, turn % 5, rest=turn), f"org{seed % 3}")
                engine.load(asked)
                engine.store(asked)
                engine.load(asked)
        except BaseException as error:
            wrong.append(error)
            raise

    with driving(fleet) as engine:
        threads = [threading.Thread(target=run, args=(engine, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        tally = engine.driver.ledger.tally("org1")
        assert tally.hits["dram"] > 0


def test_an_agent_that_is_gone_costs_misses_and_comes_back_empty(fleet: Fleet) -> None:
    with driving(fleet) as engine:
        asked = prompt(tokens(1, 2))
        engine.store(asked)
        fleet.kill()
        wait_until(
            "it is noticed", lambda: engine.load(asked) == 0
        )  # till then, what is in memory is served
        assert engine.store(prompt(tokens(7))) == 0
        assert engine.driver.ledger.tally("acme").missed[Reason.AGENT_LOST] > 0
        fleet.make()

        def works() -> bool:
            engine.store(asked)
            return engine.load(asked) == asked.tokens

        wait_until("it is used again", works)


def test_a_connection_that_breaks_loses_nothing_that_the_agent_still_has(fleet: Fleet) -> None:
    with driving(fleet, "unix") as engine:
        asked = prompt(tokens(1, 2))
        engine.store(asked)
        assert all(shard.wait_applied(30) for shard in engine.driver._shard_threads.all)
        for hosted in fleet.plane.shards.values():
            for member in list(hosted._members.values()):
                member.close(Cause.SUPERSEDED, "a cable was pulled")
        engine.load(asked)
        wait_until("all is there again", lambda: engine.load(asked) == asked.tokens)


def test_bytes_that_were_damaged_are_a_miss_and_never_served(fleet: Fleet) -> None:
    with driving(fleet) as engine:
        asked = prompt(tokens(1, 2, 3))
        engine.store(asked)
        slot = engine.driver.ledger.explain(asked, 0)["full"][1].slot
        assert slot is not None
        fleet.plane.shards["0.1"].arena.slot(slot)[100] ^= 1
        assert engine.load(asked) == C, "what comes before the damage"
        engine.store(asked)
        assert engine.load(asked) == asked.tokens


def test_a_purge_leaves_no_byte_behind_and_says_when(fleet: Fleet) -> None:
    with driving(fleet, acme=Policy(scrub=True)) as engine:
        engine.store(prompt(tokens(1, 2, rest=5)))
        engine.store(prompt(tokens(1), "globex"))
        receipt = engine.driver.removals.purge("acme")
        assert (receipt.done, receipt.columns) == (True, 6)
        assert set(receipt.confirmed) == {"0.0", "0.1", "1.0"}
        again = engine.driver.removals.purge("acme")
        assert (again.done, again.columns, again.tier2_files) == (True, 0, 0)
        assert engine.load(prompt(tokens(1, 2))) == 0
        assert engine.load(prompt(tokens(1), "globex")) == C
        left = [any(shard.arena.slot(n)) for shard in fleet.plane.shards.values() for n in range(20)]
        assert sum(left) == 3, "globex has one column in three shards"


def test_what_expires_is_emptied_by_itself(fleet: Fleet) -> None:
    ahead = 0.0
    policy = Policy(ttl_last_use_seconds=600)
    with driving(fleet, clock=lambda: time.monotonic() + ahead, acme=policy) as engine:
        engine.store(prompt(tokens(1)))
        assert engine.load(prompt(tokens(1))) == C
        ahead = 600.0
        hosted = fleet.plane.shards["0.0"]
        wait_until("it is empty", lambda: hosted.occupied() == 0)
        assert engine.load(prompt(tokens(1))) == 0


def test_a_group_has_as_many_slots_as_its_smallest_shard(fleet: Fleet) -> None:
    with driving(fleet) as engine:
        asked = prompt(tokens(*range(10)))
        engine.store(asked)
        fleet.plane.shards["0.1"].resize(4)
        ledger = engine.driver.ledger
        wait_until("the driver follows", lambda: ledger.pools[0].limit == 4)
        assert engine.load(asked) == 4 * C, "what lay below the line"
        engine.store(prompt(tokens(*range(4))))
        assert engine.load(prompt(tokens(*range(4)))) == 4 * C
        fleet.plane.shards["0.1"].resize(30)
        wait_until("the driver follows", lambda: ledger.pools[0].limit == 20)


def test_a_shard_moves_under_load_and_no_request_fails(fleet: Fleet) -> None:
    with driving(fleet, "unix") as engine:
        prompts = [prompt(tokens(kind, kind)) for kind in range(6)]
        for asked in prompts:
            engine.store(asked)
        shard = engine.driver._shards[0][1]
        fleet.make_one("moved", 32 * C, 20, shard.count_from())
        stop = threading.Event()
        hits: list[int] = []

        def ask() -> None:
            while not stop.is_set():
                for asked in prompts:
                    hits.append(engine.load(asked))
                    engine.store(asked)

        thread = threading.Thread(target=ask)
        thread.start()
        assert shard.move(fleet.connect("moved", "unix"), pull_with(fleet, "0.1", "moved"))
        enough = len(hits) + 12
        wait_until("some were asked after the move", lambda: len(hits) > enough)
        stop.set()
        thread.join()
        assert shard.left_to_move() == 0
        assert set(hits) == {2 * C}, "nothing was missed"
        fleet.plane.shards.pop("0.1").end(Cause.GONE, "moved")
        assert [engine.load(asked) for asked in prompts] == [2 * C] * 6


@pytest.mark.parametrize("kind", ["shm", "unix"])
def test_a_home_that_has_counted_less_than_the_one_before_confirms_a_purge(
    fleet: Fleet, kind: str
) -> None:
    """As one whose memory is new again: what was evicted elsewhere is nothing to wait for there."""
    with driving(fleet, kind) as engine:
        engine.store(prompt(tokens(1)))
        engine.store(prompt(tokens(2), org="globex"))
        fleet.make_one("0.0 again", 64 * C, 20, 0)
        shard = engine.driver._shards[0][0]
        assert shard.move(fleet.connect("0.0 again", kind), lambda *_: PULLED)
        assert engine.driver.removals.purge("acme", seconds=30).done


def test_a_new_home_counts_from_above_all_that_was_ever_evicted(fleet: Fleet) -> None:
    """Also where nothing is left of it: what comes before the move has still higher numbers."""
    with driving(fleet, "unix") as engine:
        engine.store(prompt(tokens(1, 2, 3)))
        shard = engine.driver._shards[0][1]
        before = shard.count_from()
        assert engine.driver.removals.purge("acme", seconds=30).done
        assert shard.count_from() >= before


@pytest.mark.slow
def test_what_is_still_at_the_old_home_stays_known_while_the_new_one_is_reached_again(
    fleet: Fleet,
) -> None:
    """A new home that has counted less than the old one did: nothing there is taken for broken off."""
    with driving(fleet, "unix") as engine:
        asked = prompt(tokens(1, 2, 3))
        engine.store(asked)
        shard, afters = engine.driver._shards[0][1], list[int]()
        fleet.make_one("moved", 32 * C, 20, 0)

        def is_reached_again_first(slots: Sequence[int], after: int) -> PullResult:
            if not afters:
                client = shard._homes.client
                assert client
                shard._homes.lose(client, Lost("a connection has broken"))
                wait_until("it is reached again", lambda: shard.is_open)
            afters.append(after)
            assert shard.left_to_move() == 3
            return PullResult(done=False, bytes=0)

        assert shard.move(fleet.connect("moved", "unix"), is_reached_again_first)
        assert all(after > 0 for after in afters)


def test_as_many_slots_are_pulled_at_once_as_are_soon_there(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicts to them wait meanwhile: more and more where that is quick, one by one where it is slow."""
    sizes = list[int]()
    slow = False

    def pull(slots: Sequence[int], _after: int) -> PullResult:
        sizes.append(len(slots))
        time.sleep(moves.PULL_SECONDS if slow else 0)
        return PULLED

    with driving(fleet, "unix") as engine:
        engine.store(prompt(tokens(*range(15))))
        for name, is_slow, expected in (("quick", False, [1, 2, 4, 8]), ("slow", True, [1] * 15)):
            slow = is_slow
            monkeypatch.setattr(moves, "PULL_SECONDS", 0.01 if slow else 10.0)
            shard = engine.driver._shards[0][int(slow)]
            fleet.make_one(name, (32 if slow else 64) * C, 20, shard.count_from())
            assert shard.move(fleet.connect(name, "unix"), pull)
            assert sizes == expected
            sizes.clear()


def test_a_move_rests_where_its_agent_would_and_no_evict_waits_for_that(fleet: Fleet) -> None:
    with driving(fleet, "unix") as engine:
        engine.store(prompt(tokens(1, 2)))
        shard, pulls = engine.driver._shards[0][1], list[float]()

        def pull(slots: Sequence[int], _after: int) -> PullResult:
            pulls.append(time.monotonic())
            return PullResult(done=True, bytes=1, rest_seconds=0.5)

        fleet.make_one("moved", 32 * C, 20, shard.count_from())
        thread = threading.Thread(target=shard.move, args=(fleet.connect("moved", "unix"), pull))
        thread.start()
        wait_until("the first slot was pulled", lambda: bool(pulls) and not shard._homes.slots._pulled)
        engine.store(prompt(tokens(3)))
        assert len(pulls) == 1
        thread.join()
        assert pulls[1] - pulls[0] >= 0.5


def test_a_pull_that_fails_is_tried_again_and_nothing_is_missed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "PULL_SLOTS_FIRST", 2)
    monkeypatch.setattr(moves, "PULL_SLOTS_MAX", 2)
    monkeypatch.setattr(moves, "PULL_AGAIN_SECONDS", 0.0)
    with driving(fleet, "unix") as engine:
        prompts = [prompt(tokens(kind, kind)) for kind in range(6)]
        for asked in prompts:
            engine.store(asked)
        shard, pull, failed = engine.driver._shards[0][1], pull_with(fleet, "0.1", "moved"), set[int]()

        def fails_at_first(slots: Sequence[int], after: int) -> PullResult:
            if slots[0] not in failed:
                failed.add(slots[0])
                return PullResult(done=False, bytes=0)
            return pull(slots, after)

        fleet.make_one("moved", 32 * C, 20, shard.count_from())
        assert shard.move(fleet.connect("moved", "unix"), fails_at_first)
        assert len(failed) == 6
        fleet.end_one("0.1")
        assert [engine.load(asked) for asked in prompts] == [2 * C] * 6


def test_a_home_that_dies_while_it_is_left_costs_what_was_still_there(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "PULL_SLOTS_FIRST", 2)
    monkeypatch.setattr(moves, "PULL_SLOTS_MAX", 2)
    monkeypatch.setattr(moves, "PULL_AGAIN_SECONDS", 0.0)
    with driving(fleet, "unix") as engine:
        prompts = [prompt(tokens(kind, kind)) for kind in range(6)]
        for asked in prompts:
            engine.store(asked)
        shard, pull, pulls = engine.driver._shards[0][1], pull_with(fleet, "0.1", "moved"), list[int]()

        def dies(slots: Sequence[int], after: int) -> PullResult:
            pulls.append(slots[0])
            if len(pulls) == 1:
                return pull(slots, after)
            if len(pulls) == 2:
                fleet.end_one("0.1")
                wait_until(
                    "it is noticed", lambda: engine.load(prompts[5]) == 0 and not shard._homes.old
                )
                wait_until("all goes on", lambda: engine.driver.ledger.is_reachable)
                assert engine.load(prompts[4]) == 0
                assert engine.driver.ledger.is_reachable, "one home is gone, nobody waits"
            return PullResult(done=False, bytes=0)

        fleet.make_one("moved", 32 * C, 20, shard.count_from())
        assert shard.move(fleet.connect("moved", "unix"), dies)
        assert len(set(pulls)) == 2, "the others are not asked for in vain"
        assert shard.left_to_move() == 0
        assert [engine.load(asked) for asked in prompts] == [2 * C, *[0] * 5]
        for asked in prompts:
            engine.store(asked)
        assert [engine.load(asked) for asked in prompts] == [2 * C] * 6


def test_what_is_being_brought_back_is_not_pulled(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "PULL_SLOTS_MAX", 1)
    begun, go_on = threading.Event(), threading.Event()

    def recall(*_: object, **__: object) -> list[Miss]:
        begun.set()
        assert go_on.wait(30)
        return [Miss.ABSENT]

    monkeypatch.setattr(StreamClient, "recall", recall)
    with driving(fleet, "unix") as engine:
        engine.store(prompt(tokens(1, 2)))
        shard, pulled = engine.driver._shards[0][1], list[int]()
        back = threading.Thread(target=shard.recall, args=([RecallColumn(1, bytes(16), bytes(16))],))

        def pull(slots: Sequence[int], _after: int) -> PullResult:
            pulled.extend(slots)
            if slots == [0]:
                back.start()
                assert begun.wait(30)
            return PULLED

        fleet.make_one("moved", 32 * C, 20, shard.count_from())
        assert shard.move(fleet.connect("moved", "unix"), pull)
        go_on.set()
        back.join()
        assert pulled == [0]


def test_an_agent_that_is_lost_while_it_is_emptied_keeps_no_connection(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again each second, for as long as that takes."""
    opened: list[ShardClient] = []
    closed: list[ShardClient] = []
    close, connect = StreamClient.close, fleet.connect("0.0", "unix")

    def delete(client: StreamClient, *_: Any, **__: Any) -> Miss | None:
        opened.append(client)
        if len(opened) == 1:
            raise Lost("it does not answer")
        return Miss.LATE

    def noted(client: StreamClient) -> None:
        closed.append(client)
        close(client)

    monkeypatch.setattr(StreamClient, "delete", delete)
    monkeypatch.setattr(StreamClient, "close", noted)
    monkeypatch.setattr(connections, "RECONNECT_SECONDS", 0.0)
    shard = Shard("0.0", connect)
    assert not shard.open()
    assert shard.lost_because == "it does not answer"
    assert not shard.open()
    assert shard.lost_because == "its slots could not be emptied"
    assert not shard.move(connect, lambda *_: PULLED)
    assert closed == opened
    shard.close()


def test_a_move_to_nowhere_changes_nothing(fleet: Fleet) -> None:
    with driving(fleet) as engine:
        asked = prompt(tokens(1))
        engine.store(asked)
        shard = engine.driver._shards[0][0]
        assert not shard.move(fleet.connect("nowhere", "unix"), lambda *_: PULLED)
        assert engine.load(asked) == C


def test_who_asks_a_driver_that_is_closed_gets_misses(fleet: Fleet) -> None:
    with driving(fleet) as engine:
        asked = prompt(tokens(1, 2))
        engine.store(asked)
        engine.driver.close()
        assert engine.load(asked) == 0
        assert engine.store(prompt(tokens(3))) == 0
        assert engine.driver.explain(asked)["full"][0].state == Reason.AGENT_LOST
        assert not engine.driver.removals.purge("acme").done


def test_what_fails_at_an_agent_in_a_way_that_nobody_foresaw_is_tried_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driving(fleet) as engine:
        engine.store(prompt(tokens(1)))
        clear, failures = Shard.clear, [ZeroDivisionError()]

        def fails_once(shard: Shard, slots: Sequence[int], *, scrub: bool) -> bool:
            if failures:
                raise failures.pop()
            return clear(shard, slots, scrub=scrub)

        monkeypatch.setattr(Shard, "clear", fails_once)
        assert engine.driver.removals.purge("acme").done
        assert not failures


def test_an_engine_that_fails_while_it_is_read_leaves_nothing_half_stored(fleet: Fleet) -> None:
    def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:
        raise ZeroDivisionError

    with driving(fleet) as engine:
        asked = prompt(tokens(1, 2))
        with pytest.raises(ZeroDivisionError):
            engine.driver.store(asked, asked.tokens, read)
        assert engine.load(asked) == 0
        assert engine.store(asked) == 4


def test_a_store_that_fails_ends_when_nobody_is_at_its_slots_any_more(fleet: Fleet) -> None:
    failing, go_on, still_reading = threading.Event(), threading.Event(), []

    def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:
        if (group, shard) == (0, 0):
            failing.set()
            raise ZeroDivisionError
        assert go_on.wait(60)
        still_reading.append(depth)
        return memoryview(bytes(LAYOUT.groups[group].bytes_per_token[shard] * tokens))

    with driving(fleet) as engine:
        asked = prompt(tokens(1))

        def store() -> None:
            with pytest.raises(ZeroDivisionError):
                engine.driver.store(asked, asked.tokens, read)
            assert len(still_reading) == 2, "the other shards had finished"

        thread = threading.Thread(target=store)
        thread.start()
        assert failing.wait(60)
        assert engine.driver.ledger.pools[0].used == 1
        go_on.set()
        thread.join()
        assert engine.driver.ledger.pools[0].used == 0


def test_a_refill_waits_for_no_evict_and_for_no_agent_that_is_away(fleet: Fleet) -> None:
    shard = fleet.shard("0.0", "unix")
    assert shard.open()
    payload = memoryview(bytes(64 * C))
    assert shard.evict([Evict(0, b"k" * 16, b"t" * 16, C, payload)])
    client = shard._homes.client
    assert isinstance(client, StreamClient)
    with client._evicting:  # an evict that takes its time
        evict = threading.Thread(
            target=shard.evict, args=([Evict(1, b"k" * 16, b"t" * 16, C, payload)],)
        )
        evict.start()
        wait_until("it is under way", shard._homes.writing.locked)
        into = memoryview(bytearray(64 * C))
        assert shard.refill([RefillColumn(0, b"k" * 16, b"t" * 16, C, into)]) == [None]
        assert evict.is_alive()
    evict.join()
    shard.close()


def test_shards_that_do_not_fit_the_layout_are_refused(fleet: Fleet) -> None:
    with pytest.raises(ValueError, match="one shard for each"):
        Driver(LAYOUT, "llama", [[]])


def test_a_long_prompt_is_explained_a_few_columns_at_a_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of others come in between: it may have 65,536."""
    asked = prompt(tokens(*range(1, 3 * COLUMNS_AT_ONCE), rest=3))
    pieces: list[int] = []
    explain_columns = Ledger.explain_columns

    def noted(ledger: Ledger, maker: Keys, columns: Sequence[KeyedColumn], *more: Any) -> Any:
        pieces.append(len(columns))
        return explain_columns(ledger, maker, columns, *more)

    with driving(fleet) as engine:
        engine.store(prompt(tokens(1, 2)))
        expected = [one.state for one in engine.driver.ledger.explain(asked, 0)["full"]]
        monkeypatch.setattr(Ledger, "explain_columns", noted)
        told = engine.driver.explain(asked)
        assert pieces == [COLUMNS_AT_ONCE] * 3
        assert [one.state for one in told["full"]] == expected
        assert [one.depth for one in told["full"]] == list(range(3 * COLUMNS_AT_ONCE))
        assert told["full"][-1].tokens == 3
        whole = engine.driver.explain_keys(PromptKeys(asked.maker, asked.keys))
        assert [one.state for one in whole["full"]] == expected[:-1]


def test_priority_and_ttl_of_a_long_prompt_are_set_a_few_columns_at_a_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt(tokens(*range(1, COLUMNS_AT_ONCE + 3), rest=3))
    stored = Ledger._stored
    pieces: list[int] = []

    def noted(ledger: Ledger, prompt: Prompt, depths: range) -> Any:
        pieces.append(len(depths))
        return stored(ledger, prompt, depths)

    with driving(fleet) as engine:
        engine.store(asked)
        columns = len(stored(engine.driver.ledger, asked, range(asked.tokens)))
        monkeypatch.setattr(Ledger, "_stored", noted)
        assert engine.driver.set_priority(asked, 90) == columns
        assert engine.driver.set_ttl(asked, 1000) == columns
        assert pieces == [COLUMNS_AT_ONCE] * 4
        found = stored(engine.driver.ledger, asked, range(asked.tokens))
        assert {(one.priority, one.ttl) for one in found} == {(90, 1000)}


@pytest.mark.parametrize(("work", "thread"), [("reclaim", "housekeeping"), ("sweep", "sweeping")])
def test_requests_come_in_between_the_pieces_of_long_work(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, work: str, thread: str
) -> None:
    """Who waits for a `FairLock` has it before who lets it go."""
    happened: list[str] = []
    take = FairLock.__enter__

    def do_piece(*_: object) -> bool:
        happened.append("piece")
        return happened.count("piece") < 3

    def noted(lock: FairLock) -> None:
        if lock is driver._lock and threading.current_thread().name == thread:
            happened.append("taken")
        take(lock)

    with driving(fleet) as engine:
        driver = engine.driver
        monkeypatch.setattr(FairLock, "__enter__", noted)
        monkeypatch.setattr(Ledger, work, do_piece)
        wait_until("all is done", lambda: happened.count("piece") >= 3)
        first = happened.index("piece")
        assert happened[first : first + 5] == ["piece", "taken", "piece", "taken", "piece"]


def test_no_part_of_a_deleted_prompt_is_served_while_an_agent_takes_long_to_empty_slots(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_deletes, "SLICE", 2)
    monkeypatch.setattr(prompt_deletes, "PIECE", 1)
    asked, is_emptied, clear = prompt(tokens(*range(1, 12))), threading.Event(), Shard.clear

    def clear_late(shard: Shard, slots: Sequence[int], *, scrub: bool) -> bool:
        return is_emptied.wait(60) and clear(shard, slots, scrub=scrub)

    monkeypatch.setattr(Shard, "clear", clear_late)
    with driving(fleet) as engine, ThreadPoolExecutor() as others:
        engine.store(asked)
        try:
            receipt = others.submit(engine.driver.removals.delete, asked)
            wait_until("nothing of it is served", lambda: not engine.driver.query(asked))
            assert not receipt.done()
        finally:
            is_emptied.set()
        assert receipt.result(60).done
