"""The siblings that columns may be borrowed from, and asking one what it has."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from kvss_agent.client import Lender
from kvss_agent.http.blocking_exchange import BlockingExchange
from kvss_agent.http.exchange import Budget, Unanswered
from kvss_agent.security.certificates import key_name
from swdriver_shim.cache.request_log import HasKeys
from swdriver_shim.desired import SiblingSpec
from swdriver_shim.lending import ANSWER, PATH, LendBody, LentAnswer, LentColumn
from telemetry.decoder import Malformed

ASK_SECONDS: Final = 0.2  # for its answer: who computes instead waits for so long at most
AWAY_SECONDS: Final = 5.0  # for which one that did not answer, or whose bytes did not come, is not asked
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
        self._opening = threading.Lock()
        self._away_until = 0.0
        self._homes = {(home.group, home.index): home for home in spec.homes}

    def ask(self, prompt: HasKeys, start: int, now: float) -> Loan:
        """What it has of a prompt of which we have so many columns. Raises Away."""
        if time.monotonic() < self._away_until:
            raise Away(f"{self.spec.driver} did not answer a moment ago")
        body = LendBody(self._model, prompt.maker.tag, b"".join(prompt.keys), start)
        try:
            reply = self._connected().ask(
                "POST",
                self._path,
                self.spec.token,
                Budget(ASK_SECONDS, ANSWER.bytes_max),
                msgspec.json.encode(body),
            )
            answer = reply.read(LentAnswer, ANSWER) if reply.is_success else None
        except (Unanswered, Malformed, ValueError) as error:
            self.leave()
            raise Away(f"{self.spec.driver}: {error}") from error
        if answer is None:
            self.leave()
            raise Away(f"{self.spec.driver} refuses: {reply.refusal}")
        return Loan([{one.depth: one for one in group} for group in answer.groups], now)

    def leave(self) -> None:
        """Do not ask it for a while."""
        self._away_until = time.monotonic() + AWAY_SECONDS

    def lender(self, group: str, index: int, size: int) -> Lender:
        """Of so many bytes of a shard."""
        home = self._homes[group, index]
        seconds = LEAST_SECONDS + size / BYTES_PER_SECOND_MIN
        if home.bytes_per_second:
            seconds += size / home.bytes_per_second
        return Lender(home.address, home.shard, seconds, home.bytes_per_second or 0)

    def close(self) -> None:
        with self._opening:
            if self._exchange:
                self._exchange.close()

    def _connected(self) -> BlockingExchange:
        """Raises ValueError without the certificate that TLS needs."""
        with self._opening:
            if self._exchange is None:
                key, url = self.spec.key, self.spec.url
                context = self._client() if key else None
                if key and url.startswith("https:") and context is None:
                    raise ValueError("this driver has no certificate yet")
                self._exchange = BlockingExchange(url, context, key_name(key) if key else "")
            return self._exchange


class Siblings:
    """By name, as the document says."""

    def __init__(self) -> None:
        self._siblings: dict[str, Sibling] = {}

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

    def find(self, name: str) -> Sibling | None:
        return self._siblings.get(name)

    def close(self) -> None:
        for one in self._siblings.values():
            with contextlib.suppress(OSError):
                one.close()
