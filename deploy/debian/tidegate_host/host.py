"""What an operator does with a machine: install, roll back, look, uninstall."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tidegate_host import certificates, env_files, options, releases, roles, servers, services, settings
from tidegate_host.machine import Failed, Machine
from tidegate_host.options import ETC, Wanted
from tidegate_host.settings import Secrets

LOCK: Final = Path("/run/tidegate-host.lock")
NOT_RUNNING: Final = 3  # exit code, as of init scripts
PREPARED: Final = services.OWN_STATE / "prepared"
COMMANDS: Final = Path("/usr/local/bin")
MANAGE: Final = Path("/usr/local/sbin/tidegate-manage")
MANAGE_TEXT: Final = """\
#!/bin/sh
# A command of `tidegate manage`, as the owner of the database: tidegate-manage backup FILE
set -eu
set -a
. /etc/tidegate/console.env
if test -f /etc/tidegate/prepare.env; then . /etc/tidegate/prepare.env; fi
set +a
cd /var/lib/tidegate
umask 027
exec runuser -u tidegate -- /opt/tidegate/current/bin/tidegate manage "$@"
"""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One at a time. Raises Failed."""
    if os.geteuid() != 0:
        raise Failed("Only root can do this: try again with sudo.")
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failed("Another tidegate-host is running.") from None
        yield


def install(
    machine: Machine,
    wanted: Wanted,
    told: Secrets,
    source: releases.Source,
    given_tls: tuple[Path, Path] | None,
    authority: Path | None,
    *,
    start: bool,
    wait_for_migrations: bool,
) -> None:
    """Make this machine what is wanted; what it is already is left alone. Raises Failed."""
    wanted.check()
    own = wanted.local_servers and wanted.is_console
    machine.packages("python3-venv", "openssl", *(servers.PACKAGES if own else ()))
    _users_and_directories(machine, wanted)
    _tls(machine, wanted, given_tls, authority)
    release = releases.install(machine, source)
    _keep(machine, source, release)
    of_servers = settings.server_secrets() if own else {}
    settings.write(machine, wanted, told, of_servers)
    if own:
        servers.configure_redis(machine, of_servers)
    services.write(machine, wanted)
    machine.file(options.REMEMBERED, options.as_text(wanted))
    is_startable = start and machine.is_booted
    if own and is_startable:
        services.servers_up(machine)
        servers.create_database(machine, of_servers)
    if wanted.is_console and is_startable:
        _prepare(machine, release, wait=wait_for_migrations)
    releases.switch(machine, release)
    _commands(machine, wanted)
    services.enable(machine, [unit for unit, _ in services.wanted_units(wanted)])
    if is_startable:
        _bring_up(machine, wanted, release)
    else:
        print("Nothing was started: " + ("systemd is not process 1 here." if start else "as asked."))
    releases.prune(machine, (release, releases.current(), releases.previous()))
    if machine.changes == 0:
        print("Nothing to change.")


def rollback(machine: Machine) -> None:
    """Use the release before, and start everything with it. The database stays as it is: a release works
    with the tables of the next one."""
    wanted, before = options.remembered(), releases.previous()
    if before is None:
        raise Failed("There is no release before this one.")
    releases.switch(machine, before)
    if machine.is_booted:
        _bring_up(machine, wanted, before)


def uninstall(machine: Machine, *, purge: bool) -> None:
    """Remove what was installed. Data and settings stay, unless `purge`."""
    wanted = options.remembered()
    services.remove(machine)
    for name in ("tidegate", "tidegatectl"):
        link = COMMANDS / name
        if link.is_symlink() and link.readlink().is_relative_to(releases.ROOT):
            machine.absent(link)
    for path in (MANAGE, releases.ROOT, services.OWN_STATE):
        machine.absent(path)
    if wanted.local_servers:
        services.servers_down(machine)
    states = [Path("/var/lib") / name for name in roles.STATES]
    if not purge:
        kept = [str(path) for path in (ETC, *states) if path.exists()]
        kept += ["the database tidegate in PostgreSQL"] if wanted.local_servers else []
        print(f"Kept: {', '.join(kept) or 'nothing'}.")
        return
    if wanted.local_servers and machine.is_booted:
        servers.drop_database(machine)
    for path in (ETC, *states):
        machine.absent(path)
    for user in roles.USERS:
        machine.no_user(user)


