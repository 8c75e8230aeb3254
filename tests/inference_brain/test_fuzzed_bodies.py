"""Bodies that nobody sends in good faith, to a running brain: no internal error, and nothing is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import httpx
import pytest

from tests.inference_brain.brains import RunningBrain, told
from tests.inference_brain.engines import FakeEngine
from tests.live import wait_until

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
VALID = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi \u00e9\U0001f600"}]},
        ],
        "max_tokens": 3,
        "temperature": 0.5,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "logit_bias": {"7": 1},
    },
    "/v1/completions": {"model": "m", "prompt": [[1, 2, 3]], "n": 2, "logprobs": 1, "max_tokens": 3},
    "/tokenize": {"model": "m", "prompt": "Hi", "return_token_strs": True},
    "/detokenize": {"model": "m", "tokens": [1, 2, 3]},
}
PIECES = (
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"1e999", b"\x00"),
    *(
        b"9" * 400,
        b"[" * 3000,
        b'{"a":' * 3000,
        b"\xff\xfe",
        b"\\ud800",
        b"\xf0\x9f\x98",
        b'"model":"m",',
    ),
    *(
        b'"kv_transfer_params":{"a":1},',
        b'"cache_salt":"x",',
        b'"n":1000000000,',
        b'"prompt":' + b"[[1]," * 9,
    ),
)
REFUSED = {400, 404, 408, 413, 422}


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as made:
        yield made


@pytest.fixture(scope="module")
def brain(engine: FakeEngine) -> Iterator[RunningBrain]:
    with RunningBrain(told([engine.url])) as made:
        yield made


def mutated(valid: bytes, chance: random.Random) -> bytes:
    body = bytearray(valid)
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.choices(range(len(body) + 1), k=2))
        match chance.choice(["insert", "insert", "cut", "repeat", "flip"]):
            case "insert":
                body[at:at] = chance.choice(PIECES)
            case "cut":
                del body[at : min(to, at + 40)]
            case "repeat":
                body[at:at] = body[at : min(to, at + 40)] * chance.randint(1, 50)
            case "flip" if body:
                body[at % len(body)] = chance.randrange(256)
    return bytes(body)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_fuzzed_body_is_answered_or_refused_and_nothing_of_it_is_kept(
    brain: RunningBrain, engine: FakeEngine, path: str
) -> None:
    chance = random.Random(path)
    valid = json.dumps(VALID[path], ensure_ascii=False).encode()
    seen = set()
    headers = {**brain.headers, "content-type": "application/json"}
    with httpx.Client(base_url=brain.url, headers=headers, timeout=60) as http:
        assert http.post(path, content=valid).status_code in {200, 400}, "no tokenizer: 400"
        for _ in range(150):
            body = mutated(valid, chance)
            answer = http.post(path, content=body)
            seen.add(answer.status_code)
            if answer.status_code != 200:
                assert answer.status_code in REFUSED, (body[:500], answer.text)
                assert answer.json()["error"]["message"]
    assert 400 in seen
    api = brain.brain.api
    pools = api.router.admission.pools
    wait_until("all is given back", lambda: brain.call(lambda: api.room.used == 0))
    wait_until(
        "nobody waits or is served",
        lambda: brain.call(lambda: not any(one.placed or one.queue for one in pools.values())),
    )
    assert all("kv_transfer_params" not in one.body for one in engine.asked)
    assert all(one.body.get("cache_salt") != "x" for one in engine.asked)
    engine.asked.clear()
