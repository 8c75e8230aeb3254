"""The judge notices what it is there to notice, and the killer keeps to its rules."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.kept import Kept
from tests.chaos.killer import Killer, Outage, Victim
from tests.chaos.loads import is_whole
from tests.chaos.viewers import Topic
from tests.live import wait_until

IDLE = ("sh", "-c", 'touch "$NOTIFY_FILE"; exec sleep 600')


def frame(kind: str, seq: int, event: int, *events: int) -> dict[str, Any]:
    return {
        "kind": kind,
        "seq": seq,
        "data": {"event": event, "events": [{"id": one} for one in events]},
    }


def test_a_viewer_notices_a_missing_frame_and_asks_again_until_the_snapshot() -> None:
    topic = Topic("fleet")
    assert not topic.take(frame("snapshot", 10, 5))
    assert not topic.take(frame("delta", 11, 6, 6))
    assert topic.take(frame("delta", 13, 8, 8))
    assert not topic.take(frame("delta", 14, 9, 9))
    assert not topic.take(frame("snapshot", 14, 9, 7, 8, 9))
    assert (topic.missed, sorted(topic.events), topic.broken) == (1, [6, 7, 8, 9], [])
    assert topic.take(frame("heartbeat", 15, 9))


def test_what_a_viewer_neither_got_nor_was_told_to_be_missing_is_unnoticed() -> None:
    topic = Topic("fleet")
    topic.take(frame("snapshot", 10, 5))
    topic.take({"kind": "gap", "seq": 20, "data": {"after": 5, "before": 8}})
    topic.take(frame("snapshot", 20, 10, 8, 10))
    assert topic.unnoticed([4, 5, 6, 7, 8, 9, 10]) == [9]
    topic.take(frame("snapshot", 19, 10))
    assert len(topic.broken) == 1


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ('data: {"choices": [{"finish_reason": "length"}]}\n\ndata: [DONE]\n', True),
        ('data: {"choices": [{"finish_reason": null}]}\n\ndata: [DONE]\n', False),
        ('data: {"choices": [{"finish_reason": "length"}]}\n\n', False),
        (
            'data: {"choices": [{"finish_reason": "length"}]}\n\ndata: {"error": {}}\n\ndata: [DONE]\n',
            False,
        ),
        ("", False),
    ],
)
def test_a_stream_is_whole_with_a_reason_and_its_end(text: str, *, whole: bool) -> None:
    assert is_whole(text) is whole


@contextlib.contextmanager
def kept(directory: Path, *names: str) -> Iterator[dict[str, Kept]]:
    made = {name: Kept(name, IDLE, os.environ, directory) for name in names}
    try:
        for one in made.values():
            one.start()
        yield made
    finally:
        for one in made.values():
            one.stop()


def ready_pid(one: Kept) -> int | None:
    return one.ready_pid


def test_never_are_two_of_a_kind_away_and_each_comes_back(tmp_path: Path) -> None:
    with kept(tmp_path, "web", "web-2", "beat", "beat-2") as processes:
        for one in processes.values():
            wait_until("it is ready", partial(ready_pid, one))
        victims = [
            Victim(name.removesuffix("-2"), name, partial(ready_pid, one))
            for name, one in processes.items()
        ]
        with Killer(victims, seed=1, pause_seconds=(0.0, 0.0)) as killer:
            wait_until(
                "each was killed twice",
                lambda: all(killer.kills[name] >= 2 for name in processes),
                120.0,
            )
        assert killer.away == []
        assert {name: one.starts - 1 for name, one in processes.items()} == killer.kills
    for first, second in itertools.combinations(killer.outages, 2):
        if first.victim.kind == second.victim.kind:
            assert not first.overlaps(second.began, second.ended or second.began)


def test_a_request_is_excused_by_an_outage_that_it_touches() -> None:
    outage = Outage(Victim("web", "web", lambda: None), 1, began=10.0, ended=20.0)
    assert [outage.overlaps(*when) for when in ((8, 9), (9, 10), (12, 13), (20, 21), (21, 22))] == [
        *(False, True, True, True, False)
    ]
    outage.ended = None
    assert outage.overlaps(99, 100)
