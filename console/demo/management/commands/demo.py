"""`manage.py demo`: create the demo, and run its clients until SIGTERM."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error as DatabaseError
from django.db import close_old_connections

from console.demo import places, real, seeding, story
from console.demo.clients import Clients
from console.demo.spine import Spine
from console.fleet.models import Brain
from console.fleet.nodes import Impossible
from console.placement.topology import Misconfigured
from console.sessions.plans.proposals import CannotPlan
from telemetry.notify import notify
from telemetry.stop import StopSignal

log = logging.getLogger(__name__)

ALIVE_SECONDS: Final = 1.0
KNOWN_SECONDS: Final = 5.0  # for which the brain's address is not asked for again


class Command(BaseCommand):
    requires_system_checks = ()  # `prepare` has done them; they load every page, which takes a second
    help = "Create the demo of `make up`, and run its clients until SIGTERM."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--engine", choices=["vllm"], help="also serve a small model with it")

    def handle(self, *_args: Any, engine: str | None, **_options: Any) -> None:
        if not settings.DEMO:
            raise CommandError("The demo is off: TIDEGATE_DEMO is not set, or false.")
        state = settings.STATE_DIR
        if seeding.seed():
            log.info("Created a fleet of %d nodes, and %d orgs", len(places.NODES), len(story.ORGS))
        if engine:
            _serve_really()
        seeding.write_down(state)
        told, stopped = StopSignal(), threading.Event()
        brain = BrainAddress()
        loops = {
            f"clients of {served.model}": Clients(served, state, brain, stopped).run
            for served in story.SERVED
        }
        threads = [threading.Thread(target=run, name=name) for name, run in loops.items()]
        with Spine(state):
            for thread in threads:
                thread.start()
            notify("READY=1")
            while not told.wait(ALIVE_SECONDS):
                if all(thread.is_alive() for thread in threads):
                    notify("WATCHDOG=1")
            notify("STOPPING=1")
            stopped.set()
        for thread in threads:
            thread.join()


def _serve_really() -> None:
    """The rest of the demo does not depend on it."""
    try:
        if real.serve():
            log.info("Created workload %s, with a real vLLM", real.NAME)
    except (CannotPlan, Impossible, Misconfigured, ValidationError) as error:
        said = " ".join(error.messages) if isinstance(error, ValidationError) else str(error)
        log.warning("Workload %s can't be created: %s", real.NAME, said)


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
