"""The settings of an agent: flags, or environment variables of the same names. Parsed strictly."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

PREFIX: Final = "KVSS_AGENT_"
UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
TOKEN_CHARACTERS_MIN: Final = 20
SOCKET_PATH_BYTES_MAX: Final = 107

T = TypeVar("T")


class WrongSettings(Exception):
    """A sentence for each setting that is wrong."""


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
    add("--log-format", help="text or json (default: text)")
    return made


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Flags and environment. Raises WrongSettings with all that is wrong at once."""
    made = parser()
    names = [action.dest for action in made._actions if action.dest != "help"]  # noqa: SLF001
    given = {
        name: value for name, value in vars(made.parse_args(arguments)).items() if value is not None
    }
    problems: list[str] = []
    for variable, value in environment.items():
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            if name in names:
                given.setdefault(name, value)
            else:
                problems.append(f"{variable} is no setting of an agent.")

    def take(name: str, default: T, convert: Callable[[str], T], allowed: str) -> T:
        if name not in given:
            return default
        try:
            return convert(given[name])
        except (ValueError, KeyError):
            problems.append(f"--{name.replace('_', '-')} is {given[name]!r}: it should be {allowed}.")
            return default

    state_dir = take("state_dir", Path(".kvss"), _path, "a path").absolute()
    place = "HOST:PORT"
    settings = Settings(
        name=take("name", socket.gethostname(), _name, "1 to 200 letters, digits and . _ -"),
        state_dir=state_dir,
        unix=take("unix", state_dir / "data.sock", _path, "a path").absolute(),
        control=take("control", ("127.0.0.1", 8410), _place, place),
        token="",
        tcp=take("tcp", None, _place, place),
        tls_certificate=take("tls_certificate", None, _file, "a file that can be read"),
        tls_key=take("tls_key", None, _file, "a file that can be read"),
        tls_authorities=take("tls_authorities", None, _file, "a file that can be read"),
        plain_tcp=take("plain_tcp", False, {"yes": True, "no": False}.__getitem__, "yes or no"),
        memory_bytes=take("memory", None, _bytes, "a number of bytes, such as 24G"),
        drain_seconds=take("drain_seconds", 10.0, _seconds, "0 to 3600"),
        log_format=take(
            "log_format", "text", {"text": "text", "json": "json"}.__getitem__, "text or json"
        ),
    )
    problems += _contradictions(settings)
    token = "" if problems else _token(settings, take("token_file", None, _file, "a file"), problems)
    if problems:
        raise WrongSettings("\n".join(problems))
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


def _token(settings: Settings, path: Path | None, problems: list[str]) -> str:
    """The token from its file; without one it is made, for this user only."""
    try:
        if path is None:
            path = settings.state_dir / "token"
            settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                pass
            else:
                with os.fdopen(descriptor, "w") as file:
                    file.write(secrets.token_urlsafe(32) + "\n")
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"The token cannot be kept in {path}: {error}")
        return ""
    if len(token) < TOKEN_CHARACTERS_MIN or not token.isascii():
        problems.append(
            f"The token in {path} should have {TOKEN_CHARACTERS_MIN} ASCII characters or more."
        )
    return token


def _path(text: str) -> Path:
    if not text:
        raise ValueError(text)
    return Path(text)


def _file(text: str) -> Path:
    if not os.access(text, os.R_OK) or not Path(text).is_file():
        raise ValueError(text)
    return Path(text)


def _name(text: str) -> str:
    if not 0 < len(text) <= 200 or not all(c.isascii() and (c.isalnum() or c in "._-") for c in text):
        raise ValueError(text)
    return text


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ValueError(text)
    return host.removeprefix("[").removesuffix("]"), int(port)


def _bytes(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    return int(number) * UNITS[unit]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 3600:
        raise ValueError(text)
    return seconds
