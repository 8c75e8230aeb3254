"""The connector's halves on real agents, for an engine that is a table of blocks: no vLLM is needed."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvss_agent.mover import PYTHON
from swdriver_shim.adapters.vllm import worker as worker_module
from swdriver_shim.adapters.vllm.blocks import (
    SKIP_BLOCK,
    Blocks,
    Layer,
    PlacedColumn,
    Shape,
    Unsupported,
    unit_tokens,
)
from swdriver_shim.adapters.vllm.orders import WorkerReport
from swdriver_shim.adapters.vllm.scheduling import shown_name
from swdriver_shim.adapters.vllm.worker import Save
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import USE_SECONDS_MAX
from swdriver_shim.data_plane.shard.columns import ViewColumn
from swdriver_shim.keys import Keys, Media
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tiers
from tests.kvss_agent.compiled import COMPILER, built
from tests.live import wait_until
from tests.swdriver_shim.block_engine import (
    FULL,
    HYBRID,
    C,
    FakeRequest,
    GroupOf,
    add,
    damage,
    engine,
    lose,
    request,
    some,
)
from tests.swdriver_shim.prompts import NAMESPACE
from tests.swdriver_shim.prompts import SECRET as ORG_SECRET
from tests.swdriver_shim.tiers import tier_requests


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return built(tmp_path_factory.mktemp("native"), COMPILER)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([16, 32, 48, 64, 96, 128, 176]),
    st.integers(0, 3),
    st.sampled_from(["python", "compiled"]),
)
def test_a_unit_is_cut_into_columns_and_put_together_again(
    compiled: Any, per_token: list[int], block_tokens: int, seed: int, mover: str
) -> None:
    unit = unit_tokens([block_tokens])
    numbers = random.Random(seed)
    layers = []
    for index, each in enumerate(per_token):
        size = each * block_tokens
        stride = size + index  # layers may lie beside each other
        memory = memoryview(bytearray(numbers.randbytes(stride * 50)))
        layers.append(Layer(str(index), memory, 0, stride, size))
    one = Blocks(layers, block_tokens, unit)
    one.use_mover(compiled if mover == "compiled" else PYTHON)
    shape = one.shape
    assert shape.column_bytes == sum(per_token) * C
    table = numbers.sample(range(49), shape.unit_blocks)
    other = numbers.sample(range(49), shape.unit_blocks)
    before = [[bytes(layer.part(block, 0, layer.size)) for block in table] for layer in layers]
    columns = [memoryview(bytearray(shape.column_bytes)) for _ in range(shape.unit_columns)]
    one.gather([PlacedColumn(part, tuple(table), column) for part, column in enumerate(columns)])
    assert b"".join(columns) == b"".join(part for of in before for part in of), "layer by layer"
    left = numbers.randrange(shape.unit_blocks)
    kept = [bytes(layer.part(other[left], 0, layer.size)) for layer in layers]
    wanted = tuple(SKIP_BLOCK if at == left else block for at, block in enumerate(other))
    one.take([PlacedColumn(part, wanted, column) for part, column in enumerate(columns)])
    for index, layer in enumerate(layers):
        there = [bytes(layer.part(block, 0, layer.size)) for block in other]
        before[index][left] = kept[index]
        assert there == before[index]


def test_blocks_that_can_not_be_kept_are_refused_in_a_sentence() -> None:
    with pytest.raises(Unsupported, match="Choose another --block-size"):
        unit_tokens([2**12 + 1, 64])
    with pytest.raises(Unsupported, match="not the same number for each token"):
        Shape((100,), 32, 64)
    with pytest.raises(IndexError):
        Layer("0", memoryview(bytearray(100)), 0, 10, 10).part(10, 0, 10)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("block_tokens", [16, 32, 48, 64, 128])
def test_what_one_request_computes_the_next_one_is_given(
    tmp_path: Path, workers: int, block_tokens: int
) -> None:
    with engine(tmp_path, [GroupOf((8, 4, 4), block_tokens)], workers) as one:
        unit = one.unit
        assert one.serve(request(some(1, 700)), step_tokens=256) == 0
        assert one.serve(request(some(1, 700))) == 699 // unit * unit
        assert one.serve(request([*some(1, 400), *some(2, 300)])) == 400 // unit * unit
        assert one.serve(request(some(1, 700), "globex")) == 0
        assert one.serve(request(some(1, 700), "")) == 0


@pytest.mark.parametrize("block_tokens", [32, 128])
def test_two_images_never_meet_and_share_what_is_before_them(tmp_path: Path, block_tokens: int) -> None:
    with engine(tmp_path, [GroupOf((8, 4, 4), block_tokens)]) as one:
        for image, first, again in [(b"cat", 0, 640), (b"dog", 256, 640)]:
            asked = [request(some(1, 700)) for _ in range(2)]
            for each in asked:
                each.media = [Media(300, 450, image)]
            assert one.serve(asked[0], step_tokens=256) == first
            assert one.serve(asked[1]) == again
        assert one.serve(request(some(1, 700))) == 256, "without any image"


@pytest.mark.parametrize(
    ("internal", "shown"),
    [
        ("cmpl-late-0-1a2b3c4d", "cmpl-late"),
        ("cmpl-a-1-b-12-1a2b3c4d", "cmpl-a-1-b"),
        ("chatcmpl-abc-12-1a2b3c4d", "chatcmpl-abc-12"),
        ("7", "7"),
    ],
)
def test_a_request_has_the_name_that_its_caller_knows(internal: str, shown: str) -> None:
    assert shown_name(internal) == shown


def test_the_last_token_is_computed_though_all_are_there(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 4 * C)))
        assert one.serve(request(some(1, 4 * C))) == 4 * C - 1
        assert one.serve(request(some(1, 4 * C + 1))) == 4 * C


def test_who_wants_all_of_it_computed_is_not_counted_as_a_hit(tmp_path: Path) -> None:
    """As for the log probabilities of a prompt: vLLM would not take what it is given."""
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 300)))
        asked = request([*some(1, 256), *some(2, 300)])
        asked.skip_reading_prefix_cache = True
        assert one.serve(asked) == 0
        assert sum(one.driver.statistics.orgs()[0].hit_tokens.values()) == 0
        assert one.serve(request(asked.all_token_ids)) == 512, "it is stored all the same"


def test_what_the_engine_has_itself_is_left_alone(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 500)))
        again = request(some(1, 500))
        assert one.begin(again, local=224) == 448 - 224
        for worker, group, layer, block in one.each(again, 0, 224):
            one.part(again, worker, group, layer, block)[:] = one.kv(again, worker, group, layer, block)
        one.run({again: 500 - 448})
        one.check(again, 500)
        one.end(again)
        all_of_it = request(some(1, 500))
        assert one.begin(all_of_it, local=448) == 0
        one.end(all_of_it)


def test_slow_transfers_are_of_one_request_each_also_where_several_load_in_a_step(
    tmp_path: Path,
) -> None:
    with engine(tmp_path, FULL) as one:
        [shard] = one.far[0]
        told = (some(1, 400), "acme"), (some(2, 500), "globex")
        stored = [request(*each) for each in told]
        for each in stored:
            one.serve(each)
        assert {(slow.direction, slow.request) for slow in shard.take_slowest()} == {
            ("out", each.request_id) for each in stored
        }
        again = [request(*each) for each in told]
        left = {each: each.num_tokens - one.begin(each) for each in again}
        one.run(left)
        assert {(slow.request, slow.columns) for slow in shard.take_slowest()} == {
            (again[0].request_id, 400 // C),
            (again[1].request_id, 500 // C),
        }
        for each in again:
            one.check(each, each.num_tokens)
            one.end(each)
        one.settle()


def test_groups_of_which_some_have_windows(tmp_path: Path) -> None:
    with engine(tmp_path, HYBRID) as one:
        asked = request(some(1, 900))
        one.serve(asked, step_tokens=300)
        again = request(some(1, 900))
        assert one.begin(again) == 896
        assert one.scheduling.matched(again, 0) == (0, False), "it is on its way"
        for _ in range(1000):
            step = one.run({})
            if again.request_id in one.results[0].arrived:
                break
        else:
            raise AssertionError("it never arrived")
        assert not step.loads
        assert not one.results[0].not_arrived
        one.check(again, 896)
        one.run({again: 4})
        one.end(again)
        one.settle()


def test_over_a_network_requests_wait_and_not_the_steps(tmp_path: Path) -> None:
    with engine(tmp_path, FULL, is_far=True) as one:
        one.serve(request(some(1, 600)))
        again = request(some(1, 600))
        assert one.begin(again) == 576
        [third] = [
            column for column in one.driver.ledger.accounts["acme"].columns(0) if column.depth == 3
        ]
        one.plane.shards["0.0"].arena.slot(third.slot)[100] ^= 1
        bad: set[int] = set()

        def has_arrived() -> bool:
            step = one.run({})
            bad.update(one.bad)
            return not step.loads and again.request_id in one.results[0].arrived

        wait_until("it has arrived", has_arrived)
        assert bad == set(again.tables[0][6:8]), "which are told block by block"
        again.num_computed_tokens = 3 * C
        one.run({again: 600 - 3 * C})
        one.check(again, 600)
        one.end(again)
        one.settle()


def test_requests_wait_from_when_an_agent_is_over_a_network(tmp_path: Path) -> None:
    """A shard may move there while the engine serves. A load that has begun ends as it began."""
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 600)))
        near, far = request(some(1, 600)), request(some(1, 600))
        assert one.begin(near) == 576
        one.scheduling.use(one.driver, is_far=True)
        step = one.run({near: 24})
        assert (len(step.loads), len(step.loads_ahead)) == (1, 0)
        one.check(near, 600)
        one.end(near)
        assert one.begin(far) == 576
        one.scheduling.use(one.driver, is_far=False)
        step = one.run({})
        assert (len(step.loads), len(step.loads_ahead)) == (0, 1)
        assert not one.scheduling.finished(far, far.tables), "vLLM waits for the load by itself"
        wait_until("it is over", lambda: not one.run({}).ending and not one.scheduling._loads)
        one.settle()


def test_a_load_beside_a_step_waits_for_none_that_comes_over_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such may still be under way when agents are on this node again."""
    goes_on, load = threading.Event(), worker_module.StepLoads.wait_for_all

    def load_late(loads: worker_module.StepLoads) -> None:
        goes_on.wait(60)
        load(loads)

    monkeypatch.setattr(worker_module.StepLoads, "wait_for_all", load_late)
    with engine(tmp_path, FULL, is_far=True) as one:
        one.scheduling.use(one.driver, is_far=False)
        one.serve(request(some(1, 200)))
        one.scheduling.use(one.driver, is_far=True)
        far = [request(some(1, 200)) for _ in range(2 * worker_module.LOADS_AHEAD_AT_ONCE)]
        for each in far:
            assert one.begin(each) == 192
        one.run({})
        one.scheduling.use(one.driver, is_far=False)
        near = request(some(1, 200))
        assert one.begin(near) == 192
        step = threading.Thread(target=one.run, args=({near: 8},))
        step.start()
        step.join(60)
        is_over = not step.is_alive()
        goes_on.set()
        step.join()
        assert is_over
        for each in far:
            assert not one.scheduling.finished(each, each.tables)
        one.end(near)
        wait_until("they are over", lambda: not one.run({}).ending and not one.scheduling._loads)
        one.settle()


