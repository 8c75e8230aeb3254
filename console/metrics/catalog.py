"""All metrics of Tidegate's processes. docs/metrics.md is generated from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from console.live import counts as live
from console.metrics import own, requests
from console.workloads.leader import figures as orchestrator
from inference_brain import metrics as brain
from kvss_agent import metrics as agent
from swdriver_shim.daemon import metrics as driver
from telemetry.emit import emitter
from telemetry.ingest import service as ingest_service
from telemetry.metrics import Metric
from telemetry.store import history, rollup

# By process, as in docs/metrics.md.
CATALOGS: Final = {
    "Agents": agent.METRICS,
    "Drivers": driver.METRICS,
    "Brains": brain.METRICS,
    "Orchestrators": orchestrator.METRICS,
    "Ingest": ingest_service.METRICS,
    "Roll-up": rollup.METRICS,
    "Every process with telemetry": emitter.METRICS,
    "Console": own.METRICS,
    "Web processes": live.METRICS,
    "Web processes, requests": requests.METRICS,
    "Web processes, history": history.METRICS,
}
METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric for catalog in CATALOGS.values() for metric in catalog
}


def table() -> str:
    """The tables of docs/metrics.md, in Markdown."""
    parts = []
    for who, catalog in CATALOGS.items():
        parts.append(f"## {who}\n\n| name | kind | labels | description |\n|---|---|---|---|\n")
        for metric in catalog:
            kind = metric.kind.name.lower() + (", corrected" if metric.corrected else "")
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            parts.append(f"| `{metric.name}` | {kind} | {labels} | {metric.text} |\n")
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"
