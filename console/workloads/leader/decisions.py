"""What to do about a workload now. Pure: what is wanted, what is seen and the time in; actions out.

It is level-triggered: nothing is remembered between two decisions but what is seen, so that any leader
decides the same, whatever the one before it had done of its actions. For each replica it knows

    heir     the instance of the wanted template, to which everything goes in the end
    owner    the instance whose address brains are told: the heir once it is warm, else what serves

and from these follows what each instance is asked for. A roll-back is the same with another heir.
So is a box that has to be left: who runs on it is no heir, and the next one gets other boxes. And so is
another address of the console, which who was made before can't know.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from console.workloads.leader import surroundings
from console.workloads.leader.boxes import Boxes
from console.workloads.leader.conditions import conditions
from console.workloads.leader.replicas import Replica
from console.workloads.leader.verdicts import Verdict, is_compared, judge
from console.workloads.leader.world import (
    NEVER,
    SETTLE_SECONDS,
    Action,
    Cache,
    Compile,
    CompileState,
    Complete,
    Create,
    Decision,
    Endpoint,
    Goal,
    Instance,
    Intent,
    Pause,
    Remove,
    Revision,
    RollBack,
    Seen,
    SetGoal,
    State,
    Template,
)

BROKEN_SECONDS: Final = 30.0  # without serving, until an old instance is ended before there is a new one
BACK_OFF_SECONDS: Final = 1.0  # after the first failure of a template; then twice as long each time
BACK_OFF_SECONDS_MAX: Final = 60.0
FAILURES_REMEMBERED_SECONDS: Final = 600.0

# Why an instance is gone that did not end by itself: its node was drained, or others deleted it.
DONE_TO_IT: Final = frozenset({"Evicted", "RecordLost"})


def decide(intent: Intent, seen: Seen, now: float) -> Decision:
    """What has to be done now: while nobody has heard of the cluster, nothing, and endpoints stay."""
    if seen.is_stale:
        return _Plan(intent, seen, now).wait()
    if intent.deleting:
        return _Plan(intent, seen, now).delete()
    return _Plan(intent, seen, now).keep()


class _Plan:
    """One decision in the making."""

    def __init__(self, intent: Intent, seen: Seen, now: float) -> None:
        self.intent = intent
        self.seen = seen
        self.now = now
        self.actions: list[Action] = []
        self.look_at = NEVER
        self.verdict: Verdict | None = None
        self.boxes = Boxes(intent, seen)
        self.replicas = self._replicas()

    # Three ends

    def wait(self) -> Decision:
        for ordinal, replica in self.replicas.items():
            told = self.seen.published.get(ordinal)
            replica.owner = self._owner(replica)
            replica.is_retiring = told is not None and told.is_draining
        return self._decision()

    def delete(self) -> Decision:
        """Drain everything, then let go of what it had, from the inside out."""
        self._remove_what_is_gone()
        for replica in self.replicas.values():
            self._retire(replica)
        if not any(one.is_live for one in self.seen.instances):
            self.actions += surroundings.farewell(self.seen)
        return self._decision()

    def keep(self) -> Decision:
        self._remove_what_is_gone()
        self._judge()
        self._compile()
        wanted = [self.replicas[ordinal] for ordinal in range(self.intent.replicas)]
        leaving = [one for number, one in self.replicas.items() if number >= self.intent.replicas]
        for replica in leaving:
            self._retire(replica)
        for replica in wanted:
            replica.owner = self._owner(replica)
        self._create(wanted)
        for replica in wanted:
            self._set_goals(replica)
        self.actions += surroundings.places(self.intent, self.seen, self.replicas)
        self.actions += surroundings.homes(self.seen, self.replicas, self.boxes, is_held=self._is_held)
        self.actions += surroundings.session(self.intent, self.seen, self.boxes)
        self._complete(wanted, leaving)
        return self._decision()

    def _decision(self) -> Decision:
        endpoints = tuple(
            endpoint
            for _, replica in sorted(self.replicas.items())
            if (endpoint := self._endpoint(replica)) is not None
        )
        return Decision(
            actions=tuple(self.actions),
            endpoints=endpoints,
            conditions=conditions(
                self.intent,
                self.seen,
                list(self.replicas.values()),
                endpoints,
                self.verdict,
                is_complete=self._is_done or Complete() in self.actions,
            ),
            look_at=self.look_at,
        )

    def _is_after(self, at: float) -> bool:
        """Whether it is so late; if not, this is looked at again then."""
        if self.now >= at:
            return True
        self.look_at = min(self.look_at, at)
        return False

    # Who is who

    def _replicas(self) -> dict[int, Replica]:
        made = {ordinal: Replica(ordinal) for ordinal in range(self.intent.replicas)}
        for one in sorted(self.seen.instances, key=lambda one: (one.created_at, one.name)):
            if not one.is_live:
                continue
            replica = made.setdefault(one.ordinal, Replica(one.ordinal))
            if one.goal is Goal.DRAIN or one.state is State.DRAINING:
                replica.draining.append(one)
            else:
                replica.rest.append(one)
        for replica in made.values():
            self._choose_heir(replica)
        return made

    def _choose_heir(self, replica: Replica) -> None:
        of_target = [
            one
            for one in replica.rest
            if one.template == self.intent.template
            and not self._has_lost_its_cache(one)
            and not self.seen.is_to_be_replaced(one)
        ]
        if of_target:
            replica.heir = max(of_target, key=lambda one: (one.answers, one.created_at, one.name))
            replica.rest.remove(replica.heir)

    def _has_lost_its_cache(self, one: Instance) -> bool:
        """It was told to take its cache again, and can't: then a new instance has to."""
        return (
            one.cache is Cache.RELEASED
            and one.goal is Goal.RUN
            and one.acknowledged is Goal.RUN
            and self._is_after(one.goal_at + self.intent.rules.warm_seconds)
        )

    def _owner(self, replica: Replica) -> Instance | None:
        """Whose address brains are told: the heir as soon as it is as good as what serves now."""
        heir, told = replica.heir, self.seen.published.get(replica.ordinal)
        published = told.instance if told else None
        serving = [one for one in replica.rest if one.answers]
        if (
            heir is not None
            and heir.answers
            and (not serving or heir.name == published or self._may_take_over(heir, replica))
        ):
            return heir
        if serving:
            return max(serving, key=lambda one: (one.name == published, one.created_at, one.name))
        return None

    def _may_take_over(self, heir: Instance, replica: Replica) -> bool:
        """Warm for long enough, or cold for too long while nobody keeps the cache from it."""
        is_paused = self.intent.paused and any(self._is_held_back(one) for one in replica.rest)
        if is_paused and not self._has_begun(replica):
            return False
        if heir.is_warm:
            return self._is_after(heir.since + self.intent.rules.ready_seconds)
        if heir.home is None or any(self._keeps_cache_from(heir, one) for one in replica.rest):
            return False
        let_go = max((one.goal_at for one in replica.rest), default=0.0)
        return self._is_after(max(heir.since, let_go) + self.intent.rules.warm_seconds)

    @staticmethod
    def _keeps_cache_from(heir: Instance, other: Instance) -> bool:
        return other.home == heir.home and other.goal is Goal.RUN

    @staticmethod
    def _has_begun(replica: Replica) -> bool:
        """Whether its cache is on the way from one instance to another."""
        return any(one.goal is Goal.RELEASE_CACHE for one in replica.rest)

    # What ended

    def _remove_what_is_gone(self) -> None:
        for one in self.seen.instances:
            if one.state is State.GONE:
                has_failed = one.goal is not Goal.DRAIN and one.reason not in DONE_TO_IT
                self.actions.append(Remove(one.name, has_failed, one.sentence))

    # Whether it is worth going on

    def _judge(self) -> None:
        judged = judge(self.intent, self.seen, self.now)
        self.verdict = judged.verdict
        self.look_at = min(self.look_at, judged.look_at)
        if self.verdict is None or self.intent.paused:
            return
        stable, target = self.intent.stable, self.intent.revision
        if stable is None:
            return  # there is nothing to go back to; it is tried again, more and more slowly
        if is_compared(self.intent) and self.intent.rules.auto_rollback:
            self.actions.append(RollBack(stable.number, *self.verdict))
        elif stable != target or self._is_restarting():
            self.actions.append(Pause(*self.verdict))

    def _is_restarting(self) -> bool:
        return any(one.is_live and one.restart != self.intent.restarts for one in self.seen.instances)

    @property
    def _is_held(self) -> bool:
        """Nothing new is begun: it is paused, or about to be, or about to become another revision."""
        return self.intent.paused or self._goes_back

    @property
    def _goes_back(self) -> bool:
        return any(isinstance(one, RollBack | Pause) for one in self.actions)

    def _is_held_back(self, one: Instance) -> bool:
        """It would be replaced by another revision. What is replaced by its equal goes on."""
        return self._is_held and one.template != self.intent.template

    def _is_to_be_replaced(self, replica: Replica) -> bool:
        """Whether it is what is wanted, but for its boxes or the console's address."""
        if any(self._is_held_back(one) for one in replica.rest):
            return False
        return any(self.seen.is_to_be_replaced(one) for one in replica.rest)

    def _compile(self) -> None:
        if not self.intent.revision.is_compiled and self.seen.compile.state is CompileState.NONE:
            self.actions.append(Compile())

    # Instances

    def _create(self, wanted: Sequence[Replica]) -> None:
        """New instances where there are none, then for those that are to be replaced: as many as
        `max_surge` lets there be beside the others, or in the place of the old ones."""
        surge = sum(max(0, one.live - 1) for one in wanted)
        available = sum(self._is_settled(one) for one in wanted)
        for replica in sorted(wanted, key=self._first_to_be_replaced):
            if replica.heir is not None:
                continue
            if replica.live == 0:
                self._fill(replica)
                continue
            if self._is_held and not self._is_to_be_replaced(replica):
                continue
            if not self.intent.revision.can_run:
                continue
            if self._can_surge(replica):
                if surge < self.intent.rules.max_surge and self._new(replica, self.intent.revision):
                    surge += 1
            elif replica.owner is None:
                self._end_what_is_broken(replica)
            elif available > self.intent.replicas - self.intent.rules.max_unavailable:
                home = self.intent.revision.home(replica.ordinal)
                if self.boxes.take(home, replica.ordinal):
                    available -= 1
                    replica.is_retiring = True

    def _is_settled(self, replica: Replica) -> bool:
        """Whether it serves, and if it is new, has done so for long enough and with its cache."""
        owner, rules = replica.owner, self.intent.rules
        if owner is None or owner is not replica.heir:
            return owner is not None
        seconds = rules.ready_seconds if owner.is_warm else max(rules.ready_seconds, rules.warm_seconds)
        return self._is_after(owner.since + seconds)

    def _first_to_be_replaced(self, replica: Replica) -> tuple[bool, bool, bool, int]:
        told = self.seen.published.get(replica.ordinal)
        is_announced = told is not None and told.is_draining
        return replica.live > 0, not is_announced, replica.owner is not None, -replica.ordinal

    def _can_surge(self, replica: Replica) -> bool:
        """In another epoch it needs a home of its own, and so boxes of the session."""
        if not self.intent.rules.max_surge:
            return False
        home = self.intent.revision.home(replica.ordinal)
        session = self.seen.session
        if home is None or session is None or not session.refused:
            return True
        is_there = any(one.home == home for one in self.seen.homes)
        return is_there or session.refused_boxes > self.boxes.needed()

    def _fill(self, replica: Replica) -> None:
        """A replica without any instance. While a roll-out is held, it stays what the others are."""
        revision = self.intent.revision
        if self._is_held or not revision.can_run:
            if self.intent.stable is None:
                return
            revision = self.intent.stable
        self._new(replica, revision)

    def _new(self, replica: Replica, revision: Revision) -> bool:
        """Returns whether there will be one. What brains are to show it is known with its place."""
        if replica.ordinal not in self.seen.places:
            return False
        home = revision.home(replica.ordinal)
        if not revision.can_run:
            return False
        if not self.boxes.has_room(home, replica.ordinal):
            return False
        template = Template(revision.digest, self.intent.restarts)
        if not self._is_after(self._not_before(replica.ordinal, template)):
            return False
        if not self.boxes.take(home, replica.ordinal):
            return False
        created = Create(replica.ordinal, revision, self.intent.restarts)
        self.actions.append(created)
        self.boxes.count(created)
        return True

    def _not_before(self, ordinal: int, template: Template) -> float:
        failed = [
            one.at
            for one in self.seen.failures
            if one.ordinal == ordinal
            and one.template == template
            and self.now - one.at < FAILURES_REMEMBERED_SECONDS
        ]
        if not failed:
            return 0.0
        seconds = BACK_OFF_SECONDS * 2.0 ** min(len(failed) - 1, 16)
        return max(failed) + min(seconds, BACK_OFF_SECONDS_MAX)

    def _end_what_is_broken(self, replica: Replica) -> None:
        for one in replica.rest:
            if self._is_after(one.since + BROKEN_SECONDS):
                self._set(one, Goal.DRAIN)

    def _set_goals(self, replica: Replica) -> None:
        if replica.is_retiring:
            self._retire(replica)
            return
        heir, owner = replica.heir, replica.owner
        if heir is not None:
            self._set(heir, Goal.RUN)
        for one in list(replica.rest):
            if heir is None:
                self._keep_or_end(one, owner)
            elif owner is heir:
                if self._is_told(replica, heir):
                    self._set(one, Goal.DRAIN)
            elif one is not owner and owner is not None:
                self._end_superseded(one)
            else:
                self._let_go_of_cache(one, heir)

    def _keep_or_end(self, one: Instance, owner: Instance | None) -> None:
        if owner is not None and one is not owner:
            self._end_superseded(one)
        else:
            self._set(one, Goal.RUN)

    def _end_superseded(self, one: Instance) -> None:
        """It never served, or serves no more, and is not what is wanted."""
        if not self._is_held_back(one):
            self._set(one, Goal.DRAIN)

    def _let_go_of_cache(self, one: Instance, heir: Instance) -> None:
        """The heir is up and waits: the cache is handed over. If the heir fails, it is taken again."""
        has_it = heir.cache is Cache.ATTACHED
        if heir.home is None or one.home != heir.home or not (heir.answers or has_it):
            self._set(one, Goal.RUN)
        elif one.goal is Goal.RUN and not self._is_held_back(one):
            self._set(one, Goal.RELEASE_CACHE)

    def _set(self, one: Instance, goal: Goal) -> None:
        if one.goal is not goal and one.goal is not Goal.DRAIN:
            self.actions.append(SetGoal(one.name, goal))

    def _is_told(self, replica: Replica, owner: Instance) -> bool:
        """Whether brains have known for a while that this instance serves the replica."""
        told = self.seen.published.get(replica.ordinal)
        if told is None or told.instance != owner.name or told.is_draining:
            return False
        return self._is_after(told.at + SETTLE_SECONDS)

    def _retire(self, replica: Replica) -> None:
        """Brains hear of it first, then it is drained, with nothing in its place."""
        replica.is_retiring = True
        everything = [*replica.rest, *([replica.heir] if replica.heir else [])]
        replica.owner = replica.owner or self._owner(replica)
        for one in everything:
            if one is not replica.owner or self._is_told_to_drain(replica, one):
                self._set(one, Goal.DRAIN)

    def _is_told_to_drain(self, replica: Replica, one: Instance) -> bool:
        told = self.seen.published.get(replica.ordinal)
        if not self.seen.can_publish or told is None:
            # Brains find out by themselves. A roll-out can wait for Redis; who is to leave can't.
            return replica.ordinal >= self.intent.replicas or self.intent.deleting
        if told.instance != one.name or not told.is_draining:
            return False
        return self._is_after(told.at + SETTLE_SECONDS)

    # Whether all is done

    @property
    def _is_done(self) -> bool:
        """Whether its roll-out is noted as complete."""
        return self.intent.stable == self.intent.revision and not self.intent.is_rolling

    def _complete(self, wanted: Collection[Replica], leaving: Collection[Replica]) -> None:
        """Everybody is what was wanted, and nothing else is left."""
        if self._is_done or self._goes_back or any(one.live for one in leaving):
            return
        if all(self._is_complete(one) for one in wanted):
            self.actions.append(Complete())

    def _is_complete(self, replica: Replica) -> bool:
        heir = replica.heir
        if heir is None or replica.live > 1 or replica.owner is not heir:
            return False
        return self._is_settled(replica) and self._is_told(replica, heir)

    # Endpoints

    def _endpoint(self, replica: Replica) -> Endpoint | None:
        owner = replica.owner
        if owner is None:
            leaving = [one for one in replica.draining if one.url and one.state is not State.GONE]
            if not leaving:
                return None
            owner = leaving[-1]
            return _endpoint(owner, is_draining=True)
        return _endpoint(owner, is_draining=replica.is_retiring)


def _endpoint(of: Instance, *, is_draining: bool) -> Endpoint:
    return Endpoint(
        ordinal=of.ordinal, instance=of.name, url=of.url, is_draining=is_draining, since=of.since
    )
