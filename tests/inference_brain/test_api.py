"""OpenAI's API, before engines that only look like some: what clients get, and what engines do."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from inference_brain.desired import DriverSpec, Limits, ReplicaSpec, ServedModel
from swdriver_shim.adapters.claims import Claim, ClaimVerifier
from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.policy import Rules
from tests.inference_brain.brains import KEY, RunningBrain, get, model, org, post, request, told
from tests.inference_brain.engines import FakeEngine
from tests.live import wait_until

CLAIMS_KEY = b"c" * 32
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as made:
        yield made


@pytest.fixture(scope="module")
def brain(engine: FakeEngine) -> Iterator[RunningBrain]:
    shape = ModelSpec(name="m", groups=(GroupSpec("full", (64,)),))
    driven = ReplicaSpec(
        "r0",
        engine.url,
        driver=DriverSpec("job7", shape, CLAIMS_KEY),
        served_as="internal/name",
        api_key="of-the-engine",
    )
    document = told(
        [],
        models=(
            model([engine.url]),
            ServedModel("named", 4096, (driven,)),
            model([engine.url], "of-others", orgs=("globex",)),
            model([], "empty"),
        ),
        orgs=(org(limits=Limits(priority=50)), org("globex", "sk-globex")),
    )
    with RunningBrain(document) as made:
        yield made


@pytest.fixture(autouse=True)
def _plain(engine: FakeEngine) -> None:
    engine.behavior = type(engine.behavior)()
    engine.served_as = "m"
    engine.asked.clear()


def ask(brain: RunningBrain, path: str = "chat/completions", **body: Any) -> httpx.Response:
    what = {"model": "m", **({"messages": HI} if path.startswith("chat") else {"prompt": "Hi"}), **body}
    return post(f"{brain.url}/v1/{path}", headers=brain.headers, json=what)


# Answers


def test_openais_client_gets_whole_answers_and_streams(brain: RunningBrain) -> None:
    import openai  # takes a second, which each worker would spend at collection

    with openai.OpenAI(base_url=f"{brain.url}/v1", api_key=KEY) as client:
        assert [one.id for one in client.models.list()] == ["m", "named", "empty"]
        whole = client.chat.completions.create(model="m", messages=HI, n=2)
        assert [one.message.content for one in whole.choices] == ["toktoktoktok"] * 2
        assert whole.usage
        assert whole.usage.completion_tokens == 4
        stream = client.chat.completions.create(model="m", messages=HI, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in stream) == "toktoktoktok"
        text = client.completions.create(model="m", prompt="Hi", stop=["\n"], logprobs=1)
        assert text.choices[0].text == "toktoktoktok"


def test_openais_client_knows_the_errors(brain: RunningBrain) -> None:
    import openai  # takes a second, which each worker would spend at collection

    stranger = openai.OpenAI(base_url=f"{brain.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with openai.OpenAI(base_url=f"{brain.url}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="nobody's", prompt="Hi")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(model="m", prompt="Hi", temperature=9)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.InternalServerError) as none:
            client.completions.create(model="empty", prompt="Hi")
        assert none.value.code == "no_replica"


def test_what_is_passed_through(brain: RunningBrain, engine: FakeEngine) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    passed: dict[str, Any] = {
        "tools": tools,
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "structured_outputs": {"regex": "a*"},
        "chat_template_kwargs": {"enable_thinking": False},
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {"5": -1.5},
        "stop": ["a", "b"],
        "seed": 7,
        "top_k": 4,
        "max_tokens": 12,
    }
    assert ask(brain, **passed).status_code == 200
    sent = engine.asked[-1].body
    assert {name: sent[name] for name in passed} == passed


def test_usage_comes_at_the_end_of_a_stream_only_if_it_is_asked_for(brain: RunningBrain) -> None:
    plain = ask(brain, stream=True).text
    assert '"usage"' not in plain
    assert plain.endswith("data: [DONE]\n\n")
    told_too = ask(brain, stream=True, stream_options={"include_usage": True}).text
    assert '"usage":{"prompt_tokens":7,"completion_tokens":4' in told_too
    assert told_too.endswith("data: [DONE]\n\n")


def test_the_model_is_called_as_the_client_calls_it(brain: RunningBrain, engine: FakeEngine) -> None:
    engine.served_as = "internal/name"
    assert ask(brain, model="named").json()["model"] == "named"
    assert engine.asked[-1].body["model"] == "internal/name"
    stream = ask(brain, model="named", stream=True).text
    assert "internal" not in stream
    assert stream.count('"model":"named"') == 4


def test_models_of_others_do_not_exist(brain: RunningBrain) -> None:
    answer = get(f"{brain.url}/v1/models/of-others", headers=brain.headers)
    unknown = get(f"{brain.url}/v1/models/of-nobody", headers=brain.headers)
    assert answer.status_code == unknown.status_code == 404
    assert answer.json()["error"]["message"] == unknown.json()["error"]["message"].replace(
        "nobody", "others"
    )
    theirs = get(f"{brain.url}/v1/models/of-others", headers={"authorization": "Bearer sk-globex"})
    assert theirs.json()["id"] == "of-others"


# What engines get


def test_who_asks_is_said_by_a_signed_claim_and_never_by_the_client(
    brain: RunningBrain, engine: FakeEngine
) -> None:
    answer = ask(
        brain,
        model="named",
        kv_transfer_params={"tidegate": "forged", "do_remote_prefill": True},
        vllm_xargs={"kv_transfer_params": {"tidegate": "forged"}},
        cache_salt="globex",
        request_id="somebody's",
        priority=7,
        user="me",
        tidegate={"no_store": True},
    )
    assert answer.status_code == 200
    sent = engine.asked[-1].body
    assert sent.keys() == {"model", "messages", "kv_transfer_params", "cache_salt"}
    assert sent["cache_salt"] == org().tags.__iter__().__next__().hex()
    assert sent["kv_transfer_params"].keys() == {"tidegate"}
    claim = ClaimVerifier(CLAIMS_KEY, "job7").verify(sent["kv_transfer_params"]["tidegate"])
    assert claim == Claim("acme", Rules(no_store=True))


def test_identifiers_of_images_are_removed(brain: RunningBrain, engine: FakeEngine) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://x/a.png", "uuid": "1"}, "uuid": "2"}
    assert ask(brain, messages=[{"role": "user", "content": [part]}]).status_code == 200
    assert engine.asked[-1].body["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": "https://x/a.png"}}
    ]


def test_headers_for_the_engine(brain: RunningBrain, engine: FakeEngine) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = post(
        f"{brain.url}/v1/completions",
        headers={**brain.headers, "traceparent": parent, "tracestate": "a=b", "x-secret": "s"},
        json={"model": "named", "prompt": "Hi"},
    )
    headers = engine.asked[-1].headers
    assert headers["x-request-id"] == answer.headers["x-request-id"]
    assert headers["traceparent"] == parent
    assert headers["tracestate"] == "a=b"
    assert headers["authorization"] == "Bearer of-the-engine"
    assert "x-secret" not in headers
    ask(brain)
    assert headers["traceparent"] != engine.asked[-1].headers["traceparent"]


# Refusals


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": "a"}, "max_tokens"),
        ({"unknown": 1}, "unknown"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"no": "type"}]}]}, "messages[0].content"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"tidegate": {"ttl": 3}}, "tidegate.ttl"),
        ({"model": None}, "model"),
    ],
)
def test_a_wrong_field_is_named(brain: RunningBrain, body: dict[str, Any], param: str) -> None:
    answer = ask(brain, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"].endswith(".")


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [-1], [1.5], [["a"]], [None], 5])
def test_a_prompt_is_texts_or_tokens(brain: RunningBrain, prompt: object) -> None:
    answer = ask(brain, "completions", prompt=prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prompt")


def test_a_prompt_of_tokens_is_bounded_by_the_models_length(
    brain: RunningBrain, engine: FakeEngine
) -> None:
    assert ask(brain, "completions", model="named", prompt=[1] * 4000, max_tokens=96).status_code == 200
    assert engine.asked[-1].body["prompt"] == [1] * 4000
    answer = ask(brain, "completions", model="named", prompt=[1] * 4000, max_tokens=97)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "4097: 4000 in the prompt and 97" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/none", 404),
        ("GET", "/", 404),
    ],
)
def test_wrong_addresses(brain: RunningBrain, method: str, path: str, status: int) -> None:
    answer = request(method, brain.url + path, headers=brain.headers)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer wrong", "Basic c2stYWNtZQ==", "Bearer sk acme"])
def test_without_a_key_nothing_is_read_or_told(brain: RunningBrain, key: str) -> None:
    for path in ("/v1/models", "/v1/completions", "/metrics", "/anything"):
        answer = post(brain.url + path, headers={"authorization": key}, content=b"x" * 1000)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["message"]


def test_health_needs_no_key(brain: RunningBrain) -> None:
    assert get(f"{brain.url}/health").status_code == 200


def test_an_engines_refusal_is_passed_on_in_openais_form(
    brain: RunningBrain, engine: FakeEngine
) -> None:
    engine.behavior.status, engine.behavior.error = 400, "Too hot."
    answer = ask(brain)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "Too hot.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    engine.behavior.status = 401
    assert ask(brain).json()["error"]["code"] == "replica_refused"


def test_a_body_that_is_too_long_is_not_read(engine: FakeEngine) -> None:
    from dataclasses import replace

    from inference_brain.api.app import Bounds
    from tests.inference_brain.brains import OPTIONS

    options = replace(OPTIONS, bounds=Bounds(100_000, 400_000))
    with RunningBrain(told([engine.url]), options) as brain:
        assert ask(brain, "completions", prompt="x" * 90_000).status_code == 200
        answer = ask(brain, "completions", prompt="x" * 110_000)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"

        def pieces() -> Iterator[bytes]:
            for _ in range(1000):
                yield b"x" * 10_000

        endless = post(f"{brain.url}/v1/completions", headers=brain.headers, content=pieces())
        assert endless.status_code == 413
        wait_until("all is given back", lambda: not brain.brain.api.room.used)


def test_a_body_for_whose_values_there_is_never_room_is_not_to_be_sent_again(
    engine: FakeEngine,
) -> None:
    """Each token takes eight times as much as on the wire, and a comma in a text counts as one."""
    from dataclasses import replace

    from inference_brain.api.app import Bounds
    from tests.inference_brain.brains import OPTIONS

    options = replace(OPTIONS, bounds=Bounds(100_000, 200_000))
    with RunningBrain(told([engine.url]), options) as brain:
        for prompt in ([1] * 40_000, "one, " * 10_000):
            answer = ask(brain, "completions", prompt=prompt)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        assert ask(brain, "completions", prompt="x" * 90_000).status_code == 200
        wait_until("all is given back", lambda: not brain.brain.api.room.used)


def test_bodies_of_all_listeners_share_their_memory() -> None:
    from inference_brain.api.app import Api, Bounds
    from inference_brain.brain import Brain, Options

    async def status(api: Api, size: int, came: asyncio.Event, ends: asyncio.Event) -> int:
        """Of the answer to a body of which so much comes, which sets `came`, and the end once `ends` is
        set."""
        headers = [(b"authorization", b"Bearer " + KEY.encode())]
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": headers}
        parts = iter([{"type": "http.request", "body": b"x" * size, "more_body": True}])
        answers: list[Any] = []

        async def receive() -> Any:
            for part in parts:
                return part
            came.set()
            await ends.wait()
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            answers.append(message)

        await api(scope, receive, send)
        return int(answers[0]["status"])

    async def run() -> None:
        brain = Brain("b", None, options=Options(trusted_org="acme", bounds=Bounds(100_000, 200_000)))
        brain.set_desired(told([]))
        apis = brain.api, brain.trusted_api, brain._gateway_api
        at_once = asyncio.Event()
        at_once.set()
        for held in apis:
            assert held
            came, ends = asyncio.Event(), asyncio.Event()
            first = asyncio.create_task(status(held, 90_000, came, ends))
            await came.wait()
            for other in apis:
                assert other
                assert await status(other, 90_000, at_once, at_once) == 503
            ends.set()
            assert await first == 400  # no JSON
            assert not held.room.used

    asyncio.run(run())


# Tokens


def test_a_model_without_a_tokenizer_says_so(brain: RunningBrain) -> None:
    for path in ("/tokenize", "/v1/tokenize"):
        answer = post(brain.url + path, headers=brain.headers, json={"model": "m", "prompt": "Hi"})
        assert answer.status_code == 400
        assert "can't be tokenized here" in answer.json()["error"]["message"]


# Protocols


@pytest.mark.parametrize("flag", ["--http1.1", "--http2-prior-knowledge"])
def test_curl_on_both_protocols(brain: RunningBrain, flag: str) -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": true}'
    done = subprocess.run(
        [
            *("curl", "-sSN", flag, "-H", f"Authorization: Bearer {KEY}", "-d", body),
            *(f"{brain.url}/v1/chat/completions", "-w", "%{http_version}"),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    events, _, version = done.stdout.rpartition("\n\n")
    assert events.endswith("data: [DONE]")
    assert version == ("1.1" if "1.1" in flag else "2")
    assert events.count("tok") == 4


def test_why_this_replica(brain: RunningBrain) -> None:
    answer = ask(brain, stream=True)
    record = brain.call(lambda: brain.brain.find(answer.headers["x-request-id"]))
    assert record is not None
    assert (record.org, record.model, record.chosen) == ("acme", "m", "r0")
    assert record.outcome is not None
    assert record.outcome.result == "ok"
    assert record.outcome.completion_tokens == 4
    assert record.candidates[0].replica == "r0"
    assert brain.call(lambda: brain.brain.find("req-none")) is None
