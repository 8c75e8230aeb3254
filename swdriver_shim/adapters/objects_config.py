"""How an engine's configuration names the driver that has the adapter's objects.

    {"url": "http://127.0.0.1:8420", "token_file": "/etc/tidegate/acme.token"}       a daemon
    {"url": "https://127.0.0.1:8420", "token_file": "/etc/tidegate/acme.token",      one of a console's
     "driver": "job-7", "authorities": "/var/lib/swdriver/authorities.pem"}          fleet
    {"state_dir": "/etc/tidegate/engine", "org": "acme"}       a driver in the engine's own process

The org is the token's, or the one that is named here, never one that a request names. The state
directory has the driver's document, `desired.json`. `{rank}` in its path is replaced by the worker's
rank, since each worker then has its own driver and shards. Such a process ends with vLLM's server, if
vLLM has started it: see `process_end`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvss_agent.process.daemon import software
from swdriver_shim.adapters.process_end import end_with_parent, notice_stops
from swdriver_shim.adapters.remote import ExpectedDriver, Objects, RemoteObjects
from swdriver_shim.adapters.weights import process_began, weights_of
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.daemon.verbs import LOAD_SECONDS_MAX
from swdriver_shim.object_store import too_large

DAEMON: Final = frozenset({"url", "token_file"})
DAEMON_OF_FLEET: Final = DAEMON | {"driver", "authorities"}
IN_PROCESS: Final = frozenset({"state_dir", "org"})


WAIT_SECONDS: Final = 0.2  # for tier 2, in threads of the engine; `wait_seconds` says otherwise


class Misconfigured(ValueError):
    """A sentence that says what is wrong and what to write instead."""


class OpenObjects:
    """The objects of an org, or of the orgs that signed claims name. Has to be closed."""

    def __init__(self, objects: Objects, wait_seconds: float, shim: Shim | None = None) -> None:
        self.objects = objects
        self.wait_seconds = wait_seconds
        self._shim = shim

    def of(self, org: str) -> Objects | None:
        """The objects of another org, if the driver is in this process and has an org of this name; else
        None, since a daemon's token belongs to one org."""
        return self._shim.objects_of(org) if self._shim else None

    def close(self) -> None:
        """Once, whoever calls it first."""
        if self._shim:
            self._shim.stop()
        elif isinstance(self.objects, RemoteObjects):
            self.objects.close()


def open_objects(told: Mapping[str, Any], rank: int = 0, value_bytes: int = 0) -> OpenObjects:
    """Read the keys that are named above, and `wait_seconds`; ignore all others. `value_bytes`: the size
    of the engine's values, which a daemon that does not answer yet can't check: they are misses then,
    see `RemoteObjects.put`. Raises Misconfigured."""
    wait_seconds = _wait_seconds(told.get("wait_seconds", WAIT_SECONDS))
    given = {name: str(told[name]) for name in DAEMON_OF_FLEET | IN_PROCESS if told.get(name)}
    if given.keys() in (DAEMON, DAEMON_OF_FLEET):
        made = OpenObjects(_remote(given), wait_seconds)
    elif given.keys() - {"driver"} == IN_PROCESS:  # beside a key for claims it is their audience
        state_dir = Path(given["state_dir"].replace("{rank}", str(rank)))
        made = _in_process(state_dir, given["org"], rank, wait_seconds)
    else:
        said = ", ".join(sorted(given)) or "none of these"
        raise Misconfigured(
            "Configure the driver: url and token_file for a daemon, with driver and authorities if it "
            f"has joined a console; or state_dir and org for one in this process. Found {said}."
        )
    most = made.objects.value_bytes_max
    if value_bytes > most:
        made.close()
        raise Misconfigured(too_large("A value of this engine", value_bytes, most))
    return made


def _wait_seconds(told: Any) -> float:
    """Raises Misconfigured."""
    try:
        seconds = float(told)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds <= LOAD_SECONDS_MAX:
        raise Misconfigured(f"`wait_seconds` is {told}: set 0 to {LOAD_SECONDS_MAX:g} seconds.")
    return seconds


def variant_of(told: Mapping[str, Any], what: str) -> str:
    """The `variant` of an engine, which distinguishes what it does not tell an adapter. Raises
    Misconfigured."""
    if not (variant := str(told.get("variant") or "")):
        raise Misconfigured(
            f'Configure `variant`, a text of yours such as "llama-3 r2 fp8_e4m3": {what}, and engines '
            "whose KV differs would share it."
        )
    return variant


def of_weights(
    model: str,
    told: Mapping[str, Any],
    why: str,
    *,
    commit: str | None = None,
    is_known: bool = True,
) -> tuple[str, str, str]:
    """What distinguishes weights, given the engine's name of its model, and its `variant`. That is
    required of a repository whose `commit` the engine does not tell, and if something else `is_known`
    not to be; `why` says which. Raises Misconfigured."""
    try:
        weights = weights_of(model, None, commit, loaded_after=process_began())
    except OSError as error:
        raise Misconfigured(f"The weights in {model} can't be told apart: {error}.") from error
    is_needed = not weights.revision or not is_known
    variant = variant_of(told, why) if is_needed else str(told.get("variant") or "")
    return weights.name, weights.revision, variant


def _remote(given: Mapping[str, str]) -> RemoteObjects:
    token, expected = _token(Path(given["token_file"])), None
    if "driver" in given:
        expected = ExpectedDriver(Path(given["authorities"]), given["driver"])
    try:
        return RemoteObjects(given["url"], token, expected)
    except (OSError, ValueError) as error:
        raise Misconfigured(f"The daemon at {given['url']} can't be verified: {error}.") from error


def _token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise Misconfigured(f"The token can't be read from {path}: {error.strerror}.") from error


def _in_process(state_dir: Path, org: str, rank: int, wait_seconds: float) -> OpenObjects:
    shim = Shim(f"engine-{rank}", state_dir, software())
    shim.start()
    objects = shim.objects_of(org)
    if objects is None:
        is_told = shim.desired is not None
        shim.stop()
        raise Misconfigured(
            f"The document in {state_dir} has no org {org}, or has a group that is not `alone`."
            if is_told
            else f"There is no valid document {state_dir / 'desired.json'}."
        )
    opened = OpenObjects(objects, wait_seconds, shim)
    notice_stops()
    end_with_parent(opened.close)
    return opened
