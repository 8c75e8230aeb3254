"""Find objects by a name, a part of it, a number, or the id of a request.

Each app registers how its objects are found, in its `services`, by a function that returns only what the
principal may see:

    @finder("nodes")
    def find_nodes(principal: Principal, text: str, most: int) -> list[Found]: ...

Finders that ask drivers run only on request (`far=True`), not for every letter that is typed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from django.db.models import Case, IntegerField, Model, Q, QuerySet, Value, When
from django.urls import reverse
from django.utils.module_loading import autodiscover_modules

from console.accounts.principal import Principal

TEXT_MAX: Final = 120
OF_A_KIND_MAX: Final = 6

M = TypeVar("M", bound=Model)


@dataclass(frozen=True, slots=True)
class Found:
    name: str
    detail: str
    route: str  # the name of its page
    argument: Any  # that its address has
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        path = reverse(self.route, args=[self.argument])
        return f"{path}?{urlencode(self.query)}" if self.query else path


@dataclass(frozen=True, slots=True)
class Group:
    """The results of one kind."""

    kind: str
    found: Sequence[Found]
    are_more: bool

    def has(self, name: str) -> bool:
        """Whether a result has exactly this name."""
        return any(one.name.casefold() == name.casefold() for one in self.found)


Finder = Callable[[Principal, str, int], Sequence[Found]]
_finders: dict[str, Finder] = {}
_far_finders: dict[str, Finder] = {}


def finder(kind: str, *, far: bool = False) -> Callable[[Finder], Finder]:
    """Register a finder for a kind (its plural): it returns at most `most` results, best match first,
    and only what the principal may see."""

    def register(function: Finder) -> Finder:
        (_far_finders if far else _finders)[kind] = function
        return function

    return register


@cache
def _load_finders() -> None:
    """Import the services of all apps. Most processes of the console never search."""
    autodiscover_modules("services")


def kinds() -> list[str]:
    _load_finders()
    return sorted([*_finders, *_far_finders])


def search(
    principal: Principal, text: str, most: int = OF_A_KIND_MAX, *, far: bool = False
) -> list[Group]:
    """Results by kind, kinds with an exact match first; kinds without results are left out. Empty for an
    empty text. `far`: run only the finders that ask drivers."""
    text = text.strip()[:TEXT_MAX]
    if not text or "\x00" in text:
        return []
    _load_finders()
    groups = []
    finders = _far_finders if far else _finders
    for kind in sorted(finders):
        found = finders[kind](principal, text, most + 1)
        if found:
            groups.append(Group(kind, found[:most], len(found) > most))
    return sorted(groups, key=lambda group: not group.has(text))


def nearest(rows: QuerySet[M], text: str, *fields: str) -> QuerySet[M]:
    """Rows with the text in one of the fields: exact matches first, then those that begin with it."""
    contains, begins, is_it = (
        _any(fields, lookup, text) for lookup in ("icontains", "istartswith", "iexact")
    )
    place = Case(
        When(is_it, then=Value(0)),
        When(begins, then=Value(1)),
        default=Value(2),
        output_field=IntegerField(),
    )
    return rows.filter(contains).order_by(place, fields[0])


def _any(fields: Sequence[str], lookup: str, text: str) -> Q:
    condition = Q()
    for name in fields:
        condition |= Q(**{f"{name}__{lookup}": text})
    return condition
