"""What the console tells Prometheus of its targets: who is behind, and whose answers are none."""

from __future__ import annotations

from collections import Counter

from django.db.models import F

from console.control.models import BadAnswers, Target
from console.metrics.own import BAD_ANSWERS, TARGETS
from telemetry.metrics import Sink


def collect(into: Sink) -> None:
    told = Target.objects.filter(generation__gt=0)
    faults = Counter(told.exclude(fault="").values_list("fault", flat=True))
    behind = told.filter(fault="").exclude(observed_generation=F("generation")).count()
    states = {"as told": told.count() - faults.total() - behind, "behind": behind, **faults}
    into.put(TARGETS, [({"state": state}, count) for state, count in sorted(states.items())])
    counted = BadAnswers.objects.order_by("fault").values_list("fault", "count")
    into.put(BAD_ANSWERS, [({"fault": fault}, count) for fault, count in counted])
