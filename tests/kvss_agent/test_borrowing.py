"""Columns that one shard borrows from another: the same bytes, or a reason, within the time allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from kvss_agent import borrowing, native
from kvss_agent.borrowing import Borrowing
from kvss_agent.client import (
    Address,
    Column,
    Credentials,
    Lender,
    Lost,
    Miss,
    Recalled,
    ShardClient,
    Wanted,
    connection,
)
from kvss_agent.client.requests import Requests
from kvss_agent.data_plane import wire
from kvss_agent.limits.background import Totals
from kvss_agent.mover import PYTHON, Mover, PythonMover
from kvss_agent.native import selection
from kvss_agent.shard import hosted, seal
from kvss_agent.shard.arena import Arena, slot_bytes_for
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from kvss_agent.shard.seal import HEADER_BYTES
from tests.kvss_agent.plane import (
    DRIVER,
    PAYLOAD,
    READER,
    SECRET,
    TAG,
    Plane,
    column,
    kv,
    place,
    running,
)
from tests.live import wait_until

OTHER_TAG = b"org-b".ljust(16, b"\0")
SECONDS = 30.0  # the most that a borrow may take


@contextlib.contextmanager
def agent(directory: Path) -> Iterator[Plane]:
    """An agent that borrows. What it shows to others are the secrets that it knows."""
    directory.mkdir()
    with running(directory) as plane:

        def shown(driver: str) -> Credentials:
            return Credentials(driver, plane.secrets[driver], stall_seconds=60.0)

        plane.plane.borrowing = made = Borrowing(plane.shards, shown)
        try:
            yield plane
        finally:
            made.close()


@dataclasses.dataclass
class Siblings:
    """Two drivers' shards: `ours` borrows, as READER, from `theirs`."""

    here: Plane
    there: Plane
    ours: ShardClient
    theirs: ShardClient
    address: str

    def lender(self, **more: Any) -> Lender:
        return dataclasses.replace(Lender(self.address, "theirs", SECONDS), **more)

    def keep(self, name: str, slot: int, payload: memoryview, tag: bytes = TAG) -> Column:
        number = self.theirs.evict(slot, *column(name)[:1], tag, 64, payload)
        self.theirs.wait_applied(number)
        return column(name, tag=tag)

    def borrow(self, one: Column, slot: int, source: int, **more: Any) -> int | Miss:
        [answer] = self.ours.borrow([Wanted(slot, one)], [source], self.lender(**more))
        return answer if isinstance(answer, Miss) else answer.number

    def read(self, one: Column, slot: int, number: int) -> tuple[object, bytes]:
        into = place()
        [found] = self.ours.refill([Wanted(slot, one._replace(sequence=number))], [into])
        return found, bytes(into)


def add(
    plane: Plane, name: str, driver: str, payload: int = PAYLOAD, readers: str = "", slots: int = 8
) -> HostedShard:
    identity = ShardIdentity(name, slot_bytes_for(payload), driver)
    arena = Arena.allocate(identity.slot_bytes, slots)
    plane.shards[name] = HostedShard(
        identity, arena, readers={readers} if readers else (), wake_me=plane.plane.wake
    )
    return plane.shards[name]


@pytest.fixture(params=["agent", "here"])
def siblings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Siblings]:
    with agent(tmp_path / "a") as here, contextlib.ExitStack() as stack:
        there = here
        if request.param == "agent":
            there = stack.enter_context(agent(tmp_path / "b"))
        add(here, "ours", READER)
        add(there, "theirs", DRIVER, readers=READER)
        ours = stack.enter_context(here.client("tcp", "ours", driver=READER))
        theirs = stack.enter_context(there.client("tcp", "theirs"))
        yield Siblings(here, there, ours, theirs, f"tcp:127.0.0.1:{there.tcp}")


def test_a_borrowed_column_is_the_same_and_stays_with_its_lender(siblings: Siblings) -> None:
    payload = kv()
    one = siblings.keep("one", 3, payload)
    number = siblings.borrow(one, 5, 3)
    assert isinstance(number, int)
    found, got = siblings.read(one, 5, number)
    assert not isinstance(found, Miss)
    assert got == payload
    into = place()
    [found] = siblings.theirs.refill([Wanted(3, one._replace(sequence=1))], [into])
    assert not isinstance(found, Miss)


