"""What an engine and its people ask of a driver, and whether they get what they should."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from kvss_agent.tier2.address import Address
from swdriver_shim.cache.purge_dates import NEVER_YET
from swdriver_shim.driver import Driver, Loaded
from swdriver_shim.keys import Keys, Prompt
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tier2Rule, Tiers
from tests.swdriver_shim.judge import Sight, Written
from tests.swdriver_shim.prompts import NAMESPACE, OTHER, keys
from tests.swdriver_shim.simulated.world import ORGS, C, World, name_of

ASKING_MAX: Final = 8  # requests at once
Place = tuple[int, int, int, int]  # group, shard, depth, tokens


class EngineFailed(Exception):
    """What an engine raises where it is read from."""


class Engine:
    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = chance = world.chance
        self._turns, self._judge, self._seen = world.turns, world.judge, world.seen
        self.asking = 0
        self._orgs = ORGS[: chance.randint(1, 3)]
        self._namespaces = (NAMESPACE, OTHER)[: chance.randint(1, 2)]
        self._lent: deque[tuple[Keys, bytes]] = deque(maxlen=4)  # what the sibling may have
        self._talks: deque[tuple[Keys, bytes]] = deque(maxlen=chance.choice((3, 6, 12)))
        self._given: deque[tuple[bytearray, bytes]] = deque(maxlen=50)
        self._kinds = chance.choice((2, 3))  # of columns: with few of them prompts share prefixes

    @property
    def _driver(self) -> Driver:
        assert self._world.driver
        return self._world.driver

    def wishes(self) -> list[tuple[Callable[[], None], float]]:
        """And how often, against each other."""
        return [
            (self.request, 30),
            (self.load, 25),
            (self.pass_time, 10),
            (self.borrow, 40),
            (self.store_at_the_sibling, 30),
            (self.verb, 6),
            (self.delete, 1),
            (self.purge, 0.5),
            (self.set_policy, 1),
        ]

    def check(self) -> None:
        for place, before in self._given:
            assert place == before, "written to after it was given"

    def pass_time(self) -> None:
        self._turns.pass_time(self._chance.choice((0.05, 0.2, 1.0)))

    def start(self, work: Callable[[], None], name: str) -> None:
        if self.asking < ASKING_MAX:
            self.asking += 1

            def run() -> None:
                work()
                self.asking -= 1

            self._turns.start(run, name, self._world.process)

    def _asked(self) -> Prompt:
        """Something new, or what was stored before: the same again, or a part of it and something
        else."""
        chance = self._chance
        if self._talks and chance.random() < 0.85:
            maker, tokens = chance.choice(self._talks)
            if chance.random() < 0.7:
                return maker.prompt(tokens)
            tokens = tokens[: 4 * C * chance.randint(1, 4)]
        else:
            maker = keys(chance.choice(self._orgs), chance.choice(self._namespaces))
            tokens = b""
        asked = maker.prompt(tokens[: len(tokens) // (4 * C) * 4 * C])
        asked.extend(self._more())
        return asked

    def _more(self) -> list[int]:
        chance = self._chance
        whole = [chance.randrange(self._kinds) for _ in range(chance.choice((0, 0, 1, 1, 2, 3)))]
        return [kind for kind in whole for _ in range(C)] + [1] * chance.choice((0, 0, 0, 1, 40, 63))

    def request(self) -> None:
        """What an engine does: load, compute the rest, store."""
        asked = self._asked()
        chance = self._chance
        rules = Rules(
            no_store=chance.random() < 0.03,
            store_tokens_max=C if chance.random() < 0.05 else None,
            tier2=Tier2Rule.NEVER if chance.random() < 0.05 else Tier2Rule.ALLOWED,
            ttl_seconds=chance.choice((None, None, None, None, 3, 10)),
            priority=chance.choice((None, None, None, 0, 100)),
            continue_id=chance.choice(("", "talk 1", "talk 2")),
        )

        def work() -> None:
            self._load(asked)
            if chance.random() < 0.1:
                asked.rewind(chance.randint(0, asked.tokens))
            if asked.tokens < 5 * C:
                asked.extend(self._more())
            self._store(asked, rules)
            self._talks.append((asked.maker, asked._raw(0, 4 * asked.tokens)))
            self._judge.forget(asked)

        self.start(work, "request")

    def load(self) -> None:
        asked = self._asked()

        def work() -> None:
            self._load(asked)
            self._judge.forget(asked)

        self.start(work, "load")

    def store_at_the_sibling(self) -> None:
        asked = self._asked()

        def work() -> None:
            self._world.sibling.store(asked)
            self._lent.append((asked.maker, asked._raw(0, 4 * asked.tokens)))
            self._judge.forget(asked)

        if self._judge.policy(asked.org).tiers is not Tiers.NONE:
            self.start(work, "a sibling's store")

    def borrow(self) -> None:
        """As when a brain asks for it: nobody waits."""
        driver, asked = self._driver, self._asked()
        if self._lent and self._chance.random() < 0.8:
            maker, tokens = self._chance.choice(self._lent)
            self._talks.append((maker, tokens))  # its request follows
            asked = maker.prompt(tokens)

        def work() -> None:
            driver.borrow(asked, self._world.sibling)  # type: ignore[arg-type]
            self._seen["columns were borrowed"] = driver.ledger.tier2.borrowed.columns

        self._turns.start(work, "borrow", self._world.process)

    def _load(self, asked: Prompt) -> int:
        got: dict[Place, bytearray] = {}

        def into(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            size = self._world.layout.groups[group].part_bytes(shard, tokens)
            place = got[group, shard, depth, tokens] = bytearray(size)
            self._turns.maybe_leave()
            return memoryview(place)

        seconds = self._chance.choice((0.0, 0.0, 0.5, 5.0))
        loaded = self._driver.load(asked, into, seconds=seconds)
        self._check_loaded(asked, loaded, 0, got)
        for _ in range(self._chance.randint(0, 2)):
            had = loaded.tokens
            got.clear()
            loaded = self._driver.load_more(loaded, into, seconds=seconds)
            self._check_loaded(asked, loaded, had, got)
            self._seen["more was loaded"] += loaded.tokens > had
        self._seen["load"] += 1
        self._seen["hit"] += loaded.tokens > 0
        self._seen["hit altogether"] += loaded.tokens == asked.tokens > 0
        return loaded.tokens

    def _check_loaded(
        self, asked: Prompt, loaded: Loaded, had: int, got: dict[Place, bytearray]
    ) -> None:
        """All that is needed behind the first so many tokens is there, and what it should be."""
        assert had <= loaded.tokens <= asked.tokens
        sight: Sight = self._judge.sight(asked)
        whole, rest = divmod(loaded.tokens, C)
        for group, of in enumerate(self._world.layout.groups):
            columns = [(depth, C) for depth in range(of.first_needed(loaded.tokens), whole)]
            columns += [(whole, rest)] if rest else []
            for depth, tokens in columns:
                if depth * C + tokens <= had:
                    continue
                for shard in range(of.shards):
                    place = (group, shard, depth, tokens)
                    assert place in got, "a part is missing"
                    self._judge.check_part(asked, place, bytes(got[place]), sight)
                    self._given.append((got[place], bytes(got[place])))

    def _store(self, asked: Prompt, rules: Rules) -> None:
        verified = asked.tokens
        if self._chance.random() < 0.25:
            verified = self._chance.randint(0, asked.tokens)
        written = self._judge.begins(asked, verified, rules)
        states = {end for end in range(C, verified, C) if self._chance.random() < 0.4}
        states |= {verified} if verified and self._chance.random() < 0.9 else set()
        fails = self._chance.choice((0.0, 0.0, 0.0, 0.02))
        lent: list[bytearray] = []

        def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            if self._chance.random() < fails:
                raise EngineFailed
            if self._world.layout.groups[group].is_state:
                assert depth * C + tokens in states, "the engine has no such state"
            content = bytearray(self._content(written, group, shard, depth, tokens))
            lent.append(content)
            self._turns.maybe_leave()
            return memoryview(content)

        try:
            stored = self._driver.store(asked, verified, read, rules, states=states)
            self._seen["stored"] += stored.columns
            self._seen["not stored"] += stored.failed
        except EngineFailed:
            self._seen["an engine failed"] += 1
        for content in lent:  # it is used for something else now
            content[:] = b"\xee" * len(content)

    def verb(self) -> None:
        driver, asked, chance = self._driver, self._asked(), self._chance

        def work() -> None:
            match chance.randrange(7):
                case 0:
                    driver.set_priority(asked, chance.choice((0, 35, 100)))
                case 1:
                    driver.set_ttl(asked, chance.choice((1, 5, 20)))
                case 2:
                    driver.set_displacement(
                        asked.org, chance.choice(("lru", "lfu", "slru", "s3fifo", "cost"))
                    )
                case 3:
                    assert driver.query(asked) <= asked.tokens
                case 4:
                    driver.explain(asked)
                case 5:
                    driver.prefetch(asked.org, chance.choice(("talk 1", "talk 2")))
                case 6:
                    driver.computed(asked.org, chance.randint(1, 500), chance.choice((0.0, 0.01, 5.0)))

        self.start(work, "verb")

    def delete(self) -> None:
        driver, asked, chance = self._driver, self._asked(), self._chance

        def work() -> None:
            is_shared = chance.random() < 0.6
            with self._world.sibling.removing(asked.org):
                receipt = driver.removals.delete(
                    asked, shared=is_shared, seconds=chance.choice((0, 5, 30))
                )
            self._seen["deleted columns"] += receipt.columns
            self._world.inspect()

        self.start(work, "delete")

    def purge(self) -> None:
        driver, chance = self._driver, self._chance
        org = chance.choice(self._orgs)
        namespace = chance.choice((None, None, NAMESPACE, OTHER))

        def work() -> None:
            tag = keys(org).tag
            with self._world.sibling.removing(org):
                driver.removals.purge(org, namespace, tag=tag, seconds=chance.choice((0, 5, 30, 100)))
            self._world.inspect()

        self.start(work, "purge")

    def set_policy(self) -> None:
        chance = self._chance
        seconds = (None, None, None, 2, 10, 60)
        policy = Policy(
            ttl_first_use_seconds=chance.choice(seconds),
            ttl_last_use_seconds=chance.choice(seconds),
            tiers=chance.choice((*Tiers, *[Tiers.TIER2] * 6)),
            dram_bytes_max=chance.choice((None, None, None, 0, 20 * 4096, 10 * 4096)),
            share=chance.randint(1, 3),
            priority=chance.choice((30, 35)),
            displacement=chance.choice(("default", "lru", "lfu", "slru", "s3fifo")),
            encrypt_tier2=chance.random() < 0.05,
            scrub=chance.random() < 0.4,
            redundant_from_priority=chance.choice((None, 0, 50, 50)),
        )
        self._world.policies = {
            **self._world.policies,
            chance.choice(self._orgs): OrgPolicies(policy=policy),
        }
        self.set_policies(self._world.policies)

    def set_policies(self, policies: Mapping[str, OrgPolicies]) -> None:
        driver = self._driver
        self.start(lambda: driver.set_policies(policies), "policies")

    def find_out(self) -> None:
        """Who sends something hears that a connection has broken."""
        kind = 10
        while any(group.slots < 12 for group in self._driver.statistics.groups()):
            kind += 1
            self._store_all(keys().prompt([kind] * C))
            self._turns.wait(None, 0.5)

    def show_life(self, driver: Driver) -> None:
        for _ in range(200):
            for org in ORGS:
                driver.computed(org, 100, 100.0)  # or else computing may be faster than fetching
        for org in ORGS:
            asked = keys(org).prompt([7] * (2 * C) + [8] * 5)
            for _ in range(20):  # some connections may not have been used since they broke
                if self._store_all(asked) and self._load(asked) == asked.tokens:
                    break
                self._turns.wait(None, 1.0)
            else:
                raise AssertionError("what was just stored is missed")
            self._judge.forget(asked)
        if self._world.can_be_redundant and not self._may_look_purged(driver):
            self._show_redundancy(driver)
        for org in ORGS:
            assert driver.removals.purge(org, tag=keys(org).tag, seconds=30).done
        self._world.inspect()
        assert not any(disk.contents for disk in self._world.disks)
        assert not any(pool.used for pool in driver.ledger.pools)

    def _may_look_purged(self, driver: Driver) -> bool:
        """Whether what is stored now may be taken for older than a purge when it comes back: tier 2
        keeps whole seconds of a calendar that somebody puts right."""
        account = driver.ledger.accounts.get(keys().org)
        purged_at = account.tier2_purges.of(NAMESPACE) if account else NEVER_YET
        return self._turns.now - purged_at <= self._turns.calendar_spread + 1

    def _show_redundancy(self, driver: Driver) -> None:
        """All agents lose their memory and their disks: what is redundant comes back."""
        for kind in range(20, 40):  # a copy that fails is not made again at once
            asked = keys().prompt([kind] * C + [6] * C)
            for _ in range(20):
                if self._load(asked) or self._store_all(asked):
                    self._turns.wait(None, 0.2)
                if self._is_redundant(asked):
                    break
            else:
                self._judge.forget(asked)
                continue
            break
        else:
            raise AssertionError("nothing is stored redundantly")
        for agent in self._world.agents:
            agent.crash()
            agent.disk.lose()
            if agent.front:
                agent.front.lose()
            agent.start()
        before = driver.ledger.tier2.recalled.columns
        for _ in range(60):
            if self._load(asked) == asked.tokens and driver.ledger.tier2.recalled.columns > before:
                break
            self._turns.wait(None, 0.5)
        else:
            raise AssertionError("what was redundant is lost")
        self._seen["redundant columns outlived all disks"] += 1
        self._judge.forget(asked)

    def _is_redundant(self, asked: Prompt) -> bool:
        """Whether all that a load of it needs lies where no agent's loss matters."""
        return all(
            Address(NAMESPACE.digest(), asked.maker.tag, asked.keys[depth], name_of((group, shard))).name
            in self._world.fragments.contents
            for group, of in enumerate(self._world.layout.groups)
            for depth in range(of.first_needed(asked.tokens), len(asked.keys))
            for shard in range(of.shards)
        )

    def _store_all(self, asked: Prompt) -> bool:
        written = self._judge.begins(asked, asked.tokens, Rules())

        def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            return memoryview(self._content(written, group, shard, depth, tokens))

        return not self._driver.store(asked, asked.tokens, read, states=[asked.tokens]).failed

    def _content(self, written: Written, group: int, shard: int, depth: int, tokens: int) -> bytes:
        size = self._world.layout.groups[group].part_bytes(shard, tokens)
        return written.content(group, shard, depth * C + tokens, size)
