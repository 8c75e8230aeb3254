"""Everything that can be set from outside, parsed strictly, in one table.

A setting that is misspelt, missing or nonsense stops the start with its name, its value and what is
allowed; nothing is guessed and nothing is ignored. `docs/settings.md` is written from this table.
"""

from __future__ import annotations

import difflib
import enum
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from telemetry import redis_address
from telemetry.emit.extras import NO_OTLP, has_otlp
from telemetry.redis_address import WrongAddress
from telemetry.service_links import HINT, is_service_link
from telemetry.units import exact_duration, parse_seconds

PROJECT = Path(__file__).resolve().parent.parent  # where it is installed, the folder of the packages
IS_CHECKOUT = (PROJECT / "pyproject.toml").is_file()
HOME = PROJECT if IS_CHECKOUT else Path.cwd()  # what the paths of settings are relative to
PREFIX = "TIDEGATE_"
OF_OTHERS = ("database_url", "redis_url")  # which have the names that they have everywhere, without it
# What the API examples of docs show, and `tidegatectl` reads: people export it.
OF_CLIENTS = ("TIDEGATE_ADDRESS", "TIDEGATE_CA", "TIDEGATE_CONTEXT", "TIDEGATE_TOKEN")
SECRET_KEY_CHARACTERS_MIN = 50  # what Django asks for

T = TypeVar("T")


# How a person calls Django's commands, and those of the stack.
MANAGE = ".venv/bin/python manage.py" if IS_CHECKOUT else "tidegate manage"
STACK = ".venv/bin/python -m console.stack" if IS_CHECKOUT else "tidegate"


def command(verb: str) -> str:
    """What a person types for a verb of the stack."""
    return f"make {verb}" if IS_CHECKOUT else f"tidegate {verb}"


def remove_data(variables: Mapping[str, str] = os.environ) -> str:
    """How a person removes all data of the stack: the end of a sentence."""
    given = variables.get("TIDEGATE_STATE_DIR")
    if IS_CHECKOUT and not given:
        return "remove the data with `make clean DATA=1`"
    return f"delete the directory {HOME / (given or '.tidegate')}, which has all data"


def bundled(folder: str) -> Path:
    """A folder of the checkout that a wheel has inside this package."""
    return PROJECT / folder if IS_CHECKOUT else PROJECT / "console" / "bundled" / folder


def package_folder(name: str) -> Path:
    """Where a package is installed, which is not loaded for that."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{name} is not installed: install requirements/run.txt")
    return Path(next(iter(spec.submodule_search_locations)))


class ConfigurationError(Exception):
    """One sentence for every setting that is wrong, all of them at once."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"  - {problem}" for problem in problems))


class Mode(enum.StrEnum):
    """`embedded` is what `make up` runs on one machine; everything else is `production`."""

    EMBEDDED = "embedded"
    PRODUCTION = "production"


class Pooler(enum.StrEnum):
    """What is between a process and PostgreSQL."""

    NONE = "none"
    TRANSACTION = "transaction"


@dataclass(frozen=True)
class Kind:
    """How a text becomes a value: `parse` raises ValueError for what is not `allowed`."""

    allowed: str
    parse: Callable[[str], Any]


def choice(options: type[enum.StrEnum]) -> Kind:
    return Kind(" or ".join(f"`{option.value}`" for option in options), options)


def integer(low: int, high: int) -> Kind:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    return Kind(f"a whole number from {low} to {high}", parse)


def seconds(low: int, high: int) -> Kind:
    allowed = f"`{exact_duration(low)}` to `{exact_duration(high)}`, such as `90`, `90s` or `15m`"
    return Kind(allowed, partial(parse_seconds, low=low, high=high))


def _flag(text: str) -> bool:
    return {"true": True, "false": False, "1": True, "0": False}[text.lower()]


def url(*schemes: str) -> Kind:
    def parse(text: str) -> str:
        parts = urlsplit(text)
        if parts.scheme not in schemes or not (parts.netloc or parts.path.strip("/")):
            raise ValueError(text)
        _ = parts.port  # raises ValueError where the port is nonsense
        return text

    return Kind("a URL that begins with " + " or ".join(f"`{s}://`" for s in schemes), parse)


