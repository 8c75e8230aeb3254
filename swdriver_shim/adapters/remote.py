"""Clients of a driver's daemon, for engines in other processes.

    prefixes = RemotePrefixes("http://127.0.0.1:8420", token, model)  # the `model` of the document
    objects = RemoteObjects("http://127.0.0.1:8420", token)           # for a layout of objects

A daemon that can't be reached is a miss, as a lost agent is, and so is one that can't answer now: it has
no document yet, or too much to do. `lost_because` says why. A refusal that no waiting would change is a
mistake of the caller's configuration and is raised.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from kvss_agent.documents import Invalid
from kvss_agent.http.answers import Budget, Fault, Unanswered
from kvss_agent.http.blocking_exchange import JSON, BlockingExchange
from kvss_agent.security.certificates import Role, process_name
from swdriver_shim.daemon import verbs
from swdriver_shim.daemon.binary import (
    KV_BYTES_MAX,
    OCTETS,
    Kv,
    LoadHead,
    ObjectsHead,
    bytes_of,
    cut,
    run_heads,
)
from swdriver_shim.daemon.verbs import OBJECTS_MAX, Verb
from swdriver_shim.desired import ModelSpec
from swdriver_shim.driver import Loaded, Part, Stored
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.object_store import TooLarge, check
from swdriver_shim.objects import LocalObjects
from swdriver_shim.policy import AS_USUAL, Rules
from swdriver_shim.prefixes import LocalPrefixes
from telemetry.decoder import ANSWER

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 2.0  # for a question and all of its answer: a request of the engine waits
# And for bodies: less than half of what 1 Gbit/s carries. At such a rate computing is mostly faster.
BYTES_PER_SECOND_MIN: Final = 50_000_000
PURGE_SECONDS: Final = 60.0  # that the daemon takes at most until it says how far it is
ANSWER_BYTES_MAX: Final = KV_BYTES_MAX + ANSWER.bytes_max
RETRY_SECONDS: Final = 1.0
# For so long one is not asked that has not answered in time; twice as long each time. Others say at once
# that they can't answer, and asking them costs little.
LATE_SECONDS, LATE_SECONDS_MAX = 5.0, 60.0
# What daemons say as `Retry-After` where an org has too much under way. A `Reply` has no headers.
BUSY_SECONDS: Final = 5.0
# Statuses of a moment. 401: until there is a document, and while an org waits for its new secret, no
# token is known. 409: there is no document yet, or the driver is stopping.
_MISSES: Final = frozenset(
    {
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.CONFLICT,
        HTTPStatus.TOO_MANY_REQUESTS,
    }
)

A = TypeVar("A")
B = TypeVar("B")


class Refused(Exception):
    """A refusal that no waiting changes, as a sentence: another model, too many bytes, no such path."""


class DaemonClient:
    """A daemon, with the token of an org."""

    def __init__(self, url: str, token: str, expected: ExpectedDriver | None = None) -> None:
        """`expected`: the driver whose certificate the daemon has to show, if it has joined a console.
        Raises OSError and ValueError if that can't be used."""
        self.lost_because: str | None = None  # None since the last valid answer
        self._url, self._token, self._expected = url, token, expected
        self._believed = expected.version if expected else None
        self._not_before = 0.0  # it is not asked, so that requests don't wait for it again and again
        self._late_seconds = LATE_SECONDS
        self._leaving = threading.Lock()
        self._daemon = self._exchange()

    def _exchange(self) -> BlockingExchange:
        if self._expected is None:
            return BlockingExchange(self._url)
        return BlockingExchange(self._url, self._expected.context(), self._expected.server_name)

    def close(self) -> None:
        self._daemon.close()

    def _call(
        self,
        verb: Verb[B, A],
        body: B,
        *payload: memoryview,
        seconds: float = 0.0,
        answer_bytes: int = 0,
    ) -> tuple[A, memoryview] | None:
        """The answer and the bytes that follow it; None for a miss, and for a while after one.

        A miss: no answer, one that is not valid, such as a proxy's page, a status of 500 or more, and
        401, 408, 409 and 429, which pass. An error: all other statuses, such as 413 and 422. `seconds`:
        how long the daemon may wait, for tier 2 or for slots to be empty. `answer_bytes`: how many may
        follow the answer. Raises Refused."""
        if time.monotonic() < self._not_before:
            return None
        media_type = OCTETS if verb.sends_bytes else JSON
        content = verb.pack(body, *payload)
        moving = (len(content) + answer_bytes) / BYTES_PER_SECOND_MIN
        budget = Budget(ANSWER_SECONDS + seconds + moving, ANSWER_BYTES_MAX)
        self._follow_authorities()
        try:
            reply = self._daemon.ask(
                "POST", f"/v1/{verb.path}", self._token, budget, content, media_type
            )
        except Unanswered as error:
            if error.fault is Fault.LATE:
                self._leave()
            self._lose(str(error), RETRY_SECONDS)
            return None
        self._late_seconds = LATE_SECONDS
        if reply.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR or reply.status_code in _MISSES:
            is_busy = reply.status_code == HTTPStatus.TOO_MANY_REQUESTS
            self._lose(reply.refusal, BUSY_SECONDS if is_busy else RETRY_SECONDS)
            return None
        if not reply.is_success:
            raise Refused(reply.refusal)
        try:
            answer = verb.unpack_answer(memoryview(reply.content))
        except Invalid as error:
            self._lose(f"its answer is not valid: {error}")
            return None
        self.lost_because = None
        return answer

    def _follow_authorities(self) -> None:
        """Reload authorities that have changed. They change while the former ones are still valid, so
        that no request fails. Requests in progress keep their client."""
        if self._expected is None:
            return
        with contextlib.suppress(OSError):  # without the file the former authorities stay
            version = self._expected.version
            if version != self._believed:
                before, self._daemon, self._believed = self._daemon, self._exchange(), version
                before.close()

    def _leave(self) -> None:
        """Leave alone a daemon that has not answered in time, longer each time."""
        with self._leaving:
            if time.monotonic() >= self._not_before:  # otherwise another thread has found out as well
                self._not_before = time.monotonic() + self._late_seconds
                self._late_seconds = min(2 * self._late_seconds, LATE_SECONDS_MAX)

    def _lose(self, because: str, pause_seconds: float = 0.0) -> None:
        log.warning("The driver at %s can't be used: %s", self._url, because)
        self.lost_because = because
        self._not_before = max(self._not_before, time.monotonic() + pause_seconds)


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
        self._adapter = adapter
        self._digest = self.namespace.digest().hex()
        self._bytes_max = KV_BYTES_MAX  # at once

    def query(self, tokens: Sequence[int]) -> int:
        """Raises Refused."""
        body = verbs.PromptBody(tokens=list(tokens), adapter=self._adapter, namespace=self._digest)
        found = self._call(verbs.QUERY, body)
        return 0 if found is None else max(0, min(found[0].tokens, len(tokens)))

    def load(self, tokens: Sequence[int], into: Part, seconds: float = 0.0, request: str = "") -> Loaded:
        """At most as many tokens as go at once. Raises Refused."""
        asked = list(tokens[: self._end(0, len(tokens), None)])
        body = verbs.LoadBody(
            tokens=asked,
            adapter=self._adapter,
            namespace=self._digest,
            seconds=seconds,
            request=request,
        )
        most = bytes_of(self.layout, len(asked))
        found = self._call(verbs.LOAD, body, seconds=seconds, answer_bytes=most)
        if found is None:
            return Loaded(0, len(tokens))
        try:
            kv = self._kv(len(asked), *found)
        except Invalid as problem:
            self._lose(f"its answer is not what was asked for: {problem}")
            return Loaded(0, len(tokens))
        for part in kv.parts():
            into(*part)[:] = kv.part(*part)
        return Loaded(found[0].tokens, len(tokens))

    def _kv(self, asked: int, head: LoadHead, raw: memoryview) -> Kv:
        """The KV of a load's answer. Raises Invalid if it is not of so many tokens at most."""
        count = head.tokens
        if not 0 <= count <= asked or head.parts != run_heads(self.layout, count):
            raise Invalid("It has other groups, shards or tokens.")
        first = [group.first_needed(count) * COLUMN_TOKENS for group in self.layout.groups]
        return Kv(self.layout, count, raw, first, [count] if count else [])

    def store(
        self,
        tokens: Sequence[int],
        verified: int,
        read: Part,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        request: str = "",
        states: Collection[int] = (),
    ) -> Stored:
        """Store what follows the longest stored prefix, in pieces that go at once. Raises Refused."""
        at = verified if rules.no_store else self.query(tokens[:verified])
        if at < verified:
            at = at // COLUMN_TOKENS * COLUMN_TOKENS
        total, whole = Stored(0, 0, 0), list(tokens)
        while True:
            end = self._end(at, verified, states)
            have = [min(end, max(at, one)) for one in first or [0] * len(self.layout.groups)]
            made = sorted(one for one in states if at < one <= end)
            kv = Kv(self.layout, end, None, have, made)
            parts = list(kv.parts())
            for part in parts:
                kv.part(*part)[:] = read(*part)
            body = verbs.StoreBody(
                tokens=whole,
                verified=end,
                adapter=self._adapter,
                namespace=self._digest,
                first_tokens={
                    group.name: start for group, start in zip(self.layout.groups, have, strict=True)
                },
                states=made,
                rules=rules,
                request=request,
            )
            answer = self._call(verbs.STORE, body, kv.raw)
            if answer is None:
                return total + Stored(0, 0, sum(shard == 0 for _, shard, _, _ in parts))
            total += answer[0]
            at = end
            if at == verified:
                return total

    def _end(self, at: int, verified: int, states: Collection[int] | None) -> int:
        """How far the KV from this token on goes at once, with these states on the way; None for one.
        Raises Refused if that is nowhere."""

        def size(end: int) -> int:
            count = 1 if states is None else sum(at < one <= end for one in states)
            return (end - at) * self.layout.token_bytes + count * self.layout.state_bytes

        ends = range(at, verified + COLUMN_TOKENS, COLUMN_TOKENS)
        fit = bisect_right(ends, self._bytes_max, lo=1, key=size)
        if fit == 1 and at < verified:
            raise Refused(f"A column and its state have more than {self._bytes_max} bytes.")
        return min(ends[fit - 1], verified)

    def computed(self, tokens: int, seconds: float) -> None:
        """Raises nothing: a number that is not taken is no reason to end a prefill."""
        try:
            self._call(verbs.COMPUTED, verbs.ComputedBody(tokens=tokens, seconds=seconds))
        except Refused as error:
            self._lose(str(error))


