"""Ask the drivers why an org's prompt was a hit or a miss, and group equal columns into runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import groupby
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Meta, Struct

from console.accounts.principal import Principal
from console.control.sending import Call, Endpoint, ask_all, invalid
from console.explain.routes import Routes, route_of
from console.fleet.models import Driver
from console.orgs.models import Org
from console.orgs.services import get_org, visible_orgs
from console.search.services import Found, finder
from console.sessions.driver_orgs import drivers_serving
from console.sessions.services import get_session
from console.visibility import Sight
from kvss_agent.http.answers import Budget, Reply
from telemetry.decoder import Count, Limits, Malformed

DRIVERS_MAX: Final = 64
BUDGET: Final = Budget(10.0, 32 << 20)  # slow drivers are left out of the page
LIMITS: Final = Limits(BUDGET.bytes_max, 1 << 22)  # a million columns
REQUESTS_SHOWN: Final = 20
REQUEST_MAX: Final = 200  # characters of a name
OF_OTHERS: Final = "It does not answer, or its answer is not valid."
_KNOWS_NOTHING: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)

T = TypeVar("T")


class Outcome(Struct, frozen=True):
    """Consecutive columns with the same outcome: the tier of a hit, or the reason of a miss."""

    outcome: str
    columns: int


class RequestResult(Struct, frozen=True):
    """Hits and misses of one request, when it was served."""

    request: str
    age_seconds: float
    asked_tokens: Count
    hit_tokens: Count  # at most those that were asked for
    missed_tokens: dict[str, int]
    columns: list[Outcome]
    adapter: str = ""

    def __post_init__(self) -> None:
        """A driver that says otherwise counts as one that did not answer."""
        if self.hit_tokens > self.asked_tokens:
            raise ValueError(f"{self.hit_tokens} of {self.asked_tokens} tokens can't be hits")


class Column(Struct, frozen=True):
    """A column's state in a driver now: `ready`, or the reason why it would be a miss."""

    depth: int
    tokens: int
    state: str
    age_seconds: float | None = None
    idle_seconds: float | None = None
    expires_in_seconds: float | None = None
    uses: int | None = None
    priority: int | None = None
    slot: int | None = None
    tier2: bool = False
    no_spill: str | None = None


class Home(Struct, frozen=True):
    """The home of a shard, and the path to it."""

    group: str
    index: int
    state: str
    node: str
    tier: str
    link: str


class _NamedRequest(Struct, frozen=True):
    org: str


class _Explanation(Struct, frozen=True):
    result: RequestResult | None
    groups: dict[str, Annotated[list[Column], Meta(max_length=1 << 20)]]
    homes: list[Home]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive columns that are alike, by their depths."""

    first: int
    last: int
    tokens: int
    state: str
    tier2: bool
    slots: tuple[int, int] | None  # the lowest and the highest
    expires_in_seconds: tuple[float, float] | None  # the soonest and the latest; None for never
    uses_max: int | None
    priority: int | None
    no_spill: str | None  # why they are not copied to tier 2

    @property
    def stored_in(self) -> str:
        """The tiers, in words."""
        return " and ".join(
            [
                *(["memory"] if self.state == "ready" else []),
                *(["tier 2"] if self.tier2 else []),
            ]
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The explanation of one driver."""

    driver: str
    model: str
    result: RequestResult | None
    groups: dict[str, list[Run]]
    homes: list[Home]


@dataclass(frozen=True, slots=True)
class _DriverReply(Generic[T]):
    """What one driver answered. Content and error are both empty if it has no such request or org."""

    driver: Driver
    content: T | None
    error: str = ""


class Unreachable(NamedTuple):
    """A driver that did not answer. The name is empty for drivers that the principal may not see."""

    driver: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explained:
    """The answers; how many drivers had no match; which did not answer; how many were not asked. Counts
    are of drivers that the principal may see. `routes`: what brains know of a named request."""

    answers: list[Answer]
    unmatched: int
    unreachable: list[Unreachable]
    not_asked: int
    routes: Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One of `request`, `tokens` and `keys`. With a session, only its drivers are asked."""

    request: str = ""
    tokens: Sequence[int] = ()
    keys: Sequence[str] = ()
    adapter: str = ""
    session: str = ""


def explain(principal: Principal, slug: str, question: Question) -> Explained:
    """Raises Http404 for an org or a session that the principal may not see."""
    org = get_org(principal, slug)
    drivers, not_asked = _drivers(principal, [org], question.session)
    body: dict[str, Any] = {"org": org.slug, "adapter": question.adapter}
    for name in ("request", "tokens", "keys"):
        if asked := getattr(question, name):
            body[name] = asked
    replies = _ask(drivers, "POST", "/v1/explain_org", _Explanation, body)
    sight = Sight(principal)
    answers = [_answer(sight, one.driver, one.content) for one in replies if one.content]
    known = [one for one in replies if sight.knows_driver(one.driver.name)]
    unmatched = sum(one.content is None and not one.error for one in known)
    is_named = bool(question.request) and not question.session
    return Explained(
        answers,
        unmatched,
        _unreachable(sight, replies),
        not_asked if sight.sees_fleet else 0,
        route_of(principal, org, question.request) if is_named else Routes(None, []),
    )


def recent_requests(
    principal: Principal, slug: str
) -> tuple[list[tuple[str, RequestResult]], list[Unreachable]]:
    """The org's last named requests with their drivers, newest first; and drivers without an answer."""
    org = get_org(principal, slug)
    drivers, _ = _drivers(principal, [org])
    replies = _ask(drivers, "GET", f"/v1/requests?org={org.slug}", list[RequestResult], None)
    sight = Sight(principal)
    found = [(_name(sight, one.driver), result) for one in replies for result in one.content or ()]
    unreachable = _unreachable(sight, replies)
    return sorted(found, key=lambda one: one[1].age_seconds)[:REQUESTS_SHOWN], unreachable


