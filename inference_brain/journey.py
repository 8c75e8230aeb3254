"""One request on its way through the brain, whoever carries its bytes: the brain's own API or a gateway.

journey = await Journey.begin(traveling, router, ...)
while True:
    attempt = journey.attempt()              # a replica; raises NoReplica
    ...                                      # attempt.failed(error): again, if `may_retry`
    journey.first_token(); journey.usage = …
journey.end("ok")                            # exactly once
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from msgspec import Struct

from inference_brain import metrics
from inference_brain.admission import Place
from inference_brain.api.events import Details, Usage
from inference_brain.asking import Asking, Routed
from inference_brain.choice import Choice, regret
from inference_brain.choice import Outcome as Observed
from inference_brain.choice.choice import Estimate
from inference_brain.decisions import CANDIDATES_MAX, CandidateEstimate, Outcome, RequestRecord
from inference_brain.outbound import Claims, body_for, headers_for
from inference_brain.router import Router
from inference_brain.upstream.fleet import Replica
from kvss_agent.http.client.failures import UpstreamFailed

UNSERVED: Final = {"error", "failed", "invalid"}  # results without an answer
ATTEMPTS_MAX: Final = 3
RECORDS_MAX: Final = 10_000
# Answers of a replica that can't serve: another one may do better. The key that it refuses, and the
# model that it does not know, are the brain's own.
_FAILURES: Final = frozenset({401, 403, 404, 500, 502, 503, 504})


class Remembered(Struct, frozen=True, gc=False):
    """A request as it is remembered: nothing of its prompt, not much memory, and nothing that Python
    goes through when it looks for circles of garbage, while nobody is served. `excluded`: replicas that
    were no candidates, and why."""

    id: str
    at: float
    org: str
    model: str
    prompt_tokens: int | None
    replica: str
    choice: Choice | None
    decision_seconds: float | None
    excluded: Mapping[str, str]
    outcome: Outcome | None
    regret: Mapping[str, int]

    def record(self) -> RequestRecord:
        candidates: list[CandidateEstimate] = []
        if self.choice:
            candidates = [_explained(one) for one in self.choice.estimates]
            candidates += [CandidateEstimate(name, excluded=why) for name, why in self.excluded.items()]
        return RequestRecord(
            id=self.id,
            at=self.at,
            org=self.org,
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            chosen=self.replica,
            why=self.choice.sentence() if self.choice else "",
            candidates=tuple(candidates[:CANDIDATES_MAX]),
            decision_seconds=self.decision_seconds,
            outcome=self.outcome,
            regret=dict(self.regret),
        )


def _explained(one: Estimate) -> CandidateEstimate:
    candidate = one.candidate
    return CandidateEstimate(
        one.name,
        one.promised_tokens,
        max(0, candidate.tier2_tokens - one.borrowed_tokens),
        one.wait_seconds,
        one.fetch_seconds,
        one.compute_seconds,
        candidate.is_guess,
        path=candidate.path,
        sibling_tokens=one.borrowed_tokens,
        sibling=one.sibling,
    )


class Records:
    """The requests of a brain that are running, and the last ones that have ended: why they went where
    they did, and what became of them."""

    def __init__(self, most: int = RECORDS_MAX) -> None:
        self._most = most
        self._running: dict[str, Journey] = {}
        self._ended: OrderedDict[str, Remembered] = OrderedDict()

    def begin(self, journey: Journey) -> None:
        self._running[journey.asking.id] = journey

    def end(self, journey: Journey) -> None:
        name = journey.asking.id
        if self._running.pop(name, None):
            self._ended[name] = journey.remembered()
            if len(self._ended) > self._most:
                self._ended.popitem(last=False)

    def find(self, request: str) -> RequestRecord | None:
        running = self._running.get(request)
        found = running.remembered() if running else self._ended.get(request)
        return found.record() if found else None


class Timer(Protocol):
    def cancel(self) -> None: ...


class Journey:
    """Made when the request has its place; from then on `end` has to be called.

    An answer that is no stream comes as a whole, long after its prompt was computed: then it counts as
    computed when that was expected. The replica has room for others, who need not wait until it ends.
    """

    def __init__(
        self,
        asking: Asking,
        place: Place,
        router: Router,
        claims: Claims,
        trace: Mapping[str, str],
        later: Callable[[float, Callable[[], object]], Timer],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`later`: calls this in so many seconds."""
        self.asking = asking
        self.usage: Usage | None = None
        self.events_passed = 0  # of a stream, to the client
        self.attempts = 0
        self.routed: Routed | None = None
        self.result = ""
        self._place = place
        self._router = router
        self._claims = claims
        self._trace = trace
        self._later = later
        self._computed: Timer | None = None
        self._clock = clock
        self._wall = wall
        self._tried: set[str] = set()
        self._refused_by: list[Replica] = []  # by answers; nobody knows yet whose fault it is
        self._full: set[str] = set()  # those of them that have no room now
        self._sent_at = 0.0  # 0 while it is on no replica
        self._sent_at_last = 0.0
        self._first_at: float | None = None
        self._ended_at: float | None = None
        self._queued = clock() - asking.arrived
        router.fleet.begun(asking.model.name, asking.org.name)

    @property
    def replica(self) -> Replica | None:
        return self.routed.replica if self.routed else None

    def avoid(self, replicas: Iterable[str]) -> None:
        """Choose none of these."""
        self._tried.update(replicas)

    def attempt(self) -> Replica:
        """Choose a replica that has not failed yet for this request. Raises NoReplica."""
        routed = self._router.choose(self.asking, self._tried)
        model = self.asking.model.name
        self.routed = routed
        self.attempts += 1
        self._sent_at = self._clock()
        self._place.routed(routed.replica.name)
        self._router.flights[model].begin(self.asking.id, routed.choice, self._sent_at)
        if not routed.replica.in_progress:
            routed.replica.heard_at = self._sent_at
        routed.replica.in_progress += 1
        self._router.note_sent(self.asking, routed)
        if not self.asking.request.is_stream:
            self._computed = self._later(routed.choice.chosen.seconds, self._prompt_is_computed)
        return routed.replica

    def body(self, replica: Replica) -> bytes:
        asking = self.asking
        driver = replica.spec.driver
        claim = None
        if driver:
            sibling = self.routed.choice.chosen.sibling if self.routed else ""
            org, rules = asking.org.name, asking.request.rules
            claim = self._claims.mint(driver, org, rules, self._wall(), sibling)
        tokens = None if asking.tokens is None else asking.tokens.ids
        return body_for(replica, asking.request, asking.org, claim, tokens)

    def headers(self, replica: Replica) -> dict[str, str]:
        return headers_for(replica, self.asking.id, self._trace)

    def failed(self, error: UpstreamFailed | None, *, is_full: bool = False) -> None:
        """The attempt failed, by an error or by an answer, before anything of it was passed on.
        `is_full`: the answer says that the replica has no room now."""
        replica = self._leave_replica()
        if replica is None:
            return
        self._tried.add(replica.name)
        if error is None:
            self._refused_by.append(replica)
            if is_full:
                self._full.add(replica.name)
        else:
            self._router.fleet.failed(replica, error, self.asking.org.name, is_proven=True)

    def may_retry(self, reason: str) -> bool:
        """Whether it may be sent to another replica. Takes that from the budget, unless the replica has
        done no work for it."""
        model = self.asking.model.name
        if self.attempts >= ATTEMPTS_MAX or not self._router.fleet.serving(model, self._tried):
            return False
        if reason == "status" and not self._router.fleet.budget(model).take(self._clock()):
            return False
        self._router.counts.add(metrics.RETRIES, model, reason)
        return True

    def heard(self) -> None:
        """The replica has said something."""
        if self.routed:
            self.routed.replica.heard_at = self._clock()

    def first_token(self) -> None:
        """The answer has begun. Once is enough."""
        if self._first_at is not None or self.routed is None:
            return
        self._first_at = self.routed.replica.heard_at = now = self._clock()
        self._prompt_is_computed()
        asking, fleet = self.asking, self._router.fleet
        fleet.succeeded(self.routed.replica, asking.org.name)
        counts, waited, model = self._router.counts, now - asking.arrived, asking.model.name
        for one in self._refused_by:
            fleet.failed(one, None, asking.org.name, is_proven=True)
            if one.name in self._full:
                self._count_at(one, metrics.FULL)
                continue
            of_any = fleet.refused(one, asking.org.name)
            self._count_at(one, metrics.REFUSED if of_any else metrics.REFUSED_AGAIN)
        counts.time(metrics.TTFT, waited, asking.org.name, model)
        counts.time(metrics.REPLICA_TTFT, waited, model, self.routed.replica.name)

    def _count_at(self, one: Replica, result: str) -> None:
        """Not where another instance has taken its place meanwhile: it is no result of that one."""
        model = self.asking.model.name
        if self._router.fleet.replica(model, one.name) in (one, None):
            self._router.counts.add(metrics.REPLICA_RESULTS, model, one.name, result)

    def _prompt_is_computed(self) -> None:
        if flights := self._router.flights.get(self.asking.model.name):  # else it has been removed
            flights.first_token(self.asking.id, self._clock())
        self._place.first_token(is_known=self.asking.request.is_stream)

    def end(self, result: str) -> None:
        """It is over: `result` as `brain_requests_total` counts it. Does nothing the second time."""
        if self.result:
            return
        self.result = result
        self._ended_at = self._clock()
        replica = self._leave_replica()
        asking, counts = self.asking, self._router.counts
        if self._first_at is None and len(self._refused_by) == 1:  # by more of them: it is the request
            fleet = self._router.fleet
            fleet.failed(self._refused_by[0], None, asking.org.name, is_proven=False)
        most = asking.model.tokens_max * asking.request.answers
        self.usage = usage = self.usage and _believed(self.usage, most)
        org, model = asking.org.name, asking.model.name
        counts.add(metrics.REQUESTS, org, model, result)
        # By more of them: it may be the request, and counts at all of them, not at the last one alone.
        unanswered = self._refused_by if self._first_at is None and len(self._refused_by) > 1 else []
        for one in unanswered:
            self._count_at(one, metrics.UNANSWERED)
        if replica and replica not in unanswered:
            self._count_at(replica, result)
        completed = usage.completion_tokens if usage else None
        if completed is None:  # it ended before the engine has said so
            completed = min(self.events_passed, most)
        cached = usage.cached_tokens if usage else None
        prompt = usage.prompt_tokens if usage else 0
        computed = None if usage is None else max(1, prompt - (cached or 0))
        if usage is None and self._first_at is None and result in UNSERVED:
            computed = 0  # it is not the org's fault
        self._place.leave(completed, computed, prompt)
        if usage:
            counts.add(metrics.TOKENS, org, "prompt", amount=prompt)
            counts.add(metrics.TOKENS, org, "cached", amount=cached or 0)
        if completed:
            counts.add(metrics.TOKENS, org, "completion", amount=completed)
        self._learn(cached)

    def _leave_replica(self) -> Replica | None:
        """It is on no replica any more. Returns the one that it was on."""
        if self.routed is None:
            return None
        if self._computed:
            self._computed.cancel()
        flights = self._router.flights.get(self.asking.model.name)
        if flights:
            flights.end(self.asking.id)
        if self._sent_at:
            self._sent_at_last, self._sent_at = self._sent_at, 0.0
            self.routed.replica.in_progress -= 1
        return self.routed.replica

    def _learn(self, cached: int | None) -> None:
        """What the first token took, for the next estimates."""
        if self.routed is None or self._first_at is None:
            return
        asking, counts, choice = self.asking, self._router.counts, self.routed.choice
        seconds = self._first_at - self._sent_at_last
        org, model = asking.org.name, asking.model.name
        is_stream = asking.request.is_stream  # else nobody knows when the first token came
        if is_stream:
            error = abs(seconds - choice.chosen.seconds)
            counts.time(metrics.ESTIMATE_ERROR, error, model, self.routed.replica.name)
        if cached is not None and asking.prompts:
            counts.add(metrics.PREDICTED_HIT, org, model, amount=choice.chosen.promised_tokens)
            counts.add(metrics.ACTUAL_HIT, org, model, amount=cached)
            for cause, tokens in regret(choice, self._observed(seconds, cached)).items():
                counts.add(metrics.REGRET, org, cause, amount=tokens)
        rates = self._router.rates.get(model)
        if rates and is_stream:
            rates.observe(choice, self._observed(seconds, cached), self._clock())
        elif rates:
            rates.answered(choice, seconds)

    def _observed(self, seconds: float, cached: int | None) -> Observed:
        completed = self.usage.completion_tokens if self.usage else None
        return Observed(ttft_seconds=seconds, cached_tokens=cached, output_tokens=completed)

    # For people

    def remembered(self) -> Remembered:
        asking, routed = self.asking, self.routed
        return Remembered(
            asking.id,
            asking.at,
            asking.org.name,
            asking.model.name,
            None if asking.tokens is None else asking.prompt_tokens,
            routed.replica.name if routed else "",
            routed.choice if routed else None,
            routed.seconds if routed else None,
            routed.excluded if routed else {},
            self._outcome(),
            self._regret(),
        )

    def _outcome(self) -> Outcome | None:
        if not self.result or self._ended_at is None:
            return None
        usage = self.usage
        first = None if self._first_at is None else self._first_at - self._sent_at_last
        return Outcome(
            replica=self.replica.name if self.replica else "",
            result=self.result,
            attempts=max(1, self.attempts),
            queued_seconds=self._queued,
            first_token_seconds=first,
            total_seconds=self._ended_at - self.asking.arrived,
            hit_tokens=usage.cached_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
        )

    def _regret(self) -> dict[str, int]:
        cached = self.usage.cached_tokens if self.usage else None
        if self.routed is None or cached is None or not self.asking.prompts:
            return {}
        found = regret(self.routed.choice, self._observed(0.0, cached))
        return {str(cause): tokens for cause, tokens in found.items()}


def _believed(usage: Usage, most: int) -> Usage:
    """What an engine says of one request, as far as it can be: `most` tokens of prompts, and of answers.
    An org is charged for it, and all brains add it up."""
    prompt = min(max(0, usage.prompt_tokens), most)
    completed, cached = usage.completion_tokens, usage.cached_tokens
    return Usage(
        prompt,
        None if completed is None else min(max(0, completed), most),
        None if cached is None else Details(min(max(0, cached), prompt)),
    )


def is_failure(status: int) -> bool:
    """Whether an answer says that the replica can't serve, rather than that the request is wrong."""
    return status in _FAILURES
