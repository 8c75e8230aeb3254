"""What the emulator's driver has of a prompt: loaded, compared byte by byte, and stored.

Whose a request is comes from its signed claim alone. All functions block; they are for threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from kvss_agent.documents import Invalid
from swdriver_shim.adapters.claims import Claim, ClaimVerifier, carried_by
from swdriver_shim.adapters.join_config import JoinConfig
from swdriver_shim.adapters.wafer import ColumnPart, Kv, Wafer
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.policy import AS_USUAL, Rules
from swdriver_shim.prefixes import LocalPrefixes

log = logging.getLogger(__name__)

WAIT_SECONDS: Final = 0.05  # for columns in tier 2
RETRY_SECONDS: Final = 1.0  # until a driver is made again that could not be made
ENGINE: Final = "emulator 1"


class Driver(Protocol):
    """What is used of a `JoinedDriver`."""

    @property
    def is_attached(self) -> bool: ...
    def claims(self) -> ClaimVerifier | None: ...
    def prefixes(self, org: str, adapter: str = "") -> LocalPrefixes: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Prompt:
    """A request's tokens, and what was loaded of them. `prefixes`: None if it is cached for nobody."""

    tokens: list[int]
    name: str  # by which its outcome can be looked up
    kv: Kv
    prefixes: LocalPrefixes | None = None
    rules: Rules = AS_USUAL
    hit: int = 0
    wrong_bytes: int = 0


class Cache:
    """The KV of an engine's requests, with a driver once there is one."""

    def __init__(self, model: ModelSpec) -> None:
        # Another revision has other KV, so that bytes of one that another one gets would be found.
        self._wafer = Wafer(model.shape(), f"{model.name}@{model.revision}")
        self._driver: Driver | None = None
        self.refused: Counter[str] = Counter()  # requests that are cached for nobody, by reason

    def use(self, driver: Driver | None) -> None:
        self._driver = driver

    def load(self, tokens: Sequence[int], params: object, name: str) -> Prompt:
        """Load what the driver has of a prompt. `params`: the request's `kv_transfer_params`."""
        prompt = Prompt(list(tokens), name, self._wafer.kv(tokens))
        driver = self._driver
        claim = self._claim(driver, params)
        if claim is None or driver is None:
            return prompt
        prompt.prefixes, prompt.rules = driver.prefixes(claim.org), claim.rules
        if claim.sibling:
            prompt.prefixes.borrow(prompt.tokens, claim.sibling)
        places: dict[ColumnPart, bytearray] = {}

        def into(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            part = ColumnPart(group, shard, depth, tokens)
            size = self._wafer.layout.groups[group].part_bytes(shard, tokens)
            place = places[part] = bytearray(size)
            return memoryview(place)

        prompt.hit = prompt.prefixes.load(prompt.tokens, into, WAIT_SECONDS, name).tokens
        prompt.wrong_bytes = sum(
            prompt.kv.wrong_bytes(part, memoryview(places.get(part, b"")))
            for part in self._wafer.parts(prompt.hit)
        )
        if prompt.wrong_bytes:
            log.error(
                "%d of the bytes loaded for %s differ from what was stored",
                *(prompt.wrong_bytes, claim.org),
            )
        return prompt

    def computed(self, prompt: Prompt, seconds: float) -> None:
        """Its missed tokens took so long. Whole columns of it are stored: others that begin like it
        need not wait for its answer."""
        if prompt.prefixes is None:
            return
        tokens = len(prompt.tokens)
        if missed := tokens - prompt.hit:
            prompt.prefixes.computed(missed, seconds)
        self._store(prompt, tokens // COLUMN_TOKENS * COLUMN_TOKENS)

    def answered(self, prompt: Prompt, answer: Sequence[int]) -> None:
        """Store it with its answer, to the last token."""
        if prompt.prefixes is None:
            return
        prompt.kv.extend(answer)
        prompt.tokens.extend(answer)
        self._store(prompt, len(prompt.tokens))

    def _store(self, prompt: Prompt, verified: int) -> None:
        if prompt.prefixes is None or verified <= prompt.hit:
            return
        prompt.prefixes.store(
            prompt.tokens,
            verified,
            prompt.kv,
            rules=prompt.rules,
            request=prompt.name,
            states=self._wafer.states(prompt.hit, verified),
        )

    def _claim(self, driver: Driver | None, params: object) -> Claim | None:
        claims = driver.claims() if driver else None
        if claims is None:
            self.refused["no_document" if driver else "no_driver"] += 1
            return None
        claim = claims.verify(carried_by(params))
        if isinstance(claim, Claim):
            return claim
        self.refused[claim.value] += 1
        return None


class Attachment:
    """Makes an engine's driver, in a thread: the engine serves without one meanwhile."""

    def __init__(
        self,
        config: JoinConfig,
        model: ModelSpec,
        use: Callable[[Driver | None], None],
        make: Callable[[JoinConfig, ModelSpec, str], Driver] | None = None,
    ) -> None:
        self._problem = "The driver is being started."
        self._driver: Driver | None = None
        self._config, self._model, self._use, self._make = config, model, use, make
        self._ending = threading.Event()
        self._opened = ExitStack()
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    @property
    def is_attached(self) -> bool:
        return self._driver is not None and self._driver.is_attached

    @property
    def problem(self) -> str:
        """Why there is none; empty while there is one."""
        if self._driver is None:
            return self._problem
        return "" if self.is_attached else "The driver's identity is released, or another engine has it."

    def begin(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the driver, which leaves its note for the next one."""
        self._ending.set()
        if self._thread.ident is not None:  # it has begun
            self._thread.join()
        self._use(None)
        self._opened.close()

    def _run(self) -> None:
        # Here, for it takes as long to load as all the rest: the engine answers by now.
        from kvss_agent.native import Unavailable
        from kvss_agent.security.identity import Unusable
        from swdriver_shim.adapters.joining import JoinedDriver

        make = self._make or JoinedDriver
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                driver = make(self._config, self._model, ENGINE)
            except (Invalid, Unavailable, Unusable) as error:
                self._say(f"There is no driver: {error}")
                return
            except OSError as error:  # another process has its identity, or a port is taken
                self._say(f"There is no driver yet: {error}")
                self._ending.wait(max(0.0, began + RETRY_SECONDS - time.monotonic()))
                continue
            self._opened.callback(driver.close)
            self._use(driver)
            self._driver = driver
            log.info("The driver %s has started", self._config.name)
            return

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem
