"""Cache maps, one thing at a time: what drivers report, what brains make of it, and what they refuse."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_brain.maps import CacheMaps, DriverPlace, GuessedMap
from inference_brain.maps.holders import Indexes
from inference_brain.maps.mirror import SCAN_SECONDS, SCAN_SHARE, Mirror, Spaces
from inference_brain.maps.table import MapTable, Names, Run, Test
from swdriver_shim.cache_map.chunks import Chunks
from swdriver_shim.cache_map.codec import (
    CHUNK,
    ENTRIES_MAX,
    IN_TIER2,
    SPACE_BYTES,
    VERSION,
    Message,
    Section,
    decode,
    entry,
    in_parts,
    pack_values,
)
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import Policy, Rules, Tiers
from telemetry.decoder import Malformed
from tests.inference_brain.map_worlds import AHEAD, SECRET, MapWorld, model_of, tokens_of
from tests.swdriver_shim.ledgers import finish
from tests.swdriver_shim.prompts import FULL, HYBRID, PURE, STATES

C = COLUMN_TOKENS
NOBODY = (0, 0, float("inf"))


# What is known


@pytest.mark.parametrize("layout", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize(("columns", "rest"), [(40, 0), (31, 40), (8, 1), (7, 0), (1, 63), (0, 40)])
def test_a_stored_prompt_is_known_to_the_token(layout: Layout, columns: int, rest: int) -> None:
    world = MapWorld(layout)
    prompt = world.prompt(tokens_of([1] * columns, rest))
    world.store(prompt)
    world.catch_up()
    assert world.hit(prompt).tokens == (world.truth(prompt) if columns else 0)


def test_prompts_that_part_within_a_chunk_are_known_up_to_there_once_two_do() -> None:
    world = MapWorld(FULL)
    world.store(world.prompt(tokens_of([1] * 11 + [2] * 20)))
    world.store(world.prompt(tokens_of([1] * 11 + [3] * 5)))
    world.catch_up()
    new = world.prompt(tokens_of([1] * 11 + [4] * 9))
    assert world.hit(new).tokens == world.truth(new) == 11 * C


def test_a_conversation_that_goes_on_has_one_end() -> None:
    world = MapWorld(FULL)
    for turn in range(1, 9):
        world.store(world.prompt(tokens_of([1] * (5 * turn))))
        world.catch_up()
    assert world.log.follower.size == 5
    mirror = world.maps.mirror("job")
    assert mirror
    assert mirror.entries == world.maps.table.rows == 5


def test_states_are_known_where_they_are() -> None:
    world = MapWorld(STATES)
    prompt = world.prompt(tokens_of([1] * 30))
    world.store(prompt, states=(9 * C, 20 * C))
    world.catch_up()
    assert world.hit(prompt).tokens == world.truth(prompt) == 20 * C
    short = world.prompt(tokens_of([1] * 15))
    assert world.hit(short).tokens == world.truth(short) == 9 * C


def test_a_layout_of_states_only_is_known_by_its_columns() -> None:
    world = MapWorld(PURE)
    prompt = world.prompt(tokens_of([1] * 30))
    world.store(prompt, states=(3 * C, 21 * C))
    world.catch_up()
    assert world.hit(prompt).tokens == world.truth(prompt) == 21 * C


def test_units_are_known_as_wholes() -> None:
    world = MapWorld(FULL, unit_tokens=3 * C)
    prompt = world.prompt(tokens_of([1] * 31))
    world.store(prompt)
    world.catch_up()
    assert world.hit(prompt).tokens == world.truth(prompt) == 30 * C


def test_others_do_not_hit() -> None:
    world = MapWorld(FULL)
    tokens = tokens_of([1] * 20)
    world.store(world.prompt(tokens, "acme"))
    world.catch_up()
    assert world.hit(world.prompt(tokens, "acme")).tokens == 20 * C
    assert world.hit(world.prompt(tokens, "globex")) == NOBODY


def test_columns_that_stand_alone_have_no_map() -> None:
    with pytest.raises(ValueError, match="stand alone"):
        MapWorld(Layout((Group("objects", (64,), alone=True),)))


# Time


def test_a_prefix_that_has_expired_when_it_is_served_is_absent() -> None:
    world = MapWorld(FULL)
    world.set_policy(Policy(ttl_last_use_seconds=60))
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt)
    world.catch_up()
    hit = world.hit(prompt)
    assert (hit.tokens, hit.expires_at) == (20 * C, 1060.0 + AHEAD)
    assert world.hit(prompt, after=53.9).tokens == 20 * C
    assert world.hit(prompt, after=54.1) == NOBODY


def test_the_beginning_may_expire_before_the_end() -> None:
    world = MapWorld(FULL)
    world.set_policy(Policy(ttl_first_use_seconds=60, ttl_last_use_seconds=None))
    world.store(world.prompt(tokens_of([1] * 8)))
    world.now += 30
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt)
    world.catch_up()
    assert world.hit(prompt).expires_at == 1060.0 + AHEAD
    world.now = 1070.0
    world.sweep()
    world.catch_up()
    assert world.hit(prompt) == NOBODY
    world.store(world.prompt(tokens_of([1] * 8)))  # what follows was there all the time
    world.catch_up()
    assert world.hit(prompt).tokens == world.truth(prompt) == 20 * C


def test_uses_are_reported_once_they_matter() -> None:
    world = MapWorld(FULL)
    world.set_policy(Policy(ttl_last_use_seconds=100))
    prompt = world.prompt(tokens_of([1] * 64))
    world.store(prompt)
    world.publish()
    reported = []
    for _ in range(40):
        world.now += 1
        world.use(prompt)
        before = len(world.stream)
        world.publish()
        names = [len(one.names) for raw in world.stream[before:] for one in decode(raw).sections]
        reported.append(sum(names) // 8)
    assert sum(reported) <= 4 * 8  # a tenth of the TTL each, and one for each chunk
    world.read()
    assert world.hit(prompt).expires_at >= world.wall + 89


def test_another_ttl_is_reported_for_what_is_stored() -> None:
    world = MapWorld(FULL)
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt)
    world.catch_up()
    for seconds in (30, 7200):
        world.set_policy(Policy(ttl_last_use_seconds=seconds))
        world.catch_up()
        assert world.hit(prompt).expires_at == 1000.0 + seconds + AHEAD
    world.set_policy(Policy(ttl_last_use_seconds=None))
    world.catch_up()
    assert world.hit(prompt).expires_at == float("inf")
    world.set_policy(Policy(tiers=Tiers.NONE))
    world.catch_up()
    assert world.hit(prompt) == NOBODY
    world.set_policy(Policy())
    world.catch_up()
    assert world.hit(prompt).tokens == 20 * C


def test_a_wall_clock_that_is_set_changes_what_was_reported() -> None:
    world = MapWorld(FULL)
    prompt = world.prompt(tokens_of([1] * 8))
    world.store(prompt)
    world.catch_up()
    for raw in world.log.write(world.now, world.wall - 500).messages:
        mirror = world.maps.mirror("job")
        assert mirror
        mirror.read(raw, world.wall)
    assert world.hit(prompt).expires_at == 4600.0 + AHEAD - 500


def test_times_far_from_the_beginning_of_the_brain_are_kept() -> None:
    world = MapWorld(FULL)
    world.set_policy(Policy(ttl_last_use_seconds=400 * 86_400))
    prompt = world.prompt(tokens_of([1] * 8))
    world.store(prompt)
    world.catch_up()
    first = world.hit(prompt).expires_at
    world.now += 100 * 86_400
    world.maps.keep_house(world.wall)
    assert world.hit(prompt).expires_at == first  # half a year is as far as anybody looks
    assert world.hit(prompt).tokens == 8 * C
    world.now += 100 * 86_400
    assert world.hit(prompt) == NOBODY
    world.use(prompt)
    world.catch_up()
    assert world.hit(prompt).tokens == 8 * C


# Tier 2


def spill(world: MapWorld, *, exists: bool = True) -> None:
    while begun := world.ledger.tier2.begin_spill(world.now, 64):
        world.ledger.tier2.finish_spill(begun, [exists] * len(begun.copies))
        while world.ledger.reclaim():
            pass
        while clears := world.ledger.take_clears(64):
            world.ledger.finish_clears(clears, is_done=True)


@pytest.mark.parametrize("exists", [True, False])
def test_what_was_displaced_into_tier_2_is_known_to_be_there(*, exists: bool) -> None:
    world = MapWorld(FULL, slots=40)
    world.set_policy(Policy(tiers=Tiers.TIER2))
    prompt = world.prompt(tokens_of([1] * 32))
    world.store(prompt)
    world.catch_up()
    world.now += 10
    world.store(world.prompt(tokens_of([2] * 8)))
    spill(world, exists=exists)
    world.store(world.prompt(tokens_of([3] * 1)))
    world.catch_up()
    hit = world.hit(prompt)
    assert hit.tokens <= world.truth(prompt) < 32 * C
    assert hit.tokens + hit.tier2_tokens == (32 * C if exists else hit.tokens)
    world.ledger.purge("acme")
    world.catch_up()
    assert world.hit(prompt) == NOBODY


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_by_policy", [False, True])
def test_when_tier_2_is_purged_nothing_in_it_is_expected(*, is_by_policy: bool, is_late: bool) -> None:
    """Files do not tell their namespace, so a purge of one removes all of the org. A copy that was under
    way may end later."""
    world = MapWorld(FULL, slots=40)
    world.set_policy(Policy(tiers=Tiers.TIER2))
    prompt = world.prompt(tokens_of([1] * 32))
    world.store(prompt)
    world.catch_up()
    world.now += 10
    world.store(world.prompt(tokens_of([2] * 8)))
    begun = world.ledger.tier2.begin_spill(world.now, 64)
    assert begun
    copied = [True] * len(begun.copies)
    world.catch_up()
    if not is_late:
        world.ledger.tier2.finish_spill(begun, copied)
        world.catch_up()
        assert world.hit(prompt).tier2_tokens
    if is_by_policy:
        world.set_policy(Policy(tiers=Tiers.TIER2, encrypt_tier2=True))
    else:
        other = replace(prompt.maker.namespace, adapter="lora")
        world.ledger.purge("acme", other, prompt.maker.tag, world.now)
    world.catch_up()
    if is_late:
        world.ledger.tier2.finish_spill(begun, copied)
        world.catch_up()
    hit = world.hit(prompt)
    assert (hit.tokens, hit.tier2_tokens) == (world.truth(prompt), 0)


@pytest.mark.parametrize("is_in_a_run", [False, True])
@pytest.mark.parametrize("is_by_policy", [False, True])
def test_what_is_displaced_before_it_forgets_a_purged_copy_is_not_expected(
    *, is_by_policy: bool, is_in_a_run: bool
) -> None:
    world = MapWorld(FULL, slots=40)
    world.set_policy(Policy(tiers=Tiers.TIER2))
    prompt = world.prompt(tokens_of([1] * 32))
    world.store(prompt)
    world.use(prompt)
    world.now += 10
    spill(world)
    if is_by_policy:
        world.set_policy(Policy(tiers=Tiers.TIER2, encrypt_tier2=True))
    else:
        other = replace(prompt.maker.namespace, adapter="lora")
        world.ledger.purge("acme", other, prompt.maker.tag, world.now)
    world.catch_up()
    if is_in_a_run:
        world.store(world.prompt(tokens_of([2] * 32)))
    else:
        world.ledger.set_slot_limit(0, 16)
        assert world.ledger.tier2.begin_spill(world.now, 64) is None, "nothing is copied meanwhile"
    had = world.hit(prompt).tokens
    world.catch_up()
    hit = world.hit(prompt)
    assert (hit.tokens, hit.tier2_tokens) == (world.truth(prompt), 0)
    assert hit.tokens < had


# Purges and removals


def test_a_purge_is_reported_at_once_and_leaves_nothing_in_the_brain() -> None:
    world = MapWorld(FULL)
    woken = []
    world.log.follower.on_purge = lambda: woken.append(True)
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt)
    other = world.prompt(tokens_of([1] * 20), "globex")
    world.store(other)
    world.catch_up()
    world.ledger.purge("acme")
    assert woken
    world.publish()
    world.read()
    assert world.hit(prompt) == NOBODY
    assert world.hit(other).tokens == 20 * C
    assert world.maps.table.rows == 3


def test_what_a_brain_has_forgotten_stays_so_whatever_drivers_report() -> None:
    world = MapWorld(FULL)
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt)
    world.catch_up()
    tag, namespace = prompt.maker.tag, prompt.maker.namespace
    assert world.maps.forget([(tag, namespace.digest())]) == {"job": 3}
    assert world.hit(prompt) == NOBODY
    assert world.maps.table.rows == 0
    world.store(world.prompt(tokens_of([1] * 40)))
    world.catch_up()
    assert world.maps.table.rows == 0
    place = DriverPlace("driver:job", world.model)
    world.maps.follow({"job": place}, [(tag, namespace)])  # a later document brings it back
    world.read()
    assert world.hit(prompt).tokens == 16 * C  # it goes on by now, and whole chunks are known


def test_while_an_agent_is_lost_nothing_is_promised() -> None:
    world = MapWorld(FULL)
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt)
    world.catch_up()
    world.ledger.is_reachable = False
    world.publish()
    world.read()
    assert world.hit(prompt) == NOBODY
    world.ledger.is_reachable = True
    world.publish()
    world.read()
    assert world.hit(prompt).tokens == 20 * C


def test_the_path_of_a_cache_is_reported_when_it_changes() -> None:
    world = MapWorld(FULL)
    world.store(world.prompt(tokens_of([1] * 20)))
    world.catch_up()
    mirror = world.maps.mirror("job")
    assert mirror
    paths: list[str] = [mirror.path]
    world.log.follower.path_now = lambda: "spine"
    world.publish()
    world.read()
    assert [*paths, mirror.path] == ["", "spine"]
    had = len(world.stream)
    world.publish()
    assert len(world.stream) == had


def test_a_brain_that_leaves_a_driver_keeps_nothing_of_it() -> None:
    world = MapWorld(FULL)
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt)
    world.catch_up()
    world.maps.follow({})
    assert world.maps.table.rows == 0
    assert world.maps.hits(["job"], {world.model: prompt}, world.wall) == [None]
    assert world.maps.age("job", world.wall) is None


# The way there


def test_a_lost_message_makes_the_map_unknown_until_the_stream_is_read_again() -> None:
    world = MapWorld(FULL)
    for columns in (8, 16, 24):
        world.store(world.prompt(tokens_of([1] * columns)))
        world.publish()
    world.read()
    world.store(world.prompt(tokens_of([1] * 32)))
    world.publish()
    lost = world.stream.pop()
    world.store(world.prompt(tokens_of([1] * 40)))
    world.publish()
    mirror = world.maps.mirror("job")
    assert mirror
    for raw in world.stream[world.position :]:
        mirror.read(raw, world.wall)
    assert world.maps.age("job", world.wall) is None
    assert mirror.counts.gaps == 1
    world.stream.insert(-1, lost)
    world.read()
    assert world.hit(world.prompt(tokens_of([1] * 40))).tokens == 40 * C


def test_a_driver_that_starts_anew_is_followed() -> None:
    world = MapWorld(FULL)
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt)
    world.catch_up()
    world.restart_publisher()
    world.ledger.delete(prompt)
    world.catch_up()
    assert world.hit(prompt) == NOBODY


def test_many_deltas_become_a_snapshot_that_brains_need_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swdriver_shim.cache_map.messages.DELTAS_MAX", 5)
    world = MapWorld(FULL)
    for turn in range(1, 20):
        world.store(world.prompt(tokens_of([1] * turn)))
        world.publish()
        world.read()
        assert len(world.stream) <= 6
        assert world.is_known
    mirror = world.maps.mirror("job")
    assert mirror
    assert mirror.counts.gaps == 0
    assert world.hit(world.prompt(tokens_of([1] * 19))).tokens == 19 * C
    world.restart_brain()
    world.read()
    assert world.hit(world.prompt(tokens_of([1] * 19))).tokens == 19 * C


def test_notes_that_are_too_many_cost_a_look_at_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MapWorld(FULL)
    world.store(world.prompt(tokens_of([1] * 20)))
    world.catch_up()
    monkeypatch.setattr("swdriver_shim.cache_map.follower.NOTES_MAX", 2)
    for kind in range(2, 9):
        world.store(world.prompt(tokens_of([kind] * 20)))
    assert not world.log.follower._has_all
    world.ledger.delete(world.prompt(tokens_of([1] * 20)))
    world.catch_up()
    assert world.hit(world.prompt(tokens_of([5] * 20))).tokens == 20 * C
    assert world.hit(world.prompt(tokens_of([1] * 20))) == NOBODY


@pytest.mark.parametrize("kind", ["removed", "used", "altered", "copied", "deleted", "purged"])
def test_notes_of_any_kind_are_bounded(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Also where nothing is stored meanwhile."""
    world = MapWorld(FULL)
    prompts = [world.prompt(tokens_of([number] * 20)) for number in range(1, 9)]
    for prompt in prompts:
        world.store(prompt)
    world.catch_up()
    monkeypatch.setattr("swdriver_shim.cache_map.follower.NOTES_MAX", 5)
    follower = world.log.follower
    for prompt in prompts:
        match kind:
            case "removed":
                world.ledger.delete(prompt)
            case "used":
                world.use(prompt)
            case "altered":
                [maps] = world.ledger.accounts["acme"].maps.values()
                follower.ttl_changed([*maps[0].columns.values()][:2])
            case "copied":
                follower.copied(prompt.maker.tag, prompt.keys[0])
            case "deleted":
                [maps] = world.ledger.accounts["acme"].maps.values()
                follower.deleted(maps[0], prompt.keys)
            case "purged":
                follower.purged(next(iter(world.ledger.accounts["acme"].maps.values())))
        assert len(getattr(follower._notes, kind)) <= 5
    assert not follower._has_all
    world.catch_up()
    for prompt in prompts:
        assert world.hit(prompt).tokens == world.truth(prompt)


