"""A diagram of a session's streams: domains of boxes at the left, nodes at the right. Pure.

Only places are decided here; the table beside it has a row for each line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 640
ROW: Final = 26
HEIGHT: Final = 20
LEFT: Final = 4
LEFT_WIDTH: Final = 130
RIGHT: Final = 480
RIGHT_WIDTH: Final = 156
STREAMS_MAX: Final = 96  # with more, the table says more than a diagram


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """What is drawn of a stream."""

    name: str
    box: str
    domain: int
    node: str
    path: str  # rail, leaf or spine; empty without a node


@dataclass(frozen=True, slots=True)
class Label:
    x: int
    y: int
    width: int
    name: str


@dataclass(frozen=True, slots=True)
class Curve:
    kind: str
    path: str
    title: str


@dataclass(frozen=True, slots=True)
class Diagram:
    height: int
    domains: list[Label]
    nodes: list[Label]
    lines: list[Curve]
    width: int = WIDTH


def draw(streams: Sequence[StreamEnds]) -> Diagram | None:
    """None where there is nothing to draw, or too much."""
    if not streams or len(streams) > STREAMS_MAX:
        return None
    domains = _column(LEFT, LEFT_WIDTH, (f"{one.box}:{one.domain}" for one in streams))
    nodes = _column(RIGHT, RIGHT_WIDTH, (one.node for one in streams if one.node))
    lines = [
        Curve(
            one.path,
            _curve(domains[f"{one.box}:{one.domain}"], nodes[one.node]),
            f"{one.name}: {one.box}:{one.domain} to {one.node}, {one.path}",
        )
        for one in streams
        if one.node
    ]
    height = ROW * max(len(domains), len(nodes)) + 6
    return Diagram(height, list(domains.values()), list(nodes.values()), lines)


def _column(x: int, width: int, names: Iterable[str]) -> dict[str, Label]:
    return {
        name: Label(x, 4 + ROW * row, width, name)
        for row, name in enumerate(sorted(dict.fromkeys(names)))
    }


def _curve(domain: Label, node: Label) -> str:
    begin, end = domain.x + domain.width, node.x
    left, right = domain.y + HEIGHT // 2, node.y + HEIGHT // 2
    middle = (begin + end) // 2
    return f"M{begin} {left}C{middle} {left} {middle} {right} {end} {right}"
