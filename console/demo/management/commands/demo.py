"""`manage.py demo`: create the demo, and run its engines and clients until SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.db import close_old_connections

from console.demo import places, seeding, story
from console.demo.clients import Clients
from console.demo.engine_server import EngineServer
from console.demo.spine import Spine
from console.fleet.models import Brain, Driver
from console.operations.services import Busy
from console.sessions.plans.proposals import CannotPlan
from kvss_agent.security.trust import AUTHORITIES_FILE
from swdriver_shim.adapters.remote import ExpectedDriver, RemotePrefixes
from telemetry.notify import notify

log = logging.getLogger(__name__)

ALIVE_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 2.0
KNOWN_SECONDS: Final = 5.0  # for which the brain's address and orgs of salts are not asked for again


class Command(BaseCommand):
    help = "Create the demo of `make up`, and run its engines and clients until SIGTERM."

    def handle(self, *_args: Any, **_options: Any) -> None:
        if not settings.DEMO:
            raise CommandError("The demo is off: TIDEGATE_DEMO is not set, or false.")
        state = settings.STATE_DIR
        if seeding.seed():
            log.info("Created a fleet of %d nodes, and %d orgs", len(places.NODES), len(story.ORGS))
        seeding.write_down(state)
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        drivers = [DriverOf(served, state, stopped) for served in story.SERVED]
        engines = [_engine(driver, state) for driver in drivers]
        urls = {
            driver.served.driver: f"http://127.0.0.1:{engine.port}"
            for driver, engine in zip(drivers, engines, strict=True)
        }
        seeding.serve_models(state, urls)
        brain = BrainAddress()
        loops = {
            **{f"driver {one.served.driver}": one.run for one in drivers},
            **{f"engine {name}": one.run for name, one in zip(urls, engines, strict=True)},
            **{
                f"clients of {served.model}": Clients(served, state, brain, stopped).run
                for served in story.MODELS
            },
        }
        threads = [threading.Thread(target=run, name=name) for name, run in loops.items()]
        with Spine(state):
            for thread in threads:
                thread.start()
            notify("READY=1")
            while not stopped.wait(ALIVE_SECONDS):
                if all(thread.is_alive() for thread in threads):
                    notify("WATCHDOG=1")
            notify("STOPPING=1")
        for engine in engines:
            engine.close()
        for thread in threads:
            thread.join()


def _engine(driver: DriverOf, state: Path) -> EngineServer:
    """It listens where it did before, if it can: brains know it there."""
    path = places.engine_port(state, driver.served.driver)
    before = int(path.read_text()) if path.exists() else 0
    engine = EngineServer(driver.served, places.tokenizer(state), driver.prefixes, before)
    path.write_text(str(engine.port))
    return engine


class BrainAddress:
    """Where the demo's brain serves, as it has told the console."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known, self._until = "", 0.0

    def __call__(self) -> str:
        with self._lock:
            if time.monotonic() >= self._until:
                self._until = time.monotonic() + KNOWN_SECONDS
                try:
                    found = Brain.objects.filter(name=places.BRAIN, lost_at=None).exclude(api_url="")
                    self._known = found.values_list("api_url", flat=True).first() or ""
                except DatabaseError as error:
                    log.warning("The brain's address is not known: %s", error)
                finally:
                    close_old_connections()
            return self._known


class DriverOf:
    """The driver of one engine: made a job of its session as soon as that can be."""

    def __init__(self, served: story.Served, state: Path, stopped: threading.Event) -> None:
        self.served = served
        self._state = state
        self._stopped = stopped
        self._lock = threading.Lock()
        self._url = ""  # empty while it can't be asked
        self._orgs: dict[str, str] = {}  # by salt
        self._orgs_until = 0.0
        self._remotes: dict[str, RemotePrefixes] = {}
        self._said = ""

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                url = self._found() if seeding.has_job(self.served) else ""
                self._say(f"{self.served.driver} {'serves' if url else 'waits for its session'}")
            except (DatabaseError, CannotPlan, Busy, OSError) as error:
                url = ""
                self._say(f"{self.served.driver} waits: {error}")
            with self._lock:
                if url != self._url:
                    self._url = url
                    self._forget()
            close_old_connections()
            self._stopped.wait(AGAIN_SECONDS)
        with self._lock:
            self._forget()

    def prefixes(self, salt: str) -> RemotePrefixes | None:
        """Of the org of this salt; None while the driver is not there, and for nobody's."""
        with self._lock:
            if salt not in self._orgs and time.monotonic() >= self._orgs_until:
                self._orgs_until = time.monotonic() + KNOWN_SECONDS
                try:
                    self._orgs = seeding.orgs_by_salt()
                finally:
                    close_old_connections()
            org = self._orgs.get(salt)
            return self._remote(org) if self._url and org else None

    def _found(self) -> str:
        seeding.give_driver(self.served)
        return Driver.objects.values_list("control_url", flat=True).get(name=self.served.driver)

    def _remote(self, org: str) -> RemotePrefixes | None:
        if org not in self._remotes:
            path = places.caller_token(self._state, org)
            if not path.exists():  # an org that people have made
                return None
            driver = self.served.driver
            own = places.directory_of(self._state, driver) / AUTHORITIES_FILE
            expected = ExpectedDriver(own, driver) if self._url.startswith("https:") else None
            made = RemotePrefixes(self._url, path.read_text(), self.served.spec, expected=expected)
            self._remotes[org] = made
        return self._remotes[org]

    def _forget(self) -> None:
        for remote in self._remotes.values():
            remote.close()
        self._remotes.clear()

    def _say(self, what: str) -> None:
        """Log the state when it changes."""
        if what != self._said:
            self._said = what
            log.info("%s", what)
