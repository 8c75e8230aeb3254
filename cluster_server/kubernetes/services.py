"""What each workload has beside its instances: a headless Service, and a PodDisruptionBudget. They are
made once by each server and whenever they change, and tried again until they are there.

A workload may be named as something else in the namespace is, a Redis for example. Its Service is left
as it is: only those that have our labels are changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from cluster_server.backend import Conflict
from cluster_server.kubernetes import names, objects
from cluster_server.kubernetes.api import (
    BUDGETS,
    SERVICE,
    Api,
    Document,
    Missing,
    Refused,
    Taken,
    Unavailable,
)
from cluster_server.kubernetes.objects import Desired

log = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 1.0  # then twice as long each time, up to
AGAIN_SECONDS_MAX: Final = 60.0


class Services:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._budgets = BUDGETS  # the versions of their API that this cluster may know
        self._known: dict[str, tuple[str, int]] = {}  # the UID of its owner, and what its budget says
        self._wanted: dict[str, Desired] = {}
        self._problems: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="services")

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def check(self, workload: str) -> None:
        """Of a workload that is new. Raises Conflict where a Service has its name that is none of ours,
        and Unavailable."""
        with contextlib.suppress(Missing, Refused):
            found = await self._found(workload)
            if not _is_of(found, workload):
                raise Conflict(_taken(workload))

    def want(self, desired: Desired) -> None:
        said = desired.uid, objects.undisturbed(desired)
        if self._known.get(desired.name) != said:
            self._known[desired.name] = said
            self._wanted[desired.name] = desired
            self._wake.set()

    def forget(self, workload: str) -> None:
        """Kubernetes removes it with its owner."""
        for of in (self._known, self._wanted, self._problems):
            of.pop(workload, None)

    async def _run(self) -> None:
        pause = AGAIN_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause if self._wanted else None):
                    await self._wake.wait()
                    pause = AGAIN_SECONDS
            self._wake.clear()
            for name, desired in list(self._wanted.items()):
                try:
                    await self._make_service(desired)
                    await self._make_budget(desired)
                except (Unavailable, Refused, Taken, Missing) as error:
                    self._show_problem(name, str(error))
                else:
                    self._problems.pop(name, None)
                    if self._wanted.get(name) is desired:
                        del self._wanted[name]
            pause = min(pause * 2, AGAIN_SECONDS_MAX)

    async def _make_service(self, desired: Desired) -> None:
        document = objects.service_document(desired)
        try:
            await self._api.create(SERVICE, document)
        except Taken:
            found = await self._found(desired.name)
            if not _is_of(found, desired.name):
                raise Refused(_taken(desired.name)) from None
            # By a server before this one, or for a workload that had this name.
            fixed = {name: found["metadata"][name] for name in ("uid", "resourceVersion")}
            change = {**document, "metadata": {**document["metadata"], **fixed}}
            await self._api.merge(SERVICE, document["metadata"]["name"], change)

    async def _make_budget(self, desired: Desired) -> None:
        document = objects.budget_document(desired)
        while True:
            try:
                await self._api.apply(self._budgets[0], document)
            except Missing:  # the whole API, of this version
                if len(self._budgets) == 1:
                    raise
                self._budgets = self._budgets[1:]
            else:
                return

    async def _found(self, workload: str) -> Document:
        """A patch that changes nothing: the server has no right to get Services. Raises Missing."""
        return await self._api.merge(SERVICE, names.service_name(workload), {})

    def _show_problem(self, workload: str, problem: str) -> None:
        if self._problems.get(workload) != problem:
            log.warning("What workload %s has beside its pods cannot be made: %s", workload, problem)
        self._problems[workload] = problem


def _is_of(found: Document, workload: str) -> bool:
    labels, ours = found["metadata"].get("labels", {}), objects.service_labels(workload)
    return all(labels.get(name) == value for name, value in ours.items())


def _taken(workload: str) -> str:
    return (
        f"There is a Service {names.service_name(workload)} in the namespace that is of no workload. "
        "Give the workload another name."
    )
