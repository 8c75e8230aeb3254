"""The benchmark of hit rates: its simulators agree with the policies; it says so when it lacks data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import generated, hitrate, simulators
from benchmarks.harness import traces_folder
from swdriver_shim.cache.displacement import POLICIES
from swdriver_shim.replay.traces import Request

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=60)


def requests_of(prompts: list[list[int]]) -> list[Request]:
    """A block is what it holds and all that precedes it."""
    names: dict[tuple[int, ...], int] = {}
    made = []
    for second, prompt in enumerate(prompts):
        prefixes = [tuple(prompt[: depth + 1]) for depth in range(len(prompt))]
        blocks = tuple(names.setdefault(prefix, len(names)) for prefix in prefixes)
        made.append(Request(float(second), "s", blocks, 64, 64 * len(blocks), 1, "made up"))
    return made


@given(PROMPTS, st.integers(6, 20))
def test_lru_is_the_textbooks_lru(prompts: list[list[int]], size: int) -> None:
    requests = requests_of(prompts)
    blocks = [request.blocks for request in requests]
    ours = hitrate.replay(POLICIES["lru"](), size, requests)
    assert ours == simulators.plain(blocks, simulators.Lru(size))


@given(PROMPTS, st.integers(1, 20), st.sampled_from(sorted(hitrate.ALL)))
def test_nobody_is_better_than_the_optimum(prompts: list[list[int]], size: int, name: str) -> None:
    requests = requests_of(prompts)
    blocks = [request.blocks for request in requests]
    best = simulators.optimum(blocks, size)
    assert hitrate.replay(hitrate.ALL[name](), size, requests) <= best
    assert simulators.plain(blocks, simulators.Arc(size)) <= best


@given(PROMPTS, st.integers(1, 20))
def test_who_knows_who_comes_back_is_between_lru_and_the_optimum(
    prompts: list[list[int]], size: int
) -> None:
    blocks = [request.blocks for request in requests_of(prompts)]
    hits = simulators.who_comes_back(blocks, size)
    assert simulators.plain(blocks, simulators.Lru(size)) <= hits <= simulators.optimum(blocks, size)


def test_who_knows_who_comes_back_does_not_know_when() -> None:
    """Of three blocks in turns, with room for two, it drops the one that is wanted next, as LRU does."""
    blocks = [(1,), (2,), (3,)] * 3
    assert simulators.plain(blocks, simulators.Lru(2)) == 0
    assert simulators.who_comes_back(blocks, 2) == 2  # of the last three, which never come back
    assert simulators.optimum(blocks, 2) == 4


@given(PROMPTS, st.sampled_from(sorted(hitrate.ALL)))
def test_with_room_for_all_every_block_seen_before_is_hit(prompts: list[list[int]], name: str) -> None:
    trace = hitrate.Trace("made up", requests_of(prompts), {})
    hits = hitrate.replay(hitrate.ALL[name](), 1000, trace.requests)
    assert trace.share(hits) == pytest.approx(trace.unbounded)
    assert hits == simulators.optimum(trace.blocks, 1000)


@given(st.lists(st.integers(0, 9), max_size=200), st.integers(1, 6))
def test_arc_never_holds_more_than_it_may(blocks: list[int], size: int) -> None:
    cache = simulators.Arc(size)
    for block in blocks:
        cache.touch(block)
        assert block in cache
        assert sum(block in cache for block in range(10)) <= size


def test_without_traces_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["hitrate", "--traces", str(tmp_path / "nowhere")])
    assert hitrate.main() == 1
    assert "Say where they are: --traces DIR or TRACES_DIR" in capsys.readouterr().err


def test_the_published_figures_of_lru_come_out() -> None:
    folder = traces_folder()
    if not (folder / "conversation.jsonl").exists():
        pytest.skip(f"no traces in {folder}; TRACES_DIR says where they are")
    [trace] = hitrate.load(folder, quick=True, only=["conversation"])
    hits = hitrate.replay(POLICIES["lru"](), 10_000, trace.requests)
    assert trace.share(hits) == pytest.approx(0.211, abs=0.001)
    assert trace.unbounded == pytest.approx(0.366, abs=0.001)


def test_a_trace_that_there_is_not_is_named(tmp_path: Path) -> None:
    sessions = tmp_path / "agent-sessions"
    sessions.mkdir()
    line = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}'
    (tmp_path / "conversation.jsonl").write_text(line)
    for name in ("one", "other"):
        asked = '{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}'
        (sessions / f"{name}.json").write_text(f'{{"block_size": 64, "requests": [{asked}]}}')
    with pytest.raises(FileNotFoundError, match="There is no trace 'drifft'"):
        hitrate.load(tmp_path, quick=True, only=["drifft"])


@pytest.fixture(scope="module")
def traces() -> list[list[Request]]:
    """Of each variant that is generated."""
    return [one.requests() for one in generated.variants()]


def test_generated_traces_are_the_same_every_time_and_none_judges_by_what_was_chosen_by(
    traces: list[list[Request]],
) -> None:
    assert [one.requests() for one in generated.variants()] == traces
    for one, requests in zip(generated.variants(), traces, strict=True):
        assert requests == sorted(requests, key=lambda request: request.at_s), one.name
    chosen_by, judges = (
        {one.name: one.seed for one in generated.variants() if one.judges is each}
        for each in (False, True)
    )
    assert chosen_by.keys() == judges.keys()
    assert not set(chosen_by.values()) & set(judges.values())


def test_each_request_of_a_generated_trace_is_a_path_of_a_forest(traces: list[list[Request]]) -> None:
    """A block always has the same block before it."""
    for one, requests in zip(generated.variants(), traces, strict=True):
        before: dict[int, int] = {}
        for request in requests:
            for parent, block in zip((0, *request.blocks), request.blocks, strict=False):
                assert before.setdefault(block, parent) == parent, one.name