class RemoteObjects(DaemonClient):
    """The objects of an org, see `LocalObjects`. May be used from any thread.

    An engine can't handle refusals while it serves, so they are misses as well, and `lost_because` and
    the log say why.
    """

    def __init__(self, url: str, token: str, expected: ExpectedDriver | None = None) -> None:
        super().__init__(url, token, expected)
        self._value_bytes_max: int | None = None
        self._was_unknown = False  # the limit, when somebody asked for it
        self._said_too_large = False

    @property
    def value_bytes_max(self) -> int:
        """The daemon's limit; until it has answered, the limit of one request."""
        if self._value_bytes_max is None:
            self.exists([])
        if self._value_bytes_max is None:
            self._was_unknown = True
            return KV_BYTES_MAX
        return self._value_bytes_max

    def exists(self, keys: Sequence[bytes], seconds: float = 0.0) -> list[bool]:
        found: list[bool] = []
        for some in _split(keys, OBJECTS_MAX) or [[]]:
            body = verbs.FindBody(keys=_hex(some), seconds=seconds)
            answer = self._try(verbs.OBJECTS_EXIST, body, seconds=seconds)
            if answer is None or not self._is_for(some, answer[0].exists):
                return [*found, *[False] * (len(keys) - len(found))]
            self._value_bytes_max = answer[0].value_bytes_max
            found += answer[0].exists
        return found

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], seconds: float = 0.0
    ) -> list[int | None]:
        lengths: list[int | None] = []
        until = _latest(into, seconds)
        for some in _split(keys, self._values_at_once):
            if self._is_late(until):
                return [*lengths, *[None] * (len(keys) - len(lengths))]
            body = verbs.FindBody(keys=_hex(some), seconds=seconds)
            most = sum(map(len, into[len(lengths) : len(lengths) + len(some)]))
            answer = self._try(verbs.GET_OBJECTS, body, seconds=seconds, answer_bytes=most)
            values = None if answer is None else self._values(*answer)
            if values is None or not self._is_for(some, values):
                return [*lengths, *[None] * (len(keys) - len(lengths))]
            for value in values:
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
        """Raises TooLarge and ValueError, see `object_store.check`. To an engine that started before the
        daemon nobody could tell the limit: what is too large is a miss then."""
        try:
            check(values, self.value_bytes_max)
        except TooLarge as error:
            if not self._was_unknown:
                raise
            self._miss_too_large(str(error))
            return [False] * len(keys)
        stored: list[bool] = []
        until = _latest(values)
        for some in _split(keys, self._values_at_once):
            if self._is_late(until):
                return [*stored, *[False] * (len(keys) - len(stored))]
            mine = values[len(stored) : len(stored) + len(some)]
            body = verbs.PutBody(keys=_hex(some), lengths=[len(value) for value in mine], rules=rules)
            answer = self._try(verbs.PUT_OBJECTS, body, *mine)
            if answer is None or not self._is_for(some, answer[0].stored):
                return [*stored, *[False] * (len(keys) - len(stored))]
            stored += answer[0].stored
        return stored

    def remove(self, keys: Sequence[bytes]) -> bool:
        bodies = [verbs.ObjectsBody(keys=_hex(some)) for some in _split(keys, OBJECTS_MAX)]
        answers = [self._try(verbs.REMOVE_OBJECTS, body, seconds=PURGE_SECONDS) for body in bodies]
        return all(answer is not None and answer[0].done for answer in answers)

    def clear(self) -> bool:
        answer = self._try(verbs.PURGE, verbs.PurgeBody(adapter=""), seconds=PURGE_SECONDS)
        return answer is not None and answer[0].done

    def _is_late(self, until: float) -> bool:
        """Whether the next part would begin after this: the others are misses then."""
        if is_late := time.monotonic() > until:
            self._lose("it has not answered in time for all values")
        return is_late

    def _miss_too_large(self, because: str) -> None:
        """Log it once: all of the engine's values may be of this size."""
        self.lost_because = because
        if not self._said_too_large:
            self._said_too_large = True
            log.warning("The driver at %s can't store what this engine puts: %s", self._url, because)

    @property
    def _values_at_once(self) -> int:
        return max(1, min(OBJECTS_MAX, KV_BYTES_MAX // self.value_bytes_max))

    def _values(self, head: ObjectsHead, raw: memoryview) -> list[memoryview | None] | None:
        """The values of an answer, each None where it is missed; None if lengths and bytes differ."""
        sizes = [length or 0 for length in head.lengths]
        if sum(sizes) != len(raw) or any(length is not None and length <= 0 for length in head.lengths):
            self._lose(f"its answer is not valid: the lengths do not add up to {len(raw)} bytes")
            return None
        pairs = zip(cut(raw, sizes), head.lengths, strict=True)
        return [None if length is None else value for value, length in pairs]

    def _is_for(self, keys: Sequence[bytes], found: Sequence[object]) -> bool:
        if len(found) != len(keys):
            self._lose(f"its answer is not valid: {len(found)} results for {len(keys)} keys")
        return len(found) == len(keys)

    def _try(
        self,
        verb: Verb[B, A],
        body: B,
        *payload: memoryview,
        seconds: float = 0.0,
        answer_bytes: int = 0,
    ) -> tuple[A, memoryview] | None:
        """None also where the daemon refuses."""
        try:
            return self._call(verb, body, *payload, seconds=seconds, answer_bytes=answer_bytes)
        except Refused as error:
            self._lose(str(error))
            return None


Prefixes: TypeAlias = LocalPrefixes | RemotePrefixes
Objects: TypeAlias = LocalObjects | RemoteObjects


def _latest(values: Sequence[memoryview], seconds: float = 0.0) -> float:
    """Until when a request of the engine waits for these values, in however many parts they go."""
    moving = sum(map(len, values)) / BYTES_PER_SECOND_MIN
    return time.monotonic() + ANSWER_SECONDS + seconds + moving


def _hex(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _split(keys: Sequence[bytes], most: int) -> list[Sequence[bytes]]:
    return [keys[at : at + most] for at in range(0, len(keys), most)]


@dataclass(frozen=True, slots=True)
class ExpectedDriver:
    """The driver that has to answer over TLS, verified by its name and by its console's authorities.

    The daemon stores those as `authorities.pem` in its state directory, and replaces the file when they
    change.
    """

    authorities: Path
    driver: str

    @property
    def server_name(self) -> str:
        """Raises ValueError for a name that makes no host name."""
        found = process_name(Role.DRIVER, self.driver)
        if found is None:
            raise ValueError(f"the driver's name {self.driver} makes no host name")
        return found

    @property
    def version(self) -> tuple[int, int]:
        """The version of the file: changes when it is replaced. Raises OSError."""
        found = self.authorities.stat()
        return found.st_ino, found.st_mtime_ns

    def context(self) -> ssl.SSLContext:
        """Raises OSError, also for a file that holds no certificates."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.load_verify_locations(self.authorities)
        return made