def test_what_takes_longer_to_load_than_to_compute_is_computed(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        one.scheduling._clock = lambda: 0.0  # an engine that takes no time
        one.serve(request(some(1, 600)))
        for _ in range(4):
            assert one.serve(request(some(1, 600))) == 576
        measured = one.driver.statistics.refills_of("acme").computing
        assert measured.count == 1, "a step of a few tokens, or with loads, tells nothing"
        for seed in range(2, 8):
            one.serve(request(some(seed, 600)))
        assert one.driver.statistics.break_even()["acme"].dram_tokens_min is None
        one.driver.statistics.refills_of(
            "acme"
        )._tried_at = one.driver._clock()  # it is tried again now and then
        assert one.serve(request(some(1, 600))) == 0
        assert one.driver.ledger.tally("acme").missed[Reason.NOT_WORTH_IT] == 576


def test_a_request_that_is_given_up_while_it_waits_for_its_load(tmp_path: Path) -> None:
    with engine(tmp_path, HYBRID) as one:
        one.serve(request(some(1, 900)))
        again = request(some(1, 900))
        assert one.begin(again) == 896
        assert not one.scheduling.finished(again, again.tables), "vLLM waits for the load by itself"
        step = one.run({})
        assert [order.request for order in step.loads_ahead] == [again.request_id]
        wait_until("it is over", lambda: not one.run({}).ending and not one.scheduling._loads)
        assert not list(one.driver.ledger._slots.pins())


def test_a_step_that_computes_nothing_leaves_the_interpreter_to_who_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks without a pause; a load from afar came in pieces, each of which waited for its turn."""
    monkeypatch.setattr(worker_module, "REST_SECONDS", 60.0)
    load = worker_module.StepLoads.wait_for_all

    def load_slowly(loads: worker_module.StepLoads) -> None:
        time.sleep(0.3)
        load(loads)

    monkeypatch.setattr(worker_module.StepLoads, "wait_for_all", load_slowly)
    with engine(tmp_path, HYBRID) as one:
        one.serve(request(some(1, 900)))
        again, other = request(some(1, 900)), request(some(2, 100))
        assert one.begin(again) == 896
        assert one.run({}).is_idle
        assert [result.arrived for result in one.results] == [{again.request_id}]
        one.begin(other)
        assert not one.run({other: 100}).is_idle


@pytest.mark.parametrize("block_tokens", [32, 128])
def test_events_tell_of_units_that_are_there_and_of_those_that_are_not_any_more(
    tmp_path: Path, block_tokens: int
) -> None:
    with engine(tmp_path, [GroupOf((8,), block_tokens)], slots=12) as one:
        first, second = request(some(1, 400)), request(some(2, 700))
        one.serve(first)
        each = one.unit // 32
        told = one.events.take()
        assert [news.hashes for news in told] == [
            tuple(first.block_hashes[at : at + each]) for at in range(0, 384 // 32, each)
        ]
        assert [news.parent for news in told] == [
            first.block_hashes[at - 1] if at else None for at in range(0, 384 // 32, each)
        ]
        assert all(news.is_there for news in told)
        one.serve(request(some(1, 400)))
        assert one.events.take() == [], "it was there before"
        one.serve(second)
        there = {news.hashes for news in told}
        for news in one.events.take():
            (there.add if news.is_there else there.remove)(news.hashes)
        columns = sum(1 for _ in one.driver.ledger.accounts["acme"].columns(0))
        assert columns - one.unit // C < len(there) * (one.unit // C) <= columns
        assert one.driver.removals.purge("acme").done
        assert {news.hashes for news in one.events.take() if not news.is_there} == there


@pytest.mark.parametrize("speculates", [False, True])
def test_damaged_columns_are_computed_again_and_stored_anew(tmp_path: Path, *, speculates: bool) -> None:
    """In the step that was to load them: later, tokens would be out that were computed without them."""
    with engine(tmp_path, FULL, workers=2, speculates=speculates) as one:
        one.serve(request(some(1, 600)))
        again = request(some(1, 600))
        assert one.begin(again) == 576
        [third] = [
            column for column in one.driver.ledger.accounts["acme"].columns(0) if column.depth == 3
        ]
        one.plane.shards["0.1"].arena.slot(third.slot)[100] ^= 1
        one.run({again: 24})
        assert len(one.bad) == 2
        assert again.num_computed_tokens == 3 * C, "from there on"
        one.run({again: 600 - 3 * C})
        one.check(again, 600)
        one.end(again)
        one.settle()
        assert one.serve(request(some(1, 600))) == 576


def test_an_error_while_columns_are_read_costs_these_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each column is read by itself here, some at once."""
    monkeypatch.setattr(worker_module, "READ_BYTES", 1)
    with engine(tmp_path, [GroupOf((8, 4, 4), 16)]) as one:
        one.serve(request(some(1, 700)))
        columns = one.driver.ledger.accounts["acme"].columns(0)
        [fifth] = [column.key for column in columns if column.depth == 5]
        shard = one.halves[0].shards["0.0"]
        view = shard.view

        def fail(wanted: Sequence[ViewColumn], transfer: Any) -> Any:
            if wanted[0].key == fifth:
                raise MemoryError
            return view(wanted, transfer)

        monkeypatch.setattr(shard, "view", fail)
        again = request(some(1, 700))
        assert one.begin(again) == 10 * C
        one.run({again: 60})
        assert again.num_computed_tokens == 5 * C, "from there on"
        assert one.scheduling.counts["refused_columns"] == 1
        one.run({again: 700 - 5 * C})
        one.check(again, 700)


def test_a_load_is_one_transfer_however_many_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "READ_BYTES", 1)
    with engine(tmp_path, [GroupOf((8, 4, 4), 16)]) as one:
        one.serve(request(some(1, 700)))
        shard = one.halves[0].shards["0.0"]
        shard.take_slowest()
        again = request(some(1, 700))
        assert one.serve(again) == 10 * C
        [loaded] = [slow for slow in shard.take_slowest() if slow.direction == "in"]
        assert (loaded.columns, loaded.size) == (10, 10 * C * 16)
        assert loaded.request == shown_name(again.request_id)


