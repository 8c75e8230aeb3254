"""What a driver writes down of its traffic, and what other policies are said to make of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, takewhile

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.reasons import Tally
from swdriver_shim.cache.reuse import sample as sampling
from swdriver_shim.cache.reuse.miniature import Miniature
from swdriver_shim.cache.reuse.preview import Preview, Traffic, preview
from swdriver_shim.cache.reuse.sample import (
    ALL_KEYS,
    Event,
    Kind,
    Recorder,
    Reference,
    Sample,
    Share,
    fewer,
    read,
    thinned,
)
from swdriver_shim.daemon.verbs import TOKENS_MAX
from swdriver_shim.keys import COLUMN_TOKENS, Namespace, Prompt
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import DisplacementName, OrgPolicies, Policy, Rules, Tiers
from swdriver_shim.replay.emulator import run_housekeeping
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import FULL, NAMESPACE, keys, prompt

C = COLUMN_TOKENS
FOREVER = Policy(ttl_last_use_seconds=None)
COLUMN_BYTES = FULL.groups[0].column_bytes


def driver(policy: Policy = FOREVER, slots: int = 1 << 20, layout: Layout = FULL) -> Ledger:
    ledger = Ledger(layout)
    for group in range(len(layout.groups)):
        ledger.set_slot_limit(group, slots)
    ledger.set_policies({"acme": OrgPolicies(policy=policy)}, 0)
    return ledger


def ask(ledger: Ledger, what: Prompt, now: float) -> int:
    """As an engine does: load what is there, store all. How many tokens were hit."""
    run_housekeeping(ledger, now)
    match = ledger.match(what, now)
    ledger.release(match)
    ledger.finish_store(ledger.begin_store(what, what.tokens, now), now)
    return match.tokens


def sample_of(ledger: Ledger, now: float = 0.0) -> Sample:
    found = ledger.reuse("acme", now)
    assert found is not None
    return found


def foretold(samples: Sequence[Sample], now: Policy, proposed: Policy) -> Preview:
    return preview([Traffic.of(sample) for sample in samples], now, proposed)


def path(*blocks: int) -> Prompt:
    """Each number is a column."""
    return prompt([block for block in blocks for _ in range(C)])


def zipf(requests: int, documents: int, columns: int, seed: int) -> list[Prompt]:
    """Prompts of some columns each; a few documents are asked for much more often than others."""
    chance = random.Random(seed)
    weights = list(accumulate(1 / (rank + 1) for rank in range(documents)))
    made = [
        path(*[document * columns + place for place in range(columns)]) for document in range(documents)
    ]
    return chance.choices(made, cum_weights=weights, k=requests)


# The log


@pytest.mark.slow
def test_the_log_keeps_its_bound_and_the_sample_becomes_smaller_evenly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "LOG_BYTES_MAX", 64 << 10)
    ledger = driver(slots=1000)
    chance = random.Random(3)
    recorder = ledger._stock.account("acme").recorder
    for number in range(1500):
        ask(ledger, path(*[chance.randrange(1 << 30) for _ in range(40)]), number * 0.1)
        assert recorder.bytes == len(recorder.log) < (64 << 10) + 3 * sampling.CHUNK_BYTES
    made = sample_of(ledger)
    assert made.complete
    assert made.share.of_all < 0.1
    found = {reference.key for event in made.events() for reference in event.path if not reference.tail}
    assert len(found) / (1500 * 40) == pytest.approx(made.share.of_all, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_prompts_of_any_length_do_not_fill_the_log_beyond_its_bound(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(sampling, "LOG_BYTES_MAX", 64 << 10)
    monkeypatch.setattr(sampling, "EVENT_REFERENCES_MAX", 256)
    recorder, tally, chance, now = Recorder(), Tally(), random.Random(seed), 0.0
    for columns in (3, *chance.choices([1, 3, 40, 250, 2_000], k=5), 3):
        for _ in range(chance.randrange(300_000 // (columns + 100))):
            now += chance.choice([0.0, 2.0, 60.0])
            random_bytes = chance.randbytes(16 * columns)
            keys_of_it = [random_bytes[place : place + 16] for place in range(0, 16 * columns, 16)]
            recorder.matched(keys_of_it, 0, tally, now)
            assert recorder.bytes < 1.3 * (64 << 10)
        assert recorder.bytes == len(recorder.log)
        assert list(read(recorder.log))


@pytest.mark.slow
def test_the_longest_prompt_there_may_be_is_recorded() -> None:
    ledger, longest = driver(slots=100), prompt([7] * TOKENS_MAX)
    for now in range(3):
        ask(ledger, longest, now)
    ask(ledger, path(1, 2, 3), 4)
    made = sample_of(ledger, 5)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Sample) == made
    first = made.events()[0]
    assert first.length == TOKENS_MAX // C
    assert len(first.path) <= sampling.EVENT_REFERENCES_MAX
    assert all(
        event.path[0].depth == made.share.offset for event in made.events() if len(event.path) > 3
    )


def test_the_oldest_is_forgotten_once_the_log_reaches_back_far_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "LOG_BYTES_MAX", 64 << 10)
    ledger = driver(slots=1000)
    for number in range(2000):
        ask(ledger, path(*range(number, number + 8)), number * 60.0)
    recorder = ledger._stock.account("acme").recorder
    assert recorder._size <= recorder.bytes, "what has been dropped fills nothing"
    made = sample_of(ledger, 2000 * 60.0)
    assert not made.complete
    assert made.events()[0].at > 0
    told = foretold([made], FOREVER, FOREVER)
    assert told.confidence is not None
    assert told.confidence.reaches_back_seconds >= sampling.SPAN_S
    assert told.now.hit_rate == pytest.approx(0.0, abs=0.01)  # each begins with something new


def test_a_thinned_log_is_that_of_the_smaller_sample() -> None:
    ledger = driver()
    for now, asked in enumerate(zipf(300, 50, 20, seed=5)):
        ask(ledger, asked, now)
    log = sample_of(ledger).log
    half, eighth = Share(1, ALL_KEYS // 2), Share(4, ALL_KEYS // 2)
    assert thinned(thinned(log, half), eighth) == thinned(log, eighth)
    small = list(read(thinned(log, eighth)))
    assert {reference.depth % 4 for event in small for reference in event.path} == {1}
    matched = [event.path for event in read(log) if event.kind is Kind.MATCH]
    kept = [[one for one in path if one.depth % 4 == 1 and one.key < half.limit] for path in matched]
    assert [event.path for event in small if event.kind is Kind.MATCH] == [one for one in kept if one]


def test_strides_of_larger_samples_hold_those_of_smaller_ones() -> None:
    for bits in range(8):
        larger, smaller = Share(1 << bits), Share(2 << bits)
        assert smaller.offset % larger.stride == larger.offset


@pytest.mark.parametrize("share", [Share(), Share(4), Share(1, ALL_KEYS // 8), Share(2, ALL_KEYS // 4)])
def test_a_column_of_the_sample_has_its_key_and_its_depth(share: Share) -> None:
    recorder, tally, its = Recorder(), Tally(), path(*range(300))
    recorder._take(share)
    expected = [
        (key[:8], depth)
        for depth, key in enumerate(its.keys)
        if depth % share.stride == share.offset and key < share.limit
    ]
    recorder.matched(its.keys[:100], 0, tally, 1)
    recorder.stored(its, its.tokens, 2)
    match, more = read(recorder.log)
    assert [match.kind, more.kind] == [Kind.MATCH, Kind.MORE]
    assert match.path
    assert [one[:2] for one in match.path] == [one for one in expected if one[1] < 100]
    assert [one[:2] for one in more.path] == [one for one in expected if one[1] >= 100]


@pytest.mark.parametrize(("seconds", "is_smaller"), [(1, True), (100, False)])
def test_a_log_that_fills_fast_becomes_smaller_early(seconds: int, *, is_smaller: bool) -> None:
    """However long the driver has been there."""
    recorder, tally, its = Recorder(), Tally(), path(*range(500))
    for number in range(20):
        recorder.matched(its.keys, 0, tally, 1e6 + seconds * number)
    assert (recorder.share != Share()) is is_smaller


def test_what_was_recorded_with_a_larger_share_is_thinned_out_once_the_log_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "LOG_BYTES_MAX", 64 << 10)
    recorder, tally, chance = Recorder(), Tally(), random.Random(5)

    def ask(now: float) -> None:
        random_bytes = chance.randbytes(16 * 100)
        keys = [random_bytes[place : place + 16] for place in range(0, 16 * 100, 16)]
        recorder.matched(keys, 0, tally, now)

    numbers = iter(range(20_000))
    while recorder.bytes < (64 << 10):
        ask(next(numbers) / 10)
    assert 1 / 4096 <= recorder.share.of_all <= 1 / 16
    assert len(next(read(recorder.log)).path) == 100, "nothing of the first prompt is gone"
    for number in takewhile(lambda _: recorder._unthinned, numbers):
        ask(number / 10)
    assert recorder._size == recorder.bytes < (32 << 10)
    events = list(read(recorder.log))
    assert events == fewer(events, recorder.share)
    assert events[0].at < 10


def test_of_long_prompts_that_are_only_stored_few_columns_are_checked() -> None:
    recorder, its = Recorder(), path(*range(500))
    for now in range(20):
        recorder.stored(its, its.tokens, now)
    assert recorder.share.stride > 1
    assert recorder.share.threshold == ALL_KEYS


def test_what_is_no_log_is_refused() -> None:
    ledger = driver()
    ask(ledger, path(1, 2, 3), 0)
    log = sample_of(ledger).log
    for wrong in (log[:-1], b"\x09" + log[1:], log[:3]):
        with pytest.raises(ValueError, match="log of reuse"):
            list(read(wrong))


def test_clocks_that_step_back_do_no_harm() -> None:
    ledger = driver()
    for now in (100.0, 101.0, 50.0, 51.0, 3.0, 102.0):
        ask(ledger, path(1, 2, 3), now)
    times = [event.at for event in sample_of(ledger).events()]
    assert times == sorted(times)
    told = foretold([sample_of(ledger, 102.0)], FOREVER, Policy(ttl_last_use_seconds=60))
    assert told.proposed.hit_rate == pytest.approx(5 / 6)


def test_what_is_written_down_does_not_depend_on_the_policy_in_force() -> None:
    strict = Policy(ttl_last_use_seconds=1, dram_bytes_max=3 * COLUMN_BYTES)
    logs = []
    for policy in (FOREVER, strict, Policy(tiers=Tiers.NONE)):
        ledger = driver(policy)
        for now, asked in enumerate(zipf(100, 20, 4, seed=2)):
            ask(ledger, asked, 10.0 * now)
        logs.append([(one.kind, one.at, one.path) for one in sample_of(ledger).events()])
    assert logs[0] == logs[1] == logs[2]


@pytest.mark.parametrize("namespace", [None, NAMESPACE])
def test_a_purge_leaves_no_key_behind_and_no_tokens_are_ever_kept(namespace: Namespace | None) -> None:
    ledger = driver()
    asked = path(*range(10))
    ask(ledger, asked, 1.0)
    log = sample_of(ledger).log
    assert all(key not in log for key in asked.keys)
    assert asked.keys[0][:8] in log
    ledger.purge("acme", namespace)
    assert sample_of(ledger).log == b""
    assert foretold([sample_of(ledger)], FOREVER, FOREVER).confidence is None
    ask(ledger, asked, 2.0)
    assert foretold([sample_of(ledger)], FOREVER, FOREVER).confidence is not None


def test_what_a_request_does_not_want_stored_is_not_taken_for_stored() -> None:
    ledger = driver()
    for now in range(3):
        match = ledger.match(path(1, 2), now)
        ledger.release(match)
        begun = ledger.begin_store(path(1, 2), 2 * C, now, Rules(no_store=True))
        ledger.finish_store(begun, now)
    assert foretold([sample_of(ledger)], FOREVER, FOREVER).now.hit_rate == 0


# Previews

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=30)


def replayed(prompts: Sequence[Prompt], policy: Policy, step: float) -> float:
    ledger = driver(policy)
    for number, asked in enumerate(prompts):
        ask(ledger, asked, number * step)
    rate = ledger.tally("acme").hit_rate
    assert rate is not None
    return rate


@settings(max_examples=60)
@given(
    PATHS,
    st.lists(st.integers(0, 9), min_size=30, max_size=30),
    st.one_of(st.none(), st.integers(1, 30)),
    st.one_of(st.none(), st.integers(1, 30)),
    st.one_of(st.none(), st.integers(0, 20)),
)
def test_a_preview_from_all_columns_is_what_the_driver_does(
    prompts: list[list[int]], waits: list[int], first: int | None, last: int | None, room: int | None
) -> None:
    """Exactly, as long as the sample is everything: only what is left out can make a difference."""
    proposed = Policy(
        ttl_first_use_seconds=first,
        ttl_last_use_seconds=last,
        dram_bytes_max=None if room is None else room * COLUMN_BYTES,
        displacement="lru",
    )
    now_ledger, then = driver(), driver(proposed)
    for number, (at, blocks) in enumerate(zip(accumulate(waits), prompts, strict=False), 1):
        at_s = at + 1e-3 * number  # no two a whole second apart: neither the sweeper nor a policy ties
        ask(now_ledger, path(*blocks), at_s)
        ask(then, path(*blocks), at_s)
    told = foretold([sample_of(now_ledger)], FOREVER, proposed)
    assert told.proposed.hit_rate == pytest.approx(then._stock.account("acme").tally.hit_rate)
    assert told.now.hit_rate == told.measured_hit_rate


@pytest.mark.slow
@pytest.mark.parametrize(
    "proposed",
    [
        Policy(ttl_last_use_seconds=20),
        Policy(ttl_first_use_seconds=40, ttl_last_use_seconds=None),
        Policy(ttl_first_use_seconds=90, ttl_last_use_seconds=15),
        *(
            Policy(ttl_last_use_seconds=None, dram_bytes_max=4000 * COLUMN_BYTES, displacement=name)
            for name in ("lru", "lfu", "slru", "s3fifo", "cost")
        ),
    ],
    ids=str,
)
def test_a_sample_foretells_what_a_driver_under_another_policy_hits(
    proposed: Policy, zipf_traffic: tuple[list[Prompt], Sample]
) -> None:
    """From an eighth of the columns: 1,600 of them, so some points are left to chance."""
    prompts, whole = zipf_traffic
    made = msgspec.structs.replace(whole, threshold=ALL_KEYS // 8)
    told = foretold([made], FOREVER, proposed)
    assert told.proposed.hit_rate is not None
    assert abs(told.proposed.hit_rate - replayed(prompts, proposed, 0.1)) < 0.03
    assert told.confidence is not None
    assert told.confidence.share == 1 / 8


@pytest.fixture(scope="module")
def zipf_traffic() -> tuple[list[Prompt], Sample]:
    prompts = zipf(2500, 800, 16, seed=11)
    ledger = driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "LOG_BYTES_MAX", 1 << 30)
        for number, asked in enumerate(prompts):
            ask(ledger, asked, number * 0.1)
    return prompts, sample_of(ledger, 250.0)


def test_without_traffic_nothing_is_foretold() -> None:
    assert Ledger(FULL).reuse("acme", 0.0) is None
    quiet = driver()
    quiet._stock.account("acme")
    for samples in ([], [sample_of(quiet)]):
        told = foretold(samples, FOREVER, Policy())
        assert told.confidence is None
        assert told.proposed.hit_rate is None
        assert told.measured_hit_rate is None
        assert told.by_ttl == told.by_bytes == ()


def test_what_would_expire_at_once_is_told_and_what_memory_becomes_free() -> None:
    ledger = driver()
    for number in range(100):
        ask(ledger, path(number, 1, 2, 3), float(number))
    strict = Policy(ttl_last_use_seconds=10)
    told = foretold([sample_of(ledger, 99.5)], FOREVER, strict)
    assert told.expiring_columns == 4 * 90
    assert told.expiring_bytes == 4 * 90 * COLUMN_BYTES
    assert told.now.bytes == ledger.accounts["acme"].bytes == 400 * COLUMN_BYTES
    assert told.freed_bytes == 400 * COLUMN_BYTES - told.proposed.bytes > 350 * COLUMN_BYTES
    ledger.set_policies({"acme": OrgPolicies(policy=strict)}, 99.5)
    while ledger.sweep(99.5):
        pass
    assert ledger.accounts["acme"].bytes == (400 - told.expiring_columns) * COLUMN_BYTES
    nothing = foretold([sample_of(ledger, 99.5)], strict, Policy(tiers=Tiers.NONE))
    assert nothing.proposed.hit_rate == 0
    assert nothing.expiring_columns == 40


@pytest.mark.slow
def test_who_stores_a_shared_beginning_anew_does_so_for_all_who_share_it() -> None:
    """With a time to live from the first use. Between the last column of the beginning that is in the
    sample and the first of each prompt that goes on there are some that all share."""
    chance = random.Random(6)
    beginning = list(range(20))
    rests = [range(100 * number, 100 * number + 30) for number in range(1, 41)] + [range(0)] * 20
    prompts = [path(*beginning, *chance.choice(rests)) for _ in range(1500)]
    ledger = driver()
    for number, asked in enumerate(prompts):
        ask(ledger, asked, float(number))
    eighth = msgspec.structs.replace(sample_of(ledger, 1500.0), stride=8)  # the columns 5, 13, 21, …
    proposed = Policy(ttl_first_use_seconds=150, ttl_last_use_seconds=None)
    told = foretold([eighth], FOREVER, proposed)
    assert told.proposed.hit_rate == pytest.approx(replayed(prompts, proposed, 1.0), abs=0.01)


def test_tier_2_gives_back_what_memory_had_no_room_for() -> None:
    ledger = driver()
    for now in range(200):
        ask(ledger, path(now % 20, 1, 2, 3), float(now))
    small = Policy(ttl_last_use_seconds=3600, dram_bytes_max=20 * COLUMN_BYTES, displacement="lru")
    both = msgspec.structs.replace(small, tiers=Tiers.TIER2)
    told, tiered = (foretold([sample_of(ledger, 200.0)], FOREVER, one).proposed for one in (small, both))
    assert told.hit_rate == 0
    assert tiered.hit_rate == tiered.tier2_hit_rate == pytest.approx(0.9)
    assert tiered.bytes == 20 * COLUMN_BYTES


def test_tier_2_has_a_curve_where_it_is_used() -> None:
    ledger = driver()
    for now in range(200):
        ask(ledger, path(now % 20, 1, 2, 3), float(now))
    small = Policy(dram_bytes_max=20 * COLUMN_BYTES, displacement="lru")
    assert foretold([sample_of(ledger, 200.0)], FOREVER, small).by_tier2_bytes == ()
    both = msgspec.structs.replace(small, tiers=Tiers.TIER2)
    told = foretold([sample_of(ledger, 200.0)], FOREVER, both)
    rates = [point.hit_rate for point in told.by_tier2_bytes]
    assert rates == sorted(rates)
    assert told.by_tier2_bytes[0].at == 80 * COLUMN_BYTES  # what lies in memory without a quota
    assert rates[-1] == pytest.approx(0.9)


def test_curves_rise_and_go_through_what_is_proposed() -> None:
    ledger = driver()
    for number, asked in enumerate(zipf(1500, 300, 4, seed=4)):
        ask(ledger, asked, 2.0 * number)
    told = foretold([sample_of(ledger, 3000.0)], FOREVER, Policy(ttl_last_use_seconds=900))
    rates = [point.hit_rate for point in told.by_ttl]
    assert rates == sorted(rates)
    assert rates[-1] > rates[0] + 0.1
    [there] = [point.hit_rate for point in told.by_ttl if point.at == 900]
    assert there == pytest.approx(told.proposed.hit_rate)
    assert told.by_bytes[-1].hit_rate >= told.by_bytes[0].hit_rate


def test_samples_of_several_drivers_are_added_up() -> None:
    one, other = driver(), driver()
    for now in range(10):
        ask(one, path(1, 2), now)
        ask(other, path(*range(now, now + 6)), now)
    told = foretold([sample_of(one), sample_of(other)], FOREVER, FOREVER)
    assert told.proposed.hit_rate == pytest.approx((9 * 2) / (10 * 2 + 10 * 6))
    assert told.confidence is not None
    assert told.confidence.requests == 20


def test_the_warning_of_a_short_sample_does_not_take_the_newest_driver_for_all() -> None:
    one, fresh = driver(), driver()
    for now in range(100):
        ask(one, path(1, 2), now)
    ask(fresh, path(1, 2), 95)
    told = foretold(
        [sample_of(one, 100.0), sample_of(fresh, 100.0)], FOREVER, Policy(ttl_last_use_seconds=60)
    )
    assert told.confidence is not None
    assert told.confidence.reaches_back_seconds == 5
    [warning] = (one for one in told.confidence.warnings if "reaches back" in one)
    assert "reaches back 5 s to 1 min 40 s, by driver" in warning


def test_a_sample_that_knows_little_says_so() -> None:
    ledger = driver()
    for now in range(5):
        ask(ledger, path(1, 2), now)
    told = foretold([sample_of(ledger, 20.0)], FOREVER, Policy(ttl_last_use_seconds=3600))
    assert told.confidence is not None
    assert told.confidence.idle_seconds == 16
    assert any("reaches back 20 s" in warning for warning in told.confidence.warnings)
    assert any("wait for more traffic" in warning for warning in told.confidence.warnings)


@pytest.mark.slow
def test_a_policy_in_a_miniature_knows_who_was_displaced() -> None:
    one = Miniature(Policy(displacement="s3fifo"), 4)
    paths = [(Reference(bytes([0] * 7 + [number]), 0),) for number in range(5)]
    events = [Event(Kind.STORE, float(at), path, 1) for at, path in enumerate([*paths, paths[0]])]
    one.run(events, 0.0)
    assert one._columns[paths[0][0].key].mark is not None, "it is not in the queue of newcomers"


def test_policies_may_change_while_the_sample_is_taken() -> None:
    names: list[DisplacementName] = ["lru", "cost", "slru", "s3fifo", "lfu"]
    ledger = driver(slots=100)
    for number, asked in enumerate(zipf(500, 60, 4, seed=9)):
        if number % 50 == 0:
            policy = Policy(ttl_last_use_seconds=1 + number, displacement=names[number // 50 % 5])
            ledger.set_policies({"acme": OrgPolicies(policy=policy)}, number)
        ask(ledger, asked, number)
    check_integrity(ledger)
    for name in names:
        told = foretold([sample_of(ledger, 500.0)], FOREVER, Policy(displacement=name))
        assert told.proposed.hit_rate is not None
        assert 0 < told.proposed.hit_rate < 1


def test_a_sample_survives_a_journey() -> None:
    ledger = driver(layout=Layout((Group("full", (64,)), Group("draft", (16,)))))
    ask(ledger, keys().prompt([1] * 200), 1.0)
    made = sample_of(ledger, 2.0)
    assert made.column_bytes == sum(group.column_bytes for group in ledger.layout.groups)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Sample) == made
    [match, store] = made.events()
    assert [one.tail for one in store.path] == [True]
    assert len(match.path) == 3


@pytest.mark.parametrize("first", [None, 50])
def test_a_limit_of_stored_tokens_is_foretold(first: int | None) -> None:
    ledger = driver()
    for now in range(0, 100, 10):
        ask(ledger, path(1, 2, 3, 4), now)
    proposed = replace(FOREVER, store_tokens_max=2 * C + 5, ttl_first_use_seconds=first)
    unlimited = foretold([sample_of(ledger, 100.0)], FOREVER, replace(proposed, store_tokens_max=None))
    told = foretold([sample_of(ledger, 100.0)], FOREVER, proposed)
    assert told.now.hit_rate == pytest.approx(0.9)
    assert told.proposed.hit_rate == pytest.approx((unlimited.proposed.hit_rate or 0) / 2)
    assert told.freed_bytes == 2 * sum(group.column_bytes for group in FULL.groups)
    if first is None:
        assert told.expiring_columns == 2
