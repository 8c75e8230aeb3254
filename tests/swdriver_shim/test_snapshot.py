"""A driver that is stopped leaves what its next life goes on with: what agents have in memory outlives
it, and nothing that may not be served does."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from swdriver_shim.cache import snapshot
from swdriver_shim.cache.snapshot import LedgerSnapshot, ShardSnapshot
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.decider.decider import Snapshots
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace
from swdriver_shim.policy import OrgPolicies, Policy, Rules
from tests.kvss_agent.plane import running
from tests.live import wait_until
from tests.swdriver_shim.fleets import Engine, Fleet, tokens
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import LAYOUT, keys, prompt

C = COLUMN_TOKENS
ORGS = ("acme", "globex")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running(tmp_path) as plane:
        made = Fleet(plane)
        made.make()
        yield made


class Calendar:
    """Ours goes on by itself, and can be put forward and back."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def calendar() -> Calendar:
    return Calendar()


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@contextlib.contextmanager
def life(
    fleet: Fleet,
    notes: Path,
    calendar: Calendar,
    orgs: Collection[str] = ORGS,
    kind: str = "shm",
    **policies: Policy,
) -> Iterator[Engine]:
    """One life of the driver, which is stopped in order at its end."""

    def known(org: str, namespace: Namespace) -> Keys | None:
        return keys(org, namespace) if org in orgs else None

    shards = [
        [Shard(name, fleet.connect(name, kind), notes) for name in of]
        for of in (["0.0", "0.1"], ["1.0"])
    ]
    driver = Driver(LAYOUT, "llama", shards, wall_clock=calendar, snapshots=Snapshots(notes, known))
    driver.set_policies({org: OrgPolicies(policy=policy) for org, policy in policies.items()})
    try:
        yield Engine(driver)
        check_integrity(driver.ledger)
    finally:
        driver.close()


@pytest.mark.parametrize("kind", ["shm", "unix", "tcp"])
def test_what_is_in_memory_outlives_the_driver(
    fleet: Fleet, notes: Path, calendar: Calendar, kind: str
) -> None:
    long, other = prompt(tokens(1, 2, 3, rest=9)), prompt(tokens(1, 2, 3), org="globex")
    with life(fleet, notes, calendar, kind=kind) as engine:
        engine.store(long)
        engine.store(other)
    for _ in range(2):  # and the life after that one
        with life(fleet, notes, calendar, kind=kind) as engine:
            assert engine.load(long) == 3 * C + 9
            assert engine.load(other) == 3 * C
            assert engine.load(prompt(tokens(1, 2, 4))) == 2 * C
    assert {path.name for path in notes.iterdir()} == {"columns", "0.0", "0.1", "1.0"}


def test_whoever_was_killed_begins_with_nothing(fleet: Fleet, notes: Path, calendar: Calendar) -> None:
    asked = prompt(tokens(1, 2))
    with life(fleet, notes, calendar) as engine:
        engine.store(asked)
    with life(fleet, notes, calendar) as engine:
        engine.store(prompt(tokens(5)))
        for path in notes.iterdir():
            pytest.fail(f"{path.name} is there though it was read")
        engine.driver._snapshots = None  # it leaves nothing
        for shard in [*engine.driver._shards[0], *engine.driver._shards[1]]:
            shard._homes._note = None
    with life(fleet, notes, calendar) as engine:
        assert engine.load(asked) == 0
        assert all(group.used == 0 for group in engine.driver.statistics.groups())


def test_a_snapshot_of_another_version_is_ignored_and_the_log_says_so(
    fleet: Fleet, notes: Path, calendar: Calendar, caplog: pytest.LogCaptureFixture
) -> None:
    asked = prompt(tokens(1, 2))
    with life(fleet, notes, calendar) as engine:
        engine.store(asked)
    note = snapshot.read_once(notes / "columns", LedgerSnapshot)
    assert note
    snapshot.write(notes / "columns", replace(note, version=snapshot.VERSION - 1))
    with life(fleet, notes, calendar) as engine:
        told = f"has version {snapshot.VERSION - 1}, and this one reads version {snapshot.VERSION}"
        assert any(told in one for one in caplog.messages)
        assert engine.load(asked) == 0
        assert all(group.used == 0 for group in engine.driver.statistics.groups())


