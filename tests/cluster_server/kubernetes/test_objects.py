"""The objects of the backend `kubernetes`, as documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cluster_server.kubernetes import names, objects
from cluster_server.kubernetes.objects import About, PodSettings
from cluster_server.processes.core import Goal
from cluster_server.proto import cluster_pb2 as pb
from console.environment import PROJECT
from tests.cluster_server.requests import SECRET, instance, job, with_goal, workload

SETTINGS = PodSettings(b"k" * 32)
MANIFESTS = PROJECT / "deploy" / "kubernetes"


@given(st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,198}[a-z0-9])?", fullmatch=True))
def test_every_name_of_a_job_is_a_name_of_an_object_and_a_label(job_name: str) -> None:
    for made in (names.object_name(job_name), names.job_result(job_name)):
        assert len(made) <= 253
        assert all(part and part[0].isalnum() and part[-1].isalnum() for part in made.split("."))
    assert len(names.label(job_name)) <= 63


def test_names_that_are_shortened_stay_different() -> None:
    made = {names.label(f"{'x' * 80}-{number}") for number in range(100)}
    assert len(made) == 100
    assert names.service_name("7b") == "w-7b"
    assert names.box_label("rack:7") != names.box_label("rack-7")


def test_a_digest_tells_all_that_never_changes() -> None:
    one = instance("chat-0-a")
    known = objects.known_of(one, SETTINGS)
    assert objects.known_of(with_goal(one, pb.DRAIN), SETTINGS).digest == known.digest
    for change in ("spec", "secrets", "boxes"):
        other = instance("chat-0-a")
        if change == "spec":
            other.spec = b'{"lines": 1}'
        elif change == "secrets":
            other.secrets["join_token"] = b'"another"'
        else:
            other.boxes.append("box-9")
        assert objects.known_of(other, SETTINGS).digest != known.digest
    # Who reads it cannot try secrets out: it is made with a key.
    assert objects.known_of(one, PodSettings(b"other")).digest != known.digest


def test_a_workload_is_read_as_it_was_written() -> None:
    request = workload("chat", 3, instance("chat-0-a"), instance("chat-1-b", goal=pb.RELEASE_CACHE))
    desired = objects.desired_of(request, SETTINGS)
    document = objects.workload_document(desired)
    document["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    read = objects.read_workload(document)
    assert (read.name, read.generation, read.instances) == ("chat", 3, desired.instances)
    document["data"]["instances.json"] = "[{"
    with pytest.raises(ValueError, match="ConfigMap workload-chat is damaged"):
        objects.read_workload(document)


def test_secrets_are_in_a_secret_and_nowhere_else() -> None:
    one = instance("chat-0-a")
    known = objects.known_of(one, SETTINGS)
    record = objects.instance_map_document("chat", one, known.digest)
    pod = objects.instance_pod_document(known, About("chat"), "u", SETTINGS)
    wsjob = objects.wsjob_document(job("compile-1"), 1.0, SETTINGS)
    for document in (record, pod, wsjob):
        assert SECRET not in json.dumps(document)
        assert SETTINGS.runner_key("chat-0-a") not in json.dumps(document)
    secret = objects.instance_secret_document(one, "u", SETTINGS)
    assert set(secret["data"]) == {"runner.key", "secrets.json"}


def test_the_pod_of_an_instance() -> None:
    one = instance("chat-0-a", grace=77)
    one.boxes[:] = ["box-1", "box-2"]
    about = About("chat", ("box-1", "box-2"), memory_bytes=1 << 30, cpu_millis=500)
    template = {
        "securityContext": {"runAsNonRoot": True},
        "containers": [{"name": "manager", "env": [{"name": "HTTPS_PROXY", "value": "p"}]}],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "weights"}}],
    }
    settings = PodSettings(b"k", image="registry/tidegate:1", template=template)
    pod = objects.instance_pod_document(objects.known_of(one, settings), about, "u", settings)
    spec = pod["spec"]
    assert pod["metadata"]["name"] == "chat-0-a"
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("OnFailure", 77)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == {"runAsNonRoot": True}
    node = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = [one["matchExpressions"][0]["key"] for one in node["nodeSelectorTerms"]]
    assert keys == ["box.tidegate.dev/box-1", "box.tidegate.dev/box-2"]  # any of them
    (container,) = spec["containers"]
    assert container["image"] == "registry/tidegate:1"
    assert container["resources"]["limits"] == {"memory": str(1 << 30), "cpu": "500m"}
    assert {"name": "HTTPS_PROXY", "value": "p"} in container["env"]
    assert [one["name"] for one in spec["volumes"]] == ["shared", "work", "inputs", "secrets"]
    assert template["containers"] == [
        {"name": "manager", "env": [{"name": "HTTPS_PROXY", "value": "p"}]}
    ]  # it is as it was


def test_the_manifests_name_what_the_backend_uses() -> None:
    crd = yaml.safe_load((MANIFESTS / "wsjobs.crd.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    asked = job("compile-1", deadline=5)
    asked.boxes.append("box-1")
    made = objects.wsjob_document(asked, 1.0, SETTINGS)["spec"]
    assert set(made) <= set(spec["properties"])
    assert made["kind"] in spec["properties"]["kind"]["enum"]
    policies = _documents(MANIFESTS / "network-policies.yaml")
    ports = {
        port["port"]
        for policy in policies
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    }
    assert {objects.RUNNER_PORT, objects.MANAGER_PORT} <= ports
    (role,) = [one for one in _documents(MANIFESTS / "rbac.yaml") if one["kind"] == "Role"]
    rights = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    assert "list" not in rights["secrets"]
    assert all("*" not in verbs for verbs in rights.values())


def test_goals_are_those_of_managers() -> None:
    assert {goal.value for goal in Goal} == set(pb.Goal.keys()) - {"GOAL_UNSPECIFIED"}


def _documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))