def _redis(value: str) -> str:
    redis_address.parse(value)
    return value


def _postgres(value: str) -> str:
    from console import database_address  # which loads psycopg, and so is not for every command

    database_address.parse(value)
    return value


def text(pattern: str, allowed: str) -> Kind:
    def parse(value: str) -> str:
        if not re.fullmatch(pattern, value, re.DOTALL):
            raise ValueError(value)
        return value

    return Kind(allowed, parse)


def comma_list(item: Kind) -> Kind:
    def parse(value: str) -> tuple[Any, ...]:
        return tuple(item.parse(part.strip()) for part in value.split(",") if part.strip())

    return Kind(f"a comma-separated list, each {item.allowed}", parse)


POSTGRES = Kind(
    "a URL that begins with `postgresql://` or `postgres://`; several hosts are "
    "`postgresql://user:password@host1,host2/name`",
    _postgres,
)
REDIS = Kind(redis_address.ALLOWED, _redis)
FLAG = Kind("`true` or `false`", _flag)
HOST = text(
    r"\.?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\]",
    "a host name, `.example.org` for all its subdomains, or an address",
)
SECRET = text(
    rf"\S{{{SECRET_KEY_CHARACTERS_MIN},}}",
    f"at least {SECRET_KEY_CHARACTERS_MIN} characters without spaces",
)
FOLDER = Kind("a path", lambda value: HOME / value)
LINE = text(r"[^\s]{1,200}", "1 to 200 characters without spaces")
PEM_OR_SECRET = text(r".{32,16384}", "a PEM public key, or for HS256 a secret of at least 32 characters")


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class JwtAlgorithm(enum.StrEnum):
    """Named one by one, so that a token can never choose how it is checked."""

    RS256 = "RS256"
    ES256 = "ES256"
    EDDSA = "EdDSA"
    HS256 = "HS256"


@dataclass(frozen=True)
class About:
    """What the table says of one setting. Its name is that of its attribute, with a prefix."""

    kind: Kind
    purpose: str
    required: bool
    secret: bool
    default_text: str
    name: str = ""


REQUIRED = object()


def setting(kind: Kind, purpose: str, *, default: Any = REQUIRED, secret: bool = False) -> Any:
    if default is REQUIRED:
        return field(
            metadata={"about": About(kind, purpose, required=True, secret=secret, default_text="")}
        )
    about = About(kind, purpose, required=False, secret=secret, default_text=_as_text(default))
    return field(default=default, metadata={"about": about})


