"""How requests fare, as verdicts are made from it, among any number of other models."""

from __future__ import annotations

from console.workloads.leader.health import question
from inference_brain import metrics as brain
from telemetry.queries import Fold


def test_only_series_of_the_model_are_asked_for() -> None:
    asked = question("example/chat", brain.TTFT, Fold.P50, ("replica",), 1000.0)
    assert asked.where == {"model": "example/chat"}
