"""What rules find about brains and about how requests are routed. Pure."""

from __future__ import annotations

from dataclasses import replace

from console.alerts.rules.catalogue import BY_SLUG
from console.alerts.state.lifecycle import Verdict
from telemetry.queries import ResultSeries
from tests.console.alerts.numbers import at, judged, line, world

BREACH, FINE = Verdict.BREACH, Verdict.OK


def test_an_estimate_is_off_by_its_share_of_the_time_to_first_token() -> None:
    assert estimates([(0.6, 1.0, 50)]) == [BREACH]
    assert estimates([(0.4, 1.0, 50)]) == [FINE]
    assert estimates([(0.04, 0.04, 50)]) == [], "too short to say anything"


def test_few_requests_say_nothing_of_estimates() -> None:
    assert estimates([(0.6, 1.0, 6), (0.6, 1.0, 25)]) == []
    assert estimates([(0.6, 1.0, 7), (None, None, 0), (0.6, 1.0, 25)]) == [BREACH]


def test_a_minute_with_a_few_bad_estimates_counts_as_much_as_they_are() -> None:
    assert estimates([(0.1, 1.0, 95), (5.0, 1.0, 5)]) == [FINE], "3 s in the mean of both minutes"
    assert estimates([(0.1, 1.0, 5), (0.7, 1.0, 95)]) == [BREACH], "0.4 s in the mean of both minutes"


def estimates(minutes: list[tuple[float | None, float | None, int]]) -> list[Verdict]:
    """Of the mean error and the mean time to first token by the minute, and how many requests."""
    errors, ttfts, counts = zip(*minutes, strict=True)
    tables = {
        "error": [line("brain:east", *errors, model="chat")],
        "ttft": [line("brain:east", *ttfts, model="chat")],
        **{f"{name}_count": [line("brain:east", *counts, model="chat")] for name in ("error", "ttft")},
    }
    return [one.verdict for one in judged(BY_SLUG["estimate-off"], tables)]


def test_a_replica_that_one_brain_leaves_out_is_found_once_with_its_state() -> None:
    def state(name: str, *brains: float) -> ResultSeries:
        return line("fleet", *brains, model="chat", replica="chat-1", state=name)

    rule = BY_SLUG["replica-ejected"]
    now = replace(world(), replicas=frozenset({("chat", "chat-1")}))
    [fine] = judged(rule, {"states": [state("ready", 2, 2), state("ejected", 0, 0)]}, now)
    assert fine.verdict is FINE
    out = {"states": [state("ready", 1, 1), state("unreachable", 1, 1)]}
    [found] = judged(rule, out, now)
    assert found.verdict is BREACH
    assert found.labels == {"model": "chat", "replica": "chat-1"}
    assert found.sentence == "replica chat-1 of chat is unreachable at 1 brain"
    told = {"states": [state("ready", 2, 0, 0), state("unreachable", 0, 2, 2)]}
    [found] = judged(rule, told, now)
    assert found.sentence == "replica chat-1 of chat is unreachable at 2 brains", "it was none at first"
    [removed] = judged(rule, out, replace(now, replicas=frozenset({("chat", "chat-2")})))
    assert removed.verdict is Verdict.GONE


def test_that_replicas_are_left_out_is_told_also_where_there_are_too_many_to_name_them() -> None:
    out = [
        line("fleet", 1, model=model, replica="other", state="ejected") for model in ("chat", "other")
    ]
    found = judged(BY_SLUG["replica-ejected"], {"states": out})
    assert [one.verdict for one in found] == [BREACH, BREACH]


def test_a_map_that_is_old_now_is_stale_and_one_that_was_is_not() -> None:
    tables = {
        "age": [line("brain:east", 80, 90, driver="job7"), line("brain:west", 90, 2, driver="job7")]
    }
    found = judged(BY_SLUG["map-stale"], tables)
    assert [one.verdict for one in found] == [BREACH, FINE]
    assert found[0].sentence == "the map of job7 at east is 90 s old"


def test_requests_past_their_deadline_are_the_orgs_to_see() -> None:
    tables = {"late": [line("org:acme", 4, None, 9), line("org:globex", 3)]}
    found = judged(BY_SLUG["queue-past-deadline"], tables)
    assert [(one.topic, one.verdict) for one in found] == [("org:acme", BREACH), ("org:globex", FINE)]
    assert found[0].sentence == "13 requests of acme waited past their deadline"


def test_orgs_are_served_unfairly_beyond_what_a_long_request_explains() -> None:
    for gap, verdict in ((600_000, BREACH), (100_000, FINE)):
        [found] = judged(BY_SLUG["routing-unfair"], {"gap": [line("brain:east", 0, gap)]})
        assert found.verdict is verdict


def test_a_brain_that_has_joined_and_is_silent_is_found() -> None:
    now = replace(world(600, ax_1=600), joined={"brain:east": at(0), "brain:west": at(0)})
    now = replace(now, last_seen={**now.last_seen, "brain:west": at(599)})
    found = judged(BY_SLUG["brain-not-reporting"], {}, now)
    assert [(one.topic, one.verdict) for one in found] == [("brain:east", BREACH), ("brain:west", FINE)]
    assert "BRAIN_TELEMETRY" in found[0].sentence
