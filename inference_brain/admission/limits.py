"""Limits of orgs: requests and tokens in a minute, and requests at once, over all brains. Pure.

A limit per minute holds for every 60 seconds, not only for those of a clock. Brains share what orgs
have used in a server of theirs (`exchange.py`). It grants each brain some of what is left, which counts
as used until it is returned, so that brains together never exceed a limit while the server answers. Near
a limit grants are for single requests.

While the server does not answer, a brain goes on with what it knows: an org has an equal part of its
limit at each brain, or as large a part as that brain had of its requests. So all brains together may
then admit up to twice the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import add, sub
from typing import Final, NamedTuple

from inference_brain.admission.ticket import Reason, Rejected
from inference_brain.admission.window import WINDOW_SECONDS, Window
from inference_brain.desired import Limits

FRESH_SECONDS: Final = 0.5  # after which what the others do counts as unknown
ACTIVE_SECONDS: Final = 10  # since its last request: an org keeps a small grant
KEPT_SECONDS: Final = 2 * WINDOW_SECONDS
AHEAD_SECONDS: Final = 0.5  # for which grants should last
TOLD_SECONDS: Final = 1.0  # after which the server is told again of what it grants
REFUSED_SECONDS: Final = 0.1  # for which an answer of the server holds
SECONDS_UNTIL_ONE_ENDS: Final = 1.0  # that a request at once is told to wait


class Amounts(NamedTuple):
    """One number for each limit: requests and tokens in a minute, requests at once."""

    requests: float = 0
    tokens: float = 0
    running: float = 0


NOTHING: Final = Amounts()


class Grant(NamedTuple):
    """What the server says of an org: what this brain may use, what all brains have used in the window,
    how many requests others have running, and seconds until there is room for what was needed."""

    may: Amounts
    used: tuple[float, float]
    running_elsewhere: float
    waits: tuple[float, float]


class Use(NamedTuple):
    """One request that has been counted, for when it is settled. `is_limited`: its org had limits."""

    org: str
    second: int
    tokens: int
    is_limited: bool = True


class Asked(Enum):
    """Whether the server was asked for one request, and has answered in time."""

    NOT_YET = auto()
    ANSWERED = auto()
    IN_VAIN = auto()


class Question(NamedTuple):
    """What the server is asked for an org. A limit of -1 is none. `needs` are granted if there is room,
    `wants` unless the limit is near."""

    limits: Amounts
    running: int
    needs: Amounts
    wants: Amounts


NO_QUESTION: Final = Question(NOTHING, 0, NOTHING, NOTHING)


@dataclass(slots=True)
class _Org:
    """What one brain knows of an org."""

    limits: Limits
    own: Window = field(default_factory=Window)
    unsent: Window = field(default_factory=Window)
    running: int = 0
    active_at: float = 0.0
    has_changed: bool = False
    typical_tokens: float = 0.0
    # Of what the server granted
    left: Amounts = NOTHING
    need: Amounts = NOTHING  # of requests that wait for an answer
    asked_at: float = -math.inf
    asked: Question = NO_QUESTION
    used_since: Amounts = NOTHING  # since it was asked
    is_near: bool = False  # a limit: the server has not granted what was wanted
    # Of what the server said
    is_known: bool = False  # it has said something
    own_then: Amounts = NOTHING  # used and running in this brain
    elsewhere: Amounts = NOTHING  # used and running in other brains
    refused_until: Amounts = NOTHING
    waits: tuple[float, float] = (0, 0)

    @property
    def most(self) -> tuple[int | None, int | None, int | None]:
        limits = self.limits
        return limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent

    @property
    def is_limited(self) -> bool:
        limits = self.limits
        return not (
            limits.requests_per_minute is None
            and limits.tokens_per_minute is None
            and limits.concurrent is None
        )


class LimitTable:
    """The limits of all orgs in one brain. `is_shared`: a server knows of the others."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.brains = 1
        self._answered_at = -math.inf
        self._orgs: dict[str, _Org] = {}

    def __len__(self) -> int:
        return len(self._orgs)

    def __contains__(self, org: str) -> bool:
        return org in self._orgs

    def running(self, org: str) -> int:
        """Requests of an org that have been admitted here and have not ended."""
        return self._orgs[org].running if org in self._orgs else 0

    def is_fresh(self, now: float) -> bool:
        """Whether the server has answered lately."""
        return self.is_shared and now - self._answered_at < FRESH_SECONDS

    def take(
        self, org: str, limits: Limits, tokens: int, now: float, asked: Asked = Asked.NOT_YET
    ) -> Use | None:
        """Count one request, and tokens that it is expected to have. None: only the server knows whether
        there is room; ask it and come again. Raises Rejected, and then nothing has been counted."""
        one = self._orgs.setdefault(org, _Org(limits))
        one.limits = limits
        one.active_at = now
        if limits.tokens_per_minute is not None:
            tokens = min(tokens, limits.tokens_per_minute)
        one.typical_tokens = max(tokens, 0.9 * one.typical_tokens)
        if not one.is_limited:
            one.running += 1
            self._count(one, int(now), 1, tokens)
            return Use(org, int(now), tokens, is_limited=False)
        amounts = Amounts(1, tokens, 1)
        is_granted = self.is_fresh(now) and asked is not Asked.IN_VAIN
        may = one.left if is_granted else self._part(one, now)
        lacking = [kind for kind in range(3) if self._lacks(one, kind, amounts[kind], may)]
        is_worth_asking = is_granted and asked is Asked.NOT_YET
        if lacking and is_worth_asking and all(now >= one.refused_until[kind] for kind in lacking):
            one.need = _sum(one.need, _only(amounts, lacking))
            one.has_changed = True
            return None
        if lacking:
            waits = one.waits if is_granted else self._waits(one, amounts, may, now)
            raise _rejected(limits, lacking[-1], tokens, waits)
        one.running += 1
        one.left = _less(one.left, Amounts(running=1))
        one.used_since = _sum(one.used_since, Amounts(running=1))
        self._count(one, int(now), 1, tokens)
        return Use(org, int(now), tokens)

    def leave(self, use: Use) -> None:
        """The request has ended. To be called once for each use."""
        one = self._orgs[use.org]
        one.running -= 1
        if use.is_limited:
            one.left = _sum(one.left, Amounts(running=1))
            one.used_since = _less(one.used_since, Amounts(running=1))
        one.has_changed = True

    def settle(self, use: Use, requests: int, tokens: int, now: float) -> None:
        """What it really was: one request and its tokens, or nothing if it was not served. What it had
        more than expected counts from now on."""
        one = self._orgs[use.org]
        if requests < 1 or tokens < use.tokens:
            self._count(one, use.second, requests - 1, min(0, tokens - use.tokens))
        if tokens > use.tokens:
            self._count(one, int(now), 0, tokens - use.tokens)

    # With the server

    def to_ask(self, now: float, most: int) -> list[str]:
        """Orgs of which the server is told next: those with news, and all with grants now and then. Of
        too many first those with requests that wait for it, and then who was told longest ago."""
        found: list[tuple[bool, float, str]] = []
        for org, one in list(self._orgs.items()):
            if now - one.active_at > KEPT_SECONDS and not one.running and not _is_owed(one):
                del self._orgs[org]
            elif one.is_limited and (one.has_changed or self._is_due(one, now)):
                found.append((one.need == NOTHING, one.asked_at, org))
        if len(found) > most:
            found.sort()
        return [org for _, _, org in found[:most]]

    def ask(self, org: str, now: float) -> Question:
        """What the server is asked. What is kept meanwhile is among the needs, so that nobody else gets
        it."""
        one = self._orgs[org]
        wanted = Amounts() if one.is_near else self._wanted(one, now)
        one.left = Amounts(*map(min, one.left, wanted))
        kept = Amounts(*(max(0, left) for left in one.left))
        limits = Amounts(*(-1 if limit is None else limit for limit in one.most))
        one.asked = Question(limits, one.running, _sum(one.need, kept), _less(wanted, kept))
        one.asked_at = now
        one.need = one.used_since = NOTHING
        one.own_then = Amounts(*one.own.sums(now), one.running)
        one.has_changed = False
        return one.asked

    def take_unsent(self, org: str) -> Window:
        """What the server has not been told of. It is now the caller's to tell."""
        unsent, self._orgs[org].unsent = self._orgs[org].unsent, Window()
        return unsent

    def lost(self) -> None:
        """The server does not answer."""
        self._answered_at = -math.inf

    def answered(self, grants: Mapping[str, Grant], brains: int, now: float) -> None:
        """What the server says to what was asked last."""
        self.brains = max(1, brains)
        self._answered_at = now
        for org, grant in grants.items():
            if (one := self._orgs.get(org)) is None:
                continue
            asked = one.asked
            one.is_known = True
            one.left = _less(grant.may, one.used_since)
            one.elsewhere = Amounts(
                max(0, grant.used[0] - one.own_then[0]),
                max(0, grant.used[1] - one.own_then[1]),
                grant.running_elsewhere,
            )
            one.waits = grant.waits
            limited = [kind for kind, limit in enumerate(one.most) if limit is not None]
            full = _sum(asked.needs, asked.wants)
            one.is_near = any(grant.may[kind] < full[kind] for kind in limited)
            one.refused_until = Amounts(
                *(
                    now + REFUSED_SECONDS if grant.may[kind] < asked.needs[kind] else -math.inf
                    for kind in range(3)
                )
            )

    # Inside

    def _lacks(self, one: _Org, kind: int, amount: float, may: Amounts) -> bool:
        return one.most[kind] is not None and may[kind] < amount

    def _part(self, one: _Org, now: float) -> Amounts:
        """Of the limits, what is left for this brain as long as nobody can be asked. If what others have
        used is known, it is the rest. Else it is an equal part, or as large a part as it had of the
        org's requests: over all brains these are at most twice the limit."""
        is_known = one.is_known and self.is_fresh(now)
        used = (*one.own.sums(now), one.running)
        left = []
        for kind, here in enumerate(used):
            limit, there, then = one.most[kind] or 0, one.elsewhere[kind], one.own_then[kind]
            part = math.ceil(limit * max(1 / self.brains, then / (then + there) if then else 0))
            left.append((limit - there if is_known else part) - here)
        return Amounts(*left)

    def _waits(self, one: _Org, amounts: Amounts, may: Amounts, now: float) -> tuple[float, float]:
        excess = _less(amounts, may)
        return one.own.wait(now, 0, excess[0]), one.own.wait(now, 1, excess[1])

    def _count(self, one: _Org, second: int, requests: float, tokens: float) -> None:
        one.own.add(second, requests, tokens)
        if len(one.own.seconds) > WINDOW_SECONDS:  # nobody has asked for sums for that long
            one.own.forget(max(one.own.seconds))
        if self.is_shared and one.is_limited:
            one.unsent.add(second, requests, tokens)
            if len(one.unsent.seconds) > WINDOW_SECONDS:  # nobody has taken it for that long
                one.unsent.forget(second)
            one.has_changed = True
        if not one.is_limited:
            return
        used = Amounts(max(0, requests), max(0, tokens))
        one.left = _less(one.left, used)
        one.used_since = _sum(one.used_since, used)

    def _wanted(self, one: _Org, now: float) -> Amounts:
        """What is likely to be used before the server is asked again, and some more."""
        if now - one.active_at > ACTIVE_SECONDS:
            return Amounts()
        lately = [one.own.seconds.get(int(now) - ago, (0, 0)) for ago in (0, 1)]
        rates = [max(0, sum(amounts) / 2) for amounts in zip(*lately, strict=True)]
        wanted = (
            math.ceil(AHEAD_SECONDS * rates[0]) + 1,
            math.ceil(max(AHEAD_SECONDS * rates[1], 2 * one.typical_tokens)),
            max(1, one.running // 4),
        )
        most = [(limit or 0) // (4 * self.brains) for limit in one.most]
        return Amounts(*map(min, wanted, most))

    def _is_due(self, one: _Org, now: float) -> bool:
        has_some = one.running > 0 or max(one.left) > 0 or now - one.active_at < ACTIVE_SECONDS
        return has_some and now - one.asked_at >= TOLD_SECONDS


def _is_owed(one: _Org) -> bool:
    """Whether there is something to tell the server, which is told of orgs with limits."""
    return one.is_limited and bool(one.unsent.seconds)


def _rejected(limits: Limits, kind: int, tokens: int, waits: tuple[float, float]) -> Rejected:
    if kind == 2:
        message = f"Your organization may have {limits.concurrent} requests at once."
        return Rejected(429, Reason.CONCURRENT, message, SECONDS_UNTIL_ONE_ENDS)
    if kind == 0:
        message = f"Your organization may send {limits.requests_per_minute} requests in a minute."
        return Rejected(429, Reason.RATE, message, max(1.0, waits[0]))
    message = (
        f"Your organization may use {limits.tokens_per_minute} tokens in a minute. This request is "
        f"expected to use {tokens}."
    )
    return Rejected(429, Reason.TOKENS, message, max(1.0, waits[1]))


def _sum(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(*map(add, one, other))


def _less(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(*map(sub, one, other))


def _only(amounts: Amounts, kinds: list[int]) -> Amounts:
    return Amounts(*(amount if kind in kinds else 0 for kind, amount in enumerate(amounts)))
