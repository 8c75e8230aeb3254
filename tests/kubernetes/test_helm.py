"""The chart on a real API server: Helm installs, upgrades, rolls back, removes it, and its pods run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import helm_python as helm
import httpx
import httpx2
import pytest
import yaml

from cluster_server.client import ClusterClient
from console.environment import PROJECT
from tests.kubernetes.bed import Bed
from tests.kubernetes.chart import ALL_VALUES, CHART, NAME, Document, documents, rendered
from tests.kubernetes.control_plane import ADMIN
from tests.kubernetes.proxy import LOOPBACK, Proxy
from tests.kubernetes.release import (
    READY_SECONDS_MAX,
    RELEASE,
    Pod,
    Release,
    config,
    platform_token,
    released,
    values,
)
from tests.kubernetes.resources import put, resource
from tests.kubernetes.servers import for_pods
from tests.live import wait_until

pytestmark = [
    *(pytest.mark.slow, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")),
    pytest.mark.timeout(300),  # the first one makes the test bed
]
DRY = "default"  # the namespace of what is never stored
FLEET = "stamps: {east: {leaves: {leaf-1: {spine_links: {up-1: {spine: spine-1, gbits: 400}}}}}}"
SECRET_KEY = "a-secret-key-of-the-tests-of-the-chart-which-is-long-enough"


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
            headers={"Authorization": f"Bearer {self.bed.control.tokens[ADMIN]}", **dict(headers)},
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


@pytest.fixture
def release(kubernetes_bed: Bed) -> Iterator[Release]:
    with released(kubernetes_bed) as made:
        put(made.client, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAME}})
        yield made


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
def test_a_release_is_installed_upgraded_rolled_back_and_removed(release: Release) -> None:
    """Against PostgreSQL and Redis of the tests, as an external database is. Services have no addresses
    here (nobody plays kube-proxy), so a proxy stands for the Ingress."""
    bed = release.bed
    with (
        for_pods(bed) as (database_url, redis_url),
        contextlib.closing(Proxy((LOOPBACK, 9), bed.host)) as ingress,
        config(bed) as cluster,
    ):
        address = f"http://{bed.host}:{ingress.port}"
        release.put_secret(
            "tidegate",
            {
                "DATABASE_URL": database_url,
                "REDIS_URL": redis_url,
                "TIDEGATE_SECRET_KEY": SECRET_KEY,
            },
        )
        small = values(address, bed)
        cluster.install(CHART, NAME, small, timeout=int(READY_SECONDS_MAX))
        assert revisions(cluster) == [(1, "deployed")]
        (migrated,) = release.pods("prepare")
        username, password = release.first_admin()
        for component in ("web", "worker", "beat", "ingest", "rollup", "orchestrator"):
            release.until_ready(component, 1)
        (server,) = release.until_ready("cluster-server", 1)
        check_cluster_server(server, release)

        # Brains wait for their token, and for nothing else.
        assert not release.ready("brain")
        (web,) = release.until_ready("web", 1)
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
        with_agents = {**small, "agents": {**small["agents"], "enabled": True}}
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
        (same,) = release.until_ready("web", 1)
        assert same["metadata"]["uid"] == web["metadata"]["uid"]

        cluster.rollback(NAME, version=1, timeout=int(READY_SECONDS_MAX))
        assert revisions(cluster)[2:] == [(3, "deployed")]
        wait_until("agents are gone", lambda: not release.pods("agent"), READY_SECONDS_MAX)
        (same,) = release.until_ready("web", 1)
        assert same["metadata"]["uid"] == web["metadata"]["uid"]

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
