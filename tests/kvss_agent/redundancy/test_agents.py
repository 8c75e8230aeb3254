"""Real agents that store columns for each other, and what is left when some of them die."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvss_agent.client import Miss, Recalled, ShardClient, TierAnswer, Wanted
from kvss_agent.redundancy.layout import SLOTS, fragment_part, fragment_slot_bytes
from kvss_agent.shard.arena import slot_bytes_for
from tests.kvss_agent.plane import PAYLOAD, TAG, column, kv, place
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import wait_until

DATA, PARITY = 2, 1
NAMESPACE = "ab" * 16
COUNT = 12
TCP = ("--tcp", "127.0.0.1:0", "--plain-tcp", "yes")


@dataclass
class Fleet:
    """`home` has the shard; any other can become its home. Each of `holders` has one fragment."""

    home: AgentProcess
    holders: list[AgentProcess]
    folder: Path
    generation: int = 0
    since: dict[Path, float] = field(default_factory=dict)  # of a holder, by its directory

    def tell(self, home: AgentProcess | None = None, holders: list[AgentProcess] | None = None) -> None:
        self.home, self.holders = home or self.home, holders or self.holders
        self.generation += 1
        for number, one in enumerate(self.holders):
            one.tell(self._document(one, self._fragment_shard(number)))
        if self.home not in self.holders:
            self.home.tell(self._document(self.home))

    def restart(self, *agents: AgentProcess) -> None:
        """Their addresses are others then."""
        for one in agents:
            one.start()
        self.tell()

    def _document(self, one: AgentProcess, *shards: dict[str, Any]) -> dict[str, Any]:
        tier2 = {"kind": "posix", "path": str(self.store_of(one)), "cap_bytes": 1 << 30, "shared": False}
        its = [*shards, *([self._shard()] if one is self.home else [])]
        return document(self.generation, *its, tier2=tier2)

    def store_of(self, one: AgentProcess) -> Path:
        return self.folder / f"store-{one.directory.name}"

    def _shard(self) -> dict[str, Any]:
        holders = [
            {
                "address": f"tcp:127.0.0.1:{one.tcp}",
                "shard": f"s.f{number}",
                "since": self.since.get(one.directory, 0.0),
            }
            for number, one in enumerate(self.holders)
        ]
        redundancy = {"data": DATA, "parity": PARITY, "holders": holders}
        return spec("s", 32, namespace=NAMESPACE, part="full.0", redundancy=redundancy)

    @staticmethod
    def _fragment_shard(number: int) -> dict[str, Any]:
        made = spec(f"s.f{number}", SLOTS, namespace=NAMESPACE, is_for_fragments=True)
        slot_bytes = fragment_slot_bytes(slot_bytes_for(PAYLOAD), DATA)
        part = fragment_part("full.0", number, DATA, PARITY)
        return {**made, "slot_bytes": slot_bytes, "part": part}

    def redundancy(self) -> dict[str, Any]:
        shards = {one["name"]: one for one in self.home.observed()["shards"]}
        found: dict[str, Any] = shards["s"].get("redundancy", {"state": "none"})
        return found

    def counts(self) -> dict[str, int]:
        """Of its reads with parity and failing holders, as metrics tell them."""
        names = {f"kvss_redundancy_{one}_total": one for one in ("parity_reads", "holder_faults")}
        lines = [line.split() for line in self.home.http.get("/metrics").text.splitlines()]
        told = {line[0]: int(float(line[1])) for line in lines if line and line[0][0] != "#"}
        return {one: told[f'{name}{{shard="s"}}'] for name, one in names.items()}

    def wait_until_ready(self) -> None:
        wait_until("redundancy is ready", lambda: self.redundancy()["state"] == "ready")


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


def store(client: ShardClient, count: int = COUNT) -> list[bytes]:
    """Store so many columns redundantly, and forget the slots."""
    contents = []
    for number in range(count):
        payload = kv()
        evicted = client.evict(number, column(str(number)).key, TAG, 64, payload)
        asked = [Wanted(number, column(str(number), evicted))]
        assert client.spill(asked, notes=[7], redundant=True) == [TierAnswer.DONE]
        contents.append(bytes(payload))
    assert client.delete(range(count)) is None
    return contents


def recall(client: ShardClient, count: int = COUNT) -> list[bytes | Miss]:
    recalled = client.recall([Wanted(number, column(str(number))) for number in range(count)])
    found: list[bytes | Miss] = []
    for number, one in enumerate(recalled):
        if isinstance(one, Miss):
            found.append(one)
            continue
        assert one == Recalled(one.number, 7)
        into = place()
        (header,) = client.refill([Wanted(number, column(str(number), one.number))], [into])
        found.append(header if isinstance(header, Miss) else bytes(into))
    assert client.delete(range(count)) is None
    return found


def test_any_agent_may_die_and_every_column_comes_back_the_same(fleet: Fleet) -> None:
    with fleet.home.client() as client:
        contents = store(client)
        assert not list(fleet.store_of(fleet.home).glob("*/*/*/*"))
        assert recall(client) == contents
        assert fleet.counts() == {"parity_reads": 0, "holder_faults": 0}
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
    assert "kvss_redundancy_stored_alone_total 2" in metrics


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