def test_nobody_reads_when_a_load_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that helps reads one column after all others were read."""
    monkeypatch.setattr(worker_module, "READ_BYTES", 1)
    monkeypatch.setattr(worker_module, "READERS", 2)
    others: list[Sequence[ViewColumn]] = []
    has_begun, others_read, is_over = threading.Event(), threading.Event(), threading.Event()
    was_over: list[bool] = []

    with engine(tmp_path, [GroupOf((8, 4, 4), 16)]) as one:
        one.serve(request(some(1, 700)))
        shard = one.halves[0].shards["0.0"]
        view = shard.view

        @contextlib.contextmanager
        def look(wanted: Sequence[ViewColumn], transfer: Any) -> Iterator[Any]:
            if threading.current_thread().name.startswith("read"):
                has_begun.set()
                others_read.wait(10)
                was_over.append(is_over.wait(0.1))  # which nobody waits for who does not end too early
            else:
                has_begun.wait(10)
                others.append(wanted)
                if len(others) == 9:
                    others_read.set()
            with view(wanted, transfer) as columns:
                yield columns
            is_over.set()

        monkeypatch.setattr(shard, "view", look)
        again = request(some(1, 700))
        assert one.begin(again) == 10 * C
        one.run({again: 60})
        assert again.num_computed_tokens == 700
        assert was_over == [False]
        one.check(again, 700)


def test_nothing_is_stored_of_a_step_that_has_computed_with_what_was_not_there(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 600)))
        again = request([*some(1, 600)[:576], *some(2, 424)])
        assert one.begin(again) == 576
        one.run({again: 424}, spoil=lambda: lose(one, "0.0"))
        assert len(one.bad) == 18
        assert not one.scheduling._stores


def test_an_agent_that_is_gone_costs_what_it_had_and_comes_back(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 600)))
        lose(one, "0.0")
        assert one.serve(request(some(1, 600))) == 0
        add(one.plane, "0.0", 16 * C, 60)

        def works() -> bool:
            return one.serve(request(some(1, 600))) == 576

        wait_until("it is used again", works)


def test_blocks_of_a_request_that_ends_are_kept_until_they_are_saved(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        asked = request(some(1, 300))
        one.begin(asked)
        one.run({asked: 300})
        for half in one.halves:
            half.shards["0.0"]._homes.writing.acquire()
        try:
            assert one.end(asked)
            step = one.run({})
            assert step.ending == [asked.request_id]
            assert one.results[0].ended == set()
        finally:
            for half in one.halves:
                half.shards["0.0"]._homes.writing.release()

        def is_over() -> bool:
            one.run({})
            return one.results[0].ended == {asked.request_id}

        wait_until("it is over", is_over)
        one.settle()
        assert one.serve(request(some(1, 300))) == 256


@pytest.mark.parametrize("writes_early", [False, True])
def test_a_save_whose_result_is_lost_on_the_way_ends_as_failed(
    tmp_path: Path, *, writes_early: bool
) -> None:
    """Until then nobody else may have its blocks, and no other driver may begin."""
    with engine(tmp_path, FULL, writes_early=writes_early) as one:
        stuck = one.halves[0].shards["0.0"]
        stuck._homes.writing.acquire()
        asked = request(some(1, 300))
        one.begin(asked)
        one.run({asked: 300})
        assert one.end(asked), "its blocks are kept"
        one.lines[0]._end()  # the line is lost, and the worker is not
        stuck._homes.writing.release()
        wait_until("the worker has ended its save", lambda: not one.workers[0]._saves)
        ended = set[str]()
        for later, is_quiet in ((0.0, False), (USE_SECONDS_MAX, True), (USE_SECONDS_MAX, True)):
            one.later = later
            one.run({})
            ended |= one.results[0].ended
            assert one.scheduling.is_quiet() == is_quiet
        assert ended == {asked.request_id}
        one.give_back(asked)
        assert one.scheduling.counts["not_saved_columns"] == 4
        if writes_early:
            assert not +one.holders, "no block is pinned any more"


def test_a_save_whose_blocks_are_given_away_is_given_up_and_nothing_of_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swdriver_shim.adapters.vllm.worker.TURN_SECONDS", 0.05)
    with engine(tmp_path, FULL) as one:
        first, second, third = (request(some(seed, 300)) for seed in (1, 2, 3))
        one.begin(first)
        one.begin(second)
        stuck = one.halves[0].shards["0.0"]
        stuck._homes.writing.acquire()  # an agent that takes its time
        try:
            one.run({first: 300})
            one.run({second: 300})
            one.begin(third)
            third.tables = second.tables  # which was preempted, and its blocks are another's
            one.run({third: 300})
        finally:
            stuck._homes.writing.release()
        wait_until("it is told", lambda: len(one.saved) == 3)
        assert [(told.dropped, len(told.failed)) for told in one.saved] == [
            (False, 0),
            (True, 4),
            (False, 0),
        ]
        assert one.scheduling.counts["saves_given_up"] == 1
        assert one.serve(request(some(1, 300))) == one.serve(request(some(3, 300))) == 256
        assert one.serve(request(some(2, 300))) == 0


def test_a_save_that_comes_too_late_leaves_nothing_behind_a_purge(tmp_path: Path) -> None:
    """Whoever decides has taken it for dead, and its slots are somebody else's."""
    with engine(tmp_path, FULL) as one:
        one.driver.set_policies({"acme": OrgPolicies(policy=Policy(scrub=True))})
        began, now = time.monotonic(), [0.0]
        [worker] = one.workers
        one.driver._clock = one.driver._housekeeper._clock = worker._clock = lambda: began + now[0]
        asked = request(some(1, 300))
        one.begin(asked)
        take, may_go_on = worker._waiting.get, threading.Event()

        def taking() -> Save | None:
            save = take()
            assert may_go_on.wait(30)
            return save

        worker._waiting.put(None)  # the thread that is, so that another one takes its time
        worker._saver.join()
        worker._waiting.get = taking  # type: ignore[assignment,method-assign]
        worker._saver = threading.Thread(target=worker._save_all)
        worker._saver.start()
        one.run({asked: 300})
        now[0] = USE_SECONDS_MAX + 1
        receipt = one.driver.removals.purge("acme")
        assert receipt.done
        may_go_on.set()
        wait_until("it is told", lambda: len(one.saved) == 1)
        assert one.saved[0].dropped
        assert not any(any(one.plane.shards["0.0"].arena.slot(at)) for at in range(60))


