"""What workloads have beside their instances, in a namespace where others have such things too."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cluster_server.backend import Conflict
from cluster_server.kubernetes import companions as module
from cluster_server.kubernetes.api import Api
from cluster_server.kubernetes.companions import Companions
from cluster_server.kubernetes.objects import Desired, Known, service_labels
from cluster_server.processes.core import Goal
from tests.cluster_server.kubernetes.api_server import ApiServer, until

REDIS = {"spec": {"selector": {"app": "redis"}, "ports": [{"name": "redis", "port": 6379}]}}


@pytest.fixture
async def companions(api: Api, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Companions]:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(module, "AGAIN_SECONDS_MAX", 0.1)
    made = Companions(api)
    made.start()
    yield made
    await made.stop()


def owners(server: ApiServer, name: str) -> list[str]:
    metadata = server.objects["services", name]["metadata"]
    return [one["uid"] for one in metadata["ownerReferences"]]


async def test_a_service_of_others_is_left_as_it_is(
    server: ApiServer, companions: Companions, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = server.put("services", "tidegate-redis", REDIS)
    with pytest.raises(Conflict, match="a Service tidegate-redis in the namespace"):
        await companions.check("tidegate-redis")
    companions.want(Desired("tidegate-redis", 1, {}, uid="u"))
    companions.want(Desired("chat", 1, {}, uid="u"))
    await until("it was tried", lambda: server.count("POST", "services", "") > 3)
    assert server.objects["services", "tidegate-redis"] == theirs
    assert owners(server, "chat") == ["u"]
    assert caplog.text.count("cannot be made") == 1  # said once, however often it is tried
    companions.forget("tidegate-redis")
    server.remove("services", "tidegate-redis")
    companions.want(Desired("last", 1, {}, uid="u"))
    await until("the last is made", lambda: server.get("services", "last"))
    assert server.get("services", "tidegate-redis") is None


async def test_a_service_of_a_server_before_is_taken_over(
    server: ApiServer, companions: Companions
) -> None:
    before = {"metadata": {"labels": service_labels("chat"), "ownerReferences": [{"uid": "old"}]}}
    server.put("services", "chat", before)
    await companions.check("chat")
    companions.want(Desired("chat", 1, {}, uid="new"))
    await until("it has the new owner", lambda: owners(server, "chat") == ["new"])
    assert server.objects["services", "chat"]["spec"]["clusterIP"] == "None"


async def test_a_budget_leaves_all_but_one_instance_alone_and_follows_their_number(
    server: ApiServer, companions: Companions
) -> None:
    """Those that end are counted: nobody has taken their place yet."""

    def desired(*goals: Goal) -> Desired:
        instances = {f"chat-{at}": Known(f"chat-{at}", goal, 30, "") for at, goal in enumerate(goals)}
        return Desired("chat", 1, instances, uid="u")

    def left_alone() -> int:
        budget = server.get("poddisruptionbudgets", "workload-chat") or {"spec": {"minAvailable": -1}}
        return int(budget["spec"]["minAvailable"])

    companions.want(desired(Goal.RUN, Goal.RUN, Goal.DRAIN))
    await until("it is made", lambda: left_alone() == 2)
    made = server.count("POST", "services")
    companions.want(desired(Goal.RUN))
    await until("it follows", lambda: left_alone() == 0)
    assert server.count("POST", "services") == made, "the Service says what it said"


async def test_a_budget_of_others_is_left_as_it_is_and_the_service_is_made_all_the_same(
    server: ApiServer, companions: Companions, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = server.put("poddisruptionbudgets", "workload-chat", {"spec": {"maxUnavailable": 1}})
    companions.want(Desired("chat", 1, {}, uid="u"))
    await until("it was tried", lambda: server.count("POST", "poddisruptionbudgets") > 1)
    assert server.get("poddisruptionbudgets", "workload-chat") == theirs
    assert owners(server, "chat") == ["u"]
    assert "PodDisruptionBudget of workload chat cannot be made" in caplog.text


async def test_a_cluster_without_budgets_has_services(
    server: ApiServer, companions: Companions, caplog: pytest.LogCaptureFixture
) -> None:
    server.missing_kinds.add("poddisruptionbudgets")
    companions.want(Desired("chat", 1, {}, uid="u"))
    await until("both versions were tried", lambda: server.count("POST", "poddisruptionbudgets") >= 2)
    await until("it is said", lambda: "PodDisruptionBudget of workload chat" in caplog.text)
    assert owners(server, "chat") == ["u"]
