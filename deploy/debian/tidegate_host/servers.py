"""PostgreSQL and Redis of this machine, as Debian has them: two servers of Redis, with users by role,
and a database whose tables the console's processes do not own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tidegate_host import certificates
from tidegate_host.machine import Machine, ask
from tidegate_host.settings import OWNER, TELEMETRY_PORT, WORK_PORT, redis_users

PACKAGES: Final = ("postgresql", "redis-server")
WORK: Final = "tidegate-work"
TELEMETRY: Final = "tidegate-telemetry"
REDIS: Final = Path("/etc/redis")
SYSTEMD: Final = Path("/etc/systemd/system")
DATABASE: Final = "tidegate"
CREDENTIALS: Final = Path("/run/credentials") / f"redis-server@{TELEMETRY}.service"


def unit(name: str) -> str:
    return f"redis-server@{name}.service"


UNITS: Final = (unit(WORK), unit(TELEMETRY))
DROP_IN: Final = SYSTEMD / f"{unit(TELEMETRY)}.d" / "tidegate.conf"


def files(name: str) -> tuple[Path, ...]:
    """Of a server of Redis: what it is started with."""
    return (REDIS / f"redis-{name}.conf", *((DROP_IN, certificates.HOST) if name == TELEMETRY else ()))


OF_WORK: Final = ("bind 127.0.0.1 -::1", f"port {WORK_PORT}", "maxmemory 256mb")
OF_TELEMETRY: Final = (
    "port 0",
    f"tls-port {TELEMETRY_PORT}",
    f"tls-cert-file {CREDENTIALS / 'host.pem'}",
    f"tls-key-file {CREDENTIALS / 'host.key'}",
    "tls-auth-clients no",
    "proto-max-bulk-len 1mb",
    "client-query-buffer-limit 4mb",
    "maxmemory 1gb",
)
# Name of a server of Redis → its users, and what it alone has.
SERVERS: Final = {WORK: ("broker", OF_WORK), TELEMETRY: ("telemetry", OF_TELEMETRY)}


def configuration(name: str, of_servers: Mapping[str, str]) -> str:
    users, own = SERVERS[name]
    lines = [
        "# Written by tidegate-host, which writes it again.",
        *own,
        "protected-mode no",  # there is a password for everybody
        "maxmemory-policy noeviction",
        'save ""',
        "dir /var/lib/redis",
        "user default off",
        *_users(users, of_servers),
    ]
    return "\n".join(lines) + "\n"


def configure_redis(machine: Machine, of_servers: Mapping[str, str]) -> None:
    for name in SERVERS:
        text = configuration(name, of_servers)
        machine.file(REDIS / f"redis-{name}.conf", text, 0o640, "root", "redis")
    machine.file(
        DROP_IN,
        "# The certificate of this machine, which only root reads otherwise.\n[Service]\n"
        f"LoadCredential=host.pem:{certificates.HOST}\nLoadCredential=host.key:{certificates.HOST_KEY}\n",
    )


def _users(server: str, of_servers: Mapping[str, str]) -> list[str]:
    """With hashes of their passwords only."""
    lines = []
    for name, rules in redis_users(server).items():
        password = of_servers[f"{server}_{name}".upper()]
        lines.append(f"user {name} on #{hashlib.sha256(password.encode()).hexdigest()} {rules}")
    return lines


def create_database(machine: Machine, of_servers: Mapping[str, str]) -> None:
    """The owner, who migrates, the role of the console's processes, and the database. Whoever is root
    here may log in as anybody; the processes come over the socket, as the user that they are."""
    if machine.dry_run:
        return
    roles = _sql("SELECT rolname FROM pg_roles").splitlines()
    if OWNER not in roles:
        machine.tell(f"make {OWNER} in PostgreSQL")
        _sql(f"CREATE ROLE {OWNER} LOGIN PASSWORD '{of_servers['DATABASE_OWNER']}'")
    if "tidegate" not in roles:
        machine.tell("make role tidegate in PostgreSQL")
        _sql("CREATE ROLE tidegate LOGIN")
    if DATABASE not in _sql("SELECT datname FROM pg_database").splitlines():
        machine.tell(f"make database {DATABASE}")
        _sql(f"CREATE DATABASE {DATABASE} OWNER {OWNER} ENCODING 'UTF8' TEMPLATE template0")
    _sql(
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {OWNER} "
        "GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO tidegate;"
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {OWNER} GRANT USAGE, SELECT ON SEQUENCES TO tidegate",
        DATABASE,
    )


def drop_database(machine: Machine) -> None:
    machine.tell(f"drop database {DATABASE} and its roles")
    if machine.dry_run:
        return
    _sql(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
    _sql(f"DROP ROLE IF EXISTS {OWNER}; DROP ROLE IF EXISTS tidegate")


def _sql(statement: str, database: str = "postgres") -> str:
    """Over standard input: others can read the arguments of a program."""
    flags = ("--no-psqlrc", "--quiet", "--no-align", "--tuples-only", "--set", "ON_ERROR_STOP=1")
    command = ("runuser", "-u", "postgres", "--", "psql", *flags, "--dbname", database)
    return ask(*command, given=statement).strip()
