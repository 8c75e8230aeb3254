"""Kubernetes' API as the backend uses it: documents as they are in its reference, and few errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx2
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.config.client_adapter import verify_cluster
from lightkube.core.exceptions import ConfigError
from lightkube.core.resource_registry import resource_registry
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType

MANAGER: Final = "tidegate-cluster-server"  # of fields, by server-side apply
REQUEST_SECONDS: Final = 10.0
WATCH_SECONDS: Final = 300  # after so long the API server ends a watch, and it is resumed
GROUP: Final = "tidegate.dev"
GONE: Final = 410

Document: TypeAlias = dict[str, Any]


class Unavailable(OSError):
    """The API server cannot be reached, or cannot answer now. It may have done what was asked."""


class Missing(Exception):
    """There is no such object."""


class Taken(Exception):
    """There is such an object already, or it has changed since it was read."""


class Refused(Exception):
    """The API server does not accept it: a sentence of its own."""


class Forbidden(Refused):
    """By rights or a quota, which may change: an API server knows no rights at first."""


class TooOld(Exception):
    """The changes since then are not known any more (410): list anew."""


@dataclass(frozen=True, slots=True)
class Kind:
    group_version: str
    name: str
    plural: str

    @property
    def resource(self) -> Any:
        """Its class, of which lightkube registers one for a whole process."""
        group, _, version = self.group_version.rpartition("/")
        known = resource_registry.get(self.group_version, self.name)
        return known or create_namespaced_resource(group, version, self.name, self.plural)


POD: Final = Kind("v1", "Pod", "pods")
CONFIG_MAP: Final = Kind("v1", "ConfigMap", "configmaps")
SECRET: Final = Kind("v1", "Secret", "secrets")
SERVICE: Final = Kind("v1", "Service", "services")
# Newest first: Kubernetes knows the first since 1.21, and the other one until 1.24.
BUDGETS: Final = tuple(
    Kind(f"policy/{version}", "PodDisruptionBudget", "poddisruptionbudgets")
    for version in ("v1", "v1beta1")
)
LEASE: Final = Kind("coordination.k8s.io/v1", "Lease", "leases")
WSJOB: Final = Kind(f"{GROUP}/v1", "WsJob", "wsjobs")


class Api:
    """One namespace. All methods raise Unavailable, and Refused."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def close(self) -> None:
        await self._client.close()

    async def get(self, kind: Kind, name: str) -> Document:
        """Raises Missing."""
        with _translated():
            return dict(await self._client.get(kind.resource, name))

    async def list(self, kind: Kind, labels: Mapping[str, str]) -> tuple[list[Document], str]:
        """All of them, and the version to watch from."""
        with _translated():
            found = self._client.list(kind.resource, labels=dict(labels), chunk_size=500)
            return [dict(one) async for one in found], found.resourceVersion

    async def watch(
        self, kind: Kind, labels: Mapping[str, str], version: str
    ) -> AsyncGenerator[tuple[str, Document], None]:
        """Changes after a version: (ADDED, MODIFIED or DELETED, object). Raises TooOld."""
        with _translated():
            events: Any = self._client.watch(
                kind.resource,
                labels=dict(labels),
                resource_version=version,
                server_timeout=WATCH_SECONDS,
            )
            async with contextlib.aclosing(events):
                async for what, one in events:
                    yield what, dict(one)

    async def create(self, kind: Kind, document: Document) -> Document:
        """Raises Taken."""
        with _translated():
            return dict(await self._client.create(self._as(kind, document)))

    async def apply(self, kind: Kind, document: Document) -> Document:
        """Server-side apply: its fields are ours, and the others are left as they are. With a
        `resourceVersion` raises Taken if it has changed since."""
        with _translated():
            return dict(await self._client.apply(self._as(kind, document), force=True))

    async def replace(self, kind: Kind, document: Document) -> Document:
        """Raises Taken if it has changed since it was read, and Missing."""
        with _translated():
            return dict(await self._client.replace(self._as(kind, document)))

    async def merge(self, kind: Kind, name: str, change: Document) -> Document:
        """A JSON merge patch. Raises Missing, and Taken where it names a `resourceVersion`."""
        return await self._merge(kind.resource, name, change)

    async def merge_status(self, kind: Kind, name: str, change: Document) -> Document:
        """As `merge`, of the status of a kind that has it apart."""
        return await self._merge(kind.resource.Status, name, change)

    async def _merge(self, resource: Any, name: str, change: Document) -> Document:
        with _translated():
            patched = await self._client.patch(resource, name, change, patch_type=PatchType.MERGE)
            return dict(patched)

    async def delete(self, kind: Kind, name: str, grace_seconds: int | None = None) -> None:
        """Nothing happens where there is none."""
        with contextlib.suppress(Missing), _translated():
            await self._client.delete(kind.resource, name, grace_period=grace_seconds)

    async def logs(
        self, pod: str, container: str, tail_lines: int, *, follow: bool
    ) -> AsyncIterator[bytes]:
        """What a container of a pod has printed. Raises Missing."""
        with _translated():
            lines = self._client.log(
                pod, container=container, follow=follow, tail_lines=tail_lines or None
            )
            async for line in lines:
                yield line.encode()

    def _as(self, kind: Kind, document: Document) -> Any:
        return kind.resource({"apiVersion": kind.group_version, "kind": kind.name, **document})


