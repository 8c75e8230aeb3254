"""Settings of tier 2, and what is stored there by an agent that is a process."""

from __future__ import annotations

from pathlib import Path

from kvss_agent.client import Miss, Recalled, TierAnswer, Wanted
from tests.kvss_agent.plane import TAG, column, kv
from tests.kvss_agent.process import AgentProcess
from tests.live import wait_until


def tier2(path: Path, cap_bytes: int = 64 << 20) -> dict[str, object]:
    return {"kind": "posix", "path": str(path), "cap_bytes": cap_bytes}


def keep(running: AgentProcess, name: str = "x", tag: bytes = TAG) -> None:
    """A column in the store that is in use."""
    with running.client() as shard:
        number = shard.evict(0, column(name).key, tag, 64, kv())
        assert shard.spill([Wanted(0, column(name, number, tag=tag))]) == [TierAnswer.DONE]
        shard.delete([0])


def recall(running: AgentProcess, name: str = "x", tag: bytes = TAG) -> Recalled | Miss:
    with running.client() as shard:
        [found] = shard.recall([Wanted(1, column(name, tag=tag))])
        return found


def purge(running: AgentProcess, tag: bytes = TAG) -> int:
    """How many files went; waits while some store is not open yet."""
    wait_until(
        "all stores are open",
        lambda: running.http.post("/v1/purge", json={"tag": "f" * 32}).status_code != 503,
    )
    answer = running.http.post("/v1/purge", json={"tag": tag.hex()})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["columns"])


def files(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file()]


def retiring(running: AgentProcess) -> dict[str, str]:
    """State by path."""
    told = running.observed()["tier2"]["retiring"]
    return {one["place"].removeprefix("posix:"): one["state"] for one in told}
