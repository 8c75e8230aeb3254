"""A driver's daemon, asked over HTTP by an engine in another process.

    prefixes = Remote("http://127.0.0.1:8420", token, model)    # the `model` of the daemon's document
    objects = RemoteObjects("http://127.0.0.1:8420", token)     # where its layout is one of objects

A daemon that can't be reached is a miss, as an agent that is lost, and `lost_because` says why. What it
refuses is somebody's mistake and is raised.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from kvss_agent.http.api import Invalid
from kvss_agent.http.blocking_exchange import JSON, BlockingExchange
from kvss_agent.http.exchange import Budget, Unanswered
from swdriver_shim.adapters.expected_driver import ExpectedDriver
from swdriver_shim.daemon.binary import (
    KV_BYTES_MAX,
    OCTETS,
    Kv,
    LoadHead,
    ObjectsHead,
    cut,
    pack,
    run_heads,
    unpack,
)
from swdriver_shim.desired import ModelSpec
from swdriver_shim.driver import Loaded, Part, Stored
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.object_store import check
from swdriver_shim.policy import AS_USUAL, Rules
from telemetry.decoder import ANSWER, Malformed, decode

log = logging.getLogger(__name__)

ANSWER_SECONDS_MAX: Final = 60.0  # for a question and all of its answer
ANSWER_BYTES_MAX: Final = KV_BYTES_MAX + ANSWER.bytes_max
OBJECTS_AT_ONCE: Final = 4096
RETRY_SECONDS: Final = 1.0

T = TypeVar("T")


class Refused(Exception):
    """What the daemon says against it, in a sentence."""


class Queried(Struct, frozen=True):
    tokens: int


class ExistsAnswer(Struct, frozen=True):
    exists: list[bool]
    value_bytes_max: int


class KeptAnswer(Struct, frozen=True):
    kept: list[bool]


class RemovedAnswer(Struct, frozen=True):
    done: bool


class DaemonClient:
    """A daemon, asked in the name of the org that a token belongs to."""

    def __init__(self, url: str, token: str, expected: ExpectedDriver | None = None) -> None:
        """`expected`: whose certificate it has to show, where it is joined to a console. Raises OSError
        and ValueError where that can't be used."""
        self.lost_because: str | None = None  # since the last answer
        self._url, self._token, self._expected = url, token, expected
        self._believed = expected.version if expected else None
        self._daemon = self._exchange()

    def _exchange(self) -> BlockingExchange:
        if self._expected is None:
            return BlockingExchange(self._url)
        return BlockingExchange(self._url, self._expected.context(), self._expected.server_name)

    def close(self) -> None:
        self._daemon.close()

    def _post(self, verb: str, body: bytes, media_type: str, seconds: float = 0.0) -> bytes | None:
        """The answer; None if there is none. `seconds`: how long the daemon may wait for something.
        Raises Refused."""
        budget = Budget(ANSWER_SECONDS_MAX + seconds, ANSWER_BYTES_MAX)
        self._follow_authorities()
        try:
            reply = self._daemon.ask("POST", f"/v1/{verb}", self._token, budget, body, media_type)
        except Unanswered as error:
            self._lose(str(error))
            return None
        if reply.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._lose(reply.refusal)
            return None
        if not reply.is_success:
            raise Refused(reply.refusal)
        self.lost_because = None
        return reply.content

    def _follow_authorities(self) -> None:
        """They are replaced while the former ones still hold, so no request fails for it. Requests that
        are under way keep their client."""
        if self._expected is None:
            return
        with contextlib.suppress(OSError):  # the file is gone: as before, then
            version = self._expected.version
            if version != self._believed:
                before, self._daemon, self._believed = self._daemon, self._exchange(), version
                before.close()

    def _read(self, answer: bytes | None, decoder: msgspec.json.Decoder[T]) -> T | None:
        """What it says; None if it says nothing, or what it says is none, as a proxy's page is."""
        if answer is None:
            return None
        try:
            return decode(answer, decoder)
        except Malformed as error:
            self._lose(f"its answer is not valid: {error}")
            return None

    def _lose(self, because: str) -> None:
        log.warning("The driver at %s is lost: %s", self._url, because)
        self.lost_because = because


