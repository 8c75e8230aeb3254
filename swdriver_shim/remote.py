"""A driver's daemon, asked over HTTP by an engine in another process.

    prefixes = Remote("http://127.0.0.1:8420", token, model)    # the `model` of the daemon's document

A daemon that can't be reached is a miss, as an agent that is lost, and `lost_because` says why. What it
refuses is somebody's mistake and is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

import httpx
import msgspec
from msgspec import Struct

from kvss_agent.http_api import Invalid
from swdriver_shim.desired import ModelSpec
from swdriver_shim.driver import Loaded, Part, Stored
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.octets import KV_BYTES_MAX, OCTETS, Kv, LoadHead, pack, run_heads, unpack
from swdriver_shim.policy import AS_USUAL, Rules

log = logging.getLogger(__name__)

CONNECT_SECONDS_MAX: Final = 5.0
ANSWER_SECONDS_MAX: Final = 60.0
TEXT_MAX: Final = 200
JSON: Final = "application/json"


class Refused(Exception):
    """What the daemon says against it, in a sentence."""


class Queried(Struct, frozen=True):
    tokens: int


class Remote:
    """The prefixes of the org that a token belongs to, at a daemon. May be used from any thread."""

    def __init__(self, url: str, token: str, model: ModelSpec, *, adapter: str = "") -> None:
        self.layout = model.shape()
        self.namespace = model.namespace(adapter)
        self.lost_because: str | None = None  # since the last answer
        self._who = {"adapter": adapter, "namespace": self.namespace.digest().hex()}
        each = sum(sum(group.bytes_per_token) for group in self.layout.groups)
        self._tokens_max = KV_BYTES_MAX // each // COLUMN_TOKENS * COLUMN_TOKENS  # at once
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(ANSWER_SECONDS_MAX, connect=CONNECT_SECONDS_MAX),
        )

    def close(self) -> None:
        self._http.close()

    def query(self, tokens: Sequence[int]) -> int:
        """Raises Refused."""
        answer = self._ask("query", tokens)
        return 0 if answer is None else _QUERIED.decode(answer).tokens

    def load(self, tokens: Sequence[int], into: Part, seconds: float = 0.0) -> Loaded:
        """At most as many tokens as go at once. Raises Refused."""
        answer = self._ask("load", tokens[: self._tokens_max], {"seconds": seconds}, seconds)
        if answer is None:
            return Loaded(0, len(tokens))
        try:
            head, raw = unpack(memoryview(answer), _LOAD_HEAD)
            first = [group.first_needed(head.tokens) * COLUMN_TOKENS for group in self.layout.groups]
            kv = Kv(self.layout, head.tokens, raw, first)
        except Invalid as problem:
            raise Refused(f"Its answer is not what was asked for: {problem}") from problem
        if head.parts != run_heads(self.layout, head.tokens) or head.tokens > len(tokens):
            raise Refused("Its answer is not what was asked for: it has other groups, shards or tokens")
        for part in kv.parts():
            into(*part)[:] = kv.part(*part)
        return Loaded(head.tokens, len(tokens))

    def store(
        self,
        tokens: Sequence[int],
        verified: int,
        read: Part,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
    ) -> Stored:
        """What follows the longest prefix that is there, in pieces that go at once. Raises Refused."""
        at = verified if rules.no_store else self.query(tokens[:verified])
        if at < verified:
            at = at // COLUMN_TOKENS * COLUMN_TOKENS
        columns = size = failed = 0
        while True:
            end = min(verified, at + self._tokens_max)
            have = [min(end, max(at, one)) for one in first or [0] * len(self.layout.groups)]
            kv = Kv(self.layout, end, None, have)
            asked = list(kv.parts())
            for part in asked:
                kv.part(*part)[:] = read(*part)
            answer = self._send(tokens[:end], kv, have, rules)
            if answer is None:
                failed += sum(shard == 0 for _, shard, _, _ in asked)
                break
            stored = _STORED.decode(answer)
            columns, size, failed = columns + stored.columns, size + stored.bytes, failed + stored.failed
            at = end
            if at == verified:
                break
        return Stored(columns, size, failed)

    def computed(self, tokens: int, seconds: float) -> None:
        self._post("computed", msgspec.json.encode({"tokens": tokens, "seconds": seconds}), JSON)

    def _send(self, tokens: Sequence[int], kv: Kv, first: Sequence[int], rules: Rules) -> bytes | None:
        names = [group.name for group in self.layout.groups]
        firsts = dict(zip(names, first, strict=True))
        header = {"tokens": list(tokens), **self._who, "rules": rules, "first_tokens": firsts}
        return self._post("store", pack(header, kv.raw), OCTETS)

    def _ask(
        self,
        verb: str,
        tokens: Sequence[int],
        more: Mapping[str, object] | None = None,
        seconds: float = 0.0,
    ) -> bytes | None:
        body = {"tokens": list(tokens), **self._who, **(more or {})}
        return self._post(verb, msgspec.json.encode(body), JSON, seconds)

    def _post(self, verb: str, body: bytes, media_type: str, seconds: float = 0.0) -> bytes | None:
        """The answer; None if there is none. `seconds`: how long the daemon may wait for something."""
        timeout = httpx.Timeout(ANSWER_SECONDS_MAX + seconds, connect=CONNECT_SECONDS_MAX)
        headers = {"content-type": media_type}
        try:
            answer = self._http.post(f"/v1/{verb}", content=body, headers=headers, timeout=timeout)
        except httpx.TransportError as error:
            self._lose(f"{type(error).__name__}: {error}")
            return None
        if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._lose(f"it answers {answer.status_code}")
            return None
        if answer.is_error:
            raise Refused(_sentence(answer))
        self.lost_because = None
        return answer.content

    def _lose(self, because: str) -> None:
        log.warning("The driver at %s is lost: %s", self._http.base_url, because)
        self.lost_because = because


def _sentence(answer: httpx.Response) -> str:
    try:
        return f"{answer.status_code}: {answer.json()['detail']}"
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code}: {answer.text[:TEXT_MAX]}"


_QUERIED: Final = msgspec.json.Decoder(Queried)
_STORED: Final = msgspec.json.Decoder(Stored)
_LOAD_HEAD: Final = msgspec.json.Decoder(LoadHead)
