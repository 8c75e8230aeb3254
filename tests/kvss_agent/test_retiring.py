"""Stores of tier 2 that are no longer used: an agent looks after them until nothing is left there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvss_agent.client import Miss, Recalled, TierAnswer
from kvss_agent.tier2.address import Scope
from kvss_agent.tier2.backend import Failed, Fault
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.settings import Tier2Settings
from kvss_agent.tier2.stores import NotOpen, Stores
from tests.kvss_agent.plane import TAG, column
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.stores import files, keep, purge, recall, retiring, tier2
from tests.kvss_agent.tier2.columns import ACME, BOLT, address_of, opened, put, put_many
from tests.live import wait_until

pytestmark = pytest.mark.slow  # most start a process

OTHER = b"org-b".ljust(16, b"\0")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[AgentProcess]:
    with agent(tmp_path / "a") as made:
        yield made


def test_what_a_path_holds_that_is_no_longer_used_is_purged_and_never_served_again(
    running: AgentProcess, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    running.tell(document(1, spec(), tier2=tier2(old)))
    keep(running)
    keep(running, "y", OTHER)
    running.tell(document(2, spec(), tier2=tier2(new)))
    assert retiring(running) == {str(old): "retiring"}
    assert recall(running) is Miss.ABSENT, "it is not in use"
    assert purge(running) == 1
    assert len(files(old)) == 1, "the other org's"
    running.tell(document(3, spec(), tier2=tier2(old)))
    assert recall(running) is Miss.ABSENT
    assert isinstance(recall(running, "y", OTHER), Recalled)
    wait_until("the other one is empty", lambda: retiring(running) == {})


@pytest.mark.parametrize("then", ["another", "none"])
def test_a_store_is_looked_after_though_the_agent_is_killed(
    running: AgentProcess, tmp_path: Path, then: str
) -> None:
    old = tmp_path / "old"
    running.tell(document(1, spec(), tier2=tier2(old)))
    keep(running)
    more = {"tier2": tier2(tmp_path / "new")} if then == "another" else {}
    running.tell(document(2, spec(), **more))
    running.kill()
    running.start()
    wait_until("it is ready", lambda: running.observed()["ready"])
    assert purge(running) == 1
    assert not files(old)
    wait_until("it is forgotten", lambda: retiring(running) == {})
    kept = json.loads((running.directory / "stores.json").read_text())
    assert [one["path"] for one in kept] == [str(tmp_path / "new")][: then == "another"]


def test_a_driver_purges_and_deletes_in_a_store_that_is_retiring(
    running: AgentProcess, tmp_path: Path
) -> None:
    running.tell(document(1, spec(), tier2=tier2(tmp_path / "old")))
    keep(running)
    keep(running, "y")
    for generation, told in enumerate(({"tier2": tier2(tmp_path / "new")}, {}), start=2):
        running.tell(document(generation, spec(), **told))
        with running.client() as shard:
            if told:
                assert shard.tier_delete([column("x")]) == [TierAnswer.DONE]
                assert len(files(tmp_path / "old")) == 1
            else:
                purged = shard.purge(TAG)
                assert purged is not None
                assert purged.files == 1
    assert not files(tmp_path / "old")


def test_what_is_too_old_expires_in_a_store_that_is_retiring_until_it_is_empty(
    running: AgentProcess, tmp_path: Path
) -> None:
    told = {**tier2(tmp_path / "old"), "ttl_seconds": 2}
    running.tell(document(1, spec(), tier2=told))
    began = time.monotonic()
    keep(running)
    running.tell(document(2, spec(), tier2={**told, "path": str(tmp_path / "new")}))
    assert files(tmp_path / "old") or time.monotonic() - began > 1, "it was too early"
    wait_until("it is empty", lambda: not files(tmp_path / "old"))
    wait_until("it is forgotten", lambda: retiring(running) == {})


def test_a_retiring_store_that_a_document_names_is_looked_after_and_emptied_if_it_may_hold_nothing(
    tmp_path: Path,
) -> None:
    """Also by an agent that has never seen it: its state was lost."""
    old = tmp_path / "old"
    with agent(tmp_path / "a") as first:
        first.tell(document(1, spec(), tier2=tier2(old)))
        keep(first)
    with agent(tmp_path / "b") as second:
        second.tell(document(1, spec(), retiring=[tier2(old)]))
        wait_until("it is open", lambda: retiring(second) == {str(old): "retiring"})
        [told] = second.observed()["tier2"]["retiring"]
        assert (told["files"], told["bytes"] > 0) == (1, True)
        second.tell(document(2, spec(), retiring=[{**tier2(old), "cap_bytes": 0}]))
        wait_until("it is drained", lambda: retiring(second) == {str(old): "empty"})
        assert not files(old)
        second.tell(document(3, spec()))
        assert retiring(second) == {}


def test_a_store_that_cannot_be_opened_is_no_store_without_files(
    running: AgentProcess, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    running.tell(document(1, spec(), tier2=tier2(old)))
    keep(running)
    running.kill()
    old.rename(tmp_path / "aside")
    old.write_text("no directory")
    running.start()
    running.tell(document(2, spec()))
    wait_until("it says so", lambda: retiring(running) == {str(old): "refused"})
    answer = running.http.post("/v1/purge", json={"tag": TAG.hex()})
    assert (answer.status_code, str(old) in answer.text) == (503, True)
    with running.client() as shard:
        assert shard.purge(TAG) is None
        assert shard.tier_delete([column("x")]) == [Miss.REFUSED]
    old.unlink()
    (tmp_path / "aside").rename(old)
    assert purge(running) == 1
    assert not files(old)


def test_the_same_directory_by_another_name_is_the_same_store(
    running: AgentProcess, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "old")
    running.tell(document(1, spec(), tier2=tier2(tmp_path / "old")))
    keep(running)
    running.tell(document(2, spec(), tier2=tier2(tmp_path / "link")))
    assert isinstance(recall(running), Recalled)
    wait_until("nothing is retiring", lambda: retiring(running) == {})
    assert len(files(tmp_path / "old")) == 1


def test_documents_name_each_store_once(running: AgentProcess, tmp_path: Path) -> None:
    for told, said in (
        ({"tier2": tier2(tmp_path), "retiring": [tier2(tmp_path)]}, "in use and retiring"),
        ({"retiring": [tier2(tmp_path)] * 2}, "two entries"),
        ({"retiring": [{**tier2(tmp_path), "pth": 1}]}, "unknown field `pth`"),
    ):
        answer = running.http.put("/v1/desired", json=document(1, **told))
        assert (answer.status_code, said in answer.text) == (422, True), answer.text


def test_what_an_agent_used_that_took_no_notes_is_looked_after(
    running: AgentProcess, tmp_path: Path
) -> None:
    """It is updated while its store can't be reached, and told of another one."""
    old = tmp_path / "old"
    running.tell(document(1, spec(), tier2=tier2(old)))
    keep(running)
    running.kill()
    (running.directory / "stores.json").unlink()
    old.rename(tmp_path / "aside")
    old.write_text("no directory")
    running.start()
    running.tell(document(2, spec()))
    assert running.http.post("/v1/purge", json={"tag": TAG.hex()}).status_code == 503