def socket_options(unsent_seconds: float) -> list[tuple[int, int, int]]:
    """Of connections to the API server. A watch may be silent for long: that its other end is gone,
    without a word, is noticed within 20 s. What the network does not take is given up after
    `unsent_seconds`."""
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(unsent_seconds * 1000))),
    ]


@contextlib.asynccontextmanager
async def connected(
    kubeconfig: Path | None, namespace: str, unsent_seconds: float
) -> AsyncIterator[Api]:
    """By this file; without one by the service account of the pod that this process runs in. Raises
    OSError."""
    try:
        config = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_service_account()
    except ConfigError as error:
        raise OSError(f"there is no way to Kubernetes: {error}") from None
    one = config.get()
    if one is None or one.user is None:
        raise OSError("there is no way to Kubernetes: no context is chosen")
    verified = verify_cluster(one.cluster, one.user, one.abs_file, trust_env=False)
    client = AsyncClient(
        config,
        namespace=namespace,
        field_manager=MANAGER,
        timeout=httpx2.Timeout(REQUEST_SECONDS),
        trust_env=False,
        transport=_Transport(verify=verified, socket_options=socket_options(unsent_seconds)),
    )
    api = Api(client)
    try:
        yield api
    finally:
        await api.close()


class _Transport(httpx2.AsyncHTTPTransport):
    """A request that was begun is answered, also where who asked does not wait any more: what was asked
    may have been done. And a connection is not left behind half made."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        asking = asyncio.ensure_future(super().handle_async_request(request))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            with contextlib.suppress(httpx2.HTTPError):
                await (await asking).aclose()
            raise


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        raise _of_status(error) from None
    except httpx2.HTTPStatusError as error:  # of a watch, whose body is not read
        if error.response.status_code == GONE:
            raise TooOld("the changes since then are not known any more") from None
        raise Unavailable(f"Kubernetes' API server answers {error.response.status_code}") from None
    except (httpx2.HTTPError, OSError) as error:
        said = str(error) or type(error).__name__
        raise Unavailable(f"Kubernetes' API server does not answer: {said}") from None


def _of_status(error: ApiError) -> Exception:
    status = error.status
    sentence = status.message or status.reason or "no reason given"
    match status.code:
        case 401 | 403:
            return Forbidden(f"Kubernetes refuses it: {sentence}")
        case 404:
            return Missing(sentence)
        case 409:
            return Taken(sentence)
        case 410:
            return TooOld(sentence)
        case 429 | 500 | 502 | 503 | 504:
            return Unavailable(f"Kubernetes' API server cannot answer now: {sentence}")
    return Refused(f"Kubernetes refuses it: {sentence}")
