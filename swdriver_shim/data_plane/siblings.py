"""The siblings that columns may be borrowed from, and asking one what it has.

Who is asked while a request waits is one that has answered a moment ago: a thread sees to that, which
also keeps the connections.
"""

from __future__ import annotations

import contextlib
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import msgspec

from kvss_agent.client import Lender
from kvss_agent.http.answers import Budget, Unanswered
from kvss_agent.http.blocking_exchange import BlockingExchange
from kvss_agent.security.certificates import key_name
from kvss_agent.shard.seal import TAG_BYTES
from swdriver_shim.cache.request_log import HasKeys
from swdriver_shim.desired import SiblingSpec
from swdriver_shim.lending import ANSWER, PATH, LendBody, LentAnswer, LentColumn
from telemetry.decoder import Malformed

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 0.2  # for its answer: who computes instead waits for so long at most
# For so long one is not asked that did not answer, or whose bytes did not come; twice as long each time.
AWAY_SECONDS, AWAY_SECONDS_MAX = 5.0, 60.0
LOOK_SECONDS: Final = 1.0  # between looks whether there is one to greet
KEEP_SECONDS: Final = 20.0  # after which one that was not asked is greeted
GREET_SECONDS: Final = 2.0  # for its answer
GREETED_AT_ONCE: Final = 4
LEAST_SECONDS: Final = 0.2  # that bytes may take, however few they are
BYTES_PER_SECOND_MIN: Final = 100 << 20  # and how fast they have to come otherwise
_PATHS: Final = ("node", "leaf", "spine")  # the longest last

Client = Callable[[], ssl.SSLContext | None]


class Loan(NamedTuple):
    """What a sibling lends: of each group, by depth. `asked_at`: by our clock, before it was asked."""

    groups: Sequence[Mapping[int, LentColumn]]
    asked_at: float


class Away(Exception):
    """It does not answer, or did not a moment ago."""


class Sibling:
    """May be used from any thread."""

    def __init__(self, spec: SiblingSpec, borrower: str, model: str, client: Client) -> None:
        """`borrower`: who asks. `model`: as `lending.digest_of` it. `client`: our certificate."""
        self.spec = spec
        self.path = max((home.path for home in spec.homes), key=_PATHS.index)
        self._model = model
        self._path = f"{PATH}?as={borrower}"
        self._client = client
        self._exchange: BlockingExchange | None = None
        self._context: ssl.SSLContext | None = None  # of that
        self._opening = threading.Lock()
        self._answered_at = -math.inf
        self._next_at = 0.0  # when it is greeted
        self._away_seconds = AWAY_SECONDS
        self._homes = {(home.group, home.index): home for home in spec.homes}

    def ask(self, prompt: HasKeys, start: int, now: float) -> Loan:
        """What it has of a prompt of which we have so many columns. Raises Away."""
        if time.monotonic() > self._answered_at + 2 * KEEP_SECONDS:
            raise Away(f"{self.spec.driver} did not answer a moment ago")
        body = LendBody(self._model, prompt.maker.tag, b"".join(prompt.keys), start)
        answer = self._asked(body, ASK_SECONDS)
        return Loan([{one.depth: one for one in group} for group in answer.groups], now)

    def greet(self) -> None:
        """Ask it for nothing. If it answers, it is asked for columns from now on."""
        try:
            self._asked(LendBody(self._model, bytes(TAG_BYTES), b"", 0), GREET_SECONDS)
        except Away as error:
            log.debug("Nothing can be borrowed: %s", error)

    @property
    def is_to_be_greeted(self) -> bool:
        return time.monotonic() >= self._next_at

    def leave(self) -> None:
        """Do not ask it for a while."""
        if self._answered_at == -math.inf and time.monotonic() < self._next_at:
            return  # others have found out as well
        self._answered_at = -math.inf
        self._next_at = time.monotonic() + self._away_seconds
        self._away_seconds = min(2 * self._away_seconds, AWAY_SECONDS_MAX)

    def lent(self) -> None:
        """Columns of it have come."""
        self._away_seconds = AWAY_SECONDS

    def _asked(self, body: LendBody, seconds: float) -> LentAnswer:
        """Raises Away."""
        content = msgspec.json.encode(body)
        budget = Budget(seconds, ANSWER.bytes_max)
        try:
            reply = self._connected().ask("POST", self._path, self.spec.token, budget, content)
            answer = reply.read(LentAnswer, ANSWER) if reply.is_success else None
        except (Unanswered, Malformed, ValueError) as error:
            self.leave()
            raise Away(f"{self.spec.driver}: {error}") from error
        if answer is None:
            self.leave()
            raise Away(f"{self.spec.driver} refuses: {reply.refusal}")
        self._answered_at = time.monotonic()
        self._next_at = self._answered_at + KEEP_SECONDS
        return answer

    def seconds_for(self, size: int) -> float:
        """That so many bytes of all shards may take."""
        allowed = [home.bytes_per_second for home in self.spec.homes if home.bytes_per_second]
        by_budget = size / min(allowed) if allowed else 0.0
        return LEAST_SECONDS + size / BYTES_PER_SECOND_MIN + by_budget

    def lender(self, group: str, index: int, seconds: float) -> Lender:
        """Of a shard, for so long at most."""
        home = self._homes[group, index]
        return Lender(home.address, home.shard, seconds, home.bytes_per_second or 0)

    def close(self) -> None:
        with self._opening:
            if self._exchange:
                self._exchange.close()

    def _connected(self) -> BlockingExchange:
        """Raises ValueError without the certificate that TLS needs."""
        with self._opening:
            key, url = self.spec.key, self.spec.url
            context = self._client() if key else None
            if key and url.startswith("https:") and context is None:
                raise ValueError("this driver has no certificate yet")
            if self._exchange is None or context is not self._context:
                if self._exchange:  # our certificate has been renewed
                    self._exchange.close()
                self._context = context
                self._exchange = BlockingExchange(url, context, key_name(key) if key else "")
            return self._exchange


class Siblings:
    """By name, as the document says."""

    def __init__(self) -> None:
        self._siblings: dict[str, Sibling] = {}
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, specs: Sequence[SiblingSpec], borrower: str, model: str, client: Client) -> None:
        """Those that stay keep what is known of them."""
        before = self._siblings
        self._siblings = {
            spec.driver: one
            if (one := before.get(spec.driver)) and one.spec == spec
            else Sibling(spec, borrower, model, client)
            for spec in specs
        }
        for name, one in before.items():
            if self._siblings.get(name) is not one:
                one.close()
        if self._siblings and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="siblings", daemon=True)
            self._thread.start()
        self._changed.set()

    def find(self, name: str) -> Sibling | None:
        return self._siblings.get(name)

    def _run(self) -> None:
        """Several at once: those that are silent do not hold up the others."""
        greeting: set[Sibling] = set()

        def greet(one: Sibling) -> None:
            try:
                one.greet()
            except Exception:
                log.exception("%s could not be greeted", one.spec.driver)
            finally:
                greeting.discard(one)

        with ThreadPoolExecutor(GREETED_AT_ONCE, thread_name_prefix="greeting") as pool:
            while not self._closed.is_set():
                for one in list(self._siblings.values()):
                    if one.is_to_be_greeted and one not in greeting:
                        greeting.add(one)
                        pool.submit(greet, one)
                self._changed.wait(LOOK_SECONDS)
                self._changed.clear()

    def close(self) -> None:
        self._closed.set()
        self._changed.set()
        for one in self._siblings.values():
            with contextlib.suppress(OSError):
                one.close()
