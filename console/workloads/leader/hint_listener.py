"""Hears from PostgreSQL that workloads, or what they run on, have changed."""

from __future__ import annotations

import logging
import os
import re
import select
import threading
from collections.abc import Callable
from typing import Final

import psycopg
from django.conf import settings
from django.db import connection

from console.database_address import conninfo
from console.fleet.models import ProcessKind
from console.workloads import changes
from telemetry import hints
from telemetry.topics import SESSION, WORKLOAD

log = logging.getLogger(__name__)

STOP_SECONDS: Final = 2.0  # for what it does with a hint
AGAIN_SECONDS: Final = 1.0
HOME: Final = re.compile(r"(.+)-\d+-\d+")  # the name of a driver


class HintListener:
    """Hears of changed intent, and of what becomes of sessions and drivers, from PostgreSQL, on a
    connection of its own, in a thread of its own."""

    def __init__(self, heard: Callable[[str | None], None]) -> None:
        self._heard = heard
        self._ends = threading.Event()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._name = connection.settings_dict["NAME"]
        self._thread = threading.Thread(target=self._run, name="hints", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        os.eventfd_write(self._woken, 1)
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self._listen()
            except psycopg.Error as error:
                log.warning("Hints do not come in: %s", error)
                self._ends.wait(AGAIN_SECONDS)

    def _listen(self) -> None:
        with psycopg.connect(
            conninfo(settings.LISTEN_URL, dbname=self._name), autocommit=True
        ) as listening:
            listening.execute(f"LISTEN {hints.CHANNEL}")
            self._heard(None)  # what came meanwhile
            poll = select.poll()  # psycopg looks ten times a second while it waits
            poll.register(listening.fileno(), select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            while not self._ends.is_set():
                for notice in listening.notifies(timeout=0):
                    self._take(notice.payload)
                poll.poll()

    def _take(self, payload: str) -> None:
        topic, kind = hints.read(payload)
        what, _, name = topic.partition(":")
        if what == WORKLOAD:
            if kind == changes.INTENT:
                self._heard(name)
        elif what == SESSION:  # it has boxes now, or a job has started or ended
            self._heard(name)
        elif what == ProcessKind.DRIVER and (home := HOME.fullmatch(name)):  # it has joined, say
            self._heard(home[1])
