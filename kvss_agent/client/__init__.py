"""Using a shard from another process: the library that drivers use.

    with connect("unix:/run/kvss/data.sock", "job7.full.0", Credentials("job7", secret)) as shard:
        number = shard.evict(slot, key, tag, 64, kv)
        [found] = shard.refill([Wanted(slot, Column(key, tag, number))], [place])

Two transports, one interface (`ShardClient`). `shm` maps the arena of an agent on the same node: an
evict is one copy and one store, a refill reads in place, and neither makes a system call. `stream` goes
over a Unix socket or TCP.

A driver is the only writer of its shard, and it alone says which column lies in which slot. Both ends
trust one another with the arena; what protects a reader from mistakes is the seal of every column.
"""

from __future__ import annotations

from typing import Literal

from kvss_agent import native
from kvss_agent.client.connection import Credentials, Lost
from kvss_agent.client.interface import (
    TIER_SECONDS,
    WAIT_SECONDS,
    Evict,
    NotApplied,
    NotListed,
    Purged,
    Recalled,
    ShardClient,
    Views,
)
from kvss_agent.client.requests import Wanted
from kvss_agent.client.shared import SharedClient
from kvss_agent.client.stream import StreamClient
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Cause
from kvss_agent.data_plane.wire import Lender, TierAnswer
from kvss_agent.mover import Mover
from kvss_agent.shard.seal import Column, Header, Miss

Transport = Literal["auto", "shm", "stream"]

__all__ = [
    "TIER_SECONDS",
    "WAIT_SECONDS",
    "Address",
    "Cause",
    "Column",
    "Credentials",
    "Evict",
    "Header",
    "Lender",
    "Lost",
    "Miss",
    "NotApplied",
    "NotListed",
    "Purged",
    "Recalled",
    "ShardClient",
    "SharedClient",
    "StreamClient",
    "TierAnswer",
    "Views",
    "Wanted",
    "connect",
]


def connect(
    address: str | Address,
    shard: str,
    credentials: Credentials,
    *,
    transport: Transport = "auto",
    mover: Mover | None = None,
    write: bool = True,
) -> ShardClient:
    """A shard, ready to be used. Raises Lost where that cannot be.

    Bytes are moved by `mover`, or else by the mover of this process (`kvss_agent.native.current`), also
    when that changes.

    `auto` shares the arena where the agent is on this node, that is, behind a Unix socket. Without
    `write` the shard is only read; there may be many readers, and only one driver that writes.
    """
    where = address if isinstance(address, Address) else Address.parse(address)
    if transport == "shm" and not where.path:
        raise ValueError("an arena is shared over a Unix socket only")
    first = mover or native.current()
    client: SharedClient | StreamClient
    if write and where.path and transport != "stream":
        client = SharedClient(where, shard, credentials, first)
    else:
        client = StreamClient(where, shard, credentials, first, write=write)
    if mover is None:
        native.follow(client)
    return client
