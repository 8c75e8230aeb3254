"""As much of Kubernetes' API server as the backend uses, in memory, on loopback: objects with versions,
lists, watches, and refusals that a test asks for.

It has neither controllers nor nodes: what those do, a test does. See `tests.kubernetes.bed` for the real
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster_server.kubernetes.api import Api, connected

NAMESPACE = "test"
REASONS = {404: "NotFound", 409: "Conflict", 410: "Expired", 403: "Forbidden", 503: "ServiceUnavailable"}
Document = dict[str, Any]


class ApiServer:
    """`refusals`: (method, plural) to the status that such requests are answered with. `asked`: the
    requests so far, as (method, plural, name). `missing_kinds`: not defined. `meanwhile`: called when
    what a list will say is fixed, and before it is said. `garbles`: watches say what is not JSON.
    `silent`: they say nothing."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Document] = {}
        self.refusals: dict[tuple[str, str], int] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.missing_kinds: set[str] = set()
        self.meanwhile: Callable[[], None] | None = None
        self.garbles = self.silent = False
        self.oldest = 0  # changes before it are forgotten
        self.url = ""
        self._version = 100
        self._events: list[tuple[int, str, str, Document]] = []
        self._changed = asyncio.Event()

    # As others do it

    def put(self, plural: str, name: str, document: Document, **metadata: Any) -> Document:
        """An object as somebody else makes or changes it."""
        before = self.objects.get((plural, name))
        self._version += 1
        fixed = before["metadata"] if before else {"uid": f"uid-{self._version}"}
        made = {
            **document,
            "metadata": {
                "creationTimestamp": "2026-01-01T00:00:00Z",
                **document.get("metadata", {}),
                **metadata,
                "name": name,
                "uid": fixed["uid"],
                "resourceVersion": str(self._version),
            },
        }
        self._store("MODIFIED" if before else "ADDED", plural, name, made)
        return made

    def remove(self, plural: str, name: str) -> None:
        gone = self.objects.pop((plural, name))
        self._version += 1
        gone = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self._version)}}
        self._tell("DELETED", plural, gone)

    def get(self, plural: str, name: str) -> Document | None:
        return self.objects.get((plural, name))

    def forget_changes(self) -> None:
        """Watches that go on from here on are answered with 410, also those that run."""
        self.oldest = self._version + 1
        self._version += 1
        self._announce()

    def forget_all_changes(self) -> None:
        """Also those to come."""
        self.oldest = 1 << 60
        self._announce()

    def count(self, method: str, plural: str, name: str = "") -> int:
        return len(
            [1 for one in self.asked if one[:2] == (method, plural) and (not name or one[2] == name)]
        )

    # As it is asked

    async def answer(self, request: Request) -> Response:
        plural, name = request.path_params["plural"], request.path_params.get("name", "")
        self.asked.append((request.method, plural, name))
        status = self.refusals.get((request.method, plural))
        if status is None and plural in self.missing_kinds:
            status = 404
        if status:
            return _refused(status, "the test refuses it")
        match request.method:
            case "GET" if request.path_params.get("part") == "log":
                return self._log(name, request)
            case "GET" if name:
                return self._said(plural, name)
            case "GET" if request.query_params.get("watch"):
                return self._watch(plural, request)
            case "GET":
                return self._list(plural, request)
            case "POST":
                return await self._create(plural, await request.json())
            case "DELETE":
                return self._delete(plural, name)
        return self._change(plural, name, request, await request.json())

    def _said(self, plural: str, name: str) -> Response:
        found = self.objects.get((plural, name))
        return JSONResponse(found) if found else _refused(404, f'{plural} "{name}" not found')

    def _log(self, name: str, request: Request) -> Response:
        containers = self.objects["pods", name]["spec"]["containers"]
        asked = request.query_params.get("container", "")
        if not asked and len(containers) > 1:
            return _refused(400, f"a container name must be specified for pod {name}")
        return PlainTextResponse(f"of {asked or containers[0]['name']}\n")

    def _list(self, plural: str, request: Request) -> Response:
        found = [one for one in self._of(plural) if _has_labels(one, request)]
        metadata = {"resourceVersion": str(self._version)}
        if self.meanwhile:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return JSONResponse({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": found})

    def _watch(self, plural: str, request: Request) -> Response:
        since = int(request.query_params["resourceVersion"])
        if since < self.oldest:
            return _refused(410, "too old resource version")

        async def events() -> AsyncIterator[bytes]:
            version = since
            while True:
                changed = self._changed
                if self.silent:
                    await changed.wait()
                    continue
                for at, kind, of, document in self._events[:]:
                    if at > version and of == plural and _has_labels(document, request):
                        yield json.dumps({"type": kind, "object": document}).encode() + b"\n"
                if self.oldest > version and self.oldest > since:
                    error = _status(410, "too old resource version")
                    yield json.dumps({"type": "ERROR", "object": error}).encode() + b"\n"
                    return
                version = self._version
                await changed.wait()
                if self.garbles:
                    yield b"{not JSON\n"

        return StreamingResponse(events(), media_type="application/json")

    async def _create(self, plural: str, document: Document) -> Response:
        name = document["metadata"]["name"]
        if (plural, name) in self.objects:
            return _refused(409, f'{plural} "{name}" already exists')
        return JSONResponse(self.put(plural, name, document), 201)

    def _change(self, plural: str, name: str, request: Request, change: Document) -> Response:
        before = self.objects.get((plural, name))
        is_apply = "apply-patch" in request.headers["content-type"]
        if before is None and not is_apply:
            return _refused(404, f'{plural} "{name}" not found')
        asked = change.get("metadata", {}).get("resourceVersion")
        if asked and (before is None or before["metadata"]["resourceVersion"] != asked):
            return _refused(409, "the object has been modified")
        made = change if request.method == "PUT" else _merged(before or {}, change)
        if before == made:
            return JSONResponse(before)
        made = self.put(plural, name, made)
        metadata = made["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            self.remove(plural, name)
        return JSONResponse(made)

    def _delete(self, plural: str, name: str) -> Response:
        found = self.objects.get((plural, name))
        if found is None:
            return _refused(404, f'{plural} "{name}" not found')
        if found["metadata"].get("finalizers"):
            self.put(plural, name, found, deletionTimestamp="2026-01-01T00:00:00Z")
        else:
            self.remove(plural, name)
        return JSONResponse({"kind": "Status", "status": "Success"})

    def _of(self, plural: str) -> list[Document]:
        return [one for (of, _), one in sorted(self.objects.items()) if of == plural]

    def _store(self, what: str, plural: str, name: str, document: Document) -> None:
        self.objects[plural, name] = document
        self._tell(what, plural, document)

    def _tell(self, what: str, plural: str, document: Document) -> None:
        self._events.append((self._version, what, plural, document))
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@contextlib.asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    made = ApiServer()
    path = f"/namespaces/{NAMESPACE}/{{plural}}"
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    routes = [
        Route(prefix + path + behind, made.answer, methods=methods)
        for prefix in ("/api/v1", "/apis/{group}/{version}")
        for behind in ("", "/{name}", "/{name}/{part}")
    ]
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    made.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = Starlette(routes=routes)
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield made
    finally:
        server.should_exit = server.force_exit = True
        await serving


@contextlib.asynccontextmanager
async def connected_to(server: ApiServer, folder: Path) -> AsyncIterator[Api]:
    async with connected(kubeconfig(server, folder), NAMESPACE, 5.0) as api:
        yield api


def kubeconfig(server: ApiServer, folder: Path) -> Path:
    said = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "one", "cluster": {"server": server.url}}],
        "users": [{"name": "one", "user": {"token": "of-nobody"}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "current-context": "one",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(said))
    return path


async def until(what: str, holds: Callable[[], object], seconds_max: float = 60.0) -> None:
    try:
        async with asyncio.timeout(seconds_max):
            while not holds():  # noqa: ASYNC110 - of a server, which tells a test nothing
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {seconds_max:g} s: {what}") from None


def _merged(before: Document, change: Document) -> Document:
    """A JSON merge patch."""
    made = dict(before)
    for key, value in change.items():
        if value is None:
            made.pop(key, None)
        elif isinstance(value, dict) and isinstance(made.get(key), dict):
            made[key] = _merged(made[key], value)
        else:
            made[key] = value
    return made


def _has_labels(document: Document, request: Request) -> bool:
    wanted = re.findall(r"([^,=]+)=([^,]*)", request.query_params.get("labelSelector", ""))
    labels = document["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in wanted)


def _status(code: int, message: str) -> Document:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": REASONS.get(code, "Unknown"),
        "code": code,
    }


def _refused(code: int, message: str) -> Response:
    return JSONResponse(_status(code, message), code)