def test_an_agent_that_cannot_know_its_stores_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "stores.json").write_text("[")
    with pytest.raises(AssertionError, match="does not say which stores of tier 2 there were"):
        AgentProcess(tmp_path).start()


# Where others store, too

SMALL = 8192  # a cap that two columns exceed
TEN = [address_of(number) for number in range(10)]


@contextlib.asynccontextmanager
async def stores_of(state: Path) -> AsyncIterator[Stores]:
    """The stores of an agent in this process, with what an earlier life has written down."""
    made = Stores(state, lambda _: None)
    made.remember()
    try:
        yield made
    finally:
        await made.close()


async def retire(made: Stores, *named: Tier2Settings) -> dict[str, str]:
    """State by place, when all that is to be opened has been."""
    await made.retire(named)
    if opening := [one for one in asyncio.all_tasks() if one.get_name().startswith("open ")]:
        await asyncio.wait(opening)
    return made.states()


async def test_a_retiring_store_leaves_alone_what_others_store_there(tmp_path: Path) -> None:
    """Whatever its cap says, which is about what one agent stores. Also when it is opened again."""
    shared = tmp_path / "shared"
    async with opened(shared) as others:
        async with stores_of(tmp_path) as made:
            await made.use(Tier2Settings("posix", SMALL, path=str(shared)))
            await made.use(None)
            await made.retire(())
            assert await put_many(others, TEN) == ["stored"] * 10
            for _ in range(2):
                await made.expire()
            assert len(files(shared)) == 10
        async with stores_of(tmp_path) as made:
            assert await retire(made) == {f"posix:{shared}": "retiring"}
            await made.expire()
            assert len(files(shared)) == 10
            named = Tier2Settings("posix", SMALL, path=str(shared))
            await retire(made, named)
            await retire(made, replace(named, cap_bytes=2 * SMALL))
            assert len(files(shared)) == 10


