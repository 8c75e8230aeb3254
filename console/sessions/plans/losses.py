"""What becomes of streams on a lost node: they wait, are placed elsewhere, or need a person. Pure.

A node is lost to a session once three witnesses agree: it sends no heartbeat, its agent does not answer
the console, and drivers report that they have lost their shards there. A node that only the console
can't reach still serves its drivers, and keeps its streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from fractions import Fraction

from console.placement.rules import Rules
from telemetry.units import counted, duration


class Verdict(StrEnum):
    """What is done about the streams of a session on a lost node."""

    WAITING = "waiting"  # for the grace period to pass, or for its turn
    REPLACING = "replacing"  # an operation places them on other nodes
    BLOCKED = "blocked"  # a person is needed
    REPLACED = "replaced"


class Standing(Enum):
    """What a driver says about a stream of its."""

    LOST = "lost"
    HERE = "here"  # it uses the node: the agent runs
    UNKNOWN = "unknown"  # the driver does not answer


@dataclass(frozen=True, slots=True)
class Held:
    """A stream on the node."""

    name: str
    driver: str
    standing: Standing
    operation: str = ""  # what changes it, if something does
    leaves: bool = False  # that moves it to another node
    seconds: float = 0.0  # since that began
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """The last operation that has replaced this node for this session, since it was seen last."""

    sentence: str
    running: bool
    seconds: float  # since it began
    stuck: bool = False
    problem: str = ""  # why it failed, or that it was cancelled


@dataclass(frozen=True, slots=True)
class Case:
    """The streams of one session on one silent node."""

    session: str
    node: str
    rules: Rules
    silent_seconds: float
    lost_seconds: float  # since drivers were first seen to have lost it; 0 at the first look
    agent_answers: bool
    streams: tuple[Held, ...]
    attempt: Attempt | None = None

    @property
    def lost(self) -> tuple[str, ...]:
        """The streams to place anew."""
        return tuple(
            one.name for one in self.streams if one.standing is Standing.LOST and not one.operation
        )

    @property
    def is_lost(self) -> bool:
        """Whether somebody has lost something there, and nobody has seen the agent alive."""
        return not self.agent_answers and any(one.standing is Standing.LOST for one in self.streams)

    @property
    def is_alive(self) -> bool:
        """Whether the agent runs, though it sends no heartbeat."""
        standings = {one.standing for one in self.streams}
        return self.agent_answers or (Standing.LOST not in standings and Standing.HERE in standings)


@dataclass(frozen=True, slots=True)
class Limits:
    """A fault of the console's own network must not move the whole fleet."""

    confirm_seconds: float = 5  # drivers have to have lost it for so long: they reconnect every second
    nodes_in_window: int = 4
    window_seconds: float = 600
    share: Fraction = Fraction(1, 3)  # of the nodes; if more are lost at once, a person decides
    patience_seconds: float = 120  # after the grace period; then a person is told


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The fleet around the cases."""

    nodes: int  # that have joined and are not in maintenance
    replaced: frozenset[str] = frozenset()  # nodes whose replacement began within the window
    # By session: the node that is being replaced for it now.
    replacing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    session: str
    node: str
    verdict: Verdict
    sentence: str
    streams: tuple[str, ...] = ()  # to place anew now; only with REPLACING
    confirms: bool = True  # drivers report the loss
    unplaced: bool = False  # a place was looked for, and there is none


def decide(
    cases: Iterable[Case],
    around: Surroundings,
    limits: Limits = Limits(),
) -> list[Decision]:
    """What to do about each case in which the node may be lost; nothing about nodes that are alive."""
    open_cases = [case for case in cases if not case.is_alive]
    lost = {case.node for case in open_cases if case.is_lost} | around.replaced
    too_many = len(lost) > max(Fraction(1), limits.share * around.nodes)
    replaced, replacing = set(around.replaced), dict(around.replacing)
    decisions = []
    for case in sorted(open_cases, key=lambda case: (-case.silent_seconds, case.node, case.session)):
        decision = _decide(case, limits)
        if decision.streams:
            if too_many:
                sentence = (
                    f"{len(lost)} of {around.nodes} nodes are lost at once, which may be a fault of the "
                    "network: repair it, or drain the nodes"
                )
                decision = _blocked(case, sentence)
            elif replacing.get(case.session, case.node) != case.node:
                why = f"{replacing[case.session]} is replaced first"
                decision = _waits(case, limits.patience_seconds, why)
            elif case.node not in replaced and len(replaced) >= limits.nodes_in_window:
                window = duration(limits.window_seconds)
                why = f"{counted(len(replaced), 'node was', 'nodes were')} replaced within {window}"
                decision = _waits(case, limits.patience_seconds, why)
            else:
                replaced.add(case.node)
                replacing[case.session] = case.node
        decisions.append(replace(decision, confirms=case.is_lost))
    return decisions


def _decide(case: Case, limits: Limits) -> Decision:
    """Regardless of other cases."""
    if case.attempt and case.attempt.running:
        return _running(case, case.attempt, limits)
    if stuck := next((one for one in case.streams if one.stuck), None):
        return _waits(case, 0, f"{stuck.operation} was to change {stuck.name}, and is stuck: retry it")
    if sizing := next((one for one in case.streams if one.operation and not one.leaves), None):
        return _waits(case, 0, f"{sizing.operation} resizes {sizing.name} there: cancel it")
    if moved := [one for one in case.streams if one.operation]:
        return _moved(case, moved, limits)
    grace = case.rules.replace_lost_after_seconds
    is_confirmed = not case.lost or case.lost_seconds >= limits.confirm_seconds
    if case.silent_seconds < grace or not is_confirmed:
        left = max(grace - case.silent_seconds, limits.confirm_seconds - case.lost_seconds)
        what = "replaced" if case.rules.replace_lost else "reported"
        return Decision(
            case.session,
            case.node,
            Verdict.WAITING,
            f"{case.node} is lost: it is {what} in {duration(max(1, round(left)))} unless it returns.",
        )
    if not case.lost:
        silent = next(one for one in case.streams if one.standing is Standing.UNKNOWN)
        why = f"driver {silent.driver} can't be asked whether it still uses it"
        return _waits(case, limits.patience_seconds, why)
    if not case.rules.replace_lost:
        return _blocked(case, "the rules say not to replace it: start its agent, or drain it")
    if case.attempt:
        return _blocked(case, f"{case.attempt.problem.rstrip('.')}: start its agent, or drain it")
    return Decision(
        case.session,
        case.node,
        Verdict.REPLACING,
        f"{case.node} has sent no heartbeat for {duration(round(case.silent_seconds))}, does not "
        f"answer, and {_drivers(case)} lost it.",
        case.lost,
    )


def _running(case: Case, attempt: Attempt, limits: Limits) -> Decision:
    if attempt.stuck or attempt.seconds > limits.patience_seconds:
        return _blocked(case, f"“{attempt.sentence}” does not get on: {attempt.problem.rstrip('.')}")
    return Decision(case.session, case.node, Verdict.REPLACING, f"{attempt.sentence}.")


def _moved(case: Case, moved: Sequence[Held], limits: Limits) -> Decision:
    """Other operations take streams away from there, which may wait for something themselves."""
    late = case.silent_seconds > case.rules.replace_lost_after_seconds + limits.patience_seconds
    for one in moved:
        if late and one.seconds > limits.patience_seconds:
            return _blocked(case, f"{one.operation} has not moved {one.name} yet: see why, or cancel it")
    return Decision(case.session, case.node, Verdict.REPLACING, f"{moved[0].operation} moves them.")


def _waits(case: Case, patience: float, why: str) -> Decision:
    """A person is needed so many seconds after the grace period: until then the node may return."""
    if case.silent_seconds > case.rules.replace_lost_after_seconds + patience:
        return _blocked(case, why)
    return Decision(case.session, case.node, Verdict.WAITING, f"{case.node} is lost, and waits: {why}.")


def _blocked(case: Case, why: str) -> Decision:
    return blocked(case.session, case.node, why)


def blocked(session: str, node: str, why: str) -> Decision:
    """A person is needed."""
    sentence = f"{node} is lost, and its streams can't be placed anew: {why}."
    return Decision(session, node, Verdict.BLOCKED, sentence)


def _drivers(case: Case) -> str:
    names = sorted({one.driver for one in case.streams if one.standing is Standing.LOST})
    return f"driver {names[0]} has" if len(names) == 1 else f"drivers {', '.join(names)} have"
