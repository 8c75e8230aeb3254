"""The chart as Helm renders it, without a cluster: `tests/kubernetes/test_helm.py` installs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from console.environment import Environment
from inference_brain.settings import parse as parse_brain
from kvss_agent.settings import parse as parse_agent
from telemetry.version import tidegate_version
from tests.kubernetes.chart import (
    ALL_VALUES,
    BUNDLED,
    CHART,
    EVERYTHING,
    EXTERNAL,
    NAME,
    PLAIN,
    WITHOUT_CLUSTER,
    documents,
    plain_manifests,
    rendered,
)

Document = dict[str, Any]
SECRETS = {
    "DATABASE_URL": "postgresql://tidegate:x@db/tidegate",
    "REDIS_URL": "redis://:x@redis:6379/0",
    "TIDEGATE_SECRET_KEY": "k" * 64,
}
CONSOLE = ("web", "worker", "beat", "ingest", "rollup", "orchestrator")
# What a container of a server of others needs, or one that has to be root for a moment.
EXCEPTIONS = {"own"}


@pytest.fixture(scope="module", params=ALL_VALUES)
def values(request: pytest.FixtureRequest) -> Document:
    return ALL_VALUES[request.param]


def pod_of(document: Document) -> Document | None:
    template = document.get("spec", {}).get("template")
    return template["spec"] if template else None


def containers(found: list[Document]) -> Iterator[tuple[Document, Document]]:
    """Each with its pod."""
    for document in found:
        if pod := pod_of(document):
            for one in (*pod.get("initContainers", ()), *pod["containers"]):
                yield pod, one


def named(found: list[Document], kind: str, name: str) -> Document:
    return next(
        one for one in found if (one["kind"], one["metadata"]["name"]) == (kind, f"{NAME}-{name}")
    )


def environment(container: Document, **secrets: str) -> dict[str, str]:
    """As the kubelet makes it, with what it fills in."""
    found = dict(secrets)
    for one in container["env"]:
        value = one.get("value")
        if value is None:
            source = one["valueFrom"]
            value = "tgj_token" if "secretKeyRef" in source else "10.1.2.3"
        found[one["name"]] = value.replace("$(POD_IP)", found.get("POD_IP", ""))
    return found


def test_it_has_the_version_of_the_package() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == about["version"] == tidegate_version()


def test_lint_finds_nothing(values: Document) -> None:
    report = helm.lint(CHART, values, strict=True)
    assert not report["errors"]
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


def test_the_schema_knows_all_values_and_the_defaults_fit() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(shown: Any, allowed: Document, path: str) -> None:
        if "$ref" in allowed:
            allowed = schema["$defs"][allowed["$ref"].rpartition("/")[2]]
        if allowed.get("additionalProperties") is False and "properties" in allowed:
            assert set(shown) == set(allowed["properties"]) - {"global"}, path
            for key, value in shown.items():
                compare(value, allowed["properties"][key], f"{path}.{key}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "/console/existingSecret"),
        ({"consol": {}}, "additional properties 'consol'"),
        ({"web": {"replica": 3}}, "additional properties 'replica'"),
        ({"web": {"replicas": "3"}}, "/web/replicas"),
        ({"web": {"replicas": 0}}, "/web/replicas"),
        ({"worker": {"resources": {"requests": {"memory": "1 GB"}}}}, "/worker/resources"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"podSecurityContext": {"runAsNonRoot": False}}, "/podSecurityContext/runAsNonRoot"),
        ({"podSecurityContext": {"runAsUser": 0}}, "/podSecurityContext/runAsUser"),
        ({"console": {"url": "ftp://example.org"}}, "/console/url"),
        ({"console": {"settings": {"tidegate": "x"}}}, "invalid propertyName"),
        ({"brain": {"settings": {"TIDEGATE_MODE": "embedded"}}}, "invalid propertyName"),
        ({"agents": {"hostPath": "var/lib"}}, "/agents/hostPath"),
        ({"bundled": {"enabled": True}}, "/console/existingSecret"),
    ],
    ids=lambda one: json.dumps(one) if isinstance(one, dict) else None,
)
def test_nonsense_is_refused_and_named(wrong: Document, said: str) -> None:
    """Beside values that are right; but the first one has none at all."""
    given = {**EXTERNAL, **wrong} if wrong else {}
    if "console" in wrong:
        given["console"] = {**EXTERNAL["console"], **wrong["console"]}
    with pytest.raises(helm.HelmError, match=said.replace("'", ".")):
        rendered(given)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clusterServer": {"enabled": False}}, "orchestrator.enabled needs clusterServer.enabled"),
        ({"clusterServer": {"clientTlsSecret": "mine"}}, "both or none"),
        ({"brain": {"ingress": {"enabled": True}}}, "brain.ingress.host is required"),
        ({"brain": {"autoscaling": {"enabled": True, "cpu": 0}}}, "wants cpu, or queueTime.metric"),
        ({"serviceMonitor": {"enabled": True}}, "serviceMonitor.tokenSecret is required"),
    ],
)
def test_contradictions_are_refused(wrong: Document, said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        rendered({**EXTERNAL, **wrong})


def test_pods_have_no_more_rights_than_they_need(values: Document) -> None:
    found = rendered(values)
    for pod, container in containers(found):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is (container["name"] == "cluster-server")
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        if container["name"] in EXCEPTIONS:
            assert context["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
        else:
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "runAsUser" not in context


def test_every_process_has_probes_requests_and_a_budget(values: Document) -> None:
    found = rendered(values)
    budgets = {one["metadata"]["name"] for one in found if one["kind"] == "PodDisruptionBudget"}
    for document in found:
        pod = pod_of(document)
        if not pod or document["kind"] == "Job":
            continue
        for one in (*pod.get("initContainers", ()), *pod["containers"]):
            assert set(one["resources"]["requests"]) == {"cpu", "memory"}, one["name"]
        for one in pod["containers"]:
            assert "readinessProbe" in one, one["name"]
            # The servers of a trial are left alone, and a Cluster Server that waits is no fault.
            if one["name"] not in ("postgresql", "redis", "cluster-server"):
                assert {"startupProbe", "livenessProbe"} <= set(one), one["name"]
        # Of Cluster Servers one alone is ready: a budget would never let go of it.
        if pod["containers"][0]["name"] not in ("postgresql", "redis", "agent", "cluster-server"):
            assert document["metadata"]["name"] in budgets


def test_a_container_is_not_ready_for_what_the_one_before_it_left(
    values: Document, tmp_path: Path
) -> None:
    """The scratch folder of a pod outlives a container that was killed, and what it said there."""
    alive = "/tidegate/scratch/alive"
    left = tmp_path / "alive"
    for pod, one in containers(rendered(values)):
        if one not in pod["containers"] or alive not in [v.get("value") for v in one["env"]]:
            continue
        if "restartPolicy" in pod:  # a Job, which nobody probes
            continue
        left.touch()
        line = [part.replace(alive, str(left)) for part in one["command"]]
        line[-1] = re.sub(r"set -a; |exec python .*|\. /tidegate/scratch/facts; ", "", line[-1])
        subprocess.run(line, check=True)
        assert not left.exists(), one["name"]


def test_selectors_find_their_pods_and_no_others(values: Document) -> None:
    found = rendered(values)
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in found
        if pod_of(one)
    }
    for one in found:
        selector = one.get("spec", {}).get("selector")
        if one["kind"] in ("ServiceMonitor", "NetworkPolicy") or not selector:
            continue
        wanted = selector.get("matchLabels", selector)
        selected = [name for name, labels in pods.items() if wanted.items() <= labels.items()]
        assert len(selected) == 1, f"{one['kind']} {one['metadata']['name']}: {selected}"


def test_network_policies_name_processes_that_there_are() -> None:
    found = rendered(EVERYTHING)
    made = {"tidegate-manager", "tidegate-wsjob"} | {
        one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
        for one in found
        if pod_of(one)
    }
    text = json.dumps([one["spec"] for one in found if one["kind"] == "NetworkPolicy"])
    policy = json.loads(text)
    assert policy

    def names(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            if "values" in part:
                yield from part["values"]
            yield from part.get("matchLabels", {}).values()
            for value in part.values():
                yield from names(value)
        elif isinstance(part, list):
            for value in part:
                yield from names(value)

    assert set(names(policy)) <= made


@pytest.mark.parametrize("values", [EXTERNAL, EVERYTHING, BUNDLED], ids=["external", "all", "bundled"])
def test_settings_of_the_console_are_understood(values: Document) -> None:
    found = rendered(values)
    for component in CONSOLE:
        pod = pod_of(named(found, "Deployment", component))
        assert pod
        for container in (*pod["initContainers"], *pod["containers"]):
            read = Environment.read(environment(container, **SECRETS))
            if component in ("web", "orchestrator"):
                assert read.cluster_url == f"https://{NAME}-cluster-server:7443"
                assert str(read.cluster_key) == "/tidegate/cluster/tls.key"
            else:  # the key is not for them
                assert not read.cluster_url
                assert "cluster" not in [one["name"] for one in pod["volumes"]]


def test_settings_may_be_large_numbers_and_fractions() -> None:
    """As YAML has them: a float of a million or more is not written as a power of ten."""
    found = rendered(
        {
            "console": {"existingSecret": "tidegate", "settings": {"TIDEGATE_HSTS_SECONDS": 31_536_000}},
            "agents": {
                "enabled": True,
                "settings": {"KVSS_AGENT_MEMORY": 25_769_803_776, "KVSS_AGENT_DRAIN_SECONDS": 2.5},
            },
            "clusterServer": {"settings": {"CLUSTER_SERVER_JOBS_AT_ONCE": 1_000_000}},
        }
    )

    def said(kind: str, name: str) -> dict[str, str]:
        pod = pod_of(named(found, kind, name))
        assert pod
        return environment(pod["containers"][0])

    assert said("Deployment", "web")["TIDEGATE_HSTS_SECONDS"] == "31536000"
    assert said("Deployment", "cluster-server")["CLUSTER_SERVER_JOBS_AT_ONCE"] == "1000000"
    agent = said("DaemonSet", "agent")
    assert agent["KVSS_AGENT_MEMORY"] == "25769803776"
    assert agent["KVSS_AGENT_DRAIN_SECONDS"] == "2.5"


def pod_template(values: Document) -> Document:
    [made] = [one for one in rendered(values) if "pod.json" in one.get("data", {})]
    template: Document = json.loads(made["data"]["pod.json"])
    return template


def test_pods_of_instances_are_no_more_than_others() -> None:
    template = pod_template(EXTERNAL)
    assert template["securityContext"]["runAsUser"] == 10001
    # What its image needs is said in the template.
    root = {"securityContext": {"runAsUser": 0}, "volumes": [{"name": "shared", "emptyDir": {}}]}
    asked = pod_template({**EXTERNAL, "clusterServer": {"podTemplate": root}})
    assert asked["securityContext"] == {"runAsUser": 0}


def test_all_pods_have_the_authorities_that_are_to_be_trusted() -> None:
    gpu = {"name": "manager", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    values = {
        **EXTERNAL,
        "trust": {"configMap": "authorities"},
        "agents": {"enabled": True},
        "clusterServer": {"podTemplate": {"containers": [gpu]}},
    }
    mount = {"name": "trust", "mountPath": "/tidegate/trust", "readOnly": True}
    for document in rendered(values):
        pod = pod_of(document)
        if pod and pod["containers"][0]["name"] != "cluster-server":
            assert mount in pod["containers"][0]["volumeMounts"], document["metadata"]["name"]
            assert {"name": "trust", "configMap": {"name": "authorities"}} in pod["volumes"]
    [manager] = pod_template(values)["containers"]
    assert manager == {**gpu, "volumeMounts": [mount]}


def test_processes_of_a_trial_reach_its_console_by_its_service() -> None:
    found = rendered({**BUNDLED, "console": {"mode": "embedded"}})
    at = f"http://{NAME}-web.{NAME}"
    brain, web = pod_of(named(found, "StatefulSet", "brain")), pod_of(named(found, "Deployment", "web"))
    assert brain
    assert web
    assert environment(brain["containers"][0])["BRAIN_CONSOLE"] == at
    allowed = environment(web["containers"][0])["TIDEGATE_ALLOWED_HOSTS"].split(",")
    assert at.removeprefix("http://") in allowed


@pytest.mark.parametrize("values", [EXTERNAL, WITHOUT_CLUSTER], ids=["external", "without a cluster"])
def test_webs_may_be_kept_for_the_ingress(values: Document) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}
    found = rendered({**values, "networkPolicies": {"webFrom": [peer]}})
    [policy] = [
        one
        for one in found
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-web")
    ]
    assert policy["spec"]["ingress"] == [{"from": [peer]}]


def test_settings_of_brains_and_agents_are_understood(tmp_path: Path) -> None:
    found = rendered({**EVERYTHING, "brain": {}, "join": {}})
    brain = pod_of(named(found, "StatefulSet", "brain"))
    agent = pod_of(named(found, "DaemonSet", "agent"))
    assert brain
    assert agent
    state = str(tmp_path / "state")  # parsing makes a token there
    said = environment(brain["containers"][0]) | {"BRAIN_STATE_DIR": state}
    console = parse_brain([], said).console
    assert console
    assert console.url == "https://tidegate.example.org"
    said = environment(agent["containers"][0]) | {"KVSS_AGENT_STATE_DIR": state}
    settings = parse_agent([], said)
    assert settings.control == ("10.1.2.3", 8410)
    assert settings.tcp == ("10.1.2.3", 8411)


@pytest.mark.parametrize("redis", [{}, {"maxmemory": None}], ids=["chart's", "--reuse-values"])
def test_the_bundled_redis_refuses_before_its_container_is_full(redis: dict[str, Any]) -> None:
    """Without a limit of its own the kernel kills it, with all that it has. `--reuse-values` knows no
    values that are new in a chart."""
    values = {"bundled": {"enabled": True, "redis": redis}}
    pod = pod_of(named(rendered(values), "StatefulSet", "redis"))
    assert pod
    [server] = pod["containers"]
    options = server["args"]
    assert options[options.index("--maxmemory-policy") + 1] == "noeviction"
    most = options[options.index("--maxmemory") + 1].removesuffix("mb")
    assert int(most) < int(server["resources"]["limits"]["memory"].removesuffix("Mi"))


def test_external_servers_are_migrated_before_and_bundled_ones_beside() -> None:
    hook = next(one for one in rendered(EXTERNAL) if one["kind"] == "Job")
    assert hook["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert hook["metadata"]["name"] == f"{NAME}-prepare"
    job = next(one for one in rendered(BUNDLED, revision=7) if one["kind"] == "Job")
    assert "annotations" not in job["metadata"]
    assert job["metadata"]["name"] == f"{NAME}-prepare-7"  # a Job can't be changed
    for one in (hook, job):
        assert (one["spec"]["parallelism"], one["spec"]["completions"]) == (1, 1)


def test_secrets_of_one_process_win_over_those_of_all() -> None:
    for _, container in containers([named(rendered(EVERYTHING), "Deployment", "web")]):
        assert [one["secretRef"]["name"] for one in container["envFrom"]] == ["tidegate", "tidegate-web"]
    job = next(one for one in rendered(EVERYTHING) if one["kind"] == "Job")
    sources = pod_of(job)["containers"][0]["envFrom"]  # type: ignore[index]
    assert sources[-1] == {"secretRef": {"name": "tidegate-owner"}}


def test_only_agents_with_labels_may_read_nodes() -> None:
    assert not [one for one in rendered(WITHOUT_CLUSTER) if one["kind"].startswith("ClusterRole")]
    found = rendered(EVERYTHING)
    role = next(one for one in found if one["kind"] == "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    pod = pod_of(named(found, "DaemonSet", "agent"))
    assert pod
    with_token = [
        one["name"]
        for one in (*pod["initContainers"], *pod["containers"])
        if any(mount["name"] == "token" for mount in one.get("volumeMounts", ()))
    ]
    assert with_token == ["facts"]


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    made = plain_manifests()
    there = {path.name: path.read_text() for path in PLAIN.glob("*.yaml")}
    assert there == made, "`make manifests` makes them anew"


def test_kustomize_takes_them() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is missing, which has kustomize in it")
    done = subprocess.run([kubectl, "kustomize", PLAIN], capture_output=True, text=True, check=True)
    found = list(documents(done.stdout))
    made = [one for name, text in plain_manifests().items() if name != "kustomization.yaml"
            for one in documents(text)]  # fmt: skip
    assert len(found) == len(made)
    assert all(
        one["metadata"].get("namespace") == NAME or one["kind"] == "CustomResourceDefinition"
        for one in found
    )
