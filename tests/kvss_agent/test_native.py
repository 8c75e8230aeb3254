"""The native mover does what the Python mover does, or there is none and a reason why."""

from __future__ import annotations

import logging
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvss_agent import native
from kvss_agent.client import SharedClient
from kvss_agent.client.requests import Wanted
from kvss_agent.client.window import Window, window
from kvss_agent.mover import PYTHON
from kvss_agent.native import Unavailable, builder, loader, selection
from kvss_agent.native.builder import BUILDS_MAX
from kvss_agent.shard import seal
from tests.kvss_agent.compiled import COMPILER, STRICT, built
from tests.kvss_agent.plane import running
from tests.live import wait_until

LENGTH_MAX = 1 << 20
MARGIN = 64
DATA = memoryview(random.Random(2).randbytes(LENGTH_MAX + MARGIN))
# Where one algorithm ends and another begins, and where stores begin to go around the cache.
EDGES = sorted(
    {0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, LENGTH_MAX}
    | {block * 1024 + more for block in (1, 2, 3, 16, 64) for more in (-64, -63, -1, 0, 1, 63, 64, 65)}
)
COLUMN = seal.Column(key=bytes(range(16)), tag=b"organisation-001", sequence=1)


def room(length: int) -> memoryview:
    """Memory that is aligned as slots are, so that `room(…)[1:]` is surely not."""
    return memoryview(mmap.mmap(-1, max(length, 1)))[:length]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Built without a warning, and with everything that this machine can run."""
    return built(tmp_path_factory.mktemp("native"), STRICT)


@pytest.fixture(scope="module", params=["avx512", "avx2", "portable"])
def mover(request: pytest.FixtureRequest, compiled: Any) -> Iterator[Any]:
    """The native mover as another machine would run it."""
    levels = compiled.levels()
    if request.param not in levels:
        pytest.skip(f"this machine runs {', '.join(levels)} only")
    compiled._use(request.param)
    yield compiled
    compiled._use(levels[0])


@pytest.fixture
def fresh(tmp_path: Path, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which nothing has been built, and a process that uses nothing that is; skipped where
    nothing can be."""
    monkeypatch.setattr(selection, "_mover", PYTHON)
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("CC", COMPILER)
    monkeypatch.delenv("KVSS_NATIVE", raising=False)
    return tmp_path / "state" / "native"


def check_same(mover: Any, length: int, source_at: int, into_at: int) -> None:
    """Both movers give the same checksum and the same bytes, and touch nothing beside them."""
    source = DATA[source_at : source_at + length]
    expected = xxh3_64_intdigest(source)
    around = room(length + 2 * MARGIN + 64)
    into = around[into_at : into_at + length]
    for one in (PYTHON, mover):
        assert one.checksum(source) == expected
        for copy in (one.copy_in, one.copy_out):
            around[:] = bytes(len(around))
            assert copy(into, source) == expected
            assert into == source
            assert not any(around[:into_at])
            assert not any(around[into_at + length :])


@pytest.mark.parametrize("length", EDGES)
def test_every_edge_is_as_in_python(mover: Any, length: int) -> None:
    for source_at, into_at in ((0, 0), (1, 0), (0, 64), (0, 1), (63, 31)):
        check_same(mover, length, source_at, into_at)


@given(st.integers(0, LENGTH_MAX), st.integers(0, MARGIN), st.integers(0, MARGIN))
def test_any_length_anywhere_is_as_in_python(
    mover: Any, length: int, source_at: int, into_at: int
) -> None:
    check_same(mover, length, source_at, into_at)


READ_ONLY = memoryview(bytes(4096))
REFUSED: list[tuple[Callable[[], memoryview], memoryview, type[Exception], str]] = [
    (lambda: room(4095), DATA[:4096], ValueError, "into has 4095 bytes and source 4096"),
    (lambda: room(4097), DATA[:4096], ValueError, "into has 4097 bytes and source 4096"),
    (lambda: READ_ONLY, DATA[:4096], BufferError, "not writable"),
    (lambda: room(8192)[::2], DATA[:4096], BufferError, "not C-contiguous"),
    (lambda: room(4096), DATA[:8192:2], BufferError, "not C-contiguous"),
]


@pytest.mark.parametrize(("make", "source", "kind", "why"), REFUSED)
def test_what_cannot_be_copied_is_refused_before_a_byte_is_moved(
    compiled: Any, make: Callable[[], memoryview], source: memoryview, kind: type[Exception], why: str
) -> None:
    into = make()
    for copy in (compiled.copy_in, compiled.copy_out):
        with pytest.raises(kind, match=why):
            copy(into, source)
    assert not any(into)


def test_what_overlaps_is_refused(compiled: Any) -> None:
    memory = room(4096)
    for into, source in ((memory[1:3000], memory[:2999]), (memory[:2999], memory[1:3000])):
        with pytest.raises(ValueError, match="overlap"):
            compiled.copy_in(into, source)
    memory[:1000] = DATA[:1000]
    assert compiled.copy_in(memory[1000:2000], memory[:1000]) == xxh3_64_intdigest(DATA[:1000])


@pytest.mark.parametrize("arguments", [(), (room(1),), (room(1), DATA[:1], 3), ("a", "b"), (1, 2)])
def test_other_arguments_are_a_type_error(compiled: Any, arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        compiled.copy_in(*arguments)


def test_nothing_is_held_after_a_call(compiled: Any) -> None:
    into, source = bytearray(1000), bytearray(1000)
    compiled.copy_in(into, source)
    compiled.copy_out(into, source)
    compiled.checksum(source)
    with pytest.raises(ValueError, match="bytes"):
        compiled.copy_out(into, bytes(3))
    with pytest.raises(BufferError):
        compiled.copy_in(bytes(1000), source)
    into.clear()  # Python refuses that while somebody has the buffer
    source.clear()


@pytest.mark.parametrize("name", ["copy_in", "copy_out", "checksum"])
def test_others_run_while_bytes_are_moved(compiled: Any, name: str) -> None:
    """Nobody takes the interpreter away in this test, so who finds it busy moving was let in."""
    into, source = room(16 << 20), room(16 << 20)
    arguments = (source,) if name == "checksum" else (into, source)
    move = getattr(compiled, name)
    moving = seen = False

    def keep_moving() -> None:
        nonlocal moving
        until = time.monotonic() + 60
        while not seen and time.monotonic() < until:
            moving = True
            move(*arguments)
            moving = False

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread = threading.Thread(target=keep_moving)
        thread.start()
        while thread.is_alive():
            seen = seen or moving
            time.sleep(0.0001)
    finally:
        sys.setswitchinterval(before)
    assert seen


@pytest.mark.parametrize("length", [4096 + 17, 64 << 10])
def test_the_checksum_is_of_what_was_stored_even_if_the_source_changes(mover: Any, length: int) -> None:
    source, stop, rounds = room(length), threading.Event(), [0]
    faces = [room(length), DATA[:length]]

    def change() -> None:
        while not stop.is_set():
            for face in faces * 50:
                mover.copy_in(source, face)
            rounds[0] += 1

    changing = threading.Thread(target=change)
    changing.start()
    try:
        wait_until("the source is changing", lambda: rounds[0] > 0)
        into = room(length)
        for _ in range(500):
            assert mover.copy_in(into, source) == xxh3_64_intdigest(into)
            assert mover.copy_out(into, source) == xxh3_64_intdigest(into)
    finally:
        stop.set()
        changing.join()


@pytest.mark.parametrize("length", [1, 240, 241, 4096, 70_000])
def test_columns_are_sealed_checked_and_copied_by_either_mover(mover: Any, length: int) -> None:
    slot, into = room(length + seal.HEADER_BYTES), room(length)
    for writer, reader in ((mover, PYTHON), (PYTHON, mover), (mover, mover)):
        seal.write(slot, COLUMN, 64, DATA[:length], writer)
        assert isinstance(seal.verify(slot, COLUMN, reader), seal.Header)
        assert isinstance(seal.copy_out(slot, COLUMN, into, reader), seal.Header)
        assert into == DATA[:length]
        slot[-1] ^= 1
        assert seal.verify(slot, COLUMN, reader) is seal.Miss.CORRUPT
        assert seal.copy_out(slot, COLUMN, into, reader) is seal.Miss.CORRUPT


SLOT = 4096


class OneSlot:
    """An arena of one slot, which is its only extent too."""

    slots = 1
    slot_bytes = SLOT

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, SLOT)
        self.extents = [self]

    def slot(self, _: int) -> memoryview:
        return memoryview(self.map)

    def window(self, mover: Any, number: int) -> Window:
        made = window(threading.Lock(), {}, memoryview(bytearray(8)).cast("Q"), number, mover)
        made.follow(self)  # type: ignore[arg-type]
        return made


OTHERS = [
    COLUMN,
    COLUMN._replace(key=bytes(16)),
    COLUMN._replace(tag=bytes(16)),
    COLUMN._replace(sequence=2**64 - 1),
]


@given(
    length=st.integers(0, SLOT),
    tokens=st.integers(-1, 66),
    written=st.sampled_from(OTHERS),
    wanted=st.sampled_from(OTHERS),
    damage=st.lists(st.tuples(st.integers(0, SLOT - 1), st.integers(0, 255)), max_size=3),
    left_open=st.booleans(),
)
def test_a_whole_column_is_written_and_read_as_in_python(
    compiled: Any,
    length: int,
    tokens: int,
    written: seal.Column,
    wanted: seal.Column,
    damage: list[tuple[int, int]],
    left_open: bool,  # noqa: FBT001 - Hypothesis passes it by name
) -> None:
    """Every byte of the slot, every answer and every refusal is the same."""
    slots, answers = [], []
    for one in (PYTHON, compiled):
        arena, into = OneSlot(), room(SLOT)
        slot = arena.slot(0)
        through = arena.window(one, written.sequence - 1)
        answer: list[object] = []
        try:
            through.evict(0, written.key, written.tag, tokens, DATA[:length])
        except ValueError as refused:
            answer.append(str(refused))
        if left_open:
            seal.open_slot(slot, 7)
        for at, value in damage:
            slot[at] = value
        answer.append(seal.verifier(one)(slot, wanted))
        answer += [through.refill([Wanted(0, wanted)], [into]), bytes(into)]
        slots.append(bytes(slot))
        answers.append(answer)
    assert slots[0] == slots[1]
    assert answers[0] == answers[1]
    assert [type(one) for one in answers[0]] == [type(one) for one in answers[1]]


def test_a_column_that_is_none_and_places_that_are_too_small_are_refused(compiled: Any) -> None:
    for one in (PYTHON, compiled):
        arena = OneSlot()
        through = arena.window(one, 0)
        through.evict(0, COLUMN.key, COLUMN.tag, 64, DATA[:300])
        with pytest.raises(ValueError, match="300 bytes does not fit 299"):
            through.refill([Wanted(0, COLUMN)], [room(299)])
        with pytest.raises(ValueError, match="a key has 16 bytes"):
            through.evict(0, b"short", COLUMN.tag, 64, DATA[:300])
    for wrong in (None, (b"k" * 16, b"t" * 16), [1, 2, 3]):
        with pytest.raises(TypeError):
            compiled.verify_column(arena.slot(0), wrong)
    for sequence in (-1, 2**64):
        with pytest.raises(OverflowError):
            compiled.verify_column(arena.slot(0), COLUMN._replace(sequence=sequence))


