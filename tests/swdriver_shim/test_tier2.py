"""The driver with a tier 2 behind its agents: real files, real sockets, and every byte checked."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from swdriver_shim.cache import promotion
from swdriver_shim.cache.reasons import TIER2, Reason
from swdriver_shim.cache.request_log import PromptKeys
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.driver import Part, ResumableLoad
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.policy import Policy, Rules, Tiers
from tests.kvss_agent.plane import running
from tests.live import wait_until
from tests.swdriver_shim.fleets import PULLED, Engine, Fleet, driving, kv, tokens
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import keys, prompt
from tests.swdriver_shim.shims import document
from tests.swdriver_shim.tiers import SOON, contents, kept, tier_requests

C = COLUMN_TOKENS
SHARDS, SLOTS = 3, 64
KEPT = Policy(tiers=Tiers.TIER2)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def fleet(tmp_path: Path, files: Path) -> Iterator[Fleet]:
    with tier_requests(files) as tier, running(tmp_path, tier_requests=tier) as plane:
        made = Fleet(plane)
        made.make(SLOTS)
        yield made


def is_kept(engine: Engine, files: Path, columns: int) -> None:
    """Wait until so many columns of the full group lie in tier 2."""
    wait_until(
        "tier 2 has them",
        lambda: sum(file.name.endswith(".0.0") for file in kept(files)) >= columns,
    )
    spilled = engine.driver.ledger.tier2.spilled
    wait_until("the driver knows", lambda: spilled.columns >= columns)


def is_evicted(engine: Engine, fleet: Fleet) -> None:
    """Take all memory away, and give it back."""
    pools = engine.driver.ledger.pools
    for slots in (0, SLOTS):
        for shard in fleet.plane.shards.values():
            shard.resize(slots)
        wait_until("the driver follows", lambda: {pool.limit for pool in pools} == {slots})  # noqa: B023
    assert not any(account.bytes for account in engine.driver.ledger.accounts.values())


def of(engine: Engine, org: str = "acme") -> tuple[int, Counter[Reason]]:
    """Tokens that came from tier 2, and those that were missed."""
    tally = engine.driver.ledger.tally(org)
    check_integrity(tally)
    return tally.hits[TIER2], +tally.missed


def store_and_keep(engine: Engine, files: Path, *kinds: int) -> None:
    asked = prompt(tokens(*kinds))
    engine.store(asked)
    assert engine.load(asked) == asked.tokens
    is_kept(engine, files, len(kinds))


def test_what_was_evicted_comes_back_and_is_in_memory_from_then_on(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2, 3)
        is_evicted(engine, fleet)
        asked = prompt(tokens(1, 2, 3, 4, rest=5))
        told = engine.driver.explain(asked)["full"]
        assert [(one.state, one.tier2) for one in told] == [
            *[(Reason.DISPLACED, True)] * 3,
            *[(Reason.NEVER_STORED, False)] * 2,
        ]
        assert engine.load(asked, SOON) == 3 * C
        assert of(engine) == (3 * C, Counter({Reason.NEVER_STORED: C + 5}))
        assert engine.load(asked) == 3 * C, "at once, from memory"
        assert of(engine)[0] == 3 * C
        assert engine.load(prompt(tokens(1, 2, 3), "globex"), SOON) == 0
        assert engine.load(prompt(tokens(1, 2, 3), "initech"), SOON) == 0


@pytest.mark.parametrize("order", [(1,), (1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_what_somebody_has_asked_for_out_of_order_is_loaded_to_its_place(
    fleet: Fleet, files: Path, order: tuple[int, ...], first: int
) -> None:
    """Brains ask by keys, which say nothing of their order. `first`: columns that are stored first."""
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2, 3)
        is_evicted(engine, fleet)
        asked, recalled = prompt(tokens(1, 2, 3)), engine.driver.ledger.tier2.recalled
        assert engine.driver.prefetch_ahead(PromptKeys(asked.maker, [asked.keys[at] for at in order]))
        wait_until("it is recalled", lambda: recalled.columns > 0)
        if first:
            engine.store(prompt(tokens(*range(1, first + 1))))
        wait_until("it is served whole", lambda: engine.load(asked, SOON) == 3 * C)
        engine.store(prompt(tokens(1, 2, 3, 4)))
        assert engine.load(prompt(tokens(1, 2, 3, 4))) == 4 * C
        check_integrity(engine.driver.ledger)
        assert engine.driver.removals.purge("acme", seconds=SOON).done
        assert not any(pool.used for pool in engine.driver.ledger.pools)


def test_what_is_expected_soon_is_in_memory_before_it_is_requested(
    fleet: Fleet, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "RATE_MIN", math.inf)
    with driving(fleet, acme=KEPT) as engine:
        engine.driver.set_promotion_budget(1 << 30)
        store_and_keep(engine, files, 1, 2, 3)
        is_evicted(engine, fleet)
        monkeypatch.setattr(promotion, "RATE_MIN", 0.0)
        asked, promoted = prompt(tokens(1, 2, 3)), engine.driver.ledger.tier2.promoted
        wait_until("it is promoted", lambda: promoted.columns > 0)
        assert engine.load(asked) == 3 * C
        assert of(engine) == (0, Counter()), "it was in memory when its request came"
        assert promoted.used == promoted.columns
        removal = engine.driver.removals.purge("acme", seconds=SOON)
        assert removal.done
        assert engine.load(asked, SOON) == 0
        check_integrity(engine.driver.ledger)


def test_an_engine_computes_while_more_is_on_its_way(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2, 3, 4)
        is_evicted(engine, fleet)
        engine.store(prompt(tokens(1)))
        asked = prompt(tokens(1, 2, 3, 4))
        first = engine.loaded(asked, lambda into: engine.driver.load(asked, into))
        assert first.tokens == C
        assert first.lookup
        assert first.pending == 3 * C
        assert first.lookup.wait(SOON)
        depths: list[int] = []

        def more(into: Part) -> ResumableLoad:
            def noted(group: int, shard: int, depth: int, tokens: int) -> memoryview:
                depths.append(depth)
                return into(group, shard, depth, tokens)

            return engine.driver.load_more(first, noted)

        again = engine.loaded(asked, more)
        assert (again.tokens, again.pending) == (4 * C, 0)
        assert set(depths) == {1, 2, 3}, "and not what was there before"
        assert of(engine) == (3 * C, Counter())


def test_what_comes_too_late_is_there_the_next_time(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2)
        is_evicted(engine, fleet)
        asked = prompt(tokens(1, 2))
        first = engine.loaded(asked, lambda into: engine.driver.load(asked, into))
        assert first.tokens == 0
        assert first.lookup
        assert first.lookup.wait(SOON)
        assert of(engine) == (0, Counter({Reason.TIER2_LATE: 2 * C}))
        assert engine.load(asked) == 2 * C


def test_a_driver_that_starts_anew_finds_what_is_in_tier_2(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2, 3)
    with driving(fleet, acme=KEPT) as engine:
        assert engine.load(prompt(tokens(1, 2, 3, 9)), SOON) == 3 * C


def test_nothing_expired_comes_back_from_tier_2_though_the_driver_is_new(
    fleet: Fleet, files: Path
) -> None:
    hour = replace_ttl(first=3600, last=None)
    with driving(fleet, acme=hour) as engine:
        store_and_keep(engine, files, 1, 2)
    with driving(fleet, acme=hour) as engine:
        engine.driver._tier2._calendar._wall_clock = lambda: time.time() + 3600
        assert engine.load(prompt(tokens(1, 2)), SOON) == 0
        assert of(engine) == (0, Counter({Reason.EXPIRED: 2 * C}))
        wait_until("what has expired is removed", lambda: not kept(files))


def replace_ttl(first: int | None, last: int | None) -> Policy:
    return Policy(tiers=Tiers.TIER2, ttl_first_use_seconds=first, ttl_last_use_seconds=last)


def test_a_purge_empties_tier_2_and_its_receipt_says_so(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT, globex=KEPT) as engine:
        store_and_keep(engine, files, 1, 2)
        other = prompt(tokens(5), "globex")
        engine.store(other)
        engine.load(other)
        wait_until("globex has files, too", lambda: len(kept(files)) == 3 * SHARDS)
        is_evicted(engine, fleet)
        receipt = engine.driver.removals.purge("acme")
        assert receipt.done
        assert (receipt.tier2_files, receipt.tier2_bytes > 0) == (2 * SHARDS, True)
        assert set(receipt.confirmed) == {"0.0", "0.1", "1.0"}
        assert len(kept(files)) == SHARDS
        assert engine.load(prompt(tokens(1, 2)), SOON) == 0
        assert engine.load(other, SOON) == C


def test_a_new_driver_purges_what_it_has_never_seen(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2)
    with driving(fleet, acme=KEPT) as engine:
        receipt = engine.driver.removals.purge("acme", tag=keys().tag)
        assert (receipt.done, receipt.columns, receipt.tier2_files) == (True, 0, 2 * SHARDS)
        assert not kept(files)


def test_a_delete_reaches_tier_2(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2)
        is_evicted(engine, fleet)
        receipt = engine.driver.removals.delete(prompt(tokens(1, 2)))
        assert receipt.done
        assert not kept(files)
        assert engine.load(prompt(tokens(1, 2)), SOON) == 0


def test_a_shorter_time_to_live_reaches_tier_2(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2)
        engine.driver.set_ttl(prompt(tokens(1, 2)), 1000)
        wait_until("no copy without it is left", lambda: not kept(files))
        assert engine.load(prompt(tokens(1, 2))) == 2 * C


def test_a_policy_without_tier_2_empties_it(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2)
        engine.driver.set_policies({})
        wait_until("it is empty", lambda: not kept(files))
        assert engine.load(prompt(tokens(1, 2))) == 2 * C, "memory is another matter"


@contextlib.contextmanager
def living(state_dir: Path, document: bytes) -> Iterator[Engine]:
    """A driver in an engine's process, whose document somebody has written."""
    state_dir.mkdir(exist_ok=True)
    (state_dir / "desired.json").write_bytes(document)
    shim = Shim("engine", state_dir)
    shim.start()
    try:
        yield Engine(shim.mover)
    finally:
        shim.stop()


