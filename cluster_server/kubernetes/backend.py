"""The backend `kubernetes`. What is in the namespace: `objects`. What is done with it: `core`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from cluster_server.backend import Conflict
from cluster_server.inventory import Inventory
from cluster_server.kubernetes import names, objects
from cluster_server.kubernetes.api import (
    CONFIG_MAP,
    POD,
    SECRET,
    Api,
    Document,
    Missing,
    Refused,
    Taken,
    Unavailable,
    connected,
)
from cluster_server.kubernetes.companions import Companions
from cluster_server.kubernetes.instance import Cluster, InstanceWorker
from cluster_server.kubernetes.jobs import Jobs, logs_of
from cluster_server.kubernetes.leader import Leadership
from cluster_server.kubernetes.locks import Locks
from cluster_server.kubernetes.mirror import Mirror
from cluster_server.kubernetes.objects import About, Desired, Known, PodSettings
from cluster_server.kubernetes.options import KubernetesOptions
from cluster_server.processes.core import Goal
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.publisher import Publisher
from cluster_server.workers_backend import WorkersBackend, check_change, is_newer
from telemetry.decoder import Malformed

log = logging.getLogger(__name__)

AT_ONCE: Final = 16  # requests to the API server, of one Apply
COMMIT_SECONDS: Final = 8.0  # until it is given up to find out whether a change was stored
COMMIT_AGAIN_SECONDS: Final = 0.2
KEY_NAME: Final = "tidegate-cluster-server-key"
KEY_BYTES: Final = 32


class Unsure(Exception):
    """Whether something was stored cannot be found out now."""


class KubernetesBackend(WorkersBackend[Desired, InstanceWorker, Jobs]):
    """See `Backend`. `lost`: another server leads now, or could; this one has to end."""

    lost: asyncio.Event

    def __init__(self, options: KubernetesOptions) -> None:
        super().__init__()
        self._options = options
        self._opened = contextlib.AsyncExitStack()
        # Instances whose ConfigMaps are there before they are wanted, and the workloads that want them.
        self._preparing: dict[str, str] = {}
        self._jobs_of_pods: dict[str, str] = {}
        self._is_started = False

    async def start(self) -> None:
        options = self._options
        api = await self._opened.enter_async_context(
            connected(options.kubeconfig, options.namespace, options.lease.unsent_seconds)
        )
        try:
            await self._start(api)
        except BaseException as error:
            await self.stop()
            if isinstance(error, (Refused, Missing)):
                raise OSError(str(error)) from None
            raise

    async def _start(self, api: Api) -> None:
        options, opened = self._options, self._opened
        leadership = Leadership(api, options.identity, options.lease)
        self.lost = leadership.is_lost
        opened.push_async_callback(leadership.release)
        await leadership.acquire()
        settings = PodSettings(
            await _key(api),
            options.image,
            options.command,
            options.runner,
            options.template,
            options.owns_folder,
            options.silent_seconds,
        )
        self._publisher = Publisher(leadership.life, self._all, self.workload)
        maps = Mirror(api, CONFIG_MAP, objects.MANAGED, self._on_map, self.lost.set, _reduced)
        pods = Mirror(api, POD, objects.MANAGED, self._on_pod, self.lost.set)
        self._cluster = Cluster(api, maps, pods, settings)
        self._companions = Companions(api)
        self._jobs = Jobs(self._cluster, options.jobs_at_once, options.jobs_kept, self.lost.set)
        for stop in (
            *(pods.stop, maps.stop, self._jobs.stop, self._let_go),
            *(self._companions.stop, self._publisher.stop),
        ):
            opened.push_async_callback(stop)
        await maps.start()
        await pods.start()
        await self._jobs.start()
        self._is_started = True
        self._meet_all()
        await self._adopted()
        self._publisher.start()
        self._companions.start()

    async def stop(self) -> None:
        """All of it, in the reverse order, also where some of that fails."""
        await self._opened.aclose()

    async def _let_go(self) -> None:
        await asyncio.gather(*(worker.let_go() for worker in list(self._workers.values())))

    async def end_all(self, seconds_max: float) -> None:
        """As `Backend.end_all`; but an instance that was ended so is gone for the next server: its pod
        was deleted."""
        await super().end_all(seconds_max)

    async def inventory(self, boxes: Iterable[str]) -> Inventory:
        """With its locks in the namespace, for whichever server leads. Raises OSError."""
        locks = Locks(self._cluster.api, self.lost)
        return Inventory(boxes, await locks.read(), locks.store)

    async def apply(self, request: pb.ApplyRequest) -> pb.Workload:
        # Once begun it is done: who asked may leave, but what is stored has to be known.
        return await asyncio.shield(asyncio.create_task(self._apply(request)))

    async def _apply(self, request: pb.ApplyRequest) -> pb.Workload:
        async with self._changing:
            asked = objects.desired_of(request, self._cluster.settings)
            current = self._desired.get(asked.name)
            if current and not is_newer(
                asked.name, asked, current, is_same=asked.instances == current.instances
            ):
                return self.workload(asked.name)
            self._check(asked, current)
            self._check_open()
            if current is None:
                await self._companions.check(asked.name)
            known = current.instances if current else {}
            fresh = [one for one in request.instances if one.name not in known]
            self._preparing.update((one.name, asked.name) for one in fresh)
            try:
                await self._prepare(asked, current, fresh)
                await self._commit(asked, current)
            except Unsure as error:
                # They are kept until it is known, by a watch or by the next Apply.
                raise Unavailable(str(error)) from None
            except BaseException as error:
                self._meet_prepared(one.name for one in fresh)
                if isinstance(error, Refused):
                    raise Conflict(str(error)) from None
                raise
            self._meet_prepared(self._prepared(asked.name))
            return self.workload(asked.name)

    async def delete(self, workload: str) -> None:
        async with self._changing:
            if workload not in self._desired:
                self.workload(workload)  # or NotFound
                return
            name = names.workload_map(workload)
            try:
                await self._cluster.api.delete(CONFIG_MAP, name)
            except Refused as error:
                raise Conflict(str(error)) from None
            self._cluster.maps.drop(name)
            self._meet_prepared(self._prepared(workload))

    def _logs(self, worker: InstanceWorker, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]:
        return logs_of(self._cluster, worker.name, tail_lines, follow=follow)

    # Storing what is wanted

    def _check(self, asked: Desired, current: Desired | None) -> None:
        """Raises Conflict, or Exhausted."""
        known = current.instances if current else {}
        for name, one in asked.instances.items():
            if before := known.get(name):
                leaves_drain = before.goal is Goal.DRAIN is not one.goal
                check_change(name, is_same=before.digest == one.digest, leaves_drain=leaves_drain)
        self._check_names(asked.instances, known)

    async def _prepare(
        self, asked: Desired, current: Desired | None, fresh: Sequence[pb.Instance]
    ) -> None:
        """Store what the workload's own object does not hold, before that. What is left of it by a
        crash is found without a workload that wants it, and removed."""
        known = current.instances if current else {}
        slots = asyncio.Semaphore(AT_ONCE)

        async def make(one: pb.Instance) -> None:
            async with slots:
                await self._make_record(asked, one)

        async def change(one: Known) -> None:
            async with slots:
                said = {"metadata": {"annotations": {names.GRACE: str(one.grace_seconds)}}}
                await self._cluster.api.merge(CONFIG_MAP, names.instance_map(one.name), said)

        doing = [make(one) for one in fresh]
        for name, one in asked.instances.items():
            if name in known and known[name].grace_seconds != one.grace_seconds:
                doing.append(change(one))
        done = await asyncio.gather(*doing, return_exceptions=True)
        for failed in done:
            if isinstance(failed, Missing):
                raise Conflict(f"An instance of {asked.name} was lost: {failed}")
            if isinstance(failed, BaseException):
                raise failed

    async def _make_record(self, asked: Desired, one: pb.Instance) -> None:
        api, settings = self._cluster.api, self._cluster.settings
        document = objects.instance_map_document(asked.name, one, asked.instances[one.name].digest)
        try:
            made = await api.create(CONFIG_MAP, document)
        except Taken:
            # By an Apply before this one, of which it is not known how it ended?
            made = await api.get(CONFIG_MAP, document["metadata"]["name"])
            before = made["metadata"].get("annotations", {})
            if before.get(names.DIGEST) != document["metadata"]["annotations"][names.DIGEST]:
                raise Conflict(f"There is an instance {one.name} already.") from None
        with contextlib.suppress(Taken):
            uid = made["metadata"]["uid"]
            await api.create(SECRET, objects.instance_secret_document(one, uid, settings))
        self._cluster.maps.take(made)

    async def _commit(self, asked: Desired, current: Desired | None) -> None:
        """Store what is wanted. Raises Unsure where it is not known whether it was stored."""
        wanted = dataclasses.replace(asked, version=current.version if current else "")
        until = time.monotonic() + COMMIT_SECONDS
        while True:
            try:
                self._cluster.maps.take(await self._stored(wanted))
            except Unavailable as error:
                if time.monotonic() >= until:
                    raise Unsure(str(error)) from None
                await asyncio.sleep(COMMIT_AGAIN_SECONDS)
            else:
                return

    async def _stored(self, wanted: Desired) -> Document:
        """It replaces what was read, or nothing: not what another server has stored since."""
        api, document = self._cluster.api, objects.workload_document(wanted)
        try:
            return await (api.apply if wanted.version else api.create)(CONFIG_MAP, document)
        except Taken:
            # By the attempt before this one, or by somebody else.
            with contextlib.suppress(Missing, ValueError):
                found = await api.get(CONFIG_MAP, document["metadata"]["name"])
                there = objects.read_workload(found)
                if (there.generation, there.instances) == (wanted.generation, wanted.instances):
                    return found
                self._cluster.maps.take(found)
            raise Conflict(f"Workload {wanted.name} was changed by others meanwhile.") from None

    # What is there

    def _on_map(self, name: str, document: Document | None) -> None:
        if name.startswith("workload-"):
            self._on_workload(name.removeprefix("workload-"), document)
        elif name.startswith("instance-"):
            instance = name.removeprefix("instance-")
            if worker := self._workers.get(instance):
                worker.see_record(document)
            elif self._is_started:
                self._meet(instance)
        elif document and self._is_started:
            self._jobs.see_inputs()

    def _on_workload(self, workload: str, document: Document | None) -> None:
        before = self._desired.pop(workload, None)
        if document:
            try:
                desired = objects.read_workload(document)
            except ValueError as error:
                log.error("%s", error)  # noqa: TRY400 - a person has to look, and finds nothing in a traceback
                if before:
                    self._desired[workload] = before
                return
            self._desired[workload] = desired
            for name in desired.instances:
                self._preparing.pop(name, None)
        if self._is_started:
            self._follow(workload)

    def _follow(self, workload: str) -> None:
        """Something else is wanted of it."""
        desired = self._desired.get(workload)
        wanted = desired.instances if desired else {}
        for name, worker in list(self._of_workload.get(workload, {}).items()):
            if worker.wanted != wanted.get(name):
                worker.want(wanted.get(name))
        for name in wanted:
            self._meet(name)
        self._publisher.changed(workload)
        if desired:
            self._companions.want(desired)
        else:
            self._companions.forget(workload)
            self._drop(workload)

    def _on_pod(self, name: str, document: Document | None) -> None:
        if document:
            labels = document["metadata"].get("labels", {})
            is_job = labels.get(names.PART) == "wsjob"
            owners = document["metadata"].get("ownerReferences", [{"name": ""}])
            self._jobs_of_pods.pop(name, None)
            if is_job:
                self._jobs_of_pods[name] = owners[0]["name"]
        if (wsjob := self._jobs_of_pods.get(name)) is not None:
            if document is None:
                del self._jobs_of_pods[name]
            self._jobs.see_pod(wsjob, document)
        elif worker := self._workers.get(name):
            worker.see_pod(document)
        elif self._is_started:
            self._meet(name)

    def _meet_all(self) -> None:
        """Have a worker for each instance that is wanted, or of which something is there."""
        for desired in self._desired.values():
            for name in desired.instances:
                self._meet(name)
            self._companions.want(desired)
        for name in list(self._cluster.maps.objects):
            if name.startswith("instance-"):
                self._meet(name.removeprefix("instance-"))
        for name in list(self._cluster.pods.objects):
            if name not in self._jobs_of_pods:
                self._meet(name)

    def _prepared(self, workload: str) -> list[str]:
        """Also by an Apply before, of which it was not known whether it was stored."""
        return [name for name, of in self._preparing.items() if of == workload]

    def _meet_prepared(self, instances: Iterable[str]) -> None:
        """It is known by now whether they are wanted: what is left of others is removed."""
        for name in list(instances):
            self._preparing.pop(name, None)
            self._meet(name)

    def _meet(self, name: str) -> None:
        if name in self._workers or name in self._preparing:
            return
        record = self._cluster.maps.objects.get(names.instance_map(name))
        pod = self._cluster.pods.objects.get(name)
        about = self._about(name, record, pod)
        desired = self._desired.get(about.workload)
        wanted = desired.instances.get(name) if desired else None
        if not (wanted or record or pod):
            return
        worker = InstanceWorker(name, wanted, about, self._cluster, self._on_change, self._on_gone)
        self._add(worker)
        worker.meet(record, pod)
        worker.begin()

    def _about(self, name: str, record: Document | None, pod: Document | None) -> About:
        if record:
            with contextlib.suppress(Malformed):
                return objects.read_about(record)
        for desired in self._desired.values():
            if name in desired.instances:
                return About(desired.name)
        labels = pod["metadata"].get("labels", {}) if pod else {}
        return About(labels.get(names.WORKLOAD, ""))


def _reduced(document: Document) -> Document:
    """Without what only pods read, which may be large."""
    kept = {name: value for name, value in document.get("data", {}).items() if name != objects.SPEC}
    metadata = {key: value for key, value in document["metadata"].items() if key != "managedFields"}
    return {"metadata": metadata, "data": kept}


async def _key(api: Api) -> bytes:
    """What keys of runners are made from: made by the first server, and the same for all others."""
    fresh = {
        "metadata": {"name": KEY_NAME, "labels": {"app.kubernetes.io/part-of": "tidegate"}},
        "type": "Opaque",
        "data": {"key": base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()},
    }
    try:
        found = await api.get(SECRET, KEY_NAME)
    except Missing:
        try:
            found = await api.create(SECRET, fresh)
        except Taken:
            found = await api.get(SECRET, KEY_NAME)
    return base64.b64decode(found["data"]["key"])
