"""A holder that is late costs a fraction of a second, once, and no byte."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pytest

from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.fragments import Fragments
from kvss_agent.redundancy.layout import SLOTS
from kvss_agent.redundancy.parts import patience, promptness
from kvss_agent.redundancy.parts.patience import Hedges, Patience
from kvss_agent.redundancy.parts.promptness import Promptness
from kvss_agent.redundancy.parts.state import Slots
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Fault, Outgoing
from tests.kvss_agent.redundancy.holders import NAMESPACE, PART, SLOT
from tests.kvss_agent.redundancy.simulated import SimulatedHolder
from tests.live import wait_until

TAG = b"t" * 16
DATA = 2
PARITY_AT = DATA


class Impatient(Patience):
    """Whatever it takes is late, also where its thread began late."""

    def seconds(self, size: int) -> float:  # noqa: ARG002 - as `Patience` has it
        return 0.0


@dataclass
class Scene:
    """2+1 holders. One that hangs answers nothing before it is `released`: there is little patience with
    it, and with others as much as a busy machine may need."""

    holders: list[SimulatedHolder] = field(
        default_factory=lambda: [SimulatedHolder(str(place)) for place in range(DATA + 1)]
    )
    asked: Counter[tuple[int, str]] = field(default_factory=Counter)
    hanging: set[tuple[int, str]] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)
    contents: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        for place, holder in enumerate(self.holders):
            holder.before = lambda what, place=place: self._ask(place, what)  # type: ignore[misc]
        self.fragments = Fragments(ErasureCode(DATA, 1), self.holders, NAMESPACE, PART, SLOT)

    def _ask(self, place: int, what: str) -> None:
        self.asked[place, what] += 1
        if (place, what) in self.hanging:
            assert self.released.wait(60)

    def hang(self, place: int, what: str) -> None:
        self.hanging.add((place, what))
        setattr(self.promptness[place], f"{what}s", Impatient())

    def release(self) -> None:
        for one in self.promptness:
            one.recalls, one.refills = Patience(), Patience()
        self.released.set()

    def store(self, count: int) -> None:
        self.contents = [secrets.token_bytes(SLOT) for _ in range(count)]
        files = [
            Outgoing(name(number), [memoryview(bytearray(one))], lambda: True)
            for number, one in enumerate(self.contents)
        ]
        assert self.fragments.write(files) == [True] * count
        self.asked.clear()

    def read(self, numbers: Sequence[int], memories: Sequence[memoryview] = ()) -> list[memoryview]:
        memories = memories or [memoryview(bytearray(SLOT)) for _ in numbers]
        files = [(name(one), [its]) for one, its in zip(numbers, memories, strict=True)]
        assert self.fragments.read(files) == [SLOT] * len(files)
        for one, its in zip(numbers, memories, strict=True):
            assert its == self.contents[one]
        return list(memories)

    @property
    def promptness(self) -> list[Promptness]:
        return self.fragments.holders.promptness

    @property
    def is_idle(self) -> bool:
        return not any(one.in_use for one in self.holders) and not self.fragments._state.slots._late


def name(number: int) -> str:
    return Address(NAMESPACE, TAG, number.to_bytes(16), PART).name


@pytest.fixture(autouse=True)
def much_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of holders may have to wait for a processor. Who was late is not asked again meanwhile."""
    for name in ("LEAST_SECONDS", "FIRST_SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(patience, name, 20.0)
    monkeypatch.setattr(promptness, "PROBE_SECONDS", 3600.0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.release()
    wait_until("what is late ends", lambda: made.is_idle)
    assert not any(one.used_twice for one in made.holders), "a slot was used for two things at once"
    made.fragments.close()


def test_a_read_touches_data_alone_while_nobody_is_late(scene: Scene) -> None:
    scene.store(3)
    scene.read(range(3))
    assert (scene.asked[PARITY_AT, "recall"], scene.asked[PARITY_AT, "refill"]) == (0, 0)
    assert (scene.fragments.hedges, scene.fragments.parity_reads) == (0, 0)


@pytest.mark.parametrize("what", ["recall", "refill"])
def test_what_is_late_is_made_of_parity_and_its_holder_is_asked_last_from_then_on(
    scene: Scene, what: str
) -> None:
    scene.store(4)
    scene.hang(0, what)
    scene.read([0])  # it hangs all the while
    assert (scene.fragments.hedges, scene.fragments.parity_reads) == (1, 1)
    assert scene.fragments.late == ["0"]
    before = scene.asked[0, "recall"]
    scene.read([1, 2])
    assert scene.asked[0, "recall"] == before
    assert scene.fragments.hedges == 1, "nobody waited for it again"
    assert scene.fragments.incomplete == 0, "late is not lost"


def test_what_a_holder_turns_out_to_lack_when_nobody_waits_any_more_is_known(scene: Scene) -> None:
    scene.store(1)
    scene.hang(0, "recall")
    scene.read([0])
    scene.holders[0].files.clear()  # as if it had found them damaged
    assert scene.fragments.incomplete == 0
    scene.release()
    wait_until("it is known", lambda: scene.fragments.incomplete == 1)


def test_what_a_holder_lacks_that_is_only_probed_is_known(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promptness, "PROBE_SECONDS", 0.0)
    scene.store(1)
    scene.hang(0, "recall")
    scene.read([0])
    scene.released.set()
    wait_until("the late answer has come", lambda: scene.is_idle)
    assert scene.fragments.late == ["0"], "it has answered, but late"
    scene.holders[0].files.clear()
    scene.read([0])
    wait_until("it is known", lambda: scene.fragments.incomplete == 1)


def test_it_is_asked_as_before_when_a_probe_has_been_answered(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promptness, "PROBE_SECONDS", 0.0)
    scene.store(1)
    scene.hang(0, "recall")
    scene.read([0])
    scene.read([0])  # and probes, which hangs as well
    assert scene.fragments.late == ["0"]
    scene.release()

    def is_prompt() -> bool:
        scene.read([0])
        return not scene.fragments.late

    wait_until("a probe has been answered", is_prompt)
    wait_until("all have ended", lambda: scene.is_idle)
    parity = scene.asked[PARITY_AT, "recall"]
    scene.read([0])
    assert scene.asked[PARITY_AT, "recall"] == parity


def test_a_late_answer_writes_nothing_to_memory_that_means_something_else(scene: Scene) -> None:
    scene.store(2)
    scene.hang(0, "refill")
    (memory,) = scene.read([0])
    memory[:] = bytes(SLOT)  # as a slot that has another column by now
    scene.release()
    wait_until("the late answer has come", lambda: scene.is_idle)
    assert memory == bytes(SLOT)


def test_memory_is_read_into_again_while_a_late_answer_is_on_its_way(scene: Scene) -> None:
    scene.store(2)
    scene.hang(0, "refill")
    memories = scene.read([0])
    scene.hanging.clear()
    scene.read([1], memories)
    scene.release()
    wait_until("the late answer has come", lambda: scene.is_idle)
    assert memories[0] == scene.contents[1]


def test_all_slots_may_be_late_at_one_holder_and_reads_go_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "HEDGES_PER_FILE", 1.0)
    scene.store(SLOTS + 8)
    scene.hang(0, "recall")
    with ThreadPoolExecutor(4) as pool:  # all find out at once
        quarter = SLOTS // 4
        starts = [pool.submit(scene.read, range(at, at + quarter)) for at in range(0, SLOTS, quarter)]
        for one in starts:
            one.result(60)
    scene.read(range(SLOTS, SLOTS + 8))
    scene.release()
    wait_until("all have ended", lambda: scene.is_idle)


def test_a_slot_that_is_late_at_a_holder_waits_there_and_nowhere_else(scene: Scene) -> None:
    scene.store(2)
    scene.hang(0, "recall")
    scene.read([0])
    slots = scene.fragments._state.slots
    with slots.taken(SLOTS - 1) as taken:  # all that are not late
        assert not any(slots.late_calls(slot, 0) for slot in taken)
        scene.holders[1].files.clear()  # so that the late one is needed
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(scene.read, [1])
            wait_until("parity has been asked", lambda: scene.asked[PARITY_AT, "recall"] == 2)
            assert not reading.done()
            scene.release()
            reading.result(60)


def test_a_slow_cluster_is_not_asked_for_everything_twice(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.fragments._state.hedges, "_left", 1.0)
    scene.store(3)
    scene.hang(0, "recall")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(scene.read, range(3))
        wait_until("two wait for it", lambda: scene.fragments.hedges_over_budget == 2)
        assert not reading.done()
        scene.release()
        reading.result(60)
    assert scene.fragments.hedges == 1


def test_where_parity_is_late_as_well_what_comes_first_counts(scene: Scene) -> None:
    scene.store(1)
    scene.hang(0, "recall")
    scene.hang(PARITY_AT, "recall")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(scene.read, [0])
        wait_until("both are asked", lambda: scene.asked[PARITY_AT, "recall"] == 1)
        scene.release()
        reading.result(60)


def test_without_enough_that_answer_a_late_one_is_waited_for(scene: Scene) -> None:
    scene.store(1)
    scene.holders[1].is_alive = False
    scene.hang(0, "recall")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(scene.read, [0])
        wait_until("all are asked", lambda: scene.asked[PARITY_AT, "recall"] == 1)
        assert not reading.done()
        scene.release()
        reading.result(60)


def test_redundancy_that_is_closed_while_something_is_late_fails_the_read_and_ends(scene: Scene) -> None:
    scene.store(1)
    scene.holders[1].is_alive = False
    scene.hang(0, "recall")
    memory = memoryview(bytearray(SLOT))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(scene.fragments.read, [(name(0), [memory])])
        wait_until("all are asked", lambda: scene.asked[PARITY_AT, "recall"] == 1)
        scene.fragments.close()
        scene.release()
        with pytest.raises(Failed):
            reading.result(60)


def test_a_repair_beside_others_asks_one_holder_after_the_other(scene: Scene) -> None:
    """Who evicts meanwhile waits behind one of them."""
    scene.store(1)
    scene.holders[PARITY_AT].files.clear()
    others = {what: threading.Event() for what in ("recall", "refill")}
    together: dict[str, bool] = {}

    def first(what: str) -> None:
        if what in others:
            together[what] = others[what].wait(0.2)

    def second(what: str) -> None:
        if what in others:
            others[what].set()

    scene.holders[0].before, scene.holders[1].before = first, second
    assert scene.fragments.repair([name(0)], one_by_one=True) > SLOT
    assert together == {"recall": False, "refill": False}
    assert all(one.is_set() for one in others.values())
    scene.holders[0].files.clear()
    scene.read([0])


def test_a_repair_beside_others_asks_one_holder_after_the_other_for_several_files(scene: Scene) -> None:
    """Also where one of them is already read, and of another not all holders have been asked."""
    scene.store(2)
    for place, number in ((1, 0), (0, 1)):
        files = scene.holders[place].files
        del files[sorted(files)[number]]
    together: list[bool] = []

    def look(place: int, what: str) -> None:
        if what in ("recall", "refill"):
            time.sleep(0.05)  # so that whoever is asked meanwhile is seen
            together.append(any(one.in_use for one in scene.holders if one is not scene.holders[place]))

    for place, holder in enumerate(scene.holders):
        holder.before = partial(look, place)
    assert scene.fragments.repair([name(0), name(1)], one_by_one=True) > SLOT
    assert together
    assert not any(together)


def test_a_repair_beside_others_looks_at_one_holder_after_the_other(scene: Scene) -> None:
    """What each has, too, before anything is read."""
    scene.store(1)
    scene.holders[PARITY_AT].files.clear()
    together, looking, lock = list[int](), Counter[str](), threading.Lock()

    def look(what: str) -> None:
        with lock:
            looking[what] += 1
            together.append(looking[what])
        time.sleep(0.05)  # so that whoever is asked meanwhile is seen
        with lock:
            looking[what] -= 1

    for holder in scene.holders:
        holder.before = look
    assert scene.fragments.repair([name(0)], one_by_one=True) > SLOT
    assert max(together) == 1


def test_a_holder_is_asked_once_for_several_files_that_are_repaired(scene: Scene) -> None:
    scene.store(3)
    scene.holders[0].files.clear()
    assert scene.fragments.repair([name(0), name(1), name(2)]) > 3 * SLOT
    assert scene.asked == Counter(
        {(0, "recall"): 1, (0, "evict"): 1, (0, "spill"): 1}
        | {(place, what): 1 for place in (1, 2) for what in ("recall", "refill")}
    )
    scene.holders[1].files.clear()
    scene.read([0, 1, 2])


def test_a_bad_fragment_that_can_t_be_removed_keeps_no_other_file_from_being_repaired(
    scene: Scene,
) -> None:
    scene.store(2)
    its = scene.holders[PARITY_AT]
    bad, lost = sorted(its.files)
    its.files[bad].note += 1  # of another write
    del its.files[lost]

    def fail(what: str) -> None:
        if what == "delete":
            raise Failed(Fault.UNREACHABLE, "not now")

    its.before = fail
    assert scene.fragments.repair([name(0), name(1)]) > 2 * SLOT
    assert lost in its.files
    assert scene.fragments.repaired == 1
    assert scene.fragments.incomplete_at()[PARITY_AT] == 1


def test_slots_that_are_late_are_taken_last() -> None:
    slots, call = Slots(), Future[object]()
    with slots.taken(SLOTS) as taken:
        slots.keep_late(taken[0], 1, call)
    assert slots.late_calls(taken[0], 1) == [call]
    assert slots.late_calls(taken[0], 0) == []
    with slots.taken(SLOTS - 1) as others:
        assert taken[0] not in others
        with slots.taken(1, also_late=True) as left:
            assert left == [taken[0]]
    call.set_result(None)
    with slots.taken(SLOTS):
        assert slots.late_calls(taken[0], 1) == []


def test_patience_follows_size_and_what_a_holder_took_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LEAST_SECONDS", 0.01)
    monkeypatch.setattr(patience, "FIRST_SECONDS", 0.5)
    monkeypatch.setattr(patience, "MOST_SECONDS", 2.0)
    one = Patience()
    assert one.seconds(0) == one.seconds(1 << 30) == 0.5, "nothing is known yet"
    for _ in range(50):
        one.took(1_000_000, 0.1)
    assert one.seconds(1_000_000) == pytest.approx(0.1, rel=0.1)
    assert one.seconds(10_000_000) == pytest.approx(0.7, rel=0.1)
    assert one.seconds(1 << 30) == 2.0
    assert one.seconds(0) >= 0.01
    for _ in range(10):
        one.took(1_000_000, 0.3)
        one.took(1_000_000, 0.1)
    assert one.seconds(1_000_000) > 0.3, "it was as late as that before"


def test_hedges_are_earned_by_files_and_not_saved_without_end() -> None:
    hedges = Hedges()
    assert all(hedges.take() for _ in range(patience.HEDGES_MOST))
    assert not hedges.take()
    hedges.earn(19)
    assert [hedges.take(), hedges.take()] == [True, False]
    hedges.earn(1_000_000)
    assert sum(hedges.take() for _ in range(1000)) == patience.HEDGES_MOST


def test_one_probe_of_a_holder_is_under_way_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promptness, "PROBE_SECONDS", 0.0)
    one = Promptness()
    assert not one.begin_probe(), "it is not late"
    one.note_late()
    assert [one.begin_probe(), one.begin_probe()] == [True, False]
    one.end_probe()
    assert one.begin_probe()


def test_who_hangs_is_asked_after_who_is_slow_and_both_after_the_others() -> None:
    prompt, slow, hung = Promptness(), Promptness(), Promptness()
    for one in (slow, hung):
        one.note_late()
    slow.note_recalled(0, 30.0)
    assert sorted([hung, slow, prompt], key=lambda one: one.rank) == [prompt, slow, hung]
    hung.note_recalled(0, 0.0)
    assert not hung.is_late
    assert slow.is_late
