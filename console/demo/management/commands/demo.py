"""`manage.py demo`: create the demo, and run its engines until SIGTERM. Part of `make up`."""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import Any, Final

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.db import close_old_connections

from console.demo import engine, places, seeding, story
from console.demo.spine import Spine
from console.fleet.models import Driver
from console.operations.services import Busy
from console.sessions.plans.proposals import CannotPlan
from kvss_agent.security.trust import AUTHORITIES_FILE
from swdriver_shim.adapters.remote import ExpectedDriver, Refused, RemotePrefixes
from swdriver_shim.adapters.wafer import Wafer
from telemetry.notify import notify

log = logging.getLogger(__name__)

ALIVE_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 2.0
LATE_SECONDS_MAX: Final = 2.0  # a later schedule is shifted instead of caught up with


class Command(BaseCommand):
    help = "Create the demo of `make up`, and run its engines until SIGTERM."

    def handle(self, *_args: Any, **_options: Any) -> None:
        if not settings.DEMO:
            raise CommandError("The demo is off: TIDEGATE_DEMO is not set, or false.")
        if seeding.seed():
            log.info("Created a fleet of %d nodes, and %d orgs", len(places.NODES), len(story.ORGS))
        seeding.write_down(settings.STATE_DIR)
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        threads = [
            threading.Thread(target=Serving(served, stopped).run, name=served.driver)
            for served in story.SERVED
        ]
        with Spine(settings.STATE_DIR):
            for thread in threads:
                thread.start()
            notify("READY=1")
            while not stopped.wait(ALIVE_SECONDS):
                if all(thread.is_alive() for thread in threads):
                    notify("WATCHDOG=1")
            notify("STOPPING=1")
        for thread in threads:
            thread.join()


class Serving:
    """The engine of one driver, in a thread of its own; it retries while driver or console are away."""

    def __init__(self, served: story.Served, stopped: threading.Event) -> None:
        self._served = served
        self._stopped = stopped
        self._wafer = Wafer(served.layout, served.model)
        self._asks = story.asks(served)
        self._began = 0.0
        self._remotes: dict[str, RemotePrefixes] = {}
        self._said = ""

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                if seeding.has_job(self._served):
                    self._serve()
            except (DatabaseError, CannotPlan, Busy, Refused, OSError) as error:
                self._say(f"{self._served.driver} waits: {error}")
            close_old_connections()
            self._stopped.wait(AGAIN_SECONDS)
        self._forget()

    def _serve(self) -> None:
        """Send requests until the driver stops answering."""
        self._forget()
        url = Driver.objects.values_list("control_url", flat=True).get(name=self._served.driver)
        close_old_connections()
        for ask in self._asks:
            now = time.monotonic()
            self._began = (
                max(self._began, now - ask.at - LATE_SECONDS_MAX) if self._began else now - ask.at
            )
            if self._stopped.wait(max(0.0, self._began + ask.at - now)):
                return
            remote = self._remote(url, ask.org)
            engine.serve(remote, self._wafer, ask)
            if remote.lost_because:
                return
            self._say(f"{self._served.driver} serves")

    def _say(self, what: str) -> None:
        """Log the state when it changes."""
        if what != self._said:
            self._said = what
            log.info("%s", what)

    def _remote(self, url: str, org: str) -> RemotePrefixes:
        if org not in self._remotes:
            token = places.caller_token(settings.STATE_DIR, org).read_text()
            driver = self._served.driver
            own = places.directory_of(settings.STATE_DIR, driver) / AUTHORITIES_FILE
            expected = ExpectedDriver(own, driver) if url.startswith("https:") else None
            self._remotes[org] = RemotePrefixes(url, token, self._served.spec, expected=expected)
        return self._remotes[org]

    def _forget(self) -> None:
        for remote in self._remotes.values():
            remote.close()
        self._remotes.clear()
