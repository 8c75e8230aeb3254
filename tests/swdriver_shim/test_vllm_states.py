"""States of Mamba and linear attention, through the connector's halves on real agents: which are stored,
and from which the next request goes on."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvss_agent.client import Miss
from swdriver_shim.adapters.join_config import NameSpec
from swdriver_shim.adapters.vllm.blocks import Blocks, Layer, PlacedColumn, Shape
from swdriver_shim.adapters.vllm.engine_driver import GroupFacts, WorkerFacts, model_spec
from swdriver_shim.adapters.vllm.scheduling import GroupShape, goes_on_from_blocks
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.data_plane.worker.protocol import WorkerAddress
from tests.swdriver_shim.block_engine import (
    COUNT,
    C,
    Engine,
    FakeRequest,
    GroupOf,
    damage,
    engine,
    request,
    some,
)

STEP = 256  # tokens of a chunk


def hybrid(block_tokens: int = C) -> list[GroupOf]:
    """Two groups with states, whose sizes are multiples of nothing, and one with KV between them."""
    return [
        GroupOf((300, 77), block_tokens, is_state=True),
        GroupOf((8, 8), block_tokens),
        GroupOf((45,), block_tokens, is_state=True),
    ]


PURE = [GroupOf((300, 77), C, is_state=True)]
WITH_WINDOW = [*hybrid(), GroupOf((4,), C, window=200)]


def state(one: Engine, end: int, group: int = 0) -> Column:
    columns = one.driver.ledger.accounts["acme"].columns(group)
    [found] = [column for column in columns if (column.depth + 1) * C == end]
    return found


def ends(one: Engine, group: int = 0) -> list[int]:
    """After how many tokens there are states."""
    return sorted((column.depth + 1) * C for column in one.driver.ledger.accounts["acme"].columns(group))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("block_tokens", "hit"), [(32, 512), (48, 0), (64, 640), (128, 640)])
def test_a_request_goes_on_from_the_last_state_that_lies_between_columns(
    tmp_path: Path, workers: int, block_tokens: int, hit: int
) -> None:
    """Of the states at 256, 512 and at the last block's end before 700: those at the ends of units."""
    with engine(tmp_path, hybrid(block_tokens), workers) as one:
        assert one.serve(request(some(1, 700)), STEP) == 0
        assert one.serve(request(some(1, 700)), STEP) == hit
        assert one.serve(request([*some(1, 400), *some(2, 300)]), STEP) == min(hit, 256)
        assert one.serve(request(some(1, 700), "globex"), STEP) == 0
        assert one.serve(request(some(1, 700), ""), STEP) == 0


@pytest.mark.parametrize("groups", [PURE, WITH_WINDOW], ids=["alone", "beside a window"])
def test_states_alone_and_beside_windows(tmp_path: Path, groups: list[GroupOf]) -> None:
    with engine(tmp_path, groups) as one:
        assert one.serve(request(some(1, 700)), STEP) == 0
        assert ends(one) == [256, 512, 640]
        assert one.serve(request(some(1, 700)), STEP) == 640
        assert one.serve(request(some(1, 600)), STEP) == 512


def test_a_load_ends_before_the_last_token_though_its_state_is_there(tmp_path: Path) -> None:
    """KV of one token too many does no harm, a state of one token too many is a wrong one."""
    with engine(tmp_path, hybrid()) as one:
        one.serve(request(some(1, 4 * C)))
        assert ends(one) == [3 * C, 4 * C]
        assert one.serve(request(some(1, 4 * C))) == 3 * C
        assert one.serve(request(some(1, 4 * C + 1))) == 4 * C


def test_a_conversation_goes_on_from_a_state_of_its_answer(tmp_path: Path) -> None:
    with engine(tmp_path, hybrid()) as one:
        asked = request(some(1, 500))
        one.begin(asked)
        while asked.num_computed_tokens < 500:
            one.run({asked: one.count(asked, STEP)})
        for token in some(2, 100):
            asked.all_token_ids.append(token)
            one.run({asked: 1})
        one.end(asked)
        one.settle()
        assert ends(one) == [256, 448, 512, 576]
        assert one.serve(request([*asked.all_token_ids, *some(3, 50)]), STEP) == 576