def _as_text(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Path):
        return str(value.relative_to(HOME))
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The settings of one process. Made only by `read`."""

    database_url: str = setting(
        POSTGRES,
        "PostgreSQL (14 or newer). `make up` starts one of its own when this is not set. Of several "
        "hosts, each new connection goes to the one that takes writes.",
        secret=True,
    )
    database_pooler: Pooler = setting(
        choice(Pooler),
        "What stands between this process and PostgreSQL at `DATABASE_URL`: `transaction` is a pooler, "
        "such as PgBouncer, that gives a connection for a transaction.",
        default=Pooler.NONE,
    )
    database_connections_max: int = setting(
        integer(1, 200),
        "Connections that one process has to PostgreSQL at most. How many each kind needs: "
        "[availability.md](availability.md#connections).",
        default=16,
    )
    listen_url: str | None = setting(
        POSTGRES,
        "PostgreSQL without a pooler, for web processes, which LISTEN there. If it is not set, "
        "`DATABASE_URL`.",
        default=None,
        secret=True,
    )
    history_url: str | None = setting(
        POSTGRES,
        "A standby of PostgreSQL, for web processes, which read the numbers of charts there. If it is "
        "not set, or is more than ten seconds behind, `DATABASE_URL`.",
        default=None,
        secret=True,
    )
    redis_url: str = setting(
        REDIS,
        "Redis (6.2 or newer), the broker of work. `make up` starts one of its own when it is not set.",
        secret=True,
    )
    telemetry_url: str | None = setting(
        REDIS,
        "Redis that takes telemetry, as the console's processes add their own numbers: user `console`. "
        "Better a server of its own than `REDIS_URL`, which it is if it is not set.",
        default=None,
        secret=True,
    )
    ingest_url: str | None = setting(
        REDIS,
        "Redis that takes telemetry, as it is read: user `ingest` for ingest, `observer` for web. "
        "If it is not set, `TIDEGATE_TELEMETRY_URL`.",
        default=None,
        secret=True,
    )
    registrar_url: str | None = setting(
        REDIS,
        "Redis that takes telemetry, for workers: user `registrar`, which makes a Redis user for each "
        "agent and driver that has joined. If it is not set, nobody does.",
        default=None,
        secret=True,
    )
    own_telemetry_url: str | None = setting(
        REDIS,
        "Redis that takes telemetry, as agents and drivers are to be given it: user `own`, no password, "
        "such as `rediss://own@redis.example.org:6379/0`. Each opens it as its own user.",
        default=None,
    )
    endpoints_url: str | None = setting(
        REDIS,
        "Redis that takes telemetry, for orchestrators: user `leader`, which tells brains where "
        "replicas of workloads are. If it is not set, `TIDEGATE_TELEMETRY_URL`.",
        default=None,
        secret=True,
    )
    cluster_url: str | None = setting(
        url("unix", "https"),
        "The Cluster Server, which runs the instances of workloads: `https://cluster.example.org:8450`, "
        "or `unix:///run/tidegate/cluster.sock` on the same machine.",
        default=None,
    )
    cluster_ca: Path | None = setting(
        FOLDER, "PEM file of who vouches for the Cluster Server. With `https://`.", default=None
    )
    cluster_certificate: Path | None = setting(
        FOLDER,
        "PEM file of the certificate that the console shows the Cluster Server. With `https://`.",
        default=None,
    )
    cluster_key: Path | None = setting(FOLDER, "PEM file of the key of that certificate.", default=None)
    secret_key: str = setting(
        SECRET,
        "Signs sessions and cursors, and seals stored secrets: those are lost with it. `make up` makes "
        "one and keeps it under `.tidegate/`.",
        secret=True,
    )
    secret_key_fallbacks: tuple[str, ...] = setting(
        comma_list(SECRET),
        "Former secret keys, which still open what they signed and sealed while a new one takes over.",
        default=(),
        secret=True,
    )
    mode: Mode = setting(
        choice(Mode),
        "`production` expects TLS in front and makes every cookie secure; "
        "`embedded` is what `make up` sets for one machine.",
        default=Mode.PRODUCTION,
    )
    debug: bool = setting(FLAG, "Django's debug pages. Refused in production mode.", default=False)
    allowed_hosts: tuple[str, ...] = setting(
        comma_list(HOST),
        "Host names the console answers to. Required in production mode; "
        "in embedded mode the loopback names are always among them.",
        default=(),
    )
    trusted_origins: tuple[str, ...] = setting(
        comma_list(url("https", "http")),
        "Further origins (scheme and host) whose forms are accepted.",
        default=(),
    )
    trusted_proxies: int = setting(
        integer(0, 8),
        "How many proxies stand in front. That many entries of `X-Forwarded-For` are believed, "
        "and `X-Forwarded-Proto` if there is at least one.",
        default=0,
    )
    hsts_seconds: int = setting(
        seconds(0, 63_072_000),
        "How long browsers insist on TLS, in production mode.",
        default=31_536_000,
    )
    host: str = setting(HOST, "Address that `make up` listens on.", default="127.0.0.1")
    port: int = setting(
        integer(1, 65535),
        "Port that `make up` listens on; if it is taken, the next free one.",
        default=8400,
    )
    state_dir: Path = setting(
        FOLDER,
        "Where `make up` keeps data, sockets, logs and secrets. Relative to the checkout or, when "
        "installed, to the working directory.",
        default=HOME / ".tidegate",
    )
    tokenizers_dir: Path | None = setting(
        FOLDER,
        "Where uploaded tokenizers are stored, and where brains read them: on several machines a "
        "mount that has the same path on all. By default `tokenizers` in `TIDEGATE_STATE_DIR`.",
        default=None,
    )
    static_dir: Path = setting(
        FOLDER,
        "Where `manage.py collectstatic` puts files, and production serves them from.",
        default=HOME / ".tidegate" / "static",
    )
    log_level: LogLevel = setting(choice(LogLevel), "Least level that is logged.", default=LogLevel.INFO)
    login_attempts_max: int = setting(
        integer(1, 10_000),
        "Failed log-ins per name, and ten times as many per address, before further ones wait.",
        default=8,
    )
    login_window_seconds: int = setting(
        seconds(1, 86_400), "How long failed log-ins are counted.", default=300
    )
    session_hours: int = setting(integer(1, 720), "How long a browser stays logged in.", default=12)
    jwt_algorithm: JwtAlgorithm | None = setting(
        choice(JwtAlgorithm),
        "The one algorithm accepted for bearer JWTs. All four `TIDEGATE_JWT_*` or none.",
        default=None,
    )
    jwt_key: str | None = setting(
        PEM_OR_SECRET,
        "The issuer's public key, or the shared secret of HS256.",
        default=None,
        secret=True,
    )
    jwt_issuer: str | None = setting(LINE, "What `iss` must say.", default=None)
    jwt_audience: str | None = setting(LINE, "What `aud` must contain.", default=None)
    task_seconds_max: int = setting(
        seconds(1, 3600),
        "A Celery task is stopped after this long. A task whose worker vanished runs again "
        "elsewhere after twice this long.",
        default=60,
    )
    worker_processes: int = setting(integer(1, 256), "Processes of one Celery worker.", default=2)

    public_url: str | None = setting(
        url("https", "http"),
        "Where people reach the console: what links in notifications begin with. In embedded mode the "
        "address that it listens on.",
        default=None,
    )
    smtp_url: str | None = setting(
        url("smtp", "smtp+tls", "smtps"),
        "Mail server for notifications: `smtp+tls://name:password@mail.example.org` goes over to TLS,"
        " `smtps://` begins with it, `smtp://` is plain.",
        default=None,
        secret=True,
    )
    mail_from: str | None = setting(
        LINE, "The sender of its e-mails. With `TIDEGATE_SMTP_URL`.", default=None
    )
    lost_after_seconds: int = setting(
        seconds(5, 3600),
        "A node or a driver that was last seen so long ago is lost. Heartbeats come four "
        "times as often, and at least every ten seconds.",
        default=30,
    )
    certificate_days: int = setting(
        integer(1, 90),
        "For how many days certificates of agents and drivers are valid. They are renewed after two "
        "thirds of that; for the rest of it the console may be away.",
        default=7,
    )
    plain_control: bool = setting(
        FLAG,
        "Whether agents and drivers on other machines may be asked over plain HTTP. Tokens, secrets and "
        "data keys can be read on the way then: only while processes of an older version are "
        "updated, or on a network that nobody else is on.",
        default=False,
    )

    telemetry_days_10s: int = setting(
        integer(1, 30), "For how many days numbers are kept in steps of ten seconds.", default=3
    )
    telemetry_days_1m: int = setting(
        integer(1, 120), "For how many days they are kept in steps of a minute.", default=15
    )
    telemetry_days_1h: int = setting(
        integer(1, 1500), "For how many days they are kept in steps of an hour.", default=400
    )
    telemetry_hours_slowest: int = setting(
        integer(1, 720),
        "For how many hours the slowest transfers of each ten seconds are kept.",
        default=24,
    )

    demo: bool = setting(
        FLAG,
        "A small fleet with traffic of three orgs, made where there is no fleet yet. `make up` sets it "
        "unless told otherwise. Refused in production mode.",
        default=False,
    )

    otlp_url: str | None = setting(
        url("http", "https"),
        "A collector of OpenTelemetry that the console tells its own numbers, too, over OTLP: without "
        "`/v1/metrics`. Needs the extra `otlp`.",
        default=None,
    )

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Environment:
        """The settings in `variables`; an empty text counts as not set.

        Raises ConfigurationError, which names every problem and not just the first.
        """
        given = {name: value for name, value in variables.items() if value != ""}
        problems = list(_misspelt(given))
        values: dict[str, Any] = {}
        for attribute, about in cls.attributes().items():
            if about.name not in given:
                if about.required:
                    problems.append(f"{about.name} is required: {about.kind.allowed}.")
                continue
            try:
                values[attribute] = about.kind.parse(given[about.name])
            except (ValueError, KeyError) as error:
                shown = "(hidden)" if about.secret else repr(given[about.name])
                hint = f" {HINT}" if is_service_link(about.name, given[about.name]) else ""
                hint += f" {error}" if isinstance(error, WrongAddress) else ""
                problems.append(f"{about.name} is {shown}, but must be {about.kind.allowed}.{hint}")
        if not problems:
            environment = cls(**values)
            problems = list(environment._contradictions())
            if not problems:
                return environment
        raise ConfigurationError(problems)

    @classmethod
    def attributes(cls) -> dict[str, About]:
        """Attribute name → what the table says of it, in the order of the table."""
        return {
            item.name: replace(
                item.metadata["about"],
                name=item.name.upper() if item.name in OF_OTHERS else f"{PREFIX}{item.name.upper()}",
            )
            for item in fields(cls)
        }

    def _contradictions(self) -> list[str]:
        problems = []
        if self.mode is Mode.PRODUCTION and self.debug:
            problems.append("TIDEGATE_DEBUG is true, but production mode never shows debug pages.")
        if self.mode is Mode.PRODUCTION and self.demo:
            problems.append("TIDEGATE_DEMO is true, but production mode has no demo.")
        if self.mode is Mode.PRODUCTION and not self.allowed_hosts:
            problems.append(
                "TIDEGATE_ALLOWED_HOSTS is required in production mode: "
                f"{self.attributes()['allowed_hosts'].kind.allowed}."
            )
        if (self.smtp_url is None) != (self.mail_from is None):
            problems.append("TIDEGATE_SMTP_URL and TIDEGATE_MAIL_FROM are set both or not at all.")
        if self.otlp_url and not has_otlp():
            problems.append(f"TIDEGATE_OTLP_URL {NO_OTLP}.")
        jwt = {
            "TIDEGATE_JWT_ALGORITHM": self.jwt_algorithm,
            "TIDEGATE_JWT_KEY": self.jwt_key,
            "TIDEGATE_JWT_ISSUER": self.jwt_issuer,
            "TIDEGATE_JWT_AUDIENCE": self.jwt_audience,
        }
        missing = [name for name, value in jwt.items() if value is None]
        if missing and len(missing) < len(jwt):
            problems.append(f"{', '.join(missing)} must be set too: all TIDEGATE_JWT_* or none.")
        return problems


def _misspelt(given: Mapping[str, str]) -> list[str]:
    known = [about.name for about in Environment.attributes().values()]
    given = {name: value for name, value in given.items() if name not in OF_CLIENTS}
    problems = []
    for name, value in sorted(given.items()):
        if name.startswith(PREFIX) and name not in known:
            hint = HINT if is_service_link(name, value) else _right_name(name, known)
            problems.append(f"{name} is not a setting of Tidegate. {hint}")
    return problems


def _right_name(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}?" if close else "See docs/settings.md for all."


def settings_table() -> str:
    """The table of docs/settings.md, in Markdown."""
    rows = ["| name | what it does | allowed | default |", "|---|---|---|---|"]
    for about in Environment.attributes().values():
        default = "**required**" if about.required else f"`{about.default_text}`"
        secret = " *(secret)*" if about.secret else ""
        rows.append(f"| `{about.name}`{secret} | {about.purpose} | {about.kind.allowed} | {default} |")
    return "\n".join(rows) + "\n"


def env_file(state_dir: Path) -> Path:
    """Where a running embedded stack says how to reach it (mode 0600: it holds passwords)."""
    return state_dir / "env"


def load_embedded_defaults(variables: MutableMapping[str, str]) -> None:
    """Fill what `variables` does not say from the env file that `make up` wrote, if any."""
    path = env_file(HOME / variables.get("TIDEGATE_STATE_DIR", ".tidegate"))
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator:
            variables.setdefault(name, value)
