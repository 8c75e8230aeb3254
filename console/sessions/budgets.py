"""How fast the bytes of a stream may move to its next node, so that moves together keep to their share
of each link; and how fast columns may be borrowed over links. The rest is for evicts and refills, on
which requests wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True, slots=True)
class Budget:
    bytes_per_second: int
    link: Link  # the one that allows least


class Budgets:
    """As things are now: streams that are on their way, or about to be, and links as described. Each is
    read when it is first asked for: most documents ask for neither."""

    @cached_property
    def _moving(self) -> list[Stream]:
        found = Stream.objects.filter(phase__in=(Phase.MAKING, Phase.MOVING))
        return list(found.exclude(next_node=F("node")).select_related("node", "next_node"))

    @cached_property
    def _counts(self) -> Counter[Link]:
        return Counter(link for one in self._moving for link in _links(one))

    @cached_property
    def _gbits(self) -> dict[Link, int]:
        nics = Nic.objects.values_list("node__name", "leaf__name").annotate(Sum("gbits"))
        # Of several links to the spine nobody knows which it will be.
        up = SpineLink.objects.values_list("leaf__name").order_by("leaf__name").annotate(Min("gbits"))
        found = {Link(node, leaf): gbits for node, leaf, gbits in nics}
        return found | {Link("", leaf): gbits for leaf, gbits in up}

    @cached_property
    def leaves(self) -> dict[str, frozenset[str]]:
        """By node those on which it has a NIC."""
        found: dict[str, set[str]] = {}
        for node, leaf in self._gbits:
            if node:
                found.setdefault(node, set()).add(leaf)
        return {node: frozenset(leaves) for node, leaves in found.items()}

    @property
    def nodes(self) -> set[str]:
        """Those that are told how fast something may come: it changes when a move begins or ends."""
        return {one.next_node.name for one in self._moving if one.next_node is not None}

    def of(self, stream: Stream, percent: int) -> Budget | None:
        """Of a stream that is on its way, where moves may take this much of a link. None where nothing
        is known of the links between its two nodes."""
        return self._least(_links(stream), percent, self._counts)

    def between(self, here: Link, there: Link, percent: int) -> Budget | None:
        """From one NIC to another, for whoever may take this much of each link. None where nothing is
        known of the links between them."""
        return self._least(_way(here, there), percent, {})

    def _least(self, links: Iterable[Link], percent: int, shared: Mapping[Link, int]) -> Budget | None:
        found = [
            Budget(int(gbits * BYTES_OF_GBIT * percent / 100 / max(1, shared.get(link, 1))), link)
            for link in links
            if (gbits := self._gbits.get(link))
        ]
        return min(found, key=lambda one: one.bytes_per_second, default=None)


def _links(stream: Stream) -> Iterator[Link]:
    if stream.next_node is None:
        return iter(())
    here = Link(stream.node.name, stream.nic_leaf)
    return _way(here, Link(stream.next_node.name, stream.next_nic_leaf))


def _way(here: Link, there: Link) -> Iterator[Link]:
    """The links from one NIC to another."""
    for nic in (here, there):
        yield nic
        if here.leaf != there.leaf:
            yield Link("", nic.leaf)
