"""Where an adapter's objects are, as an operator has written it into the engine's configuration.

    {"url": "http://127.0.0.1:8420", "token_file": "/etc/tidegate/acme.token"}       a daemon
    {"url": "https://127.0.0.1:8420", "token_file": "/etc/tidegate/acme.token",      one of a console's
     "driver": "job-7", "authorities": "/var/lib/swdriver/authorities.pem"}          fleet
    {"state_dir": "/etc/tidegate/engine", "org": "acme"}       a driver in the engine's own process

The org is the token's, or the one that is named here: never what a request says. In the state directory
lies the driver's document, `desired.json`; `{rank}` in its name stands for the rank of the worker, since
each has a driver and shards of its own then.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvss_agent.process.daemon import software
from swdriver_shim.adapters.expected_driver import ExpectedDriver
from swdriver_shim.adapters.remote import RemoteObjects
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.objects import Objects

DAEMON: Final = frozenset({"url", "token_file"})
DAEMON_OF_FLEET: Final = DAEMON | {"driver", "authorities"}
IN_PROCESS: Final = frozenset({"state_dir", "org"})


class Misconfigured(ValueError):
    """What is wrong with it, in a sentence that says what to write instead."""


class OpenObjects:
    """The objects of an org, or of any that a signed claim names. To be closed."""

    def __init__(self, objects: Objects, shim: Shim | None = None) -> None:
        self.objects = objects
        self._shim = shim

    def of(self, org: str) -> Objects | None:
        """Of another org of the driver in this process; None if there is none of this name, and at a
        daemon, where the token is one org's."""
        return self._shim.objects_of(org) if self._shim else None

    def close(self) -> None:
        if self._shim:
            self._shim.stop()
        elif isinstance(self.objects, RemoteObjects):
            self.objects.close()


def open_objects(told: Mapping[str, Any], rank: int = 0, value_bytes: int = 0) -> OpenObjects:
    """Whatever else is in the configuration is somebody else's. `value_bytes`: what the engine is going
    to put. Raises Misconfigured."""
    given = {name: str(told[name]) for name in DAEMON_OF_FLEET | IN_PROCESS if told.get(name)}
    if given.keys() in (DAEMON, DAEMON_OF_FLEET):
        made = OpenObjects(_remote(given))
    elif given.keys() == IN_PROCESS:
        made = _in_process(Path(given["state_dir"].replace("{rank}", str(rank))), given["org"], rank)
    else:
        said = ", ".join(sorted(given)) or "none of these"
        raise Misconfigured(
            "Say where the driver is: url and token_file for a daemon, and driver and authorities if it "
            f"is joined to a console; or state_dir and org for one in this process. There is {said}."
        )
    most = made.objects.value_bytes_max
    if value_bytes > most:
        made.close()
        raise Misconfigured(
            f"The engine's pieces have {value_bytes} bytes, and a column of this driver holds {most}: "
            f"its document has to say {-(-value_bytes // COLUMN_TOKENS)} bytes_per_token or more."
        )
    return made


def _remote(given: Mapping[str, str]) -> RemoteObjects:
    token, expected = _token(Path(given["token_file"])), None
    if "driver" in given:
        expected = ExpectedDriver(Path(given["authorities"]), given["driver"])
    try:
        return RemoteObjects(given["url"], token, expected)
    except (OSError, ValueError) as error:
        raise Misconfigured(f"The daemon at {given['url']} can't be recognised: {error}.") from error


def _token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise Misconfigured(f"The token can't be read from {path}: {error.strerror}.") from error


def _in_process(state_dir: Path, org: str, rank: int) -> OpenObjects:
    shim = Shim(f"engine-{rank}", state_dir, software())
    shim.start()
    objects = shim.objects_of(org)
    if objects is None:
        is_told = shim.desired is not None
        shim.stop()
        raise Misconfigured(
            f"The document in {state_dir} has no org {org}, or a group that is not `alone`."
            if is_told
            else f"There is no valid document {state_dir / 'desired.json'}."
        )
    return OpenObjects(objects, shim)
