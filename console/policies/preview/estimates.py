"""What a policy would do, from what drivers know of the org's own traffic (docs/adr/0022-reuse.md)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Final

import msgspec
from django.utils import timezone

from console.control.sending import Call, Endpoint, ask_all, invalid
from console.fleet.services import reachable_drivers
from console.orgs.models import Org
from console.sessions.driver_orgs import drivers_serving
from console.visibility import Sight
from kvss_agent.http.answers import Budget, Reply
from swdriver_shim.cache.displacement import Choice
from swdriver_shim.cache.reuse.preview import COLUMNS, Preview, Traffic, preview
from swdriver_shim.cache.reuse.sample import Sample
from swdriver_shim.policy import OrgPolicies
from telemetry.decoder import Malformed, excerpt

DRIVERS_MAX: Final = 8  # that are asked: what more of them know changes little, and takes long
BUDGET: Final = Budget(2.0, 2 << 20)  # somebody looks at a page: it is shown without who is slow
FRESH: Final = timedelta(seconds=30)
# It has never heard of the org, or was not told anything yet.
KNOWS_NOTHING: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
KEPT_MAX: Final = 8  # orgs' traffic in memory, some ten megabytes each
_DECODER: Final = msgspec.json.Decoder(Sample)


@dataclass(frozen=True, slots=True)
class Contest:
    """Which displacement policy a driver's traffic has chosen. `driver` is empty for whoever may not
    know its name."""

    driver: str
    model: str
    choice: Choice


@dataclass(frozen=True, slots=True)
class Known:
    """What drivers have told of an org. `silent`: so many should have, and did not."""

    at: datetime
    traffics: tuple[tuple[str, Traffic], ...]  # with the model of each
    asked: int
    drivers: int
    silent: int
    contests: tuple[Contest, ...] = ()

    def contests_for(self, sight: Sight) -> list[Contest]:
        """With the names of drivers that these people may know."""
        return [
            one if sight.knows_driver(one.driver) else replace(one, driver="") for one in self.contests
        ]


@dataclass(frozen=True, slots=True)
class Foretold:
    """A preview, of the drivers that `model` or all other models run on."""

    preview: Preview
    known: Known
    drivers: int  # that it is worked out from


_kept: OrderedDict[int, Known] = OrderedDict()
_lock = threading.Lock()


def foretell(org: Org, now: OrgPolicies, proposed: OrgPolicies, model: str = "") -> Foretold:
    """What would become of the org under `proposed`. Without `model`: on the drivers whose models have
    no policy of their own."""
    known = known_of(org)
    own = {*now.models, *proposed.models}
    traffics = [
        traffic for told, traffic in known.traffics if told == model or (not model and told not in own)
    ]
    return Foretold(preview(traffics, now.of(model), proposed.of(model)), known, len(traffics))


def known_of(org: Org) -> Known:
    """Asked of drivers, or as they said some seconds ago: who edits a form asks again and again."""
    with _lock:
        known = _kept.get(org.pk)
    if known is None or timezone.now() - known.at > FRESH:
        known = _asked(org)
        with _lock:
            _kept[org.pk] = known
            _kept.move_to_end(org.pk)
            while len(_kept) > KEPT_MAX:
                _kept.popitem(last=False)
    return known


def _asked(org: Org) -> Known:
    there = list((drivers_serving(org) & reachable_drivers()).order_by("name"))
    asked = there[:: max(1, -(-len(there) // DRIVERS_MAX))]  # spread over all of them
    calls = [Call(Endpoint.of(one), "GET", f"/v1/reuse?org={org.slug}") for one in asked]
    answers = list(zip(asked, map(_traffic, ask_all(calls, BUDGET)), strict=True))
    told = [(driver.model_name, answer) for driver, answer in answers if isinstance(answer, Traffic)]
    # No more of each than a preview of all of them uses: the rest would lie about in memory.
    traffics = tuple((model, traffic.smaller(COLUMNS // len(told))) for model, traffic in told)
    silent = sum(isinstance(answer, str) for _, answer in answers)
    contests = tuple(
        Contest(driver.name, driver.model_name, answer.sample.displacement)
        for driver, answer in answers
        if isinstance(answer, Traffic) and answer.sample.displacement
    )
    return Known(timezone.now(), traffics, len(asked), len(there), silent, contests)


def _traffic(answer: Reply | str) -> Traffic | str | None:
    """Its traffic; None from who has never heard of the org; or why there is none."""
    if isinstance(answer, str):
        return answer
    if answer.status_code in KNOWS_NOTHING:
        return None
    if not answer.is_success:
        return answer.refusal
    try:
        return Traffic.of(answer.read(_DECODER))
    except Malformed as error:
        return invalid(error)
    except ValueError as error:  # columns that do not fit together
        return invalid(Malformed(excerpt(str(error))))
