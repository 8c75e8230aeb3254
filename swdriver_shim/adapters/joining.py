"""How an engine joins a console: what a person writes, and the driver in the engine that follows.

    {"console": "https://console.example.org", "join": "/run/secrets/join", "name": "job7"}

All else comes from the console, with the desired document: agents, orgs, their keys and policies, what
claims are signed with, and where telemetry goes. `join` is a file with a join token; it is needed once.
Identity and document lie in the state directory, so that the next start needs neither token nor console.

Two engines that are to be one driver, one after the other, share its state directory. With `handover`,
a folder of its own for each, the second waits for the identity while it serves, and the first gives it
away when it is told to: see `handover`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Final, TypeAlias

from kvss_agent import native
from kvss_agent.documents import Invalid
from kvss_agent.process import daemon
from kvss_agent.process.folder_watch import FolderWatch
from kvss_agent.process.state_dir import try_lock
from kvss_agent.security.identity import Unusable
from swdriver_shim.adapters.claims import ClaimVerifier
from swdriver_shim.adapters.handover import (
    CacheState,
    Goal,
    Handover,
    HandoverState,
    Users,
    same_but_for_time,
)
from swdriver_shim.adapters.join_config import JoinConfig
from swdriver_shim.daemon.host import DriverHost, HostThread
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.data_plane.homes import Home
from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.data_plane.worker.client import RemoteShard
from swdriver_shim.desired import ModelSpec
from swdriver_shim.driver import Driver
from swdriver_shim.keys import Keys
from swdriver_shim.prefixes import LocalPrefixes

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.05  # between looks at whether the identity is free, or all shards are open
SETTLED_SECONDS: Final = 0.5  # once they are. Goals are seen at once where their folder can be watched
REASON_CHARACTERS_MAX: Final = 1000
RETRY_SECONDS: Final = 1.0  # after a start that has failed
LEAVE_SECONDS: Final = 5.0  # for loads and stores that are under way, before the driver is stopped

RemoteShards: TypeAlias = Callable[[str, int, Home, PathSpec | None], RemoteShard]


class JoinedDriver:
    """The driver of an engine that has joined a console, or is about to.

    `shim` is one without a document, and gets none, while another process has the identity.
    """

    def __init__(
        self,
        config: JoinConfig,
        model: ModelSpec,
        engine: str,
        remote_shards: Callable[[Path], RemoteShards] | None = None,
    ) -> None:
        """It follows the stored document from here on, and newer ones as they come. `remote_shards`: for
        a folder of notes, what makes the stand-ins of shards, as of `Shim`. Raises Invalid, OSError and
        Unusable, each with a sentence. With `config.handover` it waits for nobody, and raises OSError
        only where that folder can't be written: all else is done beside, and said there."""
        self.model = model
        self.users = Users()
        self._config = config
        self._engine = engine
        self._remote_shards = remote_shards
        self._detached = self.shim = _shim_of_nobody(config.name, model)
        self._started: contextlib.ExitStack | None = None
        self._closed = threading.Event()
        self._follower: threading.Thread | None = None
        self._handover: Handover | None = None
        self._watch: FolderWatch | None = None
        self._reported: HandoverState | None = None
        native.build_in_background()
        self._verifier: tuple[bytes, ClaimVerifier] | None = None
        if config.handover is None:
            self._start(None)
            return
        self._handover = Handover(Path(config.handover))
        self._report(self._handover, CacheState.WAITING)
        self._watch = FolderWatch(Path(config.handover), LOOK_SECONDS)
        self._follower = threading.Thread(
            target=self._follow,
            args=(self._handover, self._watch),
            name="tidegate-handover",
            daemon=True,
        )
        self._follower.start()

    @property
    def is_attached(self) -> bool:
        """Whether this process is the driver."""
        return self.shim is not self._detached

    def claims(self) -> ClaimVerifier | None:
        """None while there is no key that claims could be signed with."""
        shim = self.shim
        told = shim.desired
        key = told.claims_key if told else None
        if key is None:
            return None
        if self._verifier is None or self._verifier[0] != key:
            self._verifier = key, ClaimVerifier(key, shim.name)
        return self._verifier[1]

    def prefixes(self, org: str, adapter: str = "") -> LocalPrefixes:
        """The stored prefixes of an org, for an engine whose driver moves bytes itself."""
        return JoinedPrefixes(self, org, adapter)

    def close(self) -> None:
        self._closed.set()
        if self._follower and self._watch:
            self._watch.wake()
            self._follower.join()
            self._watch.close()
            self._watch = None
        self._stop()

    def leave(self, seconds: float) -> bool:
        """Use the driver no more, and wait until nothing of it is under way, at most so long; whether
        nothing is. Called before it is stopped while the engine goes on."""
        return self.users.close(seconds)

    # The driver

    def _start(self, lock: IO[bytes] | None) -> None:
        """Be the driver. `lock`: of the state directory, if it is taken already; it is ours either
        way."""
        with contextlib.ExitStack() as started:  # a start that fails leaves nothing taken
            if lock:
                started.callback(lock.close)
            settings = self._config.settings(self.model, self._engine)
            host = DriverHost(settings, lock)
            notes = settings.state_dir / "notes"
            started.callback(host.close)
            shim = Shim(
                settings.name,
                settings.state_dir,
                f"{daemon.software()} in {self._engine}",
                token=settings.token,
                model=self.model,
                remote_shard=self._remote_shards(notes) if self._remote_shards else None,
                notes=notes,
                trust=host.trust,
            )
            started.callback(shim.stop, hands_over=self._handover is not None)
            shim.start()
            started.callback(HostThread(partial(host.running, shim)).close)
            self._started = started.pop_all()
        self.users.open()
        self.shim = shim

    def _stop(self) -> None:
        """As at the end of the process: the driver leaves its note, and the lock is free at last."""
        started, self._started = self._started, None
        if started is None:
            return
        if self._handover and not self.leave(LEAVE_SECONDS):
            log.warning("The driver is stopped though loads or stores are under way: they fail")
        self.shim = self._detached
        started.close()

    # Its identity

    def _follow(self, handover: Handover, watch: FolderWatch) -> None:
        """Attach and release as the goal says, until `close`."""
        reason, retry_at = "", 0.0
        while not self._closed.is_set():
            try:
                if handover.goal() is Goal.RELEASE:
                    if self.is_attached:
                        self._stop()
                        log.info("The driver's identity is released: this engine serves without a cache")
                    reason, state = "", CacheState.RELEASED
                else:
                    if not self.is_attached and time.monotonic() >= retry_at:
                        reason = self._try_to_attach()
                        retry_at = time.monotonic() + RETRY_SECONDS if reason else 0.0
                    state = CacheState.ATTACHED if self.is_attached else CacheState.WAITING
                self._report(handover, state, reason)
            except Exception as error:  # noqa: BLE001 - without this thread nothing is handed over any more
                log.warning("Whether this engine has the driver is looked at again: %s", error)
                self._closed.wait(RETRY_SECONDS)
            watch.wait(SETTLED_SECONDS if self._is_settled() else LOOK_SECONDS)

    def _is_settled(self) -> bool:
        """Nothing is awaited but another goal."""
        said = self._reported
        return said is not None and (said.ready or said.cache is CacheState.RELEASED)

    def _try_to_attach(self) -> str:
        """Become the driver, if nobody is. Why it could not be started."""
        try:
            if (lock := try_lock(self._config.directory)) is None:
                return ""
            self._start(lock)
        except (OSError, Invalid, Unusable) as error:
            log.warning("The driver can't start, and is tried again: %s", error)
            return str(error)
        log.info("This engine has the identity of driver %s", self._config.name)
        return ""

    def _report(self, handover: Handover, cache: CacheState, reason: str = "") -> None:
        shim = self.shim
        state = HandoverState(
            cache,
            os.getpid(),
            time.time(),
            ready=shim.has_driver and shim.is_ready,
            generation=shim.observed_generation,
            reason=reason[:REASON_CHARACTERS_MAX],
        )
        if same_but_for_time(self._reported, state):
            return
        handover.set_state(state)
        self._reported = state


def _shim_of_nobody(name: str, model: ModelSpec) -> Shim:
    """It has no document, and refuses all."""
    made = Shim(name, None, daemon.software(), model=model)
    made.stop()
    return made


class JoinedPrefixes(LocalPrefixes):
    """The prefixes of an org at a `JoinedDriver`. Until the console has sent a document that has the
    org, nothing of it is cached."""

    def __init__(self, joined: JoinedDriver, org: str, adapter: str = "") -> None:
        @contextlib.contextmanager
        def here() -> Iterator[tuple[Driver, Keys] | None]:
            """As of this moment: an org may come, go, or get another secret, and the identity be given
            away."""
            with joined.users.one() as may:
                shim = joined.shim
                found = shim.org(org) if may and shim.has_driver else None
                yield (shim.mover, shim.keys(found, adapter)) if found else None

        self.layout = joined.model.shape()
        self.namespace = joined.model.namespace(adapter)
        self._here = here