def test_without_redis_nothing_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swdriver_shim.cache_map.follower.PENDING_MIN", 10)
    world = MapWorld(FULL, slots=100)
    follower = world.log.follower
    world.publish()
    for kind in range(1, 200):
        prompt = world.prompt(tokens_of([kind] * 20))
        world.store(prompt)
        world.use(prompt)
        if kind % 10 == 0:
            world.ledger.purge("acme")
            finish(world.ledger)
        follower.follow(world.now, world.wall)
        assert not follower._notes.used
        assert sum(len(one.pending) for one in follower._spaces.values()) <= 60
        assert len(follower._dropped) <= 20
    assert follower.wants_snapshot
    world.catch_up()
    last = world.prompt(tokens_of([199] * 20))
    assert world.hit(last).tokens == world.truth(last) == 20 * C


# Whoever reports nonsense


def message(**changed: object) -> Message:
    made = Message(VERSION, b"l" * 8, 1, AHEAD, int(AHEAD), True, 0, 1)
    return msgspec.structs.replace(made, **changed)


@pytest.mark.parametrize(
    "wrong",
    [
        message(version=2),
        message(part=3, parts=2),
        message(sections=(Section(b"s" * 24, 0, b"n" * 8),)),
        message(sections=(Section(b"s" * 24, 0, b"n" * 7, b"v" * 4),)),
        message(sections=(Section(b"s" * 24, 0, b"n" * 16, b"v" * 4),)),
        message(sections=(Section(b"s" * 24, 0, removed=b"n" * 9),)),
        message(sections=(Section(b"s" * 23, 0),)),
        message(sections=(Section(b"s" * 24, 99),)),
        message(sections=(Section(b"s" * 24, 0, b"n" * 8 * (ENTRIES_MAX + 1)),)),
        message(dropped=(b"",)),
        message(sequence=0),
        message(at=float("nan")),
        message(life=b""),
    ],
    ids=str,
)
def test_what_is_no_message_is_malformed_and_hurts_its_own_map_only(wrong: Message) -> None:
    with pytest.raises(Malformed):
        decode(wrong.encode())
    world = MapWorld(FULL)
    world.maps.follow({name: DriverPlace(f"driver:{name}", world.model) for name in ("job", "other")})
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt)
    world.catch_up()
    hostile = world.maps.mirror("other")
    assert hostile
    assert not hostile.read(wrong.encode(), world.wall)
    assert hostile.wants_all
    assert world.hit(prompt).tokens == 20 * C


