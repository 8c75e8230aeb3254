"""The whole life of a request: its key, its tokens, the caches that have them, where it goes, what
becomes of it, and a purge. Two engines that only look like some, with the cache maps of real ledgers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from inference_brain.desired import Desired, DriverSpec, OrgSpec, ReplicaSpec, ServedModel, parse
from inference_brain.metrics import ACTUAL_HIT, PREDICTED_HIT, TOKENIZED
from inference_brain.tokens.tokenizer import PromptTokenizer, load
from kvss_agent.security.confirmations import NotConfirmedYet, Question, Scope
from swdriver_shim.adapters.claims import Claim, ClaimVerifier
from swdriver_shim.desired import token_hash
from swdriver_shim.keys import COLUMN_TOKENS, isolation_tag
from swdriver_shim.layout import Group, Layout
from tests.inference_brain import map_worlds
from tests.inference_brain.brains import KEY, RunningBrain, post
from tests.inference_brain.chat_shapes import write_folder
from tests.inference_brain.engines import Behavior, FakeEngine
from tests.inference_brain.map_worlds import SECRET, MapWorld

CLAIMS_KEY = b"c" * 32
TEXT = " ".join(f"Clause {number} of the contract is as long as it is dull." for number in range(120))


class Life(NamedTuple):
    brain: RunningBrain
    engines: list[FakeEngine]
    worlds: list[MapWorld]
    tokenizer: PromptTokenizer

    def read_maps(self) -> None:
        """What the drivers report, the brain reads."""
        for index, world in enumerate(self.worlds):
            world.now += 6.0
            world.publish()
            mirror = self.brain.brain.maps.mirror(f"job{index}")
            assert mirror
            mirror.start_over()
            for raw in world.stream:
                self.brain.call(partial(mirror.read, raw, world.wall))

    def ask(self, prompt: str, **more: Any) -> httpx.Response:
        body = {"model": "served", "prompt": prompt, "max_tokens": 8, **more}
        return self.post("completions", body)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        url = f"{self.brain.url}/v1/{path}"
        return post(url, headers=self.brain.headers, json=body)

    def count(self, metric: Any) -> int:
        return self.brain.call(lambda: self.brain.brain.counts.total(metric))


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setattr(map_worlds, "AHEAD", time.time() - 1000.0)  # ledgers and brain have one clock
    folder = write_folder("qwen2", tmp_path / "tokenizer")
    worlds = [MapWorld(Layout((Group("full", (64,)),))) for _ in range(2)]
    with FakeEngine() as first, FakeEngine() as second:
        replicas = tuple(
            ReplicaSpec(
                f"r{index}", engine.url, driver=DriverSpec(f"job{index}", worlds[0].model, CLAIMS_KEY)
            )
            for index, engine in enumerate((first, second))
        )
        model = ServedModel("served", 50_000, replicas, str(folder))
        org = OrgSpec("acme", SECRET, (token_hash(KEY),))
        document = parse(
            msgspec.json.encode(Desired(generation=1, brain="b", models=(model,), orgs=(org,)))
        )
        with RunningBrain(document) as brain:
            yield Life(brain, [first, second], worlds, load(folder))


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, 1])
def test_a_request_goes_where_its_prefix_is(life: Life, where: int) -> None:
    ids = life.tokenizer.text(TEXT)
    whole = len(ids) // COLUMN_TOKENS * COLUMN_TOKENS
    assert whole > 20 * COLUMN_TOKENS
    world = life.worlds[where]
    world.store(world.prompt(ids[:whole]))
    life.read_maps()
    life.engines[where].behavior = Behavior(cached_tokens=whole)
    answer = life.ask(TEXT, stream=True)
    assert answer.status_code == 200
    assert answer.headers["x-tidegate-replica"] == f"r{where}"
    [asked] = life.engines[where].asked
    assert asked.body["prompt"] == list(ids), "it is tokenized once"
    claim = ClaimVerifier(CLAIMS_KEY, f"job{where}").verify(asked.body["kv_transfer_params"]["tidegate"])
    assert claim == Claim("acme")
    record = life.brain.call(lambda: life.brain.brain.find(answer.headers["x-request-id"]))
    assert record
    assert record.prompt_tokens == len(ids)
    by_name = {one.replica: one for one in record.candidates}
    assert by_name[f"r{where}"].hit_tokens == whole
    assert by_name[f"r{1 - where}"].hit_tokens == 0
    assert by_name[f"r{where}"].seconds < by_name[f"r{1 - where}"].seconds
    assert record.outcome
    assert record.outcome.hit_tokens == whole
    assert life.count(PREDICTED_HIT) == life.count(ACTUAL_HIT) == whole


@pytest.mark.slow
def test_a_prefix_of_another_org_is_not_seen(life: Life) -> None:
    ids = life.tokenizer.text(TEXT)
    whole = len(ids) // COLUMN_TOKENS * COLUMN_TOKENS
    world = life.worlds[1]
    world.store(world.prompt(ids[:whole], "globex"))
    life.read_maps()
    answer = life.ask(TEXT)
    record = life.brain.call(lambda: life.brain.brain.find(answer.headers["x-request-id"]))
    assert record
    assert {one.hit_tokens for one in record.candidates} == {0}
    assert not any(one.guessed for one in record.candidates), "the maps are known"


@pytest.mark.slow
def test_earlier_turns_are_not_tokenized_again(life: Life) -> None:
    turns = [{"role": "user", "content": TEXT}]
    assert life.post("chat/completions", {"model": "served", "messages": turns}).status_code == 200
    first = life.count(TOKENIZED)
    more = [*turns, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"}]
    answer = life.post("chat/completions", {"model": "served", "messages": more})
    assert answer.status_code == 200
    numbers = life.brain.brain.counts._numbers[TOKENIZED]
    assert numbers["reused",] > 0.9 * first
    assert numbers["computed",] < first + 100


@pytest.mark.slow
def test_tokenize_and_back(life: Life) -> None:
    told = post(
        f"{life.brain.url}/tokenize", headers=life.brain.headers, json={"prompt": "Hello you"}
    ).json()
    assert told["tokens"] == list(life.tokenizer.text("Hello you"))
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 50_000
    back = post(
        f"{life.brain.url}/detokenize", headers=life.brain.headers, json={"tokens": told["tokens"]}
    )
    assert back.json() == {"prompt": "Hello you"}


@pytest.mark.slow
def test_a_prompt_that_is_too_long_is_refused_before_it_is_queued(life: Life) -> None:
    answer = life.ask("word " * 60_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert not any(one.asked for one in life.engines)


@pytest.mark.slow
def test_what_is_purged_is_forgotten_and_stays_so(life: Life) -> None:
    ids = life.tokenizer.text(TEXT)
    whole = len(ids) // COLUMN_TOKENS * COLUMN_TOKENS
    life.worlds[1].store(life.worlds[1].prompt(ids[:whole]))
    life.read_maps()
    tag = isolation_tag("acme", SECRET)
    namespace = life.worlds[1].model.namespace().digest().hex()
    brain = life.brain.brain

    def question(*scopes: Scope) -> Question:
        operation = "00000000-0000-0000-0000-000000000001"
        return Question(operation, "c" * 32, 3, scopes, "acme")

    def purge(*scopes: Scope) -> Any:
        return life.brain.call(lambda: brain.purge(question(*scopes)))

    with pytest.raises(NotConfirmedYet, match="new tag for llama"):
        purge(Scope(tag.hex(), namespace))
    told = brain.desired
    assert told
    renewed = msgspec.structs.replace(told.orgs[0], secrets={"llama": b"n" * 32})
    newer = msgspec.structs.replace(told, generation=2, orgs=(renewed,))
    life.brain.set_desired(newer)
    statement = purge(Scope(tag.hex(), namespace))
    assert (statement.identity, statement.epoch, statement.org) == ("brain:b", 3, "acme")
    assert {one.driver: one.columns > 0 for one in statement.maps} == {"job0": False, "job1": True}
    assert life.ask(TEXT).status_code == 200
    whole_org = purge(Scope(tag.hex()))
    assert whole_org.scopes == (Scope(tag.hex()),)
    assert life.ask(TEXT).status_code == 401, "an org with a tag that was purged is not served"
    again = msgspec.structs.replace(newer, generation=3)
    life.brain.set_desired(again)
    assert life.ask(TEXT).status_code == 401, "an older document does not bring it back"
