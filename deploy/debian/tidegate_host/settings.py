"""What is in /etc/tidegate/*.env: for each file the settings that have to be there.

Secrets are made once and kept. Those of this machine's own servers are in `servers.env`, which no
process of Tidegate reads; the files of the roles get the addresses with them.
"""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tidegate_host import certificates, env_files, options
from tidegate_host.machine import Failed, Machine
from tidegate_host.options import ETC, Wanted

ACL: Final = Path(__file__).resolve().parent.parent.parent / "redis"
CONSOLE_STATE: Final = "/var/lib/tidegate"
WORK_PORT: Final = 6380
TELEMETRY_PORT: Final = 6381
CONTROL_PORTS: Final = {"agent": 8410, "driver": 8420, "brain": 8430}
AGENT_DATA_PORT: Final = 8411
BRAIN_PORT: Final = 8440
CLUSTER_PORT: Final = 8450
PREFIXES: Final = {"agent": "KVSS_AGENT_", "driver": "SWDRIVER_", "brain": "BRAIN_"}
OWNER: Final = "tidegate_owner"
SOCKETS: Final = "/var/run/postgresql"
OF_GROUPS: Final = frozenset(
    {"replica", "sentinel", "shared"}
)  # users that one new server does not need
USER_LINE: Final = re.compile(r"^user (\w+) on >PASSWORD_\w+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Secrets:
    """Given once, on the command line's environment, and written where they belong."""

    database_url: str = ""
    redis_url: str = ""
    telemetry_url: str = ""
    join_tokens: Mapping[str, str] = field(default_factory=dict)  # by role


@dataclass
class Settings:
    """Of one file."""

    missing: dict[str, str] = field(default_factory=dict)  # set if nothing is there
    asked: dict[str, str] = field(default_factory=dict)  # set whatever is there


def redis_users(server: str) -> dict[str, str]:
    """Of `broker` or `telemetry`: the rules of each user, as `deploy/redis` has them."""
    found = dict(USER_LINE.findall((ACL / f"{server}.acl").read_text()))
    return {name: rules for name, rules in found.items() if name not in OF_GROUPS}


def server_secrets() -> dict[str, str]:
    """Passwords of this machine's own servers: those that there are, and new ones."""
    there = env_files.read(ETC / "servers.env")
    names = ["DATABASE_OWNER"]
    names += [
        f"{server}_{user}".upper() for server in ("broker", "telemetry") for user in redis_users(server)
    ]
    return {name: there.get(name) or secrets.token_urlsafe(32) for name in names}


def write(machine: Machine, wanted: Wanted, told: Secrets, of_servers: Mapping[str, str]) -> None:
    """Bring all files up to date."""
    machine.directory(ETC, 0o755)
    if of_servers:
        _write(machine, "servers", Settings(missing=dict(of_servers)))
    before = options.remembered()
    is_renamed = bool(wanted.name) and wanted.name != before.name
    if before.roles and not wanted.name:  # a node keeps its name when its machine gets another one
        wanted = replace(wanted, name=before.node_name)
    former = settings(before, Secrets(), of_servers) if before.roles else {}
    for name, found in settings(wanted, told, of_servers).items():
        if is_renamed and (setting := f"{PREFIXES.get(name)}NAME") in found.missing:
            found.asked[setting] = wanted.name
        _write(machine, name, found, former.get(name))
    if wanted.is_console and not machine.dry_run:
        _check_console(wanted)


def _write(machine: Machine, name: str, found: Settings, former: Settings | None = None) -> None:
    """`former`: what the options before had made. What is still so goes with the new options."""
    path = ETC / f"{name}.env"
    there = path.read_text() if path.is_file() else ""
    as_made = env_files.parse(there).items() & (former.missing if former else {}).items()
    follows = {name: found.missing[name] for name, _ in as_made if name in found.missing}
    asked = {**follows, **found.asked}
    try:
        text = env_files.merged(there, found.missing, asked, f"Settings of Tidegate: {name}")
    except env_files.Unquotable as error:
        raise Failed(str(error)) from None
    machine.file(path, text, 0o600)


def _check_console(wanted: Wanted) -> None:
    """Raises Failed without the addresses that the console needs."""
    there = {**env_files.read(ETC / "console.env"), **env_files.read(ETC / "prepare.env")}
    for name in ("DATABASE_URL", "REDIS_URL"):
        if name not in there:
            raise Failed(
                f"There is no {name} in {ETC / 'console.env'}: set it in the environment of this "
                "command, write it there, or say --local-servers."
            )
    if wanted.has("orchestrator") and "TIDEGATE_CLUSTER_URL" not in there:
        raise Failed(
            f"The role orchestrator needs the role cluster on this machine, or TIDEGATE_CLUSTER_URL in "
            f"{ETC / 'console.env'}."
        )


def settings(wanted: Wanted, told: Secrets, of_servers: Mapping[str, str]) -> dict[str, Settings]:
    """Name of a file → what it has to have."""
    files: dict[str, Settings] = defaultdict(Settings)
    if wanted.is_console:
        _console(files, wanted, told)
        if of_servers:
            for name, setting, value in _own_servers(wanted, of_servers):
                files[name].missing[setting] = value
        for role in wanted.all_roles:
            if role.is_console:
                _ = files[role.name]
    for name in PREFIXES:
        if wanted.has(name):
            files[name] = _joining(wanted, name, told)
    for number, name in enumerate(wanted.drivers):
        port = CONTROL_PORTS["driver"] + number
        files[f"driver-{name}"].missing |= {
            "SWDRIVER_CONTROL": f"{wanted.anywhere}:{port}",
            "SWDRIVER_CONTROL_URL": f"https://{wanted.host_of_address}:{port}",
            "SWDRIVER_MODEL": str(ETC / f"driver-{name}.json"),
        }
    if wanted.has("cluster"):
        files["cluster"] = _cluster(wanted)
    return dict(files)


def _console(files: dict[str, Settings], wanted: Wanted, told: Secrets) -> None:
    console = files["console"]
    console.missing |= {
        "TIDEGATE_SECRET_KEY": secrets.token_urlsafe(64),
        "TIDEGATE_ALLOWED_HOSTS": f"{wanted.host_of_address},localhost",
        "TIDEGATE_STATE_DIR": CONSOLE_STATE,
        "TIDEGATE_STATIC_DIR": f"{CONSOLE_STATE}/static",
    }
    if wanted.console:
        console.missing["TIDEGATE_PUBLIC_URL"] = wanted.console
    given = {
        "DATABASE_URL": told.database_url,
        "REDIS_URL": told.redis_url,
        "TIDEGATE_TELEMETRY_URL": told.telemetry_url,
    }
    console.asked |= {name: value for name, value in given.items() if value}
    files["worker"].missing["TIDEGATE_WORKER_PROCESSES"] = "2"
    if wanted.has("cluster"):
        console.missing |= {
            "TIDEGATE_CLUSTER_URL": f"https://127.0.0.1:{CLUSTER_PORT}",
            "TIDEGATE_CLUSTER_CA": str(certificates.AUTHORITY),
            "TIDEGATE_CLUSTER_CERTIFICATE": str(certificates.CONSOLE),
            "TIDEGATE_CLUSTER_KEY": str(certificates.CONSOLE_KEY),
        }


def _own_servers(wanted: Wanted, of_servers: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """File, setting and value, by the table of docs/production.md."""

    def work(user: str) -> str:
        password = of_servers[f"BROKER_{user.upper()}"]
        return f"redis://{user}:{password}@127.0.0.1:{WORK_PORT}/0"

    trusted = f"?ssl_ca_certs={certificates.AUTHORITY}"

    def telemetry(user: str) -> str:
        password = of_servers[f"TELEMETRY_{user.upper()}"]
        return f"rediss://{user}:{password}@localhost:{TELEMETRY_PORT}/0{trusted}"

    yield "console", "DATABASE_URL", f"postgresql:///tidegate?host={SOCKETS}"
    yield "console", "TIDEGATE_TELEMETRY_URL", telemetry("console")
    for name in ("web", "worker", "schedule", "orchestrator", "prepare"):
        yield name, "REDIS_URL", work("broker")
    for name in ("ingest", "rollup"):
        yield name, "REDIS_URL", work("observer")
    yield "web", "TIDEGATE_INGEST_URL", telemetry("observer")
    own = f"rediss://own@{wanted.host_of_address}:{TELEMETRY_PORT}/0{trusted}"
    yield "web", "TIDEGATE_OWN_TELEMETRY_URL", own
    yield "worker", "TIDEGATE_REGISTRAR_URL", telemetry("registrar")
    yield "ingest", "TIDEGATE_INGEST_URL", telemetry("ingest")
    yield "orchestrator", "TIDEGATE_ENDPOINTS_URL", telemetry("leader")
    owner = f"postgresql://{OWNER}:{of_servers['DATABASE_OWNER']}@127.0.0.1:5432/tidegate"
    yield "prepare", "DATABASE_URL", owner


def _joining(wanted: Wanted, role: str, told: Secrets) -> Settings:
    prefix = PREFIXES[role]
    found = Settings()
    found.missing[f"{prefix}CONSOLE"] = wanted.console
    if role != "driver":  # whose names and addresses are in files of their own
        port = CONTROL_PORTS[role]
        found.missing |= {
            f"{prefix}NAME": wanted.node_name,
            f"{prefix}CONTROL": f"{wanted.anywhere}:{port}",
            f"{prefix}CONTROL_URL": f"https://{wanted.host_of_address}:{port}",
        }
    if role == "agent":
        found.missing |= {
            f"{prefix}TCP": f"{wanted.anywhere}:{AGENT_DATA_PORT}",
            f"{prefix}DATA_ADDRESS": f"tcp:{wanted.host_of_address}:{AGENT_DATA_PORT}",
        }
    if role == "brain":
        found.missing[f"{prefix}LISTEN"] = f"{wanted.anywhere}:{BRAIN_PORT}"
    if certificates.AUTHORITY.is_file():
        found.missing[f"{prefix}CONSOLE_CA"] = str(certificates.AUTHORITY)
    if wanted.console_url:
        found.asked[f"{prefix}CONSOLE"] = wanted.console_url
    if token := told.join_tokens.get(role):
        found.asked[f"{prefix}JOIN_TOKEN"] = token
    return found


def _cluster(wanted: Wanted) -> Settings:
    address = "127.0.0.1" if wanted.has("orchestrator") else wanted.anywhere
    found = Settings()
    found.missing["CLUSTER_SERVER_LISTEN"] = f"{address}:{CLUSTER_PORT}"
    found.missing["CLUSTER_SERVER_TLS_AUTHORITIES"] = str(certificates.AUTHORITY)
    if wanted.boxes:
        found.asked["CLUSTER_SERVER_BOXES"] = wanted.boxes
    return found