def test_a_driver_that_reports_what_is_anothers_changes_nothing_for_that_one() -> None:
    world = MapWorld(FULL)
    world.maps.follow({name: DriverPlace(f"driver:{name}", world.model) for name in ("job", "other")})
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt)
    world.catch_up()
    hostile = world.maps.mirror("other")
    assert hostile
    names = b"".join(key[:8] for key in prompt.keys)
    space = prompt.maker.tag + prompt.maker.namespace.digest()[:8]
    values = pack_values([entry(AHEAD + 9e6, IN_TIER2)] * 20, int(AHEAD))
    its = message(sections=(Section(space, 0, names, values), Section(b"x" * 24, 0, names, values)))
    hostile.read(its.encode(), world.wall)
    dropped = message(sequence=2, part=0, parts=0, dropped=(space,), sections=())
    before = world.hit(prompt)
    hostile.read(dropped.encode(), world.wall)
    assert world.hit(prompt) == before
    assert before.tokens == 20 * C


def test_a_driver_has_room_for_so_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_brain.maps.mirror.ENTRIES_MAX", 10)
    table, spaces = MapTable(int(AHEAD) - 1), Spaces()
    mirror = Mirror(table, spaces, 0)
    names = random.Random(1).randbytes(8 * 30)
    section = Section(b"s" * 24, 0, names, pack_values([entry(AHEAD + 60, 0)] * 30, int(AHEAD)))
    mirror.read(message(sections=(section,)).encode(), AHEAD)
    assert (mirror.entries, table.rows, mirror.counts.left_out) == (10, 10, 20)
    assert mirror.is_known
    other = Section(b"t" * 24, 0, names[:80], section.values[:40], b"")
    first = Section(b"s" * 24, 0, b"", b"", names[:48])
    mirror.read(message(sequence=2, parts=0, sections=(first, other)).encode(), AHEAD)
    assert (mirror.entries, table.rows, mirror.counts.left_out) == (10, 10, 24)
    known = np.frombuffer(names[:80], np.uint64)
    found = table.find(spaces.find(b"t" * 24) or 0, 0, known).which
    assert sorted(found.tolist()) == [*range(6)], "in any order: tables have secrets of their own"


