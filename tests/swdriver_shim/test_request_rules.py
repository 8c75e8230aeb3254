"""What a request's rules and its org's policy keep out of memory and out of tier 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.reasons import NoSpill, Reason
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tier2Rule, Tiers
from tests.kvss_agent.plane import running
from tests.live import wait_until
from tests.swdriver_shim.fleets import Engine, Fleet, driving, kv, tokens
from tests.swdriver_shim.ledgers import conversation, finish, ledger, missed, store
from tests.swdriver_shim.prompts import NAMESPACE, SECRET, keys, prompt
from tests.swdriver_shim.tiers import SOON, contents, tier_requests

C = COLUMN_TOKENS
KEPT = Policy(tiers=Tiers.TIER2)
ENCRYPTED = Policy(tiers=Tiers.TIER2, encrypt_tier2=True)
MEMORY_ONLY = Rules(tier2=Tier2Rule.NEVER)
ONLY_ENCRYPTED = Rules(tier2=Tier2Rule.ENCRYPTED)


@pytest.mark.parametrize(
    ("policy", "request_limit", "stored"),
    [
        (None, None, 3 * C + 9),
        (None, 2 * C, 2 * C),
        (2 * C, None, 2 * C),
        (C, 2 * C, C),
        (2 * C, C, C),
        (C - 1, None, 0),
        (None, 2 * C + 1, 2 * C),  # whole columns
        (5 * C, 0, 0),
    ],
)
def test_the_strictest_limit_says_how_much_of_a_prompt_is_stored(
    policy: int | None, request_limit: int | None, stored: int
) -> None:
    made = ledger(acme=Policy(store_tokens_max=policy))
    asked = prompt(conversation(1, 2, 3, rest=9))
    store(made, asked, 0, Rules(store_tokens_max=request_limit))
    assert made.query(asked, 0) == stored
    assert sum(one.state == "ready" for one in made.explain(asked, 0)["full"]) == -(-stored // C)
    why = missed(made, asked)
    assert why.get(Reason.PREFIX_ONLY, 0) == (0 if stored > 3 * C else 3 * C + 9 - stored)


def test_a_limit_counts_whole_units() -> None:
    made = ledger()
    asked = Keys("acme", SECRET, NAMESPACE, 2 * C).prompt(conversation(1, 2, 3, 4))
    store(made, asked, 0, Rules(store_tokens_max=3 * C))
    assert made.query(asked, 0) == 2 * C


def test_of_objects_nobody_knows_the_beginning_so_a_limit_stores_none() -> None:
    made = ledger(layout=Layout((Group("object", (64,), alone=True),)))
    named = keys().named([b"one", b"two"])
    assert store(made, named, 0, Rules(store_tokens_max=C)) == []
    assert len(store(made, named)) == 2
    made.set_policies({"acme": OrgPolicies(policy=Policy(store_tokens_max=C))}, 0)
    assert made.objects().query(named, 0) == [False, False]


def test_a_lower_limit_is_for_stored_columns_too_and_empties_their_slots() -> None:
    made = ledger(acme=KEPT)
    long, other = prompt(conversation(1, 2, 3, rest=5)), prompt(conversation(7, 8), "globex")
    store(made, long)
    store(made, other)
    policy = Policy(tiers=Tiers.TIER2, store_tokens_max=C)
    made.set_policies({"acme": OrgPolicies(policy=policy)}, 1)
    assert made.query(long, 1) == C, "at once"
    assert made.explain(long, 1)["full"][1].state == Reason.PREFIX_ONLY
    purge = made.tier2.take_purge()
    assert purge, "tier 2 does not know which columns are behind the limit"
    made.tier2.finish_purge(purge, is_done=True)
    while made.sweep(1):
        pass
    assert made.accounts["acme"].bytes == made.accounts["globex"].bytes // 2
    assert {clear.slot for clear in made.take_clears(64)} == {1, 2, 3}, "nothing is left of them"
    assert made.query(other, 1) == 2 * C
    assert missed(made, long) == {Reason.PREFIX_ONLY: 2 * C + 5}
    assert made.overstay.columns == 0, "nobody could have known before"


@pytest.mark.parametrize(
    ("policy", "rules", "why"),
    [
        (Policy(), Rules(), NoSpill.POLICY),
        (KEPT, Rules(), None),
        (KEPT, MEMORY_ONLY, NoSpill.REQUEST),
        (KEPT, ONLY_ENCRYPTED, NoSpill.NOT_ENCRYPTED),
        (ENCRYPTED, ONLY_ENCRYPTED, None),
        (ENCRYPTED, MEMORY_ONLY, NoSpill.REQUEST),
        (KEPT, Rules(ttl_seconds=60), NoSpill.OWN_TTL),
    ],
)
def test_explain_says_why_a_column_is_not_copied_and_it_is_not(
    policy: Policy, rules: Rules, why: NoSpill | None
) -> None:
    made = ledger(acme=policy)
    made.set_orgs_with_keys({"acme"})
    asked = prompt(conversation(1))
    store(made, asked, 0, rules)
    made.release(made.match(asked, 0))  # used: worth a copy
    assert made.explain(asked, 0)["full"][0].no_spill == why
    spill = made.tier2.begin_spill(0, 10)
    assert (spill is None) == (why is not None)


def test_what_is_encrypted_without_a_key_stays_in_memory_and_says_so() -> None:
    made = ledger(acme=ENCRYPTED)
    asked = prompt(conversation(1, rest=3))
    store(made, asked)
    first, tail = made.explain(asked, 0)["full"]
    assert first.no_spill is NoSpill.NO_DATA_KEY
    made.set_orgs_with_keys({"acme"})
    first, tail = made.explain(asked, 0)["full"]
    assert (first.no_spill, tail.no_spill) == (None, NoSpill.TAIL)


def test_columns_of_several_requests_may_do_what_any_of_them_allows() -> None:
    made = ledger(acme=KEPT)
    asked = prompt(conversation(1))
    for rules, why in [
        (MEMORY_ONLY, NoSpill.REQUEST),
        (ONLY_ENCRYPTED, NoSpill.NOT_ENCRYPTED),
        (MEMORY_ONLY, NoSpill.NOT_ENCRYPTED),
        (Rules(), None),
        (MEMORY_ONLY, None),
    ]:
        store(made, asked, 0, rules)
        assert made.explain(asked, 0)["full"][0].no_spill == why


def test_a_policy_that_stops_encrypting_copies_nothing_in_the_clear_that_must_not_be() -> None:
    made = ledger(acme=ENCRYPTED)
    made.set_orgs_with_keys({"acme"})
    asked = prompt(conversation(1))
    store(made, asked, 0, ONLY_ENCRYPTED)
    recall_all(made, asked)
    made.set_policies({"acme": OrgPolicies(policy=KEPT)}, 0)
    finish(made)
    assert made.query(asked, 0) == C
    assert made.explain(asked, 0)["full"][0].no_spill is NoSpill.NOT_ENCRYPTED


def recall_all(made: Ledger, asked: Prompt) -> None:
    """Copy the prompt to tier 2, take it out of memory, and recall it."""
    made.release(made.match(asked, 0))
    spill = made.tier2.begin_spill(0, 10)
    assert spill
    dates = spill.copies[0].dates
    made.tier2.finish_spill(spill, [True])
    made.set_slot_limit(0, 0)
    finish(made)
    made.set_slot_limit(0, 8)
    for recall in made.tier2.begin_recalls(asked, [range(len(asked.keys))], 0):
        assert made.tier2.start_recall(recall, 0)
        made.tier2.finish_recall(recall, 0, {column: dates for column, _ in recall.places})
    assert made.query(asked, 0) == asked.tokens


def test_the_next_driver_follows_the_rules_of_requests_of_before() -> None:
    made, after = ledger(acme=KEPT), ledger(acme=KEPT)
    asked = prompt(conversation(1))
    store(made, asked, 0, MEMORY_ONLY)
    after.restore(made.snapshot(0, 100), keys, 0, 100)
    assert after.explain(asked, 0)["full"][0].no_spill is NoSpill.REQUEST


# Bytes


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def fleet(tmp_path: Path, files: Path) -> Iterator[Fleet]:
    with tier_requests(files) as tier, running(tmp_path, tier_requests=tier) as plane:
        made = Fleet(plane)
        made.make(64)
        yield made


def columns_in(content: bytes, asked: Prompt) -> set[int]:
    """The columns of this prompt whose bytes, of the full group's first shard, are in here."""
    return {depth for depth in range(len(asked.keys)) if kv(asked, 0, 0, depth, C) in content}


