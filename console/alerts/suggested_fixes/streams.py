"""Actions that take streams off the spine."""

from __future__ import annotations

from typing import Final

from django.http import Http404
from django.urls import reverse

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts.models import Alert
from console.alerts.suggested_fixes.definition import Call, Change, SuggestedFix
from console.fleet.models import Node
from console.operations.models import Operation
from console.operations.services import running_on
from console.placement.plan import Move as PlannedMove
from console.placement.topology import Tier
from console.sessions import services as sessions
from console.sessions.changes import moves
from console.sessions.models import Session, Stream
from console.sessions.plans.snapshot import key_of
from console.visibility import Sight
from telemetry.topics import of_session
from telemetry.units import counted, size

ANY_VERSION: Final = {"If-Match": "*", "Idempotency-Key": "$(date +%s%N)"}
MOVES_SHOWN: Final = 20
_PATHS: Final = {
    Tier.RAIL: "on a rail",
    Tier.LEAF: "on a leaf of its box",
    Tier.SPINE: "across the spine",
}


class MoveStream:
    """Moves one stream off the spine."""

    def suggest(self, principal: Principal, alert: Alert) -> SuggestedFix | None:
        stream = _stream(principal, alert)
        if stream is None:
            return None
        if running := running_on(of_session(stream.job.session.name)):
            return _in_progress(running)
        move = self._move(stream)
        if move is None:
            return SuggestedFix(f"No move helps now. {Sight(principal).why(stream.why)}".strip())
        path = _PATHS[move.tier_after]
        return SuggestedFix(
            f"Move {stream.name} from {move.source} to {move.target}, which puts it {path}. "
            "Its job keeps running.",
            "move",
            "Move it now",
            (
                Change("Node", move.source, move.target),
                Change("Path", _PATHS[move.tier_before], path),
                Change("Copied, at most", "", size(stream.memory_bytes)),
            ),
            Call(
                "POST",
                f"/sessions/{stream.job.session.name}/move",
                {"stream": stream.name, "node": move.target},
                ANY_VERSION,
            ),
            _refusal(principal, stream.job.session),
        )

    def apply(self, principal: Principal, alert: Alert, reason: str) -> str:
        stream = _stream(principal, alert)
        if stream is None:
            raise Http404("This stream no longer exists.")
        session = sessions.for_change(principal, stream.job.session.name, Role.ON_CALL)
        move = self._move(stream)
        if move is None:
            raise Http404("No move helps any more.")
        node = Node.objects.get(name=move.target)
        stream = sessions.get_stream(session, stream.name)
        operation = moves.move(principal, session, stream, node, reason=reason)
        return reverse("operation", args=[operation.pk])

    @staticmethod
    def _move(stream: Stream) -> PlannedMove | None:
        plan = moves.plan_rails(stream.job.session)
        return next((one for one in plan.moves if one.stream.key == key_of(stream)), None)


class RestoreRails:
    """Moves all streams of a session off the spine. If the alert is about several sessions, it takes the
    one with the most bytes there."""

    def suggest(self, principal: Principal, alert: Alert) -> SuggestedFix | None:
        session = self._session(principal, alert)
        if session is None:
            return None
        if running := running_on(of_session(session.name)):
            return _in_progress(running)
        plan = moves.plan_rails(session)
        if not plan.moves:
            return SuggestedFix(f"No move takes a stream of {session.name} off the spine now.")
        names = {key_of(stream): stream.name for stream in sessions.streams_of(session)}
        streams = counted(len(plan.moves), "stream")
        return SuggestedFix(
            f"Restore the rails of {session.name}: move {streams}. Jobs keep running.",
            "restore-rails",
            "Restore rails now",
            (
                *(
                    Change(names[one.stream.key], one.source, f"{one.target}, {_PATHS[one.tier_after]}")
                    for one in plan.moves[:MOVES_SHOWN]
                ),
                Change("Copied, at most", "", size(plan.bytes)),
            ),
            Call("POST", f"/sessions/{session.name}/restore-rails", {}, ANY_VERSION),
            _refusal(principal, session),
        )

    def apply(self, principal: Principal, alert: Alert, reason: str) -> str:
        session = self._session(principal, alert)
        if session is None:
            raise Http404("This session no longer exists.")
        session = sessions.for_change(principal, session.name, Role.ON_CALL)
        return reverse("operation", args=[moves.restore_rails(principal, session, reason=reason).pk])

    @staticmethod
    def _session(principal: Principal, alert: Alert) -> Session | None:
        carried = alert.evidence.get("bytes_by_session", {})
        most = max(carried, key=lambda name: float(carried[name]), default="")
        return _visible_session(principal, alert.all_labels.get("session") or most)


def _in_progress(operation: Operation) -> SuggestedFix:
    """No second operation starts; what is left to do is planned when the first one has ended."""
    page = reverse("operation", args=[operation.pk])
    return SuggestedFix(f"In progress: {operation.sentence}.", operation_page=page)


def _visible_session(principal: Principal, name: str) -> Session | None:
    try:
        return sessions.get_session(principal, name) if name else None
    except Http404:
        return None


def _stream(principal: Principal, alert: Alert) -> Stream | None:
    """The stream of the stream that the alert is about, if they may see its session."""
    group, _, index = alert.labels.get("stream", "").rpartition(".")
    if not index.isdecimal():
        return None
    driver = alert.labels.get("driver")
    found = Stream.objects.filter(job__driver__name=driver, group=group, index=int(index))
    stream = found.select_related("job__session", "job__driver", "box", "node").first()
    return stream if stream and _visible_session(principal, stream.job.session.name) else None


def _refusal(principal: Principal, session: Session) -> str:
    may = principal.holds(Role.ON_CALL, session.org_id) and not principal.read_only
    return "" if may else "This needs the role on-call for the session."
