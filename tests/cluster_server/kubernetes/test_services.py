"""Services of workloads, in a namespace where others have Services too."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cluster_server.backend import Conflict
from cluster_server.kubernetes import services as module
from cluster_server.kubernetes.api import Api
from cluster_server.kubernetes.objects import Desired, service_labels
from cluster_server.kubernetes.services import Services
from tests.cluster_server.kubernetes.api_server import ApiServer, until

REDIS = {"spec": {"selector": {"app": "redis"}, "ports": [{"name": "redis", "port": 6379}]}}


@pytest.fixture
async def services(api: Api, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Services]:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(module, "AGAIN_SECONDS_MAX", 0.1)
    made = Services(api)
    made.start()
    yield made
    await made.stop()


def owners(server: ApiServer, name: str) -> list[str]:
    metadata = server.objects["services", name]["metadata"]
    return [one["uid"] for one in metadata["ownerReferences"]]


async def test_a_service_of_others_is_left_as_it_is(
    server: ApiServer, services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = server.put("services", "tidegate-redis", REDIS)
    with pytest.raises(Conflict, match="a Service tidegate-redis in the namespace"):
        await services.check("tidegate-redis")
    services.want(Desired("tidegate-redis", 1, {}, uid="u"))
    services.want(Desired("chat", 1, {}, uid="u"))
    await until("it was tried", lambda: server.count("POST", "services", "") > 3)
    assert server.objects["services", "tidegate-redis"] == theirs
    assert owners(server, "chat") == ["u"]
    assert caplog.text.count("cannot be made") == 1  # said once, however often it is tried
    services.forget("tidegate-redis")
    server.remove("services", "tidegate-redis")
    services.want(Desired("last", 1, {}, uid="u"))
    await until("the last is made", lambda: server.get("services", "last"))
    assert server.get("services", "tidegate-redis") is None


async def test_a_service_of_a_server_before_is_taken_over(server: ApiServer, services: Services) -> None:
    before = {"metadata": {"labels": service_labels("chat"), "ownerReferences": [{"uid": "old"}]}}
    server.put("services", "chat", before)
    await services.check("chat")
    services.want(Desired("chat", 1, {}, uid="new"))
    await until("it has the new owner", lambda: owners(server, "chat") == ["new"])
    assert server.objects["services", "chat"]["spec"]["clusterIP"] == "None"
