"""What every benchmark prints and writes: a table for people, rows for machines."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from console.environment import PROJECT
from telemetry import units

QUICK_HELP = "end within three minutes on two slow cores; read only the ratios"
_TAIL = "against | ratio | goal | holds |"
_BEGAN = time.monotonic()


@dataclass(frozen=True)
class Row:
    """One figure. `ratio`: ours over the peer or limit measured in the same run; more is better."""

    id: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    goal: float | None = None
    more: dict[str, float] = field(default_factory=dict)  # further figures, by their heading

    @property
    def holds(self) -> bool | None:
        if self.goal is None or self.ratio is None:
            return None
        return self.ratio >= self.goal


def limited(
    name: str, value: float, unit: str, limit: float, more: Mapping[str, float] | None = None
) -> Row:
    """A figure that should be at most a limit."""
    ratio = limit / value if value > 0 and limit else float(value <= limit)
    return Row(name, value, unit, f"{limit:g} {unit}", ratio, 1.0, dict(more or {}))


def timed(call: Callable[[], object]) -> float:
    """The seconds that it takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def traces_folder() -> Path:
    """Where public request traces are: `TRACES_DIR`, or a folder `traces` in the project or near it."""
    if given := os.environ.get("TRACES_DIR"):
        return Path(given)
    beside = PROJECT.parent
    places = [PROJECT / "traces", beside / "traces", *sorted(beside.glob("*/traces"))]
    return next((one for one in places if (one / "conversation.jsonl").exists()), places[0])


def parser(description: str | None, quick: str = QUICK_HELP) -> argparse.ArgumentParser:
    """What every benchmark can be told. `quick`: what else that means for this one."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    return made


def options(description: str | None) -> argparse.Namespace:
    return parser(description).parse_args()


def add_traces(to: argparse.ArgumentParser) -> None:
    where = "where conversation.jsonl is (default: TRACES_DIR, or a folder `traces` near by)"
    to.add_argument("--traces", type=Path, metavar="DIR", default=traces_folder(), help=where)


def progress(part: str) -> None:
    """Say on standard error which part begins, and how long the benchmark has been running."""
    print(f"{units.duration(time.monotonic() - _BEGAN):>8}  {part}", file=sys.stderr, flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _short(value: float) -> str:
    """Without decimals, but for what would be nothing."""
    return f"{value:,.0f}" if abs(value) >= 10 or value == round(value) else f"{value:,.2g}"


def show(title: str, rows: Sequence[Row], file: Path | None) -> None:
    print(f"\n{title}, on {os.cpu_count()} cores, Python {platform.python_version()}\n")
    headings = list(dict.fromkeys(heading for row in rows for heading in row.more))
    print("| id | value | unit | " + "".join(f"{name} | " for name in headings) + _TAIL)
    print("|---|---:|---|" + "---:|" * len(headings) + "---|---:|---:|---|")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        goal = "" if row.goal is None else f"{row.goal:g}"
        holds = {None: "", True: "yes", False: "no"}[row.holds]
        value = f"{row.value:,.2f}"
        more = "".join(f"{_short(row.more[name])} | " if name in row.more else "| " for name in headings)
        print(
            f"| `{row.id}` | {value} | {row.unit} | {more}{row.against} | {ratio} | {goal} | {holds} |"
        )
    if file:
        facts = [{**asdict(row), "holds": row.holds} for row in rows]
        file.write_text(json.dumps(facts, indent=1) + "\n")
