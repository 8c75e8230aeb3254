"""Drivers know why an org's prompt was hit or missed. Here they are asked, and what they say of columns
is put into runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import groupby
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Meta, Struct

from console.accounts.principal import Principal
from console.control.sending import Call, Endpoint, ask_all, invalid, refusal
from console.fleet.models import Driver
from console.orgs.services import get_org, visible_orgs
from console.search.services import Found, finder
from console.sessions.services import get_session
from console.visibility import Sight
from kvss_agent.http.exchange import Budget, Reply
from telemetry.decoder import Limits, Malformed

DRIVERS_MAX: Final = 64
BUDGET: Final = Budget(10.0, 32 << 20)  # a page shows what there is without who is slow
LIMITS: Final = Limits(BUDGET.bytes_max, 1 << 22)  # a million columns
NEWEST_MAX: Final = 20
REQUEST_MAX: Final = 200  # characters of a name
OF_OTHERS: Final = "It does not answer, or not so that it can be understood."
_KNOWS_NOTHING: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)

T = TypeVar("T")


class Outcome(Struct, frozen=True):
    """So many columns in a row: hit in a tier, or missed for a reason."""

    outcome: str
    columns: int


class Then(Struct, frozen=True):
    """What became of a request when it was asked for."""

    request: str
    age_seconds: float
    asked_tokens: int
    hit_tokens: int
    missed_tokens: dict[str, int]
    columns: list[Outcome]
    adapter: str = ""


class Column(Struct, frozen=True):
    """As a driver has it now. `state`: ready, or why it would be missed."""

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


class Home(Struct, frozen=True):
    """Where a shard is, and how its bytes get there."""

    group: str
    index: int
    state: str
    node: str
    tier: str
    link: str


class _Whose(Struct, frozen=True):
    org: str


class _Told(Struct, frozen=True):
    then: Then | None
    groups: dict[str, Annotated[list[Column], Meta(max_length=1 << 20)]]
    homes: list[Home]


@dataclass(frozen=True, slots=True)
class Run:
    """Columns in a row that are alike: from one depth to another."""

    first: int
    last: int
    tokens: int
    state: str
    tier2: bool
    slots: tuple[int, int] | None  # the lowest and the highest
    expires_in_seconds: tuple[float, float] | None  # the soonest and the latest; None for never
    uses_max: int | None
    priority: int | None

    @property
    def lies(self) -> str:
        """In which tiers."""
        return " and ".join(
            [
                *(["memory"] if self.state == "ready" else []),
                *(["tier 2"] if self.tier2 else []),
            ]
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one driver."""

    driver: str
    model: str
    then: Then | None
    groups: dict[str, list[Run]]
    homes: list[Home]


@dataclass(frozen=True, slots=True)
class _Heard(Generic[T]):
    """What a driver said; nothing, because it knows nothing of it; or why it did not answer."""

    driver: Driver
    said: T | None
    why: str = ""


class Silent(NamedTuple):
    """A driver that did not answer. Without a name: those that they don't know of, one or more."""

    driver: str
    why: str


