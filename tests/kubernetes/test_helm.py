"""The chart on a real API server: Helm installs, upgrades, rolls back, removes it, and its pods run."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import helm_python as helm
import httpx
import httpx2
import pytest
import yaml
from lightkube import ApiError, Client

from cluster_server.client import ClusterClient
from console.environment import PROJECT
from tests.kubernetes.bed import ADMIN, LOOPBACK, Bed, Proxy, resource
from tests.kubernetes.chart import ALL_VALUES, CHART, NAME, Document, documents, rendered
from tests.live import wait_until
from tests.prepared import database

pytestmark = [pytest.mark.slow, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")]
Pod, Secret = resource("Pod"), resource("Secret")
READY_SECONDS_MAX = 180.0
RELEASE: dict[str, Any] = {"app.kubernetes.io/instance": NAME}
DRY = "default"  # the namespace of what is never stored
FLEET = "stamps: {east: {leaves: {leaf-1: {spine_links: {up-1: {spine: spine-1, gbits: 400}}}}}}"
SECRET_KEY = "a-secret-key-of-the-tests-of-the-chart-which-is-long-enough"


@pytest.fixture
def space(kubernetes_bed: Bed) -> Iterator[Bed]:
    """With a namespace for the release."""
    with kubernetes_bed.client() as client:
        Bed.put(client, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAME}})
    try:
        yield kubernetes_bed
    finally:
        kubernetes_bed.drop_namespace(NAME)
        with kubernetes_bed.client() as client:
            wait_until("the namespace is gone", lambda: not _exists(client, "Namespace", NAME), 90)


def _exists(client: Client, kind: str, name: str) -> bool:
    try:
        client.get(resource(kind), name)
    except ApiError as error:
        if error.status.code != 404:
            raise
        return False
    return True


@contextlib.contextmanager
def config(bed: Bed, namespace: str = NAME) -> Iterator[helm.Config]:
    with helm.Config(kubeconfig_path=bed.kubeconfig(ADMIN), namespace=namespace) as made:
        yield made


# Manifests


@dataclass
class Api:
    """The API server, asked for its kinds as kubectl does."""

    bed: Bed
    _plurals: dict[tuple[str, str], Document] = field(default_factory=dict)

    def _ask(self, method: str, path: str, headers: Any = (), **more: Any) -> httpx2.Response:
        return httpx2.request(
            method,
            f"https://{LOOPBACK}:{self.bed.api_port}{path}",
            verify=False,
            timeout=30,
            headers={"Authorization": f"Bearer {self.bed.tokens[ADMIN]}", **dict(headers)},
            **more,
        )

    def path(self, document: Document) -> str:
        version, kind = document["apiVersion"], document["kind"]
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if (version, kind) not in self._plurals:
            answer = self._ask("GET", base)
            answer.raise_for_status()
            for one in answer.json()["resources"]:
                self._plurals.setdefault((version, one["kind"]), one)
        about = self._plurals[version, kind]
        space = f"/namespaces/{DRY}" if about["namespaced"] else ""
        return f"{base}{space}/{about['name']}/{document['metadata']['name']}"

    def dry_run(self, document: Document) -> str:
        """What is wrong with it, if anything. An unknown field is."""
        query = {"dryRun": "All", "fieldManager": "tests", "force": "true"}
        answer = self._ask(
            "PATCH",
            self.path(document),
            {"Content-Type": "application/apply-patch+yaml"},
            params=query,
            content=yaml.safe_dump(document),
        )
        return "" if answer.is_success else str(answer.json()["message"])


@pytest.mark.parametrize("values", ALL_VALUES)
def test_the_api_server_takes_every_manifest(kubernetes_bed: Bed, values: str) -> None:
    given = {**ALL_VALUES[values], "serviceMonitor": {"enabled": False}}  # its kind is not known here
    with config(kubernetes_bed, DRY) as cluster:
        made = cluster.install(CHART, NAME, given, dry_run="server")
    hooks = [one for one in rendered(given, namespace=DRY) if "helm.sh/hook" in str(one["metadata"])]
    found = [*documents(made["manifest"]), *hooks]
    api = Api(kubernetes_bed)
    assert len(found) > 10
    wrong = {
        f"{one['kind']} {one['metadata']['name']}": said for one in found if (said := api.dry_run(one))
    }
    assert wrong == {}


def test_a_wrong_field_would_be_noticed(kubernetes_bed: Bed) -> None:
    document = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "wrong"},
        "spec": {"ports": [{"port": 80}], "selektor": {}},
    }
    assert "selektor" in Api(kubernetes_bed).dry_run(document)


# A release


@dataclass
class Release:
    """What runs of it, as kubectl shows it."""

    bed: Bed
    client: Client

    def pods(self, component: str) -> list[Document]:
        labels = RELEASE | {"app.kubernetes.io/component": component}
        return [dict(one) for one in self.client.list(Pod, namespace=NAME, labels=labels)]

    def ready(self, component: str) -> list[Document]:
        """Those that are ready and stay."""
        return [
            one
            for one in self.pods(component)
            if "deletionTimestamp" not in one["metadata"]
            and any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in one.get("status", {}).get("conditions", ())
            )
        ]

    def until_ready(self, component: str, count: int) -> list[Document]:
        wait_until(
            f"{count} of {component} are ready: {self.bed.folder}",
            lambda: len(self.ready(component)) == count == len(self.pods(component)),
            READY_SECONDS_MAX,
        )
        return self.ready(component)

    def log(self, pod: Document) -> str:
        return "\n".join(self.client.log(pod["metadata"]["name"], namespace=NAME))

    def secret(self, name: str) -> dict[str, str]:
        found = self.client.get(Secret, name, namespace=NAME)
        return {key: base64.b64decode(value).decode() for key, value in found["data"].items()}

    def put_secret(self, name: str, values: dict[str, str]) -> None:
        document = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        Bed.put(self.client, {**document, "stringData": values}, NAME)

    def first_admin(self) -> tuple[str, str]:
        """As NOTES.txt says how to find it."""
        (pod,) = self.pods("prepare")
        facts = [json.loads(line) for line in self.log(pod).splitlines() if line.startswith("{")]
        admin = next(one["admin"] for one in facts if "admin" in one)
        return admin["username"], admin["password"]


@pytest.fixture
def release(space: Bed) -> Iterator[Release]:
    with space.client() as client:
        yield Release(space, client)


def platform_token(address: str, username: str, password: str) -> str:
    """An API token, made as a person makes it."""
    with httpx.Client(base_url=address, follow_redirects=True, timeout=60, trust_env=False) as browser:
        browser.get("/log-in/").raise_for_status()
        form = {"username": username, "password": password}
        form["csrfmiddlewaretoken"] = browser.cookies["tidegate_csrf"]
        browser.post("/log-in/", data=form).raise_for_status()
        made = browser.post(
            "/api/v1/tokens",
            json={"name": "helm", "read_only": False},
            headers={"X-CSRFToken": browser.cookies["tidegate_csrf"]},
        )
        made.raise_for_status()
        return str(made.json()["token"])


def join_token(address: str, token: str, kind: str) -> str:
    made = httpx.post(
        f"{address}/api/v1/join-tokens",
        json={"kind": kind, "uses": 10, "hours": 1},
        headers={"Authorization": f"Bearer {token}"},
        timeout=60,
        trust_env=False,
    )
    made.raise_for_status()
    return str(made.json()["token"])


def get(address: str, path: str, token: str) -> Any:
    answer = httpx.get(
        f"{address}{path}", headers={"Authorization": f"Bearer {token}"}, timeout=60, trust_env=False
    )
    answer.raise_for_status()
    return answer.json()


def leaves_of_nodes(address: str, token: str) -> dict[str, tuple[str, ...]]:
    found = get(address, "/api/v1/nodes", token)["items"]
    return {one["name"]: tuple(nic["leaf"] for nic in one["nics"]) for one in found}


def revisions(cluster: helm.Config) -> list[tuple[int, str]]:
    return [(one["revision"], one["status"]) for one in cluster.history(NAME)]


@pytest.mark.timeout(900)
def test_a_release_is_installed_upgraded_rolled_back_and_removed(
    release: Release, tmp_path: Path
) -> None:
    """Against PostgreSQL and Redis of the tests, as an external database is. Services have no addresses
    here (nobody plays kube-proxy), so a proxy stands for the Ingress."""
    bed = release.bed
    with (
        database() as database_url,
        contextlib.closing(Proxy((LOOPBACK, 9), bed.host)) as ingress,
        config(bed) as cluster,
    ):
        address = f"http://{bed.host}:{ingress.port}"
        kubeconfig = tmp_path / "kubeconfig"
        at, by = f"{LOOPBACK}:{bed.api_port}", f"{bed.host}:{bed.for_pods.port}"
        kubeconfig.write_text(bed.kubeconfig().read_text().replace(at, by))
        release.put_secret(
            "tidegate",
            {
                "DATABASE_URL": database_url,
                "REDIS_URL": os.environ["REDIS_URL"],
                "TIDEGATE_SECRET_KEY": SECRET_KEY,
            },
        )
        small = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {}}
        values: Document = {
            "console": {
                "host": bed.host,
                "url": address,
                "mode": "embedded",
                "existingSecret": "tidegate",
            },
            **{one: {"replicas": 1, "resources": small} for one in ("web", "beat", "ingest", "rollup")},
            "worker": {"replicas": 1, "processes": 1, "resources": small},
            "orchestrator": {"replicas": 1, "resources": small},
            "brain": {"replicas": 1, "persistence": {"enabled": False}, "resources": small},
            "clusterServer": {
                "settings": {
                    "CLUSTER_SERVER_KUBECONFIG": str(kubeconfig),
                    "CLUSTER_SERVER_NAMESPACE": NAME,
                },
            },
        }
        cluster.install(CHART, NAME, values, timeout=int(READY_SECONDS_MAX))
        assert revisions(cluster) == [(1, "deployed")]
        (migrated,) = release.pods("prepare")
        username, password = release.first_admin()
        for component in ("web", "worker", "beat", "ingest", "rollup", "orchestrator"):
            release.until_ready(component, 1)
        (server,) = release.until_ready("cluster-server", 1)
        check_cluster_server(server, release)

        # Brains wait for their token, and for nothing else.
        assert not release.ready("brain")
        (web,) = release.ready("web")
        ingress.to = (web["status"]["podIP"], 8400)
        token = platform_token(address, username, password)
        kinds = {"brain": "brain", "agent": "node"}
        tokens = {key: join_token(address, token, kind) for key, kind in kinds.items()}
        release.put_secret(f"{NAME}-join", tokens)
        (brain,) = release.until_ready("brain", 1)
        assert [one["name"] for one in get(address, "/api/v1/brains", token)["items"]] == [
            brain["metadata"]["name"]
        ]

        # An upgrade migrates once more, which changes nothing, and adds agents.
        describe_fleet(database_url)
        certificates = release.secret(f"{NAME}-cluster-client")
        label_nodes(release)
        with_agents = {**values, "agents": {"enabled": True, "resources": small}}
        cluster.upgrade(CHART, NAME, with_agents, timeout=int(READY_SECONDS_MAX))
        assert revisions(cluster) == [(1, "superseded"), (2, "deployed")]
        (again,) = release.pods("prepare")
        assert again["metadata"]["uid"] != migrated["metadata"]["uid"]
        assert "password" not in release.log(again)
        agents = release.until_ready("agent", len(bed.nodes))
        assert {one["spec"]["nodeName"] for one in agents} == set(bed.nodes)
        # They are ready before they have joined: an agent does not wait for its console.
        wait_until(
            "agents have joined",
            lambda: set(leaves_of_nodes(address, token)) == set(bed.nodes),
            READY_SECONDS_MAX,
        )
        assert set(leaves_of_nodes(address, token).values()) == {("leaf-1",)}
        assert release.secret(f"{NAME}-cluster-client") == certificates
        # Nothing else was made anew.
        assert [one["metadata"]["uid"] for one in release.ready("web")] == [web["metadata"]["uid"]]

        cluster.rollback(NAME, version=1, timeout=int(READY_SECONDS_MAX))
        assert revisions(cluster)[2:] == [(3, "deployed")]
        wait_until("agents are gone", lambda: not release.pods("agent"), READY_SECONDS_MAX)
        assert [one["metadata"]["uid"] for one in release.ready("web")] == [web["metadata"]["uid"]]

        cluster.uninstall(NAME, timeout=int(READY_SECONDS_MAX))
        wait_until(
            "all pods are gone",
            lambda: not [one for one in left(release) if one != "prepare"],
            READY_SECONDS_MAX,
        )


def left(release: Release) -> list[str]:
    return [
        one["metadata"]["labels"]["app.kubernetes.io/component"]
        for one in release.client.list(Pod, namespace=NAME, labels=RELEASE)
    ]


def check_cluster_server(pod: Document, release: Release) -> None:
    """It lets in who has the console's certificate, under the name of its Service."""
    files = release.secret(f"{NAME}-cluster-client")
    shown = grpc.ssl_channel_credentials(
        *(files[key].encode() for key in ("ca.crt", "tls.key", "tls.crt"))
    )

    async def ask() -> list[Any]:
        target = f"{pod['status']['podIP']}:7443"
        async with ClusterClient(target, shown, server_name=f"{NAME}-cluster-server") as client:
            return list((await client.list())[0])

    assert asyncio.run(ask()) == []


def label_nodes(release: Release) -> None:
    labels = {
        "tidegate.dev/agent": "",
        "nic.tidegate.dev/eth0": "leaf-1",
        "agent.tidegate.dev/memory": "16MiB",
    }
    for name in release.bed.nodes:
        release.client.patch(resource("Node"), name, {"metadata": {"labels": labels}})


def describe_fleet(database_url: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "console.manage", "fleet", "import", "-"],
        input=FLEET,
        text=True,
        check=True,
        cwd=PROJECT,
        env={**os.environ, "DATABASE_URL": database_url, "TIDEGATE_SECRET_KEY": SECRET_KEY},
    )
