"""Real models: what is refilled is bit for bit what was computed, and logits are those of a recompute.

Two ways to compute the same are the same bits only if matrices have the same shapes: another shape is
summed up in another order. So most is compared exactly with a recompute in the same chunks, and up to
`ROUNDING` with one in a single piece.
"""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from console.environment import PROJECT
from swdriver_shim.adapters.transformers import layer_groups, model_spec
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import COLUMN_TOKENS, Keys
from swdriver_shim.policy import Rules
from tests.kvss_agent.plane import DRIVER, SECRET, running
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import wait_until
from tests.swdriver_shim.daemons import ACME, GLOBEX, Daemon, org
from tests.swdriver_shim.model_worlds import World, Worlds
from tests.swdriver_shim.tiny_models import (
    CHUNK,
    MODELS,
    chunks,
    compute,
    gemma3,
    mistral,
    numbers,
    spec_of,
)

pytestmark = pytest.mark.models

C = COLUMN_TOKENS
# Logits are up to 7 here, of 24 bits. Chunks of 7 tokens differ from one piece by 0.000003, and another
# token makes a difference of 0.1 and more.
ROUNDING = {"rtol": 0, "atol": 0.00005}
LENGTH = 300  # three windows of the models, two chunks and a third of one, a tail of 44


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Worlds]:
    with running(tmp_path) as plane:
        made = Worlds(plane)
        yield made
        made.close()


@pytest.fixture(params=sorted(MODELS))
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds.make(MODELS[request.param]())


def same_answer(model: Any, tokens: list[int], logits: Any) -> None:
    """As a recompute in one piece has it, up to rounding; and not as another prompt has it."""
    once, _ = compute(model, tokens)
    torch.testing.assert_close(logits, once, **ROUNDING)
    assert logits.argmax() == once.argmax()
    other, _ = compute(model, [*tokens[:-2], (tokens[-2] + 1) % 200, tokens[-1]])
    assert (logits - other).abs().max() > 100 * ROUNDING["atol"], "which would be seen"


def test_what_is_refilled_is_bit_for_bit_what_was_computed(world: World) -> None:
    tokens = numbers(1, LENGTH)
    cold = world.cache().prefill(tokens)
    assert (cold.refilled, cold.stored.failed) == (0, 0)
    assert cold.stored.columns == 5 * len(world.spec.groups)
    _, right = compute(world.model, tokens, chunks(tokens))
    past = world.cache().refill(tokens)
    length = LENGTH - 1
    assert past.get_seq_length() == length, "all but the last token, the tail included"
    for got, computed in zip(past.layers, right.layers, strict=True):
        assert got.get_seq_length() == length
        kept = min(length, computed.keys.shape[-2] - 1)
        for ours, theirs in ((got.keys, computed.keys), (got.values, computed.values)):
            assert ours.shape[-2] >= kept >= min(length, 98)
            assert torch.equal(ours[:, :, -kept:], theirs[:, :, :-1][:, :, -kept:])


def test_logits_are_those_of_a_recompute(world: World) -> None:
    tokens = numbers(1, LENGTH)
    first = world.cache().prefill(tokens)
    assert torch.equal(first.logits, compute(world.model, tokens, chunks(tokens))[0])
    longer = [*tokens[: 2 * CHUNK], *numbers(2, 200)]
    second = world.cache().prefill(longer)
    assert second.refilled == 2 * CHUNK
    assert torch.equal(second.logits, compute(world.model, longer, chunks(longer))[0])
    same_answer(world.model, longer, second.logits)
    again = world.cache().prefill(longer)
    assert again.refilled == len(longer) - 1
    assert again.stored.columns == 0
    same_answer(world.model, longer, again.logits)


def test_greedy_answers_are_the_same_and_go_on_from_what_is_stored(world: World) -> None:
    model, cache, tokens = world.model, world.cache(), numbers(3, 250)
    cache.prefill(tokens)
    asked = torch.tensor([tokens])
    how = {"max_new_tokens": 40, "do_sample": False}
    right = model.generate(asked, **how)
    past = cache.refill(asked)
    assert past.get_seq_length() == 249
    answer = model.generate(asked, past_key_values=past, **how)
    assert torch.equal(answer, right)
    cache.store(answer, past)
    follow_up = [*answer[0].tolist(), *numbers(4, 30)]
    turn = cache.prefill(follow_up)
    assert turn.refilled == 250 + 39, "what generate computed of its answer"
    same_answer(model, follow_up, turn.logits)


def test_a_whole_prompt_of_whole_columns_is_computed_from_its_last_token_on(world: World) -> None:
    tokens = numbers(5, 4 * C)
    world.cache().prefill(tokens)
    again = world.cache().prefill(tokens)
    assert again.refilled == 4 * C - 1
    same_answer(world.model, tokens, again.logits)


