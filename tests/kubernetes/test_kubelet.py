"""The stand-in for the kubelet does what Kubernetes documents of one, as far as tests rely on it."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import pytest
from lightkube import ApiError, Client

from tests.kubernetes.bed import Bed
from tests.kubernetes.control_plane import NOT_READY_SECONDS
from tests.kubernetes.resources import Document, put, resource

pytestmark = [
    *(pytest.mark.slow, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")),
    pytest.mark.timeout(300),  # the first one makes the test bed
]
Pod, Endpoints = resource("Pod"), resource("Endpoints")
SECONDS_MAX = 60.0
SERVER = "import http.server as h; h.HTTPServer(('', 8080), h.SimpleHTTPRequestHandler).serve_forever()"


class Namespace:
    def __init__(self, bed: Bed, client: Client) -> None:
        self.name = f"kubelet-{secrets.token_hex(4)}"
        self.client = client
        self.bed = bed

    def put(self, document: Document) -> None:
        put(self.client, document, self.name)

    def pod(self, name: str, command: str, **spec: Any) -> None:
        container = {"name": "main", "image": "none", "command": ["sh", "-c", command]}
        container |= spec.pop("container", {})
        labels = spec.pop("labels", {})
        self.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": labels},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 1, **spec},
            }
        )

    def get(self, name: str) -> Document | None:
        try:
            return dict(self.client.get(Pod, name, namespace=self.name))
        except ApiError as error:
            if error.status.code != 404:
                raise
            return None

    def until(self, name: str, holds: Callable[[Document], bool]) -> Document:
        until = time.monotonic() + SECONDS_MAX
        while True:
            found = self.get(name)
            if found and holds(found):
                return found
            assert time.monotonic() < until, found and found.get("status")
            time.sleep(0.05)

    def until_gone(self, name: str) -> None:
        until = time.monotonic() + SECONDS_MAX
        while self.get(name) is not None:
            assert time.monotonic() < until
            time.sleep(0.05)

    def delete(self, name: str, grace: int | None = None) -> None:
        self.client.delete(Pod, name, namespace=self.name, grace_period=grace)

    def log(self, name: str) -> str:
        return "".join(self.client.log(name, namespace=self.name))


@pytest.fixture
def space(kubernetes_bed: Bed) -> Iterator[Namespace]:
    with kubernetes_bed.client() as client:
        made = Namespace(kubernetes_bed, client)
        kubernetes_bed.namespace(made.name)
        yield made
        for pod in client.list(Pod, namespace=made.name):
            with contextlib.suppress(ApiError):
                made.delete(pod["metadata"]["name"], 0)
        kubernetes_bed.drop_namespace(made.name)


def phase(pod: Document) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def container(pod: Document) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (pod.get("status", {}).get("containerStatuses") or [{}])[0]
    return found


def test_never_and_on_failure_end_as_their_container_does(space: Namespace) -> None:
    space.pod("good", "exit 0", restartPolicy="OnFailure")
    space.pod("bad", "exit 3", restartPolicy="Never")
    space.until("good", lambda pod: phase(pod) == "Succeeded")
    bad = space.until("bad", lambda pod: phase(pod) == "Failed")
    ended = container(bad)["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (3, "Error")
    assert container(bad)["restartCount"] == 0


def test_a_container_that_fails_is_started_again_at_once_and_then_after_a_pause(
    space: Namespace,
) -> None:
    space.pod("bad", "echo run; exit 3", restartPolicy="Always")
    again = space.until("bad", lambda pod: container(pod).get("restartCount", 0) >= 1)
    assert again["status"]["phase"] == "Running"
    waiting = space.until("bad", lambda pod: "waiting" in container(pod).get("state", {}))
    assert container(waiting)["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert container(waiting)["lastState"]["terminated"]["exitCode"] == 3


def test_sigterm_then_sigkill_when_the_grace_period_is_over(space: Namespace) -> None:
    space.pod("polite", "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done")
    space.pod("deaf", "trap '' TERM; echo up; while :; do sleep 0.05; done")
    for name in ("polite", "deaf"):
        space.until(name, lambda pod: phase(pod) == "Running")
        until = time.monotonic() + SECONDS_MAX
        while "up" not in space.log(name):
            assert time.monotonic() < until
            time.sleep(0.05)
    space.delete("polite", 600)
    space.until_gone("polite")
    began = time.monotonic()
    space.delete("deaf", 2)
    space.until_gone("deaf")
    assert time.monotonic() - began >= 1


def test_only_ready_pods_are_endpoints(space: Namespace) -> None:
    space.put(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {
                "clusterIP": "None",
                "selector": {"app": "web"},
                "ports": [{"port": 8080, "protocol": "TCP"}],
            },
        }
    )
    gate = {"tcpSocket": {"port": 8080}, "periodSeconds": 1, "failureThreshold": 1}
    ready = {"command": [sys.executable, "-S", "-c", SERVER], "readinessProbe": gate}
    space.pod("serves", "", labels={"app": "web"}, container=ready)
    space.pod("refuses", "sleep 100", labels={"app": "web"}, container={"readinessProbe": gate})
    serves = space.until("serves", lambda pod: container(pod).get("ready", False))
    refuses = space.until("refuses", lambda pod: phase(pod) == "Running")

    def addresses() -> tuple[set[str], set[str]]:
        found = space.client.get(Endpoints, "web", namespace=space.name)
        subset = (found.get("subsets") or [{}])[0]
        there = [subset.get(kind) or () for kind in ("addresses", "notReadyAddresses")]
        return {one["ip"] for one in there[0]}, {one["ip"] for one in there[1]}

    until = time.monotonic() + SECONDS_MAX
    wanted = ({serves["status"]["podIP"]}, {refuses["status"]["podIP"]})
    while addresses() != wanted:
        assert time.monotonic() < until, addresses()
        time.sleep(0.05)


def test_a_container_that_is_not_alive_is_started_again(space: Namespace) -> None:
    probe = {"tcpSocket": {"port": 8080}, "periodSeconds": 1, "failureThreshold": 2}
    space.pod("stuck", "sleep 100", container={"livenessProbe": probe})
    again = space.until("stuck", lambda pod: container(pod).get("restartCount", 0) >= 1)
    assert container(again)["lastState"]["terminated"]["exitCode"] in (137, 143)


def test_volumes_and_fields_of_the_pod(space: Namespace) -> None:
    space.pod(
        "reads",
        "cat /inputs/given; echo $POD_IP; touch /work/kept; test -e /inputs/other || echo alone; exit 0",
        restartPolicy="Never",
        volumes=[
            {
                "name": "inputs",
                "configMap": {"name": "late", "items": [{"key": "one", "path": "given"}]},
            },
            {"name": "work", "emptyDir": {}},
        ],
        container={
            "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "volumeMounts": [
                {"name": "inputs", "mountPath": "/inputs", "readOnly": True},
                {"name": "work", "mountPath": "/work-of-pod"},
            ],
        },
    )
    time.sleep(0.5)
    pending = space.until("reads", lambda pod: bool(container(pod)))
    assert container(pending)["state"]["waiting"]["reason"] == "ContainerCreating"
    data = {"one": "from the map\n", "other": "x"}
    space.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}, "data": data})
    done = space.until("reads", lambda pod: phase(pod) in ("Succeeded", "Failed"))
    assert space.log("reads").splitlines() == ["from the map", done["status"]["podIP"], "alone"]


def test_variables_come_from_secrets_once_there_are_some_and_the_last_source_wins(
    space: Namespace,
) -> None:
    def secret(name: str, **values: str) -> None:
        document = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        space.put({**document, "stringData": values})

    secret("first", A="first", B="first")
    space.pod(
        "reads",
        "echo $A $B $C",
        restartPolicy="Never",
        container={
            "envFrom": [{"secretRef": {"name": "first"}}, {"secretRef": {"name": "second"}}],
            "env": [{"name": "C", "valueFrom": {"secretKeyRef": {"name": "second", "key": "B"}}}],
        },
    )
    space.until("reads", lambda pod: phase(pod) == "Running")
    assert space.log("reads") == ""  # it has not begun: there is no such Secret
    secret("second", B="second")
    space.until("reads", lambda pod: phase(pod) == "Succeeded")
    assert space.log("reads").strip() == "first second second"


def test_a_read_only_root_has_volumes_that_may_be_written_to(space: Namespace) -> None:
    space.pod(
        "writes",
        "touch /kept/a && echo kept; touch /tmp/a || echo refused; touch /new || echo refused",
        restartPolicy="Never",
        volumes=[{"name": "kept", "emptyDir": {}}],
        container={
            "securityContext": {"readOnlyRootFilesystem": True},
            "volumeMounts": [{"name": "kept", "mountPath": "/kept"}],
        },
    )
    space.until("writes", lambda pod: phase(pod) == "Succeeded")
    said = [line for line in space.log("writes").splitlines() if not line.startswith("touch")]
    assert said == ["kept", "refused", "refused"]


def test_users_groups_and_whose_volumes_are(space: Namespace) -> None:
    """fsGroup gives a pod what is its own, and no folder of the node. A Secret has its mode."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "secret"}}
    space.put({**secret, "stringData": {"a": "kept"}})
    volumes: list[Document] = [
        {"name": "own", "emptyDir": {}},
        {"name": "secret", "secret": {"secretName": "secret", "defaultMode": 0o400}},
        {"name": "node", "hostPath": {"path": "/var/lib/some", "type": "DirectoryOrCreate"}},
    ]
    mounts = [{"name": one["name"], "mountPath": f"/{one['name']}-volume"} for one in volumes]
    say = (
        "id -u; id -G; cat /secret-volume/a; echo; touch /own-volume/a; stat -c '%u %g' /own-volume/a;"
        "touch /node-volume/a 2>/dev/null || echo refused; kill -0 1 && echo same"
    )
    as_user = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10002}
    space.pod(
        "grouped",
        say,
        restartPolicy="Never",
        volumes=volumes,
        securityContext={**as_user, "fsGroup": 10003},
        container={"volumeMounts": mounts},
    )
    space.pod(
        "alone",
        "cat /secret-volume/a 2>/dev/null || echo refused; touch /own-volume/a && echo kept",
        restartPolicy="Never",
        volumes=volumes,
        securityContext=as_user,
        container={"volumeMounts": mounts},
    )
    for name in ("grouped", "alone"):
        space.until(name, lambda pod: phase(pod) == "Succeeded")
    said = space.log("grouped").splitlines()
    assert said == ["10001", "10002 10003", "kept", "10001 10003", "refused", "same"]
    assert space.log("alone").split() == ["refused", "kept"]


