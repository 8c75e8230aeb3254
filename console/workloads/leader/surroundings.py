"""What surrounds the instances of a workload: the places that brains know, homes with their drivers and
jobs, and the session with its boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from console.workloads.leader.boxes import Boxes
from console.workloads.leader.replicas import Replica
from console.workloads.leader.world import (
    Action,
    CancelJob,
    DeleteSession,
    EndJob,
    Forget,
    Home,
    HomeSeen,
    Intent,
    RemoveHome,
    RemovePlace,
    Seen,
    SetPlace,
    SizeSession,
    StartJob,
)

Replicas = Mapping[int, Replica]


def places(intent: Intent, seen: Seen, replicas: Replicas) -> Iterator[Action]:
    """What brains are to know of replicas."""
    for ordinal, replica in sorted(replicas.items()):
        if ordinal < intent.replicas:
            epoch = _epoch_of_place(seen, replica)
            if ordinal not in seen.places or seen.places[ordinal] != epoch:
                yield SetPlace(ordinal, epoch)
    for ordinal in sorted(seen.places):
        left = replicas.get(ordinal)
        if ordinal >= intent.replicas and (left is None or not left.live):
            yield RemovePlace(ordinal)


def _epoch_of_place(seen: Seen, replica: Replica) -> int | None:
    """Of the driver that serves it, as soon as the fleet knows that driver."""
    joined = {one.home for one in seen.homes if one.has_joined}
    of = replica.owner or replica.heir
    if of is not None and of.home in joined:
        return of.revision.epoch
    known = seen.places.get(replica.ordinal)
    is_there = known is not None and Home(known, replica.ordinal) in joined
    return known if is_there and (of is None or of.home is not None) else None


def homes(seen: Seen, replicas: Replicas, boxes: Boxes, *, is_held: bool) -> Iterator[Action]:
    """Jobs for those in use; those that nobody needs go. `is_held`: the roll-out is."""
    used, kept = boxes.homes_in_use(), boxes.homes_to_keep(is_held=is_held)
    for one in seen.homes:
        if one.is_starting and one.home not in kept:
            yield CancelJob(one.home)
        if one.is_busy:
            continue
        if one.home in used and one.has_joined and not one.has_job:
            if boxes.has_room(one.home, one.home.ordinal) and boxes.stays_somewhere(one.home):
                yield StartJob(one.home)
        elif one.home not in kept:
            yield RemoveHome(one.home)
        elif _is_elsewhere(one, replicas):
            yield EndJob(one.home)


def _is_elsewhere(of: HomeSeen, replicas: Replicas) -> bool:
    """Whether its job runs on other boxes than the heir, which answers already."""
    replica = replicas.get(of.home.ordinal)
    heir = replica.heir if replica else None
    if heir is None or heir.home != of.home or not heir.answers:
        return False
    return of.has_job and bool(heir.boxes) and bool(of.boxes) and {*heir.boxes} != {*of.boxes}


def session(intent: Intent, seen: Seen, boxes: Boxes) -> Iterator[Action]:
    """The size that it should have."""
    if not intent.boxes_per_replica:
        return
    there, needed = seen.session, boxes.needed()
    if there is None:
        if needed:
            yield SizeSession(needed)
    elif there.is_busy or there.is_deleting:
        return
    elif needed > there.boxes:
        if not there.refused or needed < there.refused_boxes:
            yield SizeSession(needed)
    elif 0 < needed < there.boxes and boxes.are_enough(needed):
        yield SizeSession(needed)


def farewell(seen: Seen) -> Iterator[Action]:
    """No instance is left: drivers and jobs go, then the session, then what brains know of it."""
    if seen.instances:
        return  # until they are left out
    for ordinal in sorted(seen.places):
        yield RemovePlace(ordinal)
    yield from (CancelJob(one.home) for one in seen.homes if one.is_starting)
    yield from (RemoveHome(one.home) for one in seen.homes if not one.is_busy)
    if seen.homes or seen.places:
        return
    if seen.session is None:
        yield Forget()
    elif not seen.session.is_deleting and not seen.session.is_busy:
        yield DeleteSession()