@given(
    lengths=st.lists(st.integers(1, SLOT - 64), max_size=4),
    asked=st.sampled_from(OTHERS),
    opened=st.sampled_from(OTHERS),
    damage=st.lists(st.tuples(st.integers(0, SLOT - 1), st.integers(0, 255)), max_size=2),
    left_open=st.booleans(),
)
def test_columns_go_from_slot_to_slot_as_in_python(
    compiled: Any,
    lengths: list[int],
    asked: seal.Column,
    opened: seal.Column,
    damage: list[tuple[int, int]],
    left_open: bool,  # noqa: FBT001 - Hypothesis passes it by name
) -> None:
    """Every byte of both slots and every answer is the same; the damage is to the first column."""
    slots, answers = [], []
    for one in (PYTHON, compiled):
        transfers = []
        for number, length in enumerate(lengths):
            slot, into = room(SLOT), room(SLOT)
            seal.write(slot, COLUMN, number + 1, DATA[number : number + length])
            if left_open and number == 1:
                seal.open_slot(slot, 7)
            for at, value in damage if number == 0 else ():
                slot[at] = value
            seal.open_slot_for(into, opened.sequence, opened.tag)
            transfers.append(seal.Transfer(slot, into, asked))
        answers.append(seal.transfer_all(transfers, one))
        slots.append([(bytes(one.slot), bytes(one.into)) for one in transfers])
    assert answers[0] == answers[1]
    assert [type(one) for one in answers[0]] == [type(one) for one in answers[1]]
    assert slots[0] == slots[1]


