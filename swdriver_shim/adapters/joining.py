"""How an engine joins a console: what a person writes, and the driver in the engine that follows.

    {"console": "https://console.example.org", "join": "/run/secrets/join", "name": "job7"}

All else comes from the console, with the desired document: agents, orgs, their keys and policies, what
claims are signed with, and where telemetry goes. `join` is a file with a join token; it is needed once.
Identity and document lie in the state directory, so that the next start needs neither token nor console.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Self, TypeAlias

import msgspec
from msgspec import Meta

from kvss_agent import native
from kvss_agent.desired import Document
from kvss_agent.http.api import Invalid
from kvss_agent.process import daemon
from kvss_agent.process.options import WrongSettings
from kvss_agent.process.own_address import own_address
from swdriver_shim.daemon.host import DriverHost, HostThread
from swdriver_shim.daemon.settings import Settings, parse
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.data_plane.homes import Home
from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.data_plane.worker.client import RemoteShard
from swdriver_shim.desired import ModelSpec, Text
from swdriver_shim.driver import Driver
from swdriver_shim.keys import Keys
from swdriver_shim.prefixes import LocalPrefixes

log = logging.getLogger(__name__)

RANK: Final = "{rank}"
ANYWHERE: Final = "0.0.0.0"  # noqa: S104 - over TLS, and it wants the console's certificate
FIELDS: Final = {"console_ca": "ca", "join_token": "join"}  # that have other names than a daemon's

RemoteShards: TypeAlias = Callable[[str, int, Home, PathSpec | None], RemoteShard]
Url = Annotated[str, Meta(pattern=r"^https?://", max_length=500)]


class NameSpec(Document, frozen=True):
    """The name of the weights. Engines with an equal one share KV."""

    name: Annotated[str, Meta(min_length=1, max_length=500)]
    revision: Text = ""


class JoinConfig(Document, frozen=True):
    """What an engine is told of the console that it joins.

    `control`: HOST:PORT of the driver's API, which the console reaches at `control_url`; by default any
    port at the address that this machine reaches the console from.
    """

    console: Url
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    join: Annotated[str, Meta(max_length=4096)] | None = None
    ca: Annotated[str, Meta(max_length=4096)] | None = None
    plain_console: bool = False
    control: Text | None = None
    control_url: Url | None = None
    telemetry: Text | None = None
    state_dir: Annotated[str, Meta(max_length=4096)] | None = None

    def of_rank(self, rank: int, engines: int) -> Self:
        """For one of so many engines beside each other: `{rank}` stands for which. Raises Invalid where
        they would share a driver, or its state or address."""
        told = {name: getattr(self, name) for name in ("name", "state_dir", "control", "control_url")}
        given = {name: value for name, value in told.items() if value is not None}
        for name, value in given.items():
            if (rank or engines > 1) and RANK not in value and name != "control":  # any port may do
                raise Invalid(
                    "With data parallelism each engine has a driver of its own: put {rank} into "
                    f"`{name}`, as in `name` job7-{{rank}}."
                )
        return msgspec.structs.replace(
            self, **{name: value.replace(RANK, str(rank)) for name, value in given.items()}
        )

    def settings(self, model: ModelSpec, engine: str) -> Settings:
        """The settings of its driver, as those of a daemon. Raises Invalid with all that is wrong."""
        token = self._join_token()
        given = {
            "name": self.name,
            "console": self.console,
            "join_token": token,
            "console_ca": self.ca,
            "plain_console": "yes" if self.plain_console else None,
            "control": self.control or self._place(),
            "control_url": self.control_url,
            "telemetry": self.telemetry,
            "state_dir": self.state_dir or str(default_state_dir() / self.name),
        }
        environment = {
            f"SWDRIVER_{name.upper()}": value for name, value in given.items() if value is not None
        }
        try:
            found = parse((), environment)
        except WrongSettings as error:
            # As settings of a daemon, these are called by flags.
            raise Invalid(re.sub(r"--([a-z-]+)( yes)?", _as_field, str(error))) from None
        if found.is_new and token is None:
            log.warning("It has not joined %s yet: %s", self.console, self._missing_token())
        return replace(found, model=model, engine=engine)

    def _place(self) -> str:
        """Any port, at the address that the console reaches; at all of them while it is not known."""
        address = own_address(self.console)
        if address is None:
            log.warning(
                "%s can't be reached: the driver's API listens at all addresses of this machine",
                self.console,
            )
        return f"{_host(address or ANYWHERE)}:0"

    def _missing_token(self) -> str:
        if self.join is None:
            return "set `join`, a file with a join token. Until then nothing is cached."
        return f"there is no join token, since {self.join} does not exist. Until then nothing is cached."

    def _join_token(self) -> str | None:
        """None if the file is not there (any more): whoever has joined needs none."""
        if self.join is None:
            return None
        try:
            return Path(self.join).read_text().strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise Invalid(f"The join token in {self.join} can't be read: {error}.") from None


class JoinedDriver:
    """The driver of an engine that has joined a console, or is about to."""

    def __init__(
        self,
        config: JoinConfig,
        model: ModelSpec,
        engine: str,
        remote_shards: Callable[[Path], RemoteShards] | None = None,
    ) -> None:
        """It follows the stored document from here on, and newer ones as they come. `remote_shards`: for
        a folder of notes, what makes the stand-ins of shards, as of `Shim`. Raises Invalid, OSError and
        Unusable, each with a sentence."""
        self.model = model
        settings = config.settings(model, engine)
        native.build_in_background()
        host = DriverHost(settings)
        notes = settings.state_dir / "notes"
        with contextlib.ExitStack() as started:  # a start that fails leaves nothing taken
            started.callback(host.close)
            self.shim = Shim(
                settings.name,
                settings.state_dir,
                f"{daemon.software()} in {engine}",
                token=settings.token,
                model=model,
                remote_shard=remote_shards(notes) if remote_shards else None,
                notes=notes,
                trust=host.trust,
            )
            started.callback(self.shim.stop)
            self.shim.start()
            started.callback(HostThread(partial(host.running, self.shim)).close)
            self._started = started.pop_all()

    def prefixes(self, org: str, adapter: str = "") -> LocalPrefixes:
        """The stored prefixes of an org, for an engine whose driver moves bytes itself."""
        return JoinedPrefixes(self, org, adapter)

    def close(self) -> None:
        self._started.close()


def _as_field(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    return f"`{FIELDS.get(name, name)}`{' true' if flag[2] else ''}"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def default_state_dir() -> Path:
    """As the XDG base directory specification has it."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tidegate"


class JoinedPrefixes(LocalPrefixes):
    """The prefixes of an org at a `JoinedDriver`. Until the console has sent a document that has the
    org, nothing of it is cached."""

    def __init__(self, joined: JoinedDriver, org: str, adapter: str = "") -> None:
        def here() -> tuple[Driver, Keys] | None:
            """As of this moment: an org may come, go, or get another secret."""
            shim = joined.shim
            found = shim.org(org) if shim.has_driver else None
            return (shim.mover, shim.keys(found, adapter)) if found else None

        self.layout = joined.model.shape()
        self.namespace = joined.model.namespace(adapter)
        self._here = here
