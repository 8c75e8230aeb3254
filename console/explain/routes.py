"""Ask the brains why a request went to the replica that it went to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import structs

from console.accounts.principal import Principal
from console.control.sending import Call, Endpoint, ask_all, invalid
from console.fleet.models import Brain
from console.orgs.models import Org
from console.visibility import sees_fleet
from inference_brain.decisions import CandidateEstimate, RequestRecord
from kvss_agent.http.answers import Budget, Reply
from telemetry.decoder import ANSWER, Malformed

BUDGET: Final = Budget(3.0, 1 << 20)
OF_OTHERS: Final = "A brain does not answer."
REGRETS: Final = {  # by cause, as brains write it: why tokens were computed
    "cold": "no replica had them",
    "expired": "their TTL was over",
    "displaced": "others took their room",
    "not_lent": "a sibling did not lend them in time",
    "purged": "they were purged",
    "overloaded": "the replica that had them was too busy",
    "spine": "fetching them from the replica that had them would have taken longer",
    "elsewhere": "another replica had them",
}
_RECORD: Final = msgspec.json.Decoder(RequestRecord)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could have served a request, with its estimate; and what happened, if it did."""

    replica: str
    is_chosen: bool
    estimate: CandidateEstimate

    @property
    def seconds(self) -> float | None:
        return None if self.estimate.excluded else self.estimate.seconds


@dataclass(frozen=True, slots=True)
class Route:
    """Of one request. `brain` is empty, and replicas are numbered, for who may not know of them."""

    brain: str
    record: RequestRecord
    candidates: list[Candidate]
    served_by: str  # the last replica that it was sent to; empty: none

    @property
    def at(self) -> datetime:
        return datetime.fromtimestamp(self.record.at, UTC)

    @property
    def regret(self) -> list[tuple[int, str]]:
        """Tokens, and why they were computed: in a word, where a brain of another release has more."""
        return [(tokens, REGRETS.get(cause, cause)) for cause, tokens in self.record.regret.items()]

    @property
    def expected(self) -> CandidateEstimate | None:
        """Of the replica that was chosen."""
        return next((one.estimate for one in self.candidates if one.is_chosen), None)

    @property
    def error_seconds(self) -> float | None:
        """How much later than expected the first token came; less than 0 if sooner."""
        outcome, expected = self.record.outcome, self.expected
        if outcome is None or outcome.first_token_seconds is None or expected is None:
            return None
        if outcome.replica != self.record.chosen:  # it was sent elsewhere afterwards
            return None
        return outcome.first_token_seconds - expected.seconds


class SilentBrain(NamedTuple):
    """A brain that did not answer. The name is empty for who may not know it."""

    brain: str
    reason: str


@dataclass(frozen=True, slots=True)
class Routes:
    """What brains know of a request."""

    route: Route | None
    silent: list[SilentBrain]


def route_of(principal: Principal, org: Org, request: str) -> Routes:
    """Asks all brains: any of them may have had it. `org` came from `get_org`; of a request of another
    org nothing is known."""
    brains = list(Brain.objects.filter(joined_at__isnull=False, lost_at=None))
    path = f"/v1/requests/{quote(request, safe='')}"
    answers = ask_all([Call(Endpoint.of(brain), "GET", path) for brain in brains], BUDGET)
    is_staff = sees_fleet(principal)
    found: list[Route] = []
    silent: list[SilentBrain] = []
    for brain, answer in zip(brains, answers, strict=True):
        record = _record(answer)
        if isinstance(record, str):
            silent.append(SilentBrain(brain.name, record))
        elif record is not None and record.org == org.slug:
            found.append(_route(brain.name, record))
    newest = max(found, key=lambda one: one.record.at, default=None)
    if is_staff:
        return Routes(newest, silent)
    return Routes(newest and _unnamed(newest), [SilentBrain("", OF_OTHERS)] if silent else [])


def _record(answer: Reply | str) -> RequestRecord | str | None:
    """None if the brain has had no such request; a sentence where it can't be asked."""
    if isinstance(answer, str):
        return answer
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return None
    if not answer.is_success:
        return answer.refusal
    try:
        return answer.read(_RECORD, ANSWER)
    except Malformed as error:
        return invalid(error)


def _route(brain: str, record: RequestRecord) -> Route:
    candidates = [
        Candidate(one.replica, one.replica == record.chosen, one) for one in _sorted(record.candidates)
    ]
    return Route(brain, record, candidates, record.outcome.replica if record.outcome else "")


def _sorted(candidates: Sequence[CandidateEstimate]) -> list[CandidateEstimate]:
    """The soonest first; those that were excluded last."""
    return sorted(candidates, key=lambda one: (bool(one.excluded), one.seconds, one.replica))


def _unnamed(route: Route) -> Route:
    """Which replicas there are is the platform's: they are numbered. Sentences may name them."""
    names = {one.replica: f"replica {number}" for number, one in enumerate(route.candidates, 1)}
    candidates = [
        replace(
            one,
            replica=names[one.replica],
            estimate=structs.replace(
                one.estimate,
                replica=names[one.replica],
                path="",
                sibling="",
                excluded="not available" if one.estimate.excluded else "",
            ),
        )
        for one in route.candidates
    ]
    served_by = names.get(route.served_by, "another replica" if route.served_by else "")
    outcome = route.record.outcome
    record = structs.replace(
        route.record,
        chosen=names.get(route.record.chosen, ""),
        why="",
        candidates=(),
        outcome=structs.replace(outcome, replica=served_by) if outcome else None,
    )
    return Route("", record, candidates, served_by)
