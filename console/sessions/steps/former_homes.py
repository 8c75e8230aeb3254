"""Nodes that streams have left, for as long as their drivers may still have to ask there.

A driver counts a home that it has left as empty once it has emptied it, or once the agent, which has
proved who it is, says that it has no such shard. An agent that does not know a driver can prove nothing
to it where there is no TLS, as on Unix sockets. So the document of a node names such drivers until they
say that no home is left to be emptied. And the document of a driver says where an agent is now that it
waits for at an earlier address.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from django.db import transaction

from console.control import services as control
from console.fleet.models import Driver
from console.placement.topology import Tier
from console.sessions import endpoints
from console.sessions.models import FormerHome, Stream
from console.sessions.steps.observations import Observations


def leave(stream: Stream) -> None:
    """Its driver has had it on this node. Called before the stream's node is another one."""
    if stream.job.running:
        FormerHome.objects.get_or_create(driver=stream.job.driver, node=stream.node)


def forget_emptied() -> int:
    """Ask drivers, and forget the nodes that they have no home to empty on. How many were forgotten."""
    related = ("driver", "node")
    homes = list(FormerHome.objects.select_related(*related).order_by("driver", "node"))
    if not homes:
        return 0
    drivers = {home.driver for home in homes if home.driver.joined_at}
    facts = Observations(set(), {driver for driver in drivers if driver.lost_at is None})
    forgotten = 0
    for driver, of_driver in groupby(homes, key=lambda home: home.driver):
        found = list(of_driver)
        if driver in drivers and not _has_left_all(driver, facts):
            _note_moved(found, facts.left_by(driver.name))
            continue
        with transaction.atomic():
            FormerHome.objects.filter(pk__in=[home.pk for home in found]).delete()
            nodes = [("node", home.node.name) for home in found]
            control.changed(nodes, f"Driver {driver.name} has emptied its former homes")
        forgotten += len(found)
    return forgotten


def _note_moved(homes: Iterable[FormerHome], left: set[str] | None) -> None:
    """Store at which address their driver waits for an agent that is at another one by now.

    `left`: where it waits; None: it has not answered, so what is stored stays."""
    if left is None:
        return
    for home in homes:
        now = {endpoints.address(home.node, tier) for tier in Tier}
        keys = set(map(_key_in, now)) - {""}  # without one, it is not known to be the same agent
        waits = next((one for one in sorted(left - now) if _key_in(one) in keys), "")
        if home.address != waits:
            home.address = waits
            home.save(update_fields=["address"])


def _key_in(address: str) -> str:
    """The key of the agent; empty where there is none. What a driver says may be no address at all."""
    return address.partition("#")[2]


def _has_left_all(driver: Driver, facts: Observations) -> bool:
    """Whether it is where its streams are, and nothing of them is left elsewhere. A driver whose job has
    ended has no streams: nobody is told any more that it was there."""
    streams = Stream.objects.filter(job__driver=driver, job__running=True).select_related("node")
    for stream in streams:
        seen = facts.shard_of(driver.name, stream.group, stream.index)
        if seen is None or seen.former_homes:
            return False
        if seen.address != endpoints.address(stream.node, Tier(stream.tier)):
            return False
    return True