def test_large_columns_go_from_slot_to_slot(mover: Any) -> None:
    length = LENGTH_MAX
    size = -(-(length + 64) // 4096) * 4096
    transfers = []
    for tokens in (1, 2, 3):
        slot, into = room(size), room(size)
        seal.write(slot, COLUMN, tokens, DATA[tokens : tokens + length])
        seal.open_slot_for(into, 9, COLUMN.tag)
        transfers.append(seal.Transfer(slot, into, COLUMN._replace(sequence=9)))
    transfers[1].slot[64 + length - 1] ^= 1
    found = seal.transfer_all(transfers, mover)
    assert [type(one) for one in found] == [seal.Header, seal.Miss, seal.Header]
    assert found[1] is seal.Miss.CORRUPT
    for one, tokens in ((transfers[0], 1), (transfers[2], 3)):
        assert isinstance(seal.verify(one.into, one.column), seal.Header)
        assert one.into[64 : 64 + length] == DATA[tokens : tokens + length]


def test_what_is_no_transfer_is_refused(compiled: Any) -> None:
    slot, into = room(SLOT), room(SLOT)
    for wrong, kind, why in (
        ([(slot, into)], TypeError, "a transfer is"),
        ([(slot, into[:-64], COLUMN)], ValueError, "slots of 4096 and 4032 bytes"),
        ([(slot, slot, COLUMN)], ValueError, "to itself"),
        ([(slot, READ_ONLY, COLUMN)], BufferError, "not writable"),
        ([(slot[:60], into[:60], COLUMN)], ValueError, "slots of 60 and 60 bytes"),
        ([(slot, into, COLUMN), (slot, into, None)], TypeError, "a column is"),
        (None, TypeError, "not iterable"),
    ):
        with pytest.raises(kind, match=why):
            compiled.transfer_columns(wrong)
    assert compiled.transfer_columns([]) == []
    assert not any(into)


def test_the_checksum_of_a_known_payload(mover: Any) -> None:
    assert mover.checksum(bytes(range(256)) * 16) == int.from_bytes(
        bytes.fromhex("51918707377c4beb"), "little"
    )


@pytest.mark.slow
def test_code_for_any_machine_compiles_without_a_warning_too(tmp_path: Path, compiled: Any) -> None:
    portable = built(tmp_path, f"{STRICT} -DTIDEGATE_PORTABLE")
    assert portable.levels() == ("portable",)
    check_same(portable, 5000, 1, 2)
    assert compiled.levels()[-1] == "portable"
    with pytest.raises(ValueError, match="no level avx512"):
        portable._use("avx512")


@pytest.mark.slow
def test_code_for_any_machine_is_used_only_where_it_is_insisted_on(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", f"{COMPILER} -DTIDEGATE_PORTABLE")
    assert native.best(build=True) is PYTHON
    mover = native.load()
    assert mover is not None
    monkeypatch.setenv("KVSS_NATIVE", "require")
    assert native.best() is mover


def test_without_a_compiler_there_is_a_reason_said_once_and_the_python_mover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "no-compiler"
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", str(missing))
    monkeypatch.delenv("KVSS_NATIVE", raising=False)
    with caplog.at_level(logging.INFO, loader.__name__):
        assert native.load(build=True) is None
        assert native.load(build=True) is None
        assert native.best(build=True) is PYTHON
    reasons = [record.getMessage() for record in caplog.records if record.name == loader.__name__]
    assert len(reasons) == 1
    assert f"there is no compiler: {missing}: No such file or directory" in reasons[0]
    with pytest.raises(Unavailable, match="there is no compiler"):
        native.require(build=True)


def test_nothing_is_compiled_unasked(fresh: Path) -> None:
    assert native.load() is None
    assert native.best() is PYTHON
    assert not fresh.exists()
    with pytest.raises(Unavailable, match="has not been built yet"):
        native.require()


@pytest.mark.slow
def test_what_was_built_is_used_even_without_a_compiler(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = native.build()
    assert path.parent == fresh
    monkeypatch.setenv("CC", "/nonexistent")
    for build in (False, True):
        loaded = native.load(build=build)
        assert loaded is not None
        assert loaded.__file__ == str(path)
        assert (native.best(build=build) is loaded) == (loaded.levels() != ("portable",))


def change_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[str], str]
) -> None:
    """Have another file of this name compiled."""
    sources = tmp_path / "sources"
    shutil.copytree(builder.SOURCES, sources)
    (sources / name).write_text(change((sources / name).read_text()))
    monkeypatch.setattr(builder, "SOURCES", sources)


@pytest.mark.slow
def test_another_source_and_another_compiler_are_built_anew(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = native.build()
    stamp = first.stat().st_mtime_ns
    assert native.build() == first
    assert first.stat().st_mtime_ns == stamp
    monkeypatch.setenv("CC", f"{COMPILER} -g0")
    assert native.build() != first
    monkeypatch.setenv("CC", COMPILER)
    change_sources(tmp_path, monkeypatch, "module.c", lambda text: text + "/* changed */\n")
    assert native.load() is None
    assert native.build() != first


@pytest.mark.slow
def test_old_builds_do_not_pile_up(fresh: Path) -> None:
    fresh.mkdir(parents=True)
    for number in range(BUILDS_MAX + 3):
        old = fresh / f"old-{number}.so"
        old.touch()
        os.utime(old, (number, number))
    path = native.build()
    kept = {f"old-{number}.so" for number in range(4, BUILDS_MAX + 3)} | {path.name}
    assert {left.name for left in fresh.iterdir()} == kept


@pytest.mark.slow
def test_a_source_that_does_not_compile_is_a_reason_and_leaves_nothing(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_sources(tmp_path, monkeypatch, "module.c", lambda _: "this is not C\n")
    with pytest.raises(Unavailable, match=r"failed: .*error"):
        native.require(build=True)
    assert list(fresh.iterdir()) == []


@pytest.mark.slow
def test_a_mover_that_is_wrong_is_not_used(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_sources(
        tmp_path,
        monkeypatch,
        "kernels.c",
        lambda text: text.replace("85EBCA87", "85EBCA85"),
    )
    with pytest.raises(Unavailable, match="wrong about 241 bytes"):
        native.require(build=True)
    assert native.best(build=True) is PYTHON


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 4096, 0.5])
def test_a_build_that_was_cut_off_is_not_loaded_and_made_anew(fresh: Path, left: float) -> None:
    """To load one kills the process. A power cut may leave it so, in its place."""
    path = native.build()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(left * len(whole)) if left < 1 else int(left)])
    with pytest.raises(Unavailable, match="has not been built yet"):
        native.require()
    assert native.require(build=True).__file__ == str(path)
    assert path.read_bytes() == whole


