"""Purges and their steps."""

from __future__ import annotations

from django.utils import timezone

from console.control.models import Target
from console.fleet.models import Node, Stamp
from console.operations import services as operations
from console.operations.models import Operation
from kvss_agent.security.identity import ProcessIdentity
from tests.kvss_agent.process import AgentProcess
from tests.live import wait_until
from tests.swdriver_shim.daemons import C

TOKENS = list(range(2 * C))


def finished(operation: Operation) -> Operation:
    def is_done() -> bool:
        operations.advance(operation.pk)
        operation.refresh_from_db()
        return operation.done

    wait_until("the purge is done", is_done)
    return operation


def node_of(there: AgentProcess) -> Node:
    """As which an agent has joined, that was told by hand."""
    Target.objects.create(kind="node", name="ax-1", generation=1)
    own = ProcessIdentity.load(there.directory, "node:ax-1")
    return Node.objects.create(
        name="ax-1",
        public_key=own.public_key_pem,
        stamp=Stamp.objects.create(name="a"),
        state="ready",
        held_state="",
        joined_at=timezone.now(),
        control_url=str(there.http.base_url),
        control_token=(there.directory / "token").read_text().strip(),
        heartbeat_sha256=b"x" * 32,
    )
