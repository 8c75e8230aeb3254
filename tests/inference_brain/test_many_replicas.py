"""A router's decision among many replicas is the one that comes of a look at each, whatever has happened
to them: with and without drivers, ejected, draining, slow to start, and able to borrow."""

from __future__ import annotations

import random
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from inference_brain.admission import Followed
from inference_brain.api.requests import Completion
from inference_brain.asking import Asking, NoReplica
from inference_brain.choice import Asked, Candidate, Choice, Load, Outcome, Path, choose
from inference_brain.choice.candidates import IDLE
from inference_brain.choice.choice import MANY
from inference_brain.counts import Counts
from inference_brain.desired import Desired, DriverSpec, OrgSpec, ReplicaSpec, ServedModel
from inference_brain.maps import CacheMaps, GuessedMap
from inference_brain.prompts import Found
from inference_brain.recalls import TOKENS_MIN
from inference_brain.router import Router
from inference_brain.tokens.service import TokenService
from inference_brain.upstream.fleet import Fleet, Replica
from inference_brain.upstream.health import State
from kvss_agent.http.client.failures import Unreachable
from swdriver_shim.cache_map.codec import (
    IN_TIER2,
    NAME_BYTES,
    SPACE_BYTES,
    Message,
    Section,
    entry,
    pack_values,
)
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from tests.inference_brain.choice.worlds import looked_at
from tests.inference_brain.map_worlds import AHEAD, SECRET, model_of
from tests.swdriver_shim.prompts import FULL

MODEL = model_of(FULL)
ORG = OrgSpec("acme", SECRET)
MAKER = Keys("acme", SECRET, MODEL.namespace())
SPACE = MAKER.tag + MAKER.namespace.digest()[:SPACE_BYTES]
COLUMNS = 96


class NoPrompts:
    def follow(self, models: object) -> None:
        pass


class NoRecalls:
    """Nobody is asked to borrow, though they could be."""

    def borrow(self, *what: object) -> None:
        pass


