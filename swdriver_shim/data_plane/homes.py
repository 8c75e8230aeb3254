"""Homes of shards, and the pull of a shard's slots from one home to another. Both are callables for a
`Shard`, and values that can be sent to a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvss_agent.client import Address, Credentials, Lost, ShardClient, connect
from swdriver_shim.data_plane.agent_control import AgentControl, PullResult


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """A shard at an agent, with slots of at least `slot_bytes`. Calling it connects, with the
    credentials of that moment.

    Two homes are equal if agent and shard are. An agent is known by its key, where its address names
    one: when it is started anew its address may be another one, as in a pod.
    """

    address: str
    shard: str
    credentials: Callable[[], Credentials]
    slot_bytes: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Home) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, str]:
        return Address.parse(self.address).key or self.address, self.shard

    def at(self, addresses: Mapping[str, str]) -> Home:
        """The same home at the address that its agent has now. `addresses`: of agents, by key."""
        return replace(self, address=addresses.get(Address.parse(self.address).key, self.address))

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
