"""Waiting: for operations, with their progress, and for conditions of resources."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from console.ctl.catalogue import Reference, fetch
from console.ctl.cells import percent, printable, spoken
from console.ctl.client import Client, Item, at, said
from console.ctl.failures import Exit, Failed, NotFound, TimedOut, Usage
from console.ctl.resources import value_at
from telemetry.units import duration

T = TypeVar("T")
PAUSE_SECONDS: Final = 0.3
PAUSE_SECONDS_MAX: Final = 2.0
PATIENCE_SECONDS: Final = 60.0  # with a console that is away, as while it is restarted
AWAY: Final = (Exit.UNAVAILABLE, Exit.TIMEOUT)
STUCK: Final = "stuck"
DELETED: Final = "delete"


class Deadline:
    """`pause` sleeps, each time a little longer, and raises TimedOut when the time is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self._pause = PAUSE_SECONDS

    def pause(self, what: str) -> None:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimedOut(f"{what} within {duration(self._seconds)}.")
        time.sleep(min(self._pause, left))
        self._pause = min(self._pause * 1.2, PAUSE_SECONDS_MAX)

    def patiently(self, ask: Callable[[], T]) -> T:
        """Ask a console that has answered before, and may be away for a while. Raises Failed when it was
        away for too long."""
        ends = min(self._ends, time.monotonic() + PATIENCE_SECONDS)
        while True:
            try:
                return ask()
            except Failed as error:
                left = ends - time.monotonic()
                if error.code not in AWAY or left <= 0:
                    raise
                time.sleep(min(self._pause, left))


def follow(client: Client, operation: Item, seconds: float) -> Item:
    """Wait until an operation is done, and show how far it is. Raises Failed unless it succeeded."""
    deadline = Deadline(seconds)
    path = at("/operations/{}", str(operation["id"]))
    with progress(str(operation["sentence"])) as show:
        while not operation["done"]:
            show(operation["progress"])
            if operation["state"] == STUCK:
                raise Failed(f"It is stuck: {_why(operation)} Then: tidegatectl retry {operation['id']}")
            deadline.pause(f"Operation {operation['id']} was not done")
            operation = deadline.patiently(lambda: client.get(path))
        show(operation["progress"])
    if operation["state"] != "succeeded":
        raise Failed(f"The operation {operation['state']}: {_why(operation)}")
    return operation


def _why(operation: Item) -> str:
    error = operation["error"] or {}
    return str(error.get("detail") or operation["progress"]["message"])


@contextmanager
def progress(sentence: str) -> Iterator[Callable[[Item], None]]:
    """A bar on standard error where that is a terminal, and otherwise a line for each step."""
    # Here, since a command that follows no operation does without them.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        said: list[str] = []

        def write(how_far: Item) -> None:
            line = f"{percent(how_far['percent'])}: {how_far['message']}"
            if how_far["message"] and line not in said[-1:]:
                said.append(line)
                sys.stderr.write(spoken(line, sys.stderr.encoding) + "\n")

        yield write
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[message]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(printable(sentence), total=100, message="")

        def move(how_far: Item) -> None:
            bar.update(task, completed=how_far["percent"], message=printable(str(how_far["message"])))

        yield move


def until(client: Client, reference: Reference, condition: str, seconds: float) -> None:
    """Wait until a resource is as it is asked to be. Raises TimedOut, and NotFound unless it may go."""
    holds = reading_of(condition)
    deadline = Deadline(seconds)
    item: Item | None = None
    while True:
        try:
            if item is None:
                item = fetch(client, reference).item
            else:
                item = deadline.patiently(lambda: fetch(client, reference).item)
        except NotFound:
            if condition == DELETED:
                return
            raise
        if holds(item):
            return
        if reference.resource.name == "operation" and item["done"]:
            raise Failed(f"The operation {item['state']}: {_why(item)}")
        deadline.pause(f"{reference} was not {'deleted' if condition == DELETED else repr(condition)}")


def reading_of(condition: str) -> Callable[[Item], bool]:
    """What `--for` says: `delete`, `Ready` (a condition that is True), `Ready=False`, or `field=value`,
    with dots in the field. Raises Usage for anything else."""
    name, is_equal, value = condition.partition("=")
    if name == "condition" and is_equal:
        name, is_equal, value = value.partition("=")
    if condition == DELETED:
        return lambda _: False
    if name[:1].isupper():
        return lambda item: _condition(item, name).lower() == (value or "true").lower()
    if name in ("done", "succeeded") and not is_equal:
        return lambda item: bool(item.get("done")) and (name == "done" or item["state"] == name)
    if not name or not is_equal:
        raise Usage(
            f"{condition!r} is no condition. Write delete, done, Ready, Ready=False or state=ready."
        )
    return lambda item: said(value_at(item, name)) == value


def rollout(client: Client, reference: Reference, seconds: float) -> Item:
    """Wait until a workload's replicas are those of its revision, and it is ready. Raises Failed where
    the rollout is paused, or was rolled back: also before anybody looked."""
    deadline = Deadline(seconds)
    item = fetch(client, reference).item
    awaited = item["revision"]
    with progress(f"Rollout of {reference.name} to revision {awaited}") as show:
        while True:
            current = item["rollout"]
            if item["revision"] != awaited:
                why = _last(client, reference, awaited)
                raise Failed(f"Revision {awaited} was replaced by revision {item['revision']}.{why}")
            if current and (item["paused"] or current["phase"] == "paused"):
                raise Failed(f"The rollout is paused: {current['sentence'] or current['reason']}")
            if is_rolled_out(item):
                _check_was_not_undone(client, reference)
                return item
            show(_progress(item))
            deadline.pause(f"{reference} was not rolled out")
            item = deadline.patiently(lambda: fetch(client, reference).item)


def _check_was_not_undone(client: Client, reference: Reference) -> None:
    """Raises Failed where the console itself has rolled back what was asked for last."""
    path = at("/workloads/{}/rollouts", reference.name)
    newest = list(client.items(path, {}, 2))
    if len(newest) > 1 and newest[1]["phase"] == "undone":
        current, undone = newest
        raise Failed(
            f"Revision {undone['to_revision']} was rolled back, and revision {current['to_revision']} "
            f"runs, as before it. {undone['sentence']}".rstrip()
        )


def is_rolled_out(item: Item) -> bool:
    is_seen = item["observed_generation"] >= item["generation"]
    is_done = item["rollout"] is None and item["stable_revision"] == item["revision"]
    return bool(is_seen and is_done and item["ready"] == "True")


def _progress(item: Item) -> Item:
    """As operations have it."""
    current = item["rollout"]
    if current is None:
        ready = next((one for one in item["conditions"] if one["type"] == "Ready"), {"message": ""})
        return {"percent": 0, "message": ready["message"]}
    done = round(100 * current["switched"] / max(current["total"], 1))
    message = current["sentence"] or f"{current['switched']} of {current['total']} replicas are switched"
    return {"percent": done, "message": message}


def _last(client: Client, reference: Reference, revision: int) -> str:
    """Why a rollout has ended, as its row says."""
    path = at("/workloads/{}/rollouts", reference.name)
    found = (one["sentence"] for one in client.items(path, {}, 10) if one["to_revision"] == revision)
    return "".join(f" {sentence}" for sentence in list(found)[:1] if sentence)


def _condition(item: Item, name: str) -> str:
    found = (one for one in item.get("conditions", []) if one["type"].lower() == name.lower())
    return str(next((one["status"] for one in found), "absent"))
