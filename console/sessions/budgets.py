"""How fast the bytes of a stream may move to its next node, so that moves together keep to their share
of each link. The rest is for evicts and refills, on which requests wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from django.db.models import F, Min, Sum

from console.fleet.models import Nic, SpineLink
from console.sessions.models import Phase, Stream

BYTES_OF_GBIT: Final = 125_000_000


class Link(NamedTuple):
    """A node's NICs on a leaf; without a node, the leaf's links to the spine."""

    node: str
    leaf: str

    def __str__(self) -> str:
        return f"the NIC of {self.node}" if self.node else f"a link of {self.leaf} to the spine"

    @property
    def gbits(self) -> int | None:
        """Of several links to the spine nobody knows which it will be."""
        if self.node:
            nics = Nic.objects.filter(node__name=self.node, leaf__name=self.leaf)
            found: int | None = nics.aggregate(of=Sum("gbits"))["of"]
        else:
            found = SpineLink.objects.filter(leaf__name=self.leaf).aggregate(of=Min("gbits"))["of"]
        return found


@dataclass(frozen=True, slots=True)
class Budget:
    bytes_per_second: int
    link: Link  # the one that allows least


def of_move(stream: Stream, percent: int) -> Budget | None:
    """Of a stream that is on its way, where moves may take this much of a link. None where nothing is
    known of the links between its two nodes."""
    moving = Counter(link for one in _moving() for link in _links(one))
    found = [
        Budget(int(gbits * BYTES_OF_GBIT * percent / 100 / max(1, moving[link])), link)
        for link in _links(stream)
        if (gbits := link.gbits)
    ]
    return min(found, key=lambda one: one.bytes_per_second, default=None)


def nodes_on_the_way() -> set[str]:
    """Those that are told how fast something may come: it changes with each move that begins or ends."""
    return {one.next_node.name for one in _moving() if one.next_node is not None}


def _moving() -> Sequence[Stream]:
    found = Stream.objects.filter(phase__in=(Phase.MAKING, Phase.MOVING)).exclude(next_node=F("node"))
    return list(found.select_related("node", "next_node"))


def _links(stream: Stream) -> Iterator[Link]:
    if stream.next_node is None:
        return
    here, there = stream.nic_leaf, stream.next_nic_leaf
    for node, leaf in ((stream.node, here), (stream.next_node, there)):
        yield Link(node.name, leaf)
        if here != there:
            yield Link("", leaf)