def test_what_the_engine_has_itself_is_gone_on_from_with_a_state_further_back(tmp_path: Path) -> None:
    with engine(tmp_path, hybrid()) as one:
        one.serve(request(some(1, 700)), STEP)
        again = request(some(1, 700))
        assert one.begin(again, local=256) == 640 - 256
        [order] = one.scheduling._new_loads_ahead
        assert [len(columns) for columns in order.columns] == [1, 6, 1]
        for group in (0, 2):
            assert order.columns[group][0].blocks == (again.tables[group][9],)
        assert one.arrives(again)
        one.run({again: 60})
        one.end(again)
        one.settle()


@pytest.mark.parametrize(("group", "depth", "hit"), [(0, 9, 512), (2, 9, 512), (1, 3, 0), (1, 9, 512)])
def test_a_damaged_column_is_not_gone_on_from(tmp_path: Path, group: int, depth: int, hit: int) -> None:
    """Neither KV nor state. The request is asked about anew, and computed from a state further back."""
    with engine(tmp_path, hybrid()) as one:
        one.serve(request(some(1, 700)), STEP)
        damage(one, depth, group)
        again = request(some(1, 700))
        assert one.begin(again) == 640
        assert not one.arrives(again)
        one.give_back(again)
        again.num_computed_tokens = 0
        assert one.serve(again, STEP) == hit
        assert one.serve(request(some(1, 700)), STEP) == 640, "and stored anew"


def test_a_state_that_is_gone_makes_a_hit_shorter(tmp_path: Path) -> None:
    with engine(tmp_path, hybrid()) as one:
        one.serve(request(some(1, 700)), STEP)
        one.driver.refuse({state(one, 640, group=2): Miss.STALE})
        assert one.serve(request([*some(1, 660), *some(2, 40)]), STEP) == 512
        one.driver.refuse({state(one, end): Miss.STALE for end in (256, 512, 640)})
        assert one.serve(request([*some(1, 650), *some(3, 50)]), STEP) == 0
        missed = one.driver.ledger.tally("acme").missed
        assert missed[Reason.NO_STATE] + missed[Reason.SEAL_REFUSED] >= 128 + 640


def test_states_that_are_not_offered_of_every_group_are_not_stored(tmp_path: Path) -> None:
    with engine(tmp_path, hybrid()) as one:
        make = one._make_room

        def of_one(asked: FakeRequest, count: int) -> list[tuple[int, int, int]]:
            return [offer for offer in make(asked, count) if offer[0] == 0]

        one._make_room = of_one  # type: ignore[assignment,method-assign]
        one.serve(request(some(1, 700)), STEP)
        assert ends(one) == ends(one, 2) == []
        assert len(ends(one, 1)) == 10, "KV is stored all the same"
        assert one.serve(request(some(1, 700)), STEP) == 0


def test_offers_of_other_places_groups_and_blocks_are_left_alone(tmp_path: Path) -> None:
    with engine(tmp_path, hybrid()) as one:
        asked = request(some(1, 300))
        one.begin(asked)
        one._make_room(asked, 300)
        places = [0, 30, 64, 100, 128, 320]  # none, in a block, right, in a block, right, not known yet
        offers = [(group, 7 + group, tokens) for tokens in places for group in (0, 1, 2)]
        offers += [(0, 0, 192), (2, 9, 192)]  # a block that is none
        step = one.scheduling.step(
            {asked.request_id: 300}, lambda _: asked.tables, [], {asked.request_id: offers}
        )
        [order] = step.stores
        assert [[each.blocks for each in order.columns[group]] for group in (0, 2)] == [
            [(7,), (7,)],
            [(9,), (9,)],
        ]
        assert {each.part for columns in order.columns for each in columns} == {0}


def test_a_state_whose_block_is_given_away_before_it_is_saved_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps later a block with a state is another's: the step waits a moment for the save."""
    monkeypatch.setattr("swdriver_shim.adapters.vllm.worker.TURN_SECONDS", 0.05)
    with engine(tmp_path, hybrid()) as one:
        asked = request(some(1, 700))
        stuck = one.halves[0].shards["0.0"]
        stuck._homes.writing.acquire()  # an agent that takes its time
        try:
            assert computed(one, asked) != []
        finally:
            stuck._homes.writing.release()
        one.end(asked)
        one.settle()
        assert one.scheduling.counts["saves_given_up"] > 0
        assert one.serve(request(some(1, 700)), STEP) < 640, "it is right, whatever is there"


