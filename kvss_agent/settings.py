"""The settings of an agent: flags, or environment variables of the same names. Parsed strictly."""

from __future__ import annotations

import argparse
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvss_agent.options import Options, file, name, path, place, redis_url, seconds, size

PREFIX: Final = "KVSS_AGENT_"
REDIS_URL: Final = "a URL that begins with redis://, rediss:// or unix://"
LOG_FORMATS: Final = {"text": "text", "json": "json"}
SOCKET_PATH_BYTES_MAX: Final = 107


@dataclass(frozen=True, slots=True)
class Settings:
    name: str
    state_dir: Path
    unix: Path
    control: tuple[str, int]
    token: str = field(repr=False)
    tcp: tuple[str, int] | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_authorities: Path | None = None
    plain_tcp: bool = False
    memory_bytes: int | None = None
    drain_seconds: float = 10.0
    telemetry: str | None = field(default=None, repr=False)  # it may have a password in it
    log_format: str = "text"

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
        prog="python -m kvss_agent",
        description="Keep KV columns in memory and in tier 2, for the drivers that a desired document "
        "names. Runs as any user.",
        epilog=f"Every option may be set in the environment instead: {PREFIX}STATE_DIR for "
        "--state-dir. A flag wins over the environment.",
    )
    add = made.add_argument
    add("--name", help="what this agent is called (default: the host's name)")
    add("--state-dir", help="for the socket, the token and the document (default: .kvss)")
    add("--unix", help="socket for drivers on this node (default: data.sock in the state directory)")
    add("--tcp", help="HOST:PORT for drivers on other nodes (default: none)")
    add("--tls-certificate", help="PEM; with it, TCP is TLS and drivers show certificates")
    add("--tls-key", help="PEM, of the certificate")
    add("--tls-authorities", help="PEM, who signs the certificates of drivers and agents")
    add("--plain-tcp", help="yes: TCP without TLS, for networks that nobody else is on (default: no)")
    add("--control", help="HOST:PORT of the control API (default: 127.0.0.1:8410)")
    add("--token-file", help="the token of the control API (default: made in the state directory)")
    add("--memory", help="at most so much for shards, such as 24G (default: what is available)")
    add("--drain-seconds", help="how long SIGTERM lets drivers leave (default: 10)")
    add("--telemetry", help="redis://… of the stream that numbers are told to (default: none)")
    add("--log-format", help="text or json (default: text)")
    return made


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
        tcp=take("tcp", None, place, where),
        tls_certificate=take("tls_certificate", None, file, "a file that can be read"),
        tls_key=take("tls_key", None, file, "a file that can be read"),
        tls_authorities=take("tls_authorities", None, file, "a file that can be read"),
        plain_tcp=take("plain_tcp", False, {"yes": True, "no": False}.__getitem__, "yes or no"),
        memory_bytes=take("memory", None, size, "a number of bytes, such as 24G"),
        drain_seconds=take("drain_seconds", 10.0, seconds, "0 to 3600"),
        telemetry=take("telemetry", None, redis_url, REDIS_URL, secret=True),
        log_format=take("log_format", "text", LOG_FORMATS.__getitem__, "text or json"),
    )
    token_file = take("token_file", None, file, "a file")
    given.problems += _contradictions(settings)
    given.check()
    token = given.token(token_file, state_dir)
    given.check()
    return replace(settings, token=token)


def _contradictions(settings: Settings) -> list[str]:
    problems = []
    tls = [settings.tls_certificate, settings.tls_key, settings.tls_authorities]
    if any(tls) and not all(tls):
        problems.append("--tls-certificate, --tls-key and --tls-authorities belong together.")
    if settings.tcp and not any(tls) and not settings.plain_tcp:
        problems.append("--tcp needs --tls-certificate, or --plain-tcp yes where nobody else listens.")
    if len(os.fsencode(settings.unix)) > SOCKET_PATH_BYTES_MAX:
        problems.append(
            f"--unix is {str(settings.unix)!r}: the path of a socket has at most "
            f"{SOCKET_PATH_BYTES_MAX} bytes."
        )
    return problems
