"""Which prompt of its conversation a prompt is, and what follows from that for its columns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from swdriver_shim.cache.displacement.cost import EXPECTED, kind_of
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.reuse.miniature import Miniature
from swdriver_shim.cache.snapshot import ColumnSnapshot
from swdriver_shim.cache.spills import Dates
from swdriver_shim.cache.turns import TURN_MAX, Turns
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.swdriver_shim.forests import Column, key
from tests.swdriver_shim.ledgers import conversation
from tests.swdriver_shim.prompts import FULL, prompt
from tests.swdriver_shim.prompts import keys as keys_of


def keys(*names: str) -> list[bytes]:
    return [key(name) for name in names]


def test_what_goes_on_behind_the_end_of_another_is_the_turn_after_it() -> None:
    turns = Turns()
    assert turns.asked(keys("a", "b")) == 0
    assert turns.of(keys("a", "b", "answer")) == 0, "its answer is no turn"
    assert turns.asked(keys("a", "b", "answer", "c")) == 1
    assert turns.asked(keys("a", "b", "answer", "c", "d")) == 2
    assert turns.asked(keys("a", "b", "answer", "c", "d")) == 2, "asked for again"
    assert turns.asked(keys("a", "x")) == 0, "another conversation with the same beginning"
    assert len(turns) == 2


def test_a_shared_beginning_that_was_asked_for_alone_makes_one_conversation_a_turn_older() -> None:
    turns = Turns()
    for _ in range(2):
        assert turns.asked(keys("system")) == 0
    found = [turns.asked(keys("system", str(number))) for number in range(10)]
    assert found == [1] + [0] * 9


def test_a_prompt_without_a_whole_column_has_no_end() -> None:
    turns = Turns()
    assert turns.asked([]) == turns.of([]) == 0
    assert not len(turns)


def test_turns_are_bounded_and_those_that_were_asked_for_longest_ago_are_dropped() -> None:
    turns = Turns(ends_max=3)
    for name in "abc":
        turns.asked(keys(name))
    turns.asked(keys("a"))
    turns.asked(keys("d"))
    assert [turns.asked(keys(name, f"{name} next")) for name in "acdb"] == [1, 1, 1, 0]
    assert len(turns) == 3
    turns = Turns()
    path = list[bytes]()
    for number in range(TURN_MAX + 20):
        path.append(key(str(number)))
        found = turns.asked(path)
    assert found == TURN_MAX


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=5), max_size=30))
def test_ends_are_those_of_prompts_that_were_asked_for(asked: Sequence[Sequence[str]]) -> None:
    """As in a model that keeps whole prompts."""
    turns, model = Turns(), dict[str, int]()
    for one in asked:
        path = "".join(one)
        before = max((end for end in model if path.startswith(end)), key=len, default="")
        turn = model.pop(before) + (before != path) if before else 0
        if path:
            model[path] = turn
        assert turns.asked([key(path[:end]) for end in range(1, len(path) + 1)]) == turn
        assert len(turns) == len(model)


def ledger(slots: int = 100, tiers: Tiers = Tiers.DRAM) -> Ledger:
    made = Ledger(FULL, "llama")
    made.set_slot_limit(0, slots)
    made.set_policies({"acme": OrgPolicies(policy=Policy(displacement="cost", tiers=tiers))}, 0)
    return made


def serve(made: Ledger, tokens: Sequence[int], answer: int, now: float) -> None:
    """A request, and its answer of so many columns."""
    asked = prompt(tokens, "acme")
    match = made.match(asked, now)
    made.release(match)
    asked.extend(conversation(*range(50, 50 + answer)))
    for verified in (asked.tokens - COLUMN_TOKENS, asked.tokens):  # engines store as they compute
        made.finish_store(made.begin_store(asked, verified, now), now)


def test_columns_say_which_turn_stored_them_however_many_were_displaced_since() -> None:
    made = ledger()
    head = conversation(1, 2)
    answer = [*head, *conversation(50)]
    serve(made, head, 1, 1.0)
    serve(made, [*answer, *conversation(3)], 1, 2.0)
    turns = {column.depth: column.turn for column in made.accounts["acme"].columns(0)}
    assert turns == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
    made.set_slot_limit(0, 0)
    made.set_slot_limit(0, 100)
    serve(made, [*answer, *conversation(3), *conversation(50), *conversation(4)], 0, 3.0)
    assert {column.turn for column in made.accounts["acme"].columns(0)} == {2}


def test_what_comes_back_from_tier_2_has_the_turn_of_the_request_that_wants_it() -> None:
    made = ledger(tiers=Tiers.TIER2)
    path = list[int]()
    for kind in range(3):
        path += conversation(kind)
        serve(made, path, 0, 1.0 + kind)
    made.set_slot_limit(0, 0)
    made.set_slot_limit(0, 100)
    asked = prompt([*path, *conversation(9)], "acme")
    made.release(made.match(asked, 9.0))
    for recall in made.tier2.begin_recalls(asked, [{0, 1, 2}], 9.0):
        made.tier2.start_recall(recall, 9.0)
        made.tier2.finish_recall(recall, 9.0, {column: Dates(8.0, 8.0) for column, _ in recall.places})
    assert [column.turn for column in made.accounts["acme"].columns(0)] == [3, 3, 3]


def test_a_restart_keeps_the_turns_of_columns_and_forgets_where_prompts_ended() -> None:
    made, again = ledger(), ledger()
    serve(made, conversation(1), 0, 1.0)
    serve(made, conversation(1, 2), 0, 2.0)
    snapshot = made.snapshot(3.0, 1000.0)
    again.restore(snapshot, lambda _org, _namespace: keys_of("acme"), 3.0, 1000.0)
    assert {column.depth: column.turn for column in again.accounts["acme"].columns(0)} == {0: 0, 1: 1}
    assert not len(again.accounts["acme"].turns)
    old = [structs.replace(one, turn=0) for one in snapshot.columns]
    fields = [msgspec.msgpack.decode(msgspec.msgpack.encode(one))[:-1] for one in snapshot.columns]
    raw = msgspec.msgpack.encode(fields)
    assert msgspec.msgpack.decode(raw, type=list[ColumnSnapshot]) == old, "of before there were turns"


def test_a_purge_forgets_where_prompts_ended() -> None:
    made = ledger()
    serve(made, conversation(1, 2), 0, 1.0)
    assert len(made.accounts["acme"].turns) == 1
    made.purge("acme")
    assert not len(made.accounts["acme"].turns)


@pytest.mark.parametrize("turn", [0, 1, 2, 3, TURN_MAX])
def test_kinds_tell_apart_turns_and_uses_and_of_tails_whether_they_were_used(turn: int) -> None:
    whole = Column(key("a"), turn=turn)
    tail = Column(key("a"), turn=turn, tail=True)
    kinds = [kind_of(whole, uses) for uses in range(10)]
    assert kinds == sorted(kinds)
    assert len(set(kinds)) > 1
    of_tails = {kind_of(tail, uses) for uses in range(10)}
    assert not of_tails & {
        kind_of(Column(key("a"), turn=one), uses) for one in range(5) for uses in range(9)
    }
    assert max(*kinds, *of_tails) < len(EXPECTED)
    assert all(EXPECTED[kind] < EXPECTED[0] for kind in of_tails)


def test_previews_know_the_turns_of_their_sample() -> None:
    made = ledger()
    head, answer, more = conversation(1, 2), conversation(50), conversation(3)
    serve(made, head, 1, 1.0)
    serve(made, [*head, *answer, *more], 0, 2.0)
    sample = made.reuse("acme", 3.0)
    assert sample is not None
    miniature = Miniature(Policy(displacement="cost"), 100.0)
    miniature.run(sample.events(), 0.0)
    assert {one.needs: one.turn for one in miniature._columns.values()} == {0: 0, 1: 0, 2: 0, 3: 1}
    assert all(one.terms == one.turn for one in miniature._columns.values()), "runs go by them"
