"""Current numbers: the overview, and what models, orgs, nodes and drivers do; live at a terminal."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from console.ctl.cells import NONE, percent, shown, spoken
from console.ctl.client import Client, Item
from console.ctl.output import GAP, Screen, fitting, widths_of
from telemetry import units

SPAN_SECONDS: Final = 60
BAR: Final = 20
TOPIC: Final = "topic"


@dataclass(frozen=True)
class Number:
    """A column: a metric, what its values become, and in what unit they are shown."""

    heading: str
    metric: str
    fold: str
    unit: str


@dataclass(frozen=True)
class Numbers:
    """A table: the topic that is asked, and the label that tells its rows apart."""

    heading: str
    topic: str
    by: str
    columns: tuple[Number, ...]


N = Number
NUMBERS: Final = {
    "models": Numbers(
        "MODEL",
        "fleet",
        "model",
        (
            N("REQUESTS", "brain_requests_total", "rate", "/s"),
            N("FIRST TOKEN P50", "brain_ttft_seconds", "p50", "seconds"),
            N("P99", "brain_ttft_seconds", "p99", "seconds"),
            N("HIT TOKENS", "brain_actual_hit_tokens_total", "rate", "/s"),
            N("RUNNING", "brain_replica_requests", "total", ""),
        ),
    ),
    "orgs": Numbers(
        "ORG",
        "org:*",
        TOPIC,
        (
            N("REQUESTS", "brain_requests_total", "rate", "/s"),
            N("FIRST TOKEN P99", "brain_ttft_seconds", "p99", "seconds"),
            N("QUEUED", "brain_queue_requests", "total", ""),
            N("CACHED", "swdriver_org_bytes", "total", "bytes"),
            N("REFILL P99", "swdriver_refill_seconds", "p99", "seconds"),
        ),
    ),
    "nodes": Numbers(
        "NODE",
        "node:*",
        TOPIC,
        (
            N("CORES", "kvss_cpu_seconds_total", "rate", ""),
            N("GRANTED", "kvss_granted_bytes", "total", "bytes"),
            N("RESIDENT", "kvss_resident_bytes", "total", "bytes"),
            N("EVICT P99", "kvss_evict_seconds", "p99", "seconds"),
            N("REFILL P99", "kvss_refill_seconds", "p99", "seconds"),
        ),
    ),
    "drivers": Numbers(
        "DRIVER",
        "driver:*",
        TOPIC,
        (
            N("REQUESTS", "swdriver_requests_total", "rate", "/s"),
            N("CACHED", "swdriver_org_bytes", "total", "bytes"),
            N("EVICT P99", "swdriver_evict_seconds", "p99", "seconds"),
            N("REFILL P99", "swdriver_refill_seconds", "p99", "seconds"),
        ),
    ),
}


def top(client: Client, given: argparse.Namespace, screen: Screen) -> None:
    """Print them once, or again and again where somebody looks."""
    if given.once or not screen.is_terminal:
        for line, style in lines_of(client, given, screen.width):
            screen.say(line, style)
        return
    # Here, since no other command draws a screen.
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(no_color=not screen.has_colour, highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            lines = lines_of(client, given, console.width)
            texts = [
                Text(spoken(line, screen.encoding), style=style, no_wrap=True) for line, style in lines
            ]
            live.update(Group(*texts[: console.height]), refresh=True)
            time.sleep(given.interval)


def lines_of(client: Client, given: argparse.Namespace, width: int | None) -> list[tuple[str, str]]:
    """Each line with its style."""
    if given.what in NUMBERS:
        return _table(*_numbers(client, NUMBERS[given.what]), width)
    return _overview(client.get("/overview", org=given.org), width)


def _numbers(client: Client, numbers: Numbers) -> tuple[list[str], list[list[str]]]:
    start = datetime.fromtimestamp(time.time() - SPAN_SECONDS, UTC).isoformat()
    rows: dict[str, list[str]] = {}
    for place, one in enumerate(numbers.columns):
        answer = client.get(
            "/metrics/query",
            topic=numbers.topic,
            name=one.metric,
            fold=one.fold,
            by=numbers.by,
            start=start,
        )
        for series in answer["series"]:
            name = series["labels"].get(numbers.by, "").partition(":" if numbers.by == TOPIC else "\0")
            row = rows.setdefault(name[2] or name[0], [NONE] * len(numbers.columns))
            known = [value for value in series["values"] if value is not None]
            row[place] = units.shown(known[-1], one.unit) if known else NONE
    headings = [numbers.heading, *(one.heading for one in numbers.columns)]
    return headings, [[name, *row] for name, row in sorted(rows.items()) if name]


def _table(
    headings: list[str], rows: Sequence[Sequence[str]], width: int | None
) -> list[tuple[str, str]]:
    if not rows:
        return [("Nothing has reported numbers in the last minute.", "")]
    widths = fitting(widths_of([headings, *rows]), width)
    lines = [
        GAP.join(cell.ljust(size) for cell, size in zip(row, widths, strict=True))
        for row in [headings, *rows]
    ]
    return [(line.rstrip(), "" if place else "bold") for place, line in enumerate(lines)]


def _overview(found: Item, width: int | None) -> list[tuple[str, str]]:
    now = time.time()
    lines = [(found["verdict"], "bold")]
    if found["reported_at"]:
        lines.append((f"Drivers reported {shown(found['reported_at'], 'age', now)}.", "dim"))
    lines.append(("", ""))
    figures = [
        [
            one["label"],
            _figure(one["value"], one["unit"]),
            _figure(next(iter(one["past"]), None), one["unit"]),
            _figure(one["yesterday"], one["unit"]),
        ]
        for one in found["figures"]
    ]
    if figures:
        lines += [*_table(["FIGURE", "NOW", "AN HOUR AGO", "YESTERDAY"], figures, width), ("", "")]
    if fleet := found["fleet"]:
        states = ", ".join(f"{one['count']} {one['what']}" for one in fleet["nodes"])
        drivers = f"{fleet['drivers_alive']} alive, {fleet['drivers_lost']} lost"
        lines.append((f"Nodes: {states or 'none'}. Drivers: {drivers}.", ""))
    lines.append((f"Sessions: {found['sessions']}, waiting: {found['sessions_waiting']}.", ""))
    for alert in found["alerts"]:
        text = f"{alert['severity']}: {alert['sentence']} ({shown(alert['since'], 'age', now)})"
        lines.append((text, "red" if alert["severity"] == "page" else "yellow"))
    lines += [(_bar(one), "") for one in found["operations"]]
    return lines


def _figure(value: float | None, unit: str) -> str:
    return NONE if value is None else units.shown(value, unit)


def _bar(operation: dict[str, Any]) -> str:
    how_far = operation["progress"]
    done = round(BAR * how_far["percent"] / 100)
    return f"[{'#' * done}{'.' * (BAR - done)}] {percent(how_far['percent']):>5} {operation['sentence']}"
