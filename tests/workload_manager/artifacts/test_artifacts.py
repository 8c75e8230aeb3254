"""The store of artifacts: the same inputs are made once, and what is damaged is made anew."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.live import wait_until
from workload_manager.artifact import Artifact, ArtifactStore, MemoryFacts, address
from workload_manager.single_flight import Cancelled, alone

INPUTS: dict[str, Any] = {"spec": {"model": "m"}, "files": {}}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def made(sha256: str, **inputs: Any) -> Artifact:
    memory = MemoryFacts(weights_bytes=1, prompt_bytes=2)
    return Artifact(sha256=sha256, inputs=inputs or INPUTS, configuration={"layers": 2}, memory=memory)


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_fields_does_not_matter_and_each_value_does(
    inputs: dict[str, Any], randomness: Any
) -> None:
    names = list(inputs)
    randomness.shuffle(names)
    assert address({name: inputs[name] for name in names}) == address(inputs)
    assert address({**inputs, "more": 1}) != address({**inputs, "more": 2})


def test_what_was_made_is_found_by_its_address(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    assert store.get(address(INPUTS)) is None
    first = store.get_or_make(INPUTS, made)
    assert store.get(first.sha256) == first
    assert store.get_or_make(INPUTS, lambda _: pytest.fail("it is there")) == first


@pytest.mark.parametrize("cut", [0, 10, 80, -1])
def test_a_damaged_one_is_made_anew(tmp_path: Path, cut: int) -> None:
    store = ArtifactStore(tmp_path)
    first = store.get_or_make(INPUTS, made)
    [file] = tmp_path.glob("sha256/*.json")
    raw = file.read_bytes()
    file.write_bytes(raw[:cut])
    assert store.get(first.sha256) is None
    assert store.get_or_make(INPUTS, made) == first
    assert file.read_bytes() == raw


def test_one_under_anothers_name_is_not_believed(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    first = store.get_or_make(INPUTS, made)
    other = address({"spec": {"model": "other"}, "files": {}})
    [file] = tmp_path.glob("sha256/*.json")
    os.link(file, file.with_name(f"{other}.json"))
    assert store.get(other) is None
    assert store.get(first.sha256) == first


def test_of_many_at_once_one_makes_it(tmp_path: Path) -> None:
    count, everybody = [0], threading.Barrier(6)

    def ask(_: int) -> Artifact:
        everybody.wait()
        return ArtifactStore(tmp_path).get_or_make(INPUTS, make)

    def make(sha256: str) -> Artifact:
        count[0] += 1
        return made(sha256)

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(ask, range(6)))
    assert count == [1]
    assert {one.sha256 for one in found} == {address(INPUTS)}


def test_who_waits_makes_it_when_the_first_fails_or_gives_up_when_it_is_cancelled(
    tmp_path: Path,
) -> None:
    store = ArtifactStore(tmp_path)
    (tmp_path / "sha256").mkdir()
    waits, cancelled = threading.Event(), threading.Event()

    def look() -> bool:
        waits.set()
        return cancelled.is_set()

    with ThreadPoolExecutor(1) as threads:
        with alone(tmp_path / "sha256" / f".{address(INPUTS)}.lock"):
            waiting = threads.submit(store.get_or_make, INPUTS, made, look)
            wait_until("it waits", waits.is_set)
            cancelled.set()
            with pytest.raises(Cancelled):
                waiting.result()
            cancelled.clear()
            waits.clear()
            waiting = threads.submit(store.get_or_make, INPUTS, made, look)
            wait_until("it waits", waits.is_set)
        assert waiting.result().sha256 == address(INPUTS), "the one before has ended without it"
