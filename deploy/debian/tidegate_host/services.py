"""Units of systemd: which are there, which are enabled, and which have to be started again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tidegate_host import certificates, servers, workloads
from tidegate_host.machine import Failed, Machine, ask
from tidegate_host.options import ETC, Wanted
from tidegate_host.roles import UNITS, Role

SYSTEMD: Final = Path("/etc/systemd/system")
OWN_STATE: Final = Path("/var/lib/tidegate-host")
STARTED: Final = OWN_STATE / "started.json"
HARDENING: Final = ("tidegate-.service.d", "tidegate-cluster.service.d")
LOG_LINES: Final = 20


def instances(wanted: Wanted, role: Role) -> tuple[str, ...]:
    """The names of its units on this machine."""
    names: tuple[str, ...] = ()
    if role.name == "worker":
        names = tuple(str(number) for number in range(1, wanted.workers + 1))
    elif role.name == "driver":
        names = wanted.drivers
    return tuple(
        f"{unit.partition('@')[0]}@{name}.service" if "@" in unit else unit
        for unit in role.units
        for name in (names if "@" in unit else ("",))
    )


def wanted_units(wanted: Wanted) -> list[tuple[str, Role]]:
    """In the order in which they are started."""
    return [(unit, role) for role in wanted.all_roles for unit in instances(wanted, role)]


def write(machine: Machine, wanted: Wanted) -> None:
    """Units and drop-ins, and nothing of what is not wanted any more."""
    before = machine.changes
    texts = {
        SYSTEMD / folder / path.name: path.read_text()
        for folder in HARDENING
        for path in (UNITS / folder).iterdir()
    }
    for role in wanted.all_roles:
        texts |= {SYSTEMD / unit: (UNITS / unit).read_text() for unit in role.units}
    if wanted.has("web") and wanted.https_port != 443:
        path = SYSTEMD / "tidegate-web.socket.d" / "port.conf"
        texts[path] = f"[Socket]\nListenStream=\nListenStream={wanted.https_port}\n"
    if wanted.has("agent") and wanted.tier2:
        path = SYSTEMD / "tidegate-agent.service.d" / "tier2.conf"
        texts[path] = "[Service]\n" + "".join(f"ReadWritePaths={one}\n" for one in wanted.tier2)
    names = {unit for unit, _ in wanted_units(wanted)}
    for link in _enabled():
        if link.name not in names:
            _stop(machine, link.name)
    if workloads.UNIT not in names:
        workloads.end(machine)
    for path, text in texts.items():
        machine.file(path, text)
    for path in _installed():
        if path not in texts:
            machine.absent(path)
    for folder in SYSTEMD.glob("tidegate-*.d"):
        if not any(folder.iterdir()):
            machine.absent(folder)
    if machine.changes != before and machine.is_booted:
        machine.run("systemctl", "daemon-reload")


def remove(machine: Machine) -> None:
    """All units of ours, with what they have started."""
    for link in _enabled():
        _stop(machine, link.name)
    workloads.end(machine)
    for path in (*_installed(), *SYSTEMD.glob("tidegate-*.d")):
        machine.absent(path)
    if machine.is_booted:
        machine.run("systemctl", "daemon-reload")


def enable(machine: Machine, units: Iterable[str]) -> None:
    """Let them start with the machine."""
    enabled = {link.name for link in _enabled(("*",))}
    for unit in units:
        if unit not in enabled:
            machine.tell(f"enable {unit}")
            machine.run("systemctl", "enable", "--quiet", unit)


def bring_up(machine: Machine, units: Iterable[tuple[str, Sequence[Path]]]) -> None:
    """Start what does not run, and start anew what was started with other files than there are now.

    One after the other: a unit is ready before the next one begins. Raises Failed with the last lines of
    its log; the others go on as they are.
    """
    started = json.loads(STARTED.read_text()) if STARTED.is_file() else {}
    for unit, files in units:
        digest = _digest(files)
        is_running = _state(unit) == "active"
        if is_running and (not files or started.get(unit) == digest):
            continue
        verb = "restart" if is_running else "start"
        machine.tell(f"{verb} {unit}")
        if machine.dry_run:
            continue
        try:
            machine.run("systemctl", verb, unit)
        except Failed:
            log = ask("journalctl", "--no-pager", "--quiet", "--lines", str(LOG_LINES), "--unit", unit)
            raise Failed(f"{unit} does not start. The last of its log:\n{log}") from None
        started[unit] = digest
        OWN_STATE.mkdir(parents=True, exist_ok=True)
        STARTED.write_text(json.dumps(started, indent=2) + "\n")


def files_of(wanted: Wanted, unit: str, role: Role, release: Path) -> list[Path]:
    """Whatever it has to be started anew for, if it changes."""
    if unit.endswith(".socket"):  # which changes only with its port
        return [SYSTEMD / unit, SYSTEMD / "tidegate-web.socket.d" / "port.conf"]
    template = f"{unit.partition('@')[0]}@.service" if "@" in unit else unit
    found = [release, SYSTEMD / template]
    found += [ETC / name for name in role.env]
    if role.name == "driver":
        name = unit.partition("@")[2].removesuffix(".service")
        found += [ETC / f"driver-{name}.env", ETC / f"driver-{name}.json"]
    specific = SYSTEMD / f"{template}.d"
    found += sorted(specific.glob("*.conf")) or sorted((SYSTEMD / "tidegate-.service.d").glob("*.conf"))
    if shown := certificates.SHOWN.get(role.name):
        found.append(shown)
    if role.is_console and wanted.has("cluster"):
        found.append(certificates.CONSOLE)
    return found


def states(units: Iterable[str]) -> dict[str, str]:
    """What systemd says of each."""
    return {unit: _state(unit) for unit in units}


def servers_up(machine: Machine) -> None:
    """PostgreSQL and both servers of Redis."""
    enable(machine, ("postgresql.service", *servers.UNITS))
    names = (servers.WORK, servers.TELEMETRY)
    redis = [(servers.unit(name), servers.files(name)) for name in names]
    bring_up(machine, (("postgresql.service", ()), *redis))


def servers_down(machine: Machine) -> None:
    """Those of Redis; PostgreSQL may have other databases."""
    for unit in servers.UNITS:
        if any(link.name == unit for link in _enabled(("redis-server@*",))):
            _stop(machine, unit)
    for name in (servers.WORK, servers.TELEMETRY):
        machine.absent(servers.REDIS / f"redis-{name}.conf")
    machine.absent(servers.DROP_IN.parent)


def _stop(machine: Machine, unit: str) -> None:
    machine.tell(f"stop and disable {unit}")
    if machine.is_booted:
        machine.run("systemctl", "disable", "--quiet", "--now", unit)
    else:
        machine.run("systemctl", "disable", "--quiet", unit)


def _installed() -> list[Path]:
    ours = [*SYSTEMD.glob("tidegate-*.service"), *SYSTEMD.glob("tidegate-*.socket")]
    return [*ours, *SYSTEMD.glob("tidegate-*.d/*.conf")]


def _enabled(patterns: tuple[str, ...] = ("tidegate-*",)) -> list[Path]:
    """What starts with the machine: the links of systemd."""
    return sorted(link for one in patterns for link in SYSTEMD.glob(f"*.wants/{one}"))


def _state(unit: str) -> str:
    try:
        return ask("systemctl", "show", "--property", "ActiveState", "--value", unit).strip()
    except Failed:
        return "unknown"


def _digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path}\0".encode())
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()
