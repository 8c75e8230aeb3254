"""The settings of an agent: flags, or environment variables of the same names. Parsed strictly."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvss_agent.data_plane.address import Address
from kvss_agent.process.options import Options, name, path, place
from kvss_agent.process.settings import ProcessKind, ProcessSettings, with_token
from kvss_agent.redundancy.stores import BESIDE_BYTES_PER_SECOND
from telemetry.script import program
from telemetry.units import DURATION_FORMS, SIZE_FORMS, exact_size, parse_duration, parse_size

SOCKET_PATH_BYTES_MAX: Final = 107
KIND: Final = ProcessKind(
    program=program("kvss_agent"),
    description="Keep KV columns in memory and in tier 2, for the drivers of a desired document.",
    prefix="KVSS_AGENT_",
    state_dir=".kvss",
    port=8410,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ProcessSettings):
    unix: Path
    tcp: tuple[str, int] | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_authorities: Path | None = None
    plain_tcp: bool = False
    memory_bytes: int | None = None
    drain_seconds: float = 10.0
    repair_bytes_per_second: int = BESIDE_BYTES_PER_SECOND
    data_address: str | None = None
    nics: tuple[tuple[str, str], ...] = ()  # which is plugged in at which leaf

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


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Flags and environment. Raises WrongSettings with all that is wrong at once."""
    parser = KIND.parser()
    add = parser.add_argument
    add("--unix", help="socket for drivers on this node (default: data.sock in the state directory)")
    add("--tcp", help="HOST:PORT for drivers on other nodes (default: none)")
    add("--tls-certificate", help="PEM; with it, TCP is TLS (default: as the console issues it)")
    add("--tls-key", help="PEM, of the certificate")
    add("--tls-authorities", help="PEM, the authorities that sign certificates of drivers and agents")
    add("--plain-tcp", help="yes: TCP without TLS, for private networks (default: no)")
    add("--memory", help="memory limit for shards, such as 24GiB (default: what is available)")
    add("--drain-seconds", help="how long SIGTERM lets drivers leave (default: 10)")
    add(
        "--repair-bytes-per-second",
        help="columns that lack fragments are repaired so fast while drivers evict or refill (default: "
        f"{exact_size(BESIDE_BYTES_PER_SECOND)})",
    )
    add("--data-address", help="address for drivers: tcp:HOST:PORT (default: by --tcp or --unix)")
    add(
        "--nics",
        metavar="NIC=LEAF,…",
        help="leaf of each NIC, if the fleet's description does not have it (eth0=leaf-1)",
    )
    given = Options(parser, KIND.prefix, arguments, environment)
    take, common = given.take, KIND.common(given)
    settings = Settings(
        **common,
        unix=take("unix", common["state_dir"] / "data.sock", path, "a path").absolute(),
        tcp=take("tcp", None, place, "HOST:PORT"),
        tls_certificate=given.readable("tls_certificate"),
        tls_key=given.readable("tls_key"),
        tls_authorities=given.readable("tls_authorities"),
        plain_tcp=given.is_yes("plain_tcp"),
        memory_bytes=take("memory", None, parse_size, SIZE_FORMS),
        drain_seconds=take(
            "drain_seconds", 10.0, _drain_seconds, f"at most an hour, such as {DURATION_FORMS}"
        ),
        repair_bytes_per_second=take(
            "repair_bytes_per_second", BESIDE_BYTES_PER_SECOND, _rate, f"at least 64KiB: {SIZE_FORMS}"
        ),
        data_address=take("data_address", None, _address, "tcp:HOST:PORT or unix:/PATH"),
        nics=take("nics", (), _nics, "NIC=LEAF, or several with commas"),
    )
    given.problems += _contradictions(settings)
    return with_token(given, settings)


def _drain_seconds(text: str) -> float:
    return parse_duration(text, high=3600)


def _rate(text: str) -> int:
    return parse_size(text, low=64 << 10)  # less would take years


def _address(text: str) -> str:
    return str(Address.parse(text))


def _nics(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [one.strip().partition("=") for one in text.split(",")]
    return tuple((name(nic), name(leaf)) for nic, _, leaf in pairs)


def _contradictions(settings: Settings) -> list[str]:
    problems = []
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
