"""A driver and two agents on a network that delays, cuts and repeats, all of it from one seed.

The cores, the frames, the reader of frames and the seals are the real ones; sockets, threads, clocks and
memory are not. An agent here does with the core's effects what `connection` does, a byte at a time.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from kvss_agent.data_plane import wire
from kvss_agent.data_plane.breach import Breach
from kvss_agent.mover import PYTHON
from kvss_agent.shard import seal
from kvss_agent.shard.core import (
    Clear,
    Effect,
    Fill,
    Publish,
    Receive,
    Reject,
    Request,
    Serve,
    Shard,
    Truncate,
    Verb,
)
from kvss_agent.shard.leases import FOREVER
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss
from tests.kvss_agent.integrity import check_integrity

SLOT = 160
LEASE_SECONDS = 3.0
TAG = b"an-org".ljust(16, b"\0")
PULLER = 0  # the number of the member that pulls


def payload_of(key: bytes) -> bytes:
    """Content-addressed: whoever knows the key knows what the bytes must be."""
    chance = random.Random(key)
    return chance.randbytes(chance.randint(1, SLOT - HEADER_BYTES))


@dataclass
class Link:
    """One connection, as the network has it: bytes on their way, first in, first out."""

    number: int
    agent: AgentSim
    to_agent: bytearray = field(default_factory=bytearray)
    to_driver: bytearray = field(default_factory=bytearray)
    at_agent: wire.FrameReader = field(default_factory=wire.FrameReader)
    at_driver: wire.FrameReader = field(default_factory=wire.FrameReader)
    run: wire.Evict | None = None  # accepted; its payloads are received once it is its turn
    receive: Receive | None = None
    received: int = 0
    cut: bool = False


class AgentSim:
    """An agent: its memory is gone when it crashes."""

    def __init__(self, name: str, slots: int, seen: Counter[str]) -> None:
        self.name = name
        self.seen = seen
        self.incarnation = 0
        self.now = 0.0
        self.links: dict[int, Link] = {}
        self.fresh(slots, 0)

    def fresh(self, slots: int, applied: int) -> None:
        self.incarnation += 1
        self.core = Shard(slots, applied)
        self.memory = [bytearray(SLOT) for _ in range(slots)]
        self.published = applied
        self.todo: list[tuple[Link | None, Serve | Clear | Fill]] = []  # begun, and not finished
        self.tier: dict[int, wire.Tier] = {}
        self.pulled: list[Fill | Reject] = []
        self.held: dict[int, tuple[float, list[tuple[int, bytes]]]] = {}  # by lease: what lay there

    def crash(self) -> None:
        for link in list(self.links.values()):
            self.cut(link)
        self.fresh(len(self.memory), 0)
        self.seen["crash"] += 1

    def cut(self, link: Link) -> None:
        """The connection is over: at once for the agent, for the driver when it looks."""
        if link.cut:
            return
        link.cut = True
        self.links.pop(link.number, None)
        received = link.received if link.receive else 0
        self.carry_out(self.core.abandon(link.number, received, self.now))
        for owner, effect in [one for one in self.todo if one[0] is link]:
            self.todo.remove((owner, effect))
            self.carry_out(self.core.done(effect.lease, self.now))

    # Bytes

    def feed(self, link: Link, count: int) -> None:
        """So many bytes arrive, or fewer if what they are for has to wait."""
        while count > 0 and link.to_agent and not link.cut:
            if link.run and not link.receive:
                return  # back-pressure: somebody reads the slot
            place = link.at_agent.want()
            size = min(count, len(place), len(link.to_agent))
            place[:size] = link.to_agent[:size]
            del link.to_agent[:size]
            count -= size
            try:
                found = link.at_agent.fed(size)
                if isinstance(found, wire.Filled):
                    self.filled(link, found)
                elif found is not None:
                    self.heard(link, found)
            except Breach as breach:
                self.seen[f"breach {breach.cause}"] += 1
                self.cut(link)

    def heard(self, link: Link, frame: wire.Frame) -> None:
        core, me, now = self.core, link.number, self.now
        match frame:
            case wire.Evict():
                frame.headers()
                link.run = frame
                self.carry_out(core.evict(me, frame.first, [slot for slot, _ in frame.columns], now))
            case wire.Refill(request, after, wait_ms, slots):
                wait = wait_ms / 1000
                asked = Request(Verb.REFILL, me, request, after, slots, wait, LEASE_SECONDS)
                self.carry_out(core.ask(asked, now))
            case wire.Delete(request, after, _, slots, scrub):
                asked = Request(Verb.DELETE, me, request, after, slots, 5, scrub=scrub)
                self.carry_out(core.ask(asked, now))
            case wire.Tier():
                self.tier[frame.request] = frame
                places = [column.slot for column in frame.columns]
                asked = Request(Verb.FILL, me, frame.request, frame.after, places, 5)
                self.carry_out(core.ask(asked, now))
            case _:
                raise AssertionError(f"a driver does not send {frame}")

    def filled(self, link: Link, found: wire.Filled) -> None:
        assert link.run
        assert link.receive
        slot = link.receive.slots[found.index]
        if slot is not None:
            self.memory[slot][:HEADER_BYTES] = link.run.columns[found.index][1]
        link.received = found.index + 1
        if found.last:
            count = link.run.first + link.received - 1
            link.run, link.receive, link.received = None, None, 0
            self.carry_out(self.core.received(link.number, self.now))
            link.to_driver += wire.Count(count).encode()

    # Effects

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(count):
                    assert count > self.published, "the count goes up only"
                    self.published = count
                case Truncate(slots):
                    del self.memory[slots:]
                case Receive():
                    self.begin(self.links[effect.owner], effect)
                case Reject() if effect.owner == PULLER:
                    self.pulled.append(effect)
                case Fill() if effect.owner == PULLER:
                    self.pulled.append(effect)
                case Reject():
                    self.tier.pop(effect.request, None)
                    frame = wire.Rejected(effect.request, effect.reason)
                    self.links[effect.owner].to_driver += frame.encode()
                case Serve() | Clear() | Fill():
                    self.todo.append((self.links[effect.owner], effect))
                    places = [slot for slot in effect.slots if isinstance(slot, int)]
                    forever = not isinstance(effect, Serve)
                    until = FOREVER if forever else self.now + LEASE_SECONDS
                    self.held[effect.lease] = until, [(n, bytes(self.memory[n])) for n in places]
        check_integrity(self.core)

    def begin(self, link: Link, receive: Receive) -> None:
        assert link.run
        link.receive = receive
        places = []
        for index, (slot, header) in enumerate(zip(receive.slots, link.run.headers(), strict=True)):
            if slot is None:
                places.append(memoryview(bytearray(header.length)))
                continue
            memory = memoryview(self.memory[slot])
            seal.open_slot(memory, receive.first + index)
            places.append(memory[HEADER_BYTES : HEADER_BYTES + header.length])
        link.at_agent.expect(places)

    def finish(self, index: int) -> None:
        """One of the things that were begun is done; however late that is."""
        link, effect = self.todo.pop(index)
        assert link
        until, before = self.held.pop(effect.lease)
        if self.now < until:
            for slot, raw in before:
                assert bytes(self.memory[slot]) == raw, "a slot changed while it was leased or claimed"
        match effect:
            case Serve():
                self.answer(link, effect)
            case Clear():
                for slot in effect.slots:
                    memory = memoryview(self.memory[slot])
                    seal.clear(memory, effect.up_to, effect.last, scrub=effect.scrub)
                link.to_driver += wire.Deleted(effect.request).encode()
            case Fill():
                self.recall(link, effect)
        self.carry_out(self.core.done(effect.lease, self.now))

    def answer(self, link: Link, serve: Serve) -> None:
        headers, payloads = [], b""
        for slot in serve.slots:
            if isinstance(slot, Miss) or slot >= len(self.memory):
                headers.append(seal.OPEN_HEADER if slot is Miss.TORN else seal.NO_HEADER)
                continue
            raw = bytes(self.memory[slot][:HEADER_BYTES])
            headers.append(raw)
            found = seal.read(raw)
            if isinstance(found, Header):
                payloads += self.memory[slot][HEADER_BYTES : HEADER_BYTES + found.length]
        link.to_driver += wire.Refilled(serve.request, tuple(headers)).encode() + payloads

    def recall(self, link: Link, fill: Fill) -> None:
        """From a tier 2 that has everything."""
        answers: list[wire.TierAnswer | Miss] = []
        for slot, column in zip(fill.slots, self.tier.pop(fill.request).columns, strict=True):
            if isinstance(slot, Miss):
                answers.append(slot)
            elif seal.is_newer(memoryview(self.memory[slot]), fill.up_to):
                answers.append(Miss.STALE)
            else:
                payload = memoryview(payload_of(column.key))
                memory = memoryview(self.memory[slot])
                seal.write(memory, Column(column.key, column.tag, fill.up_to), 64, payload)
                answers.append(wire.TierAnswer.DONE)
        link.to_driver += wire.Tiered(fill.request, tuple(answers)).encode()

    def resize(self, slots: int) -> None:
        while len(self.memory) < slots:
            self.memory.append(bytearray(SLOT))
        self.carry_out(self.core.resize(slots, self.now))


@dataclass
class Asked:
    """A request of the driver's, until its answer or the end of its connection."""

    link: Link
    slots: tuple[int, ...]
    columns: tuple[Column, ...]  # what a refill expects, or a recall brings
    verb: str
    after: int = 0


