from __future__ import annotations

import math
import time

from django import forms
from django.conf import settings
from django.http import Http404, HttpResponse
from django.shortcuts import render

from console.accounts.browser import SignedInRequest, read_page
from console.accounts.roles import Role
from console.charts.ranges import BadRange, of_query
from console.charts.services import topics_for
from console.charts.slowest import CELL_SECONDS_MIN, ROWS_MAX, behind
from console.charts.views import topic_of

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