@pytest.mark.parametrize("later", [Policy(), Policy(tiers=Tiers.TIER2, encrypt_tier2=True), None])
def test_a_document_that_was_changed_while_nobody_ran_reaches_tier_2(
    fleet: Fleet, files: Path, tmp_path: Path, later: Policy | None
) -> None:
    with living(
        tmp_path / "engine", document(fleet.plane.unix, {"acme": KEPT, "globex": KEPT})
    ) as engine:
        store_and_keep(engine, files, 1, 2)
        other = prompt(tokens(5), "globex")
        engine.store(other)
        engine.load(other)
        wait_until("globex has files, too", lambda: len(kept(files)) == 3 * SHARDS)
    orgs = {"globex": KEPT} if later is None else {"acme": later, "globex": KEPT}
    with living(tmp_path / "engine", document(fleet.plane.unix, orgs)) as engine:
        wait_until("what may not be there is gone", lambda: len(kept(files)) == SHARDS)
        assert engine.load(other) == C, "from memory"


def test_nothing_is_kept_in_the_clear_that_is_to_be_encrypted(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT, globex=KEPT) as engine:
        store_and_keep(engine, files, 1)
    assert kept(files)
    with driving(fleet, acme=Policy(tiers=Tiers.TIER2, encrypt_tier2=True)) as engine:
        assert engine.load(prompt(tokens(1)), SOON) == 0
        engine.store(prompt(tokens(2)))
        engine.load(prompt(tokens(2)))
        assert engine.driver.ledger.tier2.begin_spill(time.monotonic(), 10) is None