class RemotePrefixes(DaemonClient):
    """The prefixes of an org. May be used from any thread."""

    def __init__(
        self,
        url: str,
        token: str,
        model: ModelSpec,
        *,
        adapter: str = "",
        expected: ExpectedDriver | None = None,
    ) -> None:
        super().__init__(url, token, expected)
        self.layout = model.shape()
        self.namespace = model.namespace(adapter)
        self._who = {"adapter": adapter, "namespace": self.namespace.digest().hex()}
        each = sum(sum(group.bytes_per_token) for group in self.layout.groups)
        self._tokens_max = KV_BYTES_MAX // each // COLUMN_TOKENS * COLUMN_TOKENS  # at once

    def query(self, tokens: Sequence[int]) -> int:
        """Raises Refused."""
        found = self._read(self._ask("query", tokens), _QUERIED)
        return 0 if found is None else max(0, min(found.tokens, len(tokens)))

    def load(self, tokens: Sequence[int], into: Part, seconds: float = 0.0, request: str = "") -> Loaded:
        """At most as many tokens as go at once. Raises Refused."""
        more = {"seconds": seconds, **_named(request)}
        answer = self._ask("load", tokens[: self._tokens_max], more, seconds)
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
        request: str = "",
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
            stored = self._read(self._send(tokens[:end], kv, have, rules, request), _STORED)
            if stored is None:
                failed += sum(shard == 0 for _, shard, _, _ in asked)
                break
            columns, size, failed = columns + stored.columns, size + stored.bytes, failed + stored.failed
            at = end
            if at == verified:
                break
        return Stored(columns, size, failed)

    def computed(self, tokens: int, seconds: float) -> None:
        self._post("computed", msgspec.json.encode({"tokens": tokens, "seconds": seconds}), JSON)

    def _send(
        self, tokens: Sequence[int], kv: Kv, first: Sequence[int], rules: Rules, request: str
    ) -> bytes | None:
        names = [group.name for group in self.layout.groups]
        firsts = dict(zip(names, first, strict=True))
        header = {"tokens": list(tokens), **self._who, "rules": rules, "first_tokens": firsts}
        return self._post("store", pack(header | _named(request), kv.raw), OCTETS)

    def _ask(
        self,
        verb: str,
        tokens: Sequence[int],
        more: Mapping[str, object] | None = None,
        seconds: float = 0.0,
    ) -> bytes | None:
        body = {"tokens": list(tokens), **self._who, **(more or {})}
        return self._post(verb, msgspec.json.encode(body), JSON, seconds)


def _named(request: str) -> dict[str, str]:
    """Nothing without a name: a daemon of the version before knows no such field."""
    return {"request": request} if request else {}