class Simulation:
    """The driver's side, the network, and everybody's misfortunes."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.slots = 4
        self.agents = [AgentSim("old", self.slots, self.seen), AgentSim("new", self.slots, self.seen)]
        self.home = 0
        self.number = 0
        self.keys = 0
        self.requests = 0
        self.evicts: Link | None = None
        self.queries: dict[int, Link] = {}
        self.asked: dict[int, Asked] = {}
        self.known: dict[tuple[int, int], Column] = {}  # (agent, slot): what the driver put there
        self.sent: dict[int, tuple[int, bytes]] = {}  # number: (slot, key), to be repeated
        self.met = [agent.incarnation for agent in self.agents]
        self.links = 0
        self.pull: tuple[Fill, list[bytes]] | None = None

    @property
    def agent(self) -> AgentSim:
        return self.agents[self.home]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to let go of."""

    def what_was_seen(self) -> Counter[str]:
        return self.seen

    # One step

    def step(self) -> None:
        choices = [
            (self.evict, 6),
            (self.refill, 6),
            (self.delete, 1),
            (self.recall, 2),
            (self.deliver, 30),
            (self.finish, 8),
            (self.pass_time, 4),
            (self.cut, 1),
            (self.crash, 0.15),
            (self.resize, 0.5),
            (self.move, 0.3),
            (self.pull_some, 2),
        ]
        acts, weights = zip(*choices, strict=True)
        self.chance.choices(acts, weights)[0]()

    def link_for_evicts(self) -> Link:
        if self.evicts is None or self.evicts.cut or self.evicts.agent is not self.agent:
            if self.evicts:
                self.evicts.agent.cut(self.evicts)
            self.evicts = self.connect(self.agent)
            self.meet(self.home)
            # WELCOME says how far the agent is: what was sent beyond has not happened.
            self.number = self.agent.core.applied
            for place, column in list(self.known.items()):
                if place[0] == self.home and column.sequence > self.number:
                    del self.known[place]
        return self.evicts

    def link_for_queries(self, home: int) -> Link:
        link = self.queries.get(home)
        if link is None or link.cut:
            self.queries[home] = link = self.connect(self.agents[home])
            self.meet(home)
        return link

    def connect(self, agent: AgentSim) -> Link:
        self.links += 1
        link = Link(self.links, agent)
        agent.links[link.number] = link
        return link

    def meet(self, home: int) -> None:
        """Another incarnation: its memory is new."""
        if self.met[home] != self.agents[home].incarnation:
            self.met[home] = self.agents[home].incarnation
            self.known = {place: known for place, known in self.known.items() if place[0] != home}

    def evict(self) -> None:
        link = self.link_for_evicts()
        if link.run and len(link.to_agent) > 4 * SLOT:
            return
        first = self.number + 1
        if self.chance.random() < 0.15 and self.number > self.agent.core.applied:
            first = self.chance.randint(self.agent.core.applied + 1, self.number)  # once more
            self.seen["repeated"] += 1
        columns, payloads = [], b""
        for sequence in range(first, max(self.number, first + self.chance.randint(0, 2)) + 1):
            if sequence <= self.number:
                slot, key = self.sent[sequence]
            else:
                slot, key = self.chance.randrange(self.slots + 1), self.new_key()
                self.sent[sequence] = slot, key
            payload = payload_of(key)
            column = Column(key, TAG, sequence)
            header = seal.pack(column, 64, len(payload), PYTHON.checksum(memoryview(payload)))
            columns.append((slot, header))
            payloads += payload
            self.known[self.home, slot] = column
            self.number = max(self.number, sequence)
        link.to_agent += wire.Evict(first, tuple(columns)).encode() + payloads
        self.seen["evict"] += len(columns)

    def new_key(self) -> bytes:
        self.keys += 1
        return self.keys.to_bytes(16, "big")

    def refill(self) -> None:
        places = [
            place for place in self.known if self.met[place[0]] == self.agents[place[0]].incarnation
        ]
        if not places:
            return
        home = self.chance.choice(places)[0]
        some = [place for place in places if place[0] == home][:3]
        columns = tuple(self.known[place] for place in some)
        slots = tuple(place[1] for place in some)
        after = max(column.sequence for column in columns)
        asked = Asked(self.link_for_queries(home), slots, columns, "refill", after)
        self.ask(asked, wire.Refill(self.next_request(), after, self.chance.choice([0, 2000]), slots))

    def delete(self) -> None:
        slots = (self.chance.randrange(self.slots),)
        asked = Asked(self.link_for_queries(self.home), slots, (), "delete", self.number)
        for slot in slots:
            self.known.pop((self.home, slot), None)
        self.ask(asked, wire.Delete(self.next_request(), self.number, 0, slots, scrub=True))

    def recall(self) -> None:
        """Bring a column from tier 2 into a slot that the driver holds free for it meanwhile."""
        slot, key = self.chance.randrange(self.slots), self.new_key()
        column = Column(key, TAG, self.number)
        asked = Asked(self.link_for_queries(self.home), (slot,), (column,), "recall", self.number)
        self.known.pop((self.home, slot), None)
        request = wire.Tier(
            self.next_request(),
            wire.TierVerb.RECALL,
            self.number,
            0,
            (wire.TierColumn(slot, key, TAG),),
        )
        self.ask(asked, request)

    def next_request(self) -> int:
        self.requests += 1
        return self.requests

    def ask(self, asked: Asked, frame: wire.Frame) -> None:
        self.asked[self.requests] = asked
        asked.link.to_agent += frame.encode()
        self.seen[asked.verb] += 1

    # The network

    def deliver(self) -> None:
        links = [link for agent in self.agents for link in agent.links.values()]
        if not links:
            return
        link = self.chance.choice(links)
        link.agent.feed(link, self.chance.choice([1, 7, 64, 1000]))
        self.listen(link, self.chance.choice([1, 7, 64, 1000]))

    def listen(self, link: Link, count: int) -> None:
        """The driver receives; payloads of a refill come right behind their frame."""
        while count > 0 and link.to_driver:
            place = link.at_driver.want()
            size = min(count, len(place), len(link.to_driver))
            place[:size] = link.to_driver[:size]
            del link.to_driver[:size]
            count -= size
            found = link.at_driver.fed(size)
            if isinstance(found, wire.Filled):
                if found.last:
                    self.check_refill(link)
            elif isinstance(found, wire.Refilled):
                self.pending = (found, [bytearray(length) for length in found.lengths()])
                wanted = [memoryview(one) for one in self.pending[1] if one]
                self.refilling = {**getattr(self, "refilling", {}), link.number: self.pending}
                if wanted:
                    link.at_driver.expect(wanted)
                else:
                    self.check_refill(link)
            elif found is not None:
                self.hear(link, found)

    def check_refill(self, link: Link) -> None:
        """Exactly the bytes that were expected, or a reason."""
        frame, payloads = self.refilling.pop(link.number)
        asked = self.asked.pop(frame.request)
        assert asked.link is link
        for raw, payload, column in zip(frame.headers, payloads, asked.columns, strict=True):
            found = seal.identify(raw, column)
            if isinstance(found, Header) and PYTHON.checksum(memoryview(payload)) != found.checksum:
                found = Miss.TORN
            if isinstance(found, Header):
                assert bytes(payload) == payload_of(column.key), "a wrong byte"
                self.seen["hit"] += 1
            else:
                self.seen[f"miss {found}"] += 1

    def hear(self, link: Link, frame: wire.Frame) -> None:
        match frame:
            case wire.Count(applied):
                assert applied <= self.number
            case wire.Rejected(request, reason):
                self.asked.pop(request)
                self.seen[f"miss {reason}"] += 1
            case wire.Deleted(request):
                self.asked.pop(request)
            case wire.Tiered(request, answers):
                asked = self.asked.pop(request)
                home = self.agents.index(link.agent)
                place = (home, asked.slots[0])
                if answers == (wire.TierAnswer.DONE,) and place not in self.known:
                    self.known[place] = asked.columns[0]
                    self.seen["recalled"] += 1
            case _:
                raise AssertionError(f"an agent does not send {frame}")

    # Misfortunes, and what takes time

    def finish(self) -> None:
        agent = self.chance.choice(self.agents)
        if agent.todo:
            agent.finish(self.chance.randrange(len(agent.todo)))

    def pass_time(self) -> None:
        seconds = self.chance.choice([0.1, 1.0, 4.0])
        for agent in self.agents:
            agent.now += seconds
            agent.carry_out(agent.core.tick(agent.now))

    def cut(self) -> None:
        links = [link for agent in self.agents for link in agent.links.values()]
        if links:
            link = self.chance.choice(links)
            link.agent.cut(link)
            self.forget(link)
            self.seen["cut"] += 1

    def crash(self) -> None:
        agent = self.chance.choice(self.agents)
        links = list(agent.links.values())
        agent.crash()
        for link in links:
            self.forget(link)
        if self.pull and self.agent is agent:
            self.pull = None

    def forget(self, link: Link) -> None:
        """Its requests end with it."""
        self.asked = {n: asked for n, asked in self.asked.items() if asked.link is not link}
        getattr(self, "refilling", {}).pop(link.number, None)

    def resize(self) -> None:
        self.agent.resize(self.chance.randint(1, 5))
        self.seen["resize"] += 1

    def move(self) -> None:
        """The other agent becomes the home; its numbers go on from here."""
        if self.pull or self.number != self.agent.core.applied:
            return
        target = 1 - self.home
        links = list(self.agents[target].links.values())
        for link in links:
            self.agents[target].cut(link)
            self.forget(link)
        self.agents[target].fresh(self.slots, self.number)
        self.home = target
        self.meet(target)
        self.seen["move"] += 1

    def pull_some(self) -> None:
        """The home fetches a slot that the other agent still has: two steps, with others between."""
        agent, source = self.agent, self.agents[1 - self.home]
        if self.pull:
            (fill, raws), self.pull = self.pull, None
            for slot, raw in zip(fill.slots, raws, strict=True):
                if isinstance(slot, Miss) or slot >= len(agent.memory):
                    continue
                found = seal.read(raw[:HEADER_BYTES])
                memory = memoryview(agent.memory[slot])
                if isinstance(found, Header) and not seal.is_newer(memory, 0):
                    payload = memoryview(raw)[HEADER_BYTES : HEADER_BYTES + found.length]
                    if PYTHON.checksum(payload) == found.checksum:
                        memory[:] = raw
                        self.moved(slot, found)
            agent.carry_out(agent.core.done(fill.lease, agent.now))
            return
        agent.pulled.clear()
        slot = self.chance.randrange(self.slots)
        agent.carry_out(agent.core.ask(Request(Verb.FILL, PULLER, 0, 0, [slot], 0), agent.now))
        agent.carry_out(agent.core.tick(agent.now))
        for effect in agent.pulled:
            if isinstance(effect, Fill):
                raw = bytes(source.memory[slot]) if slot < len(source.memory) else bytes(SLOT)
                self.pull = (effect, [raw])

    def moved(self, slot: int, found: Header) -> None:
        """The driver is told: it knew the column at the old home, and knows it here now."""
        before = self.known.get((1 - self.home, slot))
        if before == Column(found.key, found.tag, found.sequence):
            self.known.setdefault((self.home, slot), before)
            self.seen["pulled"] += 1

    # The end

    def come_to_rest(self) -> None:
        """The network is quiet and everybody finishes: then nothing waits and nothing is held."""
        if self.pull:
            self.pull_some()
        for _ in range(2000):
            for agent in self.agents:
                for link in list(agent.links.values()):
                    agent.feed(link, 10_000)
                    self.listen(link, 10_000)
                while agent.todo:
                    agent.finish(0)
                agent.now += 1.0
                agent.carry_out(agent.core.tick(agent.now))
            if self.is_quiet():
                break
        assert self.is_quiet(), f"{len(self.asked)} requests got no answer"
        for agent in self.agents:
            assert len(agent.core.leases) == 0
            assert agent.core.waiting == 0
            assert agent.published == agent.core.applied == agent.core.accepted

    def is_quiet(self) -> bool:
        links = [link for agent in self.agents for link in agent.links.values()]
        moving = any(link.to_agent or link.to_driver or link.run for link in links)
        return not moving and not self.asked
