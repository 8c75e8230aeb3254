"""Dead letters, as a page: telemetry that could not be stored, its process and cause.

They contain names of all orgs, so only platform admins see them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Final

from django.db.models import Max, QuerySet, Sum
from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone

from console.accounts.browser import SignedInRequest, read_page
from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.shell.pages import paged
from telemetry.ingest.dead_letters import (
    LETTERS_ALIKE_MAX,
    LETTERS_OF_SOURCE_MAX,
    MEANINGS,
    Cause,
)
from telemetry.models import DeadLetter, DeadLetterCount

PER_PAGE: Final = 25
COUNTS_MAX: Final = 200
WEEK_DAYS: Final = 7


@dataclass(frozen=True)
class Count:
    """How much telemetry of one process could not be stored, for one cause."""

    cause: str
    source: str
    count: int
    last_at: datetime

    @property
    def meaning(self) -> str:
        return MEANINGS[Cause(self.cause)] if self.cause in set(Cause) else ""


def counts(principal: Principal, days: int) -> list[Count]:
    """Counts of the last days, the newest first."""
    principal.check_platform(Role.PLATFORM_ADMIN)
    since: date = (timezone.now() - timedelta(days=days - 1)).date()
    rows = (
        DeadLetterCount.objects.filter(day__gte=since)
        .values("cause", "source")
        .annotate(times=Sum("count"), newest=Max("last_at"))
        .order_by("-newest", "cause", "source")[:COUNTS_MAX]
    )
    return [Count(row["cause"], row["source"], row["times"], row["newest"]) for row in rows]


def letters(principal: Principal, cause: str = "", source: str = "") -> QuerySet[DeadLetter]:
    principal.check_platform(Role.PLATFORM_ADMIN)
    found = DeadLetter.objects.all()
    if cause:
        found = found.filter(cause=cause)
    if source:
        found = found.filter(source=source)
    return found


@read_page
def show(request: SignedInRequest) -> HttpResponse:
    cause, source = (request.GET.get(name, "").replace("\0", "")[:240] for name in ("cause", "source"))
    found = letters(request.principal, cause, source)
    context = {
        **paged(request, found, PER_PAGE),
        "counts": counts(request.principal, WEEK_DAYS),
        "days": WEEK_DAYS,
        "of_source": LETTERS_OF_SOURCE_MAX,
        "alike": LETTERS_ALIKE_MAX,
        "cause": cause,
        "source": source,
    }
    return render(request, "metrics/dead_letters.html", context)
