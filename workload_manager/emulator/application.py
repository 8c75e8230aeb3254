"""OpenAI's API of the emulator, its health and its numbers, over ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvss_agent.http.api import Refused, body_of
from workload_manager.emulator import requests
from workload_manager.emulator.cache import Attachment
from workload_manager.emulator.document import EngineDocument
from workload_manager.emulator.engine import Engine, Figures, Piece
from workload_manager.emulator.requests import Asked, BadRequest, Reply
from workload_manager.emulator.texts import Texts

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream; charset=utf-8"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_ID_MAX: Final = 200
_TOKENIZED_AT_ONCE: Final = 16 << 10  # bytes of a body; longer ones are read in a thread


class Api:
    def __init__(
        self, document: EngineDocument, engine: Engine, texts: Texts, attachment: Attachment | None
    ) -> None:
        self._document, self._engine, self._texts = document, engine, texts
        self._attachment = attachment

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/-/driver", self._driver),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:  # noqa: ARG002 - it is asked nothing
        return Response(b"{}", media_type=JSON)

    async def _models(self, request: Request) -> Response:  # noqa: ARG002
        return Response(
            requests.models(self._document.model, self._document.tokens_max), media_type=JSON
        )

    async def _driver(self, request: Request) -> Response:  # noqa: ARG002
        found = self._attachment
        said = {
            "attached": found is not None and found.is_attached,
            "problem": found.problem if found else "It was started without a driver.",
        }
        return Response(msgspec.json.encode(said), media_type=JSON)

    async def _metrics(self, request: Request) -> Response:  # noqa: ARG002
        return Response(page(self._document.model, self._engine.figures), media_type=METRICS)

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, is_chat=False)

    async def _chat_completions(self, request: Request) -> Response:
        return await self._generate(request, is_chat=True)

    async def _generate(self, request: Request, *, is_chat: bool) -> Response:
        name = request.headers.get("x-request-id", "")[:REQUEST_ID_MAX] or secrets.token_hex(12)
        try:
            raw = await body_of(request, requests.BODY_BYTES_MAX)
            asked = await self._asked(raw, name, is_chat=is_chat)
        except ClientDisconnect:
            return _refused("The connection ended before the body did.", 400)
        except Refused as error:
            return _refused(str(error), int(error.status))
        except BadRequest as error:
            return _refused(str(error), error.status)
        return Answer(self._engine, asked, self._texts)

    async def _asked(self, raw: bytes, name: str, *, is_chat: bool) -> Asked:
        def read() -> Asked:
            told = self._document
            return requests.asked(raw, self._texts, name, told.model, told.tokens_max, is_chat=is_chat)

        return await asyncio.to_thread(read) if len(raw) > _TOKENIZED_AT_ONCE else read()


class Answer(Response):
    """Of one request. A client that leaves ends it."""

    def __init__(self, engine: Engine, asked: Asked, texts: Texts) -> None:
        super().__init__()
        self._engine, self._asked, self._texts = engine, asked, texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._engine.answer(self._asked)) as pieces:
            try:
                first = await anext(pieces)
            except BadRequest as error:
                await _refused(str(error), error.status)(scope, receive, send)
                return
            carry = self._stream if self._asked.is_stream else self._whole
            await carry(first, pieces, scope, receive, send)

    async def _whole(
        self, first: Piece, pieces: AsyncIterator[Piece], scope: Scope, receive: Receive, send: Send
    ) -> None:
        last = first
        async for piece in pieces:
            last = piece
        text = self._texts.decode(last.answer)
        body = Reply(self._asked, first.hit).whole(text, len(last.answer))
        await Response(body, media_type=JSON)(scope, receive, send)

    async def _stream(
        self, first: Piece, pieces: AsyncIterator[Piece], scope: Scope, receive: Receive, send: Send
    ) -> None:
        del scope, receive
        headers = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        reply, said, piece = Reply(self._asked, first.hit), "", first
        while True:
            text = self._texts.decode(piece.answer)
            # A character may end in a later token: until then it is not sent.
            more = (
                text[len(said) :]
                if piece.is_last or not text.endswith("\N{REPLACEMENT CHARACTER}")
                else ""
            )
            event = reply.event(more, len(piece.answer), is_first=piece is first, is_last=piece.is_last)
            said += more
            if piece.is_last:
                event += reply.last(len(piece.answer))
            await send({"type": "http.response.body", "body": event, "more_body": not piece.is_last})
            if piece.is_last:
                return
            piece = await anext(pieces)


async def _left(receive: Callable[[], Awaitable[object]]) -> None:
    """Returns when the client has left. Its body has been read: nothing else comes."""
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return


def _refused(sentence: str, status: int) -> Response:
    return Response(requests.refusal(sentence, status), status, media_type=JSON)


def page(model: str, figures: Figures) -> str:
    """Prometheus' text format, by the names that vLLM gives these numbers."""
    name = model.replace("\\", "\\\\").replace('"', '\\"')
    answered = figures.requests - figures.failed - figures.aborted - figures.running - figures.waiting
    values = [
        ("vllm:num_requests_running", "gauge", figures.running),
        ("vllm:num_requests_waiting", "gauge", figures.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", 0.0),  # it keeps no KV of its own
        ("vllm:prompt_tokens_total", "counter", figures.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", figures.answer_tokens),
        ("vllm:request_success_total", "counter", max(0, answered)),
        ("vllm:external_prefix_cache_queries_total", "counter", figures.prompt_tokens),
        ("vllm:external_prefix_cache_hits_total", "counter", figures.hit_tokens),
        ("vllm:request_prompt_tokens_sum", "counter", figures.prompt_tokens),
        ("vllm:request_prompt_tokens_count", "counter", figures.requests - figures.failed),
        ("tidegate_emulator_wrong_bytes_total", "counter", figures.wrong_bytes),
    ]
    lines = [
        f'# TYPE {metric} {kind}\n{metric}{{model_name="{name}"}} {value}'
        for metric, kind, value in values
    ]
    return "\n".join((*lines, ""))
