"""A brain that confirms a purge keeps nothing of the org's prompts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from inference_brain.admission import Room
from inference_brain.api.requests import Completion
from inference_brain.asking import Asking
from inference_brain.brain import Brain
from inference_brain.desired import Desired, DriverSpec, OrgSpec, ReplicaSpec, ServedModel, parse
from inference_brain.router import Router
from kvss_agent.security.confirmations import Question, Scope
from swdriver_shim.desired import token_hash
from swdriver_shim.keys import isolation_tag
from tests.inference_brain.brains import KEY, RunningBrain, post, told
from tests.inference_brain.chat_shapes import conversation, write_folder
from tests.inference_brain.engines import Behavior, FakeEngine
from tests.inference_brain.map_worlds import SECRET, MapWorld, tokens_of
from tests.live import wait_until
from tests.swdriver_shim.prompts import FULL

MODEL = MapWorld(FULL).model
OLD = OrgSpec("acme", SECRET, (token_hash(KEY),))
NEW = msgspec.structs.replace(OLD, secret=b"n" * 32)
TAG = isolation_tag("acme", SECRET)


def purge_of(*scopes: Scope) -> Question:
    return Question("0" * 32, "1" * 32, 1, scopes, org="acme")


def document(generation: int, org: OrgSpec, urls: Sequence[str] = ("http://127.0.0.1:9",)) -> Desired:
    """The first replica has a driver, and others have none."""
    replicas = [ReplicaSpec(f"r{number}", url) for number, url in enumerate(urls)]
    replicas[0] = msgspec.structs.replace(replicas[0], driver=DriverSpec("job", MODEL, b"c" * 32))
    model = ServedModel("m", 100_000, tuple(replicas))
    made = Desired(generation=generation, brain="b", models=(model,), orgs=(org,))
    return parse(msgspec.json.encode(made))


def test_a_purge_forgets_prompts(tmp_path: Path) -> None:
    folder = write_folder("qwen2", tmp_path / "model")
    with FakeEngine() as engine, RunningBrain(told([engine.url], tokenizer=str(folder))) as brain:
        body = {"model": "m", "messages": conversation(5, 300)}
        url = f"{brain.url}/v1/chat/completions"
        assert post(url, json=body, headers=brain.headers).status_code == 200
        turns = brain.brain.prompts.service.turns
        assert turns.size_of("acme") > 0
        gone = Question("0" * 32, "1" * 32, 1, (Scope("a" * 32),), org="acme")
        brain.call(lambda: brain.brain.purge(gone))
        assert turns.bytes == 0


def keys_in(router: Router) -> dict[str, int]:
    """How many keys the parts of a router have, and how many requests that they are of."""
    flights = router.admission.pools["m"].flights
    alive = [*flights._by_leader.values(), *flights._landed]
    return {
        "sent": len(router._sent),
        "guessed": sum(map(len, router._guessed.values())),
        "single flight": len(flights._by_key) + sum(len(one.keys) for one in alive),
        "queued": sum(len(one.ticket.chain) for one in router.admission.pools["m"].queue),
        "running": sum(len(one.prompts) for one in router._prepared),
        "affinities": sum(one.affinity.startswith(TAG) for one in router._prepared),
    }


def test_requests_that_wait_while_their_org_is_purged_leave_no_keys() -> None:
    behavior = Behavior(is_held=True)
    with FakeEngine(behavior) as one, FakeEngine(behavior) as other:
        urls = [one.url, other.url]
        with RunningBrain(document(1, OLD, urls)) as brain:
            router = brain.brain.router
            router.room = lambda _: Room(2, 1 << 40, 2)  # type: ignore[assignment, method-assign]

            def ask(number: int) -> None:
                body = {"model": "m", "prompt": [number] * 9000, "max_tokens": 3}
                url = f"{brain.url}/v1/completions"
                statuses.append(post(url, headers=brain.headers, json=body).status_code)

            statuses: list[int] = []
            threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
            for thread in threads:
                thread.start()
            queue = lambda: len(router.admission.pools["m"].queue)  # noqa: E731
            wait_until("some run and some wait", lambda: router._prepared and brain.call(queue) == 3)
            before = brain.call(lambda: keys_in(router))
            assert all(count > 0 for count in before.values()), before
            brain.set_desired(document(2, NEW, urls))
            brain.call(lambda: brain.brain.purge(purge_of(Scope(TAG.hex()))))
            assert not any(brain.call(lambda: keys_in(router)).values())
            behavior.is_held = False
            for thread in threads:
                thread.join()
            assert statuses == [200] * 5
            assert not any(brain.call(lambda: keys_in(router)).values())
            records = brain.brain.records._ended.values()
            assert [one.choice.asked.affinity for one in records if one.choice] == [b""] * 5


@pytest.mark.parametrize("is_tokenized", [True, False])
def test_a_request_that_was_let_in_before_the_purge_is_served_without_keys(
    *, is_tokenized: bool
) -> None:
    with RunningBrain(document(1, OLD)) as running:
        brain = running.brain
        model = document(1, OLD).models[0]

        def prepared(org: OrgSpec) -> Asking:
            prompt = [7] * 2000 if is_tokenized else "text " * 900
            request = Completion(model="m", prompt=prompt)
            asking = Asking(f"a-{org.secret[0]}", org, model, request, 0.0, 0.0)
            made = asyncio.run_coroutine_threadsafe(brain.router.prepare(asking), running._loop)
            made.result(60)
            return asking

        assert bool(prepared(OLD).prompts) is is_tokenized
        running.set_desired(document(2, NEW))
        running.call(lambda: brain.purge(purge_of(Scope(TAG.hex()))))
        late = prepared(OLD)
        assert (late.prompts, late.guess, late.affinity) == ({}, None, b"a-0")
        assert bool(prepared(NEW).prompts) is is_tokenized


@pytest.mark.parametrize("is_of_a_model", [True, False])
def test_what_was_purged_is_not_taken_back_after_a_restart(
    tmp_path: Path, *, is_of_a_model: bool
) -> None:
    """A driver that was cut off may report it still."""
    world = MapWorld(FULL)
    world.store(world.prompt(tokens_of([1] * 32)))
    world.publish()
    new = NEW
    scope = Scope(TAG.hex())
    if is_of_a_model:
        new = msgspec.structs.replace(OLD, secrets={MODEL.name: b"n" * 32})
        scope = Scope(TAG.hex(), MODEL.namespace().digest().hex())

    def rows(brain: Brain) -> int:
        mirror = brain.maps.mirror("job")
        assert mirror
        mirror.start_over()
        for raw in world.stream:
            mirror.read(raw, time.monotonic())
        return brain.maps.table.rows

    async def run() -> None:
        brain = Brain("b", tmp_path, token="t" * 20)
        brain.set_desired(document(1, OLD))
        assert rows(brain) == 4
        brain.set_desired(document(2, new))
        brain.purge(purge_of(scope))
        assert rows(brain) == 0
        again = Brain("b", tmp_path, token="t" * 20)
        again.start()
        assert rows(again) == 0
        again.set_desired(document(3, new))
        assert rows(again) == 0
        if is_of_a_model:  # a document brings back what is not purged as a whole
            again.set_desired(document(4, OLD))
            assert again.maps.mirror("job").wants_all  # type: ignore[union-attr]
            again.maps.mirror("job")._lose()  # type: ignore[union-attr]
            assert rows(again) == 4

    asyncio.run(run())
