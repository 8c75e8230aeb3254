"""A wsjob and its worker, on an API server without controllers: what those do, a test does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from cluster_server.kubernetes.api import CONFIG_MAP, POD, Api, Document
from cluster_server.kubernetes.instance import Cluster
from cluster_server.kubernetes.jobs import Jobs
from cluster_server.kubernetes.mirror import Mirror
from tests.cluster_server.kubernetes.api_server import ApiServer, until
from tests.cluster_server.kubernetes.unconnected import SETTINGS

NOWHERE = "127.0.0.77"  # nobody listens there
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
        assert not server.get("wsjobs", "one").get("status", {}).get("endedAt")
        server.remove("pods", "wsjob-one-run")  # as the garbage collector does
        await until("its own pod is made", lambda: server.get("pods", "wsjob-one-run"))
    for plural, name in (("pods", "wsjob-one-run"), ("secrets", "wsjob-one-key")):
        (owner,) = server.objects[plural, name]["metadata"]["ownerReferences"]
        assert owner["uid"] == again["metadata"]["uid"]
