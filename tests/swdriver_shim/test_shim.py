"""A driver that follows documents, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from kvss_agent.client import Credentials
from kvss_agent.documents import Conflict
from kvss_agent.security.confirmations import Question, Scope
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.daemon import shard_homes
from swdriver_shim.daemon.admission import OrgAdmission
from swdriver_shim.daemon.callers import Call, PromptVerbs
from swdriver_shim.daemon.left_homes import HomeAddress, LeftHomes
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.daemon.verbs import ComputedBody
from swdriver_shim.data_plane.agent_control import PullResult
from swdriver_shim.data_plane.homes import Home, SlotPull
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.siblings import Siblings
from swdriver_shim.data_plane.tier2 import Tier2Transfers
from swdriver_shim.decider import decider as deciding
from swdriver_shim.decider.decider import always
from swdriver_shim.decider.statistics import BreakEvenTokens
from swdriver_shim.desired import Desired
from swdriver_shim.keys import isolation_tag
from swdriver_shim.policy import Policy
from tests.kvss_agent.plane import DRIVER
from tests.live import wait_until
from tests.swdriver_shim.fleets import C, Engine, Fleet, tokens
from tests.swdriver_shim.prompts import SECRET, prompt
from tests.swdriver_shim.shims import document


def test_a_request_that_is_late_does_not_bring_an_old_secret_back(tmp_path: Path) -> None:
    shim, nowhere, other = Shim("late", None), tmp_path / "nobody.sock", SECRET[::-1]
    orgs = {"acme": Policy()}
    try:
        [before] = shim.set_desired(document(nowhere, orgs)).orgs
        [now] = shim.set_desired(document(nowhere, orgs, generation=2, secret=other)).orgs
        assert shim.keys(before).tag == isolation_tag("acme", SECRET), "who came before that"
        assert shim.keys(now).tag == isolation_tag("acme", other)
    finally:
        shim.stop()


def test_a_document_that_could_not_be_applied_is_applied_when_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = document(tmp_path / "nobody.sock", {"acme": Policy()})
    shim = Shim(DRIVER, None)
    start = shim._start
    monkeypatch.setattr(shim, "_start", lambda *_: (_ for _ in ()).throw(RuntimeError("no thread")))
    try:
        with pytest.raises(RuntimeError, match="no thread"):
            shim.set_desired(told)
        assert (shim.desired, shim.has_driver) == (None, False)
        monkeypatch.setattr(shim, "_start", start)
        shim.set_desired(told)
        assert (shim.observed_generation, shim.has_driver) == (1, True)
    finally:
        shim.stop()


def test_what_is_restored_expires_by_no_other_policy(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweeper runs from the start, and the document may take its time."""
    ahead, sweeps, held = 0.0, threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(deciding, "WallClock", lambda: lambda: time.time() + ahead)
    sweep, follow = Ledger.sweep, Siblings.follow

    def swept(ledger: Ledger, now: float) -> bool:
        has_more = sweep(ledger, now)
        sweeps.release()
        return has_more

    def slowly(siblings: Siblings, *what: Any) -> None:
        if held.is_set():
            for _ in range(2):
                assert sweeps.acquire(timeout=60)
        follow(siblings, *what)

    monkeypatch.setattr(Ledger, "sweep", swept)
    monkeypatch.setattr(Siblings, "follow", slowly)
    told = document(fleet.plane.unix, {"acme": Policy(ttl_last_use_seconds=24 * 3600)})
    asked = prompt(tokens(1, 2))
    for is_first in (True, False):
        shim = Shim(DRIVER, tmp_path / "state")
        shim.set_desired(told)
        try:
            wait_until("its shards are there", lambda: shim.is_ready)  # noqa: B023
            engine = Engine(shim.mover)
            if is_first:
                engine.store(asked)
            assert engine.load(asked) == 2 * C
        finally:
            shim.stop()
        ahead = 2 * 3600.0
        while sweeps.acquire(blocking=False):
            pass
        held.set()


