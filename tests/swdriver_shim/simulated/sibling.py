"""A driver of the same model, as far as others see it: shards at the agents with what its engine has
stored, and what it says of that, which need not be so."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvss_agent.client import Credentials, Lender, Lost, NotApplied, ShardClient
from kvss_agent.client.stream import StreamClient
from kvss_agent.shard.identity import ShardIdentity
from swdriver_shim.cache.request_log import HasKeys
from swdriver_shim.data_plane.siblings import Away, Loan
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.lending import LentColumn
from swdriver_shim.policy import NEVER, Rules
from tests.swdriver_shim.judge import Written
from tests.swdriver_shim.prompts import NAMESPACE
from tests.swdriver_shim.simulated.agent import DRIVER, OTHER_DRIVER, SECRET, Agent, Spec, To
from tests.swdriver_shim.simulated.network import STALL_SECONDS

if TYPE_CHECKING:
    from tests.swdriver_shim.simulated.world import At, World

SLOTS: Final = 12
C = COLUMN_TOKENS


class SimulatedSibling:
    """For `Sibling`, which asks over HTTP."""

    path = "leaf"

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance, self._turns = world.chance, world.turns
        self._homes: dict[At, Agent] = {}
        self._clients: dict[At, ShardClient] = {}
        # By group and key: the slot, and what is in it.
        self._has: dict[tuple[int, bytes], tuple[int, Written]] = {}
        self._next = 0
        self._eras: Counter[str] = Counter()  # by org: how often something was removed
        self._is_storing = False
        self._removals: Counter[str] = Counter()  # by org: so many are under way
        for at in world.places():
            agent = self._homes[at] = self._chance.choice(world.agents)
            agent.specs[name_of(at)] = self._spec(at)

    def _spec(self, at: At) -> Spec:
        size = self._world.layout.groups[at[0]].slot_bytes[at[1]]
        name = name_of(at)
        identity = ShardIdentity(name, size, OTHER_DRIVER, NAMESPACE.digest(), name)
        return Spec(identity, SLOTS, 0, readers=(DRIVER,))

    # Its engine

    def store(self, asked: Prompt) -> None:
        """In a thread of its own. What can't be stored is not."""
        if self._is_storing:
            return
        self._is_storing = True
        try:
            self._store(asked)
        except (Lost, NotApplied):
            clients = list(self._clients.values())
            self._clients.clear()
            for client in clients:
                client.close()
        finally:
            self._is_storing = False

    def _store(self, asked: Prompt) -> None:
        judge, world = self._world.judge, self._world
        whole = asked.tokens // C
        written = judge.begins(asked, whole * C, Rules())
        judge.moment += 1
        written.begun = judge.moment
        written.stored_at = self._turns.now
        era = self._eras[asked.org]
        last: dict[At, int] = {}
        stored: dict[tuple[int, bytes], int] = {}
        for depth, key in enumerate(asked.keys[:whole]):
            slot, self._next = self._next, (self._next + 1) % SLOTS
            for name in [name for name, (other, _) in self._has.items() if other == slot]:
                del self._has[name]
            for group, of in enumerate(world.layout.groups):
                for index in range(of.shards):
                    size = of.part_bytes(index, C)
                    content = written.content(group, index, (depth + 1) * C, size)
                    at = group, index
                    payload = memoryview(content)
                    last[at] = self._client(at).evict(slot, key, asked.maker.tag, C, payload)
                stored[group, key] = slot
        for at, number in last.items():
            self._client(at).wait_applied(number, 5.0)
        if self._removals[asked.org] or era != self._eras[asked.org]:
            return
        for name, slot in stored.items():
            self._has[name] = slot, written
            judge._used[name] = max(written.stored_at, judge._used.get(name, 0))

    def _client(self, at: At) -> ShardClient:
        if at not in self._clients:
            credentials = Credentials(OTHER_DRIVER, SECRET, stall_seconds=STALL_SECONDS)
            to = To(host="far", agent=self._homes[at])
            self._clients[at] = Far(to, name_of(at), credentials, self._world.mover, write=True)
        return self._clients[at]

    @contextlib.contextmanager
    def removing(self, org: str) -> Iterator[None]:
        """Something of an org is removed, here as there; here first."""
        self._eras[org] += 1
        self._removals[org] += 1
        self._has = {name: one for name, one in self._has.items() if one[1].org != org}
        try:
            yield
        finally:
            self._removals[org] -= 1

    # What others ask

    def ask(self, prompt: HasKeys, start: int, now: float) -> Loan:
        chance = self._chance
        if chance.random() < 0.1:
            raise Away("it does not answer")
        has, at = dict(self._has), self._turns.now
        groups: list[dict[int, LentColumn]] = []
        for group, of in enumerate(self._world.layout.groups):
            first = start if of.linked else of.first_needed((start + 1) * C)
            lent: dict[int, LentColumn] = {}
            for depth, key in enumerate(prompt.keys):
                found = has.get((group, key))
                if depth < first or found is None:
                    continue
                slot, written = found
                assert written.stored_at is not None
                age = max(0.0, at - written.stored_at)
                if chance.random() < 0.1:  # it is mistaken
                    slot = chance.randrange(SLOTS + 2)
                lent[depth] = LentColumn(depth, slot, age, age)
                # A TTL that the borrower's column had is not one of this.
                judge = self._world.judge
                judge._own.setdefault((group, key), [(0, 0)]).append((judge.moment, NEVER))
            groups.append(lent)
        self._turns.wait(None, chance.choice((0.0, 0.01, 0.5, 5.0)))
        self._world.seen["a sibling lent something"] += any(groups)
        return Loan(groups, now)

    def leave(self) -> None:
        """It is asked again at once."""

    def lent(self) -> None:
        """It is what it is for."""

    def seconds_for(self, _size: int) -> float:
        return self._chance.choice((0.05, 1.0, 20.0))

    def lender(self, group: str, index: int, seconds: float) -> Lender:
        at = next(
            (number, index) for number, of in enumerate(self._world.layout.groups) if of.name == group
        )
        return Lender(self._homes[at].name, name_of(at), seconds)


class Far(StreamClient):
    """Looked through in the same order each time."""

    def __hash__(self) -> int:
        return 0


def name_of(at: At) -> str:
    return f"sibling.{at[0]}.{at[1]}"
