"""What operations of a kind do: steps, each with its way back, registered under the kind's name.

    @machine("session.grow")
    class Grow(Machine):
        steps = (
            Step("reserve", "Reserve boxes and memory", reserve, release),
            Step("apply", "Grow shards on their nodes", applied, patience=minutes(10)),
        )

A step is a function of the operation that returns Done, Waiting or Failed. It runs in one transaction
with the note of its outcome, so what it does in the database happens exactly once; it may run any number
of times, and be killed anywhere, before that. What it asks of others over the network has to be harmless
when it is asked again. It is short: what takes long is waited for, with `Waiting`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from console.operations.core import Done, Outcome, Shape
from console.operations.models import Operation

Doing: TypeAlias = Callable[[Operation], Outcome]

PATIENCE: Final = timedelta(minutes=10)


def nothing(_operation: Operation) -> Outcome:
    """The way back of a step that leaves nothing behind."""
    return Done()


@dataclass(frozen=True, slots=True)
class Step:
    """`undo` is also called when the step began and nobody knows how far it came, or did not begin."""

    name: str
    sentence: str
    do: Doing
    undo: Doing = nothing
    patience: timedelta = PATIENCE  # for what it waits for, and as long again on the way back
    final: bool = False  # once it may have begun there is no way back


class Machine:
    steps: ClassVar[tuple[Step, ...]]
    names_places: ClassVar[bool] = False  # its messages name nodes and drivers of anybody

    @staticmethod
    def parameters(_operation: Operation) -> dict[str, Any]:
        """What was asked for beside the target, for all who see the operation."""
        return {}

    @staticmethod
    def response(_operation: Operation) -> dict[str, Any]:
        """What the operation answers with when it has succeeded."""
        return {}

    @staticmethod
    def waits_for(_operation: Operation) -> Collection[str]:
        """Topics of the processes that have not done yet what it needs of them."""
        return ()

    @classmethod
    def shape(cls) -> Shape:
        final = next((number for number, step in enumerate(cls.steps) if step.final), None)
        return Shape(tuple(step.patience for step in cls.steps), final)


M = TypeVar("M", bound=type[Machine])
_machines: dict[str, type[Machine]] = {}


def machine(kind: str) -> Callable[[M], M]:
    """Register a machine. Its module is to be imported when the app is ready."""

    def register(cls: M) -> M:
        if kind in _machines:
            raise RuntimeError(f"There are two machines of kind {kind}.")
        _machines[kind] = cls
        return cls

    return register


def is_known(kind: str) -> bool:
    """Not those of another version."""
    return kind in _machines


def names_places(kind: str) -> bool:
    """Whether messages of this kind are not for all who see the operation; of one that is not known."""
    return not is_known(kind) or _machines[kind].names_places


def machine_of(kind: str) -> type[Machine]:
    """Raises LookupError for a kind that is not known."""
    return _machines[kind]
