"""The driver in two halves: one decides, the other moves bytes and is the only one that does."""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvss_agent.client import Credentials, Lost, Miss
from kvss_agent.data_plane.breach import Cause
from swdriver_shim.adapters.vllm.worker import Result, Worker
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.data_plane.agent_control import AgentControl, PullResult
from swdriver_shim.data_plane.homes import Home, SlotPull
from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.data_plane.shard.columns import ViewColumn
from swdriver_shim.data_plane.shard.shard import Shard
from swdriver_shim.data_plane.worker import client as deciding
from swdriver_shim.data_plane.worker import server as halving
from swdriver_shim.data_plane.worker.client import RemoteShard, WorkerConnection
from swdriver_shim.data_plane.worker.protocol import shut
from swdriver_shim.data_plane.worker.server import WorkerServer
from swdriver_shim.policy import Policy
from tests.kvss_agent.plane import DRIVER, SECRET
from tests.live import wait_until
from tests.swdriver_shim.fleets import C, kv, tokens
from tests.swdriver_shim.halves import halves
from tests.swdriver_shim.prompts import prompt


def test_what_one_half_decides_the_other_moves(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        asked = prompt(tokens(1, 2, rest=10))
        assert both.load(asked) == 0
        assert both.store(asked) == 3 + 3
        assert both.load(asked) == asked.tokens
        assert both.load(prompt(tokens(1, 2), "globex")) == 0
        assert both.driver.statistics.groups()[0].slots == 20


def test_a_worker_without_a_step_yet_has_nothing_to_report() -> None:
    worker = Worker(["full"], [], WorkerServer())
    reported: list[Result] = []
    asking = threading.Thread(target=lambda: reported.append(worker.take_result()), daemon=True)
    asking.start()
    asking.join(60)
    assert reported == [Result()]
    worker.close()


@pytest.mark.parametrize(
    ("miss", "reason"),
    [
        *((miss, Reason.SEAL_REFUSED) for miss in (Miss.TORN, Miss.STALE, Miss.FOREIGN, Miss.CORRUPT)),
        (Miss.LATE, Reason.WRITING),
        *((miss, Reason.AGENT_LOST) for miss in (Miss.ABSENT, Miss.REFUSED, Miss.LOST)),
    ],
)
def test_only_bytes_that_are_damaged_are_said_to_be(
    tmp_path: Path, miss: Miss, reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    """Of such somebody is woken, and finds in the log what it was: not where an evict is still on its
    way over a slow path."""
    with halves(tmp_path) as both:
        asked = prompt(tokens(1, 2))
        both.store(asked)
        loading = both.driver.begin_load(asked)
        why = both.driver.refuse({loading.match.columns[0][1]: miss})
        both.driver.end_load(loading, (0, why))
        assert both.driver.statistics.orgs()[0].missed_tokens == {reason: asked.tokens}
    assert (f"not served: {miss}" in caplog.text) == (reason is Reason.SEAL_REFUSED)


def test_a_purge_empties_every_slot_through_the_workers(tmp_path: Path) -> None:
    with halves(tmp_path, acme=Policy(scrub=True)) as both:
        both.store(prompt(tokens(1, 2, rest=5)))
        receipt = both.driver.removals.purge("acme")
        assert (receipt.done, receipt.columns) == (True, 6)
        assert set(receipt.confirmed) == {"0.0", "0.1", "1.0"}
        hosted = both.fleet.plane.shards.values()
        assert not any(any(shard.arena.slot(at)) for shard in hosted for at in range(20))


@pytest.mark.slow
def test_nothing_outlives_its_time_while_a_shard_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of the first prompt are being emptied, which takes as long as a path is slow."""
    waits, answers = threading.Event(), threading.Event()
    clear = RemoteShard.clear

    def slowly(shard: RemoteShard, slots: Sequence[int], *, scrub: bool) -> bool:
        waits.set()
        answers.wait(60)
        return clear(shard, slots, scrub=scrub)

    monkeypatch.setattr(RemoteShard, "clear", slowly)
    with halves(tmp_path, acme=Policy(ttl_last_use_seconds=1, scrub=True)) as both:
        try:
            stored = both.store(prompt(tokens(1, 2)))
            assert waits.wait(30)
            stored += both.store(prompt(tokens(3, 4)))
            wait_until(
                "the second has expired", lambda: both.driver.statistics.orgs()[0].expired.dram == stored
            )
        finally:
            answers.set()


def test_an_agent_that_is_gone_is_seen_from_here_and_comes_back(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        asked = prompt(tokens(1, 2))
        both.store(asked)
        both.fleet.kill()
        wait_until("it is seen", lambda: both.far["0.0"].slots is None)
        assert both.load(asked) == 0
        assert both.far["0.0"].lost_because
        both.fleet.make()

        def works() -> bool:
            both.store(asked)
            return both.load(asked) == asked.tokens

        wait_until("it is used again", works)


def test_a_line_that_moves_is_followed(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        both.fleet.plane.shards["0.1"].resize(4)
        wait_until("it is followed", lambda: both.driver.statistics.groups()[0].slots == 4)


def test_a_shard_moves_when_it_is_told_from_afar(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        asked = prompt(tokens(1, 2))
        both.store(asked)
        far = both.far["0.1"]
        both.fleet.make_one("moved", 32 * C, 20, far.count_from())
        pulling = SlotPull(None, "moved", "unix:nowhere", "0.1", DRIVER)
        assert not far.move(both.home("nowhere"), pulling)
        assert both.load(asked) == 2 * C, "a move to nowhere changes nothing"
        assert far.move(both.home("moved"), pulling)
        assert (far.moves, far.left_to_move()) == (1, 0)
        both.fleet.end_one("0.1")
        assert both.load(asked) == 0, "without a controller to pull with it starts empty"
        both.store(asked)
        assert both.load(asked) == 2 * C


def test_a_home_that_a_worker_has_left_is_emptied_before_a_receipt(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        both.store(prompt(tokens(1, 2)))
        both.fleet.make_one("moved", 32 * C, 20, both.far["0.1"].count_from())
        pulling = SlotPull(None, "moved", "unix:nowhere", "0.1", DRIVER)
        assert both.far["0.1"].move(both.home("moved"), pulling)
        assert both.driver.removals.purge("acme", seconds=20).done
        old = both.fleet.plane.shards["0.1"]
        assert not old.occupied()
        wait_until("it is forgotten", lambda: not both.far["0.1"].has_former_homes)
        assert both.far["0.1"].former_homes == []


def test_a_worker_is_told_which_agents_are_no_more(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        both.store(prompt(tokens(1)))
        far, left = both.far["0.1"], Home("unix:/nowhere", "0.1", lambda: Credentials(DRIVER, SECRET), 0)
        shard = both.workers[1].shards["0.1"]
        client = shard._homes.client
        assert client
        shard._homes.connect = left
        shard._homes.lose(client, Lost("a node is lost"))
        both.fleet.make_one("moved", 32 * C, 20, far.count_from())
        assert far.move(both.home("moved"), SlotPull(None, "moved", "unix:/nowhere", "0.1", DRIVER))
        assert not both.driver.removals.purge("acme", seconds=0.5).done
        assert len(far.former_homes) == 1
        far.set_agents(["unix:/nowhere"], [])
        assert both.driver.removals.purge("acme", seconds=20).done


def test_a_worker_that_opens_a_shard_later_is_told_which_agents_are_no_more(tmp_path: Path) -> None:
    """As after a start: the document is followed before workers are there."""
    with halves(tmp_path) as both:
        both.store(prompt(tokens(1)))
        far = both.far["0.1"]
        far.earlier_homes = [Home("unix:/nowhere", "0.1", lambda: Credentials(DRIVER, SECRET), 0)]
        assert far.release()
        far.set_agents(["unix:/nowhere"], [])
        wait_until("it is open", far.open)
        assert both.driver.removals.purge("acme", seconds=20).done


def test_a_worker_that_opens_a_shard_later_has_the_path_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A document that comes while a worker is asked to open it finds no shard there yet."""
    opens, path = RemoteShard._open, PathSpec("chat", "rail", "cs-1", 1, "leaf-1", "leaf-1", "ax-1")

    def late(shard: RemoteShard, *arguments: Any) -> bool:
        monkeypatch.setattr(RemoteShard, "_open", opens)
        shard.set_path(path)
        shard.set_agents(["unix:/nowhere"], [])
        return opens(shard, *arguments)

    with halves(tmp_path) as both:
        both.store(prompt(tokens(1)))
        far = both.far["0.1"]
        monkeypatch.setattr(RemoteShard, "_open", late)
        assert far.release()
        wait_until("it is open", far.open)
        assert both.workers[1].shards["0.1"]._homes.path == path
    assert not [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]


def test_who_waits_for_evicts_of_a_worker_waits_no_longer_than_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let = threading.Event()
    with halves(tmp_path) as both:
        both.store(prompt(tokens(1)))
        far = both.far["0.1"]
        assert far.wait_applied(20)
        monkeypatch.setattr(Shard, "wait_applied", lambda _, seconds: let.wait(30) or seconds > 0)
        assert not far.wait_applied(0.05), "the worker would have answered after half a minute"
        let.set()


def test_a_shard_that_has_moved_is_found_again_with_another_secret(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        far, secret = both.far["0.1"], [SECRET]
        both.fleet.make_one("moved", 32 * C, 20, far.count_from())
        address = f"unix:{both.fleet.plane.unix}"
        new = Home(address, "moved", lambda: Credentials(DRIVER, secret[0]), 0)
        assert far.move(new, SlotPull(None, "moved", address, "0.1", DRIVER))
        both.fleet.end_one("0.1")
        both.fleet.end_one("moved")
        wait_until("it is lost", lambda: not far.is_open)
        secret[0] = both.fleet.plane.secrets[DRIVER] = b"another secret that both of them were told"
        both.fleet.make_one("moved", 32 * C, 20, 0)
        wait_until("it is found again", lambda: far.is_open)


def test_a_long_move_shows_the_capability_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lasts for minutes, and the console renews it as long as the move goes on."""
    monkeypatch.setattr(deciding, "RENEW_SECONDS", 0.01)
    now, shown = ["tgp_first"], list[str]()

    def pull(control: AgentControl, *_: Any) -> PullResult:
        assert control.capability
        shown.append(control.capability())
        now[0] = "tgp_second"
        wait_until("it is renewed", lambda: control.capability and control.capability() == now[0])
        return PullResult(done=True, bytes=0)

    monkeypatch.setattr(AgentControl, "pull", pull)
    with halves(tmp_path) as both:
        both.store(prompt(tokens(1, 2)))
        far = both.far["0.1"]
        both.fleet.make_one("moved", 32 * C, 20, far.count_from())
        control = AgentControl("http://127.0.0.1:9", "", lambda: now[0])
        assert far.move(both.home("moved"), SlotPull(control, "moved", "unix:/old", "0.1", DRIVER))
        assert shown == ["tgp_first", "tgp_second"]  # of two slots, one after the other


def test_a_former_home_is_reached_with_the_certificate_of_the_moment(tmp_path: Path) -> None:
    """It may come back after weeks, while the shard's own connection has lasted."""
    with halves(tmp_path) as both:
        far, secret = both.far["0.1"], [SECRET]
        far._home = Home(far._home.address, "0.1", lambda: Credentials(DRIVER, secret[0]), 0)
        secret[0] = b"what has been renewed since the shard was opened"
        far.empty_former_homes(scrub=False)
        assert both.workers[1]._credentials["0.1"].secret == secret[0]
        secret[0] = SECRET


def test_a_worker_that_is_gone_is_a_lost_shard_and_nothing_raises(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        asked = prompt(tokens(1))
        both.store(asked)
        both.workers[1].close()
        far = both.far["0.1"]
        wait_until("it is seen", lambda: not far.is_open)
        assert (far.slots, far.lost_because) == (None, "its worker is gone")
        assert far.exists([(b"k" * 16, b"t" * 16)]) == [False]
        assert far.recall([]) == []
        assert (far.open(), far.clear([1], scrub=False), far.purge(b"t" * 16)) == (False, False, None)
        wait_until("nothing is served", lambda: both.driver.query(asked) == 0)


def test_a_shard_is_found_while_others_are_opened() -> None:
    half = WorkerServer()

    class Name(str):
        """One more shard is opened when it is looked at."""

        __slots__ = ()

        def rpartition(self, _: str, /) -> tuple[str, str, str]:
            half.shards[f"new.{len(half.shards)}"] = mine
            return "one", ".", "0"

    mine: Any = SimpleNamespace(close=lambda: None, end_move=lambda: None)
    try:
        half.shards |= {Name("one.0"): mine, "two.0": mine}
        assert half.shard_of("two") is mine
        assert half.shard_of("three") is None
    finally:
        half.close()


def test_a_worker_ends_though_a_shard_is_just_opened() -> None:
    half, is_closed = WorkerServer(), list[str]()

    def shard(name: str) -> Any:
        """Another one is opened when it is told to move no more."""
        return SimpleNamespace(
            end_move=lambda: half.shards.update({f"{name}.0": shard(f"{name}.0")}),
            close=lambda: is_closed.append(name),
        )

    half.shards["one.0"] = shard("one.0")
    half.close()
    assert is_closed == ["one.0", "one.0.0"]


def test_many_ask_at_once_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        far, wrong = both.far["0.0"], list[int]()

        def ask(count: int) -> None:
            asked = [(bytes(16), bytes(16))] * count
            wrong.extend(count for _ in range(50) if len(far.exists(asked)) != count)

        threads = [threading.Thread(target=ask, args=(count,)) for count in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_line_outlives_a_lack_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody opens it again: the engine would go on without its cache until it is restarted."""

    def refuse(_: ThreadPoolExecutor) -> None:
        raise RuntimeError("can't start new thread")

    with halves(tmp_path) as both:
        far = both.far["0.0"]
        with monkeypatch.context() as patched:
            patched.setattr(ThreadPoolExecutor, "_adjust_thread_count", refuse)
            assert far.exists([(bytes(16), bytes(16))]) == [False]
        assert far.is_open
        asked = prompt(tokens(1, 2))
        both.store(asked)
        assert both.load(asked) == asked.tokens


def test_a_line_ends_where_the_interpreter_ends_and_nobody_would_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with halves(tmp_path) as both:
        far = both.far["0.0"]
        monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
        assert far.exists([(bytes(16), bytes(16))]) == [False]
        wait_until("the line has ended", lambda: not far.is_open)
        monkeypatch.undo()


def test_a_worker_ends_though_a_shard_is_just_moving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be moving for hours, as slowly as its agent was told to."""

    def pull(*_: object) -> PullResult:
        return PullResult(done=True, bytes=0, rest_seconds=45.0)

    monkeypatch.setattr(AgentControl, "pull", pull)
    with halves(tmp_path) as both:
        both.store(prompt(tokens(1, 2)))
        far = both.far["0.1"]
        both.fleet.make_one("moved", 32 * C, 20, far.count_from())
        slow = SlotPull(AgentControl("http://nowhere", ""), "moved", "unix:/old", "0.1", DRIVER)
        moving = threading.Thread(target=far.move, args=(both.home("moved"), slow))
        moving.start()
        wait_until("it moves", lambda: far.moves == 1)
        ending = threading.Thread(target=both.workers[1].close, daemon=True)
        ending.start()
        ending.join(30)
        assert not ending.is_alive()
        moving.join()


def test_what_a_worker_tells_of_its_own_accord_is_heard(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        assert both.workers[0].send({"store": 1})
        wait_until("it is heard", lambda: both.told == [{"store": 1}])


def test_nobody_without_the_secret_is_let_in_and_nonsense_ends_a_line_only(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        place = both.workers[0].address
        assert Path(place.path).parent.stat().st_mode & 0o077 == 0
        both.lines[0].close()
        with pytest.raises(Exception, match="digest"):
            Client(place.path, authkey=b"a guess")
        knocking = Client(place.path, authkey=base64.b64decode(place.secret))
        knocking.send_bytes(b"nonsense")
        with pytest.raises(EOFError):
            knocking.recv_bytes()
        again = WorkerConnection(place, both.hear)
        try:
            far = RemoteShard("0.0", again, both.home("0.0"))
            assert far.open()
            assert far.slots == 20
        finally:
            again.close()


def test_a_worker_ends_though_somebody_is_let_in_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    half, is_let_in, is_shut = WorkerServer(), threading.Event(), threading.Event()
    accept = half._listener.accept

    def accepting() -> Any:
        line = accept()
        is_let_in.set()
        assert is_shut.wait(30)
        return line

    def shutting(line: Any) -> None:
        shut(line)
        is_shut.set()

    secret = base64.b64decode(half.address.secret)
    monkeypatch.setattr(half._listener, "accept", accepting)
    Client(half.address.path, authkey=secret).close()  # its thread was waiting for this one already
    second = Client(half.address.path, authkey=secret)
    assert is_let_in.wait(30)
    monkeypatch.setattr(halving, "shut", shutting)
    ending = threading.Thread(target=half.close)
    ending.start()
    ending.join(30)
    has_ended = not ending.is_alive()
    second.close()
    ending.join()
    assert has_ended


def test_a_shard_ends_with_its_agent_while_it_is_read(tmp_path: Path) -> None:
    """What was leased stays readable, and whole, whatever becomes of the agent and the connection."""
    with halves(tmp_path) as both:
        asked = prompt(tokens(1))
        both.store(asked)
        loading = both.driver.begin_load(asked)
        [column], [slot] = loading.match.columns[0], loading.match.slots[0]
        shard = both.workers[0].shards["0.0"]
        with shard.view([ViewColumn(slot, column.key, asked.maker.tag, C)]) as [found]:
            both.fleet.plane.shards.pop("0.0").end(Cause.GONE, "killed")
            wait_until("it is lost", lambda: shard.slots is None or not shard.is_open)
            assert not isinstance(found, Miss)
            assert found == kv(asked, 0, 0, 0, C)
        both.driver.end_load(loading)
