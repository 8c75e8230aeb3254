"""Redis users of processes that tell numbers: each its own, for its own stream only. No Django.

A process that has joined is known by the token of its control API, which the console was told. The
password of its Redis user follows from that on both sides, so it is handed over by nobody. An address
with the user `own` and without a password stands for it: `rediss://own@redis.example.org:6379/0`.

A brain has two users. What it shares with other brains it writes. Where replicas are it only reads, and
before Redis 7 a user may write whatever keys it may read, if it has a command for it: so the user that
reads endpoints has none (ADR 103).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from telemetry.records import (
    ENDPOINTS,
    ENDPOINTS_BEFORE,
    ENDPOINTS_CHANNEL,
    MAP_STREAM,
    OWN_STREAM,
    RECALL_STREAM,
    ROUTING,
)
from telemetry.topics import kind_of

OWN: Final = "own"
READER: Final = "brain-reader"  # the kind of the user by which a brain reads endpoints
CONSOLE: Final = "console"  # the user that the processes of the console share
SHARED: Final = "shared"  # the user of those that have none of their own, as of earlier versions
# What brains do with the keys that they share
_COUNTING: Final = (
    *("+eval", "+evalsha", "+time", "+get", "+set", "+zadd", "+zrange", "+zremrangebyscore"),
    *("+hget", "+hset", "+expire"),
)
_CONSOLE_KINDS: Final = frozenset({"web", "worker", "beat", "ingest", "rollup", "orchestrator"})


def user_of(url: str) -> str:
    """Who writes by this address, where that user has a stream of its own; else empty."""
    user = unquote(urlsplit(url).username or "")
    return "" if user in ("default", SHARED) else user


def users(topic: str) -> list[str]:
    """Names of the Redis users of a process: the topic, and of a brain its reader."""
    return [topic, reader(topic)] if kind_of(topic) == "brain" else [topic]


def reader(topic: str) -> str:
    """The user by which a brain reads endpoints: `brain-reader:b` of `brain:b`."""
    return f"{READER}:{topic.partition(':')[2]}"


def password(token: str, user: str) -> str:
    """Of a Redis user of a process, from the token of its control API."""
    made = hmac.digest(token.encode(), f"tidegate telemetry 1 {user}".encode(), hashlib.sha256)
    return "tgt_" + base64.urlsafe_b64encode(made).rstrip(b"=").decode()


def own_url(url: str, user: str, token: str) -> str:
    """The address with this user of the process, where it asks for its own; any other as it is."""
    parts = urlsplit(url)
    if parts.username != OWN or parts.password:
        return url
    place = parts.netloc.rpartition("@")[2]
    credentials = f"{quote(user, safe='')}:{password(token, user)}"
    return urlunsplit(parts._replace(netloc=f"{credentials}@{place}"))


def rules(user: str, token: str, database: int = 0) -> list[str]:
    """What a user of a process is and may do, as `ACL SETUSER` wants it. The password itself is not
    among it. `database`: the one that all have in their addresses, and nobody reaches another: what
    is written there is read and trimmed by nobody.

    Every process adds to its own stream. A driver adds its cache map to another one of its own, and
    reads from a third one what brains ask it for. A brain reads all cache maps, asks all drivers, and
    shares what it counts with other brains. Its second user reads endpoints.
    """
    keys, commands, channels = [f"~{OWN_STREAM}{user}"], ["+xadd"], []
    match kind_of(user):
        case "driver":
            keys += [f"~{MAP_STREAM}{user}", f"~{RECALL_STREAM}{user}"]
            commands += ["+xtrim", "+xread"]
        case "brain":
            keys += [f"~{MAP_STREAM}*", f"~{ROUTING}*", f"~{RECALL_STREAM}*"]
            commands += ["+xread", *_COUNTING]
            # As brains of the version before read endpoints: all keys but those of this version
            keys.append(f"~{ENDPOINTS_BEFORE}[^{ENDPOINTS.removeprefix(ENDPOINTS_BEFORE)}]*")
            commands += ["+mget", "+subscribe"]
            channels.append(f"&{ENDPOINTS_CHANNEL}")
        case kind if kind == READER:
            keys, commands = [f"~{ENDPOINTS}*"], ["+mget", "+subscribe"]
            channels.append(f"&{ENDPOINTS_CHANNEL}")
    digest = hashlib.sha256(password(token, user).encode()).hexdigest()
    rights = [*channels, *keys, "-@all", *commands, "+ping"]
    if database:  # a client selects the first one by saying nothing
        rights.append(f"+select|{database}")
    return ["reset", "on", f"#{digest}", "resetchannels", *rights]


def may_tell(writer: str, kind: str, topic: str) -> bool:
    """Whether this user speaks for that process: for itself, or for the console's."""
    return writer == topic or (writer == CONSOLE and kind in _CONSOLE_KINDS)
