"""What each workload has beside its instances: a headless Service, and a PodDisruptionBudget.

Each server makes them once, and again when they should say something else; and tries until they are
there. One that somebody has deleted or edited meanwhile is left so until then.

A workload may be named as something else in the namespace is, a Redis for example. That is left as it
is: only what has our labels is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from cluster_server.backend import Conflict
from cluster_server.kubernetes import names, objects
from cluster_server.kubernetes.api import (
    BUDGETS,
    SERVICE,
    Api,
    Document,
    Kind,
    Missing,
    Refused,
    Taken,
    Unavailable,
)
from cluster_server.kubernetes.objects import Desired

log = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 1.0  # then twice as long each time, up to
AGAIN_SECONDS_MAX: Final = 60.0


class Companion(NamedTuple):
    kind: str
    workload: str


class Companions:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: dict[Companion, Document] = {}
        self._wanted: dict[Companion, Document] = {}
        self._problems: dict[Companion, str] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="companions")

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def check(self, workload: str) -> None:
        """Of a workload that is new. Raises Conflict where a Service has its name that is none of ours,
        and Unavailable."""
        name = names.service_name(workload)
        with contextlib.suppress(Missing, Refused):
            if not _has(await self._found(SERVICE, name), objects.service_labels(workload)):
                raise Conflict(f"{_taken(SERVICE, name)} Give the workload another name.")

    def want(self, desired: Desired) -> None:
        documents = {
            SERVICE.name: objects.service_document(desired),
            BUDGETS[0].name: objects.budget_document(desired),
        }
        for kind, document in documents.items():
            one = Companion(kind, desired.name)
            if self._known.get(one) != document:
                self._known[one] = self._wanted[one] = document
                self._wake.set()

    def forget(self, workload: str) -> None:
        """Kubernetes removes them with their owner."""
        for of in (self._known, self._wanted, self._problems):
            for kind in (SERVICE, BUDGETS[0]):
                of.pop(Companion(kind.name, workload), None)

    async def _run(self) -> None:
        pause = AGAIN_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause if self._wanted else None):
                    await self._wake.wait()
                    pause = AGAIN_SECONDS
            self._wake.clear()
            for one, document in list(self._wanted.items()):
                try:
                    await self._make((SERVICE,) if one.kind == SERVICE.name else BUDGETS, document)
                except (Unavailable, Refused, Taken, Missing) as error:
                    self._show_problem(one, str(error))
                else:
                    self._problems.pop(one, None)
                    if self._wanted.get(one) is document:
                        del self._wanted[one]
            pause = min(pause * 2, AGAIN_SECONDS_MAX)

    async def _make(self, versions: Sequence[Kind], document: Document) -> None:
        """In the newest version of its API that the cluster knows, which an upgrade may change."""
        for kind in versions:
            try:
                await self._make_as(kind, document)
            except Missing:
                if kind is versions[-1]:
                    raise
            else:
                return

    async def _make_as(self, kind: Kind, document: Document) -> None:
        metadata = document["metadata"]
        try:
            await self._api.create(kind, document)
        except Taken:
            found = await self._found(kind, metadata["name"])
            if not _has(found, metadata["labels"]):
                raise Refused(_taken(kind, metadata["name"])) from None
            # By a server before this one, or for a workload that had this name.
            fixed = {name: found["metadata"][name] for name in ("uid", "resourceVersion")}
            await self._api.merge(
                kind, metadata["name"], {**document, "metadata": {**metadata, **fixed}}
            )

    async def _found(self, kind: Kind, name: str) -> Document:
        """A patch that changes nothing: the server has no right to get them. Raises Missing."""
        return await self._api.merge(kind, name, {})

    def _show_problem(self, one: Companion, problem: str) -> None:
        if self._problems.get(one) != problem:
            log.warning("The %s of workload %s cannot be made: %s", *one, problem)
        self._problems[one] = problem


def _has(found: Document, ours: Document) -> bool:
    labels = found["metadata"].get("labels", {})
    return all(labels.get(name) == value for name, value in ours.items())


def _taken(kind: Kind, name: str) -> str:
    return f"There is a {kind.name} {name} in the namespace that is of no workload."
