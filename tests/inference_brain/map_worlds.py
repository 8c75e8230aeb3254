"""A ledger, what its driver reports of it, and a brain that reads that: no Redis, clocks or threads."""

from __future__ import annotations

from collections.abc import Sequence

from inference_brain.maps import CacheMaps, DriverPlace, Hit
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache_map.follower import Follower
from swdriver_shim.cache_map.messages import MessageLog
from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import AS_USUAL, OrgPolicies, Policy, Rules

AHEAD = 1_700_000_000.0  # of the ledger's clock, the wall clock
SECRET = bytes(range(32))


def model_of(layout: Layout, unit_tokens: int = COLUMN_TOKENS) -> ModelSpec:
    groups = tuple(GroupSpec.of(group) for group in layout.groups)
    return ModelSpec(name="llama", groups=groups, unit_tokens=unit_tokens)


def tokens_of(columns: Sequence[int], rest: int = 0) -> list[int]:
    """Columns of one number each, and a rest."""
    return [one for one in columns for _ in range(COLUMN_TOKENS)] + [99] * rest


class MapWorld:
    """`stream` is what a Redis would have; the brain has read it up to `position`."""

    def __init__(self, layout: Layout, slots: int = 1000, unit_tokens: int = COLUMN_TOKENS) -> None:
        self.layout = layout
        self.model = model_of(layout, unit_tokens)
        self.now = 1000.0
        self.stream: list[bytes] = []
        self.position = 0
        self.ledger = Ledger(layout, "llama", ghosts_min=25)
        for group in range(len(layout.groups)):
            self.ledger.set_slot_limit(group, slots)
        self.policies: dict[str, OrgPolicies] = {}
        self.restart_publisher()
        self.restart_brain()

    @property
    def wall(self) -> float:
        return self.now + AHEAD

    # The driver

    def prompt(self, tokens: Sequence[int], org: str = "acme") -> Prompt:
        namespace = self.model.namespace()
        return Keys(org, SECRET, namespace, self.model.unit_tokens).prompt(tokens)

    def store(self, prompt: Prompt, rules: Rules = AS_USUAL, states: Sequence[int] = ()) -> None:
        begun = self.ledger.begin_store(prompt, prompt.tokens, self.now, rules, (), states)
        self.ledger.finish_store(begun, self.now)

    def use(self, prompt: Prompt) -> None:
        self.ledger.release(self.ledger.match(prompt, self.now))

    def set_policy(self, policy: Policy, org: str = "acme") -> None:
        self.policies[org] = OrgPolicies(policy=policy)
        self.ledger.set_policies(self.policies, self.now)

    def sweep(self) -> None:
        while self.ledger.sweep(self.now):
            pass

    def restart_publisher(self) -> None:
        """As another life of the driver, which has the same columns."""
        ledger = self.ledger
        follower = Follower(self.layout, ledger.accounts, FairLock(), lambda: ledger.is_reachable)
        ledger.add_listener(follower)
        self.log = MessageLog(follower)

    def publish(self) -> None:
        written, had = self.log.write(self.now, self.wall), len(self.stream)
        self.stream += written.messages
        if written.snapshot_at is not None:
            cut = had + written.snapshot_at
            self.stream, self.position = self.stream[cut:], max(0, self.position - cut)

    # The brain

    def restart_brain(self) -> None:
        self.maps = CacheMaps(lambda: self.wall)
        self.maps.follow({"job": DriverPlace("driver:job", self.model)})
        self.position = 0

    def read(self) -> None:
        mirror = self.maps.mirror("job")
        assert mirror
        for _ in range(2):
            if mirror.wants_all:
                self.position = 0
                mirror.start_over()
            for raw in self.stream[self.position :]:
                mirror.read(raw, self.wall)
            self.position = len(self.stream)

    def catch_up(self) -> None:
        """The driver reports, and the brain reads, until both have the same."""
        self.now += 6.0  # long enough for a sign of life
        self.publish()
        self.read()
        if not self.is_known:  # a part of the stream was lost: the next snapshot mends it
            self.log.follower.wants_snapshot = True
            self.publish()
            self.read()
        assert self.is_known

    @property
    def is_known(self) -> bool:
        return self.maps.age("job", self.wall) is not None

    def hit(self, prompt: Prompt, after: float = 0.0) -> Hit:
        """By the brain, so many seconds from now."""
        [hit] = self.maps.hits(["job"], {self.model: prompt}, self.wall + after)
        assert hit
        return hit

    def truth(self, prompt: Prompt, after: float = 0.0) -> int:
        return self.ledger.query(prompt, self.now + after)
