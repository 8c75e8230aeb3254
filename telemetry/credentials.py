"""Redis users of processes that tell numbers: each its own, for its own stream only. No Django.

A process that has joined is known by the token of its control API, which the console was told. The
password of its Redis user follows from that on both sides, so it is handed over by nobody. An address
with the user `own` and without a password stands for it: `rediss://own@redis.example.org:6379/0`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from telemetry.records import (
    ENDPOINTS,
    ENDPOINTS_CHANNEL,
    MAP_STREAM,
    OWN_STREAM,
    RECALL_STREAM,
    ROUTING,
)
from telemetry.topics import kind_of

OWN: Final = "own"
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


def password(token: str, topic: str) -> str:
    """Of the Redis user that is called as the topic, from the token of its control API."""
    made = hmac.digest(token.encode(), f"tidegate telemetry 1 {topic}".encode(), hashlib.sha256)
    return "tgt_" + base64.urlsafe_b64encode(made).rstrip(b"=").decode()


def own_url(url: str, topic: str, token: str) -> str:
    """The address with the process' own user, where it asks for that; any other as it is."""
    parts = urlsplit(url)
    if parts.username != OWN or parts.password:
        return url
    place = parts.netloc.rpartition("@")[2]
    user = f"{quote(topic, safe='')}:{password(token, topic)}"
    return urlunsplit(parts._replace(netloc=f"{user}@{place}"))


def rules(topic: str, token: str) -> list[str]:
    """What its user is and may do, as `ACL SETUSER` wants it. The password itself is not among it.

    Every process adds to its own stream. A driver adds its cache map to another one of its own, and
    reads from a third one what brains ask it for. A brain reads all cache maps and endpoints, asks all
    drivers, and shares what it counts with other brains.
    """
    keys, commands, channels = [f"~{OWN_STREAM}{topic}"], ["+xadd"], []
    match kind_of(topic):
        case "driver":
            keys += [f"~{MAP_STREAM}{topic}", f"~{RECALL_STREAM}{topic}"]
            commands += ["+xtrim", "+xread"]
        case "brain":
            keys += [f"~{MAP_STREAM}*", f"~{ROUTING}*", f"~{RECALL_STREAM}*", f"~{ENDPOINTS}*"]
            commands += ["+xread", "+mget", "+subscribe", *_COUNTING]
            channels.append(f"&{ENDPOINTS_CHANNEL}")
    digest = hashlib.sha256(password(token, topic).encode()).hexdigest()
    rights = [*channels, *keys, "-@all", *commands, "+ping"]
    return ["reset", "on", f"#{digest}", "resetchannels", *rights]


def may_tell(writer: str, kind: str, topic: str) -> bool:
    """Whether this user speaks for that process: for itself, or for the console's."""
    return writer == topic or (writer == CONSOLE and kind in _CONSOLE_KINDS)
