"""Real agents and drivers, known to the console as if they had joined; and the control loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.utils import timezone

from console.control import rounds
from console.fleet.membership import liveness
from console.fleet.models import Driver, Node, Watch
from console.operations import services as operations
from console.operations.models import Operation
from console.placement.topology import State
from console.sessions.changes import replacements
from console.sessions.steps import former_homes
from kvss_agent.security.certificates import Role
from telemetry.models import Source
from tests.console.sessions.fleets import make_box, make_driver, make_node
from tests.control_api import NO_CONSOLE, as_console, certified
from tests.kvss_agent.process import AgentProcess, agent
from tests.live import wait_until
from tests.swdriver_shim.daemons import CONTROL, Daemon

EACH = (64, 64, 64, 64)
MODEL = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": list(EACH)}]}
MEMORY_BYTES = 4 << 20


@dataclass
class Plane:
    directory: Path
    stack: contextlib.ExitStack
    agents: dict[str, AgentProcess] = field(default_factory=dict)
    drivers: dict[str, Daemon] = field(default_factory=dict)
    still: set[str] = field(default_factory=set)  # agents whose heartbeats do not arrive
    is_far: bool = False  # drivers reach agents over TLS, at a port that is another one at each start

    def add_node(
        self, name: str, *leaves: str, memory_bytes: int = MEMORY_BYTES, tier2: Path | None = None
    ) -> Node:
        identity = certified(self.directory / name, Role.NODE, name)
        over_tcp = ("--tcp", "127.0.0.1:0") if self.is_far else ()
        options = ("--name", name, "--console", NO_CONSOLE, *over_tcp)
        started = self.stack.enter_context(
            agent(self.directory / name, *options, tls=as_console(identity))
        )
        self.agents[name] = started
        return make_node(
            name,
            *leaves,
            memory_bytes=memory_bytes,
            control_url=str(started.http.base_url),
            control_token=(started.directory / "token").read_text().strip(),
            data_address=self.data_address(name),
            public_key=identity.public_key_pem,
            declared=declared_with(tier2),
        )

    def data_address(self, name: str) -> str:
        """Of this agent, as its heartbeats tell it."""
        one = self.agents[name]
        return f"tls:127.0.0.1:{one.tcp}" if self.is_far else f"unix:{one.directory}/data.sock"

    def start_again(self, name: str) -> None:
        """Start an agent that has died, and take what it tells."""
        one = self.agents[name]
        one.start()
        told = {"control_url": str(one.http.base_url), "data_address": self.data_address(name)}
        Node.objects.filter(name=name).update(**told)

    def add_driver(self, name: str) -> Driver:
        identity = certified(self.directory / name, Role.DRIVER, name)
        options = ("--name", name, "--console", NO_CONSOLE)
        daemon = Daemon(self.directory / name, *options, tls=as_console(identity))
        self.drivers[name] = daemon
        self.stack.callback(daemon.stop)
        return make_driver(
            name,
            MODEL,
            control_url=str(daemon.http.base_url),
            control_token=CONTROL,
            public_key=identity.public_key_pem,
        )

    def slots(self, node: str) -> dict[str, int]:
        """The shards that an agent says it has, and how large."""
        return {one["name"]: one["slots"] for one in self.agents[node].observed()["shards"]}

    def beat(self) -> None:
        """Heartbeats of the agents and drivers that run, as the console takes them."""
        now = timezone.now()
        began = now - timedelta(hours=1)
        Watch.objects.update_or_create(pk=1, defaults={"listening_since": began, "swept_at": now})
        web = {
            "kind": "web",
            "topic": "web:here",
            "version": "1",
            "host": "here",
            "process_id": 1,
            "sequence": 0,
        }
        Source.objects.update_or_create(
            name="web@here", defaults={**web, "started_at": began, "seen_at": now}
        )
        alive = [
            name
            for name, one in self.agents.items()
            if one.process.poll() is None and name not in self.still
        ]
        for node in Node.objects.filter(name__in=alive, state=State.LOST.value):
            node.state, node.held_state = node.held_state, ""
            node.save()
        Node.objects.filter(name__in=alive).update(last_heartbeat_at=now)
        drivers = [name for name, one in self.drivers.items() if one.process.poll() is None]
        Driver.objects.filter(name__in=drivers).update(last_heartbeat_at=now, lost_at=None)

    def tend(self) -> None:
        """One round of what a running console does all the time."""
        self.beat()
        liveness.find_lost(timezone.now())
        replacements.look(timezone.now())
        former_homes.forget_emptied()
        for operation in operations.take_due(timezone.now()):
            while operations.advance(operation):
                pass
        push()


def declared_with(tier2: Path | None) -> dict[str, Any]:
    """What is declared of a node that has its tier 2 in this directory."""
    return {"tier2": {"kind": "posix", "path": str(tier2), "cap": "1GiB"}} if tier2 else {}


def push() -> None:
    """What the workers of a running console do all the time."""
    rounds.push([("node", "*"), ("driver", "*")])


def run(operation: Operation) -> Operation:
    """Advance it as the sweep does, with the control loop beside it, until it has ended or is stuck."""

    def ended() -> bool:
        while operations.advance(operation.pk):
            pass
        push()
        operation.refresh_from_db()
        return operation.done or operation.state == "stuck"

    wait_until(f"{operation.sentence} ends", ended, 60)
    return operation


@contextlib.contextmanager
def plane(
    directory: Path,
    nodes: int = 2,
    boxes: int = 4,
    tier2: Path | None = None,
    *,
    is_far: bool = False,
) -> Iterator[Plane]:
    """Agents `ax1` and on, all with a NIC on every leaf, boxes `cs1` and on, and one tier 2 for all."""
    with contextlib.ExitStack() as stack:
        made = Plane(directory, stack, is_far=is_far)
        for number in range(1, nodes + 1):
            made.add_node(f"ax{number}", "l1", "l2", "l3", "l4", tier2=tier2)
        for number in range(1, boxes + 1):
            make_box(f"cs{number}")
        yield made
