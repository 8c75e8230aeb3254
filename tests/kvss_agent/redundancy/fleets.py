"""Real agents that store columns for each other, and a driver that has columns stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvss_agent.client import Miss, Recalled, ShardClient, TierAnswer, Wanted
from kvss_agent.redundancy.layout import SLOTS, fragment_part, fragment_slot_bytes
from kvss_agent.shard.arena import slot_bytes_for
from tests.kvss_agent.plane import PAYLOAD, TAG, column, kv, place
from tests.kvss_agent.process import AgentProcess, document, spec
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
    redundant: dict[str, Any] = field(default_factory=dict)  # more of how columns are stored

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
        redundancy = {"data": DATA, "parity": PARITY, "holders": holders, **self.redundant}
        return spec("s", 32, namespace=NAMESPACE, part="full.0", redundancy=redundancy)

    @staticmethod
    def _fragment_shard(number: int) -> dict[str, Any]:
        made = spec(f"s.f{number}", SLOTS, namespace=NAMESPACE, is_for_fragments=True)
        slot_bytes = fragment_slot_bytes(slot_bytes_for(PAYLOAD), DATA)
        part = fragment_part("full.0", number, DATA, PARITY)
        return {**made, "slot_bytes": slot_bytes, "part": part}

    def files(self) -> list[Path]:
        """Of all fragments that are stored."""
        return [path for one in self.holders for path in self.store_of(one).glob("*/*/*/*")]

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

    def wait_until_repaired(self) -> None:
        wait_until("all is repaired", lambda: self.redundancy()["incomplete"] == 0)


def store(
    client: ShardClient, count: int = COUNT, kind: str = "", *, redundant: bool = True
) -> list[bytes]:
    """Store so many columns in tier 2, and forget the slots."""
    contents = []
    for number in range(count):
        payload = kv()
        evicted = client.evict(number, column(f"{kind}{number}").key, TAG, 64, payload)
        asked = [Wanted(number, column(f"{kind}{number}", evicted))]
        assert client.spill(asked, notes=[7], redundant=redundant) == [TierAnswer.DONE]
        contents.append(bytes(payload))
    assert client.delete(range(count)) is None
    return contents


def recall(client: ShardClient, count: int = COUNT, kind: str = "") -> list[bytes | Miss]:
    """What is found of them, in the slots of before, which are forgotten again."""
    asked = [Wanted(number, column(f"{kind}{number}")) for number in range(count)]
    recalled = client.recall(asked)
    found: list[bytes | Miss] = []
    for number, one in enumerate(recalled):
        if isinstance(one, Miss):
            found.append(one)
            continue
        assert one == Recalled(one.number, 7)
        into = place()
        (header,) = client.refill([Wanted(number, column(f"{kind}{number}", one.number))], [into])
        found.append(header if isinstance(header, Miss) else bytes(into))
    assert client.delete(range(count)) is None
    return found
