"""The capability that a driver gets for a move, and how an evil driver bends it: over TLS, with its own
certificate."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import httpx

from kvss_agent.security.identity import fingerprint

MOVER: Final = "evil-mover"  # the driver that holds it, with a job of its own
SLOTS: Final = 1
LIFE_SECONDS: Final = 3500  # an hour is the most that an agent takes
REFUSED: Final = frozenset({401, 403, 404})


class Try(NamedTuple):
    what: str
    capability: str
    method: str
    path: str
    told: Any


def shard_of(driver: str) -> str:
    return f"{driver}.full.0"


def wanted(node: str, keys: Mapping[str, str], victim: str, source: str) -> dict[str, dict[str, Any]]:
    """What the authority signs for the attack, by name, as fields of a `Capability`: one good one, and
    some that are over, too long or somebody else's. `keys`: the public keys of both drivers."""
    own = {
        "audience": f"node:{node}",
        "holder": f"driver:{MOVER}",
        "holder_key": fingerprint(keys[MOVER]),
        "shard": shard_of(MOVER),
        "source": source,
        "source_shard": shard_of(MOVER),
        "slots": SLOTS,
        "expires_at": int(time.time()) + LIFE_SECONDS,
    }
    theirs = {
        "holder_key": fingerprint(keys[victim]),
        "shard": shard_of(victim),
        "source_shard": shard_of(victim),
    }
    return {
        "own": own,
        "over": {**own, "expires_at": int(time.time()) - 1},
        "for a year": {**own, "expires_at": int(time.time()) + 365 * 86_400},
        "for another agent": {**own, "audience": "node:ax-other"},
        "another driver's": {**own, **theirs, "holder": f"driver:{victim}"},
        "another key's": {**own, **theirs},
    }


def tries(texts: Mapping[str, str], victim: str, source: str) -> Iterator[Try]:
    """Everything that must not open, given the texts of all capabilities that are wanted."""
    own, own_shard, other_shard = texts["own"], shard_of(MOVER), shard_of(victim)
    move = {"from": source, "shard": own_shard, "as": MOVER, "slots": [0]}
    path = f"/v1/shards/{own_shard}/pull"
    for what, told in (
        ("other slots", {**move, "slots": [SLOTS]}),
        ("columns of another shard", {**move, "shard": other_shard}),
        ("another source", {**move, "from": "tcp:127.0.0.1:9"}),
        ("another driver's name", {**move, "as": victim}),
    ):
        yield Try(what, own, "POST", path, told)
    other = f"/v1/shards/{other_shard}/pull"
    yield Try("into another shard", own, "POST", other, {**move, "shard": other_shard})
    for what in ("over", "for a year", "for another agent"):
        yield Try(f"a capability that is {what}", texts[what], "POST", path, move)
    for what in ("another driver's", "another key's"):
        told = {**move, "shard": other_shard, "as": victim}
        yield Try(f"a capability that is {what}", texts[what], "POST", other, told)
    flipped = own[:-1] + ("A" if own[-1] != "A" else "B")
    yield Try("a signature that is not the authority's", flipped[:-4] + "AAAA", "POST", path, move)
    for method, verb in (
        ("GET", "/v1/observed"),
        ("PUT", "/v1/desired"),
        ("GET", "/v1/pulls"),
        ("POST", "/v1/purge"),
        ("POST", "/v1/purges"),
        ("POST", "/v1/drain"),
        ("GET", f"/v1/shards/{other_shard}"),
    ):
        yield Try(f"{method} {verb}", own, method, verb, {} if method != "GET" else None)


def own_move(texts: Mapping[str, str], source: str) -> Try:
    """What the good capability is for."""
    told = {"from": source, "shard": shard_of(MOVER), "as": MOVER, "slots": [0]}
    return Try("its own move", texts["own"], "POST", f"/v1/shards/{shard_of(MOVER)}/pull", told)


def is_let_in(agent: httpx.Client, one: Try) -> bool:
    shown = {"authorization": f"Bearer {one.capability}"}
    answer = agent.request(one.method, one.path, json=one.told, headers=shown)
    return answer.status_code not in REFUSED