def test_a_window_reaches_as_far_back_from_the_token_before_the_last(worlds: Worlds) -> None:
    """It needs the last of a column that no window of 64 after the whole prompt would need."""
    world = worlds.make(mistral(C + 1))
    tokens = numbers(5, 4 * C)
    world.cache().prefill(tokens)
    past = world.cache().refill(tokens)
    assert all(layer.keys.shape[-2] >= C for layer in past.layers)
    again = world.cache().prefill(tokens)
    assert again.refilled == 4 * C - 1
    same_answer(world.model, tokens, again.logits)


def test_another_org_gets_nothing_and_the_same_one_does(world: World) -> None:
    tokens = numbers(6, LENGTH)
    cold = world.cache("acme").prefill(tokens)
    other = world.cache("globex").prefill(tokens)
    assert other.refilled == 0
    assert torch.equal(other.logits, cold.logits)
    assert world.cache("acme").prefill(tokens).refilled == LENGTH - 1


def test_a_slot_that_was_damaged_is_a_miss_and_the_answer_is_right(world: World) -> None:
    tokens = numbers(7, LENGTH)
    world.cache().prefill(tokens)
    keys = Keys("acme", b"acme".ljust(32, b"!"), world.spec.namespace())
    group = world.spec.groups[-1].name
    column = world.driver.explain(keys.prompt(tokens))[group][3]
    assert column.slot is not None
    world.plane.shards[group].arena.slot(column.slot)[1000] ^= 1
    done = world.cache().prefill(tokens)
    assert done.refilled == 3 * C
    same_answer(world.model, tokens, done.logits)
    assert world.cache().prefill(tokens).refilled == LENGTH - 1, "what was damaged is stored again"


def test_what_was_guessed_and_taken_back_is_never_stored(world: World) -> None:
    tokens, draft = numbers(8, 2 * C + 10), numbers(9, 12)
    cache = world.cache()
    past = cache.prefill(tokens).past
    with torch.no_grad():
        world.model(input_ids=torch.tensor([draft]), past_key_values=past)
    guessed = [*tokens, *draft]
    cache.store(guessed, past, verified=len(tokens) + 3)
    assert world.query(guessed) == len(tokens) + 3
    past.crop(-9)
    accepted = guessed[: len(tokens) + 3]
    corrected = [*accepted, *numbers(10, 80)]
    with torch.no_grad():
        rest = torch.tensor([corrected[len(accepted) :]])
        logits = world.model(input_ids=rest, past_key_values=past).logits[0, -1]
    same_answer(world.model, corrected, logits)
    cache.store(corrected, past)
    assert world.query(guessed) < len(guessed), "what was taken back"
    assert world.query(corrected) == len(corrected)
    same_answer(world.model, corrected, cache.prefill(corrected).logits)


def test_what_a_window_has_dropped_is_left_out_of_a_store(worlds: Worlds) -> None:
    world = worlds.make(gemma3())
    tokens = numbers(11, LENGTH)
    _, past = compute(world.model, tokens)
    stored = world.cache().store(tokens, past)
    assert (stored.columns, stored.failed) == (5 + 1, 0), "of the window the tail's column only"
    assert world.query(tokens) == 0, "which is not all that it needs"
    done = world.cache().prefill(tokens)
    same_answer(world.model, tokens, done.logits)
    assert world.query(tokens) == LENGTH


def test_more_than_there_is_kv_of_can_not_be_verified(world: World) -> None:
    tokens = numbers(12, 100)
    past = world.cache().prefill(tokens).past
    with pytest.raises(ValueError, match="101 of 101 tokens can't be verified: there is KV of 100"):
        world.cache().store([*tokens, 1], past, verified=101)


def test_what_shall_not_be_stored_is_not(world: World) -> None:
    tokens = numbers(13, 100)
    assert world.cache().prefill(tokens, Rules(no_store=True)).stored.columns == 0
    assert world.query(tokens) == 0


@pytest.mark.parametrize("kind", [mistral, gemma3])
@pytest.mark.parametrize("window", [2, 16, 64, 65, 130])
def test_any_window_and_any_prefix_while_others_are_evicted(
    worlds: Worlds, kind: Any, window: int
) -> None:
    """Conversations that share beginnings, in an agent with room for half of them."""
    world, dice = worlds.make(kind(window), slots=12), random.Random(window)
    cache = world.cache(chunk=C)
    beginnings = [numbers(seed, 400) for seed in range(3)]
    refilled = 0
    for turn in range(25):
        beginning = dice.choice(beginnings)[: dice.choice([1, C, 100, 2 * C, 200, 5 * C, 400])]
        tokens = [*beginning, *numbers(100 + turn, dice.choice([0, 1, 30, C, 150]))]
        done = cache.prefill(tokens)
        refilled += done.refilled
        same = compute(world.model, tokens)[0]
        torch.testing.assert_close(done.logits, same, **ROUNDING)
    assert refilled > 25 * C / 2
    missed = world.driver.ledger.tally("acme").missed
    assert missed["displaced"] > 0  # type: ignore[index]