def test_what_is_encrypted_needs_its_key_and_a_line_nobody_listens_to(fleet: Fleet, files: Path) -> None:
    policy = Policy(tiers=Tiers.TIER2, encrypt_tier2=True)
    asked = prompt(tokens(1, 2))
    with driving(fleet, acme=policy) as engine:
        engine.driver.set_data_keys({"acme": b"k" * 32})
        store_and_keep(engine, files, 1, 2)
        plain = bytes(kv(asked, 0, 0, 0, C))
        assert not any(plain[:64] in content for content in contents(files))
        is_evicted(engine, fleet)
        assert engine.load(asked, SOON) == 2 * C
    with driving(fleet, acme=policy) as engine:
        assert engine.load(asked, SOON) == 0
    with driving(fleet, "tcp", acme=policy) as engine:
        engine.driver.set_data_keys({"acme": b"k" * 32})
        assert engine.load(asked, SOON) == 0, "its key does not go over a line without TLS"
    assert len(kept(files)) == 2 * SHARDS
    with driving(fleet, acme=policy) as engine:
        engine.driver.set_data_keys({"acme": b"another key, since it was destroyed"[:32]})
        assert engine.load(asked, SOON) == 0
        wait_until("what nobody can read is removed", lambda: not kept(files))


def test_a_damaged_file_is_a_miss_and_is_removed(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2)
        is_evicted(engine, fleet)
        for path in kept(files):
            raw = bytearray(path.read_bytes())
            raw[100] ^= 1
            path.write_bytes(raw)
        assert engine.load(prompt(tokens(1, 2)), SOON) == 0
        assert of(engine) == (0, Counter({Reason.SEAL_REFUSED: 2 * C}))
        wait_until("they are removed", lambda: not kept(files))