def status() -> int:
    """Print what this machine is. Returns 0 if all of it runs, else 3."""
    wanted, release = options.remembered(), releases.current()
    if not wanted.roles or release is None:
        print("Tidegate is not installed on this machine.")
        return NOT_RUNNING
    before = releases.previous()
    print(f"release   {release.name}" + (f" (before: {before.name})" if before else ""))
    print(f"host      {wanted.host}")
    found = services.states(unit for unit, _ in services.wanted_units(wanted))
    for unit, state in found.items():
        print(f"{unit:34}{state}")
    return 0 if set(found.values()) == {"active"} else NOT_RUNNING


def kept_source(extras: tuple[str, ...], wheelhouse: Path | None) -> releases.Source | None:
    """What the release in use was installed from, for other roles."""
    release = releases.current()
    if release is None:
        return None
    [wheel] = (release / "source").glob("*.whl")
    return releases.Source(wheel, release / "source" / "run.txt", extras, wheelhouse)


def _bring_up(machine: Machine, wanted: Wanted, release: Path) -> None:
    units = services.wanted_units(wanted)
    services.bring_up(
        machine, [(unit, services.files_of(wanted, unit, role, release)) for unit, role in units]
    )


def _users_and_directories(machine: Machine, wanted: Wanted) -> None:
    for user in dict.fromkeys((roles.CONSOLE_USER, *(role.user for role in wanted.all_roles))):
        machine.user(user)
    machine.directory(releases.ROOT, 0o755)
    for state, role in {role.state: role for role in wanted.all_roles}.items():
        # Systemd makes it with the same modes; who migrates wants it before.
        mode = 0o750 if role.is_console else 0o700
        machine.directory(Path("/var/lib") / state, mode, role.user, role.user)
    for place in wanted.tier2:
        machine.directory(Path(place), 0o700, "tidegate-node", "tidegate-node")


def _tls(
    machine: Machine, wanted: Wanted, given: tuple[Path, Path] | None, authority: Path | None
) -> None:
    """Certificates of this machine, where a role needs them. Raises Failed."""
    if given:
        certificates.given(machine, *given, authority)
    elif authority:
        certificates.believe(machine, authority)
    if any(wanted.has(name) for name in ("web", "brain", "cluster")) or wanted.local_servers:
        if certificates.AUTHORITY_KEY.is_file() or not certificates.AUTHORITY.is_file():
            if not certificates.HOST.is_file() or certificates.AUTHORITY_KEY.is_file():
                for_console = wanted.is_console and wanted.has("cluster")
                certificates.local(machine, wanted.host, for_console=for_console)
        elif not certificates.HOST.is_file():
            raise Failed("This machine believes another authority: give it a --tls-certificate of that.")
    if certificates.CONSOLE_KEY.is_file():
        text = certificates.CONSOLE_KEY.read_text()
        machine.file(certificates.CONSOLE_KEY, text, 0o640, "root", roles.CONSOLE_USER)


def _keep(machine: Machine, source: releases.Source, release: Path) -> None:
    """The wheel and the lock, for another role later on."""
    if machine.dry_run or (release / "source").is_dir():
        return
    beside = release / ".source.new"
    beside.mkdir(exist_ok=True)
    (beside / source.wheel.name).write_bytes(source.wheel.read_bytes())
    (beside / "run.txt").write_bytes(source.lock.read_bytes())
    beside.rename(release / "source")


def _prepare(machine: Machine, release: Path, *, wait: bool) -> None:
    """Migrate, collect static files and make the first admin: by the new release, while the one before
    still runs."""
    prepared = PREPARED.read_text().splitlines() if PREPARED.is_file() else []
    if release.name in prepared:  # also one that was gone back to
        return
    machine.tell(f"prepare the database for {release.name}")
    if machine.dry_run:
        return
    environment = {**env_files.read(ETC / "console.env"), **env_files.read(ETC / "prepare.env")}
    said = machine.run(
        *(str(release / "bin" / "tidegate"), "manage", "prepare", *(("--wait", "10m") if wait else ())),
        user=roles.CONSOLE_USER,
        environment=environment,
        directory=Path("/var/lib/tidegate"),
    )
    for line in said.splitlines():
        if admin := json.loads(line).get("admin"):
            print(f"First admin: {admin['username']}, password: {admin['password']} (shown only once)")
    PREPARED.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name in prepared if (releases.RELEASES / name).is_dir()]
    PREPARED.write_text("\n".join([*names, release.name]) + "\n")


def _commands(machine: Machine, wanted: Wanted) -> None:
    """What a person calls."""
    if not wanted.is_console:
        return
    for name in ("tidegate", "tidegatectl"):
        machine.link(COMMANDS / name, releases.CURRENT / "bin" / name)
    machine.file(MANAGE, MANAGE_TEXT, 0o755)