@pytest.mark.slow
def test_a_build_of_another_user_is_not_loaded(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.build()
    if os.geteuid() != 0:
        pytest.skip("only root may give a file to somebody else")
    os.chown(path, 12_345, -1)
    with pytest.raises(Unavailable, match="has not been built yet"):
        native.require()
    os.chown(path.parent, 12_345, -1)
    for build in (False, True):
        with pytest.raises(Unavailable, match="belongs to another user"):
            native.require(build=build)


def test_a_compiler_that_is_no_command_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", '"')
    with pytest.raises(Unavailable, match="CC is no command"):
        native.require(build=True)


def test_a_state_directory_that_cannot_be_made_is_a_reason(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", "/dev/null/state")
    with pytest.raises(Unavailable, match=r"^/dev/null/state.*: Not a directory"):
        native.require(build=True)


@pytest.mark.slow
def test_it_can_be_turned_off_and_insisted_on(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSS_NATIVE", "require")
    with pytest.raises(Unavailable, match="has not been built yet"):
        native.best()
    assert native.best(build=True) is native.load()
    monkeypatch.setenv("KVSS_NATIVE", "off")
    assert native.best(build=True) is PYTHON
    assert native.load(build=True) is None
    monkeypatch.setenv("KVSS_NATIVE", "perhaps")
    with pytest.raises(ValueError, match="one of auto, off, require, not perhaps"):
        native.best()


def unpacked_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> Path:
    """The build of a wheel, changed, beside the sources that it was made of."""
    change_sources(tmp_path, monkeypatch, "module.c", str)
    path = builder.build_for_wheel(builder.SOURCES)
    change(path)
    return path


@pytest.mark.slow
def test_the_build_of_a_wheel_is_used_first_and_needs_no_compiler(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unpacked_wheel(tmp_path, monkeypatch, Path.stat)
    monkeypatch.setenv("CC", "/nonexistent")
    assert native.require().__file__ == str(path)
    assert native.require(build=True).__file__ == str(path)
    assert not fresh.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.write_bytes(b"no machine code"), "it was built but cannot be loaded"),
        (
            lambda path: path.rename(path.with_name("cpython-39-0123456789abcdef.wheel.so")),
            "cpython-39-0123456789abcdef.wheel.so is of another Python or of other sources",
        ),
    ],
)
def test_a_build_of_a_wheel_that_does_not_fit_is_said_and_another_is_made(
    fresh: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], object],
    why: str,
) -> None:
    monkeypatch.setattr(loader, "_logged", set())
    caplog.set_level(logging.INFO, loader.__name__)
    unpacked_wheel(tmp_path, monkeypatch, change)
    assert native.load() is None
    assert native.require(build=True).__file__ == str(native.build())
    assert native.build().parent == fresh
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith(f"The compiled mover of the wheel is not used: {why}")
    assert said[1].startswith("Bytes are moved by the Python mover: it has not been built yet")


