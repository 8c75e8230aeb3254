"""What the backend `kubernetes` promises beside what all backends do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lightkube import ApiError
from lightkube.types import PatchType

from cluster_server.backend import Conflict
from cluster_server.client import Away, ClusterClient
from cluster_server.kubernetes import job as job_module
from cluster_server.kubernetes import names, objects
from cluster_server.kubernetes.api import Unavailable
from cluster_server.kubernetes.backend import KubernetesBackend
from cluster_server.proto import cluster_pb2 as pb
from tests.cluster_server.requests import FAKE_MANAGER, instance, job, workload
from tests.kubernetes.bed import Bed
from tests.kubernetes.resources import put, resource
from tests.kubernetes.server import server as served
from tests.kubernetes.world import QUICK, Kubernetes

pytestmark = [
    *(pytest.mark.slow, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")),
    pytest.mark.timeout(300),  # the first one makes the test bed
]
ConfigMap, Pod = resource("ConfigMap"), resource("Pod")
Secret, Service = resource("Secret"), resource("Service")
Budget = resource("PodDisruptionBudget")


@pytest.fixture
async def world(kubernetes_bed: Bed, request: pytest.FixtureRequest) -> AsyncIterator[Kubernetes]:
    made = Kubernetes(kubernetes_bed, has_jobs="job" in request.node.name)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


def found(world: Kubernetes, kind: Any, name: str) -> dict[str, Any] | None:
    with world.bed.client() as client:
        try:
            return dict(client.get(kind, name, namespace=world.namespace))
        except ApiError as error:
            if error.status.code != 404:
                raise
            return None


async def test_the_choice_of_boxes_reaches_the_cluster(world: Kubernetes) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a"), instance("chat-1-b")))
    first = await world.until_state("chat", "chat-0-a", pb.READY)
    second = await world.until_state("chat", "chat-1-b", pb.READY)
    assert (first.host, second.host) == ("node-a", "node-b")
    nowhere = instance("chat-2-c")
    nowhere.boxes[:] = ["a-box-that-no-node-reaches"]
    known = [instance("chat-0-a"), instance("chat-1-b")]
    await world.backend.apply(workload("chat", 2, *known, nowhere))

    def is_refused() -> bool:
        status = world.status("chat", "chat-2-c")
        return bool(status and status.reason == "WaitingForCapacity")

    await world.until("the scheduler finds no node", is_refused)


async def test_ready_instances_are_endpoints_of_the_workload(world: Kubernetes) -> None:
    one = instance("chat-0-a")
    one.resources.memory_bytes = 64 << 20
    await world.backend.apply(workload("chat", 1, one))
    await world.until_state("chat", "chat-0-a", pb.READY)
    pod, record = found(world, Pod, "chat-0-a"), found(world, ConfigMap, "instance-chat-0-a")
    assert pod
    assert record
    (owner,) = pod["metadata"]["ownerReferences"]  # else it is deleted as garbage
    assert (owner["name"], owner["uid"]) == ("instance-chat-0-a", record["metadata"]["uid"])

    def is_endpoint() -> bool:
        there = found(world, resource("Endpoints"), "chat") or {}
        subsets = there.get("subsets") or [{}]
        return [one["ip"] for one in subsets[0].get("addresses") or ()] == [pod["status"]["podIP"]]

    await world.until("it is an endpoint", is_endpoint)
    service = found(world, Service, "chat")
    assert service
    assert service["spec"]["clusterIP"] == "None"
    await world.backend.delete("chat")
    await world.until("its service is gone", lambda: found(world, Service, "chat") is None)
    await world.until("its secret is gone", lambda: found(world, Secret, "instance-chat-0-a") is None)


async def test_a_service_of_others_stays_and_one_of_a_server_before_is_taken_over(
    world: Kubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    """With the rights of the manifests, which have none to get Services."""
    ports = [{"name": "redis", "port": 6379, "protocol": "TCP"}]
    spec = {"clusterIP": "None", "selector": {"app": "redis"}, "ports": ports}
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "redis"}, "spec": spec}
    with world.bed.client() as client:
        put(client, theirs, world.namespace)
    with pytest.raises(Conflict, match="There is a Service redis"):
        await world.backend.apply(workload("redis", 1, instance("redis-0-a")))
    await world.backend.apply(workload("chat", 1, instance("chat-0-a")))
    await world.until("its Service is made", lambda: found(world, Service, "chat") is not None)
    before = found(world, Service, "chat")
    assert before
    with world.bed.client() as client:
        stale = {"metadata": {"ownerReferences": None}}
        client.patch(Service, "chat", stale, namespace=world.namespace, patch_type=PatchType.MERGE)
    await world.restart()

    def is_owned() -> bool:
        made = found(world, Service, "chat") or before
        same = ("uid", "ownerReferences")
        return all(made["metadata"].get(one) == before["metadata"][one] for one in same)

    await world.until("it is taken over", is_owned)
    assert found(world, Service, "redis")["spec"]["selector"] == {"app": "redis"}  # type: ignore[index]
    assert "cannot be made" not in caplog.text


def evicted(world: Kubernetes, pod: str) -> bool:
    """As a drain does it, which asks again while a budget says no; it says so until it was counted."""
    try:
        world.bed.evict(world.namespace, pod)
    except httpx2.HTTPStatusError as error:
        if error.response.status_code != HTTPStatus.TOO_MANY_REQUESTS:
            raise
        return False
    return True


async def test_a_drain_takes_one_instance_of_a_workload_at_a_time(world: Kubernetes) -> None:
    """Also where all of them are on that node."""
    first, second = instance("chat-0-a", grace=5), instance("chat-1-b", grace=5)
    await world.backend.apply(workload("chat", 1, first, second))
    for one in ("chat-0-a", "chat-1-b"):
        await world.until_state("chat", one, pb.READY)

    def says(part: str, key: str, value: int) -> bool:
        budget = found(world, Budget, "workload-chat") or {}
        return bool(budget.get(part, {}).get(key) == value)

    await world.until("its budget is made", lambda: says("spec", "minAvailable", 1))
    await world.until("Kubernetes has counted them", lambda: says("status", "disruptionsAllowed", 1))
    assert evicted(world, "chat-0-a")
    assert not evicted(world, "chat-1-b")
    await world.until_state("chat", "chat-0-a", pb.GONE)
    assert not evicted(world, "chat-1-b")
    await world.backend.apply(workload("chat", 2, second, instance("chat-0-c", grace=5)))
    await world.until_state("chat", "chat-0-c", pb.READY)
    await world.until("the other one may go", lambda: evicted(world, "chat-1-b"))
    await world.until_state("chat", "chat-1-b", pb.GONE)

    # A single one has to be let go.
    await world.backend.apply(workload("chat", 3, instance("chat-0-c", grace=5)))
    await world.until("none is left alone", lambda: says("spec", "minAvailable", 0))
    await world.until("it may go", lambda: evicted(world, "chat-0-c"))
    await world.backend.delete("chat")
    await world.until("its budget is gone", lambda: found(world, Budget, "workload-chat") is None)


async def test_an_instance_whose_node_is_drained_is_gone_and_says_so(world: Kubernetes) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a", grace=5)))
    await world.until_state("chat", "chat-0-a", pb.READY)
    await world.until("it may go", lambda: evicted(world, "chat-0-a"))
    status = await world.until_state("chat", "chat-0-a", pb.GONE)
    assert status.reason == "Evicted"
    assert "on node node-a" in status.sentence
    # Its node puts its folder away just then, so that none is seen for a moment.
    await world.until("it is seen again", lambda: world.starts("chat-0-a") > 0)
    assert world.starts("chat-0-a") < 2  # nobody makes it anew under its name
    await world.restart()
    assert (await world.until_state("chat", "chat-0-a", pb.GONE)).reason == "Evicted"


async def test_what_a_crash_has_left_of_an_apply_is_removed(world: Kubernetes) -> None:
    """Records of instances are stored before the workload that wants them."""
    request = workload("chat", 1, instance("chat-0-a"))
    document = objects.instance_map_document("chat", request.instances[0], "a digest")
    document |= {"apiVersion": "v1", "kind": "ConfigMap"}
    await world.backend.stop()
    with world.bed.client() as client:
        put(client, document, world.namespace)
    await world.open()
    await world.until("it is removed", lambda: not world.backend.workloads()[0])
    assert found(world, resource("ConfigMap"), "instance-chat-0-a") is None
    await world.backend.apply(request)
    await world.until_state("chat", "chat-0-a", pb.READY)


@pytest.mark.timeout(300)
async def test_a_server_that_is_killed_amid_its_work_is_resumed(
    world: Kubernetes, tmp_path: Path
) -> None:
    """kill -9 at several moments of an Apply and of a deletion: the next one does the rest, once."""
    await world.backend.stop()
    target = f"unix:{tmp_path / 'c.sock'}"
    options = ("--listen", target, "--lease-time", "1s")
    for number, after in enumerate((0.0, 0.05, 0.3)):
        name = f"chat-{number}"
        one = instance(f"{name}-a")
        del one.boxes[:]
        with server(world, tmp_path, *options) as process:
            async with ClusterClient(target) as cluster:
                applying = asyncio.create_task(cluster.apply(name, 1, [one]))
                await asyncio.sleep(after)
                process.kill()
                with contextlib.suppress(Away):
                    await applying
        with server(world, tmp_path, *options):
            async with ClusterClient(target) as cluster:
                await cluster.apply(name, 1, [one])  # as the orchestrator does until it is answered
                await until_ready(cluster, name)
                assert world.starts(one.name) == 1
                await cluster.delete(name)
    with server(world, tmp_path, *options):
        async with ClusterClient(target) as cluster, asyncio.timeout(60):
            while (await cluster.list())[0]:  # noqa: ASYNC110 - until all are gone
                await asyncio.sleep(0.1)
    assert not [pid for number in range(3) for pid in world.processes(f"chat-{number}-a")]
    await world.open()


async def until_ready(cluster: ClusterClient, name: str) -> None:
    async with asyncio.timeout(60), contextlib.aclosing(cluster.watch()) as events:
        async for event in events:
            states = [one.state for one in event.workload.instances]
            if event.workload.name == name and states == [pb.READY]:
                return


async def test_one_of_two_servers_works_and_the_other_takes_over(world: Kubernetes) -> None:
    await world.backend.apply(workload("chat", 1, instance("chat-0-a")))
    await world.until_state("chat", "chat-0-a", pb.READY)
    second = KubernetesBackend(replace(world.options, identity="second"))
    starting = asyncio.create_task(second.start())
    await asyncio.sleep(1.0)
    assert not starting.done()  # it waits for the Lease
    before = world.backend.workloads()[1]
    await world.backend.stop()
    await starting
    world.backend = second
    status = world.status("chat", "chat-0-a")
    assert status is not None
    assert status.state == pb.READY
    assert world.backend.workloads()[1] > before  # no version is used twice
    assert world.starts("chat-0-a") == 1


async def test_a_former_leader_overwrites_nothing(world: Kubernetes) -> None:
    """It has not seen what the one after it has stored, and finishes what it was asked before."""
    backend = world.backend
    await backend.apply(workload("chat", 1, instance("chat-0-a")))
    late = objects.desired_of(workload("chat", 1, instance("chat-9-z")), backend._cluster.settings)
    with pytest.raises(Conflict, match="changed by others"):
        await backend._commit(late, None)
    stored = found(world, resource("ConfigMap"), "workload-chat")
    assert stored
    assert list(objects.read_workload(stored).instances) == ["chat-0-a"]

    before, after = await backend.inventory(["box-1"]), await backend.inventory(["box-1"])
    await after.lock("new", ["box-1"])
    with pytest.raises(OSError, match="changed by others"):
        await before.lock("old", ["box-1"])
    assert backend.lost.is_set()
    assert [one.holder for one in (await backend.inventory(["box-1"])).boxes()] == ["new"]
    await after.unlock("new", ["box-1"])
    before = await backend.inventory(["box-1"])
    await before.lock("old", ["box-1"])
    with pytest.raises(OSError, match="changed by others"):
        await after.lock("new", ["box-1"])


async def test_a_partition_from_the_api_server(world: Kubernetes) -> None:
    """What runs goes on, what is known is answered, what cannot be done is refused; and when it is over
    all goes on, with nothing twice."""
    await world.backend.stop()
    with world.bed.proxy() as (proxy, kubeconfig):
        direct = world.options
        lease = replace(direct.lease, give_up_seconds=60.0, lease_seconds=90.0)
        world.options = replace(direct, kubeconfig=kubeconfig, lease=lease)
        await world.open()
        await world.backend.apply(workload("chat", 1, instance("chat-0-a")))
        await world.until_state("chat", "chat-0-a", pb.READY)
        both = [instance("chat-0-a"), instance("chat-1-b")]
        with proxy.cut():
            with pytest.raises(Unavailable):
                await world.backend.apply(workload("chat", 2, *both))
            status = world.status("chat", "chat-0-a")
            assert status is not None
            assert status.state == pb.READY
            world.kill_manager("chat-0-a")  # its node deals with that alone
            await world.until("it runs again", lambda: world.starts("chat-0-a") == 2)
        await world.until_state("chat", "chat-0-a", pb.READY)
        await world.backend.apply(workload("chat", 2, *both))
        await world.until_state("chat", "chat-1-b", pb.READY)
        assert world.starts("chat-1-b") == 1
        await world.backend.stop()
    world.options = direct
    await world.open()


async def test_a_server_that_cannot_renew_its_lease_stops(world: Kubernetes) -> None:
    await world.backend.stop()
    with world.bed.proxy() as (proxy, kubeconfig):
        direct = world.options
        world.options = replace(direct, kubeconfig=kubeconfig, lease=QUICK)
        await world.open()
        with proxy.cut():
            async with asyncio.timeout(30):
                await world.backend.lost.wait()
        await world.backend.stop()
    world.options = direct
    await world.open()


async def test_configmaps_of_strangers_stop_no_server(world: Kubernetes) -> None:
    """While it runs, and when it starts."""
    await world.backend.apply(workload("chat", 1, instance("chat-0-a")))
    await world.until_state("chat", "chat-0-a", pb.READY)
    data = {"generation": "9" * 30, "instances.json": "[]"}
    strange: dict[str, tuple[dict[str, str], dict[str, str]]] = {
        "workload-bare": ({}, {}),
        "workload-evil": ({names.WORKLOAD: "chat"}, {}),
        "workload-large": ({names.WORKLOAD: "large"}, {}),
        "instance-evil": ({}, {names.GRACE: "9" * 400}),
        "instance-late": ({}, {names.GRACE: "9" * 5000}),
    }
    with world.bed.client() as client:
        for name, (labels, annotations) in strange.items():
            metadata = {
                "name": name,
                "labels": {**objects.MANAGED, **labels},
                "annotations": annotations,
            }
            one = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
            put(client, one, world.namespace)
    gone = resource("ConfigMap")
    await world.until("it is passed over", lambda: found(world, gone, "instance-late") is None)
    await world.backend.apply(workload("chat", 2, instance("chat-0-a"), instance("chat-1-b")))
    await world.until_state("chat", "chat-1-b", pb.READY)
    await world.restart()
    assert [one.name for one in world.backend.workloads()[0]] == ["chat"]
    service = found(world, Service, "chat")
    assert service
    assert [one["name"] for one in service["metadata"]["ownerReferences"]] == ["workload-chat"]
    (owner,) = service["metadata"]["ownerReferences"]
    chat = found(world, resource("ConfigMap"), "workload-chat")
    assert chat
    assert owner["uid"] == chat["metadata"]["uid"]


async def test_a_wsjob_that_was_made_by_hand(world: Kubernetes) -> None:
    document = {
        "apiVersion": "tidegate.dev/v1",
        "kind": "WsJob",
        "metadata": {"name": "by-hand"},
        "spec": {"kind": "Compile", "configMap": "inputs"},
    }
    spec = {"spec.json": json.dumps({"result": {"layout": 7}})}
    with world.bed.client() as client:
        inputs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "inputs"}, "data": spec}
        put(client, inputs, world.namespace)
        put(client, document, world.namespace)

        def state() -> str:
            status = client.get(resource("WsJob"), "by-hand", namespace=world.namespace).get("status")
            return str((status or {}).get("state", ""))

        await world.until("it has ended", lambda: state() == "Succeeded")
        made = client.get(resource("WsJob"), "by-hand", namespace=world.namespace)
        conditions = {one["type"]: one["status"] for one in made["status"]["conditions"]}
        assert conditions == {"Started": "True", "Complete": "True"}
        wrong = {**document, "metadata": {"name": "wrong"}, "spec": {"kind": "Guess", "configMap": "x"}}
        with pytest.raises(ApiError, match=r"spec\.kind"):
            put(client, wrong, world.namespace)
    await world.until("the server knows", lambda: world.backend.job("wsjob/by-hand").ended_at > 0)
    assert json.loads(world.backend.job("wsjob/by-hand").result) == {"layout": 7}


async def test_a_wsjob_that_was_made_by_hand_gets_no_secret_of_others(
    world: Kubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor can it pass for one of the orchestrator's."""
    monkeypatch.setattr(job_module, "INPUTS_SECONDS", 3.0)
    real = await world.backend.submit(job("compile-1", result={"layout": 7}))
    name = "compile-w-r1-1-0"
    spec = {"spec.json": json.dumps({"result": {"evil": True}})}
    labels = {"tidegate.dev/part": "wsjob-secret"}
    values = {"DATABASE_URL": "x", "secrets.json": "{}"}
    wanted = {"kind": "Execute", "configMap": "inputs"}
    with world.bed.client() as client:
        for kind, called, more in (
            ("ConfigMap", "inputs", {"data": spec}),
            ("ConfigMap", f"wsjob-{name}", {"data": spec}),  # where that of the real one will be
            ("Secret", "tidegate", {"stringData": values}),
            ("Secret", "mine", {"stringData": values}),
            (
                "WsJob",
                "evil",
                {"spec": {**wanted, "secret": "tidegate"}},
            ),
            ("WsJob", "good", {"spec": {**wanted, "secret": "mine"}}),
        ):
            version = "tidegate.dev/v1" if kind == "WsJob" else "v1"
            metadata: dict[str, Any] = {"name": called}
            if called == "mine":
                metadata["labels"] = labels
            if kind == "WsJob":
                metadata["annotations"] = {names.NAME: "compile-1"}
            about = {"apiVersion": version, "kind": kind, "metadata": metadata}
            put(client, {**about, **more}, world.namespace)
    await world.backend.submit(job(name, result={"layout": 8}))

    def has_ended(one: str) -> Callable[[], bool]:
        return lambda: world.backend.job(one).ended_at > 0

    await world.until("that with a secret of its own has ended", has_ended("wsjob/good"))
    (work,) = [folder.volume("secrets") for folder in world.folders("good")]
    assert {one.name for one in work.iterdir()} == {"runner.key", "secrets.json"}
    await world.until("that with a secret of others has failed", has_ended("wsjob/evil"))
    assert "no label tidegate.dev/part=wsjob-secret" in world.backend.job("wsjob/evil").sentence
    assert world.starts("evil") == 0
    await world.until("the one with the inputs of others has failed", has_ended(name))
    assert world.backend.job(name).sentence == f"ConfigMap wsjob-{name} is not what was submitted."
    assert world.starts(name) == 0
    await world.until("the real one has ended", has_ended(real.name))
    assert json.loads(world.backend.job(real.name).result) == {"layout": 7}


