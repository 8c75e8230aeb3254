from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence

from django import forms
from django.conf import settings
from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from console.accounts.browser import SignedInRequest, read_page
from console.accounts.roles import Role
from console.charts.ranges import BadRange, of_query
from console.charts.services import topics_for, topics_of_events
from console.charts.slowest import CELL_SECONDS_MIN, ROWS_MAX, behind
from console.live.messages import TOPIC_PATTERN
from console.metrics.services import check_topic
from telemetry.events import events_of
from telemetry.figures import figures_now, names_of
from telemetry.models import Event
from telemetry.topics import FLEET, NODE, SESSION, kind_of

EVENTS_SHOWN = 8
FIGURES = (
    ("Refill p99", "refill.p99", "seconds"),
    ("Refill p50", "refill.p50", "seconds"),
    ("Evict p99", "evict.p99", "seconds"),
    ("Evict p50", "evict.p50", "seconds"),
    ("Refills", "refill.rate", "/s"),
    ("Evicts", "evict.rate", "/s"),
    ("Hit rate", "hit.rate", "share"),
)
_WITH_PATHS = frozenset({FLEET, SESSION, NODE, "driver"})  # topics with path metrics


@read_page
def latency_events(request: SignedInRequest) -> HttpResponse:
    """The newest events, as a fragment."""
    topic = topic_of(request.GET.get("topic", ""))
    check_topic(request.principal, topic)
    events = _events(topics_of_events(request.principal, topic))
    return render(request, "latency/events.html", {"events": events})


def topic_of(text: str) -> str:
    """A valid topic. Raises Http404."""
    if not re.fullmatch(TOPIC_PATTERN, text):
        raise Http404("There is no such topic.")
    return text


def _events(topics: Sequence[str]) -> list[Event]:
    return list(events_of(*topics).order_by("-at", "-pk")[:EVENTS_SHOWN])


@read_page
def latency(request: SignedInRequest) -> HttpResponse:
    """Latency, rate and hit rate of evicts and refills of one topic."""
    topics = topics_for(request.principal)
    asked = request.GET.get("topic") or next(iter(topics), "")
    if not asked:
        return render(request, "latency/nothing.html")
    topic = topic_of(asked)
    check_topic(request.principal, topic)
    now = timezone.now()
    told = figures_now([topic], now.timestamp()).get(topic)
    names, of_events = names_of(topic), topics_of_events(request.principal, topic)
    context = {
        "topic": topic,
        "topics_of_events": of_events,
        "figures": [
            (title, name, unit, told.figures.get(name) if told else None)
            for title, name, unit in FIGURES
            if names.hit or name != "hit.rate"
        ],
        "told_at": now if told else None,
        "events": _events(of_events),
        "topics": topics if topic in topics else [*topics, topic],
        "kind": kind_of(topic),
        "names": names,
        "where": {
            figure: " ".join(":".join(pair) for pair in its.items())
            for figure, _, its in names.latencies
        },
        "has_paths": kind_of(topic) in _WITH_PATHS,
    }
    return render(request, "latency/latency.html", context)


_DIRECTIONS = (("", "evicts and refills"), ("in", "refills"), ("out", "evicts"))


class SlowestForm(forms.Form):
    """The query of the page. `most` is the upper bound of a heat map's cell, in seconds."""

    direction = forms.ChoiceField(choices=_DIRECTIONS, required=False)
    most = forms.FloatField(min_value=0, required=False)


@read_page
def slowest(request: SignedInRequest) -> HttpResponse:
    """The slowest transfers of a topic, in a cell of a heat map or in the whole range."""
    topics = topics_for(request.principal)
    asked = request.GET.get("topic") or next(iter(topics), "")
    if not asked:
        return render(request, "latency/nothing.html")
    topic = topic_of(asked)
    form = SlowestForm(request.GET)
    if not form.is_valid():
        raise Http404("Invalid query.")
    now, problem = time.time(), ""
    try:
        over = of_query(request.GET.dict(), now, CELL_SECONDS_MIN)
    except BadRange as error:
        over, problem = of_query({}, now), str(error)
    direction, most = form.cleaned_data["direction"], form.cleaned_data["most"]
    found = behind(
        request.principal,
        topic,
        over,
        direction=direction,
        seconds_max=most if most is not None and math.isfinite(most) else None,
    )
    context = {
        "topic": topic,
        "topics": topics if topic in topics else [*topics, topic],
        "directions": _DIRECTIONS,
        "direction": direction,
        "direction_query": f"&direction={direction}" if direction else "",
        "most": most,
        "over": over,
        "problem": problem,
        "found": found,
        "rows_max": ROWS_MAX,
        "hours_kept": settings.TELEMETRY_HOURS_SLOWEST,
        "sees_fleet": request.principal.on_platform(Role.VIEWER),
    }
    return render(request, "latency/slowest.html", context)