def test_what_an_engine_reports_of_one_org_looks_at_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim, looked_at = Shim(DRIVER, None), list[str]()
    tokens_min = Tier2Transfers.tokens_min

    def looked(transfers: Tier2Transfers, org: str) -> int | None:
        looked_at.append(org)
        return tokens_min(transfers, org)

    monkeypatch.setattr(Tier2Transfers, "tokens_min", looked)
    orgs = [f"org-{number}" for number in range(20)]
    verbs = PromptVerbs(shim, OrgAdmission(shim))
    try:
        told = shim.set_desired(document(tmp_path / "nobody.sock", dict.fromkeys(orgs, Policy())))
        for org in told.orgs:
            body = ComputedBody(tokens=512, seconds=0.1)
            found = verbs.computed(Call(org, body, memoryview(b""), always))
            assert found == BreakEvenTokens(0, 0), "nothing was fetched yet"
        assert looked_at == orgs
    finally:
        shim.stop()


def test_a_document_or_a_purge_that_comes_after_the_end_is_refused(tmp_path: Path) -> None:
    """The server answers what it has begun, while the next process opens the same shards; and whoever
    has stopped has nothing removed, so it must not say so."""
    told = document(tmp_path / "nobody.sock", {"acme": Policy()})
    shim = Shim(DRIVER, tmp_path / "state")
    shim.set_desired(told)
    shim.stop()
    scopes = (Scope(tag="ab" * 16),)  # of an org that its document does not name any more
    ask = Question(operation="o1", challenge="c" * 32, epoch=1, scopes=scopes, org="acme")
    for is_withdrawn in (False, True):
        with pytest.raises(Conflict, match="is stopping"):
            shim.purge(structs.replace(ask, withdrawn=is_withdrawn))
    with pytest.raises(Conflict, match="is stopping"):
        shim.set_desired(told.replace(b'"generation":1', b'"generation":2'))
    assert not shim.has_driver


def moved(raw: bytes, *, generation: int, group: str, index: int, to: str) -> bytes:
    """The same document, with another home of one shard at the same agent."""
    told = msgspec.json.decode(raw, type=Desired)
    homes = tuple(
        structs.replace(home, shard=to) if (home.group, home.index) == (group, index) else home
        for home in told.homes
    )
    return msgspec.json.encode(structs.replace(told, generation=generation, homes=homes))


def test_a_home_that_an_earlier_life_has_left_is_emptied_by_the_next(
    fleet: Fleet, tmp_path: Path
) -> None:
    """A driver that was stopped is told to go on elsewhere: what it had at the old home is nobody's."""
    notes, told = tmp_path / "notes", document(fleet.plane.unix, {"acme": Policy()})
    first = Shim("job", None, notes=notes)
    first.set_desired(told)
    wait_until("it is ready", lambda: first.is_ready)
    asked = prompt(tokens(1, 2))
    Engine(first.mover).store(asked)
    first.stop()
    old = fleet.plane.shards["0.1"]
    assert old.occupied() == 2
    fleet.make_one("elsewhere", 32 * C, 20, 1 << 40)
    second = Shim("job", None, notes=notes)
    second.set_desired(moved(told, generation=2, group="full", index=1, to="elsewhere"))
    try:
        wait_until("the old home is empty", lambda: not old.occupied())
        wait_until("it is ready", lambda: second.is_ready)
        assert Engine(second.mover).store(asked)
        wait_until("it is forgotten", lambda: not second.observed()["shards"][1]["former_homes"])
        second.observed()
        assert not LeftHomes(notes / "places").left_by(("full", 1))
    finally:
        second.stop()


