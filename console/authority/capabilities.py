"""Capabilities for moves, as desired documents carry them.

They end at round times, so a document stays the same between two of those.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from django.utils import timezone

from console.authority import services
from console.fleet.models import Driver, Node
from kvss_agent.security.capabilities import Capability, issue
from kvss_agent.security.certificates import Role
from kvss_agent.security.identity import fingerprint

STEP_SECONDS: Final = 600  # a capability is for one to two of these


def for_move(driver: Driver, to: Node, *, shard: str, source: str, slots: int) -> str | None:
    """Leave for a driver to have a node fetch the slots of a shard from its old home. None where one of
    them has no key yet: then nobody could say whose it is, and the shard starts empty there."""
    if not (driver.public_key and to.public_key):
        return None
    capability = Capability(
        audience=f"{Role.NODE}:{to.name}",
        holder=f"{Role.DRIVER}:{driver.name}",
        holder_key=fingerprint(driver.public_key),
        shard=shard,
        source=source,
        source_shard=shard,
        slots=slots,
        expires_at=_end(timezone.now()),
    )
    return issue(capability, services.signer().sign)


def _end(now: datetime) -> int:
    return (int(now.timestamp()) // STEP_SECONDS + 2) * STEP_SECONDS
