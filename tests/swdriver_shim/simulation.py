"""A driver, its agents, their disks and the network between them, in one thread and from one seed.

All that decides or moves a byte is the code that runs in production: `Driver` with its ledger, its
carrier and its shards, the clients of both transports, and of an agent the connections, the shards with
their cores and arenas, the pulls, and tier 2 with its index and what is in front of it. Threads, clocks,
event loops, sockets and files are not: threads are left and go on as chance has it (`tests.one_thread`),
and sockets and disks fail as it has it. Agents crash and come back empty, connections break at any byte
or are slow, bits flip, files vanish, disks are full, stores are away, fronts are lost, processes stand
still, the calendar is put back and ahead, agents and driver are upgraded one after the other, shards
shrink, grow and move, all while an engine stores, loads, deletes and purges. Half of the seeds have the
compiled loops over prompts, where they can be had; the others those in Python.

What comes of that is for `judge` to say. What is not tried: the control API and the documents of agents
and driver, TLS, a driver that dies (its successor knows nothing of what lies in memory), and shards that
move from agents with a tier 2 of their own.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Self

from swdriver_shim.cache.prefix_map import State
from swdriver_shim.driver import Driver
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.kinds_of_loops import kind_of_seed, kinds_of_loops, loops_in_use
from tests.swdriver_shim.simulated.engine import Engine
from tests.swdriver_shim.simulated.misfortune import Misfortune
from tests.swdriver_shim.simulated.world import ORGS, World, name_of


class Simulation:
    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.world = World(chance)
        self._engine = Engine(self.world)
        self._misfortune = Misfortune(self.world)
        # Each life has a temper of its own: something happens often in it, and something never.
        always = [1.0, 1.0, 1.0]
        self._temper = [*always, *(chance.choice((0.0, 0.3, 1.0, 1.0, 3.0, 10.0)) for _ in range(24))]
        self._is_rough = False
        self._spell = 0
        self._loops = kind_of_seed(seed)
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(loops_in_use(kinds_of_loops()[self._loops]))
        self._entered.enter_context(self.world)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._entered.close()
        if error is not None:
            error.add_note(f"Its loops over prompts were {self._loops}.")

    def step(self) -> None:
        """Something new happens, or what is under way goes on a little."""
        self._spell -= 1
        if self._spell <= 0:  # there are quiet times, in which caches fill
            self._is_rough = not self._is_rough
            self._spell = (
                self.chance.randint(30, 100) if self._is_rough else self.chance.randint(30, 200)
            )
        if self.world.driver and self.chance.random() < 0.25:
            acts = [*self._engine.wishes(), *(self._misfortune.kinds() if self._is_rough else ())]
            weights = [weight * temper for (_, weight), temper in zip(acts, self._temper, strict=False)]
            self.chance.choices([act for act, _ in acts], weights)[0]()
        else:
            self._go_on(self.chance.randint(1, 30))
        self.check()

    def _go_on(self, slices: int) -> None:
        for _ in range(slices):
            if not self.world.turns.go_on():  # all of them wait for something
                if self._is_rough and self.chance.random() < 0.1:
                    self.world.turns.pass_time(self.chance.choice((0.3, 1.0, 4.0, 15.0)))
                self.world.turns.pass_time_until_something_is_due(1.0)
                return

    def check(self) -> None:
        if self.world.driver:
            ledger = self.world.driver.ledger
            if self.chance.random() < 0.1:
                check_integrity(ledger)
                self.world.inspect()
            else:
                for account in ledger.accounts.values():
                    check_integrity(account.tally)
            self._engine.check()
            self._check_caps()

    def _check_caps(self) -> None:
        for agent in self.world.agents:
            store = agent.tier_requests.store if agent.is_up else None
            if store and not self.world.is_shared and not store._state.index.any_exceeds():
                held = sum(len(file.raw) for file in agent.disk.contents.values())
                assert held <= store._state.index.caps.total, "tier 2 has more than it may"
            front = agent.fronted._contents.index if agent.fronted else None
            if store and agent.front and front and not front.any_exceeds():
                assert agent.front.held <= agent.front.cap, "the front has more than it may"

    def come_to_rest(self) -> None:
        """No more misfortune: then all that was begun comes to its end, and all is as good as new."""
        world, engine, misfortune = self.world, self._engine, self._misfortune
        self._is_rough = False
        for disk in world.disks:
            disk.faults = 0
            disk.is_full = disk.is_away = False
        self.world.turns.let_go_on(self.world.process)
        for agent in world.agents:
            agent.listen()
            agent.start_again()
            agent.go_on()
            for end in agent.ends:
                end.incoming.held_until = end.outgoing.held_until = 0
                end.incoming.slow_seconds = end.outgoing.slow_seconds = 0
        self._until(
            lambda: world.driver is not None and not misfortune.moving,
            "moves come to their end",
        )
        driver = world.driver
        assert driver
        for at, agent in world.homes.items():
            self._until(partial(agent.has, name_of(at)), "shards are made")
            self._until(
                partial(misfortune.has_its_size, agent.shards[name_of(at)]), "they get their size"
            )
            misfortune.resize_to(at, 12)
        self._until(lambda: not engine.asking, "requests come to their end")
        for end in [end for agent in world.agents for end in agent.ends]:
            end.cut(0)  # over a stream, a driver hears of another size when it connects
        roomy = Policy(tiers=Tiers.TIER2, ttl_last_use_seconds=None, redundant_from_priority=0)
        engine.set_policies({org: OrgPolicies(policy=roomy) for org in ORGS})
        engine.start(engine.find_out, "find out")
        self._until(lambda: not engine.asking, "all shards are there again")
        self._until(lambda: self._is_quiet(driver), "housekeeping comes to its end")
        check_integrity(driver.ledger)
        for account in driver.ledger.accounts.values():
            for group in range(len(world.layout.groups)):
                states = {column.state for column in account.columns(group)}
                assert states <= {State.READY, State.EMPTY}, "a column is on its way for ever"
        for ask in world.judge.asks:
            assert ask.removal.done, "all that was to be removed is"
            ask.is_confirmed = True
        world.inspect()
        engine.start(lambda: engine.show_life(driver), "show")
        self._until(lambda: not engine.asking, "it goes on as before")
        engine.start(driver.close, "close")
        self._until(lambda: not engine.asking, "it can be closed")
        for account in driver.ledger.accounts.values():
            for tier, tokens in account.tally.hits.items():
                world.seen[f"tokens from {tier}"] += tokens
            for reason, tokens in account.tally.missed.items():
                world.seen[f"missed: {reason}"] += tokens
        for outcome, prompts in driver.borrowing.outcomes.items():
            world.seen[f"a sibling was asked: {outcome}"] += prompts
        recalled = driver.ledger.tier2.recalled
        world.seen["spilled"] += driver.ledger.tier2.spilled.columns
        world.seen["recalled"] += recalled.columns
        world.seen["restored"] += recalled.restored
        world.seen["late"] += recalled.late
        promoted = driver.ledger.tier2.promoted
        world.seen["promoted"] += promoted.columns
        world.seen["promoted, used"] += promoted.used
        world.seen["promoted, removed before"] += promoted.unused

    def what_was_seen(self) -> Counter[str]:
        more = {"turns": self.world.turns.slices, f"loops were {self._loops}": 1}
        return self.world.seen + Counter(more)

    @staticmethod
    def _is_quiet(driver: Driver) -> bool:
        ledger, stock = driver.ledger, driver.ledger._stock
        slots, deletes, restores = ledger._slots, ledger._stock.deletes, ledger._restores
        busy = (
            slots._uses, slots._freed, slots._clears, slots._taken, stock._purged, restores._lost,
            stock.expiry.is_behind, deletes._deletes, deletes._purges, restores._restores,
            deletes._purging,
        )  # fmt: skip
        carrier = driver._tier2
        is_left = any(shard.has_former_homes for of in driver._shards for shard in of)
        is_carrying = (
            carrier._is_busy or carrier._spilling or carrier._searching or carrier._is_promoting
        )
        return (
            stock.is_reachable
            and not any(busy)
            and not is_carrying
            and not is_left
            and all(pool.limit >= 12 for pool in slots.pools)
        )

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        until = self.world.turns.now + 1000
        while not holds():
            assert self.world.turns.now < until, f"{what}: it never does"
            self._go_on(20)
            self.check()
