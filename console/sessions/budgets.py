"""How fast bytes may move that can wait, so that together they keep to a part of each link. The rest is
for evicts and refills, on which requests wait.

There are three kinds of them, which share a link's part equally, whether or not they use it now:

- streams that move to another node;
- fragments of redundant columns, where some cross the link: as a document says it, not as it is used;
- what a node writes to a bucket or a shared directory, over its NICs: where that is, nobody has said.

So what fragments and writes may have does not change whenever a move begins: only with rules, holders,
descriptions, and where streams with holders are. Borrowing has the whole part: requests wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Final, NamedTuple

from django.db.models import F, Min, Sum

from console.fleet.descriptions.tier2 import is_local
from console.fleet.models import Nic, Node, SpineLink
from console.placement.rules import Redundancy
from console.sessions.fragments import AllFragments
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
    """As things are now: streams that are on their way, or about to be, holders of fragments, and links
    as described. Each is read when it is first asked for: most documents ask for none."""

    def __init__(self, fragments: AllFragments | None = None) -> None:
        self._fragments = fragments or AllFragments()

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
        links = [*_links(stream)]
        counts = {link: Fraction(max(1, self._counts[link])) for link in links}
        return self._least({link: self._kinds(link) * counts[link] for link in links}, percent)

    def of_fragments(self, stream: Stream, percent: int) -> Budget | None:
        """Of what a stream's agent moves to and from its holders, spills and repair together. None
        without holders, or where nothing is known of the links to them."""
        links = self._parts.get(stream.pk, ())
        return self._least({link: self._kinds(link) * self._crossed[link] for link in links}, percent)

    def of_writes(self, node: str, percent: int) -> int | None:
        """In bytes per second, what a node may write to its store of tier 2 over all of its NICs. None
        if that is a disk of its own, or none of its NICs is described."""
        if node not in self._writers:
            return None
        nics = (Link(node, leaf) for leaf in self.leaves.get(node, ()))
        found = sum(self._part(nic, percent) / self._kinds(nic) for nic in nics)
        return int(found) or None

    def between(self, here: Link, there: Link, percent: int) -> Budget | None:
        """From one NIC to another, for whoever may take this much of each link. None where nothing is
        known of the links between them."""
        return self._least(dict.fromkeys(_way(here, there), Fraction(1)), percent)

    def _least(self, divided_by: Mapping[Link, Fraction], percent: int) -> Budget | None:
        """By the links on the way."""
        found = [
            Budget(max(1, int(self._part(link, percent) / by)), link)
            for link, by in divided_by.items()
            if link in self._gbits
        ]
        return min(found, key=lambda one: one.bytes_per_second, default=None)

    def _part(self, link: Link, percent: int) -> Fraction:
        """Bytes per second, for all that can wait."""
        return Fraction(self._gbits[link] * BYTES_OF_GBIT * percent, 100)

    def _kinds(self, link: Link) -> int:
        """How many kinds share it."""
        return 1 + (link in self._crossed) + (link.node in self._writers)

    # Fragments, and what is written to stores

    @cached_property
    def _parts(self) -> dict[int, dict[Link, Fraction]]:
        """By stream with holders, the links that its fragments cross, and which part of all bytes that
        it moves crosses each of them at most."""
        if not self._fragments.is_any:
            return {}
        related = ("job__driver", "node", "next_node")
        streams = Stream.objects.filter(job__running=True).select_related(*related)
        return {one.pk: parts for one in streams if (parts := self._parts_of(one))}

    @cached_property
    def _crossed(self) -> dict[Link, Fraction]:
        """By link, the sum of these parts: by that a link is divided, so that it carries no more."""
        found: dict[Link, Fraction] = {}
        for parts in self._parts.values():
            for link, part in parts.items():
                found[link] = found.get(link, Fraction(0)) + part
        return found

    def _parts_of(self, stream: Stream) -> dict[Link, Fraction]:
        here, found = _home(stream), dict[Link, Fraction]()
        for holder in self._fragments.holders_of_stream(stream):
            # Repair reads as many fragments as have data, and writes one; spills write more than that.
            each = Fraction(1, Redundancy(holder.code).data + 1)
            for link in self._way_to(here, holder.node.name):
                found[link] = min(Fraction(1), found.get(link, Fraction(0)) + each)
        return found

    def _way_to(self, here: Link, node: str) -> Iterator[Link]:
        """To a node of several NICs over the one on the same leaf, or else over the narrowest."""
        nics = [Link(node, leaf) for leaf in self.leaves.get(node, ())]
        if node == here.node:
            return iter(())
        if not nics:
            return iter((here,))
        there = min(nics, key=lambda nic: (nic.leaf != here.leaf, self._gbits[nic], nic.leaf))
        return _way(here, there)

    @cached_property
    def _writers(self) -> frozenset[str]:
        """The nodes whose tier 2 is not on a disk of their own."""
        found = Node.objects.filter(declared__has_key="tier2").values_list("name", "declared")
        return frozenset(name for name, declared in found if not is_local(declared["tier2"]))


def _links(stream: Stream) -> Iterator[Link]:
    if stream.next_node is None:
        return iter(())
    here = Link(stream.node.name, stream.nic_leaf)
    return _way(here, Link(stream.next_node.name, stream.next_nic_leaf))


def _home(stream: Stream) -> Link:
    """The NIC of the node that its driver uses."""
    if stream.phase == Phase.MOVING and stream.next_node is not None:
        return Link(stream.next_node.name, stream.next_nic_leaf)
    return Link(stream.node.name, stream.nic_leaf)


def _way(here: Link, there: Link) -> Iterator[Link]:
    """The links from one NIC to another."""
    for nic in (here, there):
        yield nic
        if here.leaf != there.leaf:
            yield Link("", nic.leaf)
