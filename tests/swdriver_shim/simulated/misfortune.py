"""What may go wrong between a driver, its agents and their disks; and other sizes and moves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from kvss_agent import pulls
from kvss_agent.client import Credentials
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.limits.background import Background
from kvss_agent.pulls import Pull, Source
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.tier2.backend import (
    Failed,
)
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.store import Tier2
from swdriver_shim.data_plane.agent_control import PullResult
from tests.swdriver_shim.simulated.agent import DRIVER, SECRET, Agent, To
from tests.swdriver_shim.simulated.disk import File
from tests.swdriver_shim.simulated.network import STALL_SECONDS, End
from tests.swdriver_shim.simulated.world import BEFORE, EACH, NOW, At, C, World, name_of


class Misfortune:
    def __init__(self, world: World) -> None:
        self._world = world
        self._chance, self._turns, self._seen = world.chance, world.turns, world.seen
        self.moving: set[At] = set()

    def kinds(self) -> list[tuple[Callable[[], None], float]]:
        """And how often, against each other."""
        return [
            (self.cut, 4),
            (self.hold, 4),
            (self.be_deaf, 1),
            (self.crash, 1.5),
            (self.resize, 2),
            (self.move, 5),
            (self.flip, 5),
            (self.spoil, 4),
            (self.fail, 1),
            (self.set_caps, 0.5),
            (self.put_the_calendar, 2),
            (self.stop_a_process, 1.5),
            (self.fill_a_disk, 1),
            (self.slow_down, 2),
            (self.upgrade, 1),
            (self.lose_a_node, 2),
            (self.lose_a_front, 2),
            (self.take_a_store_away, 2),
        ]

    def _some_end(self) -> End | None:
        ends = [end for agent in self._world.agents for end in agent.ends if not end.outgoing.is_over]
        return self._chance.choice(ends) if ends else None

    def cut(self) -> None:
        """Rather where something is on its way."""
        busy = [
            end
            for agent in self._world.agents
            for end in agent.ends
            if end.incoming.bytes or end.outgoing.bytes
        ]
        end = self._chance.choice(busy) if busy and self._chance.random() < 0.7 else self._some_end()
        if end:
            end.cut(self._chance.choice((0, 50, 10_000)))
            self._seen["cut"] += 1

    def hold(self) -> None:
        """Nothing comes through, one way, for a while."""
        if end := self._some_end():
            pipe = self._chance.choice((end.incoming, end.outgoing))
            pipe.held_until = self._turns.now + self._chance.choice((0.3, 3.0, 15.0, 70.0))
            self._seen["held up"] += 1

    def be_deaf(self) -> None:
        agent = self._chance.choice(self._world.agents)
        agent.is_heard = False

        self._later(self._chance.choice((1.0, 6.0, 20.0)), agent.listen)

    def crash(self) -> None:
        agent = self._chance.choice(self._world.agents)
        if agent.is_up:
            agent.crash()
            self._seen["crash"] += 1
            self._later(self._chance.choice((0.5, 3.0, 20.0)), agent.start_again)

    def lose_a_node(self) -> None:
        """Memory and disk: it comes back with neither. What is stored redundantly is elsewhere."""
        agent = self._chance.choice(self._world.agents)
        if agent.is_up:
            agent.crash()
            self._seen["a disk was lost"] += bool(agent.disk.contents)
            agent.disk.lose()
            if agent.front:
                agent.front.lose()
            self._later(self._chance.choice((0.5, 3.0, 20.0)), agent.start_again)

    def lose_a_front(self) -> None:
        """The disk before tier 2: what waited there is nowhere any more."""
        agents = [agent for agent in self._world.agents if agent.front and agent.is_up]
        if agents and (agent := self._chance.choice(agents)).front:
            agent.crash()
            self._seen["columns were lost that waited in front"] += agent.front.lose()
            self._later(self._chance.choice((0.5, 3.0, 20.0)), agent.start_again)

    def take_a_store_away(self) -> None:
        disk = self._chance.choice(self._world.stores)
        disk.is_away = True

        def bring_back() -> None:
            disk.is_away = False

        self._later(self._chance.choice((1.0, 10.0, 60.0)), bring_back)

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        def run() -> None:
            self._turns.wait(None, seconds)
            work()

        self._turns.start(run, "later", self._turns.here)

    def resize(self) -> None:
        at = self._chance.choice(self._world.places())
        self.resize_to(at, self._chance.choice((2, 3, 5, 8, 12)))

    def resize_to(self, at: At, slots: int) -> None:
        agent = self._world.homes[at]
        shard = agent.shards.get(name_of(at))
        if shard and agent.is_up:
            agent.specs[name_of(at)].slots = slots
            self._world.resizing.setdefault(shard, []).append(slots)

            def work() -> None:
                with contextlib.suppress(Breach):  # it has moved away
                    shard.resize(slots)
                    self._seen["resized"] += 1
                self._world.resizing[shard].remove(slots)

            self._turns.start(work, "resize", agent.process)

    def has_its_size(self, shard: HostedShard) -> bool:
        return not self._world.resizing.get(shard)

    def flip(self) -> None:
        """One bit, in memory."""
        held = [
            (shard, slot)
            for agent in self._world.agents
            for shard in agent.shards.values()
            for slot in range(shard.arena.slots)
        ]
        if held:
            shard, slot = self._chance.choice(held)
            self._seen["a bit flipped"] += self._flip(shard.arena.slot(slot))

    def spoil(self) -> None:
        """A file is gone, or not what it was."""
        if used := [disk for disk in self._world.disks if disk.contents]:
            disk = self._chance.choice(used)
            name = self._chance.choice(list(disk.contents))
            raw = disk.contents[name].raw
            match self._chance.randrange(3):
                case 0:
                    del disk.contents[name]
                case 1:
                    disk.contents[name] = File(raw[: len(raw) // 2], self._world.judge.moment)
                case 2:
                    self._flip(memoryview(raw))
            self._seen["a file was spoilt"] += 1

    def _flip(self, raw: memoryview) -> bool:
        at = self._chance.randrange(64 + C * EACH) % len(raw)
        is_there = any(raw[: 64 + C * EACH])
        if is_there:
            raw[at] ^= 1 << self._chance.randrange(8)
        return is_there

    def fail(self) -> None:
        self._chance.choice(self._world.disks).faults = self._chance.randint(1, 5)

    def set_caps(self) -> None:
        agent = self._chance.choice(self._world.agents)
        if agent.is_up and agent.tier_requests.store:
            agent.caps = self._world.caps()

            async def told(store: Tier2, caps: Caps) -> None:
                with contextlib.suppress(Failed):
                    await store.set_caps(caps)

            asyncio.run_coroutine_threadsafe(told(agent.tier_requests.store, agent.caps), agent.loop)

    def put_the_calendar(self) -> None:
        """Right or wrong, in either direction. What measures time does not jump."""
        seconds = self._chance.choice((-86_400.0, -60.0, -2.0, -0.5, 0.5, 2.0, 60.0, 86_400.0))
        self._turns.put_calendar(seconds)
        self._seen["the calendar was put back" if seconds < 0 else "the calendar was put ahead"] += 1

    def stop_a_process(self) -> None:
        """An agent, or the driver, stands still, and nobody is told."""
        processes = [agent.process for agent in self._world.agents if agent.is_up]
        if self._chance.random() < 0.3:
            processes = [self._world.process]
        if processes and not (process := self._chance.choice(processes)).is_stopped:
            self._turns.stop(process)
            self._seen["a process stood still"] += 1
            seconds = self._chance.choice((0.5, 5.0, 20.0, 130.0))
            self._later(seconds, lambda: self._turns.let_go_on(process))

    def fill_a_disk(self) -> None:
        disk = self._chance.choice(self._world.disks)
        disk.is_full = True

        def empty() -> None:
            disk.is_full = False

        self._later(self._chance.choice((1.0, 10.0, 60.0)), empty)

    def slow_down(self) -> None:
        """One connection, both ways, for as long as it lasts or a while."""
        if end := self._some_end():
            pipes = (end.incoming, end.outgoing)
            for pipe in pipes:
                pipe.slow_seconds = self._chance.choice((0.005, 0.05, 0.3))
            self._seen["a connection was slow"] += 1

            def be_quick() -> None:
                for pipe in pipes:
                    pipe.slow_seconds = 0.0

            self._later(self._chance.choice((1.0, 10.0, 60.0)), be_quick)

    def upgrade(self) -> None:
        """Or back: an agent is stopped, and starts as another version; or the driver speaks another
        with whom it connects to from here on."""
        versions = self._chance.choice((BEFORE, NOW))
        if self._chance.random() < 0.3:
            self._seen["a driver changed its version"] += versions != self._world.driver_versions
            self._world.driver_versions = versions
            return
        agent = self._chance.choice(self._world.agents)
        if agent.is_up and agent.versions != versions:
            agent.crash()
            agent.versions = versions
            self._seen["an agent changed its version"] += 1
            self._later(self._chance.choice((0.5, 3.0)), agent.start_again)

    # Moves, as `Shim` does them

    def move(self) -> None:
        at = self._chance.choice(self._world.places())
        target = self._chance.choice(self._world.agents)
        old = self._world.homes[at]
        can = self._world.is_shared and target is not old and target.is_up and at not in self.moving
        if can and len(self.moving) < 2:
            self.moving.add(at)
            self._turns.start(lambda: self._move(at, old, target), "move", self._world.process)

    def _move(self, at: At, old: Agent, target: Agent) -> None:
        name = name_of(at)
        shard = self._world.shards[at[0]][at[1]]
        target.specs[name] = self._world.spec(at, shard.count_from())
        target.provide(target.specs[name])

        def pull(slots: Sequence[int], after: int) -> PullResult:
            hosted = target.shards.get(name) if target.is_up else None
            if hosted is None or self._chance.random() < 0.05:
                return PullResult(done=False, bytes=0)
            source = Source(
                To(host="far", agent=old),
                name,
                Credentials(DRIVER, SECRET, stall_seconds=STALL_SECONDS),
                after,
            )
            fetching = Pull("pull", name, len(slots))
            task = self._turns.start(
                lambda: pulls.run_pull(fetching, hosted, source, slots, Background()),
                "pull",
                target.process,
            )
            until = self._turns.now + 120
            while not task.done and target.is_up and self._turns.now < until:
                self._turns.wait(task.joining, 1.0)
                if self._chance.random() < 0.02:  # the controller is not heard from any more
                    return PullResult(done=False, bytes=fetching.moved_bytes)
            self._seen["pulled"] += fetching.moved
            return PullResult(fetching.state == "done", fetching.moved_bytes)

        is_moved = shard.move(self._world.connect(at, target), pull)
        leaving = old if is_moved else target
        if self._chance.random() < 0.7:  # nobody takes it away at once
            self._turns.wait(None, self._chance.choice((0.1, 1.0, 5.0, 40.0)))
        if is_moved:
            self._world.homes[at] = target
            self._seen["moved"] += 1
            self._seen["moved away from a front"] += old.front is not None
        leaving.specs.pop(name, None)
        leaving.attend()
        gone = leaving.shards.pop(name, None)
        if gone and leaving.is_up:
            self._turns.start(lambda: gone.end(Cause.GONE, "it was taken away"), "end", leaving.process)
        self.moving.discard(at)
