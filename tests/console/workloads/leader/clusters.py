"""A Cluster Server that speaks the real protocol, and whose instances are rows that a test changes.

with FakeCluster() as cluster:
    cluster.instances["talk"]          # by name
    cluster.say(name, state=pb.READY, url="http://…")
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, Self

import grpc
import msgspec

from cluster_server.proto import cluster_pb2 as pb
from cluster_server.proto import rpc
from workload_manager.artifact import address
from workload_manager.compiler.spec import CompileSpec


class FakeCluster:
    """Instances start at once unless `starts` is empty; they drain at once, and wait for a cache that
    another has, as managers do."""

    def __init__(self, socket: Path | None = None, layout: dict[str, Any] | None = None) -> None:
        self.socket = socket
        self.layout = layout
        self.changed = threading.Condition()
        self.version = 1
        self.changed_at: dict[str, int] = {}  # by workload, also of those that are gone
        self.workloads: dict[str, pb.Workload] = {}
        self.specs: dict[str, pb.Instance] = {}
        self.jobs: dict[str, pb.Job] = {}
        self.applies = 0
        self.watches = 0
        self.fails_apply = False
        self.refuses = ""  # applies, for this reason
        self.has_room = True  # else new instances wait for a place
        self.clock_ahead = 0.0  # of nodes
        self.refused: list[str] = []  # why an apply was
        self.drains_slowly = False  # until a test says that it is gone
        self.silent: tuple[str, str] | None = None  # a method, and a part of whom it is asked about:
        self.asked_in_vain = threading.Event()  # there is no answer
        self.answers = threading.Event()  # until this
        self.bad: set[int] = set()  # revisions that end by themselves
        self.key = b""  # compile jobs without this secret are denied
        self.is_slow = False  # compile jobs run until they are cancelled
        self.result = b""  # of compile jobs, in place of a good one

    def __enter__(self) -> Self:
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        rpc.serve("Workloads", self, self.server)
        rpc.serve("Jobs", self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        if self.socket is not None:
            self.server.add_insecure_port(f"unix://{self.socket}")
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.set()
        self.server.stop(0).wait()

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{self.port}")

    # What a test does

    def statuses(self, workload: str = "talk") -> dict[str, pb.InstanceStatus]:
        with self.changed:
            found = self.workloads.get(workload)
            return {one.name: one for one in found.instances} if found else {}

    def say(self, name: str, **facts: Any) -> None:
        with self.changed:
            for workload in self.workloads.values():
                for one in workload.instances:
                    if one.name == name:
                        self._set(one, **facts)
                        self._tell(workload.name)

    def be_ahead(self, generation: int, instances: list[pb.Instance], workload: str = "talk") -> None:
        """As after applies that the console knows nothing of any more."""
        with self.changed:
            told = self.workloads[workload]
            there = {one.name: one for one in told.instances}
            told.generation = generation
            del told.instances[:]
            for one in instances:
                self.specs[one.name] = one
                status = there.get(one.name) or pb.InstanceStatus(name=one.name, since=time.time())
                self._follow(status, one)
                told.instances.append(status)
            self._tell(workload)

    # The services

    def Apply(self, request: pb.ApplyRequest, context: Any) -> pb.Workload:  # noqa: N802
        self._wait_if_silent("Apply", request.workload)
        with self.changed:
            if self.fails_apply:
                context.abort(grpc.StatusCode.UNAVAILABLE, "It is away.")
            self.applies += 1
            known = self.workloads.setdefault(request.workload, pb.Workload(name=request.workload))
            wanted = {one.name: one for one in request.instances}
            there = {one.name: one for one in known.instances}
            if why := self._why_not(request, known, there):
                self.refused.append(why)
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
            known.generation = request.generation
            made = []
            for name, one in wanted.items():
                self.specs[name] = one
                status = there.get(name) or pb.InstanceStatus(name=name, since=time.time())
                self._follow(status, one)
                made.append(status)
            del known.instances[:]
            known.instances.extend(made)
            self._tell(request.workload)
            return known

    def _why_not(
        self, request: pb.ApplyRequest, known: pb.Workload, there: dict[str, pb.InstanceStatus]
    ) -> str:
        if request.generation < known.generation:
            return "It is older."
        if self.refuses:
            return self.refuses
        for one in request.instances:
            if one.name in there and self.specs[one.name].goal == pb.DRAIN != one.goal:
                return f"Instance {one.name} drains."
        return ""

    def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:  # noqa: N802
        self._wait_if_silent("Delete", request.workload)
        with self.changed:
            if self.workloads.pop(request.workload, None) is None:
                context.abort(grpc.StatusCode.NOT_FOUND, "There is none.")
            self._tell(request.workload)
        return pb.DeleteResponse()

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.Event]:  # noqa: N802
        """As the real one: to who has seen all that there is it says nothing."""
        with self.changed:
            self.watches += 1
            seen = self.version
            events = [self._event(pb.Event.SNAPSHOT, name) for name in self.workloads]
        if request.since_version != seen:
            yield from events
            yield pb.Event(kind=pb.Event.COMPLETE, version=seen)
        while context.is_active():
            with self.changed:
                if self.version == seen:
                    self.changed.wait(0.2)
                    continue
                news = [name for name, version in self.changed_at.items() if version > seen]
                events = [
                    self._event(pb.Event.CHANGED if name in self.workloads else pb.Event.DELETED, name)
                    for name in news
                ]
                seen = self.version
            yield from events

    def _event(self, kind: pb.Event.Kind, name: str) -> pb.Event:
        workload = self.workloads.get(name) or pb.Workload(name=name)
        return pb.Event(kind=kind, version=self.version, workload=workload)

    def Submit(self, request: pb.JobSpec, _: Any) -> pb.Job:  # noqa: N802
        spec = msgspec.json.decode(request.spec)
        arguments = spec["engine"].get("arguments", [])
        is_denied = self.key not in request.secrets.get("weights", b"")
        is_bad = is_denied or "--no" in arguments
        inputs = msgspec.convert(spec, CompileSpec).inputs({})
        result = {"sha256": address(inputs), "layout": self.layout}
        job = pb.Job(
            name=request.name,
            state=pb.JOB_RUNNING if self.is_slow else pb.JOB_FAILED if is_bad else pb.JOB_SUCCEEDED,
            sentence="Denied." if is_denied else "It has no such option." if is_bad else "",
            result=self.result or msgspec.json.encode(result),
        )
        self.jobs[request.name] = job
        return job

    def Get(self, request: pb.JobRequest, context: Any) -> pb.Job:  # noqa: N802
        self._wait_if_silent("Get", request.name)
        if request.name not in self.jobs:
            context.abort(grpc.StatusCode.NOT_FOUND, "There is none.")
        return self.jobs[request.name]

    def Cancel(self, request: pb.JobRequest, context: Any) -> pb.Job:  # noqa: N802
        self._wait_if_silent("Cancel", request.name)
        if request.name not in self.jobs:
            context.abort(grpc.StatusCode.NOT_FOUND, "There is none.")
        job = self.jobs[request.name]
        if job.state == pb.JOB_RUNNING:
            job.state = pb.JOB_CANCELLED
        return job

    def _wait_if_silent(self, method: str, name: str) -> None:
        if self.silent is not None and self.silent[0] == method and self.silent[1] in name:
            self.asked_in_vain.set()
            self.answers.wait()

    # Instances

    def _tell(self, workload: str) -> None:
        self.version += 1
        self.changed_at[workload] = self.version
        self.changed.notify_all()

    def _set(self, status: pb.InstanceStatus, **facts: Any) -> None:
        if facts.get("state", status.state) != status.state:
            status.since = time.time() + self.clock_ahead
        for name, value in facts.items():
            if name == "progress":
                status.progress.CopyFrom(value)
            else:
                setattr(status, name, value)
        status.seen_at = facts.get("seen_at", time.time())

    def _follow(self, status: pb.InstanceStatus, told: pb.Instance) -> None:
        status.goal = told.goal
        spec = msgspec.json.decode(told.spec)
        if told.goal == pb.DRAIN and self.drains_slowly:
            self._set(status, state=pb.DRAINING)
        elif told.goal == pb.DRAIN:
            self._set(status, state=pb.GONE, url="", cache=pb.CACHE_STATE_UNSPECIFIED)
        elif spec["revision"] in self.bad:
            self._set(status, state=pb.GONE, sentence="It ran out of memory.")
        elif not self.has_room and status.state == pb.STATE_UNSPECIFIED:
            self._set(
                status, state=pb.PENDING, reason="WaitingForCapacity", sentence="No node has room."
            )
        elif not spec.get("cache") and status.reason != "WaitingForCapacity":
            url = f"http://{status.name}:80"
            self._set(status, state=pb.READY, cache=pb.NO_CACHE, url=url)