def in_memory(fleet: Fleet, asked: Prompt) -> set[int]:
    arena = fleet.plane.shards["0.0"].arena
    return columns_in(b"".join(bytes(arena.slot(slot)) for slot in range(arena.slots)), asked)


def in_files(files: Path, asked: Prompt) -> set[int]:
    return columns_in(b"".join(contents(files)), asked)


def serve(engine: Engine, asked: Prompt, rules: Rules) -> None:
    engine.store(asked, rules)
    engine.load(asked)  # used again, so it is worth a copy


def test_the_bytes_are_where_rules_and_policy_allow_them_and_nowhere_else(
    fleet: Fleet, files: Path
) -> None:
    with driving(fleet, acme=KEPT, globex=ENCRYPTED, initech=KEPT) as engine:
        engine.driver.set_data_keys({"globex": b"k" * 32})
        asked = {
            "free": prompt(tokens(1, 2)),
            "nothing": prompt(tokens(3, 4)),
            "prefix": prompt(tokens(5, 6)),
            "memory": prompt(tokens(7, 8)),
            "encrypted, not": prompt(tokens(9, 10)),
            "brief": prompt(tokens(11, 12)),
            "encrypted": prompt(tokens(13, 14), "globex"),
        }
        serve(engine, asked["nothing"], Rules(no_store=True))
        serve(engine, asked["prefix"], Rules(store_tokens_max=C))
        serve(engine, asked["memory"], MEMORY_ONLY)
        serve(engine, asked["encrypted, not"], ONLY_ENCRYPTED)
        serve(engine, asked["brief"], Rules(ttl_seconds=60))
        serve(engine, asked["encrypted"], ONLY_ENCRYPTED)
        serve(engine, asked["free"], Rules())
        spilled = engine.driver.ledger.tier2.spilled
        wait_until("what may be copied is", lambda: spilled.columns >= 2 + 1 + 2)
        wait_until("its files are whole", lambda: in_files(files, asked["free"]) == {0, 1})
        expected_in_memory = {name: {0, 1} for name in asked} | {"nothing": set(), "prefix": {0}}
        assert {name: in_memory(fleet, one) for name, one in asked.items()} == expected_in_memory
        in_clear = {name: in_files(files, one) for name, one in asked.items()}
        assert in_clear == {**{name: set() for name in asked}, "free": {0, 1}, "prefix": {0}}
        assert engine.driver.ledger.tier2.begin_spill(0, 10) is None, "nor later"
        for slots in (0, 64):  # all memory is taken away
            for shard in fleet.plane.shards.values():
                shard.resize(slots)
            pools = engine.driver.ledger.pools
            wait_until("it follows", lambda: {pool.limit for pool in pools} == {slots})  # noqa: B023
        back = {name: engine.load(one, SOON) for name, one in asked.items()}
        assert back == {**dict.fromkeys(asked, 0), "free": 2 * C, "prefix": C, "encrypted": 2 * C}


def test_a_lower_limit_leaves_nothing_behind_it_in_files_and_memory(fleet: Fleet, files: Path) -> None:
    asked = prompt(tokens(1, 2, 3))
    with driving(fleet, acme=Policy(tiers=Tiers.TIER2, scrub=True)) as engine:
        serve(engine, asked, Rules())
        spilled = engine.driver.ledger.tier2.spilled
        wait_until("it is copied", lambda: spilled.columns >= 3)
        assert in_files(files, asked) == in_memory(fleet, asked) == {0, 1, 2}
        policy = Policy(tiers=Tiers.TIER2, scrub=True, store_tokens_max=C)
        engine.driver.set_policies({"acme": OrgPolicies(policy=policy)})
        assert engine.load(asked, SOON) == C
        wait_until("nothing else is in memory", lambda: in_memory(fleet, asked) == {0})
        wait_until("nor in files", lambda: in_files(files, asked) <= {0})
