"""What Apply, Delete and Submit leave where the API server refuses a part of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from cluster_server.backend import Conflict
from cluster_server.kubernetes import backend as module
from cluster_server.kubernetes import instance as instance_module
from cluster_server.kubernetes import objects
from cluster_server.kubernetes.api import Unavailable
from cluster_server.kubernetes.backend import KubernetesBackend
from cluster_server.kubernetes.instance import InstanceWorker
from cluster_server.kubernetes.job import JobWorker
from cluster_server.kubernetes.objects import RUNNER_PORT
from cluster_server.kubernetes.options import KubernetesOptions
from cluster_server.kubernetes.runners import Conversation
from cluster_server.pod.runner import JobReport, Report
from cluster_server.processes.manager_status import ManagerStatus
from cluster_server.proto import cluster_pb2 as pb
from tests.cluster_server.kubernetes.api_server import NAMESPACE, ApiServer, kubeconfig, until
from tests.cluster_server.requests import instance, job, workload

RUNS = f"127.{1 + os.getpid() % 250}.0.79"  # another run of these tests has another address
PODS = ("chat-0-a", "wsjob-compile-1-run")


@pytest.fixture
async def backend(server: ApiServer, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    options = KubernetesOptions(NAMESPACE, kubeconfig(server, tmp_path), jobs_kept=1)
    made = KubernetesBackend(options)
    await made.start()
    yield made
    await made.stop()


async def test_what_an_apply_has_prepared_that_was_not_stored_is_removed_after_the_next(
    server: ApiServer, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMIT_SECONDS", 0.1)
    await backend.apply(workload("chat", 1, instance("chat-0-a")))
    server.refusals["PATCH", "configmaps"] = 503
    with pytest.raises(Unavailable):
        await backend.apply(workload("chat", 2, instance("chat-0-a"), instance("chat-1-b")))
    assert server.get("configmaps", "instance-chat-1-b")
    del server.refusals["PATCH", "configmaps"]
    await backend.apply(workload("chat", 3, instance("chat-0-a"), instance("chat-1-c")))
    await until("it is removed", lambda: server.get("configmaps", "instance-chat-1-b") is None)
    for name in ("instance-chat-0-a", "instance-chat-1-c"):
        assert server.get("configmaps", name)


async def test_a_workload_that_is_named_as_a_service_of_others_is_refused(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    server.put("services", "redis", {"spec": {"selector": {"app": "redis"}}})
    with pytest.raises(Conflict, match="There is a Service redis"):
        await backend.apply(workload("redis", 1, instance("redis-0-a")))
    assert server.get("configmaps", "instance-redis-0-a") is None


async def test_a_delete_that_is_refused_says_so(server: ApiServer, backend: KubernetesBackend) -> None:
    await backend.apply(workload("chat", 1, instance("chat-0-a")))
    server.refusals["DELETE", "configmaps"] = 403
    with pytest.raises(Conflict, match="the test refuses it"):
        await backend.delete("chat")


async def test_what_nobody_has_foreseen_is_no_end_of_who_looks_after_an_instance_or_a_job(
    server: ApiServer, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(objects, "instance_pod_document", fail)
        patched.setattr(objects, "job_pod_document", fail)
        await backend.apply(workload("chat", 1, instance("chat-0-a")))
        await backend.submit(job("compile-1"))

        def sentences() -> list[str]:
            [status] = backend.workload("chat").instances
            itself = (server.get("wsjobs", "compile-1") or {}).get("status", {})
            return [status.sentence, backend.job("compile-1").sentence, itself.get("sentence", "")]

        await until("it is shown", lambda: all("new thread" in one for one in sentences()))
    await until("both have pods", lambda: all(server.get("pods", name) for name in PODS))


async def test_what_nobody_has_foreseen_of_saying_why_a_job_waits_is_no_end_of_who_looks_after_it(
    server: ApiServer, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    server.refusals["POST", "pods"] = 503
    with monkeypatch.context() as patched:
        patched.setattr(JobWorker, "_note", fail)
        await backend.submit(job("compile-1"))
        await until("it is shown", lambda: "new thread" in backend.job("compile-1").sentence)
    del server.refusals["POST", "pods"]
    await until("it has a pod", lambda: server.get("pods", PODS[1]))


async def test_what_nobody_has_foreseen_of_asking_runners_is_shown_and_they_are_asked_again(
    server: ApiServer, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(report), report))
        await writer.drain()
        writer.close()

    said = Report(1, ManagerStatus("ready"), JobReport(exit_status=0, result="{}"))
    report = msgspec.json.encode(said)
    with monkeypatch.context() as patched:
        patched.setattr(Conversation, "ask", fail)
        await backend.apply(workload("chat", 1, instance("chat-0-a")))
        await backend.submit(job("compile-1"))
        await until("both have pods", lambda: all(server.get("pods", name) for name in PODS))
        container = {"name": "manager", "state": {"running": {}}}
        status = {"phase": "Running", "podIP": RUNS, "containerStatuses": [container]}
        for name in PODS:
            server.put("pods", name, {**server.objects["pods", name], "status": status})

        def told() -> list[str]:
            [shown] = backend.workload("chat").instances
            itself = (server.get("wsjobs", "compile-1") or {}).get("status", {})
            sentences = [shown.sentence, backend.job("compile-1").sentence, itself.get("sentence", "")]
            return [one for one in sentences if "be asked: RuntimeError" in one]

        await until("it is shown", lambda: len(told()) == 3)
    with monkeypatch.context() as patched:  # nor of showing it
        failed = set[type]()

        def break_off(worker: InstanceWorker | JobWorker) -> NoReturn:
            failed.add(type(worker))
            raise KeyError("nobody")

        patched.setattr(InstanceWorker, "_shown", break_off)
        patched.setattr(JobWorker, "_show", break_off)
        await until("both fail", lambda: failed == {InstanceWorker, JobWorker})
    async with await asyncio.start_server(answer, RUNS, RUNNER_PORT):
        await until("its state", lambda: backend.workload("chat").instances[0].state == pb.READY)
        await until("its result", lambda: backend.job("compile-1").state == pb.JOB_SUCCEEDED)
        assert not told()


async def test_who_can_t_even_show_a_problem_goes_on_when_that_is_over(
    server: ApiServer, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = set[type]()

    def break_off(worker: InstanceWorker | JobWorker) -> NoReturn:
        failed.add(type(worker))
        raise KeyError("nobody")

    server.refusals["POST", "pods"] = 503
    await backend.apply(workload("chat", 1, instance("chat-0-a")))
    await backend.submit(job("compile-1"))
    with monkeypatch.context() as patched:
        patched.setattr(InstanceWorker, "_shown", break_off)
        patched.setattr(JobWorker, "_show", break_off)
        await until("both fail", lambda: failed == {InstanceWorker, JobWorker})
    del server.refusals["POST", "pods"]
    await until("both have pods", lambda: all(server.get("pods", name) for name in PODS))


async def test_a_manager_that_has_never_answered_this_server_is_not_starting_for_ever(
    server: ApiServer, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a policy of the network keeps a new server from the pods."""
    monkeypatch.setattr(instance_module, "FIRST_ANSWER_SECONDS", 0.0)
    await backend.apply(workload("chat", 1, instance("chat-0-a")))
    await until("it has a pod", lambda: server.get("pods", PODS[0]))
    assert backend.workload("chat").instances[0].reason == "Starting"
    container = {"name": "manager", "state": {"running": {}}}
    status = {"phase": "Running", "podIP": RUNS, "containerStatuses": [container]}
    server.put("pods", PODS[0], {**server.objects["pods", PODS[0]], "status": status})
    await until("it is said", lambda: backend.workload("chat").instances[0].reason == "ManagerSilent")
    assert "has never answered this server" in backend.workload("chat").instances[0].sentence