def test_many_at_once_come_to_their_own_slots(siblings: Siblings) -> None:
    payloads = [kv() for _ in range(6)]
    kept = [siblings.keep(f"c{at}", at, payload) for at, payload in enumerate(payloads)]
    wanted = [Wanted(7 - at, one) for at, one in enumerate(kept)]
    answers = siblings.ours.borrow(wanted, range(6), siblings.lender())
    for at, (answer, payload) in enumerate(zip(answers, payloads, strict=True)):
        assert isinstance(answer, Recalled)
        assert siblings.read(kept[at], 7 - at, answer.number)[1] == payload


def test_a_batch_that_makes_up_a_piece_is_moved_at_once(
    siblings: Siblings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of such a batch are larger than the piece by their headers."""
    monkeypatch.setattr(borrowing, "PIECE_BYTES", 4 * PAYLOAD)
    pieces = []
    whole = seal.transfer_all

    def transfer_all(transfers: Sequence[seal.Transfer], mover: Mover) -> list[seal.Header | Miss]:
        pieces.append(len(transfers))
        return whole(transfers, mover)

    monkeypatch.setattr(seal, "transfer_all", transfer_all)
    kept = [siblings.keep(f"c{at}", at, kv()) for at in range(6)]
    theirs = siblings.there.shards["theirs"].core.counts
    for count, expected in ((4, [4]), (6, [4, 2])):
        before = theirs.refills
        pieces.clear()
        wanted = [Wanted(at, one) for at, one in enumerate(kept[:count])]
        answers = siblings.ours.borrow(wanted, range(count), siblings.lender())
        assert all(isinstance(one, Recalled) for one in answers)
        if siblings.here is siblings.there:
            assert pieces == expected
        else:
            assert theirs.refills - before == len(expected)


def test_what_comes_from_another_agent_keeps_to_one_rate_whatever_shards_lend(tmp_path: Path) -> None:
    with agent(tmp_path / "a") as here, agent(tmp_path / "b") as there, contextlib.ExitStack() as stack:
        add(here, "ours", READER)
        ours = stack.enter_context(here.client("tcp", "ours", driver=READER))
        lenders = []
        for number in range(4):
            name = f"theirs{number}"
            add(there, name, DRIVER, readers=READER)
            theirs = stack.enter_context(there.client("tcp", name))
            for slot in range(2):
                theirs.evict(slot, column(name).key, TAG, 64, kv())
            theirs.wait_applied(2)
            address = f"tcp:127.0.0.1:{there.tcp}"
            lenders.append(Lender(address, name, SECONDS, bytes_per_second=20 * PAYLOAD))
        began = time.monotonic()
        for number, lender in enumerate(lenders):
            wanted = [Wanted(2 * number + slot, column(lender.shard)) for slot in range(2)]
            answers = ours.borrow(wanted, range(2), lender)
            assert not any(isinstance(one, Miss) for one in answers)
        assert time.monotonic() - began >= 7 / 20  # seven wait for the one before


def test_who_may_borrow_slowly_makes_nobody_else_slow(tmp_path: Path) -> None:
    """Over the same links: orgs have parts of them that differ, and a driver may say what it likes."""
    with agent(tmp_path / "a") as here, agent(tmp_path / "b") as there:
        add(here, "ours", READER)
        add(here, "slow", DRIVER)
        for name in ("theirs", "others"):
            add(there, name, DRIVER, readers=READER)
        with (
            here.client("tcp", "ours", driver=READER) as ours,
            here.client("tcp", "slow") as slow,
            there.client("tcp", "theirs") as theirs,
            ThreadPoolExecutor(1) as thread,
        ):
            siblings = Siblings(here, there, ours, theirs, f"tcp:127.0.0.1:{there.tcp}")
            kept = [siblings.keep(str(slot), slot, kv()) for slot in range(8)]
            wanted = [Wanted(slot, one) for slot, one in enumerate(kept)]
            lender = siblings.lender(seconds=10.0, bytes_per_second=10 * PAYLOAD)
            borrowed = thread.submit(ours.borrow, wanted, range(8), lender)
            counts = there.shards["theirs"].core.counts
            wait_until("the first one has come", lambda: counts.refills > 0)
            crawls = siblings.lender(shard="others", seconds=0.1, bytes_per_second=1)
            slow.borrow([Wanted(0, column("none"))], [0], crawls)
            assert not any(isinstance(one, Miss) for one in borrowed.result())


def test_a_link_that_somebody_may_use_without_a_budget_is_owed_what_others_have_moved() -> None:
    link, now = borrowing._Link(Totals()), 10.0
    with link.background(10 * PAYLOAD) as background:
        background.moved(10 * PAYLOAD, 0.0, now)
        assert background.rest(now) == 1.0
    with link.background(0) as background:
        assert background.rest(now) == 0.0
        background.moved(PAYLOAD, 0.0, now)
    with link.background(10 * PAYLOAD) as background:
        assert background.rest(now) == 1.0


def test_one_piece_of_this_agent_is_copied_and_answered_by_the_thread_that_has_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others answer later: nobody who asks for one more column waits behind them."""
    with agent(tmp_path / "a") as here:
        ours = add(here, "ours", READER)
        add(here, "theirs", DRIVER, readers=READER)
        with here.client("tcp", "theirs") as theirs, here.client("tcp", "ours", driver=READER) as client:
            kept = [column(f"c{at}") for at in range(2)]
            for at, one in enumerate(kept):
                number = theirs.evict(at, *one[:1], TAG, 64, kv())
            theirs.wait_applied(number)
            lender = Lender(f"tcp:127.0.0.1:{here.tcp}", "theirs", SECONDS)
            columns = tuple(wire.TierColumn(at, *one[:2], note=at) for at, one in enumerate(kept))
            asked = wire.Tier(7, wire.TierVerb.BORROW, 0, 0, columns, lender=lender)
            by: list[int] = []

            def borrow() -> None:
                borrowing_of(here).start(
                    ours, asked, (0, 1), lambda *_: by.append(threading.get_ident())
                )

            borrow()
            assert by == [threading.get_ident()]
            outboxes = _outboxes()
            answers = client.borrow([Wanted(at, one) for at, one in enumerate(kept)], (0, 1), lender)
            assert all(isinstance(one, Recalled) for one in answers)
            assert _outboxes() <= outboxes  # those of other tests may end meanwhile
            monkeypatch.setattr(borrowing, "PIECE_BYTES", PAYLOAD)
            borrow()
            wait_until("it is answered", lambda: len(by) == 2)
            assert by[1] != threading.get_ident()


def _outboxes() -> set[threading.Thread]:
    """The threads of connections that answer for others."""
    return {one for one in threading.enumerate() if one.name.startswith("outbox")}


class Compiled(PythonMover):
    """Receives as a compiled mover does, and counts what."""

    def __init__(self) -> None:
        self.received = 0

    def receive_payloads(
        self, sock: socket.socket, places: Sequence[memoryview], _: float
    ) -> list[int] | None:
        for one in places:
            left = one
            while left:
                count = sock.recv_into(left)
                if not count:
                    return None
                left = left[count:]
            self.received += 1
        return [self.checksum(one) for one in places]


def test_a_connection_to_a_lender_has_the_mover_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was compiled after the connection was made."""
    mover = Compiled()
    monkeypatch.setattr(selection, "_users", WeakSet())  # others keep theirs
    monkeypatch.setattr(selection, "_mover", PYTHON)
    monkeypatch.setattr(selection, "best", lambda: PYTHON)
    with agent(tmp_path / "a") as here, agent(tmp_path / "b") as there:
        add(here, "ours", READER)
        add(there, "theirs", DRIVER, readers=READER)
        with there.client("tcp", "theirs") as theirs, here.client("tcp", "ours", driver=READER) as ours:
            siblings = Siblings(here, there, ours, theirs, f"tcp:127.0.0.1:{there.tcp}")
            kept = [siblings.keep(f"c{at}", at, kv()) for at in range(2)]
            assert not isinstance(siblings.borrow(kept[0], 0, 0), Miss)
            monkeypatch.setattr(selection, "best", lambda: mover)
            assert native.current() is mover
            assert not isinstance(siblings.borrow(kept[1], 1, 1), Miss)
    assert mover.received == 1


def test_what_is_not_the_column_asked_for_is_a_miss_and_leaves_nothing(siblings: Siblings) -> None:
    siblings.keep("one", 3, kv())
    foreign = siblings.keep("one", 4, kv(), OTHER_TAG)
    memory = siblings.here.shards["ours"].arena.slot(5)
    for wanted, source, why in (
        (column("other"), 3, Miss.STALE),
        (column("one"), 4, Miss.FOREIGN),
        (column("one"), 6, Miss.ABSENT),
        (column("one"), 1 << 40, Miss.ABSENT),
        (foreign, 3, Miss.FOREIGN),
    ):
        source = min(source, 2**32 - 1)
        assert siblings.borrow(wanted, 5, source) == why
        assert not any(bytes(memory))


def test_what_was_in_the_slot_before_is_replaced(siblings: Siblings) -> None:
    one = siblings.keep("one", 3, kv())
    payload = kv()
    number = siblings.ours.evict(5, *column("mine")[:1], TAG, 64, payload)
    siblings.ours.wait_applied(number)
    assert isinstance(siblings.borrow(one, 5, 3), int)
    assert siblings.read(column("mine"), 5, number)[0] is Miss.STALE


def test_a_slot_that_a_later_evict_has_written_is_left_alone(siblings: Siblings) -> None:
    """The driver does not do that; a mistake must not cost its bytes."""
    one, payload = siblings.keep("one", 3, kv()), kv()
    memory = siblings.here.shards["ours"].arena.slot(5)
    shard = siblings.here.shards["ours"]
    number = siblings.ours.evict(5, *column("mine")[:1], TAG, 64, payload)
    siblings.ours.wait_applied(number)
    asked = wire.Tier(
        7, wire.TierVerb.BORROW, number - 1, 0, (wire.TierColumn(5, *one[:2], note=3),),
        lender=siblings.lender(),
    )  # fmt: skip
    answers: list[object] = []
    borrowing_of(siblings.here).start(shard, asked, (5,), lambda found, _: answers.extend(found))
    wait_until("it is answered", lambda: answers)
    assert answers == [Miss.STALE]
    assert bytes(memory[HEADER_BYTES:][: len(payload)]) == payload


def test_a_slot_that_stays_as_it_is_costs_only_its_own_column(siblings: Siblings) -> None:
    payloads = [kv() for _ in range(3)]
    kept = [siblings.keep(f"c{at}", at, payload) for at, payload in enumerate(payloads)]
    shard, mine = siblings.here.shards["ours"], kv()
    number = siblings.ours.evict(6, *column("mine")[:1], TAG, 64, mine)
    siblings.ours.wait_applied(number)
    columns = tuple(wire.TierColumn(5 + at, *one[:2], note=at) for at, one in enumerate(kept))
    asked = wire.Tier(7, wire.TierVerb.BORROW, 0, 0, columns, lender=siblings.lender())
    answers: list[object] = []
    borrowing_of(siblings.here).start(shard, asked, (5, 6, 7), lambda found, _: answers.extend(found))
    wait_until("it is answered", lambda: answers)
    assert answers == [wire.TierAnswer.DONE, Miss.STALE, wire.TierAnswer.DONE]
    for slot, expected in ((5, payloads[0]), (6, mine), (7, payloads[2])):
        assert bytes(shard.arena.slot(slot)[HEADER_BYTES:][:PAYLOAD]) == expected


class Held:
    """Runs nothing until it is released."""

    def __init__(self) -> None:
        self.runs: list[Callable[[], object]] = []

    def submit(self, run: Callable[..., object], *given: object) -> None:
        self.runs.append(lambda: run(*given))

    def shutdown(self, **_: bool) -> None:
        """Nothing runs."""


@dataclasses.dataclass
class Begun:
    """A borrow over a connection that was there, whose thread has not begun."""

    siblings: Siblings
    held: Held
    payload: memoryview
    answers: list[Recalled | Miss]
    asking: threading.Thread


@contextlib.contextmanager
def begun(directory: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[Begun]:
    with agent(directory / "a") as here, agent(directory / "b") as there:
        add(here, "ours", READER)
        add(there, "theirs", DRIVER, readers=READER)
        with there.client("tcp", "theirs") as theirs, here.client("tcp", "ours", driver=READER) as ours:
            siblings = Siblings(here, there, ours, theirs, f"tcp:127.0.0.1:{there.tcp}")
            kept = [siblings.keep(f"c{at}", at, payload := kv()) for at in range(2)]
            assert isinstance(siblings.borrow(kept[0], 0, 0), int)
            made = Begun(siblings, Held(), payload, [], threading.Thread())

            def borrow() -> None:
                lender = siblings.lender(seconds=seconds)
                made.answers.extend(ours.borrow([Wanted(1, kept[1])], [1], lender))

            with monkeypatch.context() as patched:
                patched.setattr(borrowing_of(here), "_threads", made.held)
                made.asking = threading.Thread(target=borrow)
                made.asking.start()
                wait_until("its thread could begin", lambda: made.held.runs)
            yield made
            made.asking.join()
            assert isinstance(siblings.borrow(kept[0], 3, 0), int)  # the next one has its turn


def test_a_lender_is_asked_before_the_thread_of_the_borrow_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(tmp_path, monkeypatch, SECONDS) as one:
        theirs = one.siblings.there.shards["theirs"]
        wait_until("the lender is asked", lambda: theirs.core.counts.refills == 2)
        assert not any(bytes(one.siblings.here.shards["ours"].arena.slot(1)))
        one.held.runs.pop()()
        one.asking.join()
        [answer] = one.answers
        assert isinstance(answer, Recalled)
        assert one.siblings.read(column("c1"), 1, answer.number)[1] == one.payload
        assert theirs.core.counts.refills == 2


def test_a_borrow_that_is_late_before_its_thread_begins_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(tmp_path, monkeypatch, 0.05) as one:
        counts = borrowing_of(one.siblings.here).borrowed
        wait_until("it is late", lambda: counts.late == 1)
        assert not one.answers  # its slots may still be written to
        one.held.runs.pop()()
        one.asking.join()
        assert one.answers == [Miss.LOST]
        assert not any(bytes(one.siblings.here.shards["ours"].arena.slot(1)))


def test_borrows_for_which_there_was_no_thread_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither their place, nor their turn, nor work for a thread that begins later."""
    start = threading.Thread.start

    def start_no_more(thread: threading.Thread) -> None:
        if thread.name.startswith("borrow"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with agent(tmp_path / "a") as here, agent(tmp_path / "b") as there:
        ours = add(here, "ours", READER)
        add(there, "theirs", DRIVER, readers=READER)
        with (
            there.client("tcp", "theirs") as theirs,
            here.client("tcp", "ours", driver=READER) as client,
        ):
            siblings = Siblings(here, there, client, theirs, f"tcp:127.0.0.1:{there.tcp}")
            one = siblings.keep("one", 0, kv())
            assert isinstance(siblings.borrow(one, 0, 0), int)
            monkeypatch.setattr(borrowing_of(here), "_threads", ThreadPoolExecutor(1, "borrow"))
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", start_no_more)
                for _ in range(borrowing.OF_DRIVER_AT_ONCE):
                    assert siblings.borrow(one, 1, 0) is Miss.LOST
            assert isinstance(siblings.borrow(one, 2, 0), int)  # after all that waited for the thread
            assert not any(bytes(ours.arena.slot(1)))
            assert not borrowing_of(here)._running.total()


def test_a_tag_that_is_purged_before_the_thread_of_a_borrow_begins_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lender has sent it already, and no slot is open for it that the purge could find."""
    monkeypatch.setattr(hosted, "WRITE_SECONDS", 0.0)
    with begun(tmp_path, monkeypatch, SECONDS) as one:
        ours = one.siblings.here.shards["ours"]
        ours.purge([TAG])
        one.held.runs.pop()()
        one.asking.join()
        assert one.answers == [Miss.LOST]
        assert not any(bytes(ours.arena.slot(1)))


def test_a_slot_that_no_lender_can_have_costs_only_its_borrow(siblings: Siblings) -> None:
    one = siblings.keep("one", 3, kv())
    assert isinstance(siblings.borrow(one, 5, 3), int)
    assert isinstance(siblings.borrow(one, 5, 1 << 40), Miss)
    assert isinstance(siblings.borrow(one, 5, 3), int)


def test_the_thread_of_a_borrow_answers(siblings: Siblings) -> None:
    one, outboxes = siblings.keep("one", 3, kv()), _outboxes()
    assert isinstance(siblings.borrow(one, 5, 3), int)
    assert _outboxes() <= outboxes  # those of other tests may end meanwhile


def test_a_tag_that_is_purged_while_it_is_borrowed_is_not_kept(tmp_path: Path) -> None:
    with agent(tmp_path / "a") as here, agent(tmp_path / "b") as there:
        ours = add(here, "ours", READER)
        add(there, "theirs", DRIVER, readers=READER)
        with (
            there.client("tcp", "theirs") as theirs,
            here.client("tcp", "ours", driver=READER) as client,
        ):
            theirs.wait_applied(theirs.evict(0, *column("one")[:1], TAG, 64, kv()))
            trickle = Trickle(there.tcp, most=PAYLOAD // 2)
            lender = Lender(trickle.address, "theirs", 60.0)
            answers: list[Recalled | Miss] = []

            def borrow() -> None:
                answers.extend(client.borrow([Wanted(2, column("one"))], [0], lender))

            thread = threading.Thread(target=borrow)
            thread.start()
            wait_until("it is being borrowed", lambda: seal.tag_of(ours.arena.slot(2)) == TAG)
            assert ours.purge([TAG])[0] == 1
            trickle.hang_up()
            thread.join()
            assert answers == [Miss.LOST]
            assert not any(bytes(ours.arena.slot(2)))


def test_who_may_not_read_gets_nothing(siblings: Siblings) -> None:
    one = siblings.keep("one", 3, kv())
    assert isinstance(siblings.borrow(one, 5, 3), int)
    siblings.there.shards["theirs"].set_readers(())
    assert siblings.borrow(one, 6, 3) is Miss.LOST
    assert not any(bytes(siblings.here.shards["ours"].arena.slot(6)))


def test_a_reader_that_may_come_back_can_borrow_again(siblings: Siblings) -> None:
    one = siblings.keep("one", 3, kv())
    theirs = siblings.there.shards["theirs"]
    theirs.set_readers(())
    assert siblings.borrow(one, 5, 3) is Miss.LOST
    theirs.set_readers({READER})
    wait_until("it is not away any more", lambda: isinstance(siblings.borrow(one, 5, 3), int))


def test_slots_of_another_size_are_refused(siblings: Siblings) -> None:
    add(siblings.there, "small", DRIVER, PAYLOAD // 2, READER)
    answer = siblings.borrow(column("one"), 5, 0, shard="small")
    assert answer is Miss.LOST


def test_a_shard_that_is_gone_is_lost(siblings: Siblings) -> None:
    assert siblings.borrow(column("one"), 5, 0, shard="nobody") is Miss.LOST


def borrowing_of(plane: Plane) -> Borrowing:
    assert isinstance(plane.plane.borrowing, Borrowing)
    return plane.plane.borrowing


class Stalled:
    """Somebody who takes connections, says what the test wants, and then nothing."""

    def __init__(self, *, listens: bool = True) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=8)
        self.address = f"tcp:127.0.0.1:{self.socket.getsockname()[1]}"
        if not listens:
            self.socket.close()


@pytest.mark.parametrize("listens", [True, False])
def test_a_lender_that_is_dead_or_silent_costs_its_time_and_no_more(
    tmp_path: Path,
    listens: bool,  # noqa: FBT001
) -> None:
    lender = Stalled(listens=listens)
    with lender.socket, agent(tmp_path / "a") as here:
        add(here, "ours", READER)
        with here.client("tcp", "ours", driver=READER) as ours:
            began = time.monotonic()
            seconds = 0.3 if listens else SECONDS
            [answer] = ours.borrow(
                [Wanted(2, column("one"))], [0], Lender(lender.address, "theirs", seconds)
            )
            assert answer is Miss.LOST
            assert time.monotonic() - began < 2 * SECONDS
            assert borrowing_of(here).borrowed.late == listens
            number = ours.evict(2, *column("mine")[:1], TAG, 64, kv())
            ours.wait_applied(number)  # the slot is free again


class Trickle:
    """Passes on what a real agent says, and stops in the middle of the first large thing."""

    def __init__(self, port: int, most: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._port, self._most = port, most
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        far = socket.create_connection(("127.0.0.1", self._port))
        with self._listener, far:
            self._near, _ = self._listener.accept()
            with self._near as near:
                there = threading.Thread(target=self._pass, args=(near, far, 1 << 40), daemon=True)
                there.start()
                self._pass(far, near, self._most)
                there.join()  # whoever asks hangs up

    def hang_up(self) -> None:
        self._near.shutdown(socket.SHUT_RDWR)

    def _pass(self, source: socket.socket, sink: socket.socket, most: int) -> None:
        with contextlib.suppress(OSError):
            while most and (some := source.recv(min(most, 4096))):
                sink.sendall(some)
                most -= len(some)


def test_a_lender_that_stops_in_the_middle_leaves_no_part_of_a_column(tmp_path: Path) -> None:
    with agent(tmp_path / "a") as here, agent(tmp_path / "b") as there:
        add(here, "ours", READER)
        add(there, "theirs", DRIVER, readers=READER)
        with there.client("tcp", "theirs") as theirs, here.client("tcp", "ours", driver=READER) as ours:
            numbers = [theirs.evict(at, *column(f"c{at}")[:1], TAG, 64, kv()) for at in range(4)]
            theirs.wait_applied(numbers[-1])
            trickle = Trickle(there.tcp, most=2 * PAYLOAD)
            wanted = [Wanted(at, column(f"c{at}")) for at in range(4)]
            began = time.monotonic()
            answers = ours.borrow(wanted, range(4), Lender(trickle.address, "theirs", 0.5))
            assert time.monotonic() - began < 2 * SECONDS
            assert borrowing_of(here).borrowed.late == 1
            assert Miss.LOST in answers
            for slot, answer in enumerate(answers):
                if answer is Miss.LOST:
                    assert not any(bytes(here.shards["ours"].arena.slot(slot)[HEADER_BYTES:]))


def test_borrows_of_one_driver_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver whose sibling hangs fills its own places only."""
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 60.0)
    lender = Stalled()
    with lender.socket, agent(tmp_path / "a") as here:
        add(here, "ours", READER, slots=64)
        add(here, "theirs", DRIVER)
        add(here, "lends", READER, readers=DRIVER)
        with (
            here.client("tcp", "ours", driver=READER) as ours,
            here.client("tcp", "theirs") as theirs,
            here.client("tcp", "lends", driver=READER) as lends,
        ):
            number = lends.evict(0, *column("one")[:1], TAG, 64, kv())
            lends.wait_applied(number)
            answers: list[Recalled | Miss] = []

            def hang(slot: int) -> None:
                wanted = [Wanted(slot, column("one"))]
                answers.extend(ours.borrow(wanted, [0], Lender(lender.address, "x", 60.0)))

            most = borrowing.OF_DRIVER_AT_ONCE
            hanging = [threading.Thread(target=hang, args=(at,)) for at in range(most + 8)]
            for one in hanging:
                one.start()
            running = borrowing_of(here)._running
            wait_until("all its places are taken", lambda: running[READER] == most)
            [answer] = theirs.borrow(
                [Wanted(1, column("one"))], [0], Lender(f"tcp:127.0.0.1:{here.tcp}", "lends", SECONDS)
            )
            assert isinstance(answer, Recalled)
            wait_until("the others are refused", lambda: len(answers) == 8)
            lender.socket.close()  # which ends all that hang
            for one in hanging:
                one.join()
            assert Counter(answers) == {Miss.LOST: most, Miss.REFUSED: 8}


def test_an_agent_that_does_not_borrow_refuses(tmp_path: Path) -> None:
    with running(tmp_path) as plane:
        plane.add("s")
        with plane.client("tcp") as client:
            lender = Lender("tcp:127.0.0.1:1", "s", 1.0)
            assert client.borrow([Wanted(0, column("one"))], [0], lender) == [Miss.REFUSED]


class Slow(Trickle):
    """Passes on what a real agent says, so many bytes a second."""

    def __init__(self, port: int, bytes_per_second: int) -> None:
        self._pause = 4096 / bytes_per_second
        super().__init__(port, 1 << 40)

    def _pass(self, source: socket.socket, sink: socket.socket, most: int) -> None:
        with contextlib.suppress(OSError):
            while most and (some := source.recv(min(most, 4096))):
                sink.sendall(some)
                time.sleep(self._pause)


def test_a_borrow_that_is_late_takes_no_other_one_with_it(tmp_path: Path) -> None:
    """Both come over one connection, one after the other."""
    with agent(tmp_path / "a") as here, agent(tmp_path / "b") as there:
        add(here, "ours", READER)
        add(there, "theirs", DRIVER, readers=READER)
        with there.client("tcp", "theirs") as theirs, here.client("tcp", "ours", driver=READER) as ours:
            for at in range(4):
                number = theirs.evict(at, *column(f"c{at}")[:1], TAG, 64, kv())
            theirs.wait_applied(number)
            address = Slow(there.tcp, bytes_per_second=400_000).address
            answers: list[Recalled | Miss] = []

            def borrow() -> None:
                wanted = [Wanted(at, column(f"c{at}")) for at in range(3)]
                answers.extend(ours.borrow(wanted, range(3), Lender(address, "theirs", 25.0)))

            thread = threading.Thread(target=borrow)
            thread.start()
            slot = here.shards["ours"].arena.slot(0)
            wait_until("it is on its way", lambda: seal.tag_of(slot) == TAG)
            late = ours.borrow([Wanted(5, column("c3"))], [3], Lender(address, "theirs", 0.1))
            assert late == [Miss.LOST]
            thread.join()
            assert not any(isinstance(one, Miss) for one in answers)


@pytest.mark.parametrize("siblings", ["agent"], indirect=True)
def test_a_borrow_that_is_given_up_just_when_its_turn_is_over_ends_no_other_one(
    siblings: Siblings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked whose turn it is, and closes the connection a moment later."""
    assert isinstance(siblings.borrow(siblings.keep("one", 0, kv()), 0, 0), int)
    [way] = borrowing_of(siblings.here)._ways.values()
    ended = borrowing._FromAgent(way, way.requests(), 1)
    ended.begin([0])
    ended._asked = None  # it has been received
    order: list[str] = []
    closing = threading.Event()
    next_one = threading.Event()

    def close(_requests: object) -> None:
        closing.set()
        next_one.wait(0.2)  # it may not begin before this is over
        order.append("closed")

    def begin_next() -> None:
        closing.wait()
        ended.leave()
        with way.turn:
            order.append("next")
            next_one.set()

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(Requests, "close", close)
        for done in [threads.submit(begin_next), threads.submit(ended.hang_up)]:
            done.result()
    assert order == ["closed", "next"]


class Reading(Trickle):
    """Passes on what comes as long as it reads."""

    def __init__(self, port: int) -> None:
        self.reads = threading.Event()
        self.reads.set()
        super().__init__(port, 1 << 40)

    def _pass(self, source: socket.socket, sink: socket.socket, most: int) -> None:
        with contextlib.suppress(OSError):
            while most and (some := source.recv(min(most, 4096))):
                self.reads.wait()
                sink.sendall(some)


def _fill_up(sock: socket.socket) -> None:
    """Until a byte more would have to wait: the peer's system takes some more each time for a moment."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while True:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 16), socket.MSG_DONTWAIT)
        if not poll.poll(200):
            break
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(bytes(1), socket.MSG_DONTWAIT)


@pytest.mark.parametrize("seconds", [SECONDS, 2.0])
def test_a_lender_that_does_not_read_holds_up_only_who_borrows_from_it(
    tmp_path: Path, seconds: float
) -> None:
    """One that answers before it is asked could do so for long; until the time of the borrow is over,
    though its thread is sending."""
    with agent(tmp_path / "a") as here, agent(tmp_path / "b") as there:
        add(here, "ours", READER)
        add(there, "theirs", DRIVER, readers=READER)
        with there.client("tcp", "theirs") as theirs, here.client("tcp", "ours", driver=READER) as ours:
            lender = Reading(there.tcp)
            siblings = Siblings(here, there, ours, theirs, lender.address)
            one = siblings.keep("one", 0, kv())
            assert isinstance(siblings.borrow(one, 0, 0), int)
            lender.reads.clear()
            [way] = borrowing_of(here)._ways.values()
            opened = way.opened()
            assert opened
            _fill_up(opened.connection.channel.socket)
            answers: list[int | Miss] = []

            def borrow() -> None:
                answers.append(siblings.borrow(one, 1, 0, seconds=seconds))

            thread = threading.Thread(target=borrow)
            thread.start()
            wait_until("it is its turn", way.turn.locked)
            number = ours.evict(2, *column("mine")[:1], TAG, 64, kv())
            assert not isinstance(siblings.read(column("mine"), 2, number)[0], Miss)
            if seconds == SECONDS:
                lender.reads.set()
                lender.hang_up()
            thread.join()
            lender.reads.set()
            assert answers == [Miss.LOST]


def test_a_handshake_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the lender says something that means nothing."""
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 0.5)

    def chat(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            near, _ = listener.accept()
            with near:
                while True:
                    near.sendall(wire.Goodbye().encode())
                    time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=chat, args=(listener,), daemon=True).start()
        address = Address.parse(f"tcp:127.0.0.1:{listener.getsockname()[1]}")
        credentials = Credentials(READER, SECRET, stall_seconds=0.5)
        with pytest.raises(Lost, match="its handshake takes too long"):
            connection.AgentConnection(address, "theirs", credentials, wire.Role.REFILL)
