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
COMMANDS: Final = Path("/usr/local/bin")
MANAGE: Final = Path("/usr/local/sbin/tidegate-manage")
# Files of settings are read by systemd, as for the units: to a shell `&` and `$` are more than text. The
# command itself has this terminal, and gets its signals.
MANAGE_TEXT: Final = """\
#!/usr/bin/python3
# A command of `tidegate manage`, as the owner of the database: tidegate-manage backup FILE
import os, subprocess, sys

files = ("/etc/tidegate/console.env", "-/etc/tidegate/prepare.env")
flags = [f"--property=EnvironmentFile={file}" for file in files]
read = subprocess.run(
    ["systemd-run", "--quiet", "--pipe", "--wait", "--collect", *flags, "env", "-0"],
    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False,
)
if read.returncode:
    sys.exit(read.returncode)
settings = dict(one.split(b"=", 1) for one in read.stdout.split(b"\\0") if one)
os.chdir("/var/lib/tidegate")
os.umask(0o027)
command = ["runuser", "-u", "tidegate", "--", "/opt/tidegate/current/bin/tidegate", "manage"]
os.execvpe(command[0], [*command, *sys.argv[1:]], {**os.environb, **settings})
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
    for place in options.remembered().tier2:
        if place not in wanted.tier2 and Path(place).exists():
            print(f"Kept: {place}, which the agent no longer uses.")
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


def rollback(machine: Machine, wheelhouse: Path | None) -> None:
    """Use the release before, and start everything with it. The database stays as it is: a release works
    with the tables of the next one. Roles that were added since get their packages first."""
    wanted, before = options.remembered(), releases.previous()
    if before is None:
        raise Failed("There is no release before this one.")
    source = releases.kept(before, wanted.extras, wheelhouse)
    release = releases.install(machine, source)
    _keep(machine, source, release)
    releases.switch(machine, release)
    if machine.is_booted:
        _bring_up(machine, wanted, release)
    releases.prune(machine, (release, releases.current(), releases.previous()))


def certificate(machine: Machine, name: str, folder: Path) -> None:
    """Issue one for another machine, and print what to do with it. Raises Failed."""
    made = certificates.for_another(machine, name, folder)
    key = certificates.key_of(made)
    print(
        f"Copy {made}, {key} and {certificates.AUTHORITY} to {name}, and give them to its "
        "`tidegate-host install` with --tls-certificate, --tls-key and --tls-authority. "
        "Then remove the key here."
    )


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
    tier2 = [Path(place).resolve() for place in wanted.tier2]
    if not purge:
        kept = [str(path) for path in (ETC, *states, *tier2) if path.exists()]
        kept += ["the database tidegate in PostgreSQL"] if wanted.local_servers else []
        print(f"Kept: {', '.join(kept) or 'nothing'}.")
        return
    if wanted.local_servers and machine.is_booted:
        servers.drop_database(machine)
    for path in (*states, *tier2):
        machine.absent(path)
    for user in roles.USERS:
        machine.no_user(user)
    machine.no_group(roles.TOKENIZERS_GROUP)
    machine.absent(ETC)  # last: another run knows from it what there is to remove


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


def _bring_up(machine: Machine, wanted: Wanted, release: Path) -> None:
    units = services.wanted_units(wanted)
    services.bring_up(
        machine, [(unit, services.files_of(wanted, unit, role, release)) for unit, role in units]
    )


def _users_and_directories(machine: Machine, wanted: Wanted) -> None:
    machine.group(roles.TOKENIZERS_GROUP)
    for user in dict.fromkeys(role.user for role in wanted.all_roles):
        machine.user(user)
    machine.directory(releases.ROOT, 0o755)
    for state, role in {role.state: role for role in wanted.all_roles}.items():
        # Systemd makes it with the same modes; who migrates wants it before.
        # Through the console's, others get to what they may read in it, and see nothing else.
        mode = 0o751 if role.is_console else 0o700
        machine.directory(Path("/var/lib") / state, mode, role.user, role.user)
    if wanted.is_console:  # what is made in it gets its group
        tokenizers = Path(settings.CONSOLE_STATE) / "tokenizers"
        machine.directory(tokenizers, 0o2750, roles.CONSOLE_USER, roles.TOKENIZERS_GROUP)
    for place in wanted.tier2:
        machine.directory(Path(place), 0o700, "tidegate-node", "tidegate-node")


def _tls(
    machine: Machine, wanted: Wanted, given: tuple[Path, Path] | None, authority: Path | None
) -> None:
    """Certificates of this machine, where a role needs them. Raises Failed."""
    shown = {path for role, path in certificates.SHOWN.items() if wanted.has(role)}
    if wanted.local_servers and wanted.is_console:
        shown.add(certificates.HOST)
    missing = sorted(str(path) for path in shown if not path.is_file())
    has_cluster_beside = wanted.is_console and wanted.has("cluster")
    if given:
        if wanted.local_servers and wanted.is_console:
            raise Failed(
                "The Redis of --local-servers is reached as localhost, which --tls-certificate does not "
                "name: leave one of the two out. A proxy in front can have that certificate instead."
            )
        if has_cluster_beside:
            raise Failed(
                "Engines can read the key of a Cluster Server, so beside a console it gets none of "
                "--tls-key: leave that out, or take the role cluster on another machine."
            )
        certificates.given(machine, sorted(shown), *given, authority)
        return
    if authority:
        certificates.believe(machine, authority)
    is_first = wanted.is_console and not certificates.AUTHORITY.is_file() and len(missing) == len(shown)
    if shown and (certificates.AUTHORITY_KEY.is_file() or is_first):
        certificates.local(
            machine,
            wanted.host,
            sorted(shown),
            is_cluster_here=has_cluster_beside and wanted.has("orchestrator"),
            for_console=has_cluster_beside,
        )
    elif missing:
        raise Failed(
            f"There is no {', no '.join(missing)}, and no authority of this machine's own to issue it. "
            f"`tidegate-host certificate --host {wanted.host}` does that on the console's machine: give "
            "this one its files with --tls-certificate, --tls-key and --tls-authority."
        )
    if certificates.CONSOLE_KEY.is_file():
        text = certificates.CONSOLE_KEY.read_text()
        user = roles.CONSOLE_USER
        machine.file(certificates.CONSOLE_KEY, text, 0o400, user, user)


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
    still runs. Each time: where all is done it does nothing, and the database may be another one."""
    if release != releases.current():
        machine.tell(f"prepare the database for {release.name}")
    if machine.dry_run:
        return
    environment = {**env_files.read(ETC / "console.env"), **env_files.read(ETC / "prepare.env")}
    said = machine.run(
        *(str(release / "bin" / "tidegate"), "manage", "prepare", *(("--wait", "10m") if wait else ())),
        user=roles.CONSOLE_USER,
        environment=environment,
        directory=Path(settings.CONSOLE_STATE),
    )
    for line in said.splitlines():
        if admin := json.loads(line).get("admin"):
            print(f"First admin: {admin['username']}, password: {admin['password']} (shown only once)")


def _commands(machine: Machine, wanted: Wanted) -> None:
    """What a person calls."""
    if not wanted.is_console:
        return
    for name in ("tidegate", "tidegatectl"):
        machine.link(COMMANDS / name, releases.CURRENT / "bin" / name)
    machine.file(MANAGE, MANAGE_TEXT, 0o755)
