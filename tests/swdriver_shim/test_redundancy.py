"""Which columns a driver wants redundant in tier 2, and how it asks agents for that."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent.data_plane.carrier import TierDone
from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.data_plane.wire import Tier, TierVerb
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.seal import Miss
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.spills import Spilled
from swdriver_shim.daemon.metrics import _tiers
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tiers
from telemetry.emit.exposition import Page
from telemetry.metrics import LabelLimits
from tests.kvss_agent.plane import running
from tests.live import wait_until
from tests.swdriver_shim.fleets import Fleet, driving, tokens
from tests.swdriver_shim.halves import halves
from tests.swdriver_shim.ledgers import conversation, ledger, store
from tests.swdriver_shim.prompts import prompt
from tests.swdriver_shim.tiers import SOON, tier_requests

C = COLUMN_TOKENS
PLAIN = Policy(tiers=Tiers.TIER2)
FROM_50 = Policy(tiers=Tiers.TIER2, redundant_from_priority=50)
ALL = Policy(tiers=Tiers.TIER2, redundant_from_priority=0)
IMPORTANT, MINOR = Rules(priority=50), Rules(priority=49)


def copied(made: Ledger) -> list[tuple[bool, bool]]:
    """Of all columns that are to be copied now, in order: redundant, again."""
    found = []
    while spill := made.tier2.begin_spill(1, 64):
        found += [(one.redundant, one.again) for one in spill.copies]
        made.tier2.finish_spill(spill, [True] * len(spill.copies))
    return found


def use(made: Ledger, asked: Prompt, now: float = 1) -> None:
    """Load it: what is used again is copied to tier 2 while it stays in memory."""
    made.release(made.match(asked, now))


@pytest.mark.parametrize(
    ("policy", "rules", "redundant"),
    [
        (PLAIN, Rules(priority=100), False),
        (FROM_50, Rules(), False),  # of priority 35
        (FROM_50, MINOR, False),
        (FROM_50, IMPORTANT, True),
        (ALL, Rules(priority=0), True),
        (Policy(tiers=Tiers.TIER2, redundant_from_priority=50, priority=50), Rules(), True),
        (Policy(tiers=Tiers.TIER2, redundant_from_priority=50, priority=50), MINOR, False),
        (Policy(tiers=Tiers.TIER2, redundant_from_priority=100), IMPORTANT, False),
    ],
)
def test_a_column_is_redundant_by_its_own_priority_and_the_policy(
    policy: Policy,
    rules: Rules,
    redundant: bool,  # noqa: FBT001
) -> None:
    made = ledger(acme=policy)
    asked = prompt(conversation(1))
    store(made, asked, 0, rules)
    use(made, asked)
    assert copied(made) == [(redundant, False)]
    assert made.tier2.spilled == Spilled(
        columns=1, redundant=redundant, bytes=made.layout.groups[0].column_bytes
    )


def test_what_is_copied_before_it_is_displaced_is_redundant_as_well() -> None:
    made = ledger(8, acme=FROM_50)
    for kind in range(8):
        store(made, prompt(conversation(kind + 1)), 0, IMPORTANT if kind % 2 else MINOR)
    copies = copied(made)
    assert copies
    assert not any(redundant for redundant, _ in copies), "those of lower priority go first"
    store(made, prompt(conversation(11, 12, 13, 14)), 0, IMPORTANT)
    assert (True, False) in copied(made)


def test_another_priority_or_policy_copies_nothing_again() -> None:
    made = ledger(acme=FROM_50)
    asked = prompt(conversation(1, 2))
    store(made, asked, 0, MINOR)
    use(made, asked)
    assert copied(made) == [(False, False)] * 2
    made.set_priority(asked, 100, 1)
    made.set_policies({"acme": OrgPolicies(policy=ALL)}, 1)
    use(made, asked, 2)
    assert copied(made) == []
    assert made.tier2.take_purge() is None, "what is in tier 2 stays as it is"
    made.set_priority(asked, 0, 3)
    more = prompt(conversation(1, 2, 3))
    store(made, more, 3)
    use(made, more, 4)
    assert copied(made) == [(True, False)], "only what is new"


def test_a_priority_that_is_set_before_the_copy_counts() -> None:
    made = ledger(acme=FROM_50)
    asked = prompt(conversation(1))
    store(made, asked)
    made.set_priority(asked, 50, 0)
    use(made, asked)
    assert copied(made) == [(True, False)]


def test_only_what_is_in_tier_2_counts() -> None:
    made = ledger(acme=ALL)
    asked = prompt(conversation(1, 2, 3))
    store(made, asked)
    use(made, asked)
    spill = made.tier2.begin_spill(1, 64)
    assert spill
    made.tier2.finish_spill(spill, [True, False])
    spilled = made.tier2.spilled
    assert (spilled.columns, spilled.redundant, spilled.not_spilled) == (1, 1, 2)


# What agents are asked


class Asked(TierRequests):
    """Notes what it is asked to copy: how, by key, and how often."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.spills: list[tuple[str, TierVerb, frozenset[bytes], bool]] = []

    def start(
        self, shard: HostedShard, asked: Tier, slots: tuple[int | Miss, ...], then: TierDone
    ) -> None:
        if asked.verb in (TierVerb.SPILL, TierVerb.SPILL_REDUNDANT):
            keys = frozenset(column.key for column in asked.columns)
            self.spills.append((shard.identity.name, asked.verb, keys, bool(asked.data_key)))
        super().start(shard, asked, slots, then)

    def of(self, shard: str, verb: TierVerb) -> set[bytes]:
        """The keys that it was to copy in this way."""
        return {
            key for name, how, keys, _ in self.spills for key in keys if (name, how) == (shard, verb)
        }