class World:
    def __init__(self, seed: int, count: int) -> None:
        self.chance, self.now, self.sent = random.Random(seed), 100.0, 0
        chance = self.chance
        self.router = Router(
            Fleet(lambda: self.now),
            CacheMaps(lambda: self.now + AHEAD, rows_max=1 << 14),
            cast("Any", NoPrompts()),
            Counts(),
            clock=lambda: self.now,
            wall=lambda: self.now + AHEAD,
            rng=random.Random(seed),
        )
        self.router.recalls = cast("Any", NoRecalls())
        self.strange: dict[str, Load] = {}
        self.router.others = lambda key: self.strange.get(key[1], IDLE)
        self.prompts = [self.prompt(one) for one in range(4)]
        names = [f"r{number}" for number in chance.sample(range(1000), count)]
        drivers = {name: f"d{name}" for name in names if chance.random() < 0.8}
        self.specs = {name: ReplicaSpec(name, f"http://{name}") for name in names}
        for name, driver in drivers.items():
            others = [one for one in drivers.values() if one != driver]
            siblings = tuple(chance.sample(others, chance.choice([0, 0, 3])))
            spec = DriverSpec(driver, MODEL, siblings=siblings)
            self.specs[name] = msgspec.structs.replace(self.specs[name], driver=spec)
        self.sequences = dict.fromkeys(drivers.values(), 0)
        self.flying: list[tuple[str, Choice]] = []
        self.follow()

    def prompt(self, number: int) -> Prompt:
        return MAKER.prompt([7] * 16 * COLUMN_TOKENS + [number] * (COLUMNS - 16) * COLUMN_TOKENS)

    def asking(self) -> Asking:
        self.sent += 1
        prompt = self.chance.choice(self.prompts)
        asking = Asking(
            f"q{self.sent}",
            ORG,
            self.model,
            Completion(model="m", prompt="", max_tokens=8, n=self.chance.choice([1, 1, 2])),
            self.now,
            self.now + AHEAD,
            prompt_tokens=prompt.tokens,
            prompts={MODEL: prompt} if self.chance.random() < 0.9 else {},
            affinity=b"%d" % self.chance.randrange(5),
            guess=prompt if self.chance.random() < 0.9 else None,
        )
        if self.chance.random() < 0.1:
            name = self.chance.choice([*self.specs])
            asking.followed = Followed(name, self.chance.choice([512, 4096]))
        return asking

    # What happens

    def follow(self) -> None:
        """Some drain, some have no address, and some are not there."""
        chance = self.chance
        present = [spec for spec in self.specs.values() if chance.random() < 0.95]
        replicas = tuple(
            msgspec.structs.replace(
                spec,
                draining=chance.random() < 0.05,
                url="" if chance.random() < 0.05 else spec.url,
            )
            for spec in present
        )
        self.model = ServedModel("m", 1 << 20, replicas)
        self.router.follow(Desired(brain="b", generation=1, models=(self.model,), orgs=(ORG,)))

    def report(self) -> None:
        """A driver reports what it has of a prompt."""
        name = self.chance.choice([*self.sequences])
        mirror = self.router.maps.mirror(name)
        if mirror is None:
            return
        sequence = self.sequences[name] = self.sequences[name] + 1
        prompt = self.chance.choice(self.prompts)
        keys = prompt.keys[7 : self.chance.choice([16, 16, 16, COLUMNS]) : 8]
        kind = self.chance.choice([0, 0, IN_TIER2])
        expires_at = self.now + AHEAD + self.chance.choice([3, 600])
        values = pack_values([entry(expires_at, kind)] * len(keys), int(self.now + AHEAD))
        names = b"".join(key[:NAME_BYTES] for key in keys)
        serves = self.chance.random() < 0.9
        mirror.read(
            Message(
                *(1, name.encode().ljust(8), sequence, self.now + AHEAD, int(self.now + AHEAD)),
                *(serves, 0, 1),
                sections=(Section(SPACE, 0, names, values),),
                path=self.chance.choice(["", "rail", "spine"]),
            ).encode(),
            self.now,
        )

    def fail(self) -> None:
        fleet = self.router.fleet
        replica = self.chance.choice([*fleet])
        match self.chance.randrange(4):
            case 0:
                lost = Unreachable("It is away.")
                fleet.failed(replica, lost, "acme", is_proven=False)
            case 1:
                for _ in range(3):
                    fleet.failed(replica, None, "acme", is_proven=True)
            case 2:
                fleet.answered(replica)
            case 3:
                fleet.fell_silent(replica)

    def hear(self) -> None:
        """Other brains tell what they have sent, and engines what nobody has."""
        chance = self.chance

        def load() -> Load:
            return Load(chance.uniform(0, 1e5), 3, 2, chance.uniform(0, 1e8), chance.choice([0, 0, 2.0]))

        names = [*self.specs]
        loads = {("m", name): load() for name in names if chance.random() < 0.7}
        self.router.admission._exchange.elsewhere = loads | {("other", names[0]): load()}
        self.strange = {name: load() for name in names if chance.random() < 0.2}

    def land(self) -> None:
        """A request has its first token, and then its last."""
        if not self.flying:
            return
        request, choice = self.flying.pop(self.chance.randrange(len(self.flying)))
        flights, rates = self.router.flights["m"], self.router.rates["m"]
        flights.first_token(request, self.now)
        rates.observe(choice, Outcome(self.chance.uniform(0.05, 2.0), 512), self.now)
        if self.chance.random() < 0.7:
            flights.end(request)
        if self.chance.random() < 0.2:
            self.router.renew(("m", choice.replica))

    def decide(self) -> None:
        asking = self.asking()
        without = set(self.chance.sample([*self.specs], self.chance.choice([0, 0, 2])))
        state = self.router._rng.getstate()
        expected = self.looked_at(asking, without, state)
        if expected is None:
            with pytest.raises(NoReplica):
                self.router.choose(asking, without)
            return
        routed = self.router.choose(asking, without)
        assert routed.choice == expected
        assert routed.replica.name == expected.replica
        left_out = {one.name: one for one in self.router.fleet.of("m")}
        for one in self.usable(without):
            del left_out[one.name]
        assert routed.excluded == {
            name: "failed" if name in without else one.state(self.now) for name, one in left_out.items()
        }
        self.router.flights["m"].begin(asking.id, routed.choice, self.now)
        self.router.note_sent(asking, routed)
        routed.replica.in_progress += self.chance.random() < 0.3
        self.flying.append((asking.id, routed.choice))

    # The same, by a look at each replica

    def usable(self, without: set[str]) -> list[Replica]:
        present = [
            one
            for one in self.router.fleet.of("m")
            if one.name not in without and one.spec.url and not one.spec.draining
        ]
        ready = [one for one in present if one.health.has_room(one.in_progress, self.now)]
        return ready or [one for one in present if one.health.state(self.now) is not State.UNREACHABLE]

    def looked_at(self, asking: Asking, without: set[str], state: Any) -> Choice | None:
        replicas, router = self.usable(without), self.router
        if not replicas:
            return None
        rates = router.rates["m"]
        rates.settle(self.now)
        candidates = [self.candidate(asking, one) for one in replicas]
        is_plain = asking.request.answers == 1
        asked = Asked(asking.prompt_tokens, asking.affinity, "acme", 8, asking.id, is_plain)

        few = candidates
        if len(candidates) > MANY:
            few = looked_at(asked, candidates, rates.mode)
        rng = random.Random()
        rng.setstate(state)
        choice = choose(asked, few, self.now, rng, rates.mode)
        return replace(choice, candidates=len(candidates))

    def candidate(self, asking: Asking, replica: Replica) -> Candidate:
        router, name, spec, now = self.router, replica.name, replica.spec.driver, self.now
        tokens, tier2 = -1, 0
        lent, sibling = 0, ""
        mirror = router.maps.mirror(spec.name) if spec else None
        if spec and asking.prompts:
            [hit] = router.maps.hits([spec.name], asking.prompts, now + AHEAD)
            if hit:
                tokens, tier2, _ = hit
            lent, sibling = self.lent(asking, spec)
        is_guess = tokens < 0
        if is_guess:
            known = router._guessed.get(replica, GuessedMap())
            tokens = known.hit(asking.guess).tokens if asking.guess else 0
        load = router.flights["m"].load(name, now)
        load = load.plus(router.admission.elsewhere.get(("m", name), IDLE))
        if spec is None:
            load = load.plus(self.strange.get(name, IDLE))
        sent = 0
        for prompt in asking.prompts.values():
            sent = router._sent.hits(prompt.keys, now).get(f"m\0{name}", 0)
        followed = asking.followed
        same = followed.tokens if followed and followed.replica == name else 0
        found = max(tokens, sent, same)
        both = min(max(found, tokens + tier2), asking.prompt_tokens)
        in_memory = min(found, both)
        more = min(lent, asking.prompt_tokens) - in_memory
        if more < TOKENS_MIN or not (mirror and mirror.is_known and mirror.serves):
            more, sibling = 0, ""
        path = Path(mirror.path) if mirror and mirror.path else Path.LOCAL
        rates = router.rates["m"].of(name)
        return Candidate(name, rates, in_memory, both - in_memory, path, load, is_guess, more, sibling)

    def lent(self, asking: Asking, spec: DriverSpec) -> tuple[int, str]:
        best = 0, ""
        for sibling in spec.siblings:
            age = self.router.maps.age(sibling, self.now)
            if age is None or age > 15.0:
                continue
            [hit] = self.router.maps.hits([sibling], asking.prompts, self.now + AHEAD)
            if hit and hit.expires_at > self.now + AHEAD + 5.0 and hit.tokens > best[0]:
                best = hit.tokens, sibling
        return best