@pytest.mark.parametrize("is_started_anew", [False, True])
def test_an_agent_with_another_address_is_no_home_that_was_left(
    fleet: Fleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_started_anew: bool,  # noqa: FBT001
) -> None:
    """A pod has another one at each start, and at the earlier one nobody is who could empty it."""
    monkeypatch.setattr(Home, "_identity", property(lambda home: ("the only agent", home.shard)))
    notes, raw = tmp_path / "notes", document(fleet.plane.unix, {"acme": Policy()})
    shim, asked = Shim("job", None, notes=notes), prompt(tokens(1, 2))
    shim.set_desired(raw)
    wait_until("it is ready", lambda: shim.is_ready)
    Engine(shim.mover).store(asked)
    address = f"tcp:127.0.0.1:{fleet.plane.tcp}"
    told = msgspec.json.decode(raw, type=Desired)
    homes = tuple(structs.replace(home, address=address) for home in told.homes)
    raw = msgspec.json.encode(structs.replace(told, generation=2, homes=homes))
    fleet.plane.unix.unlink()
    if is_started_anew:
        fleet.kill()
        fleet.make()
    try:
        shim.set_desired(raw)
        wait_until("it is there", lambda: {one.agent for one in shim.shards.covers()} == {address})
        wait_until("it is ready", lambda: shim.is_ready)
        Engine(shim.mover).store(asked)
        assert shim.mover.removals.purge("acme", seconds=20).done
        shown = shim.observed()["shards"]
        assert [(one["state"], one["former_homes"]) for one in shown] == [("here", [])] * len(shown)
        assert not any(LeftHomes(notes / "places").left_by((one.group, one.index)) for one in homes)
    finally:
        shim.stop()


