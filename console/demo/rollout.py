"""`make rollout`: a workload of the running demo gets a good revision, whose instances take over its
cache, then a broken one, which is seen and rolled back. Its traffic goes on.

All is asked for over the REST API, with a token that is revoked at the end. Whatever interrupts it, the
workload gets the spec that it had.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.utils import timezone
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from console.accounts import tokens
from console.accounts.models import User
from console.accounts.principal import Means
from console.accounts.roles import Role
from console.accounts.services import principal_for
from console.ctl.client import Client, Item
from console.ctl.contexts import Context
from console.ctl.failures import NotFound
from console.ctl.waits import is_rolled_out
from console.demo import story
from console.demo.staging import CannotStage, Story
from console.environment import remove_data
from telemetry.topics import FLEET, of_org
from telemetry.units import duration, shown

REASON: Final = "make rollout"
SERVED: Final = story.ASSISTANT
WORKLOAD: Final = f"/workloads/{SERVED.name}"
TOPIC: Final = of_org(story.ORGS[0].slug)
# Staged faults of the emulator: docs/artifacts.md. The first only makes it another revision.
GOOD: Final = ("--start-seconds", "1")
BROKEN: Final = ("--fail-start",)
FAILED_RESULTS: Final = frozenset({"error", "failed", "rejected"})
TOKEN_HOURS: Final = 1
CELL_SECONDS: Final = 10  # of the finest roll-up
NUMBERS_EVERY_SECONDS: Final = 2.0
ROLLOUT_SECONDS_MAX: Final = 900.0
NARROW: Final = 80
NONE: Final = "not known"


@dataclass(frozen=True, slots=True)
class Numbers:
    """What brains counted: requests for the model, and tokens of an org's prompts. They are rolled up in
    steps of ten seconds, so that some seconds of the time before may be counted."""

    requests: int = 0
    failed: int = 0
    hit_rate: float | None = None

    def __str__(self) -> str:
        if not self.requests:
            return "no requests counted yet"
        hits = NONE if self.hit_rate is None else shown(self.hit_rate, "share")
        return f"{self.requests} requests, {self.failed} failed, hit rate {hits}"


@dataclass(frozen=True, slots=True)
class Look:
    """The workload at one moment."""

    workload: Item
    instances: Sequence[Item]
    numbers: Numbers

    def lines(self) -> list[tuple[str, str, str, str]]:
        """Of each instance: replica, instance, state, and what requests it gets."""
        found = []
        for one in sorted(self.instances, key=lambda one: (one["ordinal"], one["created_at"])):
            state = "draining" if one["goal"] == "drain" else str(one["state"])
            cache = f", cache {one['cache']}" if one["cache"] else ""
            told = "requests go to it" if one["serving"] else ""
            found.append((str(one["replica"]), str(one["name"]), f"{state}{cache}", told))
        return found

    def conditions(self) -> list[tuple[str, bool, str]]:
        """Those that are not true, and `Ready`."""
        return [
            (str(one["type"]), one["status"] == "True", str(one["message"] or one["reason"]))
            for one in self.workload["conditions"]
            if one["type"] == "Ready" or one["status"] != "True"
        ]


class RolloutStory(Story):
    """The steps of the rollouts."""

    steps = 5
    _client: Client

    def run(self) -> None:
        """Raises CannotStage, and Failed where the console refuses something."""
        with _logged_in(self._address) as self._client:
            before = self._wait(f"{SERVED.name} is ready", self._settled)
            self._wait("there is traffic", lambda: self._numbers(time.time() - 60).requests)
            self._check(before)
            revision, spec = before["revision"], before["spec"]
            self._tell(
                f"All is well: {SERVED.name} runs revision {revision} on {before['replicas']['ready']} "
                f"replicas. The last five minutes: {self._numbers(time.time() - 300)}.",
                f"{WORKLOAD}/",
            )
            self._pause()
            try:
                self._stage(spec)
            finally:
                self._restore(revision, spec)

    def _stage(self, spec: Item) -> None:
        self._roll_out_good(spec)
        self._pause()
        self._roll_out_broken()
        self._pause("Press Enter, and the workload gets the spec that it had.")

    def _roll_out_good(self, spec: Item) -> None:
        began = time.time()
        wanted = self._patch(_other(spec["engine"].get("arguments", []), GOOD))
        self._tell(
            f"Revision {wanted} is rolled out. A new instance starts beside each old one, takes over "
            "its cache, and then gets its requests.",
            f"{WORKLOAD}/",
        )
        last = self._watch(began)
        if last.workload["revision"] != wanted:
            raise CannotStage(
                f"Revision {wanted} was undone: {self._why(wanted)} A machine that is busy with other "
                "things can be the cause; try again later."
            )
        self._tell(
            f"Rolled out in {duration(round(time.time() - began))}: {self._numbers(began)}.",
            f"{WORKLOAD}/",
        )

    def _roll_out_broken(self) -> None:
        began = time.time()
        wanted = self._patch(BROKEN)
        self._tell(
            f"Revision {wanted} is broken: its engine ends at its start. Requests stay where they are.",
            f"{WORKLOAD}/",
        )
        last = self._watch(began)
        if last.workload["revision"] == wanted:
            raise CannotStage(f"Revision {wanted} was not undone.")
        self._tell(
            f"Undone by itself after {duration(round(time.time() - began))}. {self._why(wanted)} "
            f"Revision {last.workload['revision']} equals the last good one. Meanwhile: "
            f"{self._numbers(began)}.",
            f"{WORKLOAD}/",
        )

    # Before and after

    def _settled(self) -> Item | None:
        try:
            found: Item = self._client.get(WORKLOAD)
        except NotFound:
            raise CannotStage(
                f"The demo's workload {SERVED.name} was deleted. Start over: stop Tidegate, "
                f"{remove_data()}, and start it again."
            ) from None
        if found["paused"]:
            raise CannotStage(
                f"Rollouts of {SERVED.name} are paused. Resume them: {self._address}{WORKLOAD}/"
            )
        return found if is_rolled_out(found) else None

    def _check(self, found: Item) -> None:
        if found["spec"]["engine"]["kind"] != "emulator":
            raise CannotStage(f"{SERVED.name} is not on the emulator, which alone has staged faults.")
        if not found["spec"].get("rollout", {}).get("auto_rollback", True):
            raise CannotStage(
                f"{SERVED.name} is not rolled back by itself: set rollout.auto_rollback in its spec, at "
                f"{self._address}{WORKLOAD}/edit/"
            )

    def _restore(self, revision: int, spec: Item) -> None:
        """Give the workload the spec that it had. Raises CannotStage when that is interrupted."""
        try:
            print(f"     {SERVED.name} gets the spec of revision {revision} …", flush=True)
            began = time.time()
            self._client.ask(
                "PUT", WORKLOAD, body={"spec": spec, "reason": f"{REASON}: as before"}, if_match="*"
            )
            self._watch(began)
        except KeyboardInterrupt:
            raise CannotStage(
                f"{SERVED.name} may be left with another revision. Roll it back to revision {revision}: "
                f"{self._address}{WORKLOAD}/"
            ) from None
        print("     The workload is restored.", flush=True)

    # Asking the console

    def _patch(self, arguments: Sequence[str]) -> int:
        """Start its engines with these arguments; the number of the revision."""
        body = {"patch": {"engine": {"arguments": list(arguments)}}, "reason": REASON}
        return int(self._client.ask("PATCH", WORKLOAD, body=body, if_match="*").body["revision"])

    def _why(self, revision: int) -> str:
        """What the rollout to a revision says of its end."""
        found = self._client.items(f"{WORKLOAD}/rollouts", {}, 10)
        return next((str(one["sentence"]) for one in found if one["to_revision"] == revision), "")

    def _numbers(self, since: float) -> Numbers:
        results = self._counts(
            since, FLEET, "brain_requests_total", "result", label=f"model:{SERVED.model}"
        )
        kinds = self._counts(since, TOPIC, "brain_tokens_total", "kind")
        prompt = kinds.get("prompt", 0.0)
        return Numbers(
            requests=round(sum(results.values())),
            failed=round(sum(number for one, number in results.items() if one in FAILED_RESULTS)),
            hit_rate=kinds.get("cached", 0.0) / prompt if prompt else None,
        )

    def _counts(self, since: float, topic: str, name: str, by: str, **more: str) -> Mapping[str, float]:
        start = datetime.fromtimestamp(since // CELL_SECONDS * CELL_SECONDS, UTC).isoformat()
        asked = {"topic": topic, "name": name, "fold": "sum", "start": start, "by": by, **more}
        try:
            found = self._client.get("/metrics/query", **asked, step=CELL_SECONDS, resolution="10s")
        except NotFound:  # nobody has told anything of it yet
            return {}
        return {
            line["labels"].get(by, ""): sum(value or 0.0 for value in line["values"])
            for line in found["series"]
        }

    def _look(self, numbers: Numbers) -> Look:
        workload = self._client.get(WORKLOAD)
        return Look(
            workload, list(self._client.items(f"{WORKLOAD}/instances", {"ended": False})), numbers
        )

    # The picture

    def _watch(self, began: float) -> Look:
        """Draw the rollout until it has ended, whichever way."""
        numbers, counted_at = Numbers(), 0.0
        with _drawn() as draw:

            def look() -> Look | None:
                nonlocal numbers, counted_at
                if time.monotonic() - counted_at > NUMBERS_EVERY_SECONDS:
                    numbers, counted_at = self._numbers(began), time.monotonic()
                found = self._look(numbers)
                draw(found)
                is_done = is_rolled_out(found.workload)
                is_whole = len(found.instances) == found.workload["replicas"]["desired"]
                return found if is_done and is_whole else None

            return self._wait("the rollout has ended", look, ROLLOUT_SECONDS_MAX)


def _other(arguments: Sequence[str], wanted: Sequence[str]) -> Sequence[str]:
    """`wanted`, unless it is what there is already: then nothing."""
    return wanted if list(arguments) != list(wanted) else ()


@contextmanager
def _logged_in(address: str) -> Iterator[Client]:
    """A client with a token of the first platform admin's, which is revoked at the end."""
    admins = User.objects.filter(is_active=True, platform_role=Role.PLATFORM_ADMIN).order_by("pk")
    user = admins.first()
    if user is None:
        raise CannotStage("The console has no platform admin who could do this.")
    principal = principal_for(user, Means.SYSTEM)
    expires_at = timezone.now() + timedelta(hours=TOKEN_HOURS)
    made, text = tokens.issue(principal, name=REASON, read_only=False, org=None, expires_at=expires_at)
    try:
        with Client(Context(address, text)) as client:
            yield client
    finally:
        tokens.revoke(principal, made.public_id)


@contextmanager
def _drawn() -> Iterator[Any]:
    """What draws a Look: in place at a terminal, and elsewhere a line for each thing that is new."""
    console = Console(highlight=False)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda look: live.update(picture(look, console.width), refresh=True)
        return
    said: set[str] = set()

    def write(look: Look) -> None:
        for _, name, state, told in look.lines():
            line = "     " + ", ".join(part for part in (f"{name}: {state}", told) if part)
            if line not in said:
                said.add(line)
                print(line, flush=True)

    yield write


def picture(look: Look, width: int) -> Group:
    """Instances, numbers and conditions. Narrow terminals get no names of replicas."""
    is_narrow = width < NARROW
    columns = ("instance", "state", "requests")
    table = Table(*(columns if is_narrow else ("replica", *columns)), box=None, pad_edge=False)
    for row in look.lines():
        shown = (*row[:3], "●" if row[3] and is_narrow else row[3])
        table.add_row(*(shown[1:] if is_narrow else shown), style="bold" if row[3] else "dim")
    signs = [
        Text(f"{'●' if holds else '○'} {kind}: {message}", style="green" if holds else "yellow")
        for kind, holds, message in look.conditions()
    ]
    return Group(table, Text(f"Since the change: {look.numbers}"), *signs, Text())