def test_models_whose_kv_has_no_columns_are_refused() -> None:
    mixed = LlamaConfig(num_hidden_layers=1, layer_types=["hybrid_sliding"], sliding_window=64)
    with pytest.raises(ValueError, match="layer 0 keeps a LinearAttentionAndSlidingWindow"):
        layer_groups(mixed)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(ValueError, match="with dynamic RoPE"):
        layer_groups(LlamaConfig(rope_parameters=rope))
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        layer_groups(MistralConfig(sliding_window=1))


def test_models_that_tell_positions_in_another_way_share_nothing() -> None:
    def spec_with(**rope: Any) -> ModelSpec:
        config = LlamaConfig(num_hidden_layers=1, rope_parameters={"rope_theta": 10_000.0, **rope})
        return model_spec(config, torch.float32, "llama", "r1")

    usual = spec_with(rope_type="default")
    others = [
        spec_with(rope_type="linear", factor=4.0),
        spec_with(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
        spec_with(rope_type="default", rope_theta=500_000.0),
    ]
    assert len({one.namespace() for one in (usual, *others)}) == 4
    assert usual == spec_with(rope_type="default")


def test_a_model_that_is_loaded_from_files_is_the_one_that_was_stored(tmp_path: Path) -> None:
    made = mistral()
    made.save_pretrained(tmp_path)
    found = type(made).from_pretrained(tmp_path, dtype=torch.bfloat16)
    found.config.pad_token_id = 3
    specs = [model_spec(one.config, torch.float32, "llama", "r1") for one in (made, found)]
    assert specs[0] == specs[1]


def test_prefixes_of_another_model_are_refused(worlds: Worlds) -> None:
    world = worlds.make(gemma3())
    with pytest.raises(ValueError, match="another dtype or layout"):
        World(gemma3(64), world.spec, world.plane, world.driver).cache()
    with pytest.raises(ValueError, match="another dtype or layout"):
        World(gemma3().bfloat16(), world.spec, world.plane, world.driver).cache()
    with pytest.raises(ValueError, match=r"model\.eval"):
        World(gemma3().train(), world.spec, world.plane, world.driver).cache()
    with pytest.raises(ValueError, match="a number of columns"):
        world.cache(chunk=100)
    with pytest.raises(ValueError, match="one at a time"):
        world.cache().prefill(torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one token"):
        world.cache().prefill([])


# An engine that is started again


@pytest.fixture(params=sorted(MODELS))
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Daemon]]:
    """The name of a model, and a daemon that drives an agent for it."""
    made = spec_of(MODELS[request.param]())
    with agent(tmp_path / "agent") as where:
        shape = made.shape().groups
        where.tell(document(1, *(spec(one.name, 40, one.bytes_per_token[0] * C) for one in shape)))
        daemon = Daemon(tmp_path / "driver")
        assert daemon.control("desired", told(made, where)).status_code == 202
        wait_until("it is ready", daemon.is_ready)
        yield request.param, daemon
        assert daemon.stop() == 0


def told(made: ModelSpec, where: AgentProcess) -> dict[str, Any]:
    address = f"unix:{where.directory}/data.sock"
    return {
        "generation": 1,
        "driver": DRIVER,
        "secret": base64.b64encode(SECRET).decode(),
        "model": msgspec.to_builtins(made),
        "homes": [
            {"group": group.name, "index": 0, "address": address, "shard": group.name}
            for group in made.groups
        ],
        "orgs": [org("acme", ACME), org("globex", GLOBEX)],
    }


def test_an_engine_that_is_started_again_goes_on_with_what_was_stored(
    served: tuple[str, Daemon], tmp_path: Path
) -> None:
    name, daemon = served
    model = MODELS[name]()
    tokens = numbers(1, LENGTH)
    longer = [*tokens[: 2 * CHUNK], *numbers(2, 200)]

    def engine(token: str, asked: list[int]) -> tuple[dict[str, int], Any]:
        """In a process of its own, which is gone afterwards."""
        file = tmp_path / "logits"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.swdriver_shim.tiny_models"),
                *(name, str(daemon.http.base_url), token, str(file)),
            ],
            input=json.dumps(asked),
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), torch.load(file)

    facts, logits = engine(ACME, tokens)
    assert facts == {"refilled": 0, "columns": 5 * len(spec_of(model).groups)}
    assert torch.equal(logits, compute(model, tokens, chunks(tokens))[0])

    facts, logits = engine(ACME, longer)
    assert facts["refilled"] == 2 * CHUNK
    assert torch.equal(logits, compute(model, longer, chunks(longer))[0])
    same_answer(model, longer, logits)

    facts, logits = engine(GLOBEX, longer)
    assert facts["refilled"] == 0
    assert torch.equal(logits, compute(model, longer, chunks(longer))[0])
