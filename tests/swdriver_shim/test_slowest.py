"""The slowest transfers of a shard: few, without tokens or keys, and the slowest indeed."""

from __future__ import annotations

import itertools
import threading

import pytest

from kvss_agent.client import Evict
from swdriver_shim.data_plane.slow_transfers import (
    KEPT_PER_ORG,
    ORGS_MAX,
    PortionedTransfer,
    SlowestTransfers,
    TransferMetrics,
)
from telemetry.emit import transfers
from telemetry.emit.transfers import TRANSFERS_MAX
from tests.swdriver_shim.paths import RAIL, SPINE
from tests.swdriver_shim.transfers import transfer

ACME, GLOBEX = b"a" * 8, b"g" * 8


def batch(*slots: int, tag: bytes = ACME) -> list[Evict]:
    return [Evict(slot, b"k" * 16, tag, 64, memoryview(b"")) for slot in slots]


def noted(slowest: SlowestTransfers, *each: float, tag: bytes = ACME, direction: str = "out") -> None:
    for seconds in each:
        slowest.note("out" if direction == "out" else "in", seconds, batch(3, tag=tag), 10, RAIL, "")


def test_of_each_org_and_direction_the_slowest_are_kept_until_they_are_taken() -> None:
    slowest = SlowestTransfers(itertools.count(100.0).__next__)
    noted(slowest, 0.3, 0.1, 0.5, 0.2, 0.4)
    noted(slowest, 0.001, tag=GLOBEX)
    noted(slowest, 0.002, direction="in")
    found = slowest.take()
    assert sorted((one.tag, one.direction, one.seconds) for one in found) == [
        (ACME, "in", 0.002),
        (ACME, "out", 0.4),
        (ACME, "out", 0.5),
        (GLOBEX, "out", 0.001),
    ], "an org that is slow hides no other"
    assert slowest.take() == []
    noted(slowest, 0.01)
    assert [one.seconds for one in slowest.take()] == [0.01], "what was slow before is over"


def test_a_transfer_says_where_it_went_and_for_what() -> None:
    slowest = SlowestTransfers(lambda: 7.0)
    slowest.note("in", 0.5, batch(9, 4, 6), 4096, SPINE, "r-1")
    [one] = slowest.take()
    assert (one.at, one.slot_first, one.slot_last, one.columns, one.size) == (7.0, 4, 9, 3, 4096)
    assert (one.path, one.request) == (SPINE, "r-1")


def test_what_is_read_in_portions_is_one_transfer_of_each_path() -> None:
    metrics, now = TransferMetrics(), iter([10.0, 10.25, 11.0, 12.0])
    with PortionedTransfer(metrics, "r-1", now.__next__) as portioned:
        portioned.add(RAIL, 0.5, batch(4, 5), 200)
        portioned.add(RAIL, 0.5, batch(6), 100)
        portioned.add(SPINE, 0.25, batch(7), 100)
        portioned.add(RAIL, 0.125, batch(9), 0)  # which was a miss
        assert not metrics.traffic.counted(), "it is not over"
    found = sorted(metrics.slowest.take(), key=lambda one: one.columns)
    assert [(one.path, one.direction, one.seconds, one.columns, one.size) for one in found] == [
        (SPINE, "in", 0.25, 1, 100),
        (RAIL, "in", 2.5, 4, 300),
    ]
    assert {(one.slot_first, one.slot_last, one.request) for one in found} == {
        (7, 7, "r-1"),
        (4, 9, "r-1"),
    }
    counted = [(one.path, sum(one.counts), one.bytes) for one in metrics.traffic.counted()]
    assert counted == [(RAIL, 1, 300), (SPINE, 1, 100)]


def test_there_is_an_end_to_the_orgs_that_are_remembered() -> None:
    slowest = SlowestTransfers()
    for number in range(2 * ORGS_MAX):
        noted(slowest, 0.1, 0.2, 0.3, tag=number.to_bytes(8, "big"))
    assert len(slowest.take()) == ORGS_MAX * KEPT_PER_ORG


def test_many_threads_note_and_the_slowest_of_all_are_kept() -> None:
    slowest = SlowestTransfers()

    def note(first: int) -> None:
        noted(slowest, *[each / 1000 for each in range(first, 4000, 8)])

    threads = [threading.Thread(target=note, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.seconds for one in slowest.take()) == [3.998, 3.999]


def test_no_more_travel_than_may_and_the_slowest_do() -> None:
    sent = transfers.encode([transfer(at / 1000) for at in range(3 * TRANSFERS_MAX)])
    found = transfers.decode({transfers.FIELD: sent})
    assert len(found) == TRANSFERS_MAX
    assert found[0].seconds == 2 * TRANSFERS_MAX / 1000
    assert transfers.decode({}) == []


@pytest.mark.parametrize(
    "bad",
    [{"node": "a\0"}, {"seconds": -1.0}, {"columns": -1}, {"direction": "pull"}, {"org": "x" * 201}],
    ids=str,
)
def test_what_the_database_could_not_keep_is_refused(bad: dict[str, object]) -> None:
    sent = transfers.encode([transfer(**bad)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\$"):
        transfers.decode({transfers.FIELD: sent})
