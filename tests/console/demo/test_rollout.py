"""`make rollout` is left at any moment; in full it is run in tests/stack."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from console.demo import rollout
from console.demo.staging import CannotStage


class Answers:
    """A console that takes every change, and whose rollout never ends."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []

    def ask(self, method: str, path: str, *, body: Any, if_match: str) -> None:
        assert if_match == "*"
        self.asked.append((method, path, body["spec"]))

    def get(self, path: str, **_query: Any) -> dict[str, Any]:
        return {"series": []} if path == "/metrics/query" else workload()

    def items(self, path: str, query: Any) -> list[dict[str, Any]]:
        del path, query
        return [instance("chat-0-r1-aaaa", serving=True), instance("chat-0-r2-bbbb", serving=False)]


def workload() -> dict[str, Any]:
    """One that is being rolled out."""
    waits = {"type": "RolloutComplete", "status": "False", "reason": "InProgress", "message": "0 of 1"}
    ready = {"type": "Ready", "status": "True", "reason": "Ready", "message": ""}
    return {
        "observed_generation": 2,
        "generation": 2,
        "revision": 2,
        "stable_revision": 1,
        "rollout": {"phase": "running"},
        "ready": "True",
        "replicas": {"desired": 1},
        "conditions": [ready, {"type": "Compiled", "status": "True", "message": ""}, waits],
    }


def instance(name: str, *, serving: bool) -> dict[str, Any]:
    return {
        "replica": "chat-0",
        "ordinal": 0,
        "name": name,
        "goal": "run",
        "created_at": name,
        "state": "ready" if serving else "standby",
        "serving": serving,
        "cache": "attached",
    }


def test_who_does_not_wait_until_it_is_undone_is_told_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    told = rollout.RolloutStory("http://here")
    console = Answers()
    monkeypatch.setattr(told, "_client", console, raising=False)
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(CannotStage) as left:
        told._restore(1, {"name": "chat"})
    assert console.asked == [("PUT", "/workloads/chat", {"name": "chat"})]
    assert str(left.value) == (
        "chat may be left with another revision. Roll it back to revision 1: http://here/workloads/chat/"
    )


@pytest.mark.parametrize("width", [60, 120])
def test_the_picture_has_instances_numbers_and_what_is_not_so(width: int) -> None:
    output = Console(file=io.StringIO(), width=width)
    numbers = rollout.Numbers(requests=40, failed=0, hit_rate=0.814)
    look = rollout.Look(workload(), Answers().items("", {}), numbers)
    output.print(rollout.picture(look, width))
    assert isinstance(output.file, io.StringIO)
    drawn = output.file.getvalue()
    assert "chat-0-r2-bbbb" in drawn
    assert "standby, cache attached" in drawn
    assert "40 requests, 0 failed, hit rate 81.4 %" in drawn
    assert "RolloutComplete: 0 of 1" in drawn
    assert "Compiled" not in drawn, "which is as it should be"


def test_what_is_rolled_out_differs_from_what_there_is() -> None:
    assert rollout._other([], rollout.GOOD) == rollout.GOOD
    assert rollout._other(list(rollout.GOOD), rollout.GOOD) == ()
