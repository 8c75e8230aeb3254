"""Nodes that streams have left, for as long as their drivers may still have to ask there.

A driver counts a home that it has left as empty once it has emptied it, or once the agent, which has
proved who it is, says that it has no such shard. An agent that does not know a driver can prove nothing
to it where there is no TLS, as on Unix sockets. So the document of a node names such drivers until they
say that no home is left to be emptied.
"""

from __future__ import annotations

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
    if not stream.job.running:
        return
    address = endpoints.address(stream.node, Tier(stream.tier))
    home, _ = FormerHome.objects.get_or_create(
        driver=stream.job.driver, node=stream.node, defaults={"address": address}
    )
    if home.address != address:
        home.address = ""
        home.save(update_fields=["address"])


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
        if driver in drivers and not _has_left_all(driver, facts):
            continue
        found = list(of_driver)
        with transaction.atomic():
            FormerHome.objects.filter(pk__in=[home.pk for home in found]).delete()
            nodes = [("node", home.node.name) for home in found]
            control.changed(nodes, f"Driver {driver.name} has emptied its former homes")
        forgotten += len(found)
    return forgotten


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
