"""The brain's control API: what it should be and is, and why a request went where it did.

`Authorization: Bearer` has the controller's token; over TLS the console's certificate is needed as well.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inference_brain.brain import Brain
from inference_brain.collection import collect
from kvss_agent.http import controller
from kvss_agent.http.api import Refused, as_json, body_of, guarded
from kvss_agent.security.confirmations import Question, Statement
from kvss_agent.security.identity import ProcessIdentity
from telemetry.emit.exposition import CONTENT_TYPE, Page

DOCUMENT_BYTES_MAX = 64 << 20


class Control:
    """The routes, over one brain."""

    def __init__(self, brain: Brain, token: str, identity: ProcessIdentity | None = None) -> None:
        """`identity`: what the brain signs with."""
        self.brain = brain
        self._identity = identity
        self._controller = partial(controller.controller_of, token=token)

    def application(self) -> Starlette:
        def control(path: str, handler: Any, method: str = "GET") -> Route:
            return Route(path, guarded(handler, self._controller), methods=[method])

        return controller.application(
            [
                Route("/-/health", self.health),
                control(controller.METRICS, self.metrics),
                control("/v1/desired", self.set_desired, "PUT"),
                control("/v1/observed", self.observed),
                control("/v1/purges", self.confirm_purge, "POST"),
                control("/v1/requests/{request}", self.request),
            ]
        )

    async def health(self, _request: Request) -> Response:
        return controller.health(ready=self.brain.is_ready)

    async def metrics(self, _request: Request) -> Response:
        page = Page(self.brain.counts.limits)
        await asyncio.to_thread(collect, self.brain, page)
        return Response(str(page), media_type=CONTENT_TYPE)

    async def set_desired(self, request: Request) -> Response:
        raw = await body_of(request, DOCUMENT_BYTES_MAX)
        told = await self.brain.change_desired(raw)
        followed = self.brain.observed_generation
        return as_json({"generation": told.generation, "observed_generation": followed}, 202)

    async def observed(self, _request: Request) -> Response:
        return as_json(self.brain.observed())

    async def request(self, request: Request) -> Response:
        """Why this replica: the candidates of a request, and what became of it."""
        found = self.brain.find(request.path_params["request"])
        if found is None:
            raise Refused(HTTPStatus.NOT_FOUND, "This brain knows no request of that id (any more).")
        return as_json(found)

    async def confirm_purge(self, request: Request) -> Response:
        """All that carries tags that are nobody's any more is forgotten."""

        async def purge(question: Question) -> Statement:
            return self.brain.purge(question)

        return await controller.confirm_purge(request, self._identity, purge)
