"""State groups: of a prefix the last state is needed, and one that is missing makes a hit shorter."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.spills import Dates
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.layout import Group, Layout, columns_in
from swdriver_shim.policy import Policy, Tiers
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.ledgers import conversation, finish, ledger, missed
from tests.swdriver_shim.prompts import NAMESPACE, PURE, SECRET, STATES, prompt

C = COLUMN_TOKENS
STATE = STATES.groups[0]


def put(made: Ledger, asked: Prompt, states: Collection[int], now: float = 0) -> list[tuple[str, int]]:
    """Store all of it; the group and the end of every column that was stored."""
    begun = made.begin_store(asked, asked.tokens, now, states=states)
    made.finish_store(begun, now)
    check_integrity(made)
    names = [group.name for group in made.layout.groups]
    return [(names[one.group], one.depth * C + one.tokens) for one, _ in begun.places]


def ends(made: Ledger, asked: Prompt, states: Collection[int]) -> list[int]:
    return [end for group, end in put(made, asked, states) if group == "state"]


# The shape


def test_a_state_has_one_size_whatever_the_number_of_tokens() -> None:
    assert [STATE.part_bytes(0, tokens) for tokens in (1, 40, 64)] == [5000] * 3
    assert STATE.slot_bytes == (8192, 4096)
    assert (STATE.shards, STATE.linked, STATE.columns_per_slot) == (2, False, 2)
    assert [STATE.first_needed(tokens) for tokens in (0, 1, 64, 65, 128)] == [0, 0, 0, 1, 1]
    assert (STATES.token_bytes, STATES.state_bytes) == (64 + 64, 5700)
    assert (STATES.has_states, STATES.has_kv, PURE.has_kv) == (True, True, False)


def test_states_get_a_slot_for_so_many_tokens_and_the_rest_of_the_memory_is_columns() -> None:
    layout = Layout(
        (Group("full", (63,)), Group("state", bytes_per_state=(4000,), tokens_per_state=512))
    )
    assert layout.column_bytes == 4096 + 512
    assert layout.slots_for(8 * 4096 + 4096) == [8, 1]
    assert layout.slots_for(8 * 4096 + 4095) == [7, 1]
    assert layout.slots_for(4096) == [0, 0]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1), st.integers(0, 5000))
def test_no_more_columns_fit(sizes: list[tuple[int, int]], memory: int) -> None:
    def needed(columns: int) -> int:
        return sum(size * -(-columns // each) for size, each in sizes)

    columns = columns_in(memory, sizes)
    assert needed(columns) <= memory < needed(columns + 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Group("state"),
        lambda: Group("state", (1,), bytes_per_state=(1,)),
        lambda: Group("state", bytes_per_state=(0,)),
        lambda: Group("state", bytes_per_state=(1,), window=5),
        lambda: Group("state", bytes_per_state=(1,), alone=True),
        lambda: Group("state", bytes_per_state=(1,), tokens_per_state=63),
        lambda: Group("full", (1,), tokens_per_state=128),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"state|stand alone"):
        make()  # type: ignore[operator]


# Stores and hits


def test_a_hit_ends_at_the_last_state_that_all_groups_can_be_continued_from() -> None:
    made, talk = ledger(layout=STATES), conversation(1, 2, 3, 4, 5)
    assert ends(made, prompt(talk), [2 * C, 3 * C]) == [2 * C, 3 * C]
    match = made.match(prompt(talk), 1)
    assert match.tokens == 3 * C
    assert [[column.depth for column in hit] for hit in match.columns] == [[2], [0, 1, 2], [0, 1, 2]]
    made.release(match)
    assert made.query(prompt(talk[: 3 * C - 1]), 1) == 2 * C
    assert made.query(prompt(talk[: 2 * C - 1]), 1) == 0
    assert made.query(prompt([*talk[: 2 * C], *conversation(9, 9)]), 1) == 2 * C, "another goes on there"


def test_without_any_state_there_is_no_hit_and_the_reason_is_told() -> None:
    made, talk = ledger(layout=STATES), conversation(1, 2, 3, rest=7)
    assert ends(made, prompt(talk), ()) == []
    assert missed(made, prompt(talk), 1) == {Reason.NO_STATE: 3 * C + 7}
    assert {one.state for one in made.explain(prompt(talk), 1)["state"]} == {"no_state"}
    assert missed(made, prompt(conversation(8, 8)), 1) == {Reason.NEVER_STORED: 2 * C}
    put(made, prompt(talk), [C])
    assert missed(made, prompt(conversation(1, 2, 3, 9)), 1) == {
        Reason.NO_STATE: 2 * C,
        Reason.NEVER_STORED: C,
    }


def test_why_kv_was_removed_is_not_why_there_is_no_state_once_it_is_stored_again() -> None:
    made, talk = ledger(layout=STATES), conversation(1, 2, 3)
    put(made, prompt(talk), [3 * C])
    made.purge("acme")
    finish(made)
    assert missed(made, prompt(talk), 1) == {Reason.PURGED: 3 * C}
    put(made, prompt(talk), [])
    assert missed(made, prompt(talk), 2) == {Reason.NO_STATE: 3 * C}
    assert {one.state for one in made.explain(prompt(talk), 2)["state"]} == {"no_state"}


def test_of_a_model_without_attention_states_are_all_there_is() -> None:
    made, talk = ledger(layout=PURE), conversation(1, 2, 3, 4, rest=9)
    assert ends(made, prompt(talk), [2 * C, len(talk)]) == [2 * C, len(talk)]
    assert made.query(prompt(talk), 1) == len(talk)
    assert made.query(prompt(talk[:-1]), 1) == 2 * C
    assert missed(made, prompt(conversation(1, 2, 3)), 1) == {Reason.NEVER_STORED: C}


def test_a_state_at_the_end_of_a_tail_is_for_prompts_that_go_on_there() -> None:
    made, talk = ledger(layout=STATES), conversation(1, 2, rest=30)
    assert ends(made, prompt(talk), [len(talk)]) == [len(talk)]
    longer = [*talk, 5, 5, 5]
    match = made.match(prompt(longer), 1)
    assert match.tokens == len(talk)
    assert [[one.tokens for one in hit] for hit in match.columns] == [[30], [C, C, 30], [C, C, 30]]
    made.release(match)
    put(made, prompt(talk[: 2 * C]), [])
    assert made.query(prompt(talk[:-1]), 1) == 0, "there is none before"


def test_states_where_no_column_ends_are_not_stored_and_those_of_no_verified_token_are_refused() -> None:
    made, asked = ledger(layout=STATES), prompt(conversation(1, 2, rest=5))
    assert ends(made, asked, [1, C - 1, C + 9, 2 * C]) == [2 * C]
    for states in ([0], [2 * C + 6]):
        with pytest.raises(ValueError, match="no states after"):
            made.begin_store(asked, asked.tokens, 1, states=states)


def test_units_have_states_at_their_ends_only() -> None:
    made = ledger(layout=STATES)
    maker = Keys("acme", SECRET, NAMESPACE, unit_tokens=2 * C)
    asked = maker.prompt(conversation(1, 2, 3, 4, rest=20))
    assert ends(made, asked, [C, 2 * C, 3 * C, 4 * C]) == [2 * C, 4 * C]
    assert made.query(asked, 1) == 4 * C


def test_a_state_goes_without_its_columns_and_comes_back_without_them() -> None:
    made, talk = ledger(layout=STATES), conversation(1, 2, 3)
    put(made, prompt(talk), [C, 3 * C])
    match = made.match(prompt(talk), 1)
    made.refuse(match.columns[0][0], Reason.SEAL_REFUSED)  # the state
    made.release(match)
    assert made.query(prompt(talk), 2) == C
    assert missed(made, prompt(talk), 2) == {Reason.NO_STATE: C, Reason.SEAL_REFUSED: C}
    assert put(made, prompt(talk), [3 * C]) == [("state", 3 * C)]
    assert made.query(prompt(talk), 3) == 3 * C


def test_with_little_room_the_last_state_is_kept_and_the_one_before_it_goes() -> None:
    made, talk = ledger(layout=STATES), conversation(1, 2, 3, 4)
    made.set_slot_limit(0, 2)
    assert ends(made, prompt(talk), [C, 2 * C, 3 * C, 4 * C]) == [3 * C, 4 * C]
    put(made, prompt(conversation(9)), [C], now=2)
    assert made.query(prompt(talk), 3) == 4 * C
    assert made.query(prompt(talk[: 3 * C]), 3) == 0


def test_a_state_that_is_read_is_not_displaced() -> None:
    made, talk = ledger(layout=STATES), conversation(1, 2)
    made.set_slot_limit(0, 1)
    put(made, prompt(talk), [2 * C])
    match = made.match(prompt(talk), 1)
    assert ends(made, prompt(conversation(9)), [C]) == []
    made.release(match)
    assert ends(made, prompt(conversation(9)), [C]) == [C]


def test_states_expire_as_columns_do() -> None:
    made, talk = (
        ledger(layout=STATES, acme=Policy(ttl_first_use_seconds=10)),
        conversation(1, 2, 3),
    )
    put(made, prompt(talk), [C])
    put(made, prompt(talk), [3 * C], now=5)
    assert [made.query(prompt(talk), now) for now in (9, 10, 14)] == [3 * C, 0, 0]
    made.sweep(10)
    put(made, prompt(talk), [C], now=12)
    assert made.query(prompt(talk), 12) == 3 * C
    assert made.query(prompt(talk), 16) == C, "the state of 5 has expired, the columns of 12 have not"


@given(
    columns=st.integers(0, 12),
    states=st.sets(st.integers(1, 12)),
    asked=st.integers(0, 12),
    rest=st.integers(0, C - 1),
)
def test_the_hit_is_the_longest_one(columns: int, states: set[int], asked: int, rest: int) -> None:
    made = ledger(slots=20, layout=STATES)
    talk = conversation(*range(columns))
    has = {one * C for one in states if one <= columns}
    put(made, prompt(talk), has)
    more = conversation(*range(asked), rest=rest)
    expected = max((end for end in has if end <= asked * C), default=0)
    assert made.query(prompt(more), 1) == expected


# Tier 2


def spilled(made: Ledger, asked: Prompt) -> set[tuple[int, bytes]]:
    """Copy everything of a prompt to tier 2, and forget it."""
    groups = range(len(made.layout.groups))
    kept = set()
    for tokens in range(asked.tokens // C, 0, -1):  # what is used is copied
        made.release(made.match(prompt(conversation(1, 2, 3, 4, 5)[: tokens * C]), 1))
    while spill := made.tier2.begin_spill(2, 100):
        kept |= {(one.group, one.key) for one in spill.copies}
        made.tier2.finish_spill(spill, [True] * len(spill.copies))
    for group in groups:
        made.set_slot_limit(group, 0)
        made.set_slot_limit(group, 8)
    return kept


def recalled(made: Ledger, asked: Prompt, disk: set[tuple[int, bytes]]) -> tuple[int, list[int], int]:
    """Bring a prompt back. How many columns were asked for, the depths of states that were brought, and
    the bytes that were expected."""
    search = made.tier2.search(asked, 0, 3)
    assert search is not None
    questions = 0
    try:
        question = next(search)
        while True:
            questions += sum(map(len, question.values()))
            question = search.send(
                {
                    group: [one for one in depths if (group, asked.keys[one]) in disk]
                    for group, depths in question.items()
                }
            )
    except StopIteration as ended:
        exists: Sequence[set[int]] = ended.value
    gain, size = made.tier2.gain(asked, exists, 3)
    states = []
    for recall in made.tier2.begin_recalls(asked, exists, 3):
        assert made.tier2.start_recall(recall, 3)
        states += [one.depth for one, _ in recall.places if one.group == 0]
        size -= sum(one.bytes for one, _ in recall.places)
        made.tier2.finish_recall(recall, 3, {one: Dates(1, 1) for one, _ in recall.places})
    assert made.query(asked, 3) == gain
    assert size == 0, "what is recalled is what was said"
    return questions, states, gain


def test_of_the_states_in_tier_2_the_last_usable_one_is_recalled() -> None:
    made = ledger(layout=STATES, acme=Policy(tiers=Tiers.TIER2))
    asked = prompt(conversation(1, 2, 3, 4, 5))
    put(made, asked, [2 * C, 4 * C])
    disk = spilled(made, asked)
    assert made.query(asked, 3) == 0
    assert recalled(made, asked, disk)[1:] == ([3], 4 * C)


def test_a_state_alone_is_recalled_where_the_rest_is_in_memory() -> None:
    made = ledger(layout=STATES, acme=Policy(tiers=Tiers.TIER2))
    asked = prompt(conversation(1, 2, 3, 4))
    put(made, asked, [4 * C])
    disk = spilled(made, asked)
    put(made, asked, [])
    assert made.query(asked, 3) == 0
    assert recalled(made, asked, disk) == (4, [3], 4 * C)


def test_tokens_are_pending_up_to_the_state_that_is_coming() -> None:
    made = ledger(layout=STATES, acme=Policy(tiers=Tiers.TIER2))
    asked = prompt(conversation(1, 2, 3, 4))
    put(made, asked, [3 * C])
    disk = spilled(made, asked)
    put(made, asked, [])
    search = made.tier2.search(asked, 0, 3)
    assert search is not None
    question = next(search)
    with pytest.raises(StopIteration) as ended:
        search.send({0: [one for one in question[0] if (0, asked.keys[one]) in disk]})
    recalls = made.tier2.begin_recalls(asked, ended.value.value, 3)
    match = made.match(asked, 3)
    assert (match.tokens, match.pending) == (0, 3 * C)
    made.release(match)
    for recall in recalls:
        made.tier2.finish_recall(recall, 3, {})