async def test_only_who_is_told_so_drains_a_retiring_store(tmp_path: Path) -> None:
    """And not who was told to store nothing there while it was in use."""
    shared = tmp_path / "shared"
    nothing = Tier2Settings("posix", 0, path=str(shared))
    async with opened(shared) as others, stores_of(tmp_path) as made:
        await made.use(nothing)
        await made.use(None)
        await put_many(others, TEN)
        await retire(made)
        await made.expire()
        assert len(files(shared)) == 10
        await retire(made, nothing)
        await made.expire()
        assert not files(shared)
        assert made.states() == {f"posix:{shared}": "empty"}


async def test_a_retiring_store_keeps_nothing_of_an_org_that_may_have_nothing(tmp_path: Path) -> None:
    """That is a policy, and holds for all agents."""
    shared = tmp_path / "shared"
    caps = {ACME.hex(): 0, BOLT.hex(): SMALL}
    async with opened(shared) as others, stores_of(tmp_path) as made:
        await put_many(others, TEN)
        await put_many(others, [address_of(number, BOLT) for number in range(10)])
        told = Tier2Settings("posix", SMALL, path=str(shared))
        await retire(made, told)
        assert len(files(shared)) == 20
        await retire(made, replace(told, org_caps=caps))
        assert len(files(shared)) == 10


async def test_a_store_that_could_not_be_drained_is_drained_later(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    told = Tier2Settings("posix", SMALL, path=str(shared))
    async with opened(shared) as others:
        await put_many(others, TEN)
    async with stores_of(tmp_path) as made:
        await retire(made, told)
        shared.rename(tmp_path / "aside")
        shared.write_text("no directory")
        drained = replace(told, cap_bytes=0)
        assert await retire(made, drained) == {told.place: "refused"}
        shared.unlink()
        (tmp_path / "aside").rename(shared)
        assert await retire(made, drained) == {told.place: "retiring"}
        assert not files(shared)


async def test_a_store_that_is_used_again_while_it_is_listed_stays_open(tmp_path: Path) -> None:
    told = Tier2Settings("posix", 1 << 20, path=str(tmp_path / "old"))
    async with stores_of(tmp_path) as made:
        await made.use(told)
        await made.use(None)
        await asyncio.gather(made.expire(), made.use(told))
        assert made.current
        assert await put(made.current, TEN[0]) == "stored"
        assert json.loads((tmp_path / "stores.json").read_text())


async def test_a_store_that_cannot_be_opened_by_another_name_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its former name it had files, and nobody has looked since."""
    here, alias = tmp_path / "here", tmp_path / "alias"
    here.mkdir()
    alias.symlink_to(here)
    known = Tier2Settings("posix", 1 << 30, path=str(here))

    def refuse(_: Posix) -> None:
        raise Failed(Fault.DENIED, "Permission denied")

    async with stores_of(tmp_path) as made:
        await made.use(known)
        assert made.current is not None
        assert await put_many(made.current, TEN) == ["stored"] * 10
        monkeypatch.setattr(Posix, "open", refuse)
        await made.use(replace(known, path=str(alias), threads=4))
        assert made.progress.state == "refused"
        await made.retire(())
        await made.use(None)
        await retire(made)
        with pytest.raises(NotOpen):  # else a purge would be confirmed without it
            made.everything()
    async with stores_of(tmp_path) as made:
        with pytest.raises(NotOpen):
            made.everything()


async def test_a_store_that_is_no_longer_named_while_it_is_being_opened_is_looked_after(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "files") as others:
        assert await put_many(others, TEN) == ["stored"] * 10
    async with stores_of(tmp_path) as made:
        await made.retire([Tier2Settings("posix", SMALL, path=str(tmp_path / "files"))])
        await retire(made)
        assert len(made.everything()) == 1, "or no purge would ever be confirmed"


async def test_a_store_is_not_empty_because_a_purge_that_failed_was_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others wrote was listed while it was being purged, and stays."""
    shared = tmp_path / "shared"
    told = Tier2Settings("posix", SMALL, path=str(shared))
    async with opened(shared) as others, stores_of(tmp_path) as made:
        await retire(made, told)
        await put_many(others, TEN)
        [store] = made.opened
        rebuild = store.rebuild

        async def purged_meanwhile() -> int:
            with store.closed_to([Scope(TEN[0].tag)]):
                return await rebuild()

        monkeypatch.setattr(store, "rebuild", purged_meanwhile)
        await made.expire()
        assert made.states() == {told.place: "retiring"}
        monkeypatch.undo()
        await made.expire()
        assert store.stats().columns == len(TEN)
