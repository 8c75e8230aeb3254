"""What is kept of conversations, so that their earlier turns are neither tokenized nor hashed again.

A text is cut into pieces where `splits` allows it. Pieces that follow each other are kept as a run,
below the run that they follow: so what is found is a prefix of the text, whatever conversation it was
from. A run has its bytes, its tokens and, for each of its org's keys that asked, what the columns in it
are hashed to. It is found by comparing bytes with the run that was there last, which is that of the
same conversation as a rule, and else by digests of its pieces. When a conversation goes on, its last
run becomes longer; where another text parts from a run, the run is split in two. So what it takes to
find a conversation depends on where others have parted from it, and hardly on how many turns it has.

Orgs have trees of their own and never see each other's. Who has most gives way first, so that an org has
its fair share of the memory whatever others do; within an org the longest unused goes first.

For one thread. Prompts are kept as long as they are used, and an hour longer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain, groupby, pairwise
from typing import Final, NamedTuple

from inference_brain.tokens.splits import places
from swdriver_shim.keys import COLUMN_TOKENS, STATE_BYTES, Keys, Known, Prompt

PIECE_BYTES_MIN: Final = 256  # so that a text of special tokens alone has not a piece for each
RUN_BYTES_MAX: Final = 64 << 10  # of text: so much is copied when a run goes on or is split
TREE_BYTES_MAX: Final = 256 << 20
IDLE_SECONDS: Final = 3600.0
MAKERS_MAX: Final = 4  # of keys, for each run
DIGEST_BYTES: Final = 16
_RUN_BYTES: Final = 600  # what Python has for one, besides its tokens
_END_BYTES: Final = 200
_KNOWN_BYTES: Final = 180


class Piece(NamedTuple):
    """A part of a text that is tokenized by itself. `digest`: None for the last, which may go on."""

    start: int
    end: int
    digest: bytes | None


def cut(raw: bytes, tokens: Sequence[bytes], start: int = 0) -> list[Piece]:
    """The pieces of a text in UTF-8, which ends before some of these tokens. What is cut off does not
    depend on what follows. `start`: the end of a piece."""
    ends, last = [start], start
    for place in places(raw, tokens, start + PIECE_BYTES_MIN):
        if place - last >= PIECE_BYTES_MIN:
            ends.append(place)
            last = place
    with memoryview(raw) as whole:
        made = [
            Piece(first, end, sha256(whole[first:end]).digest()[:DIGEST_BYTES])
            for first, end in pairwise(ends)
        ]
    made.append(Piece(last, len(raw), None))
    return made


class _End(NamedTuple):
    """Of a piece in a run: how many bytes and tokens the text has up to it."""

    digest: bytes
    text: int
    tokens: int


class _Hashed(NamedTuple):
    """What units of so many columns are hashed to: their states, and the keys of their columns."""

    columns: int
    states: bytes
    keys: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return _KNOWN_BYTES + len(self.states) + 60 * len(self.keys)

    def split(self, units: int) -> tuple[_Hashed, _Hashed]:
        """Of the first so many, and of the others."""
        states, keys = STATE_BYTES * units, self.columns * units
        return (
            _Hashed(self.columns, self.states[:states], self.keys[:keys]),
            _Hashed(self.columns, self.states[states:], self.keys[keys:]),
        )


class _Below:
    """The runs that follow another, by the digests of their first pieces; `last`: those that were used
    last, by what their first bytes are hashed to, of which each has so many."""

    __slots__ = ("after", "last")

    def __init__(self) -> None:
        self.after: dict[bytes, _Run] = {}
        self.last: dict[int, _Run] = {}


class _Run(_Below):
    """What it has up to its end never changes; where it begins does, when it is split."""

    __slots__ = ("above", "ends", "head", "known", "longer", "size", "text", "tokens", "tree", "used_at")

    def __init__(self, tree: _Tree, above: _Below, ends: list[_End], text: bytes, tokens: bytes) -> None:
        super().__init__()
        self.tree = tree
        self.above = above
        self.longer: _Run | None = None  # in its place, since its conversation went on
        # By the identity of keys: of the units that end in this run, or of the first of them.
        self.known: dict[bytes, _Hashed] = {}
        self.used_at = 0.0
        self.size = 0
        self.set(ends, text, tokens)

    def set(self, ends: list[_End], text: bytes, tokens: bytes) -> None:
        self.ends = ends
        self.text = text
        self.tokens = tokens
        self.head = hash(text[:PIECE_BYTES_MIN])

    @property
    def digest(self) -> bytes:
        """Of its first piece."""
        return self.ends[0].digest

    @property
    def end(self) -> int:
        """In the text."""
        return self.ends[-1].text

    @property
    def start(self) -> int:
        return self.end - len(self.text)

    def units(self, columns: int) -> int:
        """How many units of so many columns end in it."""
        return self.ends[-1].tokens // (columns * COLUMN_TOKENS) - self.first_unit(columns)

    def first_unit(self, columns: int) -> int:
        """How many end before it."""
        return (self.ends[-1].tokens - len(self.tokens) // 4) // (columns * COLUMN_TOKENS)

    def measure(self) -> int:
        known = sum(hashed.size for hashed in self.known.values())
        return _RUN_BYTES + _END_BYTES * len(self.ends) + len(self.text) + len(self.tokens) + known


class _Tree(_Below):
    """Of one org and one tokenizer: the first runs of its texts, and all by when they were used."""

    __slots__ = ("order", "size")

    def __init__(self) -> None:
        super().__init__()
        # A run is used with all before it, and they are put behind it: so the first has none below.
        self.order: OrderedDict[_Run, None] = OrderedDict()
        self.size = 0


class Place(NamedTuple):
    """Whose texts are kept apart. `before`: the tokens that a text of these gets before its own."""

    org: str
    tokenizer: int
    before: tuple[int, ...] = ()


class Found(NamedTuple):
    """What is known of a text: the run that has the last of it, up to which of the text's bytes, and
    the tokens until there, part by part. The run may have more, and may be split at any time."""

    last: _Run | None
    end: int
    tokens: list[bytes]


class Tokens:
    """The tokens of a prompt. `raw`: 32 bits each; they are put together once and not copied after that.
    `reused`: how many of them were known from earlier prompts."""

    __slots__ = ("_last", "_turns", "raw", "reused")

    def __init__(self, turns: Turns, raw: bytes, reused: int, last: _Run | None) -> None:
        self.raw = raw
        self.reused = reused
        self._turns = turns
        self._last = last

    def __len__(self) -> int:
        return len(self.raw) // 4

    @property
    def ids(self) -> Sequence[int]:
        """Their numbers."""
        return memoryview(self.raw).cast("I")

    def prompt(self, keys: Keys, request: str = "") -> Prompt:
        """The prompt in these keys, which are of the org that asked. What earlier prompts had is not
        hashed again."""
        path = _path_to(self._last)
        known, whole = _known(path, keys)
        made = keys.prompt(self.raw, request, known=known)
        self._turns.learn(path[whole:], keys, made)
        return made


class Turns:
    """What is kept of all orgs' conversations, at most so many bytes together."""

    def __init__(self, bytes_max: int = TREE_BYTES_MAX, idle_seconds: float = IDLE_SECONDS) -> None:
        self.bytes_max = bytes_max
        self.idle_seconds = idle_seconds
        self.bytes = 0
        self.dropped = 0  # runs, because memory was short
        self.forgotten = 0  # how often something was forgotten on demand
        self._trees: dict[Place, _Tree] = {}

    def begin(self, place: Place, raw: bytes, tokens: Sequence[bytes]) -> Found:
        """The prefix of a text that is of the conversation it follows: no byte of it is hashed.
        `tokens`: before which texts are cut."""
        below: _Below | None = self._trees.get(place)
        last, at, found = None, 0, list[bytes]()
        while below and (run := below.last.get(hash(raw[at : at + PIECE_BYTES_MIN]))):
            count = _in_common(run, raw, at)
            # A piece ends where one may be cut, in this text too: before another piece that is so.
            if count and not raw.startswith(tuple(tokens), run.ends[count - 1].text):
                count -= 1
            if count:
                last, at = run, run.ends[count - 1].text
                found.append(_first(run, count))
            if count < len(run.ends):
                break
            below = run
        return Found(last, at, found)

    def find(self, place: Place, begun: Found, pieces: Sequence[Piece]) -> Found:
        """What follows of it that is known from elsewhere. `pieces`: of what follows."""
        last, at, found = begun.last, begun.end, [*begun.tokens]
        below: _Below | None = last or self._trees.get(place)
        if last and at != last.end:
            return begun  # it has parted from all that is known
        digests = iter([piece.digest for piece in pieces])
        digest = next(digests)
        while below and digest and (run := below.after.get(digest)):
            count = 0
            for end in run.ends:
                if end.digest != digest:
                    break
                count, digest = count + 1, next(digests)
            last, at = run, run.ends[count - 1].text
            found.append(_first(run, count))
            below = run if count == len(run.ends) else None
        return Found(last, at, found)

    def add(
        self,
        place: Place,
        raw: bytes,
        found: Found,
        pieces: Sequence[Piece],
        new: Sequence[array[int]],
        now: float,
        forgotten: int,
    ) -> Tokens:
        """Keeps the pieces that were not found, with their tokens, and puts all together. `new`: the
        tokens of each, in order. `forgotten`: as it was when the request came; what was asked before
        a purge is not kept after it."""
        tree = self._trees.get(place)
        if tree is None:
            tree = self._trees[place] = _Tree()
        raws = [tokens.tobytes() for tokens in new]
        reused = sum(map(len, found.tokens)) // 4
        run, last = found.last, None
        while run and run.longer:  # another request went on with it while the rest was tokenized
            run = run.longer
        # Or it was dropped meanwhile, the last run first: then nothing hangs on it.
        if forgotten == self.forgotten and (run is None or run in tree.order):
            last = self._keep(tree, place, raw, Found(run, found.end, []), pieces, raws)
            _use(tree, _path_to(last), now)
        self.sweep(now, place)
        self._make_room()
        return Tokens(self, b"".join(found.tokens + raws), reused, last)

    def _keep(
        self,
        tree: _Tree,
        place: Place,
        raw: bytes,
        found: Found,
        pieces: Sequence[Piece],
        raws: Sequence[bytes],
    ) -> _Run | None:
        """Returns the run that has the last of the text."""
        above = self._ending(found)
        if len(pieces) == 1:  # the last one may go on, and is not kept
            return above
        # Another request may have been sooner.
        found = self.find(place, Found(above, found.end, []), pieces)
        above = self._ending(found)
        total = above.ends[-1].tokens if above else 0
        left: list[tuple[_End, bytes]] = []
        for piece, its in zip(pieces, raws, strict=True):
            if piece.start >= found.end and piece.digest is not None:
                total += len(its) // 4
                left.append((_End(piece.digest, piece.end, total), its))
        # One run of all would be copied as a whole where any short text parts from it.
        for _, part in groupby(left, key=lambda one: (one[0].text - found.end) // RUN_BYTES_MAX):
            ends, tokens = zip(*part, strict=True)
            above = self._go_on(tree, above, raw, ends, b"".join(tokens))
        return above

    def _go_on(
        self, tree: _Tree, above: _Run | None, raw: bytes, ends: Sequence[_End], tokens: bytes
    ) -> _Run:
        """Keeps what a text has after this run; returns the run that has the last of it."""
        text = raw[above.end if above else 0 : ends[-1].text]
        if above and not above.after and len(above.text) + len(text) <= RUN_BYTES_MAX:
            # What goes on behind it is another object: who has found it has found no more than it had.
            made = _Run(
                tree, above.above, [*above.ends, *ends], above.text + text, above.tokens + tokens
            )
            made.known = {**above.known}
            self._drop(above)
            above.longer = made
        else:
            made = _Run(tree, above or tree, [*ends], text, tokens)
        self._put(made)
        return made

    def _ending(self, found: Found) -> _Run | None:
        """The run that ends where what was found does; another one is split there."""
        run = found.last
        while run and run.start >= found.end:  # it has been split since
            run = run.above if isinstance(run.above, _Run) else None
        if run is None or run.end == found.end:
            return run
        return self._split(run, found.end)

    def _split(self, run: _Run, end: int) -> _Run:
        """Make what it has up to there a run of its own, which is returned, and has to be used now."""
        count = 1 + [one.text for one in run.ends].index(end)
        text, tokens = len(run.text) - (run.end - end), len(_first(run, count))
        above, head = run.above, run.head
        upper = _Run(run.tree, above, run.ends[:count], run.text[:text], run.tokens[:tokens])
        known, run.known = run.known, {}
        run.set(run.ends[count:], run.text[text:], run.tokens[tokens:])
        for identity, hashed in known.items():
            upper.known[identity], run.known[identity] = hashed.split(upper.units(hashed.columns))
        if above.last.get(head) is run:
            above.last[head] = upper
        upper.used_at = run.used_at
        self._put(upper)
        run.above = upper
        upper.after[run.digest] = upper.last[run.head] = run
        self._resize(run)
        return upper

    def learn(self, path: Sequence[_Run], keys: Keys, prompt: Prompt) -> None:
        """Keeps what the columns of these runs were hashed to."""
        columns, identity = keys.unit_columns, keys.identity
        for run in path:
            if run not in run.tree.order:
                continue
            if identity not in run.known and len(run.known) == MAKERS_MAX:
                del run.known[next(iter(run.known))]
            first = run.first_unit(columns)
            last = first + run.units(columns)
            states = bytes(prompt.states[STATE_BYTES * first : STATE_BYTES * last])
            its = tuple(prompt.keys[first * columns : last * columns])
            run.known[identity] = _Hashed(columns, states, its)
            self._resize(run)
        if path:
            self._make_room()

    def sweep(self, now: float, place: Place) -> None:
        """Forgets what was not used for long."""
        tree = self._trees.get(place)
        while tree and tree.order:
            run = next(iter(tree.order))
            if run.used_at >= now - self.idle_seconds:
                return
            self._drop(run)

    def sweep_all(self, now: float) -> None:
        """For whoever calls it now and then: orgs that ask nothing any more are forgotten too."""
        for place in list(self._trees):
            self.sweep(now, place)
            if not self._trees[place].order:
                del self._trees[place]

    def forget(self, org: str | None = None, tokenizer: int | None = None) -> None:
        """Forget what is kept of an org, or of a tokenizer; of all without either."""
        self.forgotten += 1
        for place in list(self._trees):
            if org in (None, place.org) and tokenizer in (None, place.tokenizer):
                tree = self._trees.pop(place)
                self.bytes -= tree.size
                tree.order.clear()

    def size_of(self, org: str) -> int:
        """Bytes kept of an org."""
        return sum(tree.size for place, tree in self._trees.items() if place.org == org)

    def _put(self, run: _Run) -> None:
        run.above.after[run.digest] = run
        run.tree.order[run] = None
        self._resize(run)

    def _resize(self, run: _Run) -> None:
        """It takes as much memory as it does now."""
        size = run.measure()
        run.tree.size += size - run.size
        self.bytes += size - run.size
        run.size = size

    def _drop(self, run: _Run) -> None:
        tree, above = run.tree, run.above
        del tree.order[run]
        del above.after[run.digest]
        if above.last.get(run.head) is run:
            del above.last[run.head]
        tree.size -= run.size
        self.bytes -= run.size

    def _make_room(self) -> None:
        while self.bytes > self.bytes_max:
            sizes: dict[str, int] = {}
            for place, tree in self._trees.items():
                sizes[place.org] = sizes.get(place.org, 0) + tree.size
            most = max(sizes, key=lambda one: sizes[one])
            trees = [tree for one, tree in self._trees.items() if one.org == most and tree.order]
            # A sixteenth at once, so that it is not looked for each time.
            until = sizes[most] - max(1, min(sizes[most], self.bytes_max) // 16)
            while trees and sizes[most] > until:
                oldest = min(trees, key=lambda one: next(iter(one.order)).used_at)
                run = next(iter(oldest.order))
                sizes[most] -= run.size
                self._drop(run)
                self.dropped += 1
                if not oldest.order:
                    trees.remove(oldest)


def _in_common(run: _Run, raw: bytes, at: int) -> int:
    """How many pieces of the run this text has from there on."""
    if raw.startswith(run.text, at):
        return len(run.ends)
    with memoryview(run.text) as text:
        return bisect_left(run.ends, True, key=lambda one: not raw.startswith(text[: one.text - at], at))


def _first(run: _Run, pieces: int) -> bytes:
    """The tokens of the first so many pieces."""
    left_out = run.ends[-1].tokens - run.ends[pieces - 1].tokens
    return run.tokens[: len(run.tokens) - 4 * left_out]


def _path_to(run: _Run | None) -> list[_Run]:
    """All runs of a text up to this one."""
    path: list[_Run] = []
    above: _Below | None = run
    while isinstance(above, _Run):
        path.append(above)
        above = above.above
    path.reverse()
    return path


def _use(tree: _Tree, path: Sequence[_Run], now: float) -> None:
    """All of these are in the tree."""
    put_behind = tree.order.move_to_end
    for run in reversed(path):
        run.used_at = now
        put_behind(run)
        run.above.last[run.head] = run


def _known(path: Sequence[_Run], keys: Keys) -> tuple[Known, int]:
    """Of the first runs that have it, and how many of those have all of it."""
    identity, columns = keys.identity, keys.unit_columns
    having: list[_Hashed] = []
    whole = 0
    for run in path:
        if (found := run.known.get(identity)) is None:
            break
        having.append(found)
        if len(found.states) < STATE_BYTES * run.units(columns):
            break
        whole += 1
    states = b"".join([hashed.states for hashed in having])
    return Known(states, [*chain.from_iterable([hashed.keys for hashed in having])]), whole
