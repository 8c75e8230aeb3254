"""Where a node is reached. By its one address; drivers by another, if somebody knows a way for paths of
some kind:

@way
def over_spine(node: Node, tier: Tier) -> str | None: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from console.fleet.models import Node
from console.placement.topology import Tier

Way = Callable[[Node, Tier], str | None]

_ways: Final[list[Way]] = []


def way(function: Way) -> Way:
    _ways.append(function)
    return function


def address(node: Node, tier: Tier) -> str:
    """For the driver of a stream that is placed so."""
    known = (found for one in _ways if (found := one(node, tier)) is not None)
    return _with_key(next(known, node.data_address), node)


def address_for_agents(node: Node) -> str:
    """For other agents: of holders of fragments, and of shards that are borrowed from."""
    return _with_key(node.data_address, node)


def _with_key(found: str, node: Node) -> str:
    """With TLS it names the key that the node has: an address is only where one looks for it."""
    if found.startswith("tls:") and "#" not in found and node.public_key:
        from kvss_agent.security.identity import (
            fingerprint,  # with certificates, for who makes documents
        )

        return f"{found}#{fingerprint(node.public_key)}"
    return found
