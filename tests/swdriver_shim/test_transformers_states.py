"""Real models with layers of Mamba and linear attention: they continue from states that were stored."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swdriver_shim.adapters.transformers import PrefixCache
from swdriver_shim.adapters.transformers_states import StateGroup, cached, state_group
from swdriver_shim.keys import COLUMN_TOKENS
from tests.kvss_agent.plane import running
from tests.swdriver_shim.model_worlds import World, Worlds
from tests.swdriver_shim.tiny_models import (
    CHUNK,
    NOT_CONTINUED,
    STATEFUL,
    compute,
    numbers,
    qwen3_next,
    spec_of,
)

pytestmark = pytest.mark.models

C = COLUMN_TOKENS
# Logits are up to 4 here. Pieces of other lengths make a difference of up to 0.00007, and a state that
# is not there one of 0.03 and more.
ROUNDING = {"rtol": 0, "atol": 0.0005}
LENGTH = 300  # two chunks and 44 tokens
LAST = 4 * C  # the last column border before its end


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Worlds]:
    with running(tmp_path) as plane:
        made = Worlds(plane)
        yield made
        made.close()


@pytest.fixture(params=sorted(STATEFUL))
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds.make(STATEFUL[request.param]())


def ends(tokens: Sequence[int]) -> list[int]:
    """Where a prefill in chunks has a state."""
    return sorted({*range(CHUNK, len(tokens), CHUNK), (len(tokens) - 1) // C * C} - {0})


def greedy(model: Any, computed: tuple[Any, Any], count: int) -> list[int]:
    """The next tokens after these logits and their cache, which is of all but the last of them then."""
    logits, past = computed
    tokens = [int(logits.argmax())]
    with torch.no_grad():
        while len(tokens) < count:
            asked = torch.tensor([tokens[-1:]])
            tokens.append(int(model(input_ids=asked, **cached(model, past)).logits[0, -1].argmax()))
    return tokens


def same_answer(model: Any, tokens: list[int], logits: Any) -> None:
    """As a recompute in one piece has it, up to rounding; and not as one after another beginning."""
    once, _ = compute(model, tokens)
    torch.testing.assert_close(logits, once, **ROUNDING)
    assert logits.argmax() == once.argmax()


def test_what_is_refilled_is_bit_for_bit_what_was_computed(world: World) -> None:
    tokens = numbers(1, LENGTH)
    cold = world.cache().prefill(tokens)
    assert (cold.refilled, cold.stored.failed) == (0, 0)
    kv_groups = len(world.spec.groups) - 1
    assert cold.stored.columns == 5 * kv_groups + 3, "states of two chunks, of which one is whole, …"
    _, right = compute(world.model, tokens[:LAST], [CHUNK])
    past = world.cache().refill(tokens)
    states = state_group(world.model.config, world.model.dtype)
    assert isinstance(states, StateGroup)
    assert states.read(past) == states.read(right)
    assert any(states.read(past))
    for got, computed in zip(past.layers, right.layers, strict=True):
        if getattr(computed, "keys", None) is not None:
            assert torch.equal(got.keys, computed.keys)
            assert torch.equal(got.values, computed.values)


def test_logits_are_those_of_a_recompute(world: World) -> None:
    tokens = numbers(1, LENGTH)
    first = world.cache().prefill(tokens)
    assert torch.equal(first.logits, compute(world.model, tokens, ends(tokens))[0])
    longer = [*tokens[: CHUNK + 30], *numbers(2, 200)]
    second = world.cache().prefill(longer)
    assert second.refilled == CHUNK, "where the other prompt had a state"
    assert torch.equal(second.logits, compute(world.model, longer, ends(longer))[0])
    same_answer(world.model, longer, second.logits)
    again = world.cache().prefill(tokens)
    assert again.refilled == LAST
    assert torch.equal(again.logits, first.logits)


def test_greedy_answers_are_the_same_token_by_token_and_conversations_go_on(world: World) -> None:
    model, cache, tokens = world.model, world.cache(), numbers(3, 250)
    right = greedy(model, compute(model, tokens), 40)
    cache.prefill(tokens)
    done = cache.prefill(tokens)
    assert done.refilled == 3 * C
    assert greedy(model, (done.logits, done.past), 40) == right
    assert len(set(right)) > 3, "an answer of one token over and over would prove little"
    answer = [*tokens, *right]
    cache.store(answer, done.past, verified=len(answer) - 1)
    follow_up = [*answer, *numbers(4, 30)]
    turn = cache.prefill(follow_up)
    assert turn.refilled == len(answer) - 1, "what was computed of the answer"
    same_answer(model, follow_up, turn.logits)
    later = greedy(model, (turn.logits, turn.past), 20)
    assert later == greedy(model, compute(model, follow_up), 20)


def test_generate_goes_on_from_what_is_refilled(worlds: Worlds) -> None:
    world = worlds.make(qwen3_next())
    cache, tokens = world.cache(), numbers(3, 250)
    cache.prefill(tokens)
    asked, how = torch.tensor([tokens]), {"max_new_tokens": 40, "do_sample": False}
    past = cache.refill(asked)
    answer = world.model.generate(asked, past_key_values=past, **how)
    assert torch.equal(answer, world.model.generate(asked, **how))
    cache.store(answer, past)
    assert world.query(answer[0].tolist()) == 250 + 39


def test_another_org_gets_nothing(world: World) -> None:
    tokens = numbers(6, LENGTH)
    cold = world.cache("acme").prefill(tokens)
    other = world.cache("globex").prefill(tokens)
    assert other.refilled == 0
    assert torch.equal(other.logits, cold.logits)


def test_a_state_that_was_damaged_is_a_shorter_hit_and_the_answer_is_right(world: World) -> None:
    tokens = numbers(7, LENGTH)
    world.cache().prefill(tokens)
    [damaged] = [one for one in world.explain(tokens)["state"] if one.depth == 3]
    assert damaged.slot is not None
    world.plane.shards["state"].arena.slot(damaged.slot)[1000] ^= 1
    done = world.cache().prefill(tokens)
    assert done.refilled == CHUNK
    same_answer(world.model, tokens, done.logits)
    assert world.cache().prefill(tokens).refilled == LAST, "what was damaged is stored again"


def test_what_was_guessed_is_stored_without_its_state(world: World) -> None:
    tokens = numbers(8, 2 * C + 10)
    past = world.cache().prefill(tokens).past
    guessed = [*tokens, *numbers(9, 12)]
    with torch.no_grad():
        world.model(input_ids=torch.tensor([guessed[-12:]]), **cached(world.model, past))
    if not world.spec.shape().has_kv:
        with pytest.raises(ValueError, match="say what is verified"):
            world.cache().store(guessed, past)
        return
    world.cache().store(guessed, past, verified=len(tokens) + 3)
    assert world.query(guessed) == 2 * C, "a tail has taken the slot of the one that it continues"


@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_any_prefix_while_states_and_columns_are_displaced(worlds: Worlds, name: str) -> None:
    """Conversations that share beginnings, in an agent with room for some of them."""
    world, dice = worlds.make(STATEFUL[name](), slots=12), random.Random(5)
    cache = world.cache(chunk=C)
    beginnings = [numbers(seed, 400) for seed in range(3)]
    refilled = 0
    for turn in range(20):
        beginning = dice.choice(beginnings)[: dice.choice([1, C, 100, 2 * C, 200, 5 * C, 400])]
        tokens = [*beginning, *numbers(100 + turn, dice.choice([0, 1, 30, C, 150]))]
        done = cache.prefill(tokens)
        refilled += done.refilled
        same_answer(world.model, tokens, done.logits)
    assert refilled > 5 * C
    assert world.driver.ledger.tally("acme").missed["displaced"] > 0  # type: ignore[index]


@pytest.mark.parametrize("name", sorted(NOT_CONTINUED))
def test_models_that_do_not_continue_from_a_state_are_refused(worlds: Worlds, name: str) -> None:
    world = worlds.make(NOT_CONTINUED[name]())
    with pytest.raises(ValueError, match="does not continue from a state: in this version of transf"):
        world.cache()


def test_how_many_states_get_a_slot_is_the_drivers_affair(worlds: Worlds) -> None:
    model = qwen3_next()
    made = spec_of(model)
    assert made.groups[-1].tokens_per_state == 512
    assert made.groups[-1].bytes_per_state == (3 * 4 * (128 * 4 + 4 * 16 * 16),)
    assert spec_of(model.bfloat16()).groups[-1].bytes_per_state == (3 * (2 * 128 * 4 + 4 * 4 * 16 * 16),)
    assert isinstance(worlds.make(qwen3_next()).cache(), PrefixCache)