def computed(one: Engine, asked: FakeRequest) -> list[int]:
    """All of it. The saves that had to end before one of its steps."""
    one.begin(asked)
    first: list[int] = []
    while asked.num_computed_tokens < asked.num_tokens:
        first += one.run({asked: one.count(asked, STEP)}).over_first
    return first


def test_blocks_are_held_until_they_are_saved_where_steps_write_to_new_ones_at_once(
    tmp_path: Path,
) -> None:
    """As vLLM does on GPUs: a save could not be given up in time."""
    with engine(tmp_path, hybrid(), writes_early=True) as one:
        stuck = one.halves[0].shards["0.0"]
        stuck._homes.writing.acquire()  # an agent that takes its time
        try:
            asked = request(some(1, 700))
            assert computed(one, asked) == []
            states = [block for table in asked.tables[::2] for block in table if block]
            held = sum(1 for holders in one.holders.values() if holders)
            assert held > sum(len(table) for table in asked.tables[1:2]) + len(states)
            assert one.end(asked)
            for _ in range(3):
                assert one.run({}).ending == [], "steps go on until nothing is held"
        finally:
            stuck._homes.writing.release()
        one.settle()
        one.give_back(asked)
        assert not +one.holders, "nothing is held any more"
        assert one.scheduling.counts["saves_given_up"] == 0
        assert one.serve(request(some(1, 700)), STEP) == 640


def test_where_blocks_are_short_a_slow_save_does_not_hold_them_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swdriver_shim.adapters.vllm.worker.TURN_SECONDS", 0.01)
    with engine(tmp_path, hybrid(), writes_early=True) as one:
        now = [0.0]
        one.scheduling._clock = lambda: now[0]
        stuck = one.halves[0].shards["0.0"]
        stuck._homes.writing.acquire()
        try:
            asked = request(some(1, 700))
            computed(one, asked)
            assert one.end(asked)
            one.short = COUNT
            assert one.run({}).over_first == [], "not at once"
            now[0] += 0.3
            given_up = one.run({}).over_first
            assert len(given_up) == 3
            one.give_back(asked)
            assert not +one.holders
            assert one.run({}).over_first == [], "each once"
        finally:
            stuck._homes.writing.release()
        one.settle()
        assert not +one.holders
        assert one.serve(request(some(1, 700)), STEP) < 640, "it is right, whatever is there"


def test_an_engine_without_blocks_for_the_states_is_stopped_before_it_answers(tmp_path: Path) -> None:
    with engine(tmp_path, hybrid()) as one:
        one.serve(request(some(1, 700)), STEP)
        table = list(range(1, 20))
        for tables, external in [
            ([[0] * 10, table, table], 640),
            ([table, table, table[:9]], 640),
            ([table, table, table], 639),
            ([table, table, table], 576),
        ]:
            again = request(some(1, 700))
            assert one.scheduling.matched(again, 0) == (640, True)
            with pytest.raises(RuntimeError, match="another interface for states"):
                one.scheduling.allocated(again, tables, external)
            assert not one.scheduling._new_loads
            one.scheduling.finished(again, ())
        assert not list(one.driver.ledger._slots.pins())


def test_a_request_behind_states_is_computed_from_its_start_if_its_load_fails() -> None:
    assert not goes_on_from_blocks([GroupShape(C, is_state=True)])
    assert not goes_on_from_blocks([GroupShape(C), GroupShape(C, is_state=True)])
    assert goes_on_from_blocks([GroupShape(C)])


def test_events_tell_of_units_with_kv_wherever_the_states_are(tmp_path: Path) -> None:
    with engine(tmp_path, hybrid()) as one:
        asked = request(some(1, 700))
        one.serve(asked, STEP)
        told = one.events.take()
        assert [news.hashes for news in told] == [
            tuple(asked.block_hashes[at : at + 2]) for at in range(0, 20, 2)
        ]


