"""A stand-in for the kubelet of one node, as a process: `python -m tests.kubernetes.kubelet …`.

It does what Kubernetes documents of a kubelet, where this is needed: pods of its node as processes with
addresses of their own; volumes (configMap, secret, projected with tokens, emptyDir, hostPath,
downwardAPI); environment (of Secrets and ConfigMaps too); users, groups and capabilities; read-only
root file systems; restartPolicy with back-off; grace periods; probes (httpGet, tcpSocket, exec; startup,
liveness, readiness); logs; the status of pods, the node and its Lease.
`tests/kubernetes/test_kubelet.py` holds it to that. What it does not do: images, limits, hooks.

Nobody plays kube-proxy and DNS: pods know the names of Services by their /etc/hosts, which leads to the
ready pods of a Service themselves. So a Service is reached where its port is that of its pods.

If it is killed its pods end with it, as if the node had lost its power. If it is stopped (SIGSTOP) they
go on, as if the node could not be reached.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.types import PatchType
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.console.sessions.network import Namespace, ip
from tests.kubernetes.container import Container
from tests.kubernetes.users import User
from tests.kubernetes.volumes import ConfigMap, Secret, Volumes

log = logging.getLogger("kubelet")
Pod: Any = create_namespaced_resource("", "v1", "Pod", "pods")
Lease = create_namespaced_resource("coordination.k8s.io", "v1", "Lease", "leases")
Endpoints: Any = create_namespaced_resource("", "v1", "Endpoints", "endpoints")
Node: Any = create_global_resource("", "v1", "Node", "nodes")
Document = dict[str, Any]

BACKOFF_SECONDS_MAX = 300.0
STABLE_SECONDS = 600.0
LEASE_SECONDS = 1.0
VOLUME_AGAIN_SECONDS = 0.3
LOG_BYTES = 64 << 10
UNVERIFIED = ssl.create_default_context()  # as a kubelet's probes are
UNVERIFIED.check_hostname = False
UNVERIFIED.verify_mode = ssl.CERT_NONE


class Stopping(Exception):
    """The pod is to end before a container of it could begin."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Kubelet:
    def __init__(self, options: argparse.Namespace, client: AsyncClient) -> None:
        self.options = options
        self.client = client
        self.node: str = options.node
        self.folder: Path = options.folder
        self.workers: dict[str, PodWorker] = {}
        self.hosts = Hosts(self.folder / "hosts")
        self._addresses = itertools.count(10)
        self._tasks: set[asyncio.Task[None]] = set()

    def address(self) -> str:
        return f"{self.options.network}.{self.options.number}.{next(self._addresses)}"

    async def run(self) -> None:
        await self._register()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew())
            group.create_task(self._serve_logs())
            group.create_task(self._follow())
            group.create_task(self._follow_endpoints())

    async def _register(self) -> None:
        labels = {"kubernetes.io/hostname": self.node, "kubernetes.io/os": "linux"}
        labels |= json.loads(self.options.labels)
        document = Node({"metadata": {"name": self.node, "labels": labels}, "spec": {}})
        with contextlib.suppress(ApiError):
            await self.client.create(document)
        have = {"cpu": self.options.cpu, "memory": "64Gi", "pods": "1100"}
        change = {
            "status": {
                "capacity": have,
                "allocatable": have,
                "addresses": [{"type": "InternalIP", "address": self.options.host}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": self.options.port}},
                "conditions": [_condition("Ready", value=True, reason="KubeletReady")],
                "nodeInfo": {
                    **dict.fromkeys(
                        ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage"), "stand-in"
                    ),
                    "containerRuntimeVersion": "processes://1",
                    "kubeletVersion": "v1.20.0",
                    "kubeProxyVersion": "v1.20.0",
                    "operatingSystem": "linux",
                    "architecture": "amd64",
                },
            }
        }
        await self.client.patch(Node.Status, self.node, change, patch_type=PatchType.STRATEGIC)

    async def _renew(self) -> None:
        """The Lease says that the node is alive; its status only changes."""
        spec = {"holderIdentity": self.node, "leaseDurationSeconds": 40}
        had_failed = False
        while True:
            stamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            lease = {"metadata": {"name": self.node}, "spec": {**spec, "renewTime": stamp}}
            try:
                await self.client.patch(
                    Lease,
                    self.node,
                    {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease},
                    namespace="kube-node-lease",
                    patch_type=PatchType.APPLY,
                    field_manager="kubelet",
                    force=True,
                )
                ready = _condition("Ready", value=True, reason="KubeletReady")
                node = await self.client.get(Node, self.node)
                found = {one["type"]: one for one in node["status"].get("conditions", [])}
                if had_failed or found.get("Ready", {}).get("status") != "True":
                    change = {"status": {"conditions": [ready]}}
                    await self.client.patch(
                        Node.Status, self.node, change, patch_type=PatchType.STRATEGIC
                    )
                had_failed = False
            except httpx2.HTTPError as error:
                had_failed = True
                log.warning("node: %s", error)
            await asyncio.sleep(LEASE_SECONDS)

    async def _follow(self) -> None:
        fields: dict[str, Any] = {"spec.nodeName": self.node}
        while True:
            try:
                found = self.client.list(Pod, namespace="*", fields=fields)
                there = {one["metadata"]["uid"]: one async for one in found}
                for uid, one in there.items():
                    self._see(uid, one)
                for uid in [uid for uid in self.workers if uid not in there]:
                    self._forget(uid)
                events = self.client.watch(
                    Pod,
                    namespace="*",
                    fields=fields,
                    resource_version=found.resourceVersion,
                    server_timeout=300,
                )
                async for what, one in events:
                    uid = one["metadata"]["uid"]
                    self._forget(uid) if what == "DELETED" else self._see(uid, one)
            except httpx2.HTTPError as error:
                log.warning("watch: %s", error)
                await asyncio.sleep(0.3)

    async def _follow_endpoints(self) -> None:
        while True:
            try:
                found = self.client.list(Endpoints, namespace="*")
                self.hosts.endpoints = {_identity(one): one async for one in found}
                self.hosts.write()
                events = self.client.watch(
                    Endpoints,
                    namespace="*",
                    resource_version=found.resourceVersion,
                    server_timeout=300,
                )
                async for what, one in events:
                    self.hosts.endpoints.pop(_identity(one), None)
                    if what != "DELETED":
                        self.hosts.endpoints[_identity(one)] = one
                    self.hosts.write()
            except httpx2.HTTPError as error:
                log.warning("watch of endpoints: %s", error)
                await asyncio.sleep(0.3)

    def _see(self, uid: str, pod: Document) -> None:
        if uid in self.workers:
            self.workers[uid].see(pod)
            return
        worker = self.workers[uid] = PodWorker(self, pod)
        task = asyncio.create_task(worker.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget(self, uid: str) -> None:
        """It was removed by force: what runs of it is killed at once."""
        if worker := self.workers.pop(uid, None):
            worker.is_removed = True
            worker.kill()

    # Logs

    async def _serve_logs(self) -> None:
        app = Starlette(
            routes=[Route("/containerLogs/{namespace}/{pod}/{container}", self._logs, methods=["GET"])]
        )
        config = uvicorn.Config(
            app,
            host=self.options.host,
            port=self.options.port,
            log_level="warning",
            ssl_certfile=str(self.options.certificate),
            ssl_keyfile=str(self.options.key),
            lifespan="off",
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        with contextlib.suppress(AttributeError):
            server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
        await server.serve()

    async def _logs(self, request: Request) -> Response:
        of = request.path_params
        for worker in self.workers.values():
            metadata = worker.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (of["namespace"], of["pod"]):
                if of["container"] not in worker.logs:
                    break
                tail = request.query_params.get("tailLines")
                follow = request.query_params.get("follow") == "true"
                pieces = worker.log(of["container"], int(tail) if tail else None, follow=follow)
                return StreamingResponse(pieces, media_type="text/plain")
        return PlainTextResponse("no such container", status_code=404)


class Hosts:
    """The /etc/hosts of pods, one for each namespace: it is written anew where it is, so that pods that
    run see it."""

    def __init__(self, folder: Path) -> None:
        self.endpoints: dict[tuple[str, str], Document] = {}
        self._folder = folder

    def path(self, namespace: str) -> Path:
        """There is one from then on."""
        path = self._folder / namespace
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(self._text(namespace))
        return path

    def write(self) -> None:
        for path in self._folder.glob("*"):
            text = self._text(path.name)
            if text != path.read_text():
                path.write_text(text)

    def _text(self, namespace: str) -> str:
        lines = ["127.0.0.1 localhost"]
        for (space, service), one in sorted(self.endpoints.items()):
            name = f"{service}.{space}"
            names = [name, f"{name}.svc", f"{name}.svc.cluster.local"]
            if space == namespace:
                names.insert(0, service)
            for subset in one.get("subsets") or ():
                for address in subset.get("addresses") or ():
                    of_pod = [f"{address['hostname']}.{one}" for one in names if "hostname" in address]
                    lines.append(" ".join((address["ip"], *of_pod, *names)))
        return "\n".join(lines) + "\n"


def _identity(one: Document) -> tuple[str, str]:
    return one["metadata"]["namespace"], one["metadata"]["name"]


class PodWorker:
    """One pod of the node, from the moment that it is bound to it until it is gone."""

    def __init__(self, kubelet: Kubelet, pod: Document) -> None:
        self.kubelet = kubelet
        self.pod = pod
        self.is_removed = False
        self.logs: dict[str, Path] = {}
        self.running: dict[str, Container] = {}
        self.statuses: dict[str, Document] = {}
        self.ready: dict[str, bool] = {}
        self._folder = kubelet.folder / "pods" / pod["metadata"]["uid"]
        self._address = ""
        self._network: Namespace | None = None
        self._stopping = asyncio.Event()
        self._reported: Document = {}
        self._reporting = asyncio.Lock()
        self._started_at = now()
        self._volumes = Volumes(
            pod, kubelet.client, self._folder / "volumes", kubelet.folder / "host", self._field
        )
        if "deletionTimestamp" in pod["metadata"]:
            self._stopping.set()

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    def see(self, pod: Document) -> None:
        self.pod = pod
        if "deletionTimestamp" in pod["metadata"]:
            self._stopping.set()

    def kill(self) -> None:
        self._stopping.set()
        for one in self.running.values():
            one.signal(signal.SIGKILL)

    async def run(self) -> None:
        try:
            await self._run()
        except Exception:
            log.exception("%s", self.name)
            raise
        finally:
            self.kubelet.workers.pop(self.pod["metadata"]["uid"], None)

    async def _run(self) -> None:
        for one in self.pod["spec"]["containers"]:
            self.statuses[one["name"]] = self._status(one, {"waiting": {"reason": "ContainerCreating"}})
        await self._report("Pending")
        with contextlib.suppress(Stopping):
            await self._run_containers()
        await self._stopping.wait()
        await self._report_end()
        if self._network:
            self._network.close()
        await self._remove()
        graveyard = self.kubelet.folder / "removed"
        graveyard.mkdir(exist_ok=True)
        if self._folder.exists():
            self._folder.rename(graveyard / self._folder.name)

    async def _run_containers(self) -> None:
        if await self._prepared() and await self._initialised():
            await self._report("Running")
            specs = self.pod["spec"]["containers"]
            done = await asyncio.gather(*(self._keep(one) for one in specs))
            if not self._stopping.is_set():
                await self._report("Failed" if any(done) else "Succeeded")

    # Its parts

    async def _prepared(self) -> bool:
        """Its network and volumes. False if it was to end before they could be made."""
        self._folder.mkdir(parents=True, exist_ok=True)  # where an attempt before has failed
        about = {key: self.pod["metadata"][key] for key in ("namespace", "name")}
        (self._folder / "pod.json").write_text(json.dumps(about))
        self._network, self._address = _plugged(self.kubelet)
        while not self._stopping.is_set():
            try:
                await self._volumes.make()
            except ApiError as error:
                # The kubelet tries again, and the pod stays in ContainerCreating.
                log.warning("%s: %s", self.name, error)
                await self._stops_within(VOLUME_AGAIN_SECONDS)
            else:
                return True
        return False

    async def _initialised(self) -> bool:
        for one in self.pod["spec"].get("initContainers", ()):
            while not self._stopping.is_set():
                container = await self._start(one, 0)
                ending = asyncio.create_task(self._stopped(container))
                status = await container.wait()
                ending.cancel()
                if status == 0:
                    break
                if self.pod["spec"].get("restartPolicy") == "Never":
                    await self._report("Failed")
                    return False
                await asyncio.sleep(1)
        return not self._stopping.is_set()

    async def _keep(self, spec: Document) -> int:
        """Run a container, and again as its restartPolicy wants it. Returns the last exit status."""
        name, restarts, pause = spec["name"], 0, 0.0
        policy = self.pod["spec"].get("restartPolicy", "Always")
        last: Document = {}
        while True:
            container = await self._start(spec, restarts)
            began, began_at = time.monotonic(), now()
            has_readiness = "readinessProbe" in spec
            self.ready[name] = not has_readiness
            identity = {"containerID": f"processes://{container.pid}", "lastState": last}
            self.statuses[name] = self._status(
                spec, {"running": {"startedAt": began_at}}, restarts, **identity
            )
            await self._report("Running")
            status = await self._watched(spec, container)
            self.running.pop(name, None)
            self.ready[name] = False
            terminated = {
                "exitCode": status,
                "reason": "Completed" if status == 0 else "Error",
                "startedAt": began_at,
                "finishedAt": now(),
                "containerID": f"processes://{container.pid}",
            }
            self.statuses[name] = self._status(spec, {"terminated": terminated}, restarts, **identity)
            is_over = policy == "Never" or (policy == "OnFailure" and status == 0)
            if self._stopping.is_set() or is_over:
                return status
            last = {"terminated": terminated}
            if time.monotonic() - began > STABLE_SECONDS:
                pause = 0.0
            if pause:  # the first time it is started again at once
                said = f"back-off {pause:g}s restarting failed container={name} pod={self.name}"
                self.statuses[name] = self._status(
                    spec, {"waiting": {"reason": "CrashLoopBackOff", "message": said}}, restarts,
                    lastState=last,
                )  # fmt: skip
            await self._report("Running")
            if await self._stops_within(pause):
                return status
            pause = min(pause * 2 or self.kubelet.options.backoff, BACKOFF_SECONDS_MAX)
            restarts += 1

    async def _watched(self, spec: Document, container: Container) -> int:
        """Until it has ended: by itself, by its probes, or because its pod ends."""
        watching = [
            asyncio.create_task(self._stopped(container)),
            asyncio.create_task(self._probe_all(spec, container)),
        ]
        try:
            return await container.wait()
        finally:
            for task in watching[1:]:
                task.cancel()
            if not self._stopping.is_set():
                watching[0].cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _probe_all(self, spec: Document, container: Container) -> None:
        """Once it has started, where there is a probe that says so."""
        if "startupProbe" in spec and not await self._until_started(spec, container):
            return
        async with asyncio.TaskGroup() as group:
            if "readinessProbe" in spec:
                group.create_task(self._probe_readiness(spec, container))
            if probe := spec.get("livenessProbe"):
                group.create_task(self._probe_liveness(spec, probe, container))

    async def _stopped(self, container: Container) -> None:
        await self._stopping.wait()
        if self.is_removed:
            container.signal(signal.SIGKILL)
            return
        grace = self.pod["metadata"].get("deletionGracePeriodSeconds", 30)
        await container.stop(grace)

    async def _start(self, spec: Document, restarts: int) -> Container:
        name = spec["name"]
        folder = self._folder / "containers" / name
        folder.mkdir(parents=True, exist_ok=True)
        self.logs[name] = folder / f"{restarts}.log"
        user = await self._user(spec)
        environment = await self._environment(spec, user)
        command = [_expanded(one, environment) for one in (*spec["command"], *spec.get("args", ()))]
        assert self._network
        self.running[name] = await Container.start(
            command,
            environment,
            self._volumes.mounts(spec),
            folder / "root",
            f"/proc/{os.getpid()}/fd/{self._network.file}",
            self.logs[name],
            self.kubelet.options.image,
            self.kubelet.hosts.path(self.pod["metadata"]["namespace"]),
            user,
            is_read_only=spec.get("securityContext", {}).get("readOnlyRootFilesystem", False),
        )
        (folder / "pid").write_text(str(self.running[name].pid))
        return self.running[name]

    async def _user(self, spec: Document) -> User:
        """As whom it runs. One that may not stays as it is."""
        try:
            return User.of(self.pod["spec"], spec)
        except PermissionError as error:
            why = {"reason": "CreateContainerConfigError", "message": str(error)}
            self.statuses[spec["name"]] = self._status(spec, {"waiting": why})
            await self._report("Pending")
            await self._stopping.wait()
            raise Stopping from None

    async def _environment(self, spec: Document, user: User) -> dict[str, str]:
        """Its image has the interpreter of the tests, in which we are installed."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        host, port = self.kubelet.options.api.split(":")
        found = {
            "PATH": path,
            "PYTHONPATH": str(self.kubelet.options.image),
            "HOME": user.home,
            "HOSTNAME": self.pod["spec"].get("hostname", self.name),
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
        }
        for one in spec.get("envFrom", ()):
            kind = "secretRef" if "secretRef" in one else "configMapRef"
            found |= await self._known_values(one[kind]["name"], is_secret=kind == "secretRef")
        for one in spec.get("env", ()):
            value, source = one.get("value", ""), one.get("valueFrom", {})
            if field := source.get("fieldRef"):
                value = self._field(field["fieldPath"])
            elif ref := source.get("secretKeyRef") or source.get("configMapKeyRef"):
                values = await self._known_values(ref["name"], is_secret="secretKeyRef" in source)
                value = values[ref["key"]]
            found[one["name"]] = _expanded(value, found)
        return found

    async def _known_values(self, name: str, *, is_secret: bool) -> dict[str, str]:
        """Of a Secret or a ConfigMap, once there is one: until then the pod stays as it is."""
        namespace = self.pod["metadata"]["namespace"]
        while True:
            try:
                found = await self.kubelet.client.get(
                    Secret if is_secret else ConfigMap, name, namespace=namespace
                )
            except ApiError as error:
                log.warning("%s: %s", self.name, error)
                if await self._stops_within(VOLUME_AGAIN_SECONDS):
                    raise Stopping from None
            else:
                data = found.get("data") or {}
                return {
                    key: base64.b64decode(value).decode() if is_secret else value
                    for key, value in data.items()
                }

    async def _stops_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    def _field(self, path: str) -> str:
        known = {
            "status.podIP": self._address,
            "status.hostIP": self.kubelet.options.host,
            "spec.nodeName": self.kubelet.node,
            "metadata.name": self.name,
            "metadata.namespace": self.pod["metadata"]["namespace"],
            "metadata.uid": self.pod["metadata"]["uid"],
        }
        return str(known[path])

    # Probes

    async def _probe_readiness(self, spec: Document, container: Container) -> None:
        name, probe = spec["name"], spec["readinessProbe"]
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        failures = 0
        while True:
            succeeded = await self._probe(spec, probe, container)
            failures = 0 if succeeded else failures + 1
            is_ready = succeeded or (self.ready[name] and failures < probe.get("failureThreshold", 3))
            if is_ready != self.ready[name]:
                self.ready[name] = is_ready
                self.statuses[name]["ready"] = is_ready
                await self._report("Running")
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _probe_liveness(self, spec: Document, probe: Document, container: Container) -> None:
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        failures = 0
        while True:
            failures = 0 if await self._probe(spec, probe, container) else failures + 1
            if failures >= probe.get("failureThreshold", 3):
                log.warning("%s: it is not alive", self.name)
                await container.stop(self.pod["spec"].get("terminationGracePeriodSeconds", 30))
                return
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _until_started(self, spec: Document, container: Container) -> bool:
        """Whether it has, before its startup probe has failed too often; then it is stopped."""
        probe = spec["startupProbe"]
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        for _ in range(probe.get("failureThreshold", 3)):
            if await self._probe(spec, probe, container):
                return True
            await asyncio.sleep(probe.get("periodSeconds", 10))
        log.warning("%s: it has not started", self.name)
        await container.stop(self.pod["spec"].get("terminationGracePeriodSeconds", 30))
        return False

    async def _probe(self, spec: Document, probe: Document, container: Container) -> bool:
        try:
            async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
                if command := probe.get("exec", {}).get("command"):
                    return await container.succeeds(command)
                of = probe.get("httpGet") or probe["tcpSocket"]
                tls = UNVERIFIED if of.get("scheme") == "HTTPS" else None
                port = _port(spec, of["port"])
                reader, writer = await asyncio.open_connection(self._address, port, ssl=tls)
                try:
                    if "httpGet" not in probe:
                        return True
                    headers = {"Host": f"{self._address}:{port}"}
                    headers |= {one["name"]: one["value"] for one in of.get("httpHeaders", ())}
                    lines = [f"GET {of.get('path', '/')} HTTP/1.1", "Connection: close"]
                    lines += [f"{name}: {value}" for name, value in headers.items()]
                    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
                    line = (await reader.readline()).split()
                    return len(line) > 1 and 200 <= int(line[1]) < 400
                finally:
                    writer.close()
        except OSError:
            return False

    # What is reported

    def _status(self, spec: Document, state: Document, restarts: int = 0, **more: Any) -> Document:
        name = spec["name"]
        return {
            "name": name,
            "image": spec.get("image", ""),
            "imageID": "",
            "ready": self.ready.get(name, False),
            "started": "running" in state,
            "restartCount": restarts,
            "state": state,
            "lastState": {},
            **more,
        }

    async def _report(self, phase: str) -> None:
        async with self._reporting:
            is_ready = phase == "Running" and all(
                self.ready.get(one["name"], False) for one in self.pod["spec"]["containers"]
            )
            before = {one["type"]: one for one in self._reported.get("conditions", ())}
            conditions = [
                _condition("Initialized", value=phase != "Pending"),
                _condition("Ready", value=is_ready),
                _condition("ContainersReady", value=is_ready),
                _condition("PodScheduled", value=True),
            ]
            for one in conditions:
                if before.get(one["type"], {}).get("status") == one["status"]:
                    one["lastTransitionTime"] = before[one["type"]]["lastTransitionTime"]
            status = {
                "phase": phase,
                "startTime": self._started_at,
                "hostIP": self.kubelet.options.host,
                "conditions": conditions,
                "containerStatuses": [dict(one) for one in self.statuses.values()],
            }
            if self._address:
                status |= {"podIP": self._address, "podIPs": [{"ip": self._address}]}
            if status == self._reported:
                return
            self._reported = status
            await self._persist(lambda: self._patch(status))

    async def _report_end(self) -> None:
        """Its containers have ended, and the pod is about to go."""
        if self._reported.get("phase") == "Running":
            await self._report("Running")

    async def _patch(self, status: Document) -> None:
        metadata = self.pod["metadata"]
        change = {"metadata": {"uid": metadata["uid"]}, "status": status}
        await self.kubelet.client.patch(
            Pod.Status,
            self.name,
            change,
            namespace=metadata["namespace"],
            patch_type=PatchType.MERGE,
        )

    async def _remove(self) -> None:
        """Its end is confirmed: the object goes."""
        if self.is_removed:
            return
        metadata = self.pod["metadata"]
        await self._persist(
            lambda: self.kubelet.client.delete(
                Pod, self.name, namespace=metadata["namespace"], grace_period=0
            )
        )

    async def _persist(self, request: Callable[[], Awaitable[Any]]) -> None:
        while not self.is_removed:
            try:
                await request()
            except ApiError as error:
                if error.status.code in (404, 409, 422):
                    return  # it is gone, or another one has its name
                log.warning("%s: %s", self.name, error)
            except httpx2.HTTPError as error:
                log.warning("%s: %s", self.name, error)
            else:
                return
            await asyncio.sleep(0.3)

    async def log(self, container: str, tail: int | None, *, follow: bool) -> AsyncIterator[bytes]:
        path = self.logs[container]
        running = self.running.get(container)
        with path.open("rb") as file:
            if tail is not None:
                lines = file.read().splitlines(keepends=True)[-tail:] if tail else []
                yield b"".join(lines)
            while True:
                is_over = self.running.get(container) is not running or running is None
                piece = file.read(LOG_BYTES)
                if piece:
                    yield piece
                elif is_over or not follow:
                    return
                else:
                    await asyncio.sleep(0.05)


def _plugged(kubelet: Kubelet) -> tuple[Namespace, str]:
    """A network with an address, at the bridge of all nodes."""
    address = kubelet.address()
    # Not named after the address: links of a bed before may be there after its bridge has gone.
    here = f"{kubelet.options.bridge}v{secrets.token_hex(4)}"
    made = Namespace()
    ip("link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", made.path)
    ip("link", "set", here, "master", kubelet.options.bridge, "up")
    with made.entered():
        ip("address", "add", f"{address}/16", "dev", "eth0")
        ip("link", "set", "eth0", "up")
    return made, address


def _condition(kind: str, *, value: bool, reason: str = "") -> Document:
    made = {"type": kind, "status": str(value), "lastTransitionTime": now()}
    return {**made, "reason": reason} if reason else made


def _port(spec: Document, port: int | str) -> int:
    """By its name, or itself."""
    if isinstance(port, int):
        return port
    return next(int(one["containerPort"]) for one in spec["ports"] if one["name"] == port)


def _expanded(text: str, environment: dict[str, str]) -> str:
    for name, value in environment.items():
        text = text.replace(f"$({name})", value)
    return text


async def _main(options: argparse.Namespace) -> None:
    config = KubeConfig.from_file(options.kubeconfig)
    async with AsyncClient(config, trust_env=False) as client:
        await Kubelet(options, client).run()


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--kubeconfig", "--folder", "--certificate", "--key", "--image"):
        parser.add_argument(flag, type=Path, required=True)
    for flag in ("--node", "--labels", "--bridge", "--network", "--host", "--api"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--number", type=int, required=True, help="of the node: a part of addresses")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cpu", default="16")
    parser.add_argument("--backoff", type=float, default=10.0, help="before the second restart")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(options))


if __name__ == "__main__":
    main()
