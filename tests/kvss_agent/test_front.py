"""A directory in front of tier 2, at an agent that is killed, or told of another front or of none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvss_agent.client import Miss, Recalled
from kvss_agent.tier2.backend import Failed, Fault
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.settings import FrontSettings, Tier2Settings, Writes
from kvss_agent.tier2.stores import Stores
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.stores import files, keep, purge, recall, retiring, tier2
from tests.kvss_agent.tier2.columns import ACME, address_of, get, put
from tests.live import wait_until

pytestmark = pytest.mark.slow  # each starts a process
CAP = 1 << 30


@pytest.fixture
def running(tmp_path: Path) -> Iterator[AgentProcess]:
    with agent(tmp_path / "a") as made:
        yield made


def fronted(tmp_path: Path, writes: str = "through", front: str = "front") -> dict[str, Any]:
    at = {"path": str(tmp_path / front), "cap_bytes": CAP, "writes": writes}
    return {**tier2(tmp_path / "store"), "front": at}


@pytest.mark.parametrize("writes", ["through", "back", "displaced"])
def test_what_waits_in_front_outlives_a_kill(running: AgentProcess, tmp_path: Path, writes: str) -> None:
    running.tell(document(1, spec(), tier2=fronted(tmp_path, writes)))
    keep(running)
    running.kill()
    running.start()
    wait_until("it is ready", lambda: running.observed()["ready"])
    assert isinstance(recall(running), Recalled)
    # Two files of it, if the kill came between its copy behind and the end of its waiting.
    assert purge(running) in ((1, 2) if writes == "back" else (1,))
    assert not files(tmp_path / "store")
    assert not files(tmp_path / "front")


@pytest.mark.parametrize("then", ["another", "none"])
def test_another_front_or_none_leaves_nothing_behind_and_loses_nothing(
    running: AgentProcess, tmp_path: Path, then: str
) -> None:
    running.tell(document(1, spec(), tier2=fronted(tmp_path, "displaced")))
    keep(running)
    assert not files(tmp_path / "store")
    told = fronted(tmp_path, front="other") if then == "another" else tier2(tmp_path / "store")
    running.tell(document(2, spec(), tier2=told))
    assert not files(tmp_path / "front")
    assert len(files(tmp_path / "store")) == 1
    assert isinstance(recall(running), Recalled)


def test_a_front_that_was_changed_while_the_agent_was_killed_is_emptied_none_the_less(
    running: AgentProcess, tmp_path: Path
) -> None:
    running.tell(document(1, spec(), tier2=fronted(tmp_path, "displaced")))
    keep(running)
    running.kill()
    running.start()
    wait_until("it is ready", lambda: running.observed()["ready"])
    running.tell(document(2, spec(), tier2=tier2(tmp_path / "store")))
    assert not files(tmp_path / "front")
    assert isinstance(recall(running), Recalled)


def test_a_store_that_is_retiring_is_purged_with_its_front(
    running: AgentProcess, tmp_path: Path
) -> None:
    """Also where the next store has the same directory in front."""
    running.tell(document(1, spec(), tier2=fronted(tmp_path, "displaced")))
    keep(running)
    after = fronted(tmp_path, "displaced") | {"path": str(tmp_path / "new")}
    running.tell(document(2, spec(), tier2=after))
    assert retiring(running) == {str(tmp_path / "store"): "retiring"}
    assert recall(running) is Miss.ABSENT
    keep(running, "y")
    assert purge(running) == 2
    assert not files(tmp_path / "front")


def test_a_front_that_cannot_be_used_says_so_and_shards_work(
    running: AgentProcess, tmp_path: Path
) -> None:
    (tmp_path / "front").write_text("a file")
    running.tell(document(1, spec(), tier2=fronted(tmp_path)))
    told = running.observed()["tier2"]
    assert told["state"] == "refused"
    assert "front" in told["reason"]
    with running.client() as shard:
        assert shard.evict(0, b"k" * 16, b"t" * 16, 64, memoryview(bytes(64))) == 1


def test_metrics_tell_the_levels_apart(running: AgentProcess, tmp_path: Path) -> None:
    running.tell(document(1, spec(), tier2=tier2(tmp_path / "store")))
    assert "kvss_tier2_front_bytes" not in running.http.get("/metrics").text
    running.tell(document(2, spec(), tier2=fronted(tmp_path)))
    keep(running)
    recall(running)
    text = running.http.get("/metrics").text
    assert 'kvss_tier2_front_bytes{which="cap"} 1073741824' in text
    assert 'kvss_tier2_front_bytes{which="waiting"} 0' in text
    assert "kvss_tier2_front_waiting_seconds 0" in text
    assert 'kvss_tier2_reads_total{level="front"} 1' in text
    assert 'kvss_tier2_reads_total{level="behind"} 0' in text
    running.tell(document(3, spec(), tier2=fronted(tmp_path, "displaced")))
    text = running.http.get("/metrics").text
    assert "kvss_tier2_front_waiting_columns 0" in text
    assert "kvss_tier2_front_waiting_seconds" not in text, "as long as there is room"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"kind": "posix", "path": "/kv", "front": ("/kv/front", 1, "back")}, "within each other"),
        ({"kind": "posix", "path": "/kv/a", "front": ("/kv", 1, "back")}, "within each other"),
        ({"kind": "s3", "bucket": "b", "front": ("/kv", 1, "displaced")}, "a bucket cannot say since"),
        ({"kind": "s3", "bucket": "b", "front": ("kv", 1, "back")}, "needs an absolute path"),
        ({"kind": "s3", "bucket": "b", "front": ("/kv", 0, "back")}, "more than nothing"),
    ],
)
def test_fronts_that_make_no_sense_are_refused(told: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Tier2Settings(
            **{name: value for name, value in told.items() if name != "front"},
            cap_bytes=1,
            front=FrontSettings(*told["front"]),
        )


# Documents that come while an agent is there


async def stored_once(stores: Stores, told: Tier2Settings) -> None:
    await stores.use(told)
    assert stores.progress.state == "ready", stores.progress.reason
    assert stores.current
    assert await put(stores.current, address_of(1)) == "stored"


def displaced(tmp_path: Path, store: str = "store") -> Tier2Settings:
    front = FrontSettings(str(tmp_path / "front"), CAP, Writes.DISPLACED)
    return Tier2Settings("posix", CAP, path=str(tmp_path / store), front=front)


async def test_the_same_store_by_another_name_leaves_nothing_in_the_front_of_the_first(
    tmp_path: Path,
) -> None:
    stores = Stores(tmp_path, lambda _: None)
    await stored_once(stores, displaced(tmp_path))
    (tmp_path / "alias").symlink_to(tmp_path / "store")
    await stores.use(displaced(tmp_path, "alias"))
    assert not files(tmp_path / "front")
    assert stores.current
    assert await get(stores.current, address_of(1)) == "hit"
    await stores.close()


async def test_a_retiring_store_keeps_its_front_whoever_names_it_without(tmp_path: Path) -> None:
    """The description lost the front, and then the store, while its agent was away."""
    told = displaced(tmp_path)
    before = Stores(tmp_path, lambda _: None)
    await stored_once(before, told)
    await before.close()
    stores = Stores(tmp_path, lambda _: None)
    stores.remember()
    await stores.use(None)
    await stores.retire([replace(told, front=None)])
    await asyncio.to_thread(
        wait_until, "it is open", lambda: stores.states() == {told.place: "retiring"}
    )
    (one,) = stores.retiring().values()
    assert (await one.purge(tag=ACME)).columns == 1
    assert not files(tmp_path / "front")
    await stores.close()


async def test_a_store_that_does_not_open_leaves_no_threads_that_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Failed(Fault.UNREACHABLE, "away")

    monkeypatch.setattr(Posix, "files", fail)
    stores = Stores(tmp_path, lambda _: None)
    await stores.use(displaced(tmp_path))
    assert stores.progress.state == "refused"
    assert not [one for one in threading.enumerate() if one.name.startswith("tier2")]
    await stores.close()
