"""What an operator asks for, and what this machine remembers of it for the next run."""

from __future__ import annotations

import dataclasses
import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tidegate_host import roles
from tidegate_host.machine import Failed
from tidegate_host.roles import Role

ETC: Final = Path("/etc/tidegate")
REMEMBERED: Final = ETC / "host.json"
WORKERS_MAX: Final = 64


@dataclass(frozen=True)
class Wanted:
    """What this machine is to be. All of it is remembered; secrets are not among it."""

    roles: tuple[str, ...] = ()
    host: str = field(default_factory=socket.getfqdn)
    https_port: int = 443
    workers: int = 1
    local_servers: bool = False
    console_url: str = ""
    name: str = ""
    drivers: tuple[str, ...] = ()
    boxes: str = ""
    tier2: tuple[str, ...] = ()

    @property
    def all_roles(self) -> tuple[Role, ...]:
        return roles.chosen(",".join(self.roles))

    def has(self, role: str) -> bool:
        return role in self.roles

    @property
    def is_console(self) -> bool:
        return any(role.is_console for role in self.all_roles)

    @property
    def extras(self) -> tuple[str, ...]:
        return tuple(sorted({extra for role in self.all_roles for extra in role.extras}))

    @property
    def host_of_address(self) -> str:
        """As it is written before a port."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def anywhere(self) -> str:
        """Where its processes listen, before a port: at all addresses of its family, and of IPv4."""
        return "[::]" if ":" in self.host else "0.0.0.0"  # noqa: S104 - TLS, and certificates or tokens

    @property
    def node_name(self) -> str:
        """Of its agent and its brain, in the fleet."""
        return self.name or self.host.partition(".")[0]

    @property
    def console(self) -> str:
        """Where agents, drivers and brains of this machine find the console."""
        if self.console_url or not self.has("web"):
            return self.console_url
        return f"https://{self.host_of_address}" + (
            "" if self.https_port == 443 else f":{self.https_port}"
        )

    def check(self) -> None:
        """Raises Failed for what contradicts itself."""
        if not self.roles:
            raise Failed(
                "Say with --roles what this machine is to be; `install --help` lists the roles."
            )
        joining = [name for name in ("brain", "agent", "driver") if self.has(name)]
        if joining and not self.console:
            raise Failed(f"Say with --console which console {', '.join(joining)} of this machine joins.")
        if ":" in self.node_name and (self.has("brain") or self.has("agent")):
            raise Failed(
                "Say with --name what this machine is called in the fleet: --host is an address."
            )
        if self.has("driver") != bool(self.drivers):
            raise Failed("The role driver needs --driver NAME, once for each driver, and only it does.")
        if relative := [place for place in self.tier2 if not Path(place).is_absolute()]:
            raise Failed(f"--tier2 {relative[0]}: give the whole path, which begins with a slash.")
        if not 1 <= self.workers <= WORKERS_MAX:
            raise Failed(f"--workers is 1 to {WORKERS_MAX}.")


def remembered() -> Wanted:
    """What an earlier run has installed; nothing where none was. Raises Failed."""
    if not REMEMBERED.is_file():
        return Wanted()
    try:
        found: dict[str, Any] = json.loads(REMEMBERED.read_text())
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
        }
        return Wanted(**values)
    except (ValueError, TypeError) as error:
        raise Failed(f"{REMEMBERED} can't be read: {error}.") from None


def as_text(wanted: Wanted) -> str:
    return json.dumps(dataclasses.asdict(wanted), indent=2) + "\n"
