"""What commands that play a trace have in common: arguments, files, a bar of progress and tables."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from swdriver_shim.replay.traces import Request, read
from telemetry.units import Unreadable, duration, parse_duration, parse_size


class Unusable(Exception):
    """What was asked for can't be done. A sentence."""


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def size(text: str) -> int:
    try:
        return parse_size(text, low=1)
    except Unreadable as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    try:
        value = parse_duration(text)
    except Unreadable as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not value:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def open_report(path: Path | None) -> contextlib.AbstractContextManager[TextIO | None]:
    """To be called before anything is played: a report that can't be written is not worth a run."""
    try:
        return path.open("w") if path else contextlib.nullcontext()
    except OSError as error:
        raise Unusable(f"{path} can't be written: {error.strerror}.") from error


def read_requests(trace: Path, most: int | None) -> list[Request]:
    try:
        requests = list(islice(read(trace), most))
    except OSError as error:
        raise Unusable(f"{trace} can't be read: {error.strerror}.") from error
    if not requests:
        raise Unusable(f"There are no requests in {trace}.")
    return requests


@contextlib.contextmanager
def progress(total: int, *, can_fail: bool = False) -> Iterator[Callable[[bool], None]]:
    """A bar on standard error, where that is a terminal. What it yields is told of each request whether
    it has failed."""
    console = Console(stderr=True)
    columns = (
        TextColumn("Replay"),
        BarColumn(),
        MofNCompleteColumn(),
        *([TextColumn("{task.fields[failed]} failed")] if can_fail else []),
        TimeRemainingColumn(),
    )
    failed = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, failed=0)

        def advance(has_failed: bool) -> None:  # noqa: FBT001 - a callback
            nonlocal failed
            failed += has_failed
            bar.update(task, advance=1, failed=failed)

        yield advance


def table(first: str, *others: str) -> Table:
    """Numbers by what the first column names."""
    made = Table(title_justify="left")
    made.add_column(first)
    for name in others:
        made.add_column(name, justify="right")
    return made


def took(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)