@pytest.mark.parametrize("seed", range(3))
def test_a_decision_with_new_replicas_is_that_with_replicas_that_were_there_before(seed: int) -> None:
    """Of all of them, none is taken for one that computes in no time."""
    decided = []
    for are_new in (True, False):
        world = World(seed, MANY + 40)
        for _ in range(40):
            world.report()
        world.hear()
        rates, usable = world.router.rates["m"], world.usable(set())
        assert len(rates) == 0
        if not are_new:
            for one in usable:
                rates.of(one.name)
        choice = world.router.choose(world.asking(), set()).choice
        decided.append((choice.why, [(one.name, one.seconds) for one in choice.estimates]))
        assert len(rates) == len(usable)
    assert decided[0] == decided[1]


@pytest.mark.parametrize("count", [MANY - 8, MANY + 40])
@pytest.mark.parametrize("seed", range(3))
def test_a_decision_is_that_of_a_look_at_each_replica(seed: int, count: int) -> None:
    world = World(seed, count)
    chance, decisions = world.chance, 0
    for _ in range(150):
        world.now += chance.choice([0.0, 0.01, 0.5])
        match chance.choices(
            ["decide", "report", "fail", "hear", "land", "follow"], [8, 8, 2, 1, 4, 0.2]
        )[0]:
            case "decide":
                world.decide()
                decisions += 1
            case "report":
                world.report()
            case "fail":
                world.fail()
            case "hear":
                world.hear()
            case "land":
                world.land()
            case "follow":
                world.follow()
    assert decisions > 30


class NoTokenizers:
    """Prompts come as tokens."""

    def follow(self, models: object) -> None:
        pass

    async def of(self, _org: str, _model: ServedModel, request: Completion) -> Found:
        tokens = TokenService().given(request.prompts[0])
        return Found(tokens, len(tokens), len(tokens))


async def test_a_prompt_has_keys_of_the_document_that_it_came_with() -> None:
    """Also of the one before, if it came just before a new one."""
    prompts = cast("Any", NoTokenizers())
    router = Router(Fleet(), CacheMaps(), prompts, Counts(), clock=lambda: 100.0)
    other = msgspec.structs.replace(MODEL, revision="2")
    driven = [
        ServedModel("m", 200_000, (ReplicaSpec("r", "http://r", driver=DriverSpec("d", spec)),))
        for spec in (MODEL, other)
    ]
    models = [*driven, ServedModel("m", 200_000, (ReplicaSpec("r", "http://r"),))]

    async def prepared(model: ServedModel) -> Asking:
        request = Completion(model="m", prompt=[7] * COLUMN_TOKENS)
        asking = Asking("q", ORG, model, request, 100.0, 100.0 + AHEAD)
        await router.prepare(asking)
        return asking

    for generation, model in enumerate(models, 1):
        router.follow(Desired(brain="b", generation=generation, models=(model,), orgs=(ORG,)))
        for came_with in (model, models[0], model):
            asking = await prepared(came_with)
            expected = [one.driver.model for one in came_with.replicas if one.driver]
            assert [*asking.prompts] == expected
            assert (asking.guess is None) is bool(expected)
