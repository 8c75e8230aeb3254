"""Where replicas are, written to Redis for brains: at each change, and every 30 s.

    tidegate:endpoints::<model>   {at, version, endpoints: [{replica, url, state, since, instance}]}
    tidegate:endpoints:<model>    the same, for brains of the version before
    tidegate:endpoints            a channel: the models whose endpoints have changed

A key that nobody writes again is gone after 90 s. Whoever leads next rebuilds it from the cluster. A
version is of the time at which it was decided, by who led then: an older one never replaces a newer one,
whoever wakes up with it. One that is of the future counts for nothing, for it would stand in the way of
all that follow.

Brains of the version before can write what they read. So that key is never read here, and is written
with whatever is in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import redis

from console.workloads.leader.world import Endpoint, Published
from telemetry.decoder import Malformed, decode
from telemetry.records import ENDPOINTS, ENDPOINTS_BEFORE, ENDPOINTS_CHANNEL, ENDPOINTS_SECONDS
from telemetry.redis_address import parse
from telemetry.redis_clients import client

ANSWER_SECONDS: Final = 2.0
REFRESH_SECONDS: Final = 30.0
KEYS_AT_ONCE: Final = 100
FUTURE_SECONDS_MAX: Final = 86_400.0  # so far clocks may differ
_IN_A_SCRIPT: Final = "user executing the script can't"  # how Redis 6.2 says so there
_SCRIPT: Final = """
local known = redis.call('GET', KEYS[1])
if known then
  local there = tonumber(string.match(known, '"version":(%d+)'))
  if there and there >= tonumber(ARGV[2]) and there <= tonumber(ARGV[3]) then return 0 end
end
for _, key in ipairs(KEYS) do redis.call('SET', key, ARGV[1], 'EX', ARGV[4]) end
if ARGV[5] ~= '' then redis.call('PUBLISH', ARGV[5], ARGV[6]) end
return 1
"""


class Written(msgspec.Struct, frozen=True):
    """One endpoint, as it is in Redis. `since`: brains have been told so since then."""

    replica: str
    url: str
    state: str
    since: float
    instance: str


class Document(msgspec.Struct, frozen=True):
    version: int
    at: float
    endpoints: tuple[Written, ...] = ()


class EndpointWriter:
    """What brains were told, and telling them. Used by the leader only."""

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self.is_connected = False
        self.refusal = ""  # a sentence, while Redis is there and lets us not do it
        self._user = parse(url).user or "default"
        self._clock = clock
        self._redis = client(url, answer_seconds=ANSWER_SECONDS)
        self._known: dict[str, Document] = {}
        self._away_at = 0.0  # since when it may have lost what was written

    def close(self) -> None:
        self._redis.close()

    def read(self, models: Sequence[str]) -> None:
        """What the leader before has written; what was known of these models counts no more. Raises
        RedisError."""
        for model in models:
            self._known.pop(model, None)
        with self._noting("PING"):
            self._redis.ping()
        for start in range(0, len(models), KEYS_AT_ONCE):
            some = models[start : start + KEYS_AT_ONCE]
            with self._noting(f"MGET of {ENDPOINTS}*"):
                found: Any = self._redis.mget([ENDPOINTS + model for model in some])
            for model, raw in zip(some, found, strict=True):
                with contextlib.suppress(Malformed):  # it is written anew
                    if raw is not None:
                        self._known[model] = decode(raw, Document)

    def published(self, model: str) -> Mapping[str, Published]:
        """What brains were told of a model's replicas, by their names."""
        known = self._known.get(model)
        return {
            one.replica: Published(
                instance=one.instance, is_draining=one.state == "draining", at=one.since
            )
            for one in (known.endpoints if known else ())
        }

    def write(
        self, model: str, endpoints: Iterable[tuple[str, Endpoint]] | None, decided_at: float
    ) -> bool:
        """Tell brains of all endpoints of a model, by the names of replicas, if they do not know. None:
        those that they were told last, so that these live on. `decided_at`: by the same clock, a time
        before it was last known that we lead. Returns whether that was news. Raises RedisError."""
        now, known = self._clock(), self._known.get(model)
        if endpoints is None and known is None:
            self.read([model])  # Redis may have been away when it was read
            known = self._known.get(model)
            if known is None:
                return False
        before = {one.replica: one for one in known.endpoints} if known else {}
        if endpoints is None:
            made = tuple(before.values())
        else:
            made = tuple(_written(name, one, before.get(name), now) for name, one in endpoints)
        is_new = known is None or known.endpoints != made
        is_old = (
            known is None
            or not 0 <= now - known.at < REFRESH_SECONDS  # a clock that is ahead says nothing of its age
            or known.at <= self._away_at
        )
        if is_new or is_old:
            newest = _version(now + FUTURE_SECONDS_MAX)
            after = known.version + 1 if known and known.version < newest else 0
            document = Document(max(_version(decided_at), after), now, made)
            self._put(model, document, newest, is_new=is_new)
        return is_new

    def forget(self, model: str) -> None:
        """The model is served no more. Raises RedisError."""
        self._known.pop(model, None)
        with self._noting(f"DEL of {ENDPOINTS}*, and PUBLISH to {ENDPOINTS_CHANNEL}"):
            self._redis.delete(*_keys(model))
            self._redis.publish(ENDPOINTS_CHANNEL, model)

    def _put(self, model: str, document: Document, newest: int, *, is_new: bool) -> None:
        raw = msgspec.json.encode(document)
        channel = ENDPOINTS_CHANNEL if is_new else ""
        keys = _keys(model)
        told = (raw, document.version, newest, ENDPOINTS_SECONDS, channel, model)
        with self._noting(
            f"EVAL with GET and SET of {ENDPOINTS_BEFORE}*, and PUBLISH to {ENDPOINTS_CHANNEL}"
        ):
            is_ours = self._redis.eval(_SCRIPT, len(keys), *keys, *told)
        if is_ours:
            self._known[model] = document
        else:
            self.read([model])  # somebody has written a newer one: the next is newer than that

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Note whether Redis does this."""
        try:
            yield
        except redis.RedisError as error:
            self.is_connected = False
            self.refusal = self._refused(what, error)
            self._away_at = self._clock()
            raise
        self.is_connected, self.refusal = True, ""

    def _refused(self, what: str, error: redis.RedisError) -> str:
        """A sentence, if we may not do this; else Redis is away, or something is wrong with it."""
        is_refused = isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError)
        if not is_refused and _IN_A_SCRIPT not in str(error):
            return ""
        return (
            f"Redis refuses {what} to the user {self._user}: {str(error)[:200]}. "
            "TIDEGATE_ENDPOINTS_URL needs the user `leader` of deploy/redis/telemetry.acl; brains go on "
            "with the endpoints that they know."
        )


def _version(at: float) -> int:
    return int(at * 1000)


def _keys(model: str) -> list[str]:
    """The key that brains read, and that of brains of the version before; unless there it would be the
    key of another model."""
    before = ENDPOINTS_BEFORE + model
    return [ENDPOINTS + model, *([] if before.startswith(ENDPOINTS) else [before])]


def _written(replica: str, of: Endpoint, before: Written | None, now: float) -> Written:
    state = "draining" if of.is_draining else "ready"
    is_same = before is not None and (before.instance, before.url, before.state) == (
        of.instance,
        of.url,
        state,
    )
    since = before.since if before is not None and is_same else now
    return Written(replica, of.url, state, since, of.instance)
