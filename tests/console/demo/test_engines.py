"""The models of the demo, as clients and brains see them: tokenizer, engines, who is told of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from console.accounts.principal import SYSTEM
from console.demo import places, seeding, story, tokenizer
from console.demo.engine_server import EngineServer
from console.fleet.models import Driver
from console.orgs.models import Org
from console.routing import services as models
from console.routing.models import Replica, ServedModel
from inference_brain.tokens import Chat, PromptTokenizer, load

URLS = {driver: f"http://127.0.0.1:{9000 + port}" for port, driver in enumerate(places.DRIVERS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("demo") / "tokenizer"
    tokenizer.write(made)
    return made


@pytest.fixture(scope="module")
def read(folder: Path) -> PromptTokenizer:
    return load(folder)


def test_a_token_of_the_story_is_a_word_and_the_word_is_the_token(read: PromptTokenizer) -> None:
    tokens = [0, 1, 31, 32, story.VOCABULARY - 1, 7]
    text = tokenizer.text(tokens)
    assert list(read.encode(text)) == tokens
    assert read.decode(tokens) == text
    assert len({tokenizer.word(token) for token in range(story.VOCABULARY)}) == story.VOCABULARY


def test_a_conversation_begins_with_all_tokens_of_the_turn_before(read: PromptTokenizer) -> None:
    first, second = story.answer_to([1, 2, 3], 5), story.answer_to([4], 5)
    text = tokenizer.text(first)
    both = read.encode(text + tokenizer.text(second))
    assert list(both) == [*read.encode(text), *second]


def test_whatever_people_write_is_a_prompt_of_its_own(read: PromptTokenizer) -> None:
    for text in ("Hello, wörld!", " \n\ttabs", "日本語 🎉"):
        assert read.decode(read.encode(text)) == text
    chats = [Chat([{"role": "user", "content": text}]) for text in ("one", "two")]
    assert read.chat(chats[0]) != read.chat(chats[1])


@pytest.fixture
def engine(folder: Path) -> Iterator[EngineServer]:
    """Without a driver: it computes everything."""
    made = EngineServer(story.ASSISTANT, folder, lambda _salt: None)
    serving = threading.Thread(target=made.run)
    serving.start()
    yield made
    made.close()
    serving.join()


def ask(engine: EngineServer, path: str, **body: Any) -> httpx.Response:
    url = f"http://127.0.0.1:{engine.port}/v1/{path}"
    return httpx.post(url, json={"model": "demo-chat", **body}, timeout=30)


def test_an_engine_answers_a_prompt_in_tokens_as_it_answers_its_text(engine: EngineServer) -> None:
    tokens = list(range(100))
    by_tokens = ask(engine, "completions", prompt=tokens, max_tokens=5).json()
    by_text = ask(engine, "completions", prompt=tokenizer.text(tokens), max_tokens=5).json()
    said = tokenizer.text(story.answer_to(tokens, 5))
    assert by_tokens["choices"][0]["text"] == by_text["choices"][0]["text"] == said
    assert by_text["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "total_tokens": 105,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_ends_with_usage_where_that_is_asked_for(engine: EngineServer) -> None:
    answer = ask(
        engine,
        "chat/completions",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 20
    assert len(events) == 3, "two of up to sixteen tokens, and the usage"
    assert events[1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("body", [{"prompt": []}, {"prompt": [1] * 20_000}, {"prompt": {}}])
def test_what_is_no_prompt_is_refused(engine: EngineServer, body: dict[str, Any]) -> None:
    assert ask(engine, "completions", **body).status_code == 400


@pytest.mark.django_db
def test_brains_are_told_of_the_models_once_and_of_engines_that_moved(tmp_path: Path) -> None:
    seeding.seed()
    seeding.serve_models(tmp_path, URLS)
    served = {model.model: model for model in ServedModel.objects.all()}
    assert served.keys() == {"demo-chat", "demo-code"}
    assert [one.name for one in served["demo-chat"].replicas.all()] == ["chat-1", "chat-2"]
    assert served["demo-chat"].for_all_orgs
    Driver.objects.create(name="chat-1")
    seeding.give_driver(story.ASSISTANT)
    assert Replica.objects.get(name="chat-1").driver is not None

    moved = {**URLS, "chat-1": "http://127.0.0.1:7777"}
    models.remove_replica(SYSTEM, Replica.objects.get(name="chat-2"))
    models.remove_model(SYSTEM, served["demo-code"])
    seeding.serve_models(tmp_path, moved)
    [left] = Replica.objects.all()
    assert (left.name, left.url) == ("chat-1", "http://127.0.0.1:7777")
    assert left.driver is not None
    assert [one.name for one in ServedModel.objects.all()] == ["chat"], "what people remove stays away"


@pytest.mark.django_db
def test_an_engine_knows_an_org_by_the_salt_that_brains_send() -> None:
    seeding.seed()
    salts = seeding.orgs_by_salt()
    assert set(salts.values()) == set(Org.objects.values_list("slug", flat=True))
    assert all(len(salt) == 32 for salt in salts)
