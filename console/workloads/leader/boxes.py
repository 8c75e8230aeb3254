"""The boxes and homes of a workload: which are taken, which there are for whom, and how many it needs.

What this decision creates counts as there already.
"""

from __future__ import annotations

from console.workloads.leader.world import Create, Home, Intent, Seen


class Boxes:
    """Of one decision in the making."""

    def __init__(self, intent: Intent, seen: Seen) -> None:
        self._intent = intent
        self._seen = seen
        self._spare = seen.session.spare if seen.session else 0  # for those who leave others
        self._created: list[Create] = []

    def count(self, created: Create) -> None:
        self._created.append(created)

    # Homes

    def homes_in_use(self) -> set[Home]:
        """Of live instances, and of those that will be there."""
        used = {one.home for one in self._seen.instances if one.home}
        return used | {home for one in self._created if (home := one.revision.home(one.ordinal))}

    def homes_to_keep(self, *, is_held: bool) -> set[Home]:
        """In use, or of replicas that only lack an instance for now. `is_held`: its roll-out is."""
        revisions = [self._intent.revision]
        if self._intent.stable and (is_held or not self._intent.revision.can_run):
            revisions.append(self._intent.stable)
        ordinals = range(self._intent.replicas)
        wanted = {home for one in revisions for number in ordinals if (home := one.home(number))}
        return self.homes_in_use() | wanted

    def stays_somewhere(self, home: Home) -> bool:
        """Whether it has an instance that stays where it is."""
        return any(one.home == home and not self._seen.leaves(one) for one in self._seen.instances)

    # Whether there is room

    def has_room(self, home: Home | None, ordinal: int) -> bool:
        """Whether the session has boxes for a new instance, beside all the others. Without a cache, what
        replaces a replica's own instance is on the same boxes."""
        if not self._intent.boxes_per_replica:
            return True
        session = self._seen.session
        if session is None or session.is_deleting:
            return False
        if home is None:
            there = {one.ordinal for one in self._seen.instances if one.is_live}
            taken = len(there | {ordinal} | {one.ordinal for one in self._created})
        else:
            busy = {one.home for one in self._seen.homes if one.has_job or one.is_busy}
            taken = len(busy | {home} | self.homes_in_use())
        return session.granted >= taken * self._intent.boxes_per_replica

    def take(self, home: Home | None, ordinal: int) -> bool:
        """Whether a new instance has somewhere to go, if it is to leave boxes. Those it gets nobody else
        gets."""
        if home is None:
            needed = self._to_replace(ordinal)
        else:
            needed = self._intent.boxes_per_replica if self._is_to_leave(home) else 0
        if self._spare < needed:
            return False
        self._spare -= needed
        return True

    def _is_to_leave(self, home: Home) -> bool:
        """Whether a new instance of it has to have other boxes than its job, or its instances."""
        session = self._seen.session
        if session is None or not session.to_leave:
            return False
        its = [one for one in self._seen.instances if one.is_live and one.home == home]
        if its:
            return all(self._seen.leaves(one) for one in its)
        return any(
            one.home == home and not session.to_leave.isdisjoint(one.boxes) for one in self._seen.homes
        )

    def _to_replace(self, ordinal: int) -> int:
        """Of a replica without a cache: a new instance stays on those of its boxes that are not to be
        left."""
        to_leave = self._seen.session.to_leave if self._seen.session else frozenset()
        its = [one for one in self._seen.instances if one.is_live and one.ordinal == ordinal]
        return min((len(to_leave.intersection(one.boxes)) for one in its), default=0)

    # How many its session needs

    def needed(self) -> int:
        """For all replicas, and in a cold roll-out for those beside them."""
        revision = self._intent.revision
        replicas = self._intent.replicas
        if not revision.has_cache:
            beyond = {one.ordinal for one in self._seen.instances if one.is_live} - {*range(replicas)}
            return (replicas + len(beyond)) * self._intent.boxes_per_replica
        if revision.epoch is not None:
            used = {one.home for one in self._seen.instances if one.home}
            others = {home for home in used if home.epoch != revision.epoch}
            leaving = {home for home in used - others if home.ordinal >= replicas}
            doubled = {home.ordinal for home in others if home.ordinal < replicas}
            gone_from = len(others) - len(doubled) + len(leaving)
            replicas += min(len(doubled), self._intent.rules.max_surge) + gone_from
        return replicas * self._intent.boxes_per_replica + self._to_move()

    def _to_move(self) -> int:
        """Boxes beside the others, for those that are to leave theirs: as many as there can be."""
        session, rules = self._seen.session, self._intent.rules
        if session is None or not session.to_leave:
            return 0
        leaving = {one.ordinal for one in self._seen.instances if one.is_live and self._seen.leaves(one)}
        leaving |= {
            one.home.ordinal for one in self._seen.homes if not session.to_leave.isdisjoint(one.boxes)
        }
        moves = sum(ordinal < self._intent.replicas for ordinal in leaving)
        beside = min(moves, max(rules.max_surge, rules.max_unavailable, 1))
        has = max(0, session.granted - self._intent.replicas * self._intent.boxes_per_replica)
        can_be = (has + session.free) // max(1, self._intent.boxes_per_replica)
        return min(beside, can_be) * self._intent.boxes_per_replica

    def are_enough(self, boxes: int) -> bool:
        """Whether so many are left for all that run, and for instances that get theirs only now."""
        used = {box for one in self._seen.instances if one.is_live for box in one.boxes}
        used |= {box for one in self._seen.homes for box in one.boxes}
        # Those of others may have been chosen for them already.
        with_jobs = {one.home for one in self._seen.homes if one.has_job and not one.is_busy}
        return len(used) <= boxes and not self._created and not self.homes_in_use() - with_jobs
