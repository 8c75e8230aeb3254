"""The daemon's HTTP API: for its controller what the driver should be and is, for callers the verbs.

`Authorization: Bearer` says who asks. The controller's token may set the desired document and read the
observed one. A caller's token belongs to one org, see `callers`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvss_agent.documents import decode
from kvss_agent.http import controller
from kvss_agent.http.api import Refused, as_json, bearer, body_of, guarded
from kvss_agent.security.identity import ProcessIdentity
from swdriver_shim import lending
from swdriver_shim.daemon import explanations, metrics
from swdriver_shim.daemon.callers import HEADER_BYTES_MAX, CallerApi
from swdriver_shim.daemon.explanations import ExplainOrgBody
from swdriver_shim.daemon.openapi import describe
from swdriver_shim.daemon.shim import Shim
from telemetry.emit.exposition import CONTENT_TYPE

CONTROLS_AT_ONCE: Final = 4
LENDS_AT_ONCE: Final = 2  # siblings wait for each other, and for nobody else
PURGES_AT_ONCE: Final = 4  # each takes seconds while an agent is lost: documents don't wait for that
_LEND: Final = msgspec.json.Decoder(lending.LendBody)
_EXPLAIN_ORG: Final = msgspec.json.Decoder(ExplainOrgBody)

P = ParamSpec("P")
T = TypeVar("T")


class Service:
    """The routes, over one shim."""

    def __init__(self, shim: Shim, token: str, identity: ProcessIdentity | None = None) -> None:
        """`identity`: what the driver signs with."""
        self.shim = shim
        self._identity = identity
        self._controller = partial(controller.controller_of, token=token)
        self._callers = CallerApi(shim)
        # Not the threads of callers: those may all be waiting for what the controller is about to fix.
        self._threads = ThreadPoolExecutor(CONTROLS_AT_ONCE, thread_name_prefix="control")
        self._lending = ThreadPoolExecutor(LENDS_AT_ONCE, thread_name_prefix="lend")
        self._purging = ThreadPoolExecutor(PURGES_AT_ONCE, thread_name_prefix="purge")

    def application(self) -> Starlette:
        def control(path: str, handler: Any, method: str = "GET") -> Route:
            return Route(path, guarded(handler, self._controller), methods=[method])

        return controller.application(
            [
                Route("/-/health", self.health),
                Route("/v1/openapi.json", self.openapi),
                control(controller.METRICS, self.metrics),
                control("/v1/desired", self.set_desired, "PUT"),
                control("/v1/observed", self.observed),
                control("/v1/stats", self.stats),
                control("/v1/reuse", self.reuse),
                control("/v1/purges", self.confirm_purge, "POST"),
                control("/v1/explain_org", self.explain_org, "POST"),
                control("/v1/requests", self.requests),
                Route(lending.PATH, guarded(self.lend, self._borrower), methods=["POST"]),
                *self._callers.routes(lambda handler: guarded(handler, self._callers.owner)),
            ]
        )

    def _borrower(self, request: Request) -> str | None:
        return self.shim.borrower(request.query_params.get("as", ""), bearer(request))

    async def lend(self, request: Request) -> Response:
        """For a sibling: where the columns of a prompt are."""
        body = decode(await body_of(request, lending.ASK_BYTES_MAX), _LEND)
        return as_json(await _run_in(self._lending, self.shim.lend, body))

    async def openapi(self, _request: Request) -> Response:
        return as_json(describe(self._callers.verbs))

    async def _run(self, work: Callable[P, T], *what: P.args, **named: P.kwargs) -> T:
        return await _run_in(self._threads, work, *what, **named)

    # For the controller

    async def health(self, _request: Request) -> Response:
        return controller.health(ready=self.shim.is_ready)

    async def metrics(self, _request: Request) -> Response:
        page = await self._run(metrics.page, self.shim)
        return Response(page, media_type=CONTENT_TYPE)

    async def set_desired(self, request: Request) -> Response:
        told = await self._run(self.shim.set_desired, await body_of(request))
        followed = self.shim.observed_generation
        return as_json({"generation": told.generation, "observed_generation": followed}, 202)

    async def observed(self, _request: Request) -> Response:
        return as_json(await self._run(self.shim.observed))

    async def stats(self, _request: Request) -> Response:
        """Of all orgs: with thousands of them that takes seconds."""
        orgs = self.shim.driver.statistics.orgs
        return await self._run(lambda: as_json([asdict(org) for org in orgs()]))

    async def reuse(self, request: Request) -> Response:
        """How an org's columns come back; without one, of which orgs something is known."""
        return await self._run(self._reuse_of, request.query_params.get("org"))

    def _reuse_of(self, org: str | None) -> Response:
        ledger = self.shim.driver.ledger
        if org is None:
            accounts = list(ledger.accounts.values())
            return as_json([{"org": one.org, "requests": one.tally.requests} for one in accounts])
        sample = ledger.reuse(org, time.monotonic())  # the clock of a driver in a daemon
        if sample is None:
            raise Refused(HTTPStatus.NOT_FOUND, "This driver has never heard of that org.")
        return as_json(sample)

    async def confirm_purge(self, request: Request) -> Response:
        """All that carries tags that are nobody's any more."""
        return await controller.confirm_purge(
            request, self._identity, lambda question: _run_in(self._purging, self.shim.purge, question)
        )

    async def explain_org(self, request: Request) -> Response:
        """What the org itself may ask, with `/v1/explain`; and what became of a request."""
        body = decode(await body_of(request, HEADER_BYTES_MAX), _EXPLAIN_ORG)
        return as_json(await self._run(explanations.explain, self.shim, body))

    async def requests(self, request: Request) -> Response:
        """The last requests of an org that had a name; or whose one of this name was."""
        if name := request.query_params.get("request"):
            found = await self._run(self.shim.driver.orgs_of_request, name)
            return as_json([{"org": org} for org in found])
        org = request.query_params.get("org", "")
        return as_json(await self._run(explanations.newest, self.shim, org))


async def _run_in(
    threads: ThreadPoolExecutor, work: Callable[P, T], *what: P.args, **named: P.kwargs
) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *what, **named))
