"""A whole stack with two of everything that there may be two of.

`make up` starts one of each and keeps it. The second ones get the same environment and are kept by
`Kept`. The second web listens by itself, so that connections are refused while it is away; those to the
first one wait in a socket that outlives it. A console has one Cluster Server of the backend `processes`,
since that one's machine is where instances run.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import psutil
import psycopg

from console.stack.endpoint import free_port
from console.stack.services import WEB_SOCKET, console_services, orchestrator_service
from tests.chaos.kept import Kept
from tests.chaos.killer import Victim
from tests.console.workloads import whole
from tests.console.workloads.whole import Served
from tests.hostile.scene import PATIENCE_SECONDS
from tests.live import wait_until
from tests.stack.whole import prepared_stack

DOUBLED: Final = ("web", "worker", "beat", "ingest", "rollup", "orchestrator")
CLUSTER: Final = "cluster"
ONE_ONLY: Final = (CLUSTER,)
BRAINS: Final = ("brain-1", "brain-2")
LONELY: Final = "ax-3"  # an agent that nobody uses, so that alerts about it are all that its end does
WORKLOAD: Final = "chat"
REPLICAS: Final = 2
FLEET: Final = (
    whole.FLEET
    + """
  west:
    leaves: {leaf-2: {}}
    nodes:
      ax-3: {nics: {eth0: {leaf: leaf-2}}, memory: 64M, shards_max: 8}
"""
)
# What a supervisor tells one process, and is no business of another.
TOLD_TO_ONE: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def second(name: str) -> str:
    return f"{name}-2"


@dataclass(frozen=True)
class Place:
    """Where clients ask: an address, and the process that answers there."""

    victim: str
    url: str


@dataclass
class Chaos(Served):
    """`kept`: what we keep running. `brains`: where clients ask."""

    kept: dict[str, Kept] = field(default_factory=dict)
    brains: list[Place] = field(default_factory=list)
    second_web_url: str = ""

    fleet = FLEET
    nodes: ClassVar[tuple[str, ...]] = (*whole.NODES, LONELY)

    def make(self) -> None:
        self.make_fleet()
        self._start_second_ones()
        self.brains = [self._start_brain(name) for name in BRAINS]
        self.wait_for_fleet()
        for victim in self.victims:
            wait_until(f"{victim.name} is ready", victim.ready_pid, PATIENCE_SECONDS)
        self.create(WORKLOAD, replicas=REPLICAS)
        self.wait_until_ready(WORKLOAD)
        for brain in self.brains:
            wait_until(f"{brain.victim} serves", partial(self._serves, brain), whole.UP_SECONDS)

    def stop(self) -> None:
        for one in self.kept.values():
            one.stop()
        super().stop()

    @property
    def webs(self) -> list[Place]:
        return [Place("web", self.console), Place(second("web"), self.second_web_url)]

    @property
    def victims(self) -> list[Victim]:
        ours = [*DOUBLED, *ONE_ONLY]
        of_stack = [Victim(name, name, partial(self._ready_pid, name)) for name in ours]
        kinds = {**{second(name): name for name in DOUBLED}, **dict.fromkeys(BRAINS, "brain")}
        doubles = [
            Victim(kinds[name], name, partial(_ready_pid_of, one)) for name, one in self.kept.items()
        ]
        pools = [
            Victim("worker", f"{one.name} pool", partial(_child, one.ready_pid))
            for one in (*of_stack, *doubles)
            if one.kind == "worker"
        ]
        return [*of_stack, *doubles, *pools]

    def starts(self) -> dict[str, int]:
        """How often each process was started."""
        rows = self.whole.rows()
        of_stack = {name: rows[name].restarts + 1 for name in (*DOUBLED, *ONE_ONLY)}
        return {**of_stack, **{name: one.starts for name, one in self.kept.items()}}

    def last_words(self, name: str) -> str:
        """Why a process of the stack ended, or how its log ends."""
        if row := self.whole.rows().get(name):
            return row.reason
        return " / ".join(self.kept[name].log.read_text(errors="replace").splitlines()[-3:])

    @contextlib.contextmanager
    def database(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        with psycopg.connect(self.settings["DATABASE_URL"], autocommit=True) as connection:
            yield connection

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self.database() as connection:
            return connection.execute(query, values).fetchall()

    def keep_logs(self, directory: Path) -> None:
        """Copy what all processes have said to a directory of this run."""
        logs = [
            *self.directory.glob("*.out"),
            *self.whole.state.glob("logs/*.log"),
            self.whole.said_file,
        ]
        logs += self.directory.glob("*/log")
        directory.mkdir(parents=True, exist_ok=True)
        for log in logs:
            parts = log.relative_to(self.directory).parts
            shutil.copyfile(log, directory / "-".join(parts))

    def processes_left(self) -> list[str]:
        """All processes that were told of our folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                told = process.environ().values()
                if any(str(self.directory) in value for value in told):
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        return found

    def _ready_pid(self, name: str) -> int | None:
        row = self.whole.rows().get(name)
        return row.pid if row and row.state == "ready" else None

    def _start_second_ones(self) -> None:
        port = free_port()
        self.second_web_url = f"http://127.0.0.1:{port}"
        listening = ("--host", "127.0.0.1", "--port", str(port))
        services = {one.name: one for one in (*console_services((), 1), orchestrator_service())}
        for name in DOUBLED:
            command = list(services[name].command)
            if WEB_SOCKET in command:
                at = command.index(WEB_SOCKET)
                command[at - 1 : at + 1] = listening
            self._keep(second(name), command, self._environment_of(name))

    def _environment_of(self, name: str) -> dict[str, str]:
        told = psutil.Process(self.whole.pid(name)).environ()
        return {key: value for key, value in told.items() if key not in TOLD_TO_ONE}

    def _start_brain(self, name: str) -> Place:
        """At the same ports whenever it starts, as clients and the console know it."""
        public, control = free_port(), free_port()
        where = {"LISTEN": f"127.0.0.1:{public}", "CONTROL": f"127.0.0.1:{control}"}
        made = self.new_process("brain", name, **where)
        command = [*self.whole.launch, sys.executable, "-m", *made.module]
        environment = {**self.whole.environment, **made.environment}
        self._keep(name, command, environment)
        return Place(name, f"http://127.0.0.1:{public}")

    def _keep(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.kept[name] = Kept(name, command, environment, self.directory)
        self.kept[name].start()

    def _serves(self, brain: Place) -> bool:
        return self.chat("Hello.", brain_url=brain.url).is_success


def _child(pid_of: Callable[[], int | None]) -> int | None:
    """The newest process that this one has forked."""
    if (pid := pid_of()) is None:
        return None
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[-1]) if children else None
    return None


def _ready_pid_of(one: Kept) -> int | None:
    return one.ready_pid


@contextlib.contextmanager
def chaos(logs: Path) -> Iterator[Chaos]:
    """Nothing of it is left running afterwards, or this raises; what was said is in `logs`."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        with prepared_stack(Path(name)) as stack:
            stack.up()
            made = Chaos(stack, Path(name))
            try:
                made.make()
                yield made
            finally:
                made.stop()
                made.admin.close()
                made.keep_logs(logs)
        # What the supervisor has killed may still be ending, such as a compiler of low priority.
        with contextlib.suppress(AssertionError):
            wait_until("all has ended", lambda: not made.processes_left())
        left = made.processes_left()
        assert left == [], f"left running: {left}"
