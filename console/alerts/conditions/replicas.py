"""Conditions on what brains see of replicas. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from console.alerts.conditions.condition import Finding, Snapshot, Tables, ValuesOf, verdict
from console.alerts.state.lifecycle import Verdict
from telemetry.metrics import OTHER
from telemetry.queries import TOPIC
from telemetry.units import counted


def left_out(tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
    """Breach for each replica that more than so many brains leave out, on average over the window. The
    sentence has the most that did at a time.

    The query tells states of replicas apart; those that the table does not have are no finding. A
    replica that was removed is gone, though the window has it still.
    """
    states: dict[tuple[str, str, str], dict[str, tuple[float, float]]] = {}
    for line in tables["states"]:
        if known := line.numbers:
            of = line.labels[TOPIC], line.labels["model"], line.labels["replica"]
            states.setdefault(of, {})[line.labels["state"]] = sum(known) / len(known), max(known)
    for (topic, model, replica), its in sorted(states.items()):
        limit = values(topic)["brains"]
        out = {state: its.get(state, (0.0, 0.0)) for state in ("ejected", "unreachable")}
        brains = sum(average for average, _ in out.values())
        state = max(out, key=lambda name: out[name])
        most = round(out[state][1])
        told = f"replica {replica} of {model} is {state} at {counted(most, 'brain')}"
        exists = OTHER in (model, replica) or (model, replica) in snapshot.replicas
        yield Finding(
            topic,
            verdict(breach=brains > limit) if exists else Verdict.GONE,
            told,
            brains,
            limit,
            labels={"model": model, "replica": replica},
            evidence={"brains": {name: round(value, 1) for name, (value, _) in its.items()}},
        )
