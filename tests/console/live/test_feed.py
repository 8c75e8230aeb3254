"""What a viewer is told, whatever it misses: pure, so tried on random histories."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as some
import pytest
from hypothesis import given

from console.live.feed import EVENTS_KEPT, STATE_BYTES_MAX, Feed, Update
from console.live.messages import Frame, NotUnderstood, Subscribe, Unsubscribe, frame, read
from console.live.outbox import WAITING_MAX, Outbox

NOW = 1_790_000_000.0


def event(number: int, kind: str = "org.update") -> dict[str, Any]:
    return {"id": number, "at": "2026-11-21T03:00:00.000Z", "kind": kind, "sentence": "", "data": {}}


def begun(*events: dict[str, Any], last: int = 0) -> Feed:
    number = max([last, *(one["id"] for one in events)])
    return Feed.begin("org:acme", number, events, Update(number), NOW)


class Page:
    """What a client has to do, in a few lines: docs/live.md tells it in words."""

    def __init__(self) -> None:
        self.seq: int | None = None  # of this connection
        self.highest = 0
        self.event: int | None = None
        self.events: list[int] = []
        self.state: Any = None
        self.gaps = 0
        self.wants_more = True

    def take(self, frame: Frame) -> None:
        said = json.loads(frame.text)
        data, seq = said["data"], said["seq"]
        if said["kind"] == "gap":
            self.gaps += 1
            return
        if said["kind"] == "heartbeat":
            self.wants_more |= seq != self.seq
            return
        if said["kind"] == "delta":
            if self.seq is None or seq != self.seq + 1:
                self.wants_more = True
                return
        else:
            self.wants_more = False
        assert seq >= self.highest + (said["kind"] == "delta"), "over restarts, too"
        self.seq = self.highest = seq
        known = self.event or 0
        self.events += [one["id"] for one in data.get("events", ()) if one["id"] > known]
        self.event = max(known, data["event"])
        self.state = data.get("state", self.state)


@pytest.mark.slow
@given(some.data())
def test_a_page_that_misses_frames_ends_with_all_events_in_order_and_once(data: some.DataObject) -> None:
    """Promise 10: sequences grow, gaps are noticed and filled, and in the end the page is as storage
    is."""
    stored: list[int] = []
    feed, page, number = begun(last=0), Page(), 0
    state: dict[str, int] = {}
    for one in feed.opening(None, NOW):
        page.take(one)
    for now in range(int(NOW), int(NOW) + data.draw(some.integers(1, 30))):
        new = []
        for _ in range(data.draw(some.integers(0, 3))):
            number += data.draw(some.integers(1, 5))  # those between are of other topics
            new.append(event(number))
        stored += [one["id"] for one in new]
        state = data.draw(some.sampled_from([state, {"firing": number}]))
        told = feed.advance(Update(number, new, (), {}, state), now)
        if told and not data.draw(some.booleans(), label="lost"):
            page.take(told)
        restarted = data.draw(some.integers(0, 9)) == 0
        if restarted:  # by another process, later
            kept = [event(one) for one in stored[-EVENTS_KEPT:]]
            feed = Feed.begin("org:acme", number, kept, Update(number, state=state), now + 1)
            page.wants_more, page.seq = True, None
        if page.wants_more and data.draw(some.booleans(), label="asks again"):
            for one in feed.opening(page.event, NOW):
                page.take(one)
    page.take(feed.heartbeat(NOW))
    if page.wants_more:
        for one in feed.opening(page.event, NOW):
            page.take(one)
    assert page.events == stored
    assert page.state == state
    assert page.gaps == 0


def test_a_snapshot_has_what_was_missed_and_says_where_more_was() -> None:
    feed = begun(*(event(number) for number in range(1000, 1000 + EVENTS_KEPT)))
    [snapshot] = feed.opening(1150, NOW)
    assert [one["id"] for one in json.loads(snapshot.text)["data"]["events"]] == list(range(1151, 1200))
    gap, snapshot = feed.opening(17, NOW)
    assert json.loads(gap.text)["data"] == {"after": 17, "before": 1000}
    assert len(json.loads(snapshot.text)["data"]["events"]) == EVENTS_KEPT
    [fresh] = feed.opening(None, NOW)
    assert json.loads(fresh.text)["data"]["events"] == [], "a new page has them from its server"


def test_nothing_is_told_where_nothing_changed() -> None:
    feed = begun()
    assert feed.advance(Update(7, (), (), {}, {}), NOW) is None
    assert json.loads(feed.opening(None, NOW)[0].text)["data"]["event"] == 7
    told = feed.advance(Update(7, (), ("operation",), {}, {}), NOW)
    assert told
    assert json.loads(told.text)["data"] == {"event": 7, "changed": ["operation"]}


def test_figures_that_end_are_told_once() -> None:
    feed = begun()
    numbers: list[dict[str, Any]] = [{"figures": {}}, {}, {}]
    told = [feed.advance(Update(0, numbers=its), NOW) for its in numbers]
    assert [one is not None for one in told] == [True, True, False]


def test_a_state_that_is_too_large_is_only_said_to_have_changed() -> None:
    feed = begun()
    told = feed.advance(Update(0, state={"x": "y" * STATE_BYTES_MAX}), NOW)
    assert told
    assert json.loads(told.text)["data"] == {"event": 0, "changed": ["state"], "state": {}}


def test_a_change_of_members_asks_for_another_look_at_who_may_see() -> None:
    told = begun().advance(Update(3, [event(3, "org.member")]), NOW)
    assert told
    assert told.concerns_access
    other = begun().advance(Update(3, [event(3)]), NOW)
    assert other
    assert not other.concerns_access


def test_what_waits_for_a_viewer_that_does_not_read_is_bounded() -> None:
    outbox = Outbox()
    for number in range(1000):
        outbox.put([frame("fleet", "delta", number, NOW, {}), frame("org:a", "delta", number, NOW, {})])
    assert len(outbox) == 2 * WAITING_MAX
    assert outbox.skipped == 2 * (1000 - WAITING_MAX)
    first, *_ = outbox.take()
    assert json.loads(first.text)["seq"] == 1000 - WAITING_MAX, "the newest are kept"
    assert len(outbox) == 0


# What viewers say


def test_messages_that_are_understood() -> None:
    assert read('{"type": "subscribe", "topic": "org:acme"}') == Subscribe("org:acme")
    assert read('{"type": "subscribe", "topic": "fleet", "since": 7}') == Subscribe("fleet", 7)
    assert read('{"type": "unsubscribe", "topic": "node:ax-7"}') == Unsubscribe("node:ax-7")


JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
)
ALMOST = some.fixed_dictionaries(
    {"type": some.sampled_from(["subscribe", "unsubscribe", "x"])},
    optional={"topic": JSON | some.just("fleet"), "since": JSON, "more": JSON},
)


@pytest.mark.slow
@given(some.none() | some.text() | (JSON | ALMOST).map(json.dumps))
def test_whatever_is_said_is_understood_or_refused_with_a_sentence(text: str | None) -> None:
    try:
        message = read(text)
    except NotUnderstood as problem:
        refusal = str(problem)
    else:
        refusal = ""
        assert message.topic
    assert refusal.endswith(".") or not refusal


@pytest.mark.parametrize("topic", ["org:*", "", "x" * 300, "fleet\n", "org:a b", "ORG:a", "org:a\u0000"])
def test_a_topic_is_one_and_nothing_else(topic: str) -> None:
    with pytest.raises(NotUnderstood):
        read(json.dumps({"type": "subscribe", "topic": topic}))