def test_a_version_of_snapshots_has_one_way_to_make_keys() -> None:
    """Columns by other keys would take slots, and nothing finds them. Who changes keys changes both."""
    first = prompt(range(C)).keys[0].hex()
    assert (snapshot.VERSION, first) == (3, "505fff3f99a39bf30066884433616cd8")


def test_what_has_expired_meanwhile_is_not_served(fleet: Fleet, notes: Path, calendar: Calendar) -> None:
    policy = Policy(ttl_last_use_seconds=100)
    asked, kept = prompt(tokens(1, 2)), prompt(tokens(3), org="globex")
    with life(fleet, notes, calendar, acme=policy) as engine:
        engine.store(asked)
        engine.store(kept)
    calendar.ahead += 1000
    with life(fleet, notes, calendar, acme=policy) as engine:
        assert engine.load(asked) == 0
        assert engine.load(kept) == C
        wait_until("it is emptied", lambda: engine.driver.statistics.groups()[0].used == 1)
        overstay = engine.driver.ledger.overstay
        assert overstay.columns == 0, "while all was stopped nobody could have read it"
        assert overstay.seconds_max < 100


def test_a_calendar_that_was_put_back_keeps_nothing_too_long(
    fleet: Fleet, notes: Path, calendar: Calendar
) -> None:
    asked = prompt(tokens(1))
    with life(fleet, notes, calendar) as engine:
        engine.store(asked)
    calendar.ahead -= 3600
    with life(fleet, notes, calendar) as engine:
        wait_until("it may serve", lambda: engine.driver.ledger.is_reachable)
        assert engine.load(asked) == 0
        assert engine.store(asked) == 2
        assert engine.load(asked) == C


def test_a_time_to_live_of_its_own_and_a_priority_go_along(
    fleet: Fleet, notes: Path, calendar: Calendar
) -> None:
    asked = prompt(tokens(1))
    with life(fleet, notes, calendar) as engine:
        engine.store(asked, Rules(ttl_seconds=50, priority=90))
    with life(fleet, notes, calendar) as engine:
        [column] = engine.driver.explain(asked)["full"]
        assert column.priority == 90
        assert column.expires_in_seconds is not None
        assert 0 < column.expires_in_seconds <= 50


def test_an_org_that_is_not_served_any_more_is_emptied_first(
    fleet: Fleet, notes: Path, calendar: Calendar
) -> None:
    gone, stays = prompt(tokens(1), org="globex"), prompt(tokens(1))
    with life(fleet, notes, calendar) as engine:
        engine.store(gone)
        engine.store(stays)
        slots = [shard.slots for shard in engine.driver._shards[0]]
    assert slots == [20, 20]
    with life(fleet, notes, calendar, orgs=["acme"]) as engine:
        assert engine.load(stays) == C
        assert engine.driver.statistics.groups()[0].used == 1
    headers = [fleet.plane.shards["0.0"].arena.slot(slot)[:64] for slot in range(2)]
    assert sum(gone.maker.tag in bytes(header) for header in headers) == 0
    assert sum(stays.maker.tag in bytes(header) for header in headers) == 1


def test_an_agent_that_came_back_empty_meanwhile_costs_misses(
    fleet: Fleet, notes: Path, calendar: Calendar
) -> None:
    asked = prompt(tokens(1, 2))
    with life(fleet, notes, calendar) as engine:
        engine.store(asked)
    fleet.end_one("0.1")
    fleet.make_one("0.1", 32 * C, 20, 0)
    with life(fleet, notes, calendar) as engine:
        assert engine.load(asked) == 0
        assert engine.store(asked) > 0
        assert engine.load(asked) == 2 * C


def test_another_driver_that_was_there_meanwhile_leaves_nothing_to_go_on_with(
    fleet: Fleet, notes: Path, calendar: Calendar, tmp_path: Path
) -> None:
    asked = prompt(tokens(1, 2))
    with life(fleet, notes, calendar) as engine:
        engine.store(asked)
    with life(fleet, tmp_path / "another's", calendar) as engine:
        engine.store(prompt(tokens(7)))
    with life(fleet, notes, calendar) as engine:
        assert engine.load(asked) == engine.load(prompt(tokens(7))) == 0