def test_drafts_are_not_stored(tmp_path: Path) -> None:
    """A step computes more tokens than are known: guesses, which may be wrong."""
    with engine(tmp_path, FULL) as one:
        asked = request(some(1, 126))
        one.begin(asked)
        one.run({asked: 126})
        asked.all_token_ids.append(5)
        asked.num_computed_tokens = 126
        step = one.scheduling.step({asked.request_id: 4}, lambda _: asked.tables, [])
        one.scheduling.stepped()
        assert step.stores == [], "127 tokens are known, though 130 are computed"
        asked.all_token_ids.append(6)
        asked.num_computed_tokens = 127
        step = one.scheduling.step({asked.request_id: 4}, lambda _: asked.tables, [])
        assert [len(order.columns[0]) for order in step.stores] == [1]


def test_a_request_that_is_never_scheduled_holds_nothing(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 300)))
        asked = request(some(1, 300))
        assert one.scheduling.matched(asked, 0) == (256, False)
        assert one.scheduling.matched(asked, 0) == (256, False)
        assert len(list(one.driver.ledger._slots.pins())) == 1
        assert not one.scheduling.finished(asked, ())
        assert not list(one.driver.ledger._slots.pins())


@pytest.mark.slow
@settings(max_examples=12)
@given(seed=st.integers(0, 10_000))
def test_whatever_comes_together_every_block_is_right(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    numbers = random.Random(seed)
    with engine(tmp_path_factory.mktemp("any"), FULL, workers=2, slots=30) as one:
        going: list[FakeRequest] = []
        ended: dict[str, FakeRequest] = {}
        for _ in range(60):
            if len(going) < 4 and numbers.random() < 0.5:
                common = some(numbers.randrange(3), numbers.randrange(1, 400))
                new = request([*common, *some(9 + numbers.randrange(3), numbers.randrange(1, 90))])
                one.begin(new)
                going.append(new)
            for shard in one.plane.shards.values():
                if numbers.random() < 0.03:
                    shard.arena.slot(numbers.randrange(30))[64 + numbers.randrange(500)] ^= 1
            one.run({
                each: min(each.num_tokens - each.num_computed_tokens, numbers.randrange(1, 200))
                for each in going
            })  # fmt: skip
            for each in list(going):
                one.check(each, each.num_computed_tokens)
                if each.num_computed_tokens == each.num_tokens:
                    going.remove(each)
                    if one.end(each):
                        ended[each.request_id] = each
            for name in set.intersection(*(result.ended for result in one.results)):
                one.give_back(ended.pop(name))


def test_what_expires_while_a_request_waits_for_blocks_is_not_loaded(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        now = [0.0]
        one.driver._clock = one.driver._housekeeper._clock = lambda: now[0]
        one.scheduling._clock = lambda: now[0]
        one.driver.set_policies({"acme": OrgPolicies(policy=Policy(ttl_first_use_seconds=10))})
        one.serve(request(some(1, 300)))
        asked = request(some(1, 300))
        assert one.scheduling.matched(asked, 0) == (256, False), "and there is no room for it yet"
        now[0] = 11.0
        assert one.begin(asked) == 0


def test_what_is_purged_while_a_request_waits_for_blocks_is_not_loaded(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 300)))
        asked = request(some(1, 300))
        now = [one.scheduling._clock()]
        one.scheduling._clock = lambda: now[0]
        assert one.scheduling.matched(asked, 0) == (256, False)
        one.driver.removals.start_purge("acme", Keys("acme", ORG_SECRET, NAMESPACE, one.unit).tag)
        now[0] += 1
        assert one.begin(asked) == 0


