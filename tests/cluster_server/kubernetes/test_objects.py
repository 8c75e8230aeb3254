"""The objects of the backend `kubernetes`, as documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cluster_server.checks import Wrong, check_job_name
from cluster_server.kubernetes import names, objects
from cluster_server.kubernetes.objects import About, PodSettings, WsJob
from cluster_server.processes.core import Goal
from cluster_server.proto import cluster_pb2 as pb
from console.environment import PROJECT
from tests.cluster_server.kubernetes.unconnected import SETTINGS, stored
from tests.cluster_server.requests import SECRET, instance, job, with_goal, workload

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
    there = objects.read_workload(document)
    assert (there.name, there.generation, there.instances) == ("chat", 3, desired.instances)
    document["data"]["instances.json"] = "[{"
    with pytest.raises(ValueError, match="ConfigMap workload-chat is damaged"):
        objects.read_workload(document)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no label": lambda one: one["metadata"]["labels"].clear(),
    "the label of another": lambda one: one["metadata"]["labels"].update({names.WORKLOAD: "victim"}),
    "another name": lambda one: one["metadata"].update(name="workload-a.b"),
    "no data": lambda one: one.pop("data"),
    "a generation of 30 digits": lambda one: one["data"].update(generation="9" * 30),
    "a generation of 5000 digits": lambda one: one["data"].update(generation="9" * 5000),
    "a generation below 1": lambda one: one["data"].update(generation="0"),
    "a goal that does not exist": lambda one: _change(one, goal="WIN"),
    "a grace period that is too long": lambda one: _change(one, grace_seconds=10**12),
    "an instance that has no name": lambda one: _change(one, name="../secrets/x"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_configmap_that_somebody_has_labeled_is_no_workload(what: str) -> None:
    desired = objects.desired_of(workload("chat", 3, instance("chat-0-a")), SETTINGS)
    document = stored(objects.workload_document(desired))
    objects.read_workload(document)
    HOSTILE[what](document)
    with pytest.raises(ValueError, match=r"ConfigMap workload-\S+ is damaged"):
        objects.read_workload(document)


def _change(document: dict[str, Any], **values: Any) -> None:
    (known,) = json.loads(document["data"]["instances.json"])
    document["data"]["instances.json"] = json.dumps([known | values])


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


def read(document: dict[str, Any], uid: str = "u") -> WsJob:
    return objects.read_wsjob(stored(document, uid), SETTINGS)


def by_hand(name: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"kind": "Execute", "configMap": "inputs", **spec}}


def test_a_wsjob_that_was_submitted_is_told_from_one_that_says_so() -> None:
    submitted = objects.wsjob_document(job("compile-w-r1-17-0"), 123.0, SETTINGS)
    read_back = read(submitted)
    assert (read_back.name, read_back.is_submitted) == ("compile-w-r1-17-0", True)
    assert read_back.submitted_at == 123.0
    cancelled = {**submitted, "spec": {**submitted["spec"], "cancelled": True}}
    assert read(cancelled).is_submitted
    for changed in (
        {**submitted, "spec": {**submitted["spec"], "configMap": "another"}},
        {**submitted, "spec": {**submitted["spec"], "secret": "tidegate"}},
        {**submitted, "metadata": {**submitted["metadata"], "name": "evil"}},
    ):
        found = read(changed)
        assert not found.is_submitted
        assert found.name == f"wsjob/{found.object}"
        assert (found.digest, found.submitted_at) == ("", 1767225600.0)
    said = {names.NAME: "compile-w-r1-17-0", names.DIGEST: "d", names.SUBMITTED_AT: "nan"}
    evil = by_hand("evil")
    evil["metadata"]["annotations"] = {**said, names.SIGNATURE: ""}
    assert read(evil).name == "wsjob/evil"
    with pytest.raises(Wrong):
        check_job_name("wsjob/evil")  # so nobody can submit it


def test_a_wsjob_gets_no_secret_of_others() -> None:
    secret = objects._secret("tidegate", {}, {"uid": "other"}, {"key": b'"x"'}, "")
    mine = read(by_hand("mine", secret="tidegate"))
    assert "no label tidegate.dev/part=wsjob-secret" in objects.why_no_secret(mine, secret)
    assert objects.why_no_secret(mine, None) == "There is no Secret tidegate."
    secret["metadata"]["labels"] = {names.PART: "wsjob-secret"}
    assert objects.why_no_secret(mine, secret) == ""
    bare = {**secret, "data": {"DATABASE_URL": "eA=="}}
    assert objects.why_no_secret(mine, bare) == "Secret tidegate has no secrets.json."

    one = instance("chat-0-a")
    assert objects.why_no_secret(mine, objects.instance_secret_document(one, "u", SETTINGS))
    submitted = read(objects.wsjob_document(job("compile-1"), 1.0, SETTINGS))
    assert objects.why_no_secret(submitted, objects.job_secret_document(job("compile-1"), "u")) == ""
    assert objects.why_no_secret(submitted, objects.job_secret_document(job("compile-1"), "v"))
    assert objects.why_no_secret(submitted, secret) == "Secret wsjob-compile-1 is not of this wsjob."


def test_a_pod_of_a_wsjob_has_two_keys_of_secrets_and_no_more() -> None:
    pod = objects.job_pod_document(read(by_hand("mine", secret="tidegate")), SETTINGS)
    (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "secrets"]
    items = [one["secret"]["items"] for one in volume["projected"]["sources"]]
    assert [[one["key"] for one in keys] for keys in items] == [["runner.key"], ["secrets.json"]]
    nothing = job("compile-1")
    nothing.secrets.clear()
    assert "secret" not in objects.wsjob_document(nothing, 1.0, SETTINGS)["spec"]


def test_a_submitted_wsjob_runs_nothing_but_what_was_submitted() -> None:
    spec = job("compile-1", result={})
    submitted = read(objects.wsjob_document(spec, 1.0, SETTINGS))
    inputs = objects.job_map_document(spec, "u", SETTINGS)
    assert objects.why_no_inputs(submitted, inputs, SETTINGS) == ""
    assert inputs["immutable"]
    squatted = {**inputs, "data": {"spec.json": '{"engine": {"kind": "command"}}'}}
    wrong = "ConfigMap wsjob-compile-1 is not what was submitted."
    assert objects.why_no_inputs(submitted, squatted, SETTINGS) == wrong
    assert objects.why_no_inputs(submitted, {**inputs, "metadata": {}}, SETTINGS) == wrong
    replayed = read(objects.wsjob_document(spec, 1.0, SETTINGS), uid="v")
    assert objects.why_no_inputs(replayed, inputs, SETTINGS) == wrong
    mine = read(by_hand("mine"))
    assert objects.why_no_inputs(mine, squatted, SETTINGS) == ""
    assert objects.why_no_inputs(mine, None, SETTINGS) == "There is no ConfigMap inputs."
    assert objects.why_no_inputs(mine, {}, SETTINGS) == "ConfigMap inputs has no spec.json."


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
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["name"], owner["uid"]) == ("instance-chat-0-a", "u")
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


def test_a_pod_is_given_the_folder_of_its_node_and_no_other_volume() -> None:
    def spec(**options: Any) -> dict[str, Any]:
        settings = PodSettings(b"k", **options)
        known = objects.known_of(instance("chat-0-a"), settings)
        made = objects.instance_pod_document(known, About("chat"), "u", settings)
        return dict(made["spec"])

    own, before = spec(template={"initContainers": [{"name": "before"}]})["initContainers"]
    assert own["command"] == ["chown", "10001:10001", "/tidegate/shared"]
    assert own["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert before == {"name": "before"}
    other = {"securityContext": {"runAsUser": 1000, "runAsGroup": 1001, "fsGroup": 1}}
    (own,) = spec(template=other)["initContainers"]
    assert own["command"][1] == "1000:1001"
    container = {"name": "manager", "imagePullPolicy": "Never"}
    (own,) = spec(template={**other, "containers": [container]})["initContainers"]
    assert own["imagePullPolicy"] == "Never"
    (theirs,) = spec(template={"initContainers": [{"name": "own"}]})["initContainers"]
    assert theirs == {"name": "own"}
    of_image = {"securityContext": {"runAsNonRoot": True}}
    assert spec(template=of_image)["initContainers"] == []  # whose it should be nobody says
    claimed = {"volumes": [{"name": "shared", "emptyDir": {}}]}
    for without in (spec(template=claimed), spec(owns_folder=False)):
        assert "initContainers" not in without


def test_what_the_template_says_stays() -> None:
    one = instance("chat-0-a")
    about = About("chat", ("box-1", "box-2"), memory_bytes=1 << 30)
    gpu = {"key": "gpu", "operator": "In", "values": ["h100", "h200"]}
    metal, large = {"key": "metal", "operator": "Exists"}, {"key": "large", "operator": "Exists"}
    preferred = [{"weight": 1, "preference": {"matchExpressions": [large]}}]
    field = {"key": "metadata.name", "operator": "NotIn", "values": ["node-9"]}
    template = {
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [gpu], "matchFields": [field]},
                        {"matchExpressions": [metal]},
                    ]
                },
                "preferredDuringSchedulingIgnoredDuringExecution": preferred,
            }
        },
        "containers": [
            {
                "name": "manager",
                "resources": {
                    "limits": {"nvidia.com/gpu": 1, "memory": "1"},
                    "requests": {"ephemeral-storage": "1Gi"},
                },
            }
        ],
    }
    settings = PodSettings(b"k", template=template)
    spec = objects.instance_pod_document(objects.known_of(one, settings), about, "u", settings)["spec"]
    memory = str(1 << 30)
    assert spec["containers"][0]["resources"] == {
        "limits": {"nvidia.com/gpu": 1, "memory": memory},
        "requests": {"ephemeral-storage": "1Gi", "memory": memory},
    }
    affinity = spec["affinity"]["nodeAffinity"]
    assert affinity["preferredDuringSchedulingIgnoredDuringExecution"] == preferred
    boxes = [{"key": f"box.tidegate.dev/box-{number}", "operator": "Exists"} for number in (1, 2)]
    assert affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == [
        *({"matchExpressions": [gpu, box], "matchFields": [field]} for box in boxes),
        *({"matchExpressions": [metal, box]} for box in boxes),
    ]


def test_pods_run_without_rights_unless_the_template_says_so() -> None:
    one = instance("chat-0-a")

    def pods(**template: Any) -> list[dict[str, Any]]:
        settings = PodSettings(b"k", template=template)
        known = objects.known_of(one, settings)
        return [
            objects.instance_pod_document(known, About("chat"), "u", settings)["spec"],
            objects.job_pod_document(read(by_hand("mine")), settings)["spec"],
        ]

    for spec in pods():
        said = spec["securityContext"]
        assert said["runAsNonRoot"]
        assert {said[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {10001}
        assert said["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    own = {"runAsUser": 0}
    for spec in pods(securityContext=own, containers=[{"name": "manager", "securityContext": own}]):
        assert spec["securityContext"] == own
        assert spec["containers"][0]["securityContext"] == own


def test_the_manifests_name_what_the_backend_uses() -> None:
    crd = yaml.safe_load((MANIFESTS / "wsjobs.crd.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    asked = job("compile-1", deadline=5)
    asked.boxes.append("box-1")
    made = objects.wsjob_document(asked, 1.0, SETTINGS)["spec"]
    assert objects.NAMED_BY_HAND in spec["properties"]["secret"]["description"]
    assert set(made) <= set(spec["properties"])
    assert made["kind"] in spec["properties"]["kind"]["enum"]
    policies = _documents(MANIFESTS / "network-policies.yaml")
    ports = {
        port["port"]
        for policy in policies
        for rule in policy["spec"]["ingress"]
        for port in rule.get("ports", ())
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
