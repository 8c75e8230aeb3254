from __future__ import annotations

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from console.accounts.browser import SignedInRequest, signed_in
from console.charts.services import topics_for
from console.metrics.services import check_topic
from telemetry.figures import names_of

EVENTS_SHOWN = 8


@require_safe
@signed_in
def latency(request: SignedInRequest) -> HttpResponse:
    """Evicts and refills of one topic: how fast, how many, how much of it hit."""
    topics = topics_for(request.principal)
    topic = request.GET.get("topic") or next(iter(topics), "")
    if not topic:
        return render(request, "latency/nothing.html")
    if "\0" in topic or topic.endswith("*"):
        raise Http404("There is no such topic.")
    check_topic(request.principal, topic)
    context = {
        "topic": topic,
        "topics": topics if topic in topics else [*topics, topic],
        "names": names_of(topic),
        "is_of_agents": not names_of(topic).hit,
    }
    return render(request, "latency/latency.html", context)
