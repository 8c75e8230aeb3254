"""Celery as idempotent work needs it; what follows from the settings stands there.

A task is taken late: it is acknowledged when it has ended, and given back when its process dies. So
a task may run twice, and is written to have its effect once.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
from typing import Any

from celery import Celery, signals
from celery.schedules import crontab

from console import broker_transport
from console.shell import request_context
from telemetry.emit.emitter import Emitter
from telemetry.notify import notify

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
# `prepare` has checked everything. To do so again takes longer than all else at the start of a worker,
# since it loads every page and the whole API.
os.environ.setdefault("CELERY_SKIP_CHECKS", "1")

REQUEST_ID_HEADER = "tidegate_request_id"
WATCHDOG_SECONDS = 1.0

broker_transport.use()
app = Celery("tidegate", amqp=broker_transport.Amqp, fixups=["console.worker_connections:fixup"])
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


def _every(seconds: float, task: str, expires: float | None = None) -> dict[str, Any]:
    """Nobody does it twice in a row for having been late: it expires when the next one is due."""
    return {"task": task, "schedule": seconds, "options": {"expires": expires or seconds}}


app.conf.beat_schedule = {
    "sweep-operations": _every(1.0, "console.operations.tasks.sweep_operations", expires=5),
    "find-who-is-lost": _every(5.0, "console.fleet.tasks.find_who_is_lost"),
    "replace-lost-nodes": _every(2.0, "console.sessions.tasks.replace_lost_nodes"),
    "forget-former-homes": _every(5.0, "console.sessions.tasks.forget_former_homes"),
    "keep-holders-of-fragments": _every(5.0, "console.sessions.tasks.keep_holders"),
    "look-at-redundancy": _every(10.0, "console.sessions.tasks.look_at_redundancy"),
    "replace-authorities": _every(5.0, "console.authority.tasks.advance"),
    "keep-telemetry-users": _every(2.0, "console.fleet.tasks.keep_telemetry_users"),
    "measure-cpu-of-shards": _every(300.0, "console.fleet.tasks.measure_cpu_of_shards"),
    "look-after-retiring-stores": _every(10.0, "console.fleet.tasks.look_after_retiring_stores"),
    "alerts": _every(10.0, "console.alerts.tasks.tick"),
    "begin-and-end-scheduled-policies": _every(5.0, "console.policies.tasks.run_due"),
    "tell-everyone-what-to-be": _every(30.0, "console.control.tasks.reconcile"),
    "tell-who-is-not-there-yet": _every(5.0, "console.control.tasks.reconcile_unsettled"),
    "forget-what-is-over": {
        "task": "console.shell.tasks.forget_what_is_over",
        "schedule": crontab(minute="*/10"),
        "options": {"expires": 600},
    },
}


@signals.before_task_publish.connect
def _carry_request_id(headers: dict[str, Any], **_: Any) -> None:
    """The request that asked for the work is named in the logs and the audit rows of that work."""
    request_id = request_context.current_id()
    if request_id:
        headers.setdefault(REQUEST_ID_HEADER, request_id)


@signals.task_prerun.connect
def _enter_request(task: Any, task_id: str, **_: Any) -> None:
    carried = getattr(task.request, REQUEST_ID_HEADER, None)
    request_context.enter(request_context.RequestContext(carried or f"task-{task_id}"))


@signals.task_postrun.connect
def _leave_request(**_: Any) -> None:
    request_context.enter(None)


@signals.celeryd_init.connect
def _load(**_: Any) -> None:
    """What is loaded from here on stays: to look through it for garbage takes a sixth of the time."""
    gc.disable()


@signals.worker_before_create_process.connect
def _settle_down(**_: Any) -> None:
    """A child that looked through it would have a copy of its own."""
    gc.freeze()


@signals.worker_process_init.connect
def _begin(**_: Any) -> None:
    gc.enable()


@signals.worker_ready.connect
def _worker_is_ready(sender: Any, **_: Any) -> None:
    """Ready when it consumes; alive as long as its event loop turns."""
    gc.freeze()
    gc.enable()
    _tell_of("worker")
    if notify("READY=1"):
        sender.hub.call_repeatedly(WATCHDOG_SECONDS, notify, "WATCHDOG=1")


@signals.beat_init.connect
def _beat_is_ready(**_: Any) -> None:
    from console.beat import end_on_signals  # with Django's models

    end_on_signals()
    _tell_of("beat")
    if notify("READY=1"):
        threading.Thread(target=_beat_watchdog, name="watchdog", daemon=True).start()


def _tell_of(kind: str) -> None:
    from django.conf import settings

    emitter = Emitter(settings.TELEMETRY_URL, kind, settings.VERSION).start()
    atexit.register(emitter.stop)


def _beat_watchdog() -> None:
    pause = threading.Event()
    while not pause.wait(WATCHDOG_SECONDS):
        notify("WATCHDOG=1")


@signals.worker_shutting_down.connect
def _worker_stops(**_: Any) -> None:
    notify("STOPPING=1")