def test_a_step_that_computes_for_others_does_not_stand_still_for_tier_2(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        waits: list[float] = []

        class Looking:
            @staticmethod
            def is_set() -> bool:
                return False

            @staticmethod
            def wait(seconds: float) -> None:
                waits.append(seconds)

        begin = one.driver.begin_load
        one.driver.begin_load = lambda prompt: begin(prompt)._replace(lookup=Looking())  # type: ignore[arg-type,method-assign]
        one.scheduling._wait_seconds = 60.0
        busy, waiting = request(some(1, 300), org=""), request(some(2, 300))
        assert one.scheduling.matched(waiting, 0) == (None, False)
        assert len(waits) == 1, "there is nothing else to do"
        one.begin(busy)
        one.run({busy: 300})
        assert one.scheduling.matched(waiting, 0) == (None, False)
        assert len(waits) == 1
        one.run({})
        assert one.scheduling.matched(waiting, 0) == (None, False)
        assert len(waits) == 2


@pytest.mark.parametrize("continue_id", ["chat-7", "of another engine"])
def test_a_conversation_is_recalled_while_it_waits_in_the_queue(
    tmp_path: Path, continue_id: str
) -> None:
    with tier_requests(tmp_path / "files") as tier, engine(tmp_path, FULL, tier=tier) as one:
        one.driver.set_policies({"acme": OrgPolicies(policy=Policy(tiers=Tiers.TIER2))})
        for _ in range(2):
            one.serve(request(some(1, 700), rules=Rules(continue_id="chat-7")))
        spilled, recalled = one.driver.ledger.tier2.spilled, one.driver.ledger.tier2.recalled
        wait_until("it is copied", lambda: spilled.columns >= 10)
        for slots in (0, 60):
            for shard in one.plane.shards.values():
                shard.resize(slots)
            limit = one.driver.ledger.pools[0]
            wait_until("memory is lost", lambda: limit.limit == slots)  # noqa: B023
        stranger = request(some(1, 700))
        one.scheduling.arrived(stranger)
        one.scheduling.arrived(request(some(1, 700), "globex", Rules(continue_id=continue_id)))
        waiting = request(some(1, 700), rules=Rules(continue_id=continue_id))
        before = recalled.columns
        one.scheduling.arrived(waiting)
        assert before == 0, "nobody else has asked tier 2"
        stored = Keys("acme", ORG_SECRET, NAMESPACE, one.unit).prompt(some(1, 640))
        wait_until("it is in memory", lambda: one.driver.query(stored) == 640)
        assert one.serve(waiting) == 640


def test_nothing_is_stored_that_was_computed_behind_blocks_whose_load_fails(tmp_path: Path) -> None:
    """vLLM shares them at once: who comes in the same step goes on from what is not there yet."""
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 600)))
        first = request(some(1, 600))
        assert one.begin(first) == 576
        other = request([*some(1, 576), *some(2, 424)])
        assert one.begin(other, local=576) == 0
        other.tables[0][:18] = first.tables[0][:18]
        damage(one, 3)
        step = one.run({first: 24, other: 424})
        assert set(first.tables[0][6:8]) == one.bad
        assert one.scheduling.take_unfilled() == set(first.tables[0][6:])
        assert not [order for order in step.stores if order.request == other.request_id]
        # vLLM has the first one compute the blocks anew, and the other one what it computed with them.
        other.num_computed_tokens = 576
        one.run({first: 600 - 3 * C, other: 424})
        one.check(other, 1000)
        one.end(first)
        one.end(other)
        one.settle()
        assert one.serve(request(some(1, 600))) == 576