def test_what_an_agent_lost_is_restored_from_tier_2(fleet: Fleet, files: Path) -> None:
    with driving(fleet, "unix", acme=KEPT, initech=KEPT) as engine:
        store_and_keep(engine, files, 1, 2, 3)
        engine.store(prompt(tokens(7)))  # nobody asked for it: it is not copied
        fleet.end_one("0.1")
        assert engine.load(prompt(tokens(1, 2, 3))) == 0
        fleet.make_one("0.1", 32 * C, SLOTS, 0)
        recalled = engine.driver.ledger.tier2.recalled
        wait_until("its part is back", lambda: recalled.restored == 3)
        assert engine.load(prompt(tokens(1, 2, 3))) == 3 * C
        assert engine.load(prompt(tokens(7))) == 0


def test_an_agent_that_ends_is_noticed_before_anybody_asks(fleet: Fleet) -> None:
    with driving(fleet, acme=KEPT) as engine:
        shard = engine.driver._shards[0][1]
        fleet.end_one("0.1")
        wait_until("it is noticed", lambda: shard.slots is None)
        wait_until("and told", lambda: not engine.driver.ledger.is_reachable)


def test_a_shard_whose_agent_is_gone_goes_on_elsewhere(fleet: Fleet, files: Path) -> None:
    with driving(fleet, "unix", acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2, 3)
        shard = engine.driver._shards[0][1]
        fleet.end_one("0.1")
        assert engine.load(prompt(tokens(1, 2, 3))) == 0
        assert shard.slots is None
        fleet.make_one("0.1 elsewhere", 32 * C, 64, shard.count_from())
        assert shard.move(fleet.connect("0.1 elsewhere", "unix"), lambda *_: PULLED)
        wait_until("its part is back", lambda: engine.driver.ledger.tier2.recalled.restored == 3)
        assert engine.load(prompt(tokens(1, 2, 3))) == 3 * C


def test_a_conversation_that_is_about_to_go_on_is_brought_ahead(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        engine.store(prompt(tokens(1, 2, 3)), Rules(continue_id="chat-7"))
        engine.load(prompt(tokens(1, 2, 3)))
        is_kept(engine, files, 3)
        is_evicted(engine, fleet)
        assert not engine.driver.prefetch("acme", "chat-8")
        assert not engine.driver.prefetch("globex", "chat-7")
        assert engine.driver.prefetch("acme", "chat-7")
        wait_until("it is here", lambda: engine.driver.query(prompt(tokens(1, 2, 3))) == 3 * C)


def test_of_a_prompt_that_begins_as_others_did_the_rest_is_brought_ahead(
    fleet: Fleet, files: Path
) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1)
        store_and_keep(engine, files, 1, 2, 3)
        is_evicted(engine, fleet)
        driver, whole = engine.driver, prompt(tokens(1, 2, 3))
        assert not driver.prefetch_begun(whole), "nothing of it is in memory"
        assert driver.prefetch_prompt(prompt(tokens(1)))
        wait_until("it begins here", lambda: driver.query(whole) == C)
        assert not driver.prefetch_begun(prompt(tokens(1))), "nothing is missing"
        assert driver.prefetch_begun(whole)
        wait_until("it is here", lambda: driver.query(whole) == 3 * C)
        assert not driver.prefetch_begun(whole)


