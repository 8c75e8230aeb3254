"""`make incident`: a stream of the running demo is placed across the spine, evicts slow down, an alert
fires, and the move that it suggests resolves it.

Every step is an ordinary operation. Whatever interrupts the incident, the stream returns to its node.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from django.db import transaction

from console.accounts.principal import SYSTEM
from console.alerts.models import Alert
from console.alerts.suggested_fixes import services as suggested_fixes
from console.demo import story
from console.demo.staging import LOOK_EVERY_SECONDS, CannotStage, Story
from console.environment import remove_data
from console.fleet.models import Node
from console.operations.models import Operation
from console.operations.services import running_within
from console.placement.topology import Tier
from console.sessions import services
from console.sessions.changes import moves
from console.sessions.models import Stream
from console.sessions.plans.proposals import CannotPlan
from console.sessions.plans.snapshot import Snapshot
from telemetry.figures import figures_now
from telemetry.topics import of_org, of_session
from telemetry.units import duration

REASON: Final = "make incident"
# It has one replica: where there are two, brains send requests to the one without the slow stream, and
# nothing is evicted over it.
SESSION: Final = story.CODING.name
TOPIC: Final = of_org(story.ORGS[1].slug)
SLOW_SECONDS: Final = 0.1  # fifty times what a store takes on a rail


class Incident(Story):
    """The steps of the incident."""

    steps = 6

    def run(self) -> None:
        self._wait(f"session {SESSION} has a job, and no operation is running", _is_settled)
        self._wait(f"{TOPIC} has traffic", evict_p99)
        if across := [one.name for one in _streams() if one.tier == Tier.SPINE]:
            raise CannotStage(f"{', '.join(across)} crosses the spine already. {self._way_back}")
        self._tell(
            f"All is well: the evict p99 of {TOPIC} is {_shown(evict_p99())}.",
            f"/latency/?topic={TOPIC}&range=15m",
        )
        self._pause()
        shard, node, operation = _begin_across_spine()
        try:
            self._tell(
                f"{shard.name} moves from {shard.node.name} to {node.name}. Its box has no port on a "
                f"leaf of {node.name}, so the path crosses the spine.",
                f"/operations/{operation.pk}/",
            )
            _finish(operation)
            self._watch_and_fix(shard)
        finally:
            self._restore(shard)

    def _watch_and_fix(self, shard: Stream) -> None:
        self._wait("evicts are slow", lambda: (evict_p99() or 0) > SLOW_SECONDS)
        self._tell(
            f"Evicts are slow: p99 is {_shown(evict_p99())}. A store waits for its slowest stream.",
            f"/latency/?topic={TOPIC}&range=15m",
        )
        self._pause()
        alert = self._wait("the alert is firing", lambda: _alert(shard))
        page = f"/alerts/{alert.pk}/"
        self._tell(f"An alert is firing: {alert.sentence}.", page)
        self._pause("Press the button of the suggested fix on that page, or Enter here.")
        if _crosses(shard) and not _is_busy():  # if nobody has pressed it
            suggested_fixes.apply(SYSTEM, alert, "move")
        self._tell(
            f"{shard.name} moves back to a rail, as the alert suggests. Its job keeps running.",
            f"/operations/?target={of_session(SESSION)}",
        )
        self._wait("the stream is on a rail", lambda: not _crosses(shard) and not _is_busy())
        self._wait("evicts are fast again", lambda: (evict_p99() or 0) < SLOW_SECONDS)
        self._wait("the alert is resolved", lambda: _alert(shard) is None)
        self._tell(f"Resolved: p99 is {_shown(evict_p99())}.", page)

    @property
    def _way_back(self) -> str:
        return f"Restore it: {self._address}/sessions/{SESSION}/restore-rails/"

    def _restore(self, shard: Stream) -> None:
        """Move the shard back to its first node. Raises CannotStage when that is interrupted."""
        try:
            self._move_home(shard)
        except KeyboardInterrupt:
            raise CannotStage(f"{shard.name} may be left across the spine. {self._way_back}") from None

    def _move_home(self, shard: Stream) -> None:
        home = shard.node
        self._wait("the running operation has ended", lambda: not _is_busy())
        now = Stream.objects.select_related("node").get(pk=shard.pk)
        if now.node_id != home.pk:
            print(f"     {shard.name} moves back to {home.name} …", flush=True)
            _finish(_move(now, home))
        print("     The fleet is restored.", flush=True)


def evict_p99() -> float | None:
    """The value that pages show; None without traffic."""
    now = figures_now([TOPIC], time.time()).get(TOPIC)
    return now.figures.get("evict.p99") if now else None


def _shown(seconds: float | None) -> str:
    if seconds is None:
        return "not known yet"
    return duration(seconds)


def _streams() -> list[Stream]:
    session = services.get_session(SYSTEM, SESSION)
    return list(services.streams_of(session))


def _is_busy() -> bool:
    return running_within(of_session(SESSION)).exists()


def _is_settled() -> bool:
    return bool(_streams()) and not _is_busy()


def _begin_across_spine() -> tuple[Stream, Node, Operation]:
    """Move a stream that fits on a node which is reached only across the spine."""
    fleet = Snapshot.now().fleet
    for shard in _streams():
        for node in Node.objects.filter(name__in=fleet.node).order_by("name"):
            if fleet.tier(shard.box.name, shard.domain, fleet.node[node.name]) is Tier.SPINE:
                with suppress(CannotPlan):
                    return shard, node, _move(shard, node)
    raise CannotStage(
        f"No stream of {SESSION} can be placed across the spine: no other leaf has a node with room "
        "for one, or the rules refuse it. Make room. Or start over: stop Tidegate, "
        f"{remove_data()}, and start it again."
    )


@transaction.atomic
def _move(shard: Stream, node: Node) -> Operation:
    session = services.for_change(SYSTEM, SESSION)
    return moves.move(SYSTEM, session, services.get_stream(session, shard.name), node, reason=REASON)


def _alert(shard: Stream) -> Alert | None:
    """The firing alert about this stream, if there is one."""
    group_and_index = shard.name.partition(".")[2]
    firing = Alert.objects.filter(rule="spine-placement", state="firing", topic=of_session(SESSION))
    return firing.filter(labels__stream=group_and_index, labels__driver=shard.job.driver.name).first()


def _crosses(shard: Stream) -> bool:
    return Stream.objects.filter(pk=shard.pk, tier=Tier.SPINE).exists()


def _finish(operation: Operation) -> None:
    while not operation.done:
        time.sleep(LOOK_EVERY_SECONDS)
        operation.refresh_from_db()
    if operation.state != "succeeded":
        raise CannotStage(f"“{operation.sentence}” has {operation.state}: {operation.message}")
