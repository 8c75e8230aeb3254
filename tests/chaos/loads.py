"""Who asks while processes are killed: writers over REST, and clients of brains.

Nobody judges here: each request is noted with where it was sent, when, and how it ended.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httpx

from tests.chaos.scene import Chaos, Place
from tests.chaos.threads import Threads
from tests.console.workloads.whole import MODEL, ORG
from tests.hostile.engine import UNVERIFIED

PAUSE_SECONDS: Final = 0.15
RETRY_SECONDS: Final = 0.5
ANSWER_SECONDS_MAX: Final = 60.0
TRIES_MAX: Final = 200
STILL_RUNNING: Final = "StillRunning"
PROMPTS: Final = 4
WRITERS: Final = 2  # at each web
STORY: Final = "The whole of the story is told again and again. " * 10


@dataclass(frozen=True)
class Request:
    """`fault`: why there was no right answer; empty if there was one."""

    load: str
    place: str
    began: float
    ended: float
    fault: str = ""


@dataclass
class Write:
    """One note. `tries`: requests until it was answered, all with the same key."""

    text: str
    tries: int = 0
    answered: int = 0  # its number
    was_replayed: bool = False


class Loads(Threads):
    """Asks until the block ends; an answer that is under way is waited for."""

    def __init__(self, scene: Chaos) -> None:
        webs, brains = scene.webs, scene.brains
        works: list[Callable[[], None]] = [
            *(partial(self._write, *both) for both in (webs, webs[::-1]) for _ in range(WRITERS)),
            *(partial(self._read, web) for web in webs),
            *(partial(self._chat, brain) for brain in brains),
            *(partial(self._stream, brain) for brain in brains),
        ]
        super().__init__(*(partial(self._again_and_again, work) for work in works))
        self.requests: list[Request] = []
        self.writes: list[Write] = []
        self._scene = scene
        self._token = scene.admin_token

    @property
    def failed(self) -> list[Request]:
        return [one for one in self.requests if one.fault]

    def _again_and_again(self, work: Callable[[], None]) -> None:
        while not self.ends.wait(PAUSE_SECONDS):
            work()

    # What they do

    def _write(self, web: Place, other: Place) -> None:
        """A note. What is not answered is asked for again at the other web and back, with its key, until
        it is: it may have been done."""
        write = Write(f"note {uuid.uuid4()}")
        self.writes.append(write)
        headers = {"Idempotency-Key": write.text.replace(" ", "-")}
        told, places = {"text": write.text, "org": ORG}, (web, other)
        while not write.answered and write.tries < TRIES_MAX:
            place = places[write.tries % 2]
            write.tries += 1
            answer = self._asked(
                "write",
                place,
                partial(self._console, "POST", place, "/hand-over/notes", told, headers),
                # The one before it was killed, and PostgreSQL has not noticed yet.
                may_wait=write.tries > 1,
            )
            if answer is not None and answer.is_success:
                write.answered = answer.json()["id"]
                write.was_replayed = "Idempotency-Replayed" in answer.headers
            else:
                time.sleep(RETRY_SECONDS)

    def _read(self, web: Place) -> None:
        self._asked("read", web, partial(self._console, "GET", web, "/workloads", None, {}))

    def _chat(self, brain: Place) -> None:
        self._asked("chat", brain, partial(self._scene.chat, self._prompt(), brain_url=brain.url))

    def _stream(self, brain: Place) -> None:
        self._asked("stream", brain, partial(self._streamed, brain))

    # Requests

    def _asked(
        self, load: str, place: Place, ask: Callable[[], httpx.Response], *, may_wait: bool = False
    ) -> httpx.Response | None:
        """Ask, and note how that ended. `may_wait`: an answer that says to ask again is a right one."""
        began, answer, fault = time.monotonic(), None, ""
        try:
            answer = ask()
        except httpx.HTTPError as error:
            fault = repr(error)
        else:
            if not answer.is_success and not (may_wait and STILL_RUNNING in answer.text):
                fault = f"{answer.status_code} {answer.text[:300]}"
        self.requests.append(Request(load, place.victim, began, time.monotonic(), fault))
        return answer

    def _console(
        self, method: str, web: Place, path: str, told: Any, headers: dict[str, str]
    ) -> httpx.Response:
        return httpx.request(
            method,
            f"{web.url}/api/v1{path}",
            json=told,
            headers={"Authorization": f"Bearer {self._token}", **headers},
            timeout=ANSWER_SECONDS_MAX,
            verify=UNVERIFIED,  # to make another takes longer than the request
        )

    def _streamed(self, brain: Place) -> httpx.Response:
        """Raises ReadError for an answer that ends too early."""
        told = {
            "model": MODEL,
            "messages": [{"role": "user", "content": self._prompt()}],
            "max_tokens": 32,
            "stream": True,
        }
        with httpx.stream(
            "POST",
            f"{brain.url}/v1/chat/completions",
            json=told,
            headers={"Authorization": f"Bearer {self._scene.key}"},
            timeout=ANSWER_SECONDS_MAX,
            verify=UNVERIFIED,
        ) as answer:
            text = answer.read().decode()
        if answer.is_success and not is_whole(text):
            raise httpx.ReadError(f"the stream ended with {text[-200:]!r}")
        return answer

    def _prompt(self) -> str:
        return f"{len(self.requests) % PROMPTS}. {STORY}"


def is_whole(text: str) -> bool:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return False
    chunks = [json.loads(one) for one in events[:-1]]
    reasons = [choice.get("finish_reason") for one in chunks for choice in one.get("choices", ())]
    return not any("error" in one for one in chunks) and any(reasons)
