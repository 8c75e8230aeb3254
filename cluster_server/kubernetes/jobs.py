"""The controller of wsjobs: those that were submitted by gRPC, and those that were made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Final

from cluster_server.backend import Exhausted, Exists, NotFound
from cluster_server.kubernetes import names, objects
from cluster_server.kubernetes.api import CONFIG_MAP, SECRET, WSJOB, Document, Missing, Refused, Taken
from cluster_server.kubernetes.instance import Cluster
from cluster_server.kubernetes.job import JobWorker
from cluster_server.kubernetes.mirror import Mirror
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.turns import may_run

log = logging.getLogger(__name__)

WAITING_MAX: Final = 1000  # jobs that have not ended


class Jobs:
    """`at_once`: how many run, one of a workload; the others wait for their turn. As many more that were
    made by hand. `kept`: how many that have ended. `on_end`: see `Mirror`."""

    def __init__(self, cluster: Cluster, at_once: int, kept: int, on_end: Callable[[], None]) -> None:
        self._cluster = cluster
        self._at_once = at_once
        self._kept = kept
        self._mirror = Mirror(cluster.api, WSJOB, {}, self._on_wsjob, on_end)
        self._workers: dict[str, JobWorker] = {}  # by the names of their objects
        self._forgotten: set[str] = set()
        self._changed = asyncio.Event()
        self._submitting = asyncio.Lock()
        self._deleting: set[asyncio.Task[None]] = set()
        self._is_started = False

    async def start(self) -> None:
        """Raises Unavailable and Refused."""
        try:
            await self._mirror.start()
        except Missing:
            raise Refused(
                "Kubernetes knows no wsjobs: kubectl apply -f deploy/kubernetes/wsjobs.crd.yaml"
            ) from None
        for worker in list(self._workers.values()):
            await worker.load_result()
        self._is_started = True
        for worker in list(self._workers.values()):
            worker.begin()

    async def stop(self) -> None:
        await self._mirror.stop()
        for task in list(self._deleting):
            task.cancel()
        await asyncio.gather(*self._deleting, return_exceptions=True)
        await asyncio.gather(*(worker.let_go() for worker in list(self._workers.values())))

    async def submit(self, spec: pb.JobSpec) -> pb.Job:
        async with self._submitting:
            settings = self._cluster.settings
            digest = settings.digest(spec.SerializeToString(deterministic=True))
            worker = self._find(spec.name)
            if worker is None:
                if sum(one.wsjob.is_submitted for one in self._waiting()) >= WAITING_MAX:
                    raise Exhausted(
                        f"There are {WAITING_MAX} jobs that have not ended. Try again later."
                    )
                document = objects.wsjob_document(spec, time.time(), settings)
                try:
                    self._mirror.take(await self._cluster.api.create(WSJOB, document))
                except Taken:
                    object_name = document["metadata"]["name"]
                    with contextlib.suppress(Missing):
                        self._mirror.take(await self._cluster.api.get(WSJOB, object_name))
                except Refused as error:
                    raise OSError(str(error)) from None
                worker = self._find(spec.name)
            if worker is None:
                raise Exists(f"There is a wsjob {spec.name} that was made by hand, or is just removed.")
            if worker.wsjob.digest != digest:
                raise Exists(f"There is a job {spec.name} with other contents.")
            if not (worker.has_ended or worker.has_begun):
                try:
                    await self._give_inputs(spec, worker)
                except Refused as error:  # by a quota, for example
                    worker.refuse_inputs(str(error))
                    raise OSError(str(error)) from None
            return worker.job

    async def cancel(self, name: str) -> pb.Job:
        worker = self._of(name)
        if not worker.has_ended and not worker.wsjob.is_cancelled:
            with contextlib.suppress(Missing):
                change = {"spec": {"cancelled": True}}
                try:
                    made = await self._cluster.api.merge(WSJOB, worker.wsjob.object, change)
                except Refused as error:
                    raise OSError(str(error)) from None
                self._mirror.take(made)
        return worker.job

    async def cancel_all(self) -> None:
        """And wait until all have ended."""
        for worker in self._waiting():
            await self.cancel(worker.name)
        while self._waiting():
            await self._changed.wait()

    def job(self, name: str) -> pb.Job:
        return self._of(name).job

    def all(self) -> list[pb.Job]:
        return [worker.job for worker in self._in_order()]

    def watch(self, name: str) -> AsyncGenerator[pb.Job, None]:
        return self._watch(self._of(name))

    async def _watch(self, worker: JobWorker) -> AsyncGenerator[pb.Job, None]:
        shown = None
        while True:
            changed = self._changed
            if worker.job is not shown:
                shown = worker.job
                yield shown
                continue
            if worker.has_ended:
                return
            await changed.wait()

    def logs(self, name: str, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]:
        worker = self._of(name)
        pod = names.job_pod(worker.wsjob.object)
        return logs_of(self._cluster, pod, tail_lines, follow=follow)

    def see_pod(self, wsjob: str, document: Document | None) -> None:
        if worker := self._workers.get(wsjob):
            worker.see_pod(document)

    def see_inputs(self) -> None:
        for worker in self._waiting():
            worker.wake()

    async def _give_inputs(self, spec: pb.JobSpec, worker: JobWorker) -> None:
        """Its ConfigMap comes last: with it the job may start. Whether those that are there already are
        its own, the worker looks before that."""
        api, uid, settings = self._cluster.api, worker.wsjob.uid, self._cluster.settings
        if spec.secrets:
            with contextlib.suppress(Taken):
                await api.create(SECRET, objects.job_secret_document(spec, uid))
        with contextlib.suppress(Taken):
            await api.create(CONFIG_MAP, objects.job_map_document(spec, uid, settings))
        worker.wake()

    def _on_wsjob(self, name: str, document: Document | None) -> None:
        worker = self._workers.get(name)
        if document is None:
            if worker:
                worker.see(None)
                del self._workers[name]
            self._forgotten.discard(name)
            return
        if worker and worker.wsjob.uid == document["metadata"]["uid"]:
            worker.see(document)
            return
        if worker:  # another one of that name
            worker.see(None)
        worker = JobWorker(document, self._cluster, self._mirror, self._may_start, self._on_change)
        self._workers[name] = worker
        if pod := self._cluster.pods.objects.get(names.job_pod(name)):
            worker.see_pod(pod)
        if self._is_started:
            worker.begin()

    def _on_change(self, worker: JobWorker) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        if self._is_started and worker.has_ended:
            self._forget_old(self._alike(worker))
            for waiting in may_run(self._alike(worker), self._at_once):
                waiting.wake()

    def _waiting(self) -> list[JobWorker]:
        return [worker for worker in self._in_order() if not worker.has_ended]

    def _in_order(self) -> list[JobWorker]:
        known = [one for one in self._workers.values() if one.wsjob.object not in self._forgotten]
        return sorted(known, key=lambda one: (one.wsjob.submitted_at, one.name))

    def _may_start(self, worker: JobWorker) -> bool:
        return worker in may_run(self._alike(worker), self._at_once)

    def _alike(self, worker: JobWorker) -> list[JobWorker]:
        """Those that were submitted, or those that were made by hand: these take no turns of the others,
        and no places among those that are kept."""
        is_submitted = worker.wsjob.is_submitted
        return [one for one in self._in_order() if one.wsjob.is_submitted == is_submitted]

    def _forget_old(self, alike: Sequence[JobWorker]) -> None:
        ended = [worker for worker in alike if worker.wsjob.has_ended]
        ended.sort(key=lambda worker: worker.job.ended_at)
        for worker in ended[: max(len(ended) - self._kept, 0)]:
            self._forgotten.add(worker.wsjob.object)
            task = asyncio.create_task(self._delete(worker.wsjob.object))
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

    async def _delete(self, name: str) -> None:
        try:
            await self._cluster.api.delete(WSJOB, name)
        except (OSError, Refused) as error:
            log.warning("wsjob %s cannot be deleted: %s", name, error)
            self._forgotten.discard(name)  # the next one to end is a chance again

    def _find(self, name: str) -> JobWorker | None:
        worker = self._workers.get(names.wsjob(name))
        is_it = worker and worker.name == name and worker.wsjob.object not in self._forgotten
        return worker if is_it else None

    def _of(self, name: str) -> JobWorker:
        if worker := self._find(name):
            return worker
        raise NotFound(f"There is no job {name}.")


async def logs_of(cluster: Cluster, pod: str, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]:
    """Of one that has not begun: nothing, or with `follow` once it has."""
    while True:
        try:
            lines = cluster.api.logs(pod, objects.CONTAINER, tail_lines, follow=follow)
            async for line in lines:
                yield line
        except Missing:
            return
        except Refused:  # its container is waiting to start
            if not follow or pod not in cluster.pods.objects:
                return
            await asyncio.sleep(LOG_AGAIN_SECONDS)
        else:
            return


LOG_AGAIN_SECONDS: Final = 0.5