def test_a_state_is_a_block_as_it_is_whatever_its_size() -> None:
    layers = [
        Layer(name, memoryview(bytearray(random.Random(name).randbytes(stride * 5))), 3, stride, size)
        for name, size, stride in [("conv", 35, 64), ("ssm", 1001, 1010)]
    ]
    one = Blocks(layers, 528, 33 * C, is_state=True)
    assert one.shape == Shape((35, 1001), 528, 33 * C, is_state=True)
    assert (one.shape.column_bytes, one.shape.bytes_per_state, one.shape.bytes_per_token) == (
        1036,
        1036,
        0,
    )
    assert (one.shape.unit_columns, one.shape.unit_blocks) == (1, 1)
    column = memoryview(bytearray(1036))
    one.gather([PlacedColumn(0, (2,), column)])
    assert column == b"".join(bytes(layer.part(2, 0, layer.size)) for layer in layers)
    before = [bytes(layer.memory) for layer in layers]
    one.take([PlacedColumn(0, (3,), column)])
    for layer, was in zip(layers, before, strict=True):
        assert layer.part(3, 0, layer.size) == layer.part(2, 0, layer.size)
        changed = 3 + 3 * layer.stride
        assert layer.memory[:changed] == was[:changed]
        assert layer.memory[changed + layer.size :] == was[changed + layer.size :]


def test_the_model_has_a_state_group_with_what_each_worker_keeps() -> None:
    def facts(part: int) -> WorkerFacts:
        groups = [
            GroupFacts("state", 528, None, 0, 33 * C, bytes_per_state=1036 // part),
            GroupFacts("full", 528, None, 32 // part, 33 * C),
        ]
        return WorkerFacts(WorkerAddress("", ""), groups, "vllm.1:abc", "bfloat16")

    model = model_spec(NameSpec(name="tiny"), [facts(1), facts(2)])
    states, full = model.shape().groups
    assert (states.bytes_per_state, states.tokens_per_state) == ((1036, 518), 33 * C)
    assert (full.bytes_per_token, full.is_state) == ((32, 16), False)
    assert facts(1).groups[0].shape() == GroupShape(528, is_state=True)


@pytest.mark.slow
@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), writes_early=st.booleans())
def test_whatever_comes_together_every_state_is_the_right_one(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    writes_early: bool,  # noqa: FBT001
) -> None:
    """The engine asserts it, of each state that it goes on from: with few slots, some of them damaged,
    and blocks that are another's at once."""
    numbers = random.Random(seed)
    directory = tmp_path_factory.mktemp("any")
    with engine(directory, hybrid(), workers=2, slots=14, writes_early=writes_early) as one:
        going: dict[FakeRequest, bool] = {}  # whether it waits for its load
        came: Counter[str] = Counter()
        failed: set[str] = set()
        ended: dict[str, FakeRequest] = {}
        for _ in range(80):
            # Not while something is loaded: what changes between its check and its copy is not found.
            for shard in one.plane.shards.values() if not any(going.values()) else ():
                if numbers.random() < 0.06:
                    shard.arena.slot(numbers.randrange(14))[64 + numbers.randrange(40)] ^= 1
            if len(going) < 4 and numbers.random() < 0.5:
                common = some(numbers.randrange(3), numbers.randrange(1, 600))
                new = request([*common, *some(9 + numbers.randrange(3), numbers.randrange(1, 90))])
                going[new] = one.begin(new) > 0
            computing = [each for each, waits in going.items() if not waits]
            one.run({each: one.count(each, numbers.randrange(60, 300)) for each in computing})
            for result in one.results:
                came.update(result.arrived)
                failed |= result.not_arrived
            for each, waits in list(going.items()):
                if waits and came[each.request_id] == 2:
                    del came[each.request_id]
                    going[each] = False
                    if each.request_id in failed:
                        failed.remove(each.request_id)
                        one.give_back(each)
                        each.num_computed_tokens = 0
                        going[each] = one.begin(each) > 0
                elif not waits:
                    one.check(each, each.num_computed_tokens)
                    if each.num_computed_tokens == each.num_tokens:
                        del going[each]
                        if one.end(each):
                            ended[each.request_id] = each
            for name in set.intersection(*(result.ended for result in one.results)):
                one.give_back(ended.pop(name))