@contextlib.contextmanager
def asked_for(directory: Path) -> Iterator[Asked]:
    with tier_requests(directory / "files", Asked) as tier:
        assert isinstance(tier, Asked)
        yield tier


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Asked]:
    with asked_for(tmp_path) as made:
        yield made


@pytest.fixture
def fleet(tmp_path: Path, tier: Asked) -> Iterator[Fleet]:
    with running(tmp_path, tier_requests=tier) as plane:
        made = Fleet(plane)
        made.make(64)
        yield made


def test_agents_are_asked_for_redundancy_of_just_these_columns_and_they_come_back(
    fleet: Fleet, tier: Asked
) -> None:
    important, minor = prompt(tokens(1, 2)), prompt(tokens(3, 4, 5))
    with driving(fleet, acme=FROM_50) as engine:
        engine.store(important, IMPORTANT)
        engine.store(minor)
        for asked in (important, minor):
            assert engine.load(asked) == asked.tokens
        spilled = engine.driver.ledger.tier2.spilled
        # Of the window, of 100 tokens, a load needs the last two columns only.
        wait_until("they are copied", lambda: spilled.columns >= 2 + 3 + 2 + 2)
        for shard in ("0.0", "0.1"):
            assert tier.of(shard, TierVerb.SPILL_REDUNDANT) == set(important.keys)
            assert tier.of(shard, TierVerb.SPILL) == set(minor.keys)
        assert tier.of("1.0", TierVerb.SPILL_REDUNDANT) == set(important.keys)
        assert spilled.redundant == 2 + 2
        page = Page(LabelLimits())
        _tiers(engine.driver, page)
        assert 'swdriver_tier2_columns_total{what="redundant"} 4\n' in str(page)
        pools = engine.driver.ledger.pools
        for slots in (0, 64):  # all memory is taken away
            for shard_of_agent in fleet.plane.shards.values():
                shard_of_agent.resize(slots)
            wait_until("it follows", lambda: {pool.limit for pool in pools} == {slots})  # noqa: B023
        for asked in (important, minor):
            assert engine.load(asked, SOON) == asked.tokens


def test_one_batch_of_both_kinds_is_two_requests_and_encryption_is_kept(
    fleet: Fleet, tier: Asked
) -> None:
    encrypted = Policy(tiers=Tiers.TIER2, encrypt_tier2=True, redundant_from_priority=50)
    asked = [prompt(tokens(1)), prompt(tokens(2)), prompt(tokens(3), "globex")]
    asked.append(prompt(tokens(4), "globex"))
    with driving(fleet, acme=FROM_50, globex=encrypted) as engine:
        engine.driver.set_data_keys({"globex": b"k" * 32})
        for one, rules in zip(asked, [IMPORTANT, MINOR, IMPORTANT, MINOR], strict=True):
            engine.store(one, rules)
        made = engine.driver.ledger
        with engine.driver._lock:  # so that one batch has all of them
            for one in asked:
                use(made, one, made.accounts[one.org].ttl_since)
            spill = made.tier2.begin_spill(time.monotonic(), 64)
        assert spill
        assert len(spill.copies) == 8
        assert engine.driver._tier2._spilled(spill) == [True] * 8
        with engine.driver._lock:
            made.tier2.finish_spill(spill, [True] * 8)
        keys = [one.keys[0] for one in asked]
        expected = {
            (TierVerb.SPILL_REDUNDANT, frozenset(keys[:1]), False),
            (TierVerb.SPILL, frozenset(keys[1:2]), False),
            (TierVerb.SPILL_REDUNDANT, frozenset(keys[2:3]), True),
            (TierVerb.SPILL, frozenset(keys[3:]), True),
        }
        told = [told[1:] for told in tier.spills if told[0] == "0.0"]
        assert len(told) == len(expected)
        assert set(told) == expected


def test_a_worker_that_moves_the_bytes_hears_of_it_too(tmp_path: Path, tier: Asked) -> None:
    important, minor = prompt(tokens(1)), prompt(tokens(2))
    with halves(tmp_path, tier, acme=FROM_50) as made:
        for asked, priority in (important, 50), (minor, 49):
            assert made.store(asked) == 2
            assert made.driver.set_priority(asked, priority) == 2
            assert made.load(asked) == C
        spilled = made.driver.ledger.tier2.spilled
        wait_until("they are copied", lambda: spilled.columns >= 4)
        for shard in ("0.0", "0.1", "1.0"):
            assert tier.of(shard, TierVerb.SPILL_REDUNDANT) == set(important.keys)
            assert tier.of(shard, TierVerb.SPILL) == set(minor.keys)
