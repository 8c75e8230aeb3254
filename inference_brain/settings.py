"""The settings of a brain: flags, or environment variables with the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from inference_brain.api.app import Bounds
from inference_brain.api.generate import Patience
from inference_brain.brain import Options as BrainOptions
from inference_brain.picker.exchange import Bounds as PickerBounds
from inference_brain.picker.settings import PickerSettings, Tls
from kvss_agent.http.client import Timeouts
from kvss_agent.process.options import Options, name, place
from kvss_agent.process.settings import (
    ProcessKind,
    ProcessSettings,
    is_loopback,
    with_token,
)
from telemetry.script import program
from telemetry.units import DURATION_FORMS, parse_duration, parse_size

BODY_BYTES_MIN: Final = 64 << 10
CONNECTIONS: Final = 10_000
CONNECTIONS_MAX: Final = 1_000_000
KIND: Final = ProcessKind(
    program=f"{program('inference_brain')} serve",
    description="Serve OpenAI's API: each request goes where its first token comes soonest.",
    prefix="BRAIN_",
    state_dir=".brain",
    port=8430,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ProcessSettings):
    listen: tuple[str, int] = ("127.0.0.1", 8440)
    certificate: Path | None = None
    key: Path | None = None
    trusted: tuple[str, tuple[str, int]] | None = None  # an org, and where it needs no keys
    connections: int = CONNECTIONS
    picker: PickerSettings | None = None
    options: BrainOptions = field(default_factory=BrainOptions)


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Flags and environment. Raises WrongSettings with all that is wrong at once."""
    parser = KIND.parser()
    add = parser.add_argument
    add("--listen", help="HOST:PORT of OpenAI's API (default: 127.0.0.1:8440)")
    add("--tls-certificate", metavar="FILE", help="PEM: with it the API is HTTPS (default: none)")
    add("--tls-key", metavar="FILE", help="PEM: the key of --tls-certificate")
    add(
        "--plain-listen",
        help="yes: the API without TLS beyond loopback, for private networks (default: no)",
    )
    add(
        "--trusted",
        metavar="ORG=HOST:PORT",
        help="also serve the API here, where requests without a key are this org's (default: none)",
    )
    add("--replica-ca", metavar="FILE", help="PEM: who vouches for replicas beside the system's")
    add("--connections", metavar="N", help=f"clients at once (default: {CONNECTIONS})")
    add("--body-max", metavar="SIZE", help="the longest body of a request (default: 32MiB)")
    add("--bodies-memory", metavar="SIZE", help="memory for all bodies at once (default: 2GiB)")
    add("--connect-timeout", metavar="TIME", help="until a replica is connected (default: 2s)")
    add("--first-token-timeout", metavar="TIME", help="until a stream begins (default: 10m)")
    add("--token-timeout", metavar="TIME", help="between two tokens of a stream (default: 60s)")
    add("--answer-timeout", metavar="TIME", help="until an answer is whole (default: 1h)")
    add("--client-timeout", metavar="TIME", help="until a client takes more of it (default: 30s)")
    add("--picker", metavar="HOST:PORT", help="listen for gateways, over ext_proc (default: none)")
    add("--picker-certificate", metavar="FILE", help="PEM: with it gateways come over TLS")
    add("--picker-key", metavar="FILE", help="PEM: the key of --picker-certificate")
    add("--picker-client-ca", metavar="FILE", help="PEM: who signs certificates of gateways")
    add("--access-log", help="yes: a line for each request, without prompts (default: yes)")
    given = Options(parser, KIND.prefix, arguments, environment)
    take = given.take

    def seconds(name: str, default: float) -> float:
        return take(name, default, _positive_duration, f"a time such as {DURATION_FORMS}")

    def size(name: str, default: int) -> int:
        return take(name, default, _size_from(BODY_BYTES_MIN), "a size of 64KiB or more")

    listen = take("listen", ("127.0.0.1", 8440), place, "HOST:PORT")
    certificate, key = given.pair("tls_certificate", "tls_key")
    trusted = take("trusted", None, _org_at, "ORG=HOST:PORT")
    options = BrainOptions(
        timeouts=Timeouts(
            seconds("connect_timeout", 2.0),
            seconds("first_token_timeout", 600.0),
            seconds("token_timeout", 60.0),
        ),
        patience=Patience(seconds("answer_timeout", 3600.0), seconds("client_timeout", 30.0)),
        bounds=Bounds(size("body_max", 32 << 20), size("bodies_memory", 2 << 30)),
        authorities=given.readable("replica_ca"),
        logs_access=given.is_yes("access_log", default=True),
        trusted_org=trusted[0] if trusted else "",
    )
    settings = Settings(
        **KIND.common(given),
        listen=listen,
        certificate=certificate,
        key=key,
        trusted=trusted,
        connections=given.count("connections", CONNECTIONS, CONNECTIONS_MAX),
        picker=_picker(given, options.bounds),
        options=options,
    )
    bounds = options.bounds
    if bounds.bodies_bytes_max < 2 * bounds.body_bytes_max:
        given.problems.append(
            "--bodies-memory has to be twice --body-max, or more: in less there may be no room for a "
            "body, however often its client tries again."
        )
    plain = given.is_yes("plain_listen")
    picker = settings.picker
    for flag, (host, port), is_private in (
        ("--listen", listen, certificate is not None),
        *([("--picker", picker.listen, picker.tls is not None)] if picker else []),
        *([("--trusted", trusted[1], False)] if trusted else []),
    ):
        if not (is_private or plain or is_loopback(host)):
            given.problems.append(
                f"{flag} {host}:{port} can be reached by others: keys and prompts could be read on the "
                "way. Give it a certificate and a key, listen on 127.0.0.1, or take --plain-listen yes "
                "where nobody else listens."
            )
    return with_token(given, settings)


def _picker(given: Options, bounds: Bounds) -> PickerSettings | None:
    listen = given.take("picker", None, place, "HOST:PORT")
    certificate, key = given.pair("picker_certificate", "picker_key")
    authority = given.readable("picker_client_ca")
    if authority and not certificate:
        given.problems.append("--picker-client-ca needs --picker-certificate.")
    if (certificate or key) and listen is None:
        given.problems.append("--picker-certificate needs --picker: where to listen.")
    if listen is None:
        return None
    tls = Tls(certificate, key, authority) if certificate and key else None
    return PickerSettings(listen, tls, PickerBounds(bounds.body_bytes_max))


def _positive_duration(text: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise ValueError(text)
    return seconds


def _size_from(low: int) -> Callable[[str], int]:
    return lambda text: parse_size(text, low=low)


def _org_at(text: str) -> tuple[str, tuple[str, int]]:
    org, _, where = text.partition("=")
    return name(org.strip()), place(where)
