"""What a machine can be: one table. The units of systemd are in `units/`, as they are installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

UNITS: Final = Path(__file__).resolve().parent.parent / "units"
CONSOLE_USER: Final = "tidegate"
# Whose members read uploaded tokenizers, and nothing else of the console.
TOKENIZERS_GROUP: Final = "tidegate-tokenizers"


@dataclass(frozen=True)
class Role:
    """One kind of process. `units`: with `@` at the end of the stem, one for each instance."""

    name: str
    purpose: str
    units: tuple[str, ...]
    extras: tuple[str, ...]
    user: str
    state: str  # directory below /var/lib
    env: tuple[str, ...]  # files in /etc/tidegate that it reads

    @property
    def is_console(self) -> bool:
        return self.user == CONSOLE_USER


def _console(name: str, purpose: str, *units: str) -> Role:
    return Role(
        name, purpose, units, ("console",), CONSOLE_USER, "tidegate", ("console.env", f"{name}.env")
    )


def _other(name: str, purpose: str, user: str, *more: str, at: str = "") -> Role:
    """`more`: extras beside that of its name. `at`: of a unit for each instance."""
    unit = f"tidegate-{name}{at}.service"
    return Role(name, purpose, (unit,), (name, *more), user, f"tidegate-{name}", (f"{name}.env",))


# In the order in which they are started: whoever takes work in is ready before somebody asks.
ROLES: Final = {
    role.name: role
    for role in (
        _console("ingest", "numbers from Redis into PostgreSQL", "tidegate-ingest.service"),
        _console("rollup", "roll-ups of numbers", "tidegate-rollup.service"),
        _console("worker", "tasks of the console", "tidegate-worker@.service"),
        _console("schedule", "periodic tasks", "tidegate-schedule.service"),
        _console("orchestrator", "tells a Cluster Server what to run", "tidegate-orchestrator.service"),
        _console("web", "pages and API, over TLS", "tidegate-web.socket", "tidegate-web.service"),
        _other(
            "cluster",
            "Cluster Server: runs instances of workloads on this machine",
            "tidegate-cluster",
            "manager",
        ),
        _other("brain", "the way in for requests", "tidegate-brain"),
        _other("agent", "KVSS agent: stores columns", "tidegate-node"),
        _other("driver", "drivers as daemons, one for each --driver", "tidegate-node", at="@"),
    )
}
# A word for several of them, in --roles.
SETS: Final = {"console": ("ingest", "rollup", "worker", "schedule", "web")}
USERS: Final = tuple(dict.fromkeys(role.user for role in ROLES.values()))
STATES: Final = tuple(dict.fromkeys(role.state for role in ROLES.values()))


def chosen(text: str) -> tuple[Role, ...]:
    """The roles that a comma-separated list names, in the order of the table. Raises ValueError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ROLES and name not in SETS:
            raise ValueError(f"“{name}” is no role. Roles: {', '.join((*SETS, *ROLES))}.")
    wanted = {one for name in names for one in SETS.get(name, (name,))}
    if not wanted:
        raise ValueError("--roles names no role.")
    return tuple(role for role in ROLES.values() if role.name in wanted)
