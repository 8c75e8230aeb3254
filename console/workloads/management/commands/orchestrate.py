"""`manage.py orchestrate`: make workloads what people want them to be, until told to stop.

Any number may run: one leads, and another takes over within seconds when it ends.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from console.placement import solvers
from console.workloads.leader.cluster import ClusterLink, NoCluster, channel
from console.workloads.leader.election import Election
from console.workloads.leader.endpoints import EndpointWriter
from console.workloads.leader.hint_listener import HintListener
from console.workloads.leader.orchestrator import LOCK, Orchestrator
from telemetry.emit.reporter import Reporter
from telemetry.notify import notify
from telemetry.stop import StopSignal

log = logging.getLogger(__name__)

KIND: Final = "orchestrator"
WATCHDOG_SECONDS: Final = 1.0


class Command(BaseCommand):
    requires_system_checks = ()  # `prepare` has done them; they load every page, which takes a second
    help = "Run workloads on the cluster until told to stop. Of several one at a time leads."

    def handle(self, *_args: Any, **_options: Any) -> None:
        try:
            channel().close()
        except (NoCluster, OSError) as error:
            raise CommandError(str(error)) from None
        orchestrator = Orchestrator(
            Election(LOCK),
            EndpointWriter(settings.ENDPOINTS_URL),
            lambda changed: ClusterLink(channel(), changed),
        )
        reporter = Reporter(
            *(settings.TELEMETRY_URL, settings.OTLP_URL, KIND, settings.VERSION),
            collect=orchestrator.figures.collect,
        )
        listener = HintListener(orchestrator.news.add)
        stopped = StopSignal()
        listener.start()
        notify("READY=1")
        _load_solvers()
        while not stopped.is_set():
            pause = stopped.run(orchestrator.round)
            notify("WATCHDOG=1")
            if pause:
                stopped.wait(pause)
            else:
                orchestrator.wait()
        notify("STOPPING=1")
        stopped.run(orchestrator.stop)
        listener.stop()
        reporter.stop()
        log.info("Stopped")


def _load_solvers() -> None:
    """Before the first round, so that no plan waits for it: on a busy machine it takes longer than
    whoever asks whether this process is alive is patient. Raises what the import raises."""
    with ThreadPoolExecutor(1, "solvers") as thread:
        loading = thread.submit(solvers.load)
        while not wait([loading], WATCHDOG_SECONDS).done:
            notify("WATCHDOG=1")
        loading.result()
