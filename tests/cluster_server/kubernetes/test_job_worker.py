"""A wsjob and its worker, on an API server without controllers: what those do, a test does."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from cluster_server.kubernetes.api import CONFIG_MAP, POD, Api, Document
from cluster_server.kubernetes.instance import Cluster
from cluster_server.kubernetes.jobs import Jobs
from cluster_server.kubernetes.mirror import Mirror
from cluster_server.kubernetes.objects import RUNNER_PORT
from cluster_server.pod.runner import JobReport, Report
from tests.cluster_server.kubernetes.api_server import ApiServer, until
from tests.cluster_server.kubernetes.unconnected import SETTINGS

OWN = f"127.{1 + os.getpid() % 250}.0"  # another run of these tests has other addresses
NOWHERE, RUNS = f"{OWN}.77", f"{OWN}.78"  # nobody listens at the first
LONG_AGO = "2026-01-01T00:00:00Z"
SPEC = {"kind": "Compile", "configMap": "inputs"}
DONE = {"state": "Succeeded", "startedAt": LONG_AGO, "endedAt": LONG_AGO}


@contextlib.asynccontextmanager
async def working(api: Api) -> AsyncIterator[Jobs]:
    """A controller of wsjobs, which sees pods as the backend lets it."""

    def lost() -> None:
        raise AssertionError("a watch has ended")

    def on_pod(name: str, document: Document | None) -> None:
        jobs.see_pod(name.removeprefix("wsjob-").removesuffix("-run"), document)

    maps = Mirror(api, CONFIG_MAP, {}, lambda *_: None, lost)
    pods = Mirror(api, POD, {}, on_pod, lost)
    jobs = Jobs(Cluster(api, maps, pods, SETTINGS), at_once=2, kept=5, on_end=lost)
    await maps.start()
    await pods.start()
    await jobs.start()
    try:
        yield jobs
    finally:
        await jobs.stop()
        await pods.stop()
        await maps.stop()


def inputs(server: ApiServer) -> None:
    server.put("configmaps", "inputs", {"data": {"spec.json": "{}"}})


def pod(server: ApiServer, owner: Document, **status: Any) -> Document:
    uid = owner["metadata"]["uid"]
    references = [{"apiVersion": "tidegate.dev/v1", "kind": "WsJob", "name": "one", "uid": uid}]
    metadata = {"ownerReferences": references, "labels": {"tidegate.dev/part": "wsjob"}}
    return server.put("pods", "wsjob-one-run", {"metadata": metadata, "spec": {}, "status": status})


def running(address: str = NOWHERE) -> dict[str, Any]:
    state = {"name": "manager", "state": {"running": {}}}
    return {"phase": "Running", "podIP": address, "containerStatuses": [state]}


async def test_the_pod_of_one_that_has_ended_is_deleted_though_that_fails_at_first(
    server: ApiServer, api: Api
) -> None:
    wsjob = server.put("wsjobs", "one", {"spec": SPEC, "status": DONE})
    pod(server, wsjob, phase="Pending")
    server.refusals["DELETE", "pods"] = 503
    async with working(api):
        await until("it was tried", lambda: server.count("DELETE", "pods"))
        del server.refusals["DELETE", "pods"]
        await until("its pod is deleted", lambda: server.get("pods", "wsjob-one-run") is None)


async def test_the_pod_of_one_that_has_ended_is_deleted_if_its_runner_never_answers(
    server: ApiServer, api: Api
) -> None:
    wsjob = server.put("wsjobs", "one", {"spec": SPEC, "status": DONE})
    pod(server, wsjob, **running())
    async with working(api):
        await until("its pod is deleted", lambda: server.get("pods", "wsjob-one-run") is None)


async def test_a_wsjob_does_not_take_the_pod_of_another_one_that_had_its_name(
    server: ApiServer, api: Api
) -> None:
    inputs(server)
    before = server.put("wsjobs", "one", {"spec": SPEC})
    pod(server, before, phase="Failed")
    server.put("secrets", "wsjob-one-key", {"metadata": {"ownerReferences": []}})
    server.remove("wsjobs", "one")
    again = server.put("wsjobs", "one", {"spec": SPEC})
    async with working(api):
        await until("it was tried", lambda: server.count("POST", "pods"))
        assert "endedAt" not in server.objects["wsjobs", "one"].get("status", {})
        server.remove("pods", "wsjob-one-run")  # as the garbage collector does
        await until("its own pod is made", lambda: server.get("pods", "wsjob-one-run"))
    for plural, name in (("pods", "wsjob-one-run"), ("secrets", "wsjob-one-key")):
        (owner,) = server.objects[plural, name]["metadata"]["ownerReferences"]
        assert owner["uid"] == again["metadata"]["uid"]


def status(server: ApiServer) -> tuple[object, object, object]:
    said = server.objects["wsjobs", "one"].get("status", {})
    return said.get("state"), said.get("reason"), said.get("sentence")


async def test_one_that_was_made_by_hand_is_held_until_it_has_ended(server: ApiServer, api: Api) -> None:
    inputs(server)
    made = server.put("wsjobs", "one", {"spec": SPEC}, finalizers=["another/one"])
    async with working(api):
        await until("its pod is made", lambda: server.get("pods", "wsjob-one-run"))
        held = server.objects["wsjobs", "one"]["metadata"]["finalizers"]
        assert held == ["another/one", "tidegate.dev/wsjob"]
        pod(server, made, phase="Failed")

        def finalizers() -> object:
            return server.objects["wsjobs", "one"]["metadata"].get("finalizers")

        await until("that of others is left", lambda: finalizers() == ["another/one"])
    assert server.objects["wsjobs", "one"]["status"]["state"] == "Failed"


async def test_the_wsjob_says_why_it_waits(server: ApiServer, api: Api) -> None:
    made = server.put("wsjobs", "one", {"spec": SPEC}, creationTimestamp=now())
    waits = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    nowhere = "Kubernetes' scheduler finds no node: 0/3 nodes are available"
    async with working(api):
        missing = ("Pending", "WaitingForInputs", "There is no ConfigMap inputs.")
        await until("it lacks its inputs", lambda: status(server) == missing)
        server.refusals["POST", "pods"] = 403
        inputs(server)
        refused = ("Pending", "Refused", "Kubernetes refuses it: the test refuses it")
        await until("its pod is refused", lambda: status(server) == refused)
        del server.refusals["POST", "pods"]
        await until("its pod is made", lambda: server.get("pods", "wsjob-one-run"))
        pod(server, made, phase="Pending", conditions=[waits])
        unscheduled = ("Pending", "WaitingForCapacity", nowhere)
        await until("there is no node", lambda: status(server) == unscheduled)
        pod(server, made, **running())
        await until("it runs", lambda: status(server) == ("Running", None, None))


async def test_the_end_of_a_wsjob_is_written_once(server: ApiServer, api: Api) -> None:
    """Whatever a server thinks that has not seen it yet."""
    made = server.put(
        "wsjobs", "one", {"spec": SPEC, "status": {"state": "Running", "startedAt": LONG_AGO}}
    )
    pod(server, made, **running())
    async with working(api) as jobs:
        ended = {**DONE, "sentence": "as another server has seen it"}
        # Its watch does not hear of it before it writes.
        server.silent = True
        server.put("wsjobs", "one", {**made, "status": ended})
        server.remove("pods", "wsjob-one-run")
        jobs.see_pod("one", None)
        await until("it has been tried", lambda: server.count("PATCH", "wsjobs", "one"))
        await until("it is known", lambda: jobs.all()[0].ended_at)
        server.silent = False
    assert status(server) == ("Succeeded", None, "as another server has seen it")


async def test_a_result_is_stored_though_rights_are_missing_at_first(
    server: ApiServer, api: Api
) -> None:
    """An API server that has just started has not read them yet."""
    made = server.put(
        "wsjobs", "one", {"spec": SPEC, "status": {"state": "Running", "startedAt": LONG_AGO}}
    )
    report = msgspec.json.encode(Report(1, job=JobReport(exit_status=0, result="{}")))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(report), report))
        await writer.drain()
        writer.close()

    pod(server, made, **running(RUNS))
    server.refusals["PATCH", "configmaps"] = 403
    async with await asyncio.start_server(answer, RUNS, RUNNER_PORT), working(api):
        await until("it was tried", lambda: server.count("PATCH", "configmaps"))
        del server.refusals["PATCH", "configmaps"]
        await until("it has succeeded", lambda: status(server)[0] == "Succeeded")


async def test_logs_are_of_its_own_container(server: ApiServer, api: Api) -> None:
    server.put("wsjobs", "one", {"spec": SPEC, "status": DONE})
    containers = [{"name": "sidecar"}, {"name": "manager"}]
    server.put("pods", "wsjob-one-run", {"spec": {"containers": containers}})
    async with working(api) as jobs:
        name = jobs.all()[0].name
        lines = [line async for line in jobs.logs(name, 10, follow=False)]
    assert lines == [b"of manager\n"]


def now() -> str:
    return datetime.now(UTC).isoformat()
