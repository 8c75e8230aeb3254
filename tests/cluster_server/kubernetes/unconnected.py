"""What the backend's parts need of a cluster where no request is made."""

from __future__ import annotations

from lightkube import AsyncClient, KubeConfig
from lightkube.config.models import Cluster as Server
from lightkube.config.models import User

from cluster_server.kubernetes.api import CONFIG_MAP, POD, Api, Document
from cluster_server.kubernetes.instance import Cluster
from cluster_server.kubernetes.mirror import Mirror
from cluster_server.kubernetes.objects import PodSettings

SETTINGS = PodSettings(b"k" * 32)


def api() -> Api:
    config = KubeConfig.from_one(cluster=Server(server="http://127.0.0.1:1"), user=User())
    return Api(AsyncClient(config, namespace="tidegate"))


def cluster() -> Cluster:
    made = api()
    maps = Mirror(made, CONFIG_MAP, {}, lambda *_: None, _ended)
    return Cluster(made, maps, Mirror(made, POD, {}, lambda *_: None, _ended), SETTINGS)


def _ended() -> None:
    raise AssertionError("nothing is watched")


def stored(document: Document, uid: str = "u", version: int = 7) -> Document:
    """As the API server gives it back."""
    about = {"uid": uid, "resourceVersion": f"{version}", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {**document, "metadata": {**document["metadata"], **about}}
