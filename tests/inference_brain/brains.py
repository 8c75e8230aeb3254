"""A brain in a thread of its own, with its API on a port: as `serve` puts it together.

with RunningBrain([engine.url]) as brain:
    post(f"{brain.url}/v1/completions", headers=brain.headers, json=…)
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from inference_brain.api.listener import ApiServer, policy
from inference_brain.brain import Brain, Options
from inference_brain.desired import Desired, Limits, OrgSpec, ReplicaSpec, ServedModel, parse
from kvss_agent.http.client import Timeouts
from kvss_agent.process import daemon
from swdriver_shim.desired import token_hash

KEY = "sk-acme"
SECRET = b"a" * 32
OPTIONS = Options(timeouts=Timeouts(connect=50.0, first=50.0, between=50.0))

# For all clients of the tests: to make one takes longer than to ask a brain.
CONTEXT: Final = ssl.create_default_context()
ANSWER_SECONDS_MAX: Final = 60.0  # on a machine that is busy

T = TypeVar("T")


def request(method: str, url: str, **more: Any) -> httpx.Response:
    """Ask on a connection of its own."""
    return httpx.request(method, url, timeout=ANSWER_SECONDS_MAX, verify=CONTEXT, **more)


def get(url: str, **more: Any) -> httpx.Response:
    return request("GET", url, **more)


def post(url: str, **more: Any) -> httpx.Response:
    return request("POST", url, **more)


def org(name: str = "acme", *keys: str, **more: Any) -> OrgSpec:
    return OrgSpec(name, SECRET, tuple(token_hash(key) for key in keys or (KEY,)), **more)


def model(urls: Sequence[str], name: str = "m", **more: Any) -> ServedModel:
    replicas = tuple(ReplicaSpec(f"r{index}", url) for index, url in enumerate(urls))
    return ServedModel(name, more.pop("tokens_max", 100_000), replicas, **more)


def told(urls: Sequence[str], generation: int = 1, **more: Any) -> Desired:
    """A document of one model, with these replicas, and one org."""
    orgs = more.pop("orgs", (org(limits=Limits(queued=100_000)),))
    models = more.pop("models", None) or (model(urls, **more),)
    made = Desired(generation=generation, brain="b", models=models, orgs=orgs)
    return parse(msgspec.json.encode(made))


def client_of(brain: RunningBrain) -> httpx.Client:
    """Keeps its connections."""
    return httpx.Client(headers=brain.headers, timeout=ANSWER_SECONDS_MAX, verify=CONTEXT)


class RunningBrain:
    """`document`: followed from the beginning; None for a brain that has none yet."""

    def __init__(
        self,
        document: Desired | None,
        options: Options = OPTIONS,
        state_dir: Path | None = None,
        certificate: tuple[Path, Path] | None = None,
        connections: int = 10_000,
    ) -> None:
        self._document = document
        self._options = replace(options, logs_access=options.logs_access)
        self._state_dir = state_dir
        self._certificate = certificate or (None, None)
        self._connections = connections
        self.headers = {"authorization": f"Bearer {KEY}"}

    def __enter__(self) -> Self:
        started = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait(60)
        if self._failed:
            raise self._failed
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        if self._failed:
            raise self._failed

    def _run(self, started: threading.Event) -> None:
        try:
            asyncio.run(self._serve(started))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._failed = error
        finally:
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        with daemon.listen(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            self.brain = Brain("b", self._state_dir, "test", token="t" * 20, options=self._options)
            bounds = policy(self._connections, 3600.0, self.brain.owners)
            api = ApiServer(self.brain.api, listener, bounds, *self._certificate)
            async with self.brain.running(), api.running():
                if self._document:
                    self.brain.set_desired(self._document)
                started.set()
                await self._stop.wait()

    @property
    def url(self) -> str:
        scheme = "https" if self._certificate[0] else "http"
        return f"{scheme}://127.0.0.1:{self.port}"

    def call(self, what: Callable[[], T]) -> T:
        """In the brain's own thread."""

        async def run() -> T:
            return what()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def set_desired(self, document: Desired) -> None:
        self.call(lambda: self.brain.set_desired(document))