async def test_a_manager_that_has_not_answered_yet_is_starting(
    server: ApiServer, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def fail(_: Conversation, goal: str) -> NoReturn:
        asked.append(goal)
        raise ConnectionRefusedError

    monkeypatch.setattr(Conversation, "ask", fail)
    await backend.apply(workload("chat", 1, instance("chat-0-a")))
    await until("it has a pod", lambda: server.get("pods", PODS[0]))
    container = {"name": "manager", "state": {"running": {}}}
    status = {"phase": "Running", "podIP": RUNS, "containerStatuses": [container]}
    server.put("pods", PODS[0], {**server.objects["pods", PODS[0]], "status": status})
    await until("it was asked again", lambda: len(asked) > 2)
    assert backend.workload("chat").instances[0].reason == "Starting"


async def test_inputs_that_are_refused_are_why_a_job_has_none(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    server.refusals["POST", "configmaps"] = 403
    with pytest.raises(OSError, match="the test refuses it"):
        await backend.submit(job("compile-1"))
    await until("it is shown", lambda: "the test refuses it" in backend.job("compile-1").sentence)
    assert backend.job("compile-1").sentence.startswith("There is no ConfigMap")
    server.refusals["PATCH", "wsjobs"] = 403
    with pytest.raises(OSError, match="the test refuses it"):
        await backend.cancel("compile-1")


async def test_a_job_that_could_not_be_deleted_is_deleted_later(
    server: ApiServer, backend: KubernetesBackend
) -> None:
    """And is known until then."""

    async def end(name: str) -> None:
        await backend.submit(job(name))
        await until("its pod is made", lambda: server.get("pods", f"wsjob-{name}-run"))
        made = server.objects["pods", f"wsjob-{name}-run"]
        server.put("pods", f"wsjob-{name}-run", {**made, "status": {"phase": "Failed"}})
        await until("it has ended", lambda: backend.job(name).ended_at)

    server.refusals["DELETE", "wsjobs"] = 503
    await end("compile-1")
    await end("compile-2")
    await until("it was tried", lambda: server.count("DELETE", "wsjobs", "compile-1"))
    names = {"compile-1", "compile-2"}
    await until("both are known", lambda: {one.name for one in backend.jobs()} == names)
    assert (await backend.submit(job("compile-1"))).ended_at
    del server.refusals["DELETE", "wsjobs"]
    await end("compile-3")
    await until("both are deleted", lambda: not names & {name for _, name in server.objects})
    assert [one.name for one in backend.jobs()] == ["compile-3"]