async def test_a_job_whose_result_cannot_be_stored_has_failed(world: Kubernetes) -> None:
    """That it is too large, or no text, its runner says; that the API server refuses it, the server."""
    immutable = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "wsjob-refused-result"},
        "data": {"result.json": "another"},
        "immutable": True,
    }
    with world.bed.client() as client:
        put(client, immutable, world.namespace)
    reasons = {"large": "ResultTooLarge", "bytes": "ResultUnusable", "refused": "ResultRefused"}
    await world.backend.submit(job("large", raw_result=[0x20, 1 << 20]))
    await world.backend.submit(job("bytes", raw_result=[0xFF, 100]))
    await world.backend.submit(job("refused", result={}))
    for name, reason in reasons.items():
        ended = functools.partial(lambda one: world.backend.job(one).ended_at > 0, name)
        await world.until(f"{name} has ended", ended)
        done = world.backend.job(name)
        assert (done.state, done.reason) == (pb.JOB_FAILED, reason)


async def test_deleting_a_wsjob_ends_it_first(world: Kubernetes) -> None:
    await world.backend.submit(job("compile-1", waits=True, result={}))
    await world.until("it runs", lambda: world.starts("compile-1") == 1)
    with world.bed.client() as client:
        client.delete(resource("WsJob"), "compile-1", namespace=world.namespace)
    await world.until("nothing of it runs", lambda: not world.processes("compile-1"))
    await world.until("it is gone", lambda: found(world, resource("WsJob"), "compile-1") is None)


async def test_the_process_serves_and_ends(world: Kubernetes, tmp_path: Path) -> None:
    await world.backend.stop()
    with server(world, tmp_path, "--listen", f"unix:{tmp_path / 'c.sock'}") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    await world.open()


def server(
    world: Kubernetes, folder: Path, *options: str
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """With managers that the test tells what to say."""
    return served(world.bed, world.namespace, folder, *options, command=FAKE_MANAGER)


async def test_an_instance_whose_record_was_deleted_is_gone(world: Kubernetes) -> None:
    """Its pod goes with it, and nobody knows any more what it was to be."""
    await world.backend.apply(workload("chat", 1, instance("chat-0-a", grace=1)))
    await world.until_state("chat", "chat-0-a", pb.READY)
    with world.bed.client() as client:
        client.delete(resource("ConfigMap"), "instance-chat-0-a", namespace=world.namespace)
    assert (await world.until_state("chat", "chat-0-a", pb.GONE)).reason == "RecordLost"
    await world.backend.apply(workload("chat", 2))
    await world.until("it is forgotten", lambda: not world.backend.workload("chat").instances)
