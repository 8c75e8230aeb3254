"""The wafer emulator: its KV is what the tokens make it, and nothing wrong goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from kvss_agent.client import Credentials, ShardClient, connect
from kvss_agent.shard.arena import Arena
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from swdriver_shim.adapters.wafer import (
    ColumnPart,
    DriverCache,
    Emulator,
    LedgerCache,
    Speed,
    Wafer,
    wafer_layout,
)
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.driver import Driver, Part, ResumableLoad
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import Rules
from tests.kvss_agent.plane import DRIVER, SECRET, Plane, running
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import SECRET as ORG_SECRET

C = COLUMN_TOKENS
SMALL = wafer_layout(1, 96, window_tokens=100, draft=True)
TOKENS = list(range(3 * C + 10))


def keys(wafer: Wafer, org: str = "acme") -> Keys:
    return Keys(org, ORG_SECRET, wafer.namespace)


def all_parts(wafer: Wafer, tokens: list[int]) -> dict[ColumnPart, bytes]:
    kv = wafer.kv(tokens)
    return {part: bytes(kv(*part)) for part in wafer.parts(len(tokens))}


# Layouts


@pytest.mark.parametrize("boxes", [1, 3])
@pytest.mark.parametrize("wio", [(1, 1, 1, 1), (3, 4, 3, 2), (7, 1, 1, 1)])
def test_domains_keep_as_much_as_they_have_streams(boxes: int, wio: tuple[int, ...]) -> None:
    layout = wafer_layout(boxes, 10_000, wio=wio, window_tokens=512, draft=True)
    assert [group.name for group in layout.groups] == ["full", "window", "draft"]
    assert sum(sum(group.bytes_per_token) for group in layout.groups) == 10_000
    for group in layout.groups:
        total = sum(group.bytes_per_token)
        assert len(group.bytes_per_token) == 4 * boxes
        for domain, got in enumerate(group.bytes_per_token):
            assert abs(got - total * wio[domain % 4] / (boxes * sum(wio))) < 1


def test_a_layout_without_window_and_draft_has_one_group() -> None:
    assert [group.name for group in wafer_layout(2, 4096).groups] == ["full"]


@pytest.mark.parametrize(
    ("boxes", "size", "wio"), [(0, 4096, (1, 1, 1, 1)), (1, 3, (1, 1, 1, 1)), (1, 4096, (1, 1))]
)
def test_a_layout_that_leaves_a_shard_nothing_is_refused(
    boxes: int, size: int, wio: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"domains|something of every token"):
        wafer_layout(boxes, size, wio=wio)


# KV


def test_the_same_tokens_have_the_same_kv_whoever_asks() -> None:
    assert all_parts(Wafer(SMALL), TOKENS) == all_parts(Wafer(SMALL), TOKENS)


def test_every_part_of_every_column_is_different() -> None:
    parts = all_parts(Wafer(wafer_layout(2, 9600, wio=(1, 1, 1, 1), draft=True)), [7] * 10 * C)
    assert len({part[:16] for part in parts.values()}) == len(parts) == 2 * 8 * 10


def test_kv_depends_on_the_tokens_before_and_not_on_those_behind() -> None:
    wafer = Wafer(wafer_layout(1, 96))
    one, other = wafer.kv([1] * C + [2] * C), wafer.kv([3] * C + [2] * C)
    longer = wafer.kv([1] * C + [2] * C + [4])
    assert one(0, 0, 1, C) != other(0, 0, 1, C)
    assert one(0, 0, 1, C) == longer(0, 0, 1, C)


def test_kv_depends_on_layout_and_model() -> None:
    first = {
        bytes(wafer.kv(TOKENS)(0, 0, 0, C)[:16])
        for wafer in (Wafer(wafer_layout(1, 96)), Wafer(wafer_layout(2, 192)), Wafer(SMALL, "other"))
    }
    assert len(first) == 3


@pytest.mark.parametrize("at", [0, 1, 4093, 20_000, 24 * C * 32 - 1])
def test_one_flipped_bit_is_noticed_wherever_it_is(at: int) -> None:
    wafer = Wafer(wafer_layout(1, 96 * 32))
    kv, part = wafer.kv(TOKENS), ColumnPart(0, 0, 1, C)
    got = bytearray(kv(*part))
    assert len(got) == 24 * C * 32
    assert kv.wrong_bytes(part, memoryview(got)) == 0
    got[at] ^= 1
    assert kv.wrong_bytes(part, memoryview(got)) == 1


def test_pages_that_changed_places_and_bytes_that_are_missing_are_noticed() -> None:
    wafer = Wafer(wafer_layout(1, 96 * 32))
    kv, part = wafer.kv(TOKENS), ColumnPart(0, 0, 1, C)
    right = bytes(kv(*part))
    swapped = right[4096:8192] + right[:4096] + right[8192:]
    assert kv.wrong_bytes(part, memoryview(swapped)) > 8000
    assert kv.wrong_bytes(part, memoryview(b"")) == len(right)


# Time


def test_a_hit_makes_the_first_token_come_sooner_and_the_longer_the_more() -> None:
    speed = Speed()
    waits = [speed.ttft_seconds(10_000, hit) for hit in (0, 2_000, 9_000, 10_000)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] == speed.compute_seconds(10_000)
    assert waits[-1] > 0
    assert speed.ttft_seconds(0) == 0


def test_attention_makes_later_tokens_dearer_and_parts_add_up() -> None:
    speed = Speed()
    parts = speed.compute_seconds(1000) + speed.compute_seconds(1000, after=1000)
    assert speed.compute_seconds(2000) == pytest.approx(parts)
    assert speed.compute_seconds(1000, after=1000) > speed.compute_seconds(1000)


# Requests


class OnAgent:
    """An emulator, its driver, and the shards that it uses in an agent of this process."""

    def __init__(self, plane: Plane, wafer: Wafer, kind: type[Driver] = Driver) -> None:
        shards = []
        for index, group in enumerate(wafer.layout.groups):
            names = [f"{index}.{shard}" for shard in range(len(group.slot_bytes))]
            for name, slot_bytes in zip(names, group.slot_bytes, strict=True):
                identity = ShardIdentity(name, slot_bytes, DRIVER)
                arena = Arena.allocate(slot_bytes, 20)
                plane.shards[name] = HostedShard(identity, arena, 0, wake_me=plane.plane.wake)
            shards.append([Shard(name, self._connector(plane, name)) for name in names])
        self.driver = kind(wafer.layout, "emulated", shards)
        self.emulator = Emulator(DriverCache(self.driver, wafer))

    @staticmethod
    def _connector(plane: Plane, name: str) -> Callable[[], ShardClient]:
        return lambda: connect(f"unix:{plane.unix}", name, Credentials(DRIVER, SECRET))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()


def test_a_conversation_gets_back_all_it_stored_byte_for_byte(tmp_path: Path) -> None:
    wafer = Wafer(SMALL)
    with running(tmp_path) as plane, OnAgent(plane, wafer) as agent:
        first = agent.emulator.serve(keys(wafer), TOKENS, output=[5] * 100)
        assert (first.asked, first.hit, first.load.bytes) == (len(TOKENS), 0, 0)
        assert first.store.bytes > 0
        assert first.ttft_seconds == first.ttft_cold_seconds
        again = agent.emulator.serve(keys(wafer), TOKENS + [5] * 100 + [6] * 20)
        assert again.hit == len(TOKENS) + 100
        kept = {group.name: sum(group.bytes_per_token) for group in SMALL.groups}
        covered = again.hit - SMALL.groups[1].first_needed(again.hit) * C
        full = (kept["full"] + kept["draft"]) * again.hit
        assert again.load.bytes == full + kept["window"] * covered
        assert again.load.wrong_bytes == 0
        assert again.ttft_seconds < again.ttft_cold_seconds
        assert agent.emulator.serve(keys(wafer, "globex"), TOKENS).hit == 0


STATEFUL = wafer_layout(1, 96, window_tokens=100, state_bytes=30_000, tokens_per_state=128)


def test_an_engine_with_states_gets_them_back_where_it_had_them(tmp_path: Path) -> None:
    wafer = Wafer(STATEFUL)
    assert wafer.states(0, 300) == [128, 256, 300]
    assert wafer.states(128, 256) == [256]
    assert wafer.states(200, 200) == Wafer(SMALL).states(0, 300) == []
    tokens = list(range(3 * C))
    with running(tmp_path) as plane, OnAgent(plane, wafer) as agent:
        agent.emulator.serve(keys(wafer), tokens, output=[5] * 100)
        again = agent.emulator.serve(keys(wafer), [*tokens, *[5] * 100, *[6] * 20])
        assert (again.hit, again.load.wrong_bytes) == (len(tokens) + 100, 0)
        state = sum(STATEFUL.groups[2].bytes_per_state)
        window = again.hit - STATEFUL.groups[1].first_needed(again.hit) * C
        assert again.load.bytes == 48 * again.hit + 48 * window + state, "of one state"
        other = agent.emulator.serve(keys(wafer), [*tokens, 7, 7, 7])
        assert (other.hit, other.load.wrong_bytes) == (2 * C, 0)


def test_wrong_bytes_that_a_driver_would_hand_out_are_counted(tmp_path: Path) -> None:
    class Careless(Driver):
        """Spoils one byte behind everybody's back."""

        def load(self, prompt: Prompt, into: Part, *, seconds: float = 0.0) -> ResumableLoad:
            places: list[memoryview] = []

            def spoilt(group: int, shard: int, depth: int, tokens: int) -> memoryview:
                places.append(into(group, shard, depth, tokens))
                return places[-1]

            loaded = super().load(prompt, spoilt, seconds=seconds)
            for place in places[:1]:
                place[3] ^= 0xFF
            return loaded

    wafer = Wafer(SMALL)
    with running(tmp_path) as plane, OnAgent(plane, wafer, Careless) as agent:
        agent.emulator.serve(keys(wafer), TOKENS)
        assert agent.emulator.serve(keys(wafer), TOKENS).load.wrong_bytes == 1


@pytest.mark.parametrize("layout", [SMALL, STATEFUL], ids=["small", "stateful"])
def test_numbers_alone_hit_as_bytes_do(layout: Layout) -> None:
    wafer = Wafer(layout)
    ledger = Ledger(layout)
    for group in range(len(layout.groups)):
        ledger.set_slot_limit(group, 20)
    emulator = Emulator(LedgerCache(ledger, wafer, clock=lambda: 1.0))
    assert emulator.serve(keys(wafer), TOKENS, output=[5] * 100).hit == 0
    assert emulator.serve(keys(wafer), TOKENS + [5] * 100 + [6]).hit == len(TOKENS) + 100
    check_integrity(ledger)


def test_what_is_not_to_be_stored_is_not() -> None:
    wafer, ledger = Wafer(SMALL), Ledger(SMALL)
    emulator = Emulator(LedgerCache(ledger, wafer, clock=lambda: 1.0))
    emulator.serve(keys(wafer), TOKENS, rules=Rules(no_store=True))
    assert emulator.serve(keys(wafer), TOKENS).hit == 0
