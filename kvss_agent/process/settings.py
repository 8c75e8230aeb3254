"""The settings that agents and drivers have in common."""

from __future__ import annotations

import argparse
import logging
import re
import socket
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvss_agent.process.options import Options, file, name, path, place, redis_url, web_url
from telemetry import redis_address
from telemetry.emit.extras import NO_OTLP, has_otlp

if TYPE_CHECKING:
    from kvss_agent.process.membership import Console

log = logging.getLogger(__name__)

REDIS_URL: Final = redis_address.ALLOWED.replace("`", "")
WEB_URL: Final = "a URL that begins with http:// or https://"
JOIN_TOKEN: Final = re.compile(r"tgj_[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    name: str
    state_dir: Path
    control: tuple[str, int]
    token: str = field(default="", repr=False)
    plain_control: bool = False
    is_new: bool = False  # the token was made just now: nobody can know it yet
    telemetry: str | None = field(default=None, repr=False)  # it may have a password in it
    otlp: str | None = None
    log_format: str = "text"
    console: Console | None = None
    control_url: str | None = None

    @property
    def serves_tls(self) -> bool:
        """Whether the control API is TLS: certificates come from a console."""
        return self.console is not None and not self.plain_control

    def warn_of_plain_control(self) -> None:
        """At each start."""
        if not self.serves_tls:
            warn_of_plain(self.control)


S = TypeVar("S", bound=ProcessSettings)


@dataclass(frozen=True, slots=True)
class ProcessKind:
    """What differs in how agents and drivers are set."""

    program: str
    description: str
    prefix: str  # of variables
    state_dir: str
    port: int  # of the control API

    def parser(self) -> argparse.ArgumentParser:
        """With the flags that both have."""
        made = argparse.ArgumentParser(
            prog=self.program,
            description=f"{self.description} Runs as any user.",
            epilog=f"Every option may be set in the environment instead: {self.prefix}STATE_DIR for "
            "--state-dir. A flag wins over the environment.",
        )
        add = made.add_argument
        add("--name", help="name of this process (default: the host name)")
        add(
            "--state-dir",
            help=f"directory of the token and the desired document (default: {self.state_dir})",
        )
        add("--control", help=f"HOST:PORT of the control API (default: 127.0.0.1:{self.port})")
        add(
            "--plain-control",
            help="yes: the control API without TLS, for private networks (default: no with --console; "
            "without one only on loopback)",
        )
        add("--token-file", help="the token of the control API (default: made in the state directory)")
        add("--control-url", help="where the console reaches our API (default: by --control)")
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
        add(
            "--telemetry",
            help="rediss://own@…: the Redis that receives telemetry (default: as the console says)",
        )
        add(
            "--otlp",
            help="http://… of a collector that receives numbers, without /v1/metrics (default: none)",
        )
        add("--log-format", help="text or json (default: text)")
        return made

    def common(self, given: Options) -> dict[str, Any]:
        """The fields of `ProcessSettings`, but for the token."""
        take = given.take
        settings = ProcessSettings(
            name=take("name", socket.gethostname(), name, "1 to 200 letters, digits and . _ -"),
            state_dir=take("state_dir", Path(self.state_dir), path, "a path").absolute(),
            control=take("control", ("127.0.0.1", self.port), place, "HOST:PORT"),
            plain_control=given.is_yes("plain_control"),
            telemetry=take("telemetry", None, redis_url, REDIS_URL, secret=True),
            otlp=take("otlp", None, web_url, WEB_URL),
            log_format=given.log_format(),
            console=_console(given),
            control_url=take("control_url", None, web_url, WEB_URL),
        )
        if settings.otlp and not has_otlp():
            given.problems.append(f"--otlp {NO_OTLP}.")
        host, port = settings.control
        if settings.console is None and not settings.plain_control and not is_loopback(host):
            given.problems.append(
                f"--control {host}:{port} can be reached by others, and without a console there are no "
                "certificates: tokens and keys could be read on the way. Join a console by --console, "
                "listen on 127.0.0.1, or take --plain-control yes where nobody else listens."
            )
        return {one.name: getattr(settings, one.name) for one in fields(settings)}


def with_token(given: Options, settings: S) -> S:
    """The last step. Raises WrongSettings with all that is wrong at once; only then a token is made."""
    token_file = given.take("token_file", None, file, "a file")
    given.check()
    token = given.token(token_file, settings.state_dir)
    given.check()
    return replace(settings, token=token, is_new=given.has_made_token)


def _console(given: Options) -> Console | None:
    from kvss_agent.process.membership import Console  # for those who join, since it takes a while

    url = given.take("console", "", web_url, WEB_URL)
    token = given.take("join_token", "", _join_token, "tgj_…, as the console has shown it", secret=True)
    plain = given.is_yes("plain_console")
    if token and not url:
        given.problems.append("--join-token needs --console: where to join.")
    authorities = given.readable("console_ca")
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


def _join_token(text: str) -> str:
    if not JOIN_TOKEN.fullmatch(text):  # a line break in it would make a header that libraries quote
        raise ValueError(text)
    return text


def warn_of_plain(control: tuple[str, int]) -> None:
    """Of a control API without TLS, unless only this machine reaches it."""
    if not is_loopback(control[0]):
        log.warning(
            "The control API is plain HTTP on %s:%s: tokens and keys can be read on the way", *control
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
