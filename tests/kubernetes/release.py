"""A release of the chart on the test bed, as kubectl shows it."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import helm_python as helm
import httpx
from lightkube import ApiError, Client

from tests.kubernetes.bed import Bed
from tests.kubernetes.chart import NAME, Document
from tests.kubernetes.control_plane import ADMIN
from tests.kubernetes.resources import put, resource
from tests.live import wait_until

Pod, Secret = resource("Pod"), resource("Secret")
READY_SECONDS_MAX = 180.0
RELEASE: dict[str, Any] = {"app.kubernetes.io/instance": NAME}
SMALL: Document = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {}}


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
        put(self.client, {**document, "stringData": values}, NAME)

    def first_admin(self) -> tuple[str, str]:
        """As NOTES.txt says how to find it."""
        (pod,) = self.pods("prepare")
        facts = [json.loads(line) for line in self.log(pod).splitlines() if line.startswith("{")]
        admin = next(one["admin"] for one in facts if "admin" in one)
        return admin["username"], admin["password"]


@contextlib.contextmanager
def released(bed: Bed) -> Iterator[Release]:
    """The release is removed with all that is left of its namespace."""
    with bed.client() as client:
        try:
            yield Release(bed, client)
        finally:
            bed.drop_namespace(NAME)
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


def values(address: str, bed: Bed) -> Document:
    """One small process of each kind. `address`: of the console."""
    one: Document = {"replicas": 1, "resources": SMALL}
    return {
        "console": {
            "host": bed.host,
            "url": address,
            "mode": "embedded",
            "existingSecret": NAME,
        },
        **dict.fromkeys(("web", "beat", "ingest", "rollup", "orchestrator"), one),
        "worker": {**one, "processes": 1},
        "brain": {**one, "persistence": {"enabled": False}},
        "agents": {"resources": SMALL},
    }
