"""What a manager says of its instance, and its API on a Unix socket, for the Cluster Server and probes.

GET /status?after=VERSION&wait=SECONDS    the status, once it is another one or the time is over
GET /readyz, /livez                       whether it serves, and whether the manager works
GET /metrics                              numbers for Prometheus
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, structs
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvss_agent.http.api import as_json, guarded

WAIT_SECONDS_MAX: Final = 60.0
COUNTS_SECONDS: Final = 1.0  # between two versions that differ in numbers only
PROMETHEUS: Final = "text/plain; version=0.0.4"


class Progress(msgspec.Struct, frozen=True):
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    seconds: float = 0.0  # so far


class Status(msgspec.Struct, frozen=True):
    """`goal`: the one that is followed. `cache`: none, waiting, attached or released. `since`: of state
    and reason, in seconds since 1970. `restarts`: of the engine. `version` grows with each change, also
    over restarts of the manager."""

    name: str
    replica: str
    revision: Annotated[int, Meta(ge=1)]
    state: str
    reason: str
    sentence: str
    since: float
    goal: str
    url: str = ""
    cache: str = "none"
    progress: Progress | None = None
    restarts: int = 0
    running_requests: int = 0
    boxes: tuple[str, ...] = ()
    pid: int = 0
    version: int = 0

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"


class Board:
    """The status, and who waits for the next one. Used from one event loop."""

    def __init__(self, first: Status) -> None:
        # Nobody who knows one of an earlier manager takes ours for old.
        self.status = structs.replace(first, version=int(time.time() * 1000))
        self._changed = asyncio.Event()
        self._ended = False
        self._numbers_at = 0.0
        self._later: asyncio.TimerHandle | None = None

    def put(self, status: Status) -> None:
        before = self.status
        status = structs.replace(status, version=before.version)
        if status == before:
            return
        counts = {"running_requests": status.running_requests, "progress": status.progress}
        now = time.monotonic()
        if structs.replace(before, **counts) == status:
            if now < self._numbers_at + COUNTS_SECONDS:
                self.status = status  # whoever asks gets it, and whoever waits a little later
                if self._later is None:
                    loop = asyncio.get_running_loop()
                    self._later = loop.call_later(COUNTS_SECONDS, self._wake)
                return
            self._numbers_at = now
        self.status = status
        self._wake()

    def _wake(self) -> None:
        self._later = None
        self.status = structs.replace(self.status, version=self.status.version + 1)
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """Nothing comes any more: nobody waits for it, whom the server would have to wait for."""
        self._ended = True
        self._changed.set()

    async def next(self, after: int, seconds: float) -> Status:
        """The status as soon as it is another one than that or the last one, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(seconds, 0.0), WAIT_SECONDS_MAX)):
                while self.status.version == after and not self._ended:
                    await self._changed.wait()
        return self.status


def application(board: Board) -> Starlette:
    async def status(request: Request) -> Response:
        asked = request.query_params
        after, seconds = int(asked.get("after", "0")), float(asked.get("wait", "0"))
        return as_json(await board.next(after, seconds))

    async def live(_request: Request) -> Response:
        return as_json({"live": True})

    async def ready(_request: Request) -> Response:
        now = board.status
        said = {"state": now.state, "reason": now.reason, "sentence": now.sentence}
        return as_json(said, 200 if now.is_ready else 503)

    async def metrics(_request: Request) -> Response:
        return Response(numbers(board.status), media_type=PROMETHEUS)

    routes = {"/status": status, "/livez": live, "/readyz": ready, "/metrics": metrics}
    return Starlette(routes=[Route(path, guarded(one, _anybody)) for path, one in routes.items()])


def _anybody(_request: Request) -> str:
    """Whoever can open the socket is the user of the manager."""
    return "cluster"


def numbers(status: Status) -> str:
    """For Prometheus."""
    rows: dict[str, tuple[str, str, Any]] = {
        "manager_ready": ("gauge", "Whether the instance serves.", int(status.is_ready)),
        "manager_running_requests": ("gauge", "Requests at the engine.", status.running_requests),
        "manager_engine_restarts_total": (
            "counter",
            "Times the engine was started again.",
            status.restarts,
        ),
        "manager_state_seconds": ("gauge", "Time in this state.", f"{time.time() - status.since:.3f}"),
    }
    lines = []
    for name, (kind, meaning, value) in rows.items():
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {value}"]
    return "\n".join(lines) + "\n"
