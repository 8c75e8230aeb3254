"""The wafer emulator: an engine that computes no KV, for demos, replays and tests.

    wafer = Wafer(wafer_layout(boxes=2, bytes_per_token=4096))
    emulator = Emulator(InBytes(driver, wafer))         # or InNumbers(Ledger(wafer.layout))
    served = emulator.serve(Keys("acme", secret, wafer.namespace), tokens, output)

Its KV is generated from the tokens, so that every byte that is loaded can be checked at the speed of
memory. Its time to first token is modeled after a real engine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, Protocol

from xxhash import xxh3_128_digest

from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS, Buffer, Keys, Namespace, Prompt
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import AS_USUAL, Rules

DOMAINS: Final = 4
WIO: Final = (3, 4, 3, 2)  # streams of each domain of a box
WINDOW_SHARE: Final = 2  # half of the layers have a window
DRAFT_SHARE: Final = 16  # a draft model has a sixteenth of the bytes
STATE_TOKENS: Final = 512

_BLOCK_BYTES: Final = 4093  # a prime: no two pages of a part are alike
_PHASES: Final = 1021  # steps between parts; a prime, too, so that parts begin at different places
_ANYBODY: Final = bytes(32)  # no secret: KV depends on model and tokens, not on who asks

Tokens = Sequence[int] | Buffer


def wafer_layout(
    boxes: int,
    bytes_per_token: int,
    *,
    wio: Sequence[int] = WIO,
    window_tokens: int | None = None,
    draft: bool = False,
    state_bytes: int = 0,
    tokens_per_state: int = STATE_TOKENS,
) -> Layout:
    """The layout of a model with so many bytes per token in all, over the domains of some boxes.

    Each group is divided over domains in proportion to their WIO streams. Shards are in the order of
    boxes, then domains. With `window_tokens` half of the bytes are in a group with a window; with
    `draft` a sixteenth is a draft model's. With `state_bytes` there is a state group besides, whose
    engine has a state after every `tokens_per_state` tokens. Raises ValueError if a shard would have no
    bytes.
    """
    if boxes < 1 or len(wio) != DOMAINS or min(wio) < 1:
        raise ValueError(f"a layout has a box or more, each of {DOMAINS} domains with WIO streams")
    draft_bytes = bytes_per_token // DRAFT_SHARE if draft else 0
    window_bytes = (bytes_per_token - draft_bytes) // WINDOW_SHARE if window_tokens else 0
    full = Group("full", _split(bytes_per_token - draft_bytes - window_bytes, tuple(wio) * boxes))
    groups = [full]
    if window_tokens:
        groups.append(Group("window", _split(window_bytes, tuple(wio) * boxes), window_tokens))
    if draft:
        groups.append(Group("draft", _split(draft_bytes, tuple(wio) * boxes)))
    if state_bytes:
        sizes = _split(state_bytes, tuple(wio) * boxes)
        groups.append(Group("state", bytes_per_state=sizes, tokens_per_state=tokens_per_state))
    return Layout(tuple(groups))


def _split(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Divide a total in proportion to weights, without a remainder."""
    ends = [total * up_to // sum(weights) for up_to in accumulate(weights, initial=0)]
    return tuple(end - start for start, end in pairwise(ends))


@dataclass(frozen=True, slots=True)
class Speed:
    """A model of an engine's time to first token. By default for 70 billion parameters on one box."""

    parameters: float = 70e9  # each token takes two operations for each
    layers: int = 80
    width: int = 8192  # attention takes four operations for each of it, layer, token, token before
    operations_per_second: float = 1e16  # that are reached in prefill
    bytes_per_token: int = 80 * 8 * 128 * 2 * 2  # of KV: 8 heads of 128, key and value, bf16
    refill_bytes_per_second: float = 12 * 12.5e9  # 12 streams of 100 Gbit/s

    def compute_seconds(self, tokens: int, after: int = 0) -> float:
        """Prefill of so many tokens after `after` tokens whose KV is present."""
        pairs = tokens * after + tokens * (tokens + 1) / 2
        operations = 2 * self.parameters * tokens + 4 * self.layers * self.width * pairs
        return operations / self.operations_per_second

    def ttft_seconds(self, asked: int, hit: int = 0) -> float:
        """Refill the hit, then compute the rest: at least the last token, for the answer."""
        hit = min(hit, asked - 1) if asked else 0
        refill = hit * self.bytes_per_token / self.refill_bytes_per_second
        return refill + self.compute_seconds(asked - hit, hit)


class ColumnPart(NamedTuple):
    """A column's part in one shard, and its tokens."""

    group: int
    shard: int
    depth: int
    tokens: int


class Wafer:
    """A model on a wafer."""

    def __init__(self, layout: Layout, model: str = "emulated") -> None:
        self.layout = layout
        shape = hashlib.sha256(repr(layout).encode()).hexdigest()[:16]
        self.namespace = Namespace(model, "1", "made up", shape)
        self._keys = Keys("anybody", _ANYBODY, self.namespace)
        self._repeats = [
            2 + max(group.part_bytes(at, COLUMN_TOKENS) for at in range(group.shards)) // _BLOCK_BYTES
            for group in layout.groups
        ]

    def kv(self, tokens: Tokens) -> Kv:
        """The KV of these tokens."""
        return Kv(self.layout, self._keys.prompt(tokens), self._repeats)

    def parts(self, tokens: int) -> Iterator[ColumnPart]:
        """All parts that are needed to continue after so many tokens."""
        whole, rest = divmod(tokens, COLUMN_TOKENS)
        for index, group in enumerate(self.layout.groups):
            for depth in range(group.first_needed(tokens), whole + (rest > 0)):
                count = COLUMN_TOKENS if depth < whole else rest
                for shard in range(group.shards):
                    yield ColumnPart(index, shard, depth, count)

    def states(self, after: int, tokens: int) -> list[int]:
        """After how many tokens the engine has a state, once it has computed from `after` up to so many:
        where states are stored, and at the end."""
        apart = [group.columns_per_slot for group in self.layout.groups if group.is_state]
        if not apart or after >= tokens:
            return []
        each = min(apart) * COLUMN_TOKENS
        return sorted({*range((after // each + 1) * each, tokens + 1, each), tokens})


class Kv:
    """The KV of one prompt. Called, it is a `Part` that a driver stores from.

    A column's bytes are one block, made from the hash of all tokens up to its end, over and over. Each
    part of it begins at another place in the block. So making them costs one hash a column and a copy.
    """

    def __init__(self, layout: Layout, prompt: Prompt, repeats: Sequence[int]) -> None:
        self._layout = layout
        self._prompt = prompt
        self._repeats = repeats  # of a block, by group
        self._made: dict[tuple[int, int, int], bytes] = {}  # columns, by repeats, depth and tokens

    def extend(self, more: Tokens) -> None:
        self._prompt.extend(more)

    def compute(self, after: int) -> None:
        """Generate what follows so many tokens, so that later calls are fast; but for states."""
        whole, rest = divmod(self._prompt.tokens, COLUMN_TOKENS)
        for group, of in enumerate(self._layout.groups):
            if of.is_state:
                continue
            for depth in range(after // COLUMN_TOKENS, whole):
                self._column(group, depth, COLUMN_TOKENS)
            if rest:
                self._column(group, whole, rest)

    def __call__(self, group: int, shard: int, depth: int, tokens: int) -> memoryview:
        """One column's part in one shard."""
        size = self._layout.groups[group].part_bytes(shard, tokens)
        shards = sum(each.shards for each in self._layout.groups[:group])
        start = (shards + shard) * _PHASES % _BLOCK_BYTES
        return memoryview(self._column(group, depth, tokens))[start : start + size]

    def wrong_bytes(self, part: ColumnPart, got: memoryview) -> int:
        """How many bytes of a part are missing or not what they should be."""
        right = self(*part)
        if xxh3_128_digest(got) == xxh3_128_digest(right):  # 20 times faster than comparing views
            return 0
        differ = sum(one != other for one, other in zip(got, right, strict=False))
        return differ + abs(len(got) - len(right))

    def _column(self, group: int, depth: int, tokens: int) -> bytes:
        repeats = self._repeats[group]
        made = self._made.get((repeats, depth, tokens))
        if made is None:
            whole = tokens == COLUMN_TOKENS
            key = self._prompt.keys[depth] if whole else self._prompt.tail(depth, tokens)
            made = hashlib.shake_128(key).digest(_BLOCK_BYTES) * repeats
            self._made[repeats, depth, tokens] = made
        return made


class Transferred(NamedTuple):
    """The result of a load or a store."""

    bytes: int
    seconds: float
    tokens: int = 0  # loaded
    wrong_bytes: int = 0


class Cache(Protocol):
    """What the emulator loads from and stores to, one request after the other."""

    def load(self, prompt: Prompt, tokens: Tokens) -> Transferred:
        """Load what is stored of a prompt of these tokens."""

    def store(self, prompt: Prompt, output: Tokens, rules: Rules) -> Transferred:
        """Store the prompt that was loaded last, extended by this output."""


class LedgerCache:
    """The ledger alone: all decisions are made, and no bytes are moved."""

    def __init__(
        self, ledger: Ledger, wafer: Wafer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger = ledger
        self._wafer = wafer
        self._clock = clock
        self._loaded = 0  # tokens of the request that is served

    def load(self, prompt: Prompt, tokens: Tokens) -> Transferred:  # noqa: ARG002 - there is no KV of them
        began = time.perf_counter()
        match = self._ledger.match(prompt, self._clock())
        self._ledger.release(match)
        self._loaded = match.tokens
        return Transferred(0, time.perf_counter() - began, match.tokens)

    def store(self, prompt: Prompt, output: Tokens, rules: Rules) -> Transferred:  # noqa: ARG002 - likewise
        states = self._wafer.states(self._loaded, prompt.tokens)
        began = time.perf_counter()
        store = self._ledger.begin_store(prompt, prompt.tokens, self._clock(), rules, states=states)
        self._ledger.finish_store(store, self._clock())
        return Transferred(0, time.perf_counter() - began)


class DriverCache:
    """A driver, and the wafer's own memory. Every loaded byte is checked."""

    def __init__(self, driver: Driver, wafer: Wafer, wait_seconds: float = 0.0) -> None:
        """`wait_seconds`: how long to wait for tier 2, at most."""
        self._driver = driver
        self._wait_seconds = wait_seconds
        self._wafer = wafer
        self._kv = wafer.kv(())
        self._loaded = 0  # tokens of the request that is served
        self._memory: dict[tuple[int, int, int], bytearray] = {}  # by group, shard and depth

    def load(self, prompt: Prompt, tokens: Tokens) -> Transferred:
        self._kv = self._wafer.kv(tokens)
        landed: set[ColumnPart] = set()

        def place(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            part = ColumnPart(group, shard, depth, tokens)
            landed.add(part)
            return self._place(part)

        began = time.perf_counter()
        loaded = self._loaded = self._driver.load(prompt, place, seconds=self._wait_seconds).tokens
        seconds = time.perf_counter() - began
        moved = wrong = 0
        for part in self._wafer.parts(loaded):
            got = self._place(part) if part in landed else memoryview(b"")
            moved += got.nbytes
            wrong += self._kv.wrong_bytes(part, got)
        return Transferred(moved, seconds, loaded, wrong)

    def store(self, prompt: Prompt, output: Tokens, rules: Rules) -> Transferred:
        kv, sizes = self._kv, list[int]()
        kv.extend(output)
        kv.compute(self._loaded)

        def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            part = kv(group, shard, depth, tokens)
            sizes.append(part.nbytes)
            return part

        states = self._wafer.states(self._loaded, prompt.tokens)
        began = time.perf_counter()
        self._driver.store(prompt, prompt.tokens, read, rules, states=states)
        return Transferred(sum(sizes), time.perf_counter() - began)

    def _place(self, part: ColumnPart) -> memoryview:
        """The memory of a part: always the same, as on a wafer."""
        group, shard, depth, tokens = part
        of = self._wafer.layout.groups[group]
        place = self._memory.get((group, shard, depth))
        if place is None:
            size = of.part_bytes(shard, COLUMN_TOKENS)
            place = self._memory[group, shard, depth] = bytearray(size)
        return memoryview(place)[: of.part_bytes(shard, tokens)]


@dataclass(frozen=True, slots=True)
class Served:
    """The result of one request."""

    asked: int  # tokens
    hit: int
    load: Transferred
    store: Transferred
    ttft_seconds: float  # by the model
    ttft_cold_seconds: float  # what it would have been without a cache


class Emulator:
    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._speed = Speed()

    def serve(self, keys: Keys, tokens: Tokens, output: Tokens = (), rules: Rules = AS_USUAL) -> Served:
        """Load what is stored of these tokens, "compute" the rest and the output, store all."""
        prompt = keys.prompt(tokens)
        asked = prompt.tokens
        load = self._cache.load(prompt, tokens)
        prompt.extend(output)
        store = self._cache.store(prompt, output, rules)
        ttft, cold = self._speed.ttft_seconds(asked, load.tokens), self._speed.ttft_seconds(asked)
        return Served(asked, load.tokens, load, store, ttft, cold)
