"""Agents that are killed in the middle of something, and what became of the columns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvss_agent.client import Header, Lender, Miss, Wanted
from tests.kvss_agent.plane import READER, TAG, column, kv, place
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.redundancy.fleets import COUNT, TCP, Fleet, recall, store
from tests.live import wait_until

pytestmark = pytest.mark.slow  # each starts several processes


def test_a_lender_that_is_killed_costs_misses_and_never_a_wrong_byte(tmp_path: Path) -> None:
    count = 64
    with agent(tmp_path / "here", *TCP) as here, agent(tmp_path / "there", *TCP) as there:
        here.tell(document(1, spec("ours", count, driver=READER, readers=[])))
        there.tell(document(1, spec("theirs", count)))
        payloads = [kv() for _ in range(count)]
        wanted = [Wanted(at, column(f"c{at}")) for at in range(count)]
        with there.client("tcp", "theirs") as theirs:
            for at, payload in enumerate(payloads):
                number = theirs.evict(at, column(f"c{at}").key, TAG, 64, payload)
            theirs.wait_applied(number)
        lender = Lender(f"tcp:127.0.0.1:{there.tcp}", "theirs", 5.0)
        with here.client("tcp", "ours", driver=READER) as ours:
            began = threading.Event()

            def kill_soon() -> None:
                began.wait()
                time.sleep(0.02)
                there.kill()

            killer = threading.Thread(target=kill_soon)
            killer.start()
            hits = lost = 0
            until = time.monotonic() + 60
            while not lost and time.monotonic() < until:
                began.set()
                answers = ours.borrow(wanted, range(count), lender)
                for one, answer, payload in zip(wanted, answers, payloads, strict=True):
                    if isinstance(answer, Miss):
                        assert answer is Miss.LOST
                        lost += 1
                        continue
                    into = place()
                    asked = Wanted(one.slot, one.column._replace(sequence=answer.number))
                    assert isinstance(ours.refill([asked], [into])[0], Header)
                    assert into == payload
                    hits += 1
            killer.join()
            assert lost
            assert hits + lost >= count
            asked_again = time.monotonic()
            assert set(ours.borrow(wanted, range(count), lender)) == {Miss.LOST}
            assert time.monotonic() - asked_again < lender.seconds + 30
            number = ours.evict(0, column("mine").key, TAG, 64, kv())
            ours.wait_applied(number)  # the slots are free again


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(agent(tmp_path / name, *TCP)) for name in ("home", "a", "b", "c")]
        made = Fleet(agents[0], agents[1:], tmp_path)
        made.tell()
        made.wait_until_ready()
        yield made


def killed_when(holds: Callable[[], bool], victim: AgentProcess) -> threading.Thread:
    """A thread that kills it then."""

    def run() -> None:
        until = time.monotonic() + 60
        while not holds() and time.monotonic() < until:
            time.sleep(0.001)
        victim.kill()

    made = threading.Thread(target=run)
    made.start()
    return made


def test_holders_that_are_killed_while_columns_are_stored_and_recalled_cost_none(fleet: Fleet) -> None:
    with fleet.home.client() as client:
        before = store(client)
        fleet.wait_until_repaired()
        killer = killed_when(lambda: len(fleet.files()) > 3 * COUNT, fleet.holders[0])
        meanwhile: list[list[bytes]] = []
        while killer.is_alive():
            meanwhile.append(store(client, 4, f"{len(meanwhile)}-"))
        meanwhile.append(store(client, 4, f"{len(meanwhile)}-"))
        stored = {"": before, **{f"{number}-": its for number, its in enumerate(meanwhile)}}

        def all_are_recalled() -> bool:
            return all(recall(client, len(its), kind) == its for kind, its in stored.items())

        assert 4 <= fleet.redundancy()["incomplete"] <= 4 * len(meanwhile), "none of those before"
        assert all_are_recalled()
        fleet.restart(fleet.holders[0])
        fleet.wait_until_ready()
        fleet.wait_until_repaired()
        began = threading.Event()
        killer = killed_when(began.is_set, fleet.holders[1])
        while killer.is_alive():
            began.set()
            assert all_are_recalled()
        assert all_are_recalled()


def test_repair_outlives_the_death_of_who_repairs_and_of_who_is_repaired(
    fleet: Fleet, tmp_path: Path
) -> None:
    count = 24
    fleet.redundant["bytes_per_second"] = 64 << 10  # a column: it is under way for long enough
    with fleet.home.client() as client:
        contents = store(client, count)
    fleet.holders[2].kill()
    with agent(tmp_path / "new", *TCP) as new:
        fleet.tell(holders=[*fleet.holders[:2], new])

        def is_under_way() -> bool:
            return 0 < int(fleet.redundancy().get("incomplete", 0)) < count

        wait_until("repair is under way", is_under_way)
        new.kill()
        fleet.restart(new)
        wait_until("repair is under way again", is_under_way)
        before = fleet.home
        before.kill()
        fleet.redundant.clear()
        fleet.tell(home=fleet.holders[1])
        fleet.wait_until_ready()
        fleet.wait_until_repaired()
        fleet.holders[0].kill()
        with fleet.home.client() as client:
            assert recall(client, count) == contents