@finder("prompts", far=True)
def find_prompts(principal: Principal, text: str, most: int) -> list[Found]:
    """By the exact name that an engine gave the request; drivers do not search by parts of it."""
    if len(text) > REQUEST_MAX or not text.isprintable():
        return []
    drivers, _ = _drivers(principal, visible_orgs(principal))
    replies = _ask(
        drivers, "GET", f"/v1/requests?{urlencode({'request': text})}", list[_NamedRequest], None
    )
    asked = {(named.org, one.driver.name) for one in replies for named in one.content or ()}
    visible = visible_orgs(principal).filter(slug__in={org for org, _ in asked})
    theirs = set(visible.values_list("slug", flat=True))
    sight = Sight(principal)
    named = {
        (org, driver if sight.knows_driver(driver) else "") for org, driver in asked if org in theirs
    }
    return [
        Found(text, f"{org}, on {driver}" if driver else org, "explain", org, {"request": text})
        for org, driver in sorted(named)
    ][:most]


def runs(columns: Sequence[Column]) -> list[Run]:
    """Group consecutive columns that are alike."""
    return [_run(list(alike)) for _, alike in groupby(columns, key=_likeness)]


def _likeness(one: Column) -> tuple[object, ...]:
    return one.state, one.tier2, one.priority, one.expires_in_seconds is None, one.no_spill


def _run(columns: Sequence[Column]) -> Run:
    first, last = columns[0], columns[-1]
    slots = [one.slot for one in columns if one.slot is not None]
    ends = [one.expires_in_seconds for one in columns if one.expires_in_seconds is not None]
    return Run(
        first=first.depth,
        last=last.depth,
        tokens=sum(one.tokens for one in columns),
        state=first.state,
        tier2=first.tier2,
        slots=(min(slots), max(slots)) if slots else None,
        expires_in_seconds=(min(ends), max(ends)) if ends else None,
        uses_max=max((one.uses for one in columns if one.uses is not None), default=None),
        priority=first.priority,
        no_spill=first.no_spill,
    )


def _answer(sight: Sight, driver: Driver, reply: _Explanation) -> Answer:
    """The driver's explanation, without name, homes and slots for those who may not see the driver."""
    groups = {group: runs(columns) for group, columns in reply.groups.items()}
    if sight.knows_driver(driver.name):
        return Answer(driver.name, driver.model_name, reply.result, groups, reply.homes)
    hidden = {group: [replace(run, slots=None) for run in its] for group, its in groups.items()}
    return Answer("", "", reply.result, hidden, [])


def _drivers(principal: Principal, orgs: Iterable[Org], session: str = "") -> tuple[list[Driver], int]:
    """The drivers to ask: those that serve one of these orgs; and how many more there are."""
    drivers = drivers_serving(*orgs).filter(joined_at__isnull=False).order_by("name")
    if session:
        found = get_session(principal, session)
        drivers = drivers.filter(pk__in=found.jobs.values("driver"))
    listed = list(drivers)
    return listed[:DRIVERS_MAX], len(listed[DRIVERS_MAX:])


def _name(sight: Sight, driver: Driver) -> str:
    return driver.name if sight.knows_driver(driver.name) else ""


def _unreachable(sight: Sight, replies: Sequence[_DriverReply[T]]) -> list[Unreachable]:
    """Visible drivers with the reason, which may contain addresses; one entry for all others."""
    unreachable = [one for one in replies if one.error]
    known = [
        Unreachable(one.driver.name, one.error)
        for one in unreachable
        if sight.knows_driver(one.driver.name)
    ]
    return known if len(known) == len(unreachable) else [*known, Unreachable("", OF_OTHERS)]


def _ask(
    drivers: Sequence[Driver], method: str, path: str, kind: type[T], body: dict[str, Any] | None
) -> list[_DriverReply[T]]:
    decoder = msgspec.json.Decoder(kind)
    raw = msgspec.json.encode(body) if body is not None else None
    calls = [Call(Endpoint.of(driver), method, path, raw) for driver in drivers]
    answers = ask_all(calls, BUDGET)
    return [_reply(driver, answer, decoder) for driver, answer in zip(drivers, answers, strict=True)]


def _reply(driver: Driver, answer: Reply | str, decoder: msgspec.json.Decoder[T]) -> _DriverReply[T]:
    if isinstance(answer, str):
        return _DriverReply(driver, None, answer)
    if answer.status_code in _KNOWS_NOTHING:
        return _DriverReply(driver, None)
    if not answer.is_success:
        return _DriverReply(driver, None, answer.refusal)
    try:
        return _DriverReply(driver, answer.read(decoder, LIMITS))
    except Malformed as error:
        return _DriverReply(driver, None, invalid(error))
