"""The users of the demo: they ask a brain, as any client does, with a key of their org."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx

from console.demo import places, story, tokenizer

log = logging.getLogger(__name__)

AT_ONCE_MAX: Final = 16  # of a model; users that find no place wait
LATE_SECONDS_MAX: Final = 2.0  # a later schedule is shifted instead of caught up with
AGAIN_SECONDS: Final = 2.0
ANSWER_SECONDS_MAX: Final = 60.0


class Clients:
    """All that ask for one model, until `stopped`. `brain`: its address, empty while there is none."""

    def __init__(
        self, served: story.Served, state: Path, brain: Callable[[], str], stopped: threading.Event
    ) -> None:
        self._served = served
        self._state = state
        self._brain = brain
        self._stopped = stopped
        self._places = threading.BoundedSemaphore(AT_ONCE_MAX)
        self._said = ""
        self._rejected: set[str] = set()  # orgs whose API key is

    def run(self) -> None:
        began = 0.0
        with httpx.Client(timeout=ANSWER_SECONDS_MAX) as client, ThreadPoolExecutor(AT_ONCE_MAX) as pool:
            for ask in story.asks(self._served):
                now = time.monotonic()
                began = max(began, now - ask.at - LATE_SECONDS_MAX) if began else now - ask.at
                if self._stopped.wait(max(0.0, began + ask.at - now)):
                    return
                while not (address := self._brain()):
                    if self._stopped.wait(AGAIN_SECONDS):
                        return
                while not self._places.acquire(timeout=1):
                    if self._stopped.is_set():
                        return
                pool.submit(self._ask, client, address, ask)

    def _ask(self, client: httpx.Client, address: str, ask: story.Ask) -> None:
        try:
            status = self._answered(client, address, ask)
            self._note_key(ask.org, is_rejected=status == httpx.codes.UNAUTHORIZED)
            if status == httpx.codes.UNAUTHORIZED:
                return  # others have keys of their own
            self._say(
                f"{ask.served.model} is served at {address}"
                if status == httpx.codes.OK
                else f"requests for {ask.served.model} are answered with {status}"
            )
        except (httpx.HTTPError, OSError) as error:
            self._say(f"requests for {ask.served.model} fail: {type(error).__name__}: {error}")
        finally:
            self._places.release()

    def _answered(self, client: httpx.Client, address: str, ask: story.Ask) -> int:
        key = places.caller_token(self._state, ask.org).read_text()
        body = {
            "model": ask.served.model,
            "prompt": tokenizer.text(ask.tokens),
            "max_tokens": len(ask.answer),
            "stream": True,
            "stream_options": {"include_usage": True},  # so that the brain counts hits, too
        }
        with client.stream(
            "POST",
            f"{address}/v1/completions",
            json=body,
            headers={"authorization": f"Bearer {key}"},
        ) as answer:
            for _ in answer.iter_bytes():
                if self._stopped.is_set():
                    break
            return answer.status_code

    def _note_key(self, org: str, *, is_rejected: bool) -> None:
        """Log once that an org's key is no longer valid, and once that it is again."""
        model = self._served.model
        if is_rejected and org not in self._rejected:
            self._rejected.add(org)
            log.warning(
                "Requests of %s for %s are rejected (401): its API key in %s has been removed. "
                "Start the demo again to create another",
                org,
                model,
                places.caller_token(self._state, org),
            )
        elif not is_rejected and org in self._rejected:
            self._rejected.discard(org)
            log.info("The API key of %s is valid again for %s", org, model)

    def _say(self, what: str) -> None:
        """Log the state when it changes."""
        if what != self._said:
            self._said = what
            log.info("%s", what)
