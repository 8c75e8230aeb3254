"""What a brain reports of itself, however much it serves."""

from __future__ import annotations

from itertools import product
from typing import Final

from inference_brain.metrics import METRICS
from telemetry.emit.deltas import Deltas
from telemetry.histogram import Histogram
from telemetry.metrics import Kind, Sink

ORGS, MODELS, REPLICAS = 100, 2, 25  # replicas of each model
FEW: Final = 4  # values of any other label: results, reasons, causes


def collect(into: Sink) -> None:
    """A value of each metric for all that there may be of its labels."""
    many = {"org": ORGS, "model": MODELS, "replica": REPLICAS, "driver": REPLICAS}
    for metric in METRICS:
        values = [[f"{name}-{one}" for one in range(many.get(name, FEW))] for name in metric.labels]
        into.put(
            metric,
            [
                (
                    dict(zip(metric.labels, labels, strict=True)),
                    Histogram() if metric.kind is Kind.HISTOGRAM else 1.0,
                )
                for labels in product(*values)
            ],
        )


def test_a_hundred_orgs_and_fifty_replicas_all_have_numbers_of_their_own() -> None:
    deltas = Deltas(collect)
    shape, _ = deltas.take(1)
    assert deltas.left_out == 0
    shown = {value for one in shape.series for _, value in one.labels}
    assert {f"org-{one}" for one in range(ORGS)} <= shown
