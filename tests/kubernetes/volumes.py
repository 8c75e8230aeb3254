"""The volumes of a pod: folders of its node, filled before its containers begin."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightkube import AsyncClient
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.authentication_v1 import TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ServiceAccountToken

from tests.kubernetes.container import Mount
from tests.kubernetes.users import give

ConfigMap = create_namespaced_resource("", "v1", "ConfigMap", "configmaps")
Secret = create_namespaced_resource("", "v1", "Secret", "secrets")
Document = dict[str, Any]
MODE, TOKEN_MODE = 0o644, 0o600
EVERYBODY = 0o777


class Volumes:
    """`folder`: theirs. `host`: what its pods see as the node's own root. `field`: the value of a field
    of the pod by its path."""

    def __init__(
        self,
        pod: Document,
        client: AsyncClient,
        folder: Path,
        host: Path,
        field: Callable[[str], str],
    ) -> None:
        self._pod = pod
        self._client = client
        self._folder = folder
        self._host = host
        self._field = field
        self._group: int | None = pod["spec"].get("securityContext", {}).get("fsGroup")

    async def make(self) -> None:
        """Raises ApiError where something that they need is not there yet."""
        for volume in self._pod["spec"].get("volumes", ()):
            if "hostPath" in volume:
                continue
            folder = self._folder / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            is_empty = "emptyDir" in volume
            if is_empty:
                folder.chmod(EVERYBODY)
            projected = volume.get("projected", {})
            for source in projected.get("sources", [volume]):
                await self._fill(folder, source, projected.get("defaultMode"))
            give(folder, self._group, is_read_only=not is_empty)

    def mounts(self, container: Document) -> list[Mount]:
        volumes = {one["name"]: one for one in self._pod["spec"].get("volumes", ())}
        mounts = []
        for one in container.get("volumeMounts", ()):
            volume = volumes[one["name"]]
            source = self._folder / one["name"]
            if host_path := volume.get("hostPath"):
                # Each node has files of its own. What is missing is made for root alone to write to.
                source = self._host / host_path["path"].lstrip("/")
                source.mkdir(parents=True, exist_ok=True)
            mounts.append(Mount(source, one["mountPath"], one.get("readOnly", False)))
        return mounts

    async def _fill(self, folder: Path, source: Document, mode: int | None) -> None:
        """`mode`: of a projected volume."""
        namespace = self._pod["metadata"]["namespace"]
        files: dict[str, bytes] = {}
        of: Document = {}
        if of := source.get("configMap", {}):
            found = await self._client.get(ConfigMap, of["name"], namespace=namespace)
            files = {key: value.encode() for key, value in (found.get("data") or {}).items()}
        elif of := source.get("secret", {}):
            name = of.get("secretName") or of["name"]
            found = await self._client.get(Secret, name, namespace=namespace)
            files = {key: base64.b64decode(raw) for key, raw in (found.get("data") or {}).items()}
        elif token := source.get("serviceAccountToken", {}):
            files = {token["path"]: await self._account_token(token)}
            of = {"defaultMode": TOKEN_MODE if self._group is not None else MODE}
        elif of := source.get("downwardAPI", {}):
            files = {
                one["path"]: self._field(one["fieldRef"]["fieldPath"]).encode() for one in of["items"]
            }
            of = {key: value for key, value in of.items() if key != "items"}
        wanted = {one["key"]: one for one in of.get("items", ())} or {
            key: {"path": key} for key in files
        }
        for key, one in wanted.items():
            path = folder / one["path"]
            path.write_bytes(files[key])
            path.chmod(one.get("mode", of.get("defaultMode", MODE if mode is None else mode)))

    async def _account_token(self, wanted: Document) -> bytes:
        """Of the service account of the pod, as the API server makes it."""
        spec = TokenRequestSpec(
            audiences=[wanted["audience"]] if "audience" in wanted else [],
            expirationSeconds=wanted.get("expirationSeconds", 3600),
        )
        made = await self._client.create(
            ServiceAccountToken(metadata=ObjectMeta(), spec=spec),
            self._pod["spec"].get("serviceAccountName", "default"),
            namespace=self._pod["metadata"]["namespace"],
        )
        assert made.status
        assert made.status.token
        return made.status.token.encode()
