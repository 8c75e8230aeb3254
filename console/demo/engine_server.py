"""An engine of the demo behind OpenAI's API, as an engine on a wafer would be behind it.

It takes `/v1/completions` and `/v1/chat/completions`, as streams and whole. Whose a request is it learns
from `cache_salt`, which brains set. A prompt is computed in the time that the emulated engine takes, one
after the other, and answers come at the speed of an engine.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import msgspec

from console.demo import engine, story
from console.demo.story import Ask, Served
from inference_brain.tokens import PromptTokenizer, load
from inference_brain.tokens.errors import TokensError
from inference_brain.tokens.messages import Chat
from kvss_agent.http.exchange import Unanswered
from swdriver_shim.adapters.remote import Refused, RemotePrefixes
from swdriver_shim.adapters.wafer import Wafer
from telemetry.decoder import DOCUMENT, Malformed, decode

log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 4 << 20
ANSWER_TOKENS: Final = 64  # where a request does not say how many
ANSWER_TOKENS_MAX: Final = 4096
CHUNK_TOKENS: Final = 16
CHUNK_SECONDS: Final = 0.04  # 400 tokens a second


class Request(msgspec.Struct):
    """What it reads of a request."""

    model: str = ""
    prompt: list[int] | str = ""
    messages: list[dict[str, Any]] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Computed:
    """Of a request that is being answered."""

    hit: int
    prompt: int
    answer: Sequence[int]


Prefixes = Callable[[str], RemotePrefixes | None]  # by salt; None: nobody's, or no driver is there


class EngineServer:
    """One replica. `prefixes`: the driver's, of the org that a request is for."""

    def __init__(self, served: Served, tokenizer: Path, prefixes: Prefixes, port: int = 0) -> None:
        """`port`: where it listens, if that is free. Raises OSError."""
        self._served = served
        self._wafer = Wafer(served.layout, served.model)
        self._tokenizer = load(tokenizer)
        self._prefixes = prefixes
        self._computing = threading.Lock()  # a prompt after the other, as on one box
        handler = type("Handler", (_Handler,), {"engine": self})
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        except OSError:
            self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def tokenizer(self) -> PromptTokenizer:
        return self._tokenizer

    def run(self) -> None:
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def tokens_of(self, request: Request) -> Sequence[int]:
        """Raises TokensError."""
        if request.messages:
            return self._tokenizer.chat(Chat(request.messages))
        if isinstance(request.prompt, str):
            return self._tokenizer.encode(request.prompt)
        return request.prompt

    def compute(self, request: Request, tokens: Sequence[int], request_id: str) -> Computed:
        """Returns when the first token is there. What is to be cached is stored on the way."""
        wanted = request.max_completion_tokens or request.max_tokens or ANSWER_TOKENS
        answer = story.answer_to(tokens, min(wanted, ANSWER_TOKENS_MAX))
        ask = Ask(0.0, "", self._served, tokens, answer)
        with self._computing:
            hit = self._with_cache(request.cache_salt, ask, request_id)
            time.sleep(engine.SPEED.compute_seconds(len(tokens) - hit, hit))
        return Computed(hit, len(tokens), answer)

    def _with_cache(self, salt: str, ask: Ask, request_id: str) -> int:
        prefixes = self._prefixes(salt)
        if prefixes is None:
            return 0
        try:
            return engine.serve(prefixes, self._wafer, ask, request_id).hit
        except (Refused, Unanswered, OSError) as error:
            log.warning("%s serves without its driver: %s", self._served.driver, error)
            return 0


class _Handler(BaseHTTPRequestHandler):
    """One request. HTTP/1.1, so that brains keep their connections."""

    protocol_version = "HTTP/1.1"
    engine: EngineServer

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {})
        elif self.path == "/v1/models":
            model = self.engine._served.model  # noqa: SLF001 - it is its engine's
            self._answer(200, {"object": "list", "data": [{"id": model, "object": "model"}]})
        else:
            self._refuse(404, f"There is no {self.path}.")

    def do_POST(self) -> None:
        raw = self.rfile.read(min(int(self.headers.get("Content-Length") or 0), BODY_BYTES_MAX))
        is_chat = self.path == "/v1/chat/completions"
        if not is_chat and self.path != "/v1/completions":
            self._refuse(404, f"There is no {self.path}.")
            return
        try:
            request = decode(raw, Request, DOCUMENT)
            tokens = self.engine.tokens_of(request)
        except (Malformed, TokensError) as error:
            self._refuse(400, str(error))
            return
        if not 0 < len(tokens) <= story.CONTEXT_TOKENS:
            self._refuse(
                400, f"A prompt has 1 to {story.CONTEXT_TOKENS} tokens; this one has {len(tokens)}."
            )
            return
        request_id = self.headers.get("X-Request-ID") or f"demo-{time.monotonic_ns():x}"
        served = self.engine.compute(request, tokens, request_id)
        reply = _Reply(request, request_id, served, self.engine.tokenizer, is_chat=is_chat)
        if request.stream:
            self._stream(reply)
        else:
            time.sleep(len(served.answer) / CHUNK_TOKENS * CHUNK_SECONDS)
            self._answer(200, reply.whole())

    def _stream(self, reply: _Reply) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in reply.events():
                data = f"data: {event}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):  # the client has left
            self.close_connection = True

    def _refuse(self, status: int, sentence: str) -> None:
        kind = "invalid_request_error"
        self._answer(status, {"error": {"message": sentence, "type": kind, "code": status}})

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Brains have logs of requests."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """An answer in OpenAI's form."""

    request: Request
    request_id: str
    served: Computed
    tokenizer: PromptTokenizer
    is_chat: bool

    @property
    def _usage(self) -> dict[str, Any]:
        prompt, answer = self.served.prompt, len(self.served.answer)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": self.served.hit},
        }

    def whole(self) -> dict[str, Any]:
        text = self.tokenizer.decode(self.served.answer)
        said = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length"}
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": self._usage}

    def events(self) -> Iterator[str]:
        """One after the other, as they are generated."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        answer = self.served.answer
        for start in range(0, len(answer), CHUNK_TOKENS):
            if start:
                time.sleep(CHUNK_SECONDS)
            text = self.tokenizer.decode(answer[start : start + CHUNK_TOKENS])
            is_last = start + CHUNK_TOKENS >= len(answer)
            said: dict[str, Any] = {"text": text}
            if self.is_chat:
                said = {"delta": {"role": "assistant", "content": text}}
            choice = {"index": 0, **said, "logprobs": None}
            choice["finish_reason"] = "length" if is_last else None
            yield json.dumps({**self._head(kind), "choices": [choice]})
        if (self.request.stream_options or {}).get("include_usage"):
            yield json.dumps({**self._head(kind), "choices": [], "usage": self._usage})
        yield "[DONE]"

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}"
        return {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": self.request.model,
        }
