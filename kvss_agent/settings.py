"""The settings of an agent: flags, or environment variables of the same names. Parsed strictly."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from kvss_agent.client.connection import Address
from kvss_agent.process.membership import Console
from kvss_agent.process.options import Options, file, name, path, place, redis_url, web_url
from telemetry.emit.extras import NO_OTLP, has_otlp
from telemetry.script import program
from telemetry.units import DURATION_FORMS, SIZE_FORMS, parse_duration, parse_size

log = logging.getLogger(__name__)

PREFIX: Final = "KVSS_AGENT_"
REDIS_URL: Final = "a URL that begins with redis://, rediss:// or unix://"
WEB_URL: Final = "a URL that begins with http:// or https://"
OTLP_HELP: Final = "http://… of a collector that receives numbers, without /v1/metrics (default: none)"
YES_OR_NO: Final = {"yes": True, "no": False}
LOG_FORMATS: Final = {"text": "text", "json": "json"}
SOCKET_PATH_BYTES_MAX: Final = 107


@dataclass(frozen=True, slots=True)
class Settings:
    name: str
    state_dir: Path
    unix: Path
    control: tuple[str, int]
    token: str = field(repr=False)
    plain_control: bool = False
    is_new: bool = False  # the token was made just now: nobody can know it yet
    tcp: tuple[str, int] | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_authorities: Path | None = None
    plain_tcp: bool = False
    memory_bytes: int | None = None
    drain_seconds: float = 10.0
    telemetry: str | None = field(default=None, repr=False)  # it may have a password in it
    otlp: str | None = None
    log_format: str = "text"
    console: Console | None = None
    control_url: str | None = None
    data_address: str | None = None
    nics: tuple[tuple[str, str], ...] = ()  # which is plugged in at which leaf

    @property
    def serves_tls(self) -> bool:
        """Whether the control API is TLS: certificates come from a console."""
        return self.console is not None and not self.plain_control

    @property
    def has_tls_of_console(self) -> bool:
        """Whether TCP is TLS with the certificates of a console."""
        return self.console is not None and not self.tls_certificate and not self.plain_tcp

    def tls_for_drivers(self) -> ssl.SSLContext | None:
        """What TCP connections have to bring: a certificate of our authorities. None: plain TCP."""
        if not self.tls_certificate:
            return None
        return self._tls(ssl.PROTOCOL_TLS_SERVER)

    def tls_for_agents(self) -> ssl.SSLContext | None:
        """What this agent brings when it pulls from another one."""
        if not self.tls_certificate:
            return None
        return self._tls(ssl.PROTOCOL_TLS_CLIENT)

    def _tls(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(str(self.tls_certificate), str(self.tls_key))
        context.load_verify_locations(str(self.tls_authorities))
        return context


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=program("kvss_agent"),
        description="Keep KV columns in memory and in tier 2, for the drivers that a desired document "
        "names. Runs as any user.",
        epilog=f"Every option may be set in the environment instead: {PREFIX}STATE_DIR for "
        "--state-dir. A flag wins over the environment.",
    )
    add = made.add_argument
    add("--name", help="name of this agent (default: the host name)")
    add(
        "--state-dir",
        help="directory of the socket, the token and the desired document (default: .kvss)",
    )
    add("--unix", help="socket for drivers on this node (default: data.sock in the state directory)")
    add("--tcp", help="HOST:PORT for drivers on other nodes (default: none)")
    add("--tls-certificate", help="PEM; with it, TCP is TLS (default: as the console issues it)")
    add("--tls-key", help="PEM, of the certificate")
    add("--tls-authorities", help="PEM, the authorities that sign certificates of drivers and agents")
    add("--plain-tcp", help="yes: TCP without TLS, for private networks (default: no)")
    add("--control", help="HOST:PORT of the control API (default: 127.0.0.1:8410)")
    add_plain_control(made)
    add("--token-file", help="the token of the control API (default: made in the state directory)")
    add("--memory", help="memory limit for shards, such as 24GiB (default: what is available)")
    add("--drain-seconds", help="how long SIGTERM lets drivers leave (default: 10)")
    add("--telemetry", help="rediss://own@…: the Redis that receives telemetry (default: none is sent)")
    add("--otlp", help=OTLP_HELP)
    add("--log-format", help="text or json (default: text)")
    add_console(made)
    add("--data-address", help="address for drivers: tcp:HOST:PORT (default: by --tcp or --unix)")
    add(
        "--nics",
        metavar="NIC=LEAF,…",
        help="leaf of each NIC, if the fleet's description does not have it (eth0=leaf-1)",
    )
    return made


def add_plain_control(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add(
        "--plain-control",
        help="yes: the control API without TLS, for private networks (default: no with --console; "
        "without one only on loopback)",
    )


def plain_control_problems(
    control: tuple[str, int], console: Console | None, *, plain: bool
) -> list[str]:
    if console is None and not plain and not is_loopback(control[0]):
        problem = (
            f"--control {control[0]}:{control[1]} can be reached by others, and without a console "
            "there are no certificates: tokens and keys could be read on the way. Join a console by "
            "--console, listen on 127.0.0.1, or take --plain-control yes where nobody else listens."
        )
        return [problem]
    return []


def warn_of_plain_control(control: tuple[str, int]) -> None:
    """Say it at each start."""
    if not is_loopback(control[0]):
        log.warning(
            "The control API is plain HTTP on %s:%s: tokens and keys can be read on the way",
            *control,
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def add_console(made: argparse.ArgumentParser) -> None:
    """What joining a fleet wants to know, of agents and of drivers."""
    add = made.add_argument
    add("--console", metavar="URL", help="join the fleet of this console (default: none)")
    add("--join-token", help="lets us in at the first time; better in the environment")
    add(
        "--console-ca",
        metavar="FILE",
        help="PEM: who vouches for the console's https:// (default: whom the system trusts)",
    )
    add(
        "--plain-console",
        help="yes: http:// to another machine, where nobody else listens (default: no)",
    )
    add("--control-url", help="where the console reaches our API (default: by --control)")


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Flags and environment. Raises WrongSettings with all that is wrong at once."""
    given = Options(parser(), PREFIX, arguments, environment)
    take = given.take
    state_dir = take("state_dir", Path(".kvss"), path, "a path").absolute()
    where = "HOST:PORT"
    settings = Settings(
        name=take("name", socket.gethostname(), name, "1 to 200 letters, digits and . _ -"),
        state_dir=state_dir,
        unix=take("unix", state_dir / "data.sock", path, "a path").absolute(),
        control=take("control", ("127.0.0.1", 8410), place, where),
        token="",
        plain_control=take("plain_control", False, YES_OR_NO.__getitem__, "yes or no"),
        tcp=take("tcp", None, place, where),
        tls_certificate=take("tls_certificate", None, file, "a file that can be read"),
        tls_key=take("tls_key", None, file, "a file that can be read"),
        tls_authorities=take("tls_authorities", None, file, "a file that can be read"),
        plain_tcp=take("plain_tcp", False, YES_OR_NO.__getitem__, "yes or no"),
        memory_bytes=take("memory", None, parse_size, SIZE_FORMS),
        drain_seconds=take(
            "drain_seconds", 10.0, _drain_seconds, f"at most an hour, such as {DURATION_FORMS}"
        ),
        telemetry=take("telemetry", None, redis_url, REDIS_URL, secret=True),
        otlp=take_otlp(given),
        log_format=take("log_format", "text", LOG_FORMATS.__getitem__, "text or json"),
        console=take_console(given),
        control_url=take("control_url", None, web_url, WEB_URL),
        data_address=take("data_address", None, _address, "tcp:HOST:PORT or unix:/PATH"),
        nics=take("nics", (), _nics, "NIC=LEAF, or several with commas"),
    )
    token_file = take("token_file", None, file, "a file")
    given.problems += _contradictions(settings)
    given.check()
    token = given.token(token_file, state_dir)
    given.check()
    return replace(settings, token=token, is_new=given.has_made_token)


