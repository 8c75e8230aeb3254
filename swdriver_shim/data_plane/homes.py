"""Where a shard is, and how its bytes get to another agent when it moves: as callables that a `Shard`
uses, and as values that can be told to a shard in another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvss_agent.client import Credentials, Lost, ShardClient, connect
from swdriver_shim.data_plane.agent_control import AgentControl, PullResult


@dataclass(frozen=True, slots=True)
class Home:
    """A shard at an agent, of at least so large slots. Calling it connects; `credentials` are asked for
    anew each time. Two are equal if they are the same place."""

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
    """How a shard's new agent fetches its slots from the old one. Without `control` it does not, and the
    shard starts empty there."""

    control: AgentControl | None
    shard: str  # at the new agent
    source: str
    source_shard: str
    driver: str

    def __call__(self, slots: Sequence[int], after: int) -> PullResult:
        if self.control is None:
            return PullResult(done=True, bytes=0)
        return self.control.pull(self.shard, self.source, self.source_shard, self.driver, after, slots)