def test_who_shares_blocks_that_are_loaded_is_stored_once_they_are_there(tmp_path: Path) -> None:
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 600)))
        first = request(some(1, 600))
        assert one.begin(first) == 576
        other = request([*some(1, 576), *some(2, 424)])
        assert one.begin(other, local=576) == 0
        other.tables[0][:18] = first.tables[0][:18]
        one.run({first: 24, other: 424})
        one.end(first)
        one.end(other)
        one.settle()
        assert one.serve(request(other.all_token_ids)) == 960


@pytest.mark.parametrize("is_ours", [True, False])
def test_nothing_is_stored_of_a_request_that_is_given_up_before_its_load_is_known_to_have_failed(
    tmp_path: Path,
    is_ours: bool,  # noqa: FBT001
) -> None:
    """vLLM does not take back what such a request has computed; nor of one that shares its blocks."""
    with engine(tmp_path, FULL) as one:
        one.serve(request(some(1, 600)))
        first = request(some(1, 600))
        assert one.begin(first) == 576
        other = request([*some(1, 576), *some(2, 424)])
        assert one.begin(other, local=576) == 0
        other.tables[0][:18] = first.tables[0][:18]
        given_up = first if is_ours else other
        heard = one.scheduling.heard

        def is_aborted_before(report: WorkerReport) -> None:
            given_up.num_computed_tokens = given_up.num_tokens
            assert one.end(given_up)
            heard(report)

        one.scheduling.heard = is_aborted_before  # type: ignore[method-assign]
        damage(one, 3)
        one.run({first: 24, other: 424})
        one.scheduling.heard = heard  # type: ignore[method-assign]
        assert one.bad
        step = one.run({})
        assert step.ending == [given_up.request_id]
        assert step.stores == []


def test_who_shares_blocks_that_are_being_saved_does_not_end_their_save(tmp_path: Path) -> None:
    """Nobody writes to what vLLM's own cache has found."""
    with engine(tmp_path, FULL) as one:
        first = request(some(1, 300))
        one.begin(first)
        stuck = one.halves[0].shards["0.0"]
        stuck._homes.writing.acquire()  # an agent that takes its time
        try:
            one.run({first: 300})
            other = request([*some(1, 256), *some(2, 40)])
            one.begin(other, local=256)
            other.num_computed_tokens = 256
            other.tables[0][:8] = first.tables[0][:8]
            assert one.run({other: 40}).over_first == []
        finally:
            stuck._homes.writing.release()
        one.end(first)
        one.end(other)
        one.settle()
        assert one.scheduling.counts["saves_given_up"] == 0
        assert one.serve(request(some(1, 300))) == 256