def take_console(given: Options) -> Console | None:
    url = given.take("console", "", web_url, WEB_URL)
    token = given.take("join_token", "", _join_token, "tgj_…, as the console has shown it", secret=True)
    plain = given.take("plain_console", False, YES_OR_NO.__getitem__, "yes or no")
    if token and not url:
        given.problems.append("--join-token needs --console: where to join.")
    authorities = given.take("console_ca", None, file, "a file that can be read")
    console = Console(url, token, authorities)
    try:
        console.verify()
    except OSError as error:
        given.problems.append(f"--console-ca {authorities} holds no certificates: {error}.")
    if url and console.is_in_the_open and not plain:
        given.problems.append(
            "--console is http://: what is told there could be read on the way. Take https://, or "
            "--plain-console yes where nobody else listens."
        )
    return console if url else None


def take_otlp(given: Options) -> str | None:
    url = given.take("otlp", None, web_url, WEB_URL)
    if url and not has_otlp():
        given.problems.append(f"--otlp {NO_OTLP}.")
    return url


def _drain_seconds(text: str) -> float:
    return parse_duration(text, high=3600)


def _join_token(text: str) -> str:
    if not text.startswith("tgj_") or not text.isascii():
        raise ValueError(text)
    return text


def _address(text: str) -> str:
    return str(Address.parse(text))


def _nics(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [one.strip().partition("=") for one in text.split(",")]
    return tuple((name(nic), name(leaf)) for nic, _, leaf in pairs)


def _contradictions(settings: Settings) -> list[str]:
    problems = plain_control_problems(settings.control, settings.console, plain=settings.plain_control)
    tls = [settings.tls_certificate, settings.tls_key, settings.tls_authorities]
    if any(tls) and not all(tls):
        problems.append("--tls-certificate, --tls-key and --tls-authorities belong together.")
    if settings.tcp and not any(tls) and not settings.plain_tcp and settings.console is None:
        problems.append(
            "--tcp needs --tls-certificate, or --console, which issues one; or --plain-tcp yes where "
            "nobody else listens."
        )
    if len(os.fsencode(settings.unix)) > SOCKET_PATH_BYTES_MAX:
        problems.append(
            f"--unix is {str(settings.unix)!r}: the path of a socket has at most "
            f"{SOCKET_PATH_BYTES_MAX} bytes."
        )
    return problems