def test_what_an_agent_with_another_address_has_in_memory_is_loaded(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the next process, which has read in its notes that the address was another one."""
    monkeypatch.setattr(Home, "_identity", property(lambda home: ("the only agent", home.shard)))
    notes, raw = tmp_path / "notes", document(fleet.plane.unix, {"acme": Policy()})
    told, asked = msgspec.json.decode(raw, type=Desired), prompt(tokens(1, 2))
    first = Shim("job", None, notes=notes)
    first.set_desired(raw)
    wait_until("it is ready", lambda: first.is_ready)
    Engine(first.mover).store(asked)
    first.stop()
    homes = [structs.replace(home, address=f"tcp:127.0.0.1:{fleet.plane.tcp}") for home in told.homes]
    fleet.plane.unix.unlink()
    second = Shim("job", None, notes=notes)
    second.set_desired(msgspec.json.encode(structs.replace(told, generation=2, homes=tuple(homes))))
    try:
        wait_until("it is ready", lambda: second.is_ready)
        assert Engine(second.mover).load(asked) == 2 * C
        assert not any(one["former_homes"] for one in second.observed()["shards"])
    finally:
        second.stop()


def test_an_agent_is_known_by_its_key_where_its_address_names_one() -> None:
    def home(address: str, shard: str = "0.1") -> Home:
        return Home(address, shard, lambda: Credentials(DRIVER, SECRET), 0)

    mine, another = "a" * 64, "b" * 64
    assert home(f"tls:10.0.0.7:8411#{mine}") == home(f"tls:10.0.0.9:8411#{mine}")
    assert home(f"tls:10.0.0.7:8411#{mine}") != home(f"tls:10.0.0.7:8411#{another}")
    assert home(f"tls:10.0.0.7:8411#{mine}") != home(f"tls:10.0.0.7:8411#{mine}", "0.2")
    assert home("tcp:10.0.0.7:8411") == home("tcp:10.0.0.7:8411") != home("tcp:10.0.0.9:8411")


def written_before_moves(monkeypatch: pytest.MonkeyPatch, notes: Path) -> list[list[HomeAddress]]:
    """What is on disk of the shard `full.1` at the beginning of each of its moves."""
    seen, move = list[list[HomeAddress]](), Shard.move

    def look(self: Shard, *rest: Any) -> bool:
        seen.append(LeftHomes(notes / "places").left_by(("full", 1)))
        return move(self, *rest)

    monkeypatch.setattr(Shard, "move", look)
    return seen


def test_where_a_shard_is_about_to_leave_is_written_down_before_it_moves(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed in the middle of a move has left bytes at both homes."""
    notes, told = tmp_path / "notes", document(fleet.plane.unix, {"acme": Policy()})
    shim, seen = Shim("job", None, notes=notes), written_before_moves(monkeypatch, notes)
    shim.set_desired(told)
    fleet.make_one("elsewhere", 32 * C, 20, 1 << 40)
    try:
        wait_until("it is ready", lambda: shim.is_ready)
        shim.set_desired(moved(told, generation=2, group="full", index=1, to="elsewhere"))
        wait_until("it has moved", lambda: shim.observed()["shards"][1]["shard"] == "elsewhere")
        assert seen == [[HomeAddress(f"unix:{fleet.plane.unix}", "0.1")]]
    finally:
        shim.stop()


def test_a_shard_whose_home_cannot_be_written_down_moves_when_it_can_be(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_homes, "RETRY_SECONDS", 0.01)
    notes, told = tmp_path / "notes", document(fleet.plane.unix, {"acme": Policy()})
    shim, seen = Shim("job", None, notes=notes), written_before_moves(monkeypatch, notes)
    shim.set_desired(told)
    fleet.make_one("elsewhere", 32 * C, 20, 1 << 40)
    (notes / "places").mkdir()
    try:
        wait_until("it is ready", lambda: shim.is_ready)
        shim.set_desired(moved(told, generation=2, group="full", index=1, to="elsewhere"))
        wait_until("it has tried again", lambda: caplog.text.count("can't be stored") > 1)
        told_of = shim.observed()["shards"][1]
        assert (told_of["state"], told_of["shard"]) == ("moving", "0.1")
        (notes / "places").rmdir()
        wait_until("it has moved", lambda: shim.observed()["shards"][1]["shard"] == "elsewhere")
        assert seen == [[HomeAddress(f"unix:{fleet.plane.unix}", "0.1")]]
    finally:
        shim.stop()


def test_places_are_not_struck_off_while_a_document_is_being_followed(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Which shards are about to move is not known before that."""
    notes = tmp_path / "notes"
    shim = Shim("job", None, notes=notes)
    shim.set_desired(document(fleet.plane.unix, {"acme": Policy()}))
    try:
        wait_until("it is ready", lambda: shim.is_ready)
        shim.shards._left.add(("full", 1), HomeAddress("unix:/nowhere", "0.1"))
        with shim._lock:
            shim.observed()
            assert LeftHomes(notes / "places").left_by(("full", 1))
        shim.observed()
        assert not LeftHomes(notes / "places").left_by(("full", 1))
    finally:
        shim.stop()


def test_a_home_that_a_shard_is_on_its_way_to_is_written_down_before_it_goes_elsewhere(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a move goes on, what is stored lies at the new home already."""
    goes_on, notes = threading.Event(), tmp_path / "notes"

    def pull(self: SlotPull, slots: Sequence[int], after: int) -> PullResult:
        goes_on.wait(60)
        return PullResult(done=True, bytes=0)

    monkeypatch.setattr(SlotPull, "__call__", pull)
    told = document(fleet.plane.unix, {"acme": Policy()})
    between = moved(told, generation=2, group="full", index=1, to="between")
    at_last = moved(told, generation=3, group="full", index=1, to="at-last")
    for name in ("between", "at-last"):
        fleet.make_one(name, 32 * C, 20, 1 << 40)
    first = Shim("job", None, notes=notes)
    first.set_desired(told)
    try:
        wait_until("it is ready", lambda: first.is_ready)
        Engine(first.mover).store(prompt(tokens(1, 2)))
        first.set_desired(between)
        wait_until("it is leaving", lambda: first.observed()["shards"][1]["left_to_move"])
        Engine(first.mover).store(prompt(tokens(3, 2)))
        assert fleet.plane.shards["between"].occupied() == 2
        first.set_desired(at_last)
        known = LeftHomes(notes / "places").left_by(("full", 1))
        assert [place.shard for place in known] == ["0.1", "between"], "what the next life would empty"
        addresses = [one["former_addresses"] for one in first.observed()["shards"]]
        assert addresses == [[], [f"unix:{fleet.plane.unix}"] * 2, []]
        goes_on.set()
        wait_until("it has moved", lambda: first.observed()["shards"][1]["shard"] == "at-last")
        wait_until("it is empty", lambda: not fleet.plane.shards["between"].occupied())
    finally:
        goes_on.set()
        first.stop()