def test_trails_of_conversations_outlive_the_driver(fleet: Fleet, files: Path, tmp_path: Path) -> None:
    asked, state = prompt(tokens(1, 2, 3)), tmp_path / "engine"
    with living(state, document(fleet.plane.unix, {"acme": KEPT, "globex": KEPT})) as engine:
        engine.store(asked, Rules(continue_id="chat-7"))
        engine.store(prompt(tokens(5), "globex"), Rules(continue_id="chat-9"))
        engine.load(asked)
        is_kept(engine, files, 3)
    with living(state, document(fleet.plane.unix, {"acme": KEPT})) as engine:
        is_evicted(engine, fleet)
        assert not engine.driver.prefetch("globex", "chat-9"), "which is not served any more"
        assert engine.driver.prefetch("acme", "chat-7")
        wait_until("it is here", lambda: engine.driver.query(asked) == 3 * C)


def test_what_is_slower_than_computing_is_not_fetched(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2)
        asked = prompt(tokens(1, 2))
        for _ in range(10):
            engine.driver.computed("acme", 1000, 1e-9)
            engine.load(asked)
        _, missed = of(engine)
        assert missed[Reason.NOT_WORTH_IT] > 0
        assert engine.driver.statistics.break_even()["acme"].dram_tokens_min is None
        for _ in range(200):
            engine.driver.computed("acme", 1000, 1000.0)
        tokens_min = engine.driver.statistics.break_even()["acme"].dram_tokens_min
        assert tokens_min is not None
        assert tokens_min <= 1
        assert engine.load(asked) == 2 * C


def test_a_prompt_may_go_on_while_tier_2_is_asked(
    fleet: Fleet, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driving(fleet, acme=KEPT) as engine:
        store_and_keep(engine, files, 1, 2)
        is_evicted(engine, fleet)
        carrier, go_on = engine.driver._tier2, threading.Event()
        ask = carrier._ask
        monkeypatch.setattr(carrier, "_ask", lambda *what: (go_on.wait(), ask(*what))[1])
        asked = prompt(tokens(1, 2))
        first = engine.loaded(asked, lambda into: engine.driver.load(asked, into))
        asked.extend(tokens(7, 8))
        go_on.set()
        assert first.lookup
        assert first.lookup.wait(SOON)
        assert of(engine) == (0, Counter({Reason.TIER2_LATE: 2 * C}))


def test_a_new_driver_purges_what_lay_in_memory_before_it(fleet: Fleet) -> None:
    with driving(fleet) as engine:
        engine.store(prompt(tokens(1, 2)))
    with driving(fleet) as engine:
        assert engine.driver.removals.purge("acme", tag=keys().tag).done
        assert not any(shard.occupied() for shard in fleet.plane.shards.values())


@pytest.mark.slow
def test_what_room_is_made_of_is_copied_before(fleet: Fleet, files: Path) -> None:
    with driving(fleet, acme=KEPT) as engine:
        prompts = [prompt(tokens(kind, kind + 1)) for kind in range(100, 200, 2)]
        pools, carrier = engine.driver.ledger.pools, engine.driver._tier2

        def settle() -> None:
            wait_until("there is room ahead", lambda: all(pool.free >= 2 for pool in pools))
            wait_until("nothing is between memory and disk", lambda: not carrier._spilling)

        for asked in prompts:
            engine.store(asked)
            settle()
        spilled = engine.driver.ledger.tier2.spilled
        assert spilled.columns > 0
        assert (spilled.no_time, spilled.not_spilled) == (0, 0)
        for asked in prompts:
            assert engine.load(asked, SOON) == 2 * C, engine.driver.explain(asked)
            settle()
        assert spilled.no_time == 0


def test_without_a_tier_2_nobody_waits_for_it(tmp_path: Path) -> None:
    with running(tmp_path) as plane:
        fleet = Fleet(plane)
        fleet.make()
        with driving(fleet, acme=KEPT) as engine:
            assert engine.load(prompt(tokens(1, 2)), SOON) == 0
            engine.store(prompt(tokens(1)))
            assert engine.load(prompt(tokens(1))) == C
            assert engine.driver.removals.purge("acme").done