def test_root_has_the_capabilities_that_are_added_and_one_who_must_not_be_root_waits(
    space: Namespace,
) -> None:
    few = {"runAsUser": 0, "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}}
    space.pod(
        "few",
        "mkdir /own/b && chown 7:7 /own/b && stat -c %u /own/b;"
        "chroot / true 2>/dev/null || echo refused",
        restartPolicy="Never",
        volumes=[{"name": "own", "emptyDir": {}}],
        container={"securityContext": few, "volumeMounts": [{"name": "own", "mountPath": "/own"}]},
    )
    space.pod("root", "true", securityContext={"runAsNonRoot": True})
    space.until("few", lambda pod: phase(pod) == "Succeeded")
    assert space.log("few").split() == ["7", "refused"]
    waits = space.until("root", lambda pod: "message" in container(pod)["state"].get("waiting", {}))
    assert container(waits)["state"]["waiting"]["reason"] == "CreateContainerConfigError"


def test_a_pod_of_another_user_ends_with_the_power_of_its_node(space: Namespace) -> None:
    bed = space.bed
    bed.add_node("node-of-users")
    try:
        space.pod(
            "there", "exec sleep 1000", nodeName="node-of-users", securityContext={"runAsUser": 10001}
        )
        there = space.until("there", lambda pod: "containerID" in container(pod))
        pid = int(container(there)["containerID"].removeprefix("processes://"))
        process = psutil.Process(pid)
        assert process.is_running()
    finally:
        bed.remove_node("node-of-users")
    process.wait(SECONDS_MAX)


def test_a_pod_finds_the_ready_pods_of_a_service_by_its_name(space: Namespace) -> None:
    """One that runs already learns of it too."""
    space.pod("asks", "until getent hosts web; do sleep 0.1; done", restartPolicy="Never")
    space.until("asks", lambda pod: phase(pod) == "Running")
    space.put(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 8080, "protocol": "TCP"}]},
        }
    )
    command = {"command": [sys.executable, "-S", "-c", SERVER]}
    space.pod("web-1", "", labels={"app": "web"}, container=command)
    served = space.until("web-1", lambda pod: container(pod).get("ready", False))
    space.until("asks", lambda pod: phase(pod) == "Succeeded")
    assert space.log("asks").split()[0] == served["status"]["podIP"]
    whole = f"http://web.{space.name}.svc.cluster.local:8080/"
    space.pod(
        "fetches", f"until curl -sf -o /dev/null {whole}; do sleep 0.1; done", restartPolicy="Never"
    )
    space.until("fetches", lambda pod: phase(pod) == "Succeeded")


