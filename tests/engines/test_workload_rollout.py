"""A workload with a real vLLM, from `POST /workloads` on: clients ask a brain while it is rolled out,
and while its engine is killed."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import httpx
import psutil
import pytest

from tests.console.workloads.whole import Served, served
from tests.engines.prompts import prompt
from tests.engines.serving import START_SECONDS
from tests.engines.vllm_process import QUIET, build, tokenizer
from tests.live import wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

NAME: Final = "real"
MODEL: Final = "tiny"
CACHED: Final = 960  # tokens of a prompt of `prompts.prompt`, in whole units
CLIENTS: Final = 2
ARGUMENTS: Final = (
    *("--dtype", "float32", "--block-size", "32", "--enforce-eager", "--seed", "0"),
    *("--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
)
ROLLOUT_SECONDS: Final = 2 * START_SECONDS


class Asked:
    """The brain, as clients of an org ask it."""

    def __init__(self, scene: Served) -> None:
        self._scene = scene

    def ask(self, seed: int) -> tuple[list[int], int]:
        """The answer to a prompt, and how much of that was cached. Raises httpx.HTTPError."""
        told = {
            "model": MODEL,
            "prompt": prompt(seed),
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"authorization": f"Bearer {self._scene.key}"}
        url = f"{self._scene.brain_url}/v1/completions"
        answer = httpx.post(url, json=told, headers=headers, timeout=120).raise_for_status().json()
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return answer["choices"][0]["token_ids"], cached

    def hits(self, seed: int) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.ask(seed)[1] == CACHED
        return False

    def cache(self, seeds: Sequence[int]) -> dict[int, list[int]]:
        """The answers, once all of them come with a hit. They are the ones without a cache."""
        right = {}
        for seed in seeds:
            right[seed], cached = self.ask(seed)
            assert cached == 0
            wait_until(f"{seed} hits", partial(self.hits, seed), 60)
            assert self.ask(seed) == (right[seed], CACHED)
        return right


class Clients:
    """Some that ask without a pause. `wrong`: what was no answer, or another one."""

    def __init__(self, asked: Asked, right: dict[int, list[int]]) -> None:
        self._asked = asked
        self._right = right
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]
        self.hit_tokens: list[int] = []
        self.wrong: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        for seed in itertools.cycle(self._right):
            if self._ends.is_set():
                return
            try:
                answer, cached = self._asked.ask(seed)
            except httpx.HTTPError as error:
                said = error.response.text if isinstance(error, httpx.HTTPStatusError) else ""
                self.wrong.append(f"{seed} failed: {error!r} {said}")
                continue
            self.hit_tokens.append(cached)
            if answer != self._right[seed]:
                self.wrong.append(f"{seed} is answered {answer}, with {cached} cached")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("workload")) as made:
        build("llama", made.directory / "llama")
        tokenizer([]).save_pretrained(made.directory / "words")
        yield made


@pytest.fixture(scope="module")
def asked(scene: Served) -> Iterator[Asked]:
    """The workload serves, with its cache."""
    scene.create(
        NAME,
        model=MODEL,
        tokens_max=2048,
        engine={"kind": "vllm", "arguments": ARGUMENTS, "environment": QUIET},
        weights={"source": str(scene.directory / "llama")},
        tokenizer={"folder": str(scene.directory / "words")},
    )
    with what_it_says(scene):
        scene.wait_until_ready(NAME, ROLLOUT_SECONDS)
        made = Asked(scene)
        with contextlib.suppress(httpx.HTTPError):
            made.ask(0)
        wait_until("it hits", partial(made.hits, 0), 120)
    yield made
    scene.delete(NAME)
    wait_until("no process is left", lambda: not scene.processes_of(), 60)


@contextlib.contextmanager
def what_it_says(scene: Served) -> Iterator[None]:
    """With the end of the instances' logs where something fails."""
    try:
        yield
    except AssertionError as error:
        logs = sorted(scene.cluster_folder.glob("instances/*/log"))
        said = "".join(f"\n{path.parent.name}:\n{end_of(path)}" for path in logs)
        raise AssertionError(f"{error}: {scene.conditions(NAME)}{said}") from None


def end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def engines(scene: Served, instance: str) -> list[psutil.Process]:
    """What its manager has started: first the server, which has the path of its socket."""
    return [one for one in scene.processes_of(instance) if "--uds" in command(one)]


def command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def test_a_rollout_fails_no_request_and_the_new_engine_hits_what_the_old_one_has_stored(
    scene: Served, asked: Asked
) -> None:
    """Half of the prompts are of clients that ask all the while; nobody asks the others meanwhile, so
    that only the old engine can have stored them."""
    loaded, quiet = asked.cache(range(10, 14)), asked.cache(range(20, 24))
    [before] = scene.instances(NAME)
    with what_it_says(scene), Clients(asked, loaded) as clients:
        wait_until("they hit", lambda: clients.hit_tokens.count(CACHED) > 4, 60)
        more: dict[str, Any] = {"arguments": [*ARGUMENTS, "--max-num-seqs", "16"]}
        scene.patch(NAME, engine=more)
        wait_until("it is rolled out", lambda: scene.rolled_out(NAME, 2), ROLLOUT_SECONDS)
        served_so_far = len(clients.hit_tokens)
        wait_until("they ask on", lambda: len(clients.hit_tokens) > served_so_far + 8, 120)
        assert {asked.ask(seed)[1] for seed in quiet} == {CACHED}, "of the old engine"
    assert clients.wrong == []
    assert set(clients.hit_tokens[served_so_far + CLIENTS :]) == {CACHED}
    for seed, answer in quiet.items():
        assert asked.ask(seed) == (answer, CACHED)
    [after] = scene.instances(NAME)
    assert after["name"] != before["name"]
    assert after["driver"] == before["driver"]
    newest = scene.ask("GET", f"/workloads/{NAME}/rollouts")["items"][0]
    assert newest["phase"] == "done"


def test_an_engine_that_is_killed_comes_back(scene: Served, asked: Asked) -> None:
    right = asked.cache([30])[30]
    [instance] = scene.instances(NAME)
    [engine] = engines(scene, instance["name"])
    of_engine = [engine, *engine.children(recursive=True)]
    engine.kill()
    with what_it_says(scene):
        wait_until("it is noticed", lambda: not scene.is_ready(NAME), 60)
        scene.wait_until_ready(NAME, ROLLOUT_SECONDS)
        wait_until("it hits", partial(asked.hits, 30), 120)
    assert asked.ask(30) == (right, CACHED)
    assert not any(one.is_running() for one in of_engine), "nothing of the old one is left"
    [same] = scene.instances(NAME)
    assert same["name"] == instance["name"]
    assert len(engines(scene, instance["name"])) == 1