def test_a_shard_that_has_become_smaller_keeps_what_fits(
    fleet: Fleet, notes: Path, calendar: Calendar
) -> None:
    first, last = prompt(tokens(1, 2)), prompt(tokens(*range(10, 25)))
    with life(fleet, notes, calendar) as engine:
        engine.store(first)
        engine.store(last)
    for name in ("0.0", "0.1", "1.0"):
        fleet.plane.shards[name].resize(8)
    with life(fleet, notes, calendar) as engine:
        assert engine.load(first) == 2 * C
        assert 0 <= engine.load(last) < 15 * C
        assert all(group.slots == 8 for group in engine.driver.statistics.groups())


@pytest.mark.parametrize("spoil", [b"", b"\x00" * 50, b"\xff\xfe nonsense"])
def test_a_note_that_nobody_can_read_is_no_note(
    fleet: Fleet, notes: Path, calendar: Calendar, spoil: bytes
) -> None:
    asked = prompt(tokens(1))
    for name in ("columns", "0.0"):
        with life(fleet, notes, calendar) as engine:
            engine.store(asked)
        (notes / name).write_bytes(spoil)
        with life(fleet, notes, calendar) as engine:
            wait_until("it may serve", lambda: engine.driver.ledger.is_reachable)
            assert engine.load(asked) == 0
            assert engine.driver.removals.purge("acme", seconds=30).done
            assert not carries(fleet, asked.maker.tag)


def test_a_decider_that_left_nothing_makes_the_notes_of_its_shards_worthless(
    fleet: Fleet, notes: Path, calendar: Calendar
) -> None:
    """As where it was killed, and the worker that has the shards was stopped in order."""
    asked = prompt(tokens(1))
    with life(fleet, notes, calendar) as engine:
        engine.store(asked)
    (notes / "columns").unlink()
    assert carries(fleet, asked.maker.tag)
    with life(fleet, notes, calendar) as engine:
        assert engine.load(asked) == 0
        assert not carries(fleet, asked.maker.tag)


def carries(fleet: Fleet, tag: bytes) -> bool:
    """Whether a slot of any shard has a header with this tag."""
    return any(
        tag in bytes(shard.arena.slot(slot)[:64])
        for shard in fleet.plane.shards.values()
        for slot in range(shard.arena.slots)
    )


def test_a_note_that_says_what_is_not_so_costs_misses_and_never_a_byte(
    fleet: Fleet, notes: Path, calendar: Calendar
) -> None:
    """Slots exchanged, numbers exchanged, columns twice, columns of nobody's map."""
    mine, theirs = prompt(tokens(1, 2)), prompt(tokens(3, 4), org="globex")
    with life(fleet, notes, calendar) as engine:
        engine.store(mine)
        engine.store(theirs)
    note = snapshot.read_once(notes / "columns", LedgerSnapshot)
    shard = snapshot.read_once(notes / "0.0", ShardSnapshot)
    assert note
    assert shard

    swapped = [replace(one, slot=3 - one.slot if one.slot < 4 else one.slot) for one in note.columns]
    more = [*swapped, swapped[0], replace(swapped[0], map=99), replace(swapped[1], parent=500)]
    snapshot.write(notes / "columns", replace(note, columns=more))
    snapshot.write(notes / "0.0", shard)
    with life(fleet, notes, calendar) as engine:
        assert engine.load(mine) == engine.load(theirs) == 0  # every byte that comes is looked at
        engine.store(mine)
        assert engine.load(mine) == 2 * C


def test_workers_that_end_at_the_same_time_leave_a_note_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "full.0", tmp_path / "full.1"
    is_written, written = os.fsync, list[Path]()

    def meanwhile(descriptor: int) -> None:
        if not written:
            written.append(second)
            snapshot.write(second, ShardSnapshot(b"second", 2, b""))
        is_written(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    snapshot.write(first, ShardSnapshot(b"first", 1, b""))
    assert snapshot.read_once(first, ShardSnapshot) == ShardSnapshot(b"first", 1, b"")
    assert snapshot.read_once(second, ShardSnapshot) == ShardSnapshot(b"second", 2, b"")