class RemoteObjects(DaemonClient):
    """The objects of an org: `objects.Objects`. May be used from any thread.

    An engine that stores objects has nobody to tell of a mistake while it serves: what the daemon
    refuses is a miss as well, and `lost_because` and the log say why. A daemon that is lost is left
    alone for a while, so that nobody waits for it again and again. An answer that is none, such as a
    proxy's page, is a miss, too.
    """

    def __init__(self, url: str, token: str, expected: ExpectedDriver | None = None) -> None:
        super().__init__(url, token, expected)
        self._value_bytes_max: int | None = None
        self._not_before = 0.0

    @property
    def value_bytes_max(self) -> int:
        """As the daemon says; as much as can go at once while it has not said it."""
        if self._value_bytes_max is None:
            self.exists([])
        return self._value_bytes_max or KV_BYTES_MAX

    def exists(self, keys: Sequence[bytes], seconds: float = 0.0) -> list[bool]:
        found: list[bool] = []
        for some in _split(keys, OBJECTS_AT_ONCE) or [[]]:
            told = self._ask("exists", some, _reading(_EXISTS), seconds)
            if told is None or not self._is_of(some, told.exists):
                return [*found, *[False] * (len(keys) - len(found))]
            self._value_bytes_max = told.value_bytes_max
            found += told.exists
        return found

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], seconds: float = 0.0
    ) -> list[int | None]:
        most = max(1, min(OBJECTS_AT_ONCE, KV_BYTES_MAX // self.value_bytes_max))
        lengths: list[int | None] = []
        for some in _split(keys, most):
            found = self._ask("get", some, _values, seconds)
            if found is None or not self._is_of(some, found):
                return [*lengths, *[None] * (len(keys) - len(lengths))]
            for value in found:
                place = into[len(lengths)]
                if value is not None and len(value) <= len(place):
                    place[: len(value)] = value
                    lengths.append(len(value))
                else:
                    lengths.append(None)
        return lengths

    def put(
        self, keys: Sequence[bytes], values: Sequence[memoryview], rules: Rules = AS_USUAL
    ) -> list[bool]:
        check(values, self.value_bytes_max)
        kept: list[bool] = []
        most = max(1, min(OBJECTS_AT_ONCE, KV_BYTES_MAX // self.value_bytes_max))
        for some in _split(keys, most):
            mine = values[len(kept) : len(kept) + len(some)]
            lengths = [len(value) for value in mine]
            head = {"keys": _hex(some), "lengths": lengths, "rules": rules}
            told = self._try("objects/put", pack(head, *mine), OCTETS, _reading(_KEPT))
            if told is None or not self._is_of(some, told.kept):
                return [*kept, *[False] * (len(keys) - len(kept))]
            kept += told.kept
        return kept

    def remove(self, keys: Sequence[bytes]) -> bool:
        parts = _split(keys, OBJECTS_AT_ONCE)
        answers = [self._ask("remove", some, _reading(_REMOVED)) for some in parts]
        return all(answer is not None and answer.done for answer in answers)

    def clear(self) -> bool:
        body = msgspec.json.encode({"adapter": ""})
        answer = self._try("purge", body, JSON, _reading(_REMOVED))
        return answer is not None and answer.done

    def _is_of(self, keys: Sequence[bytes], found: Sequence[object]) -> bool:
        if len(found) != len(keys):
            self._lose(f"it answers for {len(found)} keys where {len(keys)} were asked for")
        return len(found) == len(keys)

    def _ask(
        self,
        verb: str,
        keys: Sequence[bytes],
        read: Callable[[bytes], T],
        seconds: float | None = None,
    ) -> T | None:
        body = {"keys": _hex(keys), **({} if seconds is None else {"seconds": seconds})}
        return self._try(f"objects/{verb}", msgspec.json.encode(body), JSON, read, seconds or 0.0)

    def _try(
        self,
        verb: str,
        body: bytes,
        media_type: str,
        read: Callable[[bytes], T],
        seconds: float = 0.0,
    ) -> T | None:
        if time.monotonic() < self._not_before:
            return None
        try:
            answer = self._post(verb, body, media_type, seconds)
            if answer is not None:
                return read(answer)
        except (Refused, Invalid, Malformed) as error:
            self._lose(str(error))
            return None
        self._not_before = time.monotonic() + RETRY_SECONDS
        return None


def _values(answer: bytes) -> list[memoryview | None]:
    """What was got, None for what is missed. Raises Invalid."""
    head, raw = unpack(memoryview(answer), _OBJECTS_HEAD)
    sizes = [length or 0 for length in head.lengths]
    if sum(sizes) != len(raw) or any(length is not None and length <= 0 for length in head.lengths):
        raise Invalid(f"The values have other lengths than is said: {len(raw)} bytes.")
    pairs = zip(cut(raw, sizes), head.lengths, strict=True)
    return [None if length is None else value for value, length in pairs]


def _hex(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _split(keys: Sequence[bytes], most: int) -> list[Sequence[bytes]]:
    return [keys[at : at + most] for at in range(0, len(keys), most)]


def _reading(decoder: msgspec.json.Decoder[T]) -> Callable[[bytes], T]:
    return lambda answer: decode(answer, decoder)


_QUERIED: Final = msgspec.json.Decoder(Queried)
_STORED: Final = msgspec.json.Decoder(Stored)
_EXISTS: Final = msgspec.json.Decoder(ExistsAnswer)
_KEPT: Final = msgspec.json.Decoder(KeptAnswer)
_REMOVED: Final = msgspec.json.Decoder(RemovedAnswer)
_OBJECTS_HEAD: Final = msgspec.json.Decoder(ObjectsHead)
_LOAD_HEAD: Final = msgspec.json.Decoder(LoadHead)
