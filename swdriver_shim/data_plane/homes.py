"""Homes of shards, and the pull of a shard's slots from one home to another. Both are callables for a
`Shard`, and values that can be sent to a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvss_agent.client import Credentials, Lost, ShardClient, connect
from swdriver_shim.data_plane.agent_control import AgentControl, PullResult


@dataclass(frozen=True, slots=True)
class Home:
    """A shard at an agent, with slots of at least `slot_bytes`. Calling it connects, with the
    credentials of that moment. Two homes are equal if address and shard are."""

    address: str
    shard: str
    credentials: Callable[[], Credentials] = field(compare=False)
    slot_bytes: int = field(compare=False)

    def __call__(self) -> ShardClient:
        client = connect(self.address, self.shard, self.credentials())
        if client.slot_bytes < self.slot_bytes:
            client.close()
            raise Lost(f"its slots have {client.slot_bytes} bytes; the layout wants {self.slot_bytes}")
        return client


@dataclass(frozen=True, slots=True)
class SlotPull:
    """How the new agent of a shard fetches slots from the old one. Without `control` it fetches none,
    and the shard starts empty."""

    control: AgentControl | None
    shard: str  # at the new agent
    source: str
    source_shard: str
    driver: str

    def __call__(self, slots: Sequence[int], after: int) -> PullResult:
        if self.control is None:
            return PullResult(done=True, bytes=0)
        return self.control.pull(self.shard, self.source, self.source_shard, self.driver, after, slots)
