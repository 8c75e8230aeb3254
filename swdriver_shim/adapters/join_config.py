"""What a person, or a manager, writes for an engine that joins a console: see `joining`."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Self

import msgspec
from msgspec import Meta

from kvss_agent.desired import Document
from kvss_agent.documents import Invalid
from kvss_agent.process.options import WrongSettings
from kvss_agent.process.own_address import own_address
from swdriver_shim.desired import ModelSpec, Text

if TYPE_CHECKING:
    from swdriver_shim.daemon.settings import Settings

log = logging.getLogger(__name__)

RANK: Final = "{rank}"
ANYWHERE: Final = "0.0.0.0"  # noqa: S104 - over TLS, and it wants the console's certificate
FIELDS: Final = {"console_ca": "ca", "join_token": "join"}  # that have other names than a daemon's
OF_A_RANK: Final = ("name", "state_dir", "control", "control_url", "handover")

Url = Annotated[str, Meta(pattern=r"^https?://", max_length=500)]


class NameSpec(Document, frozen=True):
    """The name of the weights. Engines with an equal one share KV."""

    name: Annotated[str, Meta(min_length=1, max_length=500)]
    revision: Text = ""


class JoinConfig(Document, frozen=True):
    """What an engine is told of the console that it joins.

    `control`: HOST:PORT of the driver's API, which the console reaches at `control_url`; by default any
    port at the address that this machine reaches the console from. `handover`: a folder of this engine,
    where it is told whether to be the driver; without it, it is from its start on.
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
    handover: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None

    def of_rank(self, rank: int, engines: int) -> Self:
        """For one of so many engines beside each other: `{rank}` stands for which. Raises Invalid where
        they would share a driver, or its state or address."""
        told = {name: getattr(self, name) for name in OF_A_RANK}
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
            "state_dir": str(self.directory),
        }
        from swdriver_shim.daemon.settings import parse  # a driver's, which a manager need not load

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

    @property
    def directory(self) -> Path:
        """The state directory: whoever holds its lock is the driver."""
        return Path(self.state_dir or default_state_dir() / self.name).absolute()

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


def _as_field(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    return f"`{FIELDS.get(name, name)}`{' true' if flag[2] else ''}"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def default_state_dir() -> Path:
    """As the XDG base directory specification has it."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tidegate"
