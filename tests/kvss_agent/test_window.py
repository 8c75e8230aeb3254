"""Evict and refill through a mapped arena: the compiled window does what the Python one does."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvss_agent.client.interface import Evict
from kvss_agent.client.requests import Wanted
from kvss_agent.client.window import PythonWindow, Window, window
from kvss_agent.mover import PYTHON, Mover
from kvss_agent.shard import seal
from kvss_agent.shard.arena import Arena, Extent
from kvss_agent.shard.seal import Column, Header, Miss
from tests.kvss_agent.plane import compiled

SLOT, SLOTS = 4096, 5
KEY, TAG = bytes(range(16)), b"organisation-001"
DATA = memoryview(random.Random(3).randbytes(1 << 20))


@dataclass
class Held:
    """A window, and what it looks at: an arena of two extents."""

    mover: Mover
    arena: Arena = field(
        default_factory=lambda: Arena(SLOT, [Extent.allocate(SLOT, 3), Extent.allocate(SLOT, SLOTS - 3)])
    )
    lock: threading.Lock = field(default_factory=threading.Lock)
    leased: dict[int, int] = field(default_factory=dict)
    words: memoryview = field(default_factory=lambda: memoryview(bytearray(16)).cast("Q"))

    def __post_init__(self) -> None:
        self.words[0] = 40
        self.window: Window = window(self.lock, self.leased, self.words, 40, self.mover)
        self.window.follow(self.arena)

    def evict(self, slot: Any = 0, **other: Any) -> int | None:
        given_: dict[str, Any] = {"key": KEY, "tag": TAG, "tokens": 64, "payload": DATA[:1000]}
        given_ |= other
        return self.window.evict(slot, *given_.values())

    def state(self) -> tuple[object, ...]:
        slots = [bytes(self.arena.slot(number)) for number in range(self.arena.slots)]
        return slots, self.window.number, list(self.words), self.lock.locked()

    def close(self) -> None:
        self.window.shut()
        self.arena.close()


@pytest.fixture(params=["python", "native"])
def held(request: pytest.FixtureRequest) -> Iterator[Held]:
    held = Held(PYTHON if request.param == "python" else compiled())
    assert isinstance(held.window, PythonWindow) == (request.param == "python")
    yield held
    held.close()


def answered(call: Callable[[], object]) -> object:
    try:
        return call()
    except (ValueError, IndexError) as refused:
        return type(refused), str(refused)


STEPS = st.one_of(
    st.tuples(st.just("evict"), st.integers(-1, SLOTS), st.integers(0, SLOT), st.integers(0, 65)),
    st.tuples(st.just("batch"), st.integers(-1, SLOTS), st.integers(0, SLOT), st.integers(0, 65)),
    st.tuples(st.just("refill"), st.integers(-1, SLOTS), st.integers(38, 50), st.integers(0, SLOT)),
    st.tuples(st.just("lease"), st.integers(0, SLOTS)),
    st.tuples(st.just("release")),
    st.tuples(st.just("line"), st.integers(0, SLOTS)),
    st.tuples(st.just("damage"), st.integers(0, 2), st.integers(0, SLOT - 1), st.integers(0, 255)),
    st.tuples(st.just("open"), st.integers(0, 2)),
    st.tuples(st.just("shut")),
)


def done(held: Held, verb: str, *how: int) -> object:
    match verb, how:
        case "evict", (slot, length, tokens):
            return answered(lambda: held.evict(slot, tokens=tokens, payload=DATA[:length]))
        case "batch", (slot, length, tokens):
            columns = [Evict(n % SLOTS, KEY, TAG, 1, DATA[n : n + 300]) for n in range(3)]
            columns.insert(2, Evict(slot, KEY, TAG, tokens, DATA[:length]))
            return answered(lambda: held.window.evict_batch(columns))
        case "refill", (slot, sequence, room):
            names = [(KEY, TAG), (KEY, TAG), (TAG, TAG), (KEY, KEY)]
            slots = [slot, 0, 1, 2]
            wanted = [Wanted(at, Column(*name, sequence)) for at, name in zip(slots, names, strict=True)]
            places = [memoryview(bytearray(room or 1)) for _ in wanted]
            found = answered(lambda: held.window.refill(wanted, places))
            kinds = [type(one) for one in found] if isinstance(found, list) else None
            return found, kinds, [bytes(one) for one in places]
        case "lease", (slot,):
            held.leased[slot] = 1
        case "release", ():
            held.leased.clear()
        case "line", (slots,):
            held.arena.slots = slots
            held.window.follow(held.arena)
        case "damage", (slot, at, value):
            held.arena.extents[0].view[slot * held.arena.slot_bytes + at] = value
        case "open", (slot,):
            seal.open_slot(held.arena.extents[0].view[slot * held.arena.slot_bytes :], 39)
        case _:
            held.window.shut()
    return None


@given(st.lists(STEPS, max_size=12))
def test_whatever_is_done_both_answer_and_leave_the_same(steps: list[tuple[Any, ...]]) -> None:
    both = [Held(PYTHON), Held(compiled())]
    for verb, *how in steps:
        answers = [done(held, verb, *how) for held in both]
        assert answers[0] == answers[1]
        assert both[0].state() == both[1].state()
    for held in both:
        held.close()


def test_what_an_evict_leaves_is_a_column_with_its_number(held: Held) -> None:
    assert [held.evict(slot) for slot in (0, 4)] == [41, 42]
    assert (held.window.number, held.words[0]) == (42, 42)
    found = seal.verify(held.arena.slot(4), Column(KEY, TAG, 42))
    assert isinstance(found, Header)
    assert (found.tokens, found.length) == (64, 1000)


def test_every_miss_has_its_reason(held: Held) -> None:
    for slot in range(SLOTS - 1):
        held.evict(slot)
    seal.open_slot(held.arena.slot(1), 50)
    held.arena.slot(2)[100] ^= 1
    wanted = [Column(KEY, TAG, 41 + slot) for slot in range(SLOTS)]
    wanted[3] = wanted[3]._replace(sequence=9)
    places = [memoryview(bytearray(1000)) for _ in wanted]
    found = held.window.refill(list(map(Wanted, range(SLOTS), wanted)), places)
    assert found is not None
    assert isinstance(found[0], Header)
    assert places[0] == DATA[:1000]
    assert found[1:] == [Miss.TORN, Miss.CORRUPT, Miss.STALE, Miss.ABSENT]
    foreign = Wanted(0, Column(KEY, KEY, 41))
    assert held.window.refill([foreign], places[:1]) == [Miss.FOREIGN]
    assert held.window.refill([foreign._replace(slot=2**70)], places[:1]) == [Miss.ABSENT]


def test_above_the_line_an_evict_counts_and_nothing_else(held: Held) -> None:
    assert held.evict(SLOTS, payload=None, tokens=None) == 41
    assert held.evict(2**70) == 42
    assert held.words[0] == 42


def test_only_a_slot_that_is_read_is_left_alone(held: Held) -> None:
    held.leased[3] = 1
    assert held.evict(3) is None
    assert held.window.evict_batch([Evict(0, KEY, TAG, 64, DATA[:9])]) is None
    assert (held.window.number, held.words[0]) == (40, 40)
    assert held.evict(2) == 41
    del held.leased[3]
    assert held.evict(3) == 42


def test_of_a_batch_that_breaks_off_the_first_columns_count(held: Held) -> None:
    good = Evict(0, KEY, TAG, 64, DATA[:9])
    with pytest.raises(ValueError, match="1 to 64 tokens, not 65"):
        held.window.evict_batch([good, good._replace(slot=1), good._replace(tokens=65), good])
    assert (held.window.number, held.words[0]) == (42, 42)
    assert held.window.evict_batch([]) == 42


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"slot": -1}, IndexError, "slot -1 of 5"),
    ({"slot": -(2**70)}, IndexError, "slot -1180591620717411303424 of 5"),
    ({"slot": "1"}, TypeError, "."),
    ({"key": b"short"}, ValueError, "a key has 16 bytes"),
    ({"tag": b"short"}, ValueError, "a key has 16 bytes"),
    ({"tokens": 0}, ValueError, "1 to 64 tokens, not 0"),
    ({"tokens": "64"}, TypeError, "."),
    ({"payload": DATA[:0]}, ValueError, "not 0"),
    ({"payload": DATA[: SLOT - 63]}, ValueError, "4033 bytes does not fit a slot of 4096"),
    ({"payload": 7}, TypeError, "."),
]


@pytest.mark.parametrize(("wrong", "kind", "why"), WRONG)
def test_what_is_wrong_is_refused_and_holds_nothing_up(
    held: Held, wrong: dict[str, Any], kind: type[Exception], why: str
) -> None:
    with pytest.raises(kind, match=why):
        held.evict(**wrong)
    assert (held.window.number, held.words[0], held.lock.locked()) == (40, 40, False)
    assert held.evict() == 41


def test_places_that_do_not_fit_are_refused(held: Held) -> None:
    number = held.evict()
    assert number is not None
    wanted = [Wanted(0, Column(KEY, TAG, number))]
    with pytest.raises(ValueError, match="one place for each column"):
        held.window.refill(wanted, [])
    with pytest.raises(ValueError, match="1000 bytes does not fit 999"):
        held.window.refill(wanted, [memoryview(bytearray(999))])
    for wrong in ([7], [None], 7):
        with pytest.raises(TypeError):
            held.window.refill(wrong, [memoryview(bytearray(1000))])  # type: ignore[arg-type]


def test_a_window_follows_its_arena_and_keeps_nothing_of_what_is_gone(held: Held) -> None:
    held.evict(4)
    gone = held.arena.extents[1]
    held.arena.slots = 3
    held.window.follow(held.arena)
    assert held.evict(4) == 42  # above the line
    [dropped] = held.arena.drop()
    assert dropped is gone
    dropped.close()
    memory = weakref.ref(dropped.map)
    held.window.follow(held.arena)
    del dropped, gone
    gc.collect()
    assert memory() is None
    held.arena.grow(7)
    held.window.follow(held.arena)
    assert held.evict(6) == 43
    assert isinstance(seal.verify(held.arena.slot(6), Column(KEY, TAG, 43)), Header)


def test_once_it_is_shut_it_takes_nothing_gives_nothing_and_keeps_nothing_mapped(held: Held) -> None:
    number = held.evict()
    held.window.shut()
    held.window.shut()
    held.window.follow(held.arena)
    assert held.evict() is None
    assert held.window.evict_batch([]) is None
    assert (
        held.window.refill([Wanted(0, Column(KEY, TAG, number or 0))], [memoryview(bytearray(1000))])
        is None
    )
    assert held.window.number == 41
    maps = [extent.map for extent in held.arena.extents]
    held.arena.close()
    assert all(one.closed for one in maps)
    held.words.release()


def test_only_an_arena_can_be_followed() -> None:
    held = Held(compiled())
    small = Arena(SLOT, held.arena.extents)
    for attribute, value, kind in (
        ("slots", "many", TypeError),
        ("slots", -1, ValueError),
        ("slot_bytes", 2 * SLOT, ValueError),
        ("slot_bytes", 0, ValueError),
        ("extents", 7, TypeError),
        ("extents", [7], AttributeError),
        ("extents", held.arena.extents * 40, ValueError),
    ):
        before = getattr(small, attribute)
        setattr(small, attribute, value)
        with pytest.raises(kind):
            held.window.follow(small)
        setattr(small, attribute, before)
    assert held.evict(4) == 41  # as if nothing had happened
    with pytest.raises(ValueError, match="word of eight bytes"):
        type(held.window)(held.lock, {}, bytearray(7), 0)  # type: ignore[call-arg]
    held.close()


def test_one_thread_evicts_while_others_read_and_the_line_moves(held: Held) -> None:
    """Nobody ever sees anything but a whole column of the number that is wanted, or a miss."""
    held.close()
    held.arena = Arena.allocate(1 << 18, SLOTS)
    held = Held(held.mover, held.arena)
    length, stop = (1 << 18) - 64, threading.Event()
    wrong: list[object] = []
    seen = [0]

    def read() -> None:
        place = memoryview(bytearray(length))
        while not stop.is_set():
            number = held.window.number
            slot = number % SLOTS
            answer = held.window.refill([Wanted(slot, Column(KEY, TAG, number))], [place])
            if answer is None or isinstance(answer[0], Header):
                seen[0] += answer is not None
                if answer and place != DATA[number : number + length]:
                    wrong.append(number)
            elif answer[0] in (Miss.FOREIGN, Miss.CORRUPT):
                wrong.append(answer)

    def move_the_line() -> None:
        while not stop.is_set():
            for slots in (3, SLOTS):
                with held.lock:
                    held.arena.slots = slots
                    held.window.follow(held.arena)

    threads = [threading.Thread(target=read) for _ in range(2)]
    threads.append(threading.Thread(target=move_the_line))
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + 60
        while (held.window.number < 400 or seen[0] < 10) and time.monotonic() < until:
            number = held.window.number + 1
            assert held.evict(number % SLOTS, payload=DATA[number : number + length]) == number
        assert seen[0] >= 10
        with held.lock:  # as a client does that is closed while others read
            held.window.shut()
        assert held.evict() is None
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    held.close()