@dataclass(frozen=True, slots=True)
class Explained:
    """`strangers`: so many drivers know nothing of it. `silent`: those that did not answer, and why not.
    `left_out`: so many were not asked. Counted are those that the one who asks knows of."""

    answers: list[Answer]
    strangers: int
    silent: list[Silent]
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One of `request`, `tokens` and `keys`. With a session only its drivers are asked."""

    request: str = ""
    tokens: Sequence[int] = ()
    keys: Sequence[str] = ()
    adapter: str = ""
    session: str = ""


def explain(principal: Principal, slug: str, question: Question) -> Explained:
    """Raises Http404 for an org or a session that is not theirs to see."""
    org = get_org(principal, slug)
    drivers, left_out = _drivers(principal, question.session)
    body: dict[str, Any] = {"org": org.slug, "adapter": question.adapter}
    for name in ("request", "tokens", "keys"):
        if asked := getattr(question, name):
            body[name] = asked
    told = _asked(drivers, "POST", "/v1/explain_org", _Told, body)
    sight = Sight(principal)
    answers = [_answer(sight, one.driver, one.said) for one in told if one.said]
    known = [one for one in told if sight.knows_driver(one.driver.name)]
    strangers = sum(one.said is None and not one.why for one in known)
    return Explained(answers, strangers, _silent(sight, told), left_out if sight.sees_fleet else 0)


def newest(principal: Principal, slug: str) -> tuple[list[tuple[str, Then]], list[Silent]]:
    """The org's last requests that had a name, with the driver that each went to, the newest first; and
    which drivers did not answer."""
    org = get_org(principal, slug)
    drivers, _ = _drivers(principal, "")
    told = _asked(drivers, "GET", f"/v1/requests?org={org.slug}", list[Then], None)
    sight = Sight(principal)
    found = [(_name(sight, one.driver), then) for one in told for then in one.said or ()]
    silent = _silent(sight, told)
    return sorted(found, key=lambda one: one[1].age_seconds)[:NEWEST_MAX], silent


@finder("prompts", far=True)
def find_prompts(principal: Principal, text: str, most: int) -> list[Found]:
    """By the name that an engine gave the request: just so, for drivers know no other way."""
    if len(text) > REQUEST_MAX or not text.isprintable():
        return []
    drivers, _ = _drivers(principal, "")
    told = _asked(drivers, "GET", f"/v1/requests?{urlencode({'request': text})}", list[_Whose], None)
    asked = {(whose.org, one.driver.name) for one in told for whose in one.said or ()}
    visible = visible_orgs(principal).filter(slug__in={org for org, _ in asked})
    theirs = set(visible.values_list("slug", flat=True))
    sight = Sight(principal)
    named = {
        (org, driver if sight.knows_driver(driver) else "") for org, driver in asked if org in theirs
    }
    return [
        Found(
            text, f"of {org}, on {driver}" if driver else f"of {org}", "explain", org, {"request": text}
        )
        for org, driver in sorted(named)
    ][:most]


def runs(columns: Sequence[Column]) -> list[Run]:
    """What is alike in a row, as one."""
    return [_run(list(alike)) for _, alike in groupby(columns, key=_likeness)]


def _likeness(one: Column) -> tuple[object, ...]:
    return one.state, one.tier2, one.priority, one.expires_in_seconds is None


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
    )


def _answer(sight: Sight, driver: Driver, told: _Told) -> Answer:
    """What it says of the org's own columns. Which driver it is, where its shards are and in which of
    their slots, is for who knows of the driver."""
    groups = {group: runs(columns) for group, columns in told.groups.items()}
    if sight.knows_driver(driver.name):
        model = str((driver.model or {}).get("name", ""))
        return Answer(driver.name, model, told.then, groups, told.homes)
    hidden = {group: [replace(run, slots=None) for run in its] for group, its in groups.items()}
    return Answer("", "", told.then, hidden, [])


def _drivers(principal: Principal, session: str) -> tuple[list[Driver], int]:
    """Those to be asked, and how many more there are."""
    drivers = Driver.objects.filter(joined_at__isnull=False).order_by("name")
    if session:
        found = get_session(principal, session)
        drivers = drivers.filter(pk__in=found.jobs.values("driver"))
    listed = list(drivers)
    return listed[:DRIVERS_MAX], len(listed[DRIVERS_MAX:])


def _name(sight: Sight, driver: Driver) -> str:
    return driver.name if sight.knows_driver(driver.name) else ""


def _silent(sight: Sight, told: Sequence[_Heard[T]]) -> list[Silent]:
    """Those they know of with the reason, which may name addresses. All others together are one."""
    silent = [one for one in told if one.why]
    known = [Silent(one.driver.name, one.why) for one in silent if sight.knows_driver(one.driver.name)]
    return known if len(known) == len(silent) else [*known, Silent("", OF_OTHERS)]


def _asked(
    drivers: Sequence[Driver], method: str, path: str, kind: type[T], body: dict[str, Any] | None
) -> list[_Heard[T]]:
    decoder = msgspec.json.Decoder(kind)
    raw = msgspec.json.encode(body) if body is not None else None
    calls = [Call(Endpoint.of(driver), method, path, raw) for driver in drivers]
    answers = ask_all(calls, BUDGET)
    return [_heard(driver, answer, decoder) for driver, answer in zip(drivers, answers, strict=True)]


def _heard(driver: Driver, answer: Reply | str, decoder: msgspec.json.Decoder[T]) -> _Heard[T]:
    if isinstance(answer, str):
        return _Heard(driver, None, answer)
    if answer.status_code in _KNOWS_NOTHING:
        return _Heard(driver, None)
    if not answer.is_success:
        return _Heard(driver, None, refusal(answer))
    try:
        return _Heard(driver, answer.read(decoder, LIMITS))
    except Malformed as error:
        return _Heard(driver, None, invalid(error))