def test_commands_of_probes_run_in_the_container_and_the_first_probe_holds_the_others_back(
    space: Namespace,
) -> None:
    """It is not alive before it has started; that counts only afterwards."""
    each = {"periodSeconds": 1, "timeoutSeconds": 30}
    started = {"exec": {"command": ["test", "-e", "/state/started"]}, **each}
    alive = {"exec": {"command": ["test", "-e", "/state/alive"]}, **each}
    space.pod(
        "slow",
        "sleep 3; touch /state/alive /state/started; sleep 100",
        volumes=[{"name": "state", "emptyDir": {}}],
        container={
            "startupProbe": {**started, "failureThreshold": 30},
            "livenessProbe": {**alive, "failureThreshold": 1},
            "readinessProbe": alive,
            "volumeMounts": [{"name": "state", "mountPath": "/state"}],
        },
    )
    ready = space.until("slow", lambda pod: container(pod).get("ready", False))
    assert container(ready)["restartCount"] == 0


def test_pods_of_a_node_that_is_silent_are_evicted_and_stay_until_it_confirms(
    space: Namespace,
) -> None:
    bed = space.bed
    if bed.is_given:
        pytest.skip("a cluster that is given waits for its nodes as long as it likes")
    node = bed.nodes["node-b"]
    space.pod("there", "sleep 100", nodeName="node-b")
    space.pod("here", "sleep 100", nodeName="node-a")
    for name in ("there", "here"):
        space.until(name, lambda pod: phase(pod) == "Running")
    node.freeze()
    try:
        began = time.monotonic()
        space.until("there", lambda pod: "deletionTimestamp" in pod["metadata"])
        # It counts from when the node has reported last.
        assert time.monotonic() - began > NOT_READY_SECONDS / 2
        time.sleep(2)  # longer than its grace period
        assert space.get("there") is not None  # nobody knows whether it runs
        here = space.get("here")
        assert here
        assert "deletionTimestamp" not in here["metadata"]
    finally:
        node.thaw()
    space.until_gone("there")
    bed.until_ready("node-b")