def start_building(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", native.__name__, *arguments],
        cwd=builder.SOURCES.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_several_may_build_at_once_and_all_are_told_where_it_is(fresh: Path, compiled: Any) -> None:
    told = [process.communicate() for process in [start_building() for _ in range(2)]]
    (path,) = fresh.iterdir()
    assert told == [(f"Compiled mover for {compiled.levels()[0]}: {path}\n", "")] * 2


def test_the_command_says_why_there_is_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nonexistent")
    process = start_building()
    reason = "there is no compiler: /nonexistent: No such file or directory"
    assert process.communicate() == ("", f"No compiled mover: {reason}\n")
    assert process.returncode == 1
    helping = start_building("--help")
    assert "KVSS_NATIVE" in helping.communicate()[0]
    assert helping.returncode == 0


REASON = ("Because of %s", "a reason of the test")


def test_why_is_told_once_though_many_ask_at_the_same_time(caplog: pytest.LogCaptureFixture) -> None:
    class Asking(logging.Filter):
        """Another thread asks while the first one is being told."""

        def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 - as `logging` has it
            if not asking:
                asking.append(threading.Thread(target=loader._log_once, args=REASON))
                asking[0].start()
                asking[0].join(30)
            return True

    asking: list[threading.Thread] = []
    ask = Asking()
    loader._log.addFilter(ask)
    try:
        with caplog.at_level(logging.INFO, loader._log.name):
            loader._log_once(*REASON)
    finally:
        loader._log.removeFilter(ask)
    assert [record.getMessage() for record in caplog.records] == ["Because of a reason of the test"]


class User:
    """What moves bytes with whatever mover it was told last."""

    def __init__(self, mover: Any) -> None:
        self.mover = mover

    def use_mover(self, mover: Any) -> None:
        self.mover = mover


@pytest.mark.slow
def test_a_process_switches_to_the_mover_that_it_builds_in_the_background(
    fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, loader.__name__)
    assert native.current() is PYTHON
    user: Any = User(None)
    native.follow(user)
    assert user.mover.name == "python"
    native.build_in_background()
    # The compiler runs at low priority: a busy machine gives it little.
    wait_until("it has switched", lambda: user.mover is not PYTHON, 110)
    assert user.mover is native.current() is native.load()
    assert user.mover.name == "compiled"
    said = [record.getMessage() for record in caplog.records if record.name == loader.__name__]
    assert said[-1] == f"Bytes are moved by the compiled mover: {user.mover.__file__}"
    native.build_in_background()  # there is nothing left to do
    assert "build mover" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_process_switches_to_the_mover_that_another_process_has_built(fresh: Path) -> None:
    user = User(PYTHON)
    native.follow(user)
    assert native.current() is PYTHON
    process = start_building()
    process.communicate()
    assert process.returncode == 0
    assert native.current() is user.mover is native.load()


def test_a_build_that_fails_is_one_line_and_the_python_mover_stays(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "/nonexistent")
    native.build_in_background()
    wait_until("it has failed", lambda: any(one.levelname == "WARNING" for one in caplog.records))
    [record] = [one for one in caplog.records if one.levelname == "WARNING"]
    assert record.getMessage() == (
        "The compiled mover cannot be built, the Python mover stays: "
        "there is no compiler: /nonexistent: No such file or directory"
    )
    assert native.current() is PYTHON


def test_nothing_is_built_in_the_background_where_it_is_off(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSS_NATIVE", "off")
    native.build_in_background()
    assert "build mover" not in {thread.name for thread in threading.enumerate()}
    assert not fresh.exists()


@pytest.mark.slow
def test_it_is_built_before_the_start_where_it_is_required(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSS_NATIVE", "require")
    native.build_in_background()
    assert native.current() is native.load()
    monkeypatch.setenv("TIDEGATE_STATE_DIR", "/dev/null/state")
    with pytest.raises(Unavailable):
        native.build_in_background()


@pytest.mark.slow
def test_what_a_killed_builder_has_left_is_removed(fresh: Path) -> None:
    left = fresh / "build-abandoned"
    left.mkdir(parents=True)
    (left / "half.so").touch()
    path = native.build()
    assert list(fresh.iterdir()) == [path]


def test_a_shard_in_use_goes_on_with_another_mover(compiled: Any, tmp_path: Path) -> None:
    """Evicts are numbered on, refills find what was there, also while it switches to and fro."""
    with running(tmp_path) as plane:
        plane.add("s", slots=8, payload=4096)
        with plane.client("shm") as shard:
            assert isinstance(shard, SharedClient)
            payload, into = DATA[:4096], room(4096)
            done = threading.Event()

            def switch() -> None:
                while not done.is_set():
                    for mover in (compiled, PYTHON):
                        shard.use_mover(mover)

            thread = threading.Thread(target=switch)
            thread.start()
            try:
                for number in range(1, 2001):
                    key = number.to_bytes(16, "big")
                    assert shard.evict(number % 8, key, COLUMN.tag, 64, payload) == number
                    column = seal.Column(key, COLUMN.tag, number)
                    [found] = shard.refill([Wanted(number % 8, column)], [into])
                    assert isinstance(found, seal.Header)
                    assert into == payload
            finally:
                done.set()
                thread.join()


def block_memory(count: int, size: int) -> tuple[memoryview, int, int, int]:
    """Blocks of a layer that are 8 bytes apart, behind 3 bytes of something else."""
    return room(3 + count * (size + 8) - 8), 3, size + 8, count


@pytest.mark.parametrize("size", [1, 1000, 32 << 10])
def test_columns_are_copied_into_blocks_and_out_of_them(mover: Any, size: int) -> None:
    layers = [block_memory(5, size) for _ in range(2)]
    pieces = [
        [(layer, block, 0, (2 * layer + block) * size, size) for layer in (0, 1) for block in (0, 1)]
    ]
    source, back = DATA[: 4 * size], room(4 * size)
    mover.scatter_columns(layers, pieces, [(0, (4, 2), source)])
    for layer, (memory, first, stride, count) in enumerate(layers):
        for block in range(count):
            at = first + block * stride
            place = (2 * layer + (block == 2)) * size
            there = source[place : place + size] if block in (2, 4) else bytes(size)
            assert memory[at : at + size] == there
            assert not any(memory[at + size : at + stride])
    mover.gather_columns(layers, pieces, [(0, (4, 2), back)])
    assert back == source


def test_a_block_that_is_to_be_left_is_left(mover: Any) -> None:
    layer = block_memory(3, 1000)
    pieces = [[(0, 0, 0, 0, 1000), (0, 1, 0, 1000, 1000)]]
    mover.scatter_columns([layer], pieces, [(0, (-1, 1), DATA[:2000])])
    assert not any(layer[0][: 3 + 1008])
    assert layer[0][3 + 1008 : 3 + 2008] == DATA[1000:2000]
    with pytest.raises(IndexError):
        mover.gather_columns([layer], pieces, [(0, (-1, 1), room(2000))])


@pytest.mark.parametrize(
    ("piece", "column", "error"),
    [
        ((0, 0, 0, 0, 10), (0, (3,), 10), IndexError),  # no such block
        ((0, 0, 0, 0, 10), (0, (-2,), 10), IndexError),
        ((0, 1, 0, 0, 10), (0, (0,), 10), IndexError),  # of the unit
        ((0, 0, 0, 0, 10), (1, (0,), 10), IndexError),  # no such part
        ((1, 0, 0, 0, 10), (0, (0,), 10), ValueError),  # no such layer
        ((0, 0, 10, 0, 10), (0, (2,), 10), ValueError),  # behind the last block
        ((0, 0, 0, 1, 10), (0, (0,), 10), ValueError),  # behind the column
        ((0, 0, 0, -1, 10), (0, (0,), 10), ValueError),
        ((0, 0, -1, 0, 10), (0, (0,), 10), ValueError),
        ((0, 0, 0, 0, 0), (0, (0,), 10), ValueError),
    ],
)
def test_what_is_not_in_its_memory_is_refused_before_anything_is_copied(
    mover: Any, piece: tuple[int, ...], column: tuple[int, tuple[int, ...], int], error: type[Exception]
) -> None:
    layer = block_memory(3, 10)
    part, blocks, length = column
    right = [(0, 0, 0, 0, 10)]
    for copy in (mover.scatter_columns, mover.gather_columns):
        asked = room(length)
        asked[:] = DATA[:length]
        with pytest.raises(error):
            copy([layer], [right, [piece]], [(0, (1,), asked), (1 + part, blocks, asked)])
        assert not any(layer[0])
        assert asked == DATA[:length]


def test_layers_beyond_their_memory_are_refused(mover: Any) -> None:
    memory, first, stride, count = block_memory(3, 10)
    for wrong in [(memory, first, stride, count + 1), (memory, -1, stride, 1), (memory, 1, 0, 1)]:
        with pytest.raises(ValueError, match="are in its memory"):
            mover.scatter_columns([wrong], [[(0, 0, 0, 0, 10)]], [(0, (count,), room(10))])


def test_a_piece_so_far_behind_its_block_that_no_number_has_it_is_refused(mover: Any) -> None:
    """A stride is as large as it likes to be where there is one block."""
    memory, far = room(10), sys.maxsize
    for copy in (mover.scatter_columns, mover.gather_columns):
        with pytest.raises(ValueError, match="within its column and its block"):
            copy([(memory, 5, far, 1)], [[(0, 0, far - 1, 0, 1)]], [(0, (0,), room(1))])