SPACES = [letter * 24 for letter in (b"s", b"t", b"u")]
NAMES = st.lists(st.integers(1, 12), max_size=6).map(lambda one: np.array(one, np.uint64).tobytes())
SECTIONS = st.builds(
    lambda space, kind, names, removed, code: Section(
        space,
        kind,
        names,
        pack_values([entry(AHEAD + code, code)] * (len(names) // 8), int(AHEAD)),
        removed,
    ),
    *(st.sampled_from(SPACES), st.integers(0, 1), NAMES, NAMES, st.integers(1, 63)),
)
CHANGES = st.tuples(st.sets(st.sampled_from(SPACES)), st.lists(SECTIONS, max_size=6))


@settings(max_examples=50)
@given(st.lists(CHANGES, max_size=5))
def test_sections_of_one_message_do_what_they_do_in_messages_of_their_own(
    changes: list[tuple[set[bytes], list[Section]]],
) -> None:
    """Also where two of them are of one space, and where a name is both removed and added."""
    table, spaces = MapTable(int(AHEAD) - 1, rows_max=1 << 12), Spaces()
    together, alone, beside = (Mirror(table, spaces, lane) for lane in range(3))
    for mirror in (together, alone, beside):
        mirror.read(message().encode(), AHEAD)
    sequence = 1
    for number, (dropped, sections) in enumerate(changes, 2):
        told = message(sequence=number, parts=0, dropped=(*dropped,), sections=(*sections,)).encode()
        assert together.read(told, AHEAD)
        assert beside.read(told, AHEAD)  # so that rows are shared
        for parts in ((), *((section,) for section in sections)):
            sequence += 1
            drops = () if parts else (*dropped,)
            told = message(sequence=sequence, parts=0, dropped=drops, sections=parts).encode()
            assert alone.read(told, AHEAD)
        entries = 0
        for space, kind in product(SPACES, (0, 1)):
            found = table.find(spaces.find(space) or 0, kind, np.arange(1, 13, dtype=np.uint64))
            has: list[set[tuple[int, int]]] = [set(), set(), set()]
            for which, lane, value in zip(*(one.tolist() for one in found), strict=True):
                has[lane].add((which, value))
            assert has[0] == has[1] == has[2]
            entries += len(has[0])
        assert together.entries == alone.entries == entries


def test_a_full_table_refuses_and_counts() -> None:
    table = MapTable(0, rows_max=3000)
    names = np.random.default_rng(1).integers(1, 2**63, 10_000).astype(np.uint64)
    added = table.put(whole(1, names), names, 0, np.full(names.size, 1 << 8, np.uint32))
    assert 2900 <= added == table.rows == names.size - table.refused <= 3200
    assert table.find(1, 0, names).which.size == added


def test_sections_are_cut_to_what_a_message_may_have() -> None:
    names, removed = random.Random(1).randbytes(8 * 40_000), random.Random(2).randbytes(8 * 50_000)
    section = Section(b"s" * 24, 0, names, b"v" * 4 * 40_000, removed)
    parts = in_parts([section, Section(b"t" * 24, 1, names[:8], b"v" * 4)])
    assert b"".join(one.names for part in parts for one in part if one.kind == 0) == names
    assert b"".join(one.removed for part in parts for one in part) == removed
    for part in parts:
        decode(message(sections=tuple(part)).encode())


# The table


def whole(space: int, names: Names) -> list[Run]:
    return [Run(space, 0, names.size)]


def test_the_table_is_a_table_whatever_is_done_to_it() -> None:
    chance, rng = random.Random(3), np.random.default_rng(3)
    table, model = MapTable(1000, 1 << 16), dict[tuple[int, int, int], int]()
    names = rng.integers(1, 2**63, 4000).astype(np.uint64)
    for _ in range(150):
        lane, space = chance.randrange(40), chance.choice([0, 0, 0, 0, 1, 2])
        some = rng.choice(names, 400, replace=False)
        match chance.choice(["put"] * 9 + ["remove", "remove", "lane", "space", "of"]):
            case "put":
                values = rng.integers(1, 1 << 31, some.size).astype(np.uint32)
                new = {(space, lane, name) for name in some.tolist()} - model.keys()
                assert table.put(whole(space, some), some, lane, values) == len(new)
                mine = [(space, lane, name) for name in some.tolist()]
                model |= dict(zip(mine, values.tolist(), strict=True))
            case "remove":
                there = {(space, lane, name) for name in some.tolist()} & model.keys()
                assert table.remove(whole(space, some), some, lane) == len(there)
                model = {name: value for name, value in model.items() if name not in there}
            case "lane":
                table.remove_lane(lane)
                model = {name: value for name, value in model.items() if name[1] != lane}
            case "space":
                table.remove_space(space)
                model = {name: value for name, value in model.items() if name[0] != space}
            case "of":
                spaces = {space, chance.randrange(3)}
                gone = {name for name in model if name[1] == lane and name[0] in spaces}
                assert table.remove_spaces_of(lane, [*spaces]) == len(gone)
                model = {name: value for name, value in model.items() if name not in gone}
        assert table.rows == len({(space, name) for space, _, name in model})
        counts = Counter((lane, space) for space, lane, _ in model)
        assert all(
            table.has(lane, [space]) is ((lane, space) in counts)
            for lane in range(40)
            for space in range(3)
        )
        assert {lane for lane in range(40) if table.has(lane)} == {lane for lane, _ in counts}
    for space in range(3):
        which, lanes, values = table.find(space, 0, names)
        found = zip(lanes.tolist(), names[which].tolist(), values.tolist(), strict=True)
        expected = {name: value for name, value in model.items() if name[0] == space}
        assert {(space, lane, name): value for lane, name, value in found} == expected
        assert which.size == len(expected)


class Looks:
    """Of a table: how often all of it was looked at. Each takes 0.1 s of this clock."""

    def __init__(self, table: MapTable) -> None:
        self.count = 0
        self.now = 100.0
        self._looks_at = table._rows_where
        table._rows_where = self  # type: ignore[method-assign]

    def __call__(self, wanted: Test) -> Iterator[Indexes]:
        self.count += 1
        self.now += 0.1
        return self._looks_at(wanted)


def test_who_has_nothing_of_a_space_has_nobody_look_for_it() -> None:
    table, spaces = MapTable(int(AHEAD) - 1), Spaces()
    looks = Looks(table)
    big, small = (Mirror(table, spaces, lane, clock=lambda: looks.now) for lane in range(2))
    names = random.Random(1).randbytes(8 * 30)
    values = pack_values([entry(AHEAD + 60, 0)] * 30, int(AHEAD))
    section = Section(b"s" * 24, 0, names, values)
    big.read(message(sections=(section,)).encode(), AHEAD)
    for sequence in range(1, 20):
        small.read(message(sequence=sequence, parts=2).encode(), AHEAD)
    small.read(message(sequence=20, life=b"another8").encode(), AHEAD)
    for sequence in range(21, 40):
        told = message(sequence=sequence, life=b"another8", parts=0, dropped=(b"s" * 24,))
        assert small.read(told.encode(), AHEAD)
    assert small.is_known
    removed = Section(b"s" * 24, 0, b"", b"", names)
    own = Section(b"s" * 24, 0, names[::-1], values)  # of which nobody else has any
    own_removed = Section(b"s" * 24, 0, b"", b"", names[::-1])
    for sequence, sections in enumerate(((section, own), (removed, own_removed), ()), 40):
        drops = () if sections else (b"s" * 24,)
        told = message(sequence=sequence, life=b"another8", parts=0, sections=sections, dropped=drops)
        assert small.read(told.encode(), AHEAD)
    assert (looks.count, table.rows, small.is_known) == (0, 30, True)


@pytest.mark.parametrize("by", ["drops", "snapshots"])
def test_a_driver_has_the_table_looked_through_for_a_part_of_the_time(by: str) -> None:
    """What is more makes its map unknown, and is read later."""
    table, spaces = MapTable(int(AHEAD) - 1), Spaces()
    looks = Looks(table)
    mirror = Mirror(table, spaces, 0, clock=lambda: looks.now)
    values = pack_values([entry(AHEAD + 60, 0)], int(AHEAD))
    section = Section(b"s" * 24, 0, b"n" * 8, values)
    sequence = 0

    def read(**more: Any) -> None:
        nonlocal sequence
        sequence += 1
        mirror.read(message(sequence=sequence, **more).encode(), AHEAD)

    def once() -> None:
        if by == "drops":
            read(parts=0, sections=(section,))
            read(parts=0, dropped=(b"s" * 24,))
        else:
            read(sections=(section,))

    read()
    for _ in range(20):
        once()
    at_once = looks.count
    assert at_once == math.ceil(SCAN_SECONDS / 0.1)
    assert (mirror.wants_all, mirror.is_known) == (True, False)
    looks.now += 1.0  # in which it is read again, in vain
    mirror.start_over()
    read(sections=(section,))
    assert mirror.wants_all
    assert looks.count == at_once
    looks.now += 600.0
    mirror.start_over()
    read(sections=(section,))
    assert mirror.is_known
    assert looks.count <= at_once + 1
    assert table.rows == mirror.entries == 1
    began = looks.now
    while looks.now < began + 1000.0:
        looks.now += 0.5
        if mirror.wants_all:
            mirror.start_over()
            read()
        once()
    assert 0.1 * (looks.count - at_once) < SCAN_SECONDS + SCAN_SHARE * (looks.now - began) + 0.2


def test_many_lanes_have_a_name_and_leave_it_again() -> None:
    table, names = MapTable(0), np.arange(1, 1001, dtype=np.uint64)
    for lane in range(300):
        assert (
            table.put(whole(1, names), names, lane, np.full(names.size, lane + 1, np.uint32))
            == names.size
        )
    assert table.put(whole(1, names[:10]), names[:10], 299, np.full(10, 7, np.uint32)) == 0
    which, lanes, values = table.find(1, 0, names[5:15])
    assert sorted(zip(which.tolist(), lanes.tolist(), strict=True)) == [
        (place, lane) for place in range(10) for lane in range(300)
    ]
    assert (values == np.where((lanes == 299) & (which < 5), 7, lanes + 1)).all()
    for lane in range(299):
        table.remove_lane(lane)
    assert table.find(1, 0, names).lanes.tolist() == [299] * names.size
    assert table.remove_space(1) == {299: names.size}
    assert table.rows == 0


def test_sets_of_lanes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_brain.maps.table.SHARED_BYTES", 1)
    table, names = MapTable(0, rows_max=3000), np.arange(1, 101, dtype=np.uint64)
    added = [
        table.put(whole(1, names), names, lane, np.full(100, lane + 1, np.uint32)) for lane in range(12)
    ]
    assert added[:5] == [100, 100, 100, 100, 6], "four lanes have 24 bytes, and sixteen 96"
    assert table.refused == 1200 - sum(added)
    _, lanes, values = table.find(1, 0, names)
    assert lanes.size == sum(added)
    assert (values == lanes + 1).all()
    assert sum(table.remove(whole(1, names), names, lane) for lane in range(12)) == sum(added)
    assert table.rows == 0


def test_rows_without_room_in_a_bucket_are_found_and_removed_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inference_brain.maps.table.LOAD_MAX", 0.97)
    monkeypatch.setattr("inference_brain.maps.table._KICKS", 1)
    for remove in ("lane", "space", "name"):
        table, names = MapTable(0), np.random.default_rng(2).integers(1, 2**63, 3950).astype(np.uint64)
        assert table.put(whole(1, names), names, 2, np.full(names.size, 7 << 8, np.uint32)) == names.size
        assert table._overflow
        assert table.find(1, 0, names).values.tolist() == [7 << 8] * names.size
        table.set_epoch(3)
        assert table.find(1, 0, names).values.tolist() == [4 << 8] * names.size
        match remove:
            case "lane":
                table.remove_lane(2)
            case "space":
                assert table.remove_space(1) == {2: names.size}
            case "name":
                assert table.remove(whole(1, names), names, 2) == names.size
        assert not table.find(1, 0, names).which.size
        assert table.rows == len(table._overflow) == 0


def test_many_drivers_are_looked_up_at_once_as_each_by_itself() -> None:
    chance, model = random.Random(5), model_of(FULL)
    maker = Keys("acme", SECRET, model.namespace())
    space = maker.tag + model.namespace().digest()[:SPACE_BYTES]
    names = [f"job{number}" for number in range(130)]
    maps = CacheMaps(wall_clock=lambda: AHEAD)
    maps.follow({name: DriverPlace(f"driver:{name}", model) for name in names})
    prompt = maker.prompt(tokens_of([1] * 203))
    for number, name in enumerate(names):
        has = {8 * chunk - 1 for chunk in range(1, chance.choice([1, 2, 2, 2, 4, 9, 26]))}
        has = {end for end in has if chance.random() < 0.97} | {*chance.choices(range(24), k=3)}
        found = {
            prompt.keys[end][:8]: entry(
                AHEAD + chance.choice([20, 60, 90, 90, 90]), IN_TIER2 if chance.random() < 0.05 else 0
            )
            for end in has
        }
        packed = pack_values(list(found.values()), int(AHEAD))
        mirror = maps.mirror(name)
        assert mirror
        told = message(sections=(Section(space, 0, b"".join(found), packed),), serves=number % 10 != 0)
        mirror.read(told.encode(), AHEAD)
    maps.mirror("job7").read(b"", AHEAD)  # type: ignore[union-attr]
    for later in (0.0, 30.0, 70.0, 100.0):
        together = maps.hits(names, {model: prompt}, AHEAD + later)
        alone = [maps.hits([name], {model: prompt}, AHEAD + later)[0] for name in names]
        assert list(together) == alone
        assert together[7] is None
        assert together[10] == NOBODY
        assert together == maps.hits([*names, "stranger"], {model: prompt}, AHEAD + later)[:-1]
        if later < 30:
            assert len({hit.tokens for hit in together if hit}) > 10
            assert any(hit.tier2_tokens for hit in together if hit)


def test_answers_that_no_client_sends_back_make_no_map_larger_than_its_cache() -> None:
    """Each turn parts from the last one where that was answered, mostly within a chunk, and what was
    stored of the answer is never asked for again."""
    world, chance, missed = MapWorld(FULL, slots=200), random.Random(3), list[int]()
    conversations = [[number] for number in range(8)]
    for one in conversations:
        world.store(world.prompt(tokens_of(one)))
    world.catch_up()
    answer = 1000
    for _ in range(400):
        asked = chance.choice(conversations)
        if len(asked) > 60:
            asked[1:] = []
        answer += 20
        asked += range(answer, answer + chance.randint(1, 5))  # the question
        prompt = world.prompt(tokens_of(asked))
        missed.append((world.truth(prompt) - world.hit(prompt).tokens) // C)
        world.use(prompt)
        never_back = range(answer + 6, answer + 6 + chance.randint(1, 9))
        world.store(world.prompt(tokens_of([*asked, *never_back])))
        world.catch_up()
        mirror, space = world.maps.mirror("job"), next(iter(world.log.follower._spaces.values()))
        assert mirror
        assert mirror.entries == world.log.follower.size <= 200
        assert isinstance(space, Chunks)
        for kept in (space._ends, space._tails, space._fixed, space._shrunk):
            assert all(one.map.columns.get(one.key) is one for one in kept)
        assert len(space._waiting) <= 200
    assert 0 <= min(missed) <= max(missed) < CHUNK  # of what is there, less than a chunk is not told
    world.ledger.purge("acme")
    world.catch_up()
    assert mirror
    assert world.log.follower.size == mirror.entries == 0


# Guesses


def test_a_guess_is_what_was_sent_and_forgets_the_oldest() -> None:
    guess = GuessedMap(columns_max=64)
    maker = Keys("acme", SECRET, model_of(FULL).namespace())
    first, second = maker.prompt(tokens_of([1] * 20)), maker.prompt(tokens_of([2] * 40))
    guess.sent(first)
    assert guess.hit(first).tokens == 20 * C
    assert guess.hit(maker.prompt(tokens_of([1] * 30))).tokens == 20 * C
    assert guess.hit(maker.prompt(tokens_of([1] * 17))).tokens == 16 * C
    assert (
        guess.hit(Keys("globex", SECRET, model_of(FULL).namespace()).prompt(tokens_of([1] * 20)))
        == NOBODY
    )
    guess.sent(second)
    guess.sent(maker.prompt(tokens_of([3] * 16)))
    assert guess.hit(second).tokens == 40 * C
    assert guess.hit(first).tokens < 20 * C
    assert guess._columns <= 64
    guess.forget(maker.tag)
    assert len(guess) == guess._columns == 0


@pytest.mark.parametrize("seed", range(10))
def test_of_what_was_sent_the_first_columns_are_forgotten_last(seed: int) -> None:
    chance, guess = random.Random(seed), GuessedMap(columns_max=100)
    maker = Keys("acme", SECRET, model_of(FULL).namespace())

    def prompt() -> Prompt:
        """One of a few, or one that begins like others and goes on like none or some."""
        shared = [chance.randrange(3)] * chance.randrange(40)
        return maker.prompt(tokens_of([*shared, *[chance.randrange(4)] * chance.randrange(1, 40)]))

    for _ in range(100):
        guess.sent(prompt())
        asked = prompt()
        ends = [key in guess._ends for key in asked.keys]
        chunks = ends[CHUNK - 1 :: CHUNK]
        assert chunks == sorted(chunks, reverse=True)
        whole = CHUNK * sum(chunks)
        more = [count for count, there in enumerate(ends[whole : whole + CHUNK], 1) if there]
        assert guess.hit(asked).tokens == C * (whole + max(more, default=0))


def test_rules_of_a_request_shorten_what_is_promised() -> None:
    world = MapWorld(FULL)
    prompt = world.prompt(tokens_of([1] * 20))
    world.store(prompt, Rules(ttl_seconds=30))
    world.catch_up()
    assert world.hit(prompt).expires_at == 1030.0 + AHEAD


def test_a_driver_that_makes_up_spaces_leaves_numbers_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_brain.maps.mirror.SPACES_MAX", 16)
    monkeypatch.setattr("inference_brain.maps.mirror.SPACES_NEW_MAX", 8)
    table, spaces = MapTable(int(AHEAD) - 1), Spaces()
    liar, other = Mirror(table, spaces, 0), Mirror(table, spaces, 1)
    values = pack_values([entry(AHEAD + 60, 0)], int(AHEAD))
    made_up = tuple(Section(bytes([one]) * 24, 0, b"n" * 8, values) for one in range(20))
    liar.read(message(sections=made_up).encode(), AHEAD)
    other.read(message(sections=(Section(b"o" * 24, 0, b"n" * 8, values),)).encode(), AHEAD)
    assert (liar.entries, other.entries) == (8, 1)
    liar.read(message(sections=made_up, life=b"another8").encode(), AHEAD)  # what is known is no news
    assert liar.entries == 8


@pytest.mark.parametrize("layout", [FULL, Layout((Group("target", (64,)), Group("draft", (16,))))])
def test_a_column_that_expired_and_is_stored_again_before_anybody_looked_is_served_with_its_chunk(
    layout: Layout,
) -> None:
    world = MapWorld(layout)
    whole, first = world.prompt(tokens_of([1] * CHUNK)), world.prompt(tokens_of([1]))
    world.store(whole)
    world.ledger.set_ttl(first, 1)
    world.catch_up()
    world.now += 2
    world.sweep()
    assert world.truth(whole) == 0
    world.store(first)
    world.catch_up()
    assert world.hit(whole).tokens == world.truth(whole) == CHUNK * COLUMN_TOKENS


def test_a_driver_is_without_news_for_no_longer_than_it_is_followed() -> None:
    world = MapWorld(FULL)
    world.store(world.prompt(tokens_of([1] * 20)))
    maps = CacheMaps(wall_clock=lambda: AHEAD, clock=lambda: 1000.0)
    maps.follow({"job": DriverPlace("driver:job", world.model)})
    assert maps.seconds_without_news("job", 1000.0) is None
    mirror = maps.mirror("job")
    assert mirror
    for raw in world.log.write(world.now, world.wall).messages:
        mirror.read(raw, -9000.0)  # from before all was stopped
    assert (maps.age("job", 1004.0), maps.seconds_without_news("job", 1004.0)) == (10_004.0, 4.0)
    mirror.at = 1003.0
    assert maps.seconds_without_news("job", 1050.0) == 47.0
