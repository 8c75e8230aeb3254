"""Two real vLLMs behind two brains, under a real console: what a client of the brains gets."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self

import httpx
import pytest

from console.stack import endpoint
from tests.engines.governed import DRIVER, NODES, Governed, governed_stack
from tests.engines.prompts import prompt
from tests.engines.serving import Server, serving
from tests.engines.vllm_process import build
from tests.hostile.engine import UNVERIFIED
from tests.hostile.scene import Process
from tests.live import wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

DRIVERS: Final = (DRIVER, "vllm-8")
BRAINS: Final = ("brain-1", "brain-2")
MODEL: Final = "tiny"
CACHED: Final = 960  # tokens of a prompt of `prompts.prompt`, in whole units
LONG: Final = 1920  # tokens of a prompt that is worth borrowing, in whole units
STEP: Final = 512  # tokens between two places of a prompt that a cache map names
METRIC: Final = re.compile(r"^(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)


@dataclass
class Way:
    """The way in: two brains, two engines, and the key of an org."""

    governed: Governed
    engines: dict[str, Server]
    brains: dict[str, Process]
    controls: dict[str, str]  # addresses of the drivers' APIs
    key: str
    token_bytes: int
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    def ask(self, brain: str, tokens: Sequence[int], **more: Any) -> tuple[list[int], int]:
        """What it answers, and how much of the prompt was cached. Raises httpx.HTTPError."""
        told = {
            "model": MODEL,
            "prompt": list(tokens),
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
            **more,
        }
        url = f"http://{self.brains[brain].api_address}/v1/completions"
        headers = {"authorization": f"Bearer {self.key}"}
        answer = httpx.post(url, json=told, headers=headers, timeout=120).raise_for_status().json()
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return answer["choices"][0]["token_ids"], cached

    def counted(self, brain: str, metric: str, label: str = "model") -> Counter[str]:
        """A metric of a brain, by the values of a label."""
        process = self.brains[brain]
        said = self.governed.ask_process(
            brain, "GET", "/metrics", None, {"authorization": f"Bearer {process.token}"}
        )
        return values(said.text, metric, label)

    def borrows(self, driver: str) -> Counter[str]:
        """Prompts that it was to borrow, by what became of them."""
        token = (self.governed.directory / driver / "token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        url = f"https://{self.controls[driver]}/metrics"
        page = httpx.get(url, headers=headers, verify=UNVERIFIED).raise_for_status().text
        return values(page, "swdriver_borrows_total", "what")

    def borrowed_bytes(self) -> int:
        """At all nodes, so far."""
        total = 0
        for name in NODES:
            token = self.governed.processes[name].token
            headers = {"authorization": f"Bearer {token}"}
            said = self.governed.ask_process(name, "GET", "/metrics", None, headers)
            values = re.findall(r"^kvss_borrowed_bytes_total\{[^}]*\} (\S+)$", said.text, re.MULTILINE)
            total += sum(int(float(value)) for value in values)
        return total

    def predicted(self, brain: str) -> tuple[int, int]:
        """Hit tokens that were predicted so far, and those that came."""
        metrics = ("brain_predicted_hit_tokens_total", "brain_actual_hit_tokens_total")
        predicted, actual = (self.counted(brain, one).total() for one in metrics)
        return predicted, actual


def values(page: str, metric: str, label: str) -> Counter[str]:
    """Of a metric, by the values of a label."""
    found: Counter[str] = Counter()
    for name, labels, value in METRIC.findall(page):
        if name == metric and (its := re.search(rf'{label}="([^"]+)"', labels)):
            found[its[1]] += int(float(value))
    return found


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    with (
        governed_stack(tmp_path_factory.mktemp("brains")) as governed,
        contextlib.ExitStack() as ending,
    ):
        build("llama", governed.directory / "llama")
        controls = {name: f"127.0.0.1:{endpoint.free_port()}" for name in DRIVERS}
        engines = {
            name: ending.enter_context(engine(governed, name, control))
            for name, control in controls.items()
        }
        [group] = governed.driver()["model"]["groups"]
        governed.start_session(sum(group["bytes_per_token"]))
        for name in DRIVERS:
            governed.driver(name)
            governed.start_job(name)
        ask(governed, "/models", {"name": MODEL, "model": MODEL, "tokens_max": 2048})
        for name, server in engines.items():
            replica = {"name": name, "url": str(server.http.base_url).rstrip("/"), "driver": name}
            ask(governed, f"/models/{MODEL}/replicas", replica)
        key = ask(governed, "/orgs/acme/callers", {"name": "client"})["token"]
        brains = {name: governed.add_process("brain", name) for name in BRAINS}
        made = Way(governed, engines, brains, controls, key, sum(group["bytes_per_token"]))
        for name in BRAINS:
            wait_until(f"{name} serves", partial(serves, made, name), 120)
        yield made


def engine(governed: Governed, name: str, control: str) -> contextlib.AbstractContextManager[Server]:
    told = governed.told(name, wait_seconds=5, control=control)
    log = governed.directory / f"{name}.log"
    return serving(governed.directory / "llama", told, log, environment={"VLLM_LOGGING_LEVEL": "INFO"})


def ask(governed: Governed, path: str, told: dict[str, Any]) -> Any:
    return governed.ask("POST", path, told, **{"Idempotency-Key": secrets.token_hex(8)})


def serves(way: Way, brain: str) -> bool:
    try:
        way.ask(brain, prompt(1))
    except httpx.HTTPError:
        return False
    return True


def hits(way: Way, brain: str, tokens: Sequence[int]) -> None:
    """Ask until its cache is known there."""
    wait_until("it hits", lambda: way.ask(brain, tokens)[1] >= CACHED, 60)


def foresees(way: Way, brain: str, tokens: Sequence[int]) -> bool:
    """Whether it predicts the hit of a prompt that is cached."""
    before, _ = way.predicted(brain)
    way.ask(brain, tokens)
    after, _ = way.predicted(brain)
    return after - before > CACHED - STEP


class Clients:
    """Clients of both brains, without a pause. One whose brain is gone goes to the other, as clients
    with two addresses do; that is no failure, if nothing of an answer had come."""

    def __init__(self, way: Way, seeds: range) -> None:
        self._way = way
        self._right = {seed: way.ask(BRAINS[0], prompt(seed))[0] for seed in seeds}
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(4)]
        self.answered = 0
        self.failed: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        order = [BRAINS[index % 2], BRAINS[1 - index % 2]]
        for seed in itertools.cycle(self._right):
            if self._ends.is_set():
                return
            try:
                answer, _ = self._ask(order, seed)
            except httpx.HTTPError as error:
                response = getattr(error, "response", None)
                self.failed.append(f"{error}: {response.text if response else ''}")
                continue
            self.answered += 1
            if answer != self._right[seed]:
                self.failed.append(f"{seed} is answered {answer}")

    def _ask(self, order: list[str], seed: int) -> tuple[list[int], int]:
        try:
            return self._way.ask(order[0], prompt(seed))
        except httpx.TransportError:
            order.reverse()
            return self._way.ask(order[0], prompt(seed))


def test_answers_are_those_of_the_engine(way: Way) -> None:
    for seed in range(2, 6):
        right, _ = way.engines[DRIVER].ask(prompt(seed), None)
        for brain in BRAINS:
            assert way.ask(brain, prompt(seed))[0] == right


def test_what_is_predicted_to_hit_hits(way: Way) -> None:
    """To within the step of a cache map, for at least 95 % of requests."""
    seeds = [next(way.seeds) for _ in range(10)]
    for seed in seeds:
        way.ask(BRAINS[0], prompt(seed))
    time.sleep(3)  # maps are told once a second
    right = 0
    cases = [(brain, seed) for brain in BRAINS for seed in seeds]
    for brain, seed in cases:
        before = way.predicted(brain)
        _, cached = way.ask(brain, prompt(seed))
        after = way.predicted(brain)
        predicted, actual = after[0] - before[0], after[1] - before[1]
        assert actual == cached
        right += abs(predicted - actual) < STEP
    assert right >= 0.95 * len(cases)


def test_both_brains_send_a_prompt_where_it_is_cached(way: Way) -> None:
    seeds = [next(way.seeds) for _ in range(6)]
    for seed in seeds:
        way.ask(BRAINS[0], prompt(seed))
    time.sleep(3)
    assert all(way.ask(BRAINS[1], prompt(seed))[1] == CACHED for seed in seeds)


def test_replicas_share_what_they_have_computed(way: Way) -> None:
    """What one replica has, the other borrows from its memory where requests can't go there; and the
    answers are those of who has computed it."""
    lender, borrower = DRIVER, "vllm-8"
    prompts = {seed: prompt(seed, LONG) for seed in itertools.islice(way.seeds, 6)}
    for name in (lender, borrower):
        set_draining(way, name, draining=name == borrower)
    way.governed.set_policy("acme", tiers="dram")  # both have the same tier 2
    try:
        wait_until("the drivers follow", lambda: way.governed.reached("acme") == (2, 2), 60)
        wait_until("the lender has requests", lambda: served_by(way, prompt(1)) == lender, 60)
        right = {seed: way.ask(BRAINS[0], tokens)[0] for seed, tokens in prompts.items()}
        for name in (lender, borrower):
            set_draining(way, name, draining=name == lender)
        wait_until("the borrower has requests", lambda: served_by(way, prompt(1)) == borrower, 60)
        time.sleep(3)  # maps are told once a second
        before, outcomes = way.borrowed_bytes(), way.borrows(borrower)
        got = {seed: way.ask(BRAINS[0], tokens) for seed, tokens in prompts.items()}
    finally:
        for name in (lender, borrower):
            set_draining(way, name, draining=False)
        way.governed.set_policy("acme", tiers="dram+tier2")
    assert {seed: answer for seed, (answer, _) in got.items()} == right
    cached = [each for _, each in got.values()]
    borrowed = [each for each in cached if each >= LONG - STEP]
    outcomes = way.borrows(borrower) - outcomes
    assert len(borrowed) >= len(prompts) - 1, (cached, outcomes)  # one may find its sibling busy
    size = len(borrowed) * LONG * way.token_bytes
    # They are counted when a borrow is over, and the last one may have answered before that.
    wait_until("its bytes are counted", lambda: way.borrowed_bytes() - before >= size)


def set_draining(way: Way, replica: str, *, draining: bool) -> None:
    path = f"/models/{MODEL}/replicas/{replica}"
    headers = {"Idempotency-Key": secrets.token_hex(8), "If-Match": "*"}
    way.governed.ask("PATCH", path, {"draining": draining}, **headers)


def served_by(way: Way, tokens: Sequence[int]) -> str:
    """Which replica answers now."""
    before = way.counted(BRAINS[0], "brain_replica_results_total", "replica")
    way.ask(BRAINS[0], tokens)
    after = way.counted(BRAINS[0], "brain_replica_results_total", "replica")
    return next(iter(after - before), "")


def test_a_lowered_ttl_is_seen_by_routing(way: Way) -> None:
    seed = next(way.seeds)
    hits(way, BRAINS[0], prompt(seed))
    before = way.predicted(BRAINS[0])
    way.governed.set_policy("acme", ttl_last_use_seconds=1)
    try:
        wait_until("the drivers follow", lambda: way.governed.reached("acme") == (2, 2), 60)
        time.sleep(3)
        assert way.ask(BRAINS[0], prompt(seed))[1] == 0
        assert way.predicted(BRAINS[0]) == before, "what has expired is absent in the map"
    finally:
        way.governed.set_policy("acme", ttl_last_use_seconds=3600)


def test_a_revoked_key_is_refused_within_seconds(way: Way) -> None:
    made = ask(way.governed, "/orgs/acme/callers", {"name": "for a while"})
    other = replace(way, key=made["token"])
    wait_until("it is known", lambda: serves(other, BRAINS[1]), 10)
    way.governed.ask("DELETE", f"/orgs/acme/callers/{made['id']}")
    wait_until("it is refused", lambda: not serves(other, BRAINS[1]), 10)
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        other.ask(BRAINS[1], prompt(1))


def test_no_request_fails_while_a_brain_is_killed(way: Way) -> None:
    with Clients(way, range(20, 24)) as clients:
        wait_until("they are answered", lambda: clients.answered > 8, 60)
        way.brains[BRAINS[1]].running.kill()
        way.brains[BRAINS[1]].running.wait()
        so_far = clients.answered
        wait_until("they are answered on", lambda: clients.answered > so_far + 20, 60)
        way.brains[BRAINS[1]].start()
        wait_until("it serves again", lambda: serves(way, BRAINS[1]), 60)
    assert not clients.failed


def test_no_request_fails_while_redis_is_stopped(way: Way) -> None:
    telemetry = way.governed.whole.pid("telemetry")
    with Clients(way, range(24, 28)) as clients:
        wait_until("they are answered", lambda: clients.answered > 8, 60)
        os.kill(telemetry, signal.SIGSTOP)
        try:
            so_far = clients.answered
            wait_until("they are answered on", lambda: clients.answered > so_far + 40, 60)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the supervisor had it replaced
                os.kill(telemetry, signal.SIGCONT)
    assert not clients.failed
    for brain in BRAINS:
        wait_until(f"{brain} follows maps again", partial(foresees, way, brain, prompt(24)), 60)


def test_no_request_that_had_not_begun_fails_while_an_engine_is_killed(way: Way) -> None:
    """The last one: the engine is not started again."""
    with Clients(way, range(28, 32)) as clients:
        wait_until("they are answered", lambda: clients.answered > 8, 60)
        way.engines["vllm-8"].process.kill()
        so_far = clients.answered
        wait_until("they are answered on", lambda: clients.answered > so_far + 20, 120)
    assert not clients.failed
