"""What is kept of conversations, so that their earlier turns are neither tokenized nor hashed again.

A text is cut into pieces where `splits` allows it, and pieces are kept below the piece that they follow:
so what is found is a prefix of the text, whatever conversation it was from. A piece has its bytes, its
tokens and, for each of its org's keys that asked, what the columns in it are hashed to. It is found by
comparing bytes with the piece that was there last, which is that of the same conversation as a rule, and
else by a digest. Orgs have trees of their own and never see each other's. Who has most gives way first,
so that an org has its fair share of the memory whatever others do; within an org the longest unused goes
first.

For one thread. Prompts are kept as long as they are used, and an hour longer.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Final, NamedTuple

from inference_brain.tokens.splits import places
from swdriver_shim.keys import STATE_BYTES, Keys, Known, Prompt

PIECE_BYTES_MIN: Final = 256  # so that a text of special tokens alone has not a piece for each
TREE_BYTES_MAX: Final = 256 << 20
IDLE_SECONDS: Final = 3600.0
MAKERS_MAX: Final = 4  # of keys, for each piece
DIGEST_BYTES: Final = 16
_PIECE_BYTES: Final = 600  # what Python has for one, besides its tokens
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


class _Below:
    """The pieces that follow another, by their digests; `last`: those that were used last, by what their
    first bytes are hashed to, of which each has so many."""

    __slots__ = ("after", "last")

    def __init__(self) -> None:
        self.after: dict[bytes, _Node] = {}
        self.last: dict[int, _Node] = {}


class _Node(_Below):
    __slots__ = (
        "above",
        "digest",
        "head",
        "known",
        "size",
        "text",
        "tokens",
        "total",
        "tree",
        "used_at",
    )

    def __init__(
        self, tree: _Tree, parent: _Node | None, digest: bytes, text: bytes, tokens: bytes
    ) -> None:
        super().__init__()
        self.tree = tree
        self.above: _Below = parent or tree
        self.digest = digest
        self.text = text
        self.head = hash(text[:PIECE_BYTES_MIN])
        self.tokens = tokens
        self.total: int = (parent.total if parent else 0) + len(tokens) // 4
        # For each identity of keys: states of the units that end in this piece, and keys of their
        # columns where they are not the states' beginnings.
        self.known: dict[bytes, tuple[bytes, tuple[bytes, ...]]] = {}
        self.size = _PIECE_BYTES + len(text) + len(tokens)
        self.used_at = 0.0


class _Tree(_Below):
    """Of one org and one tokenizer: the first pieces of its texts, and all by when they were used."""

    __slots__ = ("order", "size")

    def __init__(self) -> None:
        super().__init__()
        # A piece is used with all before it, and they are put behind it: so the first has none below.
        self.order: OrderedDict[_Node, None] = OrderedDict()
        self.size = 0


class Place(NamedTuple):
    """Whose texts are kept apart. `before`: the tokens that a text of these gets before its own."""

    org: str
    tokenizer: int
    before: tuple[int, ...] = ()


class Found(NamedTuple):
    """What is known of a text: its first pieces, up to one of its bytes."""

    path: list[_Node]
    end: int


class Tokens:
    """The tokens of a prompt. `raw`: 32 bits each; they are put together once and not copied after that.
    `reused`: how many of them were known from earlier prompts."""

    __slots__ = ("_path", "_turns", "raw", "reused")

    def __init__(self, turns: Turns, raw: bytes, reused: int, path: list[_Node]) -> None:
        self.raw = raw
        self.reused = reused
        self._turns = turns
        self._path = path

    def __len__(self) -> int:
        return len(self.raw) // 4

    @property
    def ids(self) -> Sequence[int]:
        """Their numbers."""
        return memoryview(self.raw).cast("I")

    def prompt(self, keys: Keys, request: str = "") -> Prompt:
        """The prompt in these keys, which are of the org that asked. What earlier prompts had is not
        hashed again."""
        known, reached = _known(self._path, keys)
        made = keys.prompt(self.raw, request, known=known)
        self._turns.learn(self._path[reached:], keys, made)
        return made


class Turns:
    """What is kept of all orgs' conversations, at most so many bytes together."""

    def __init__(self, bytes_max: int = TREE_BYTES_MAX, idle_seconds: float = IDLE_SECONDS) -> None:
        self.bytes_max = bytes_max
        self.idle_seconds = idle_seconds
        self.bytes = 0
        self.dropped = 0  # pieces, because memory was short
        self.forgotten = 0  # how often something was forgotten on demand
        self._trees: dict[Place, _Tree] = {}

    def begin(self, place: Place, raw: bytes, tokens: Sequence[bytes]) -> Found:
        """The prefix of a text that is of the conversation it follows: no byte of it is hashed.
        `tokens`: before which texts are cut."""
        below: _Below | None = self._trees.get(place)
        path: list[_Node] = []
        at, starts_with = 0, raw.startswith
        while below and (node := below.last.get(hash(raw[at : at + PIECE_BYTES_MIN]))):
            if not starts_with(node.text, at):
                break
            path.append(node)
            below, at = node, at + len(node.text)
        # A piece ends where one may be cut, in this text too: before another piece that is so.
        if path and not starts_with(tuple(tokens), at):
            at -= len(path.pop().text)
        return Found(path, at)

    def find(self, place: Place, begun: Found, pieces: Sequence[Piece]) -> Found:
        """What follows of it that is known from elsewhere. `pieces`: of what follows."""
        below: _Below | None = begun.path[-1] if begun.path else self._trees.get(place)
        path, at = [*begun.path], begun.end
        for piece in pieces:
            node = below.after.get(piece.digest) if below and piece.digest is not None else None
            if node is None:
                break
            path.append(node)
            below, at = node, piece.end
        return Found(path, at)

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
        raws = [node.tokens for node in found.path]
        reused = found.path[-1].total if found.path else 0
        # What was found may have been dropped while the rest was tokenized, the last piece first: then
        # nothing hangs on it.
        path = found.path if {*found.path[-1:]} <= tree.order.keys() else []
        is_whole = len(path) == len(found.path) and forgotten == self.forgotten
        for piece, tokens in zip(pieces, new, strict=True):
            raws.append(its := tokens.tobytes())
            if is_whole and piece.digest is not None:
                above = path[-1] if path else None
                text = raw[piece.start : piece.end]
                path.append(self._node(tree, above, piece.digest, text, its))
        _use(tree, path, now)
        self.sweep(now, place)
        self._make_room()
        return Tokens(self, b"".join(raws), reused, path)

    def learn(self, path: Sequence[_Node], keys: Keys, prompt: Prompt) -> None:
        """Keeps what the columns of these pieces were hashed to."""
        unit, columns = keys.unit_tokens, keys.unit_columns
        for node in path:
            if node not in node.tree.order or keys.identity in node.known:
                continue
            first = (node.total - len(node.tokens) // 4) // unit
            last = node.total // unit
            apart = prompt.keys[first * columns : last * columns] if columns > 1 else []
            if len(node.known) == MAKERS_MAX:
                oldest = next(iter(node.known))
                self._grow(node, -_known_size(node.known.pop(oldest)))
            states = bytes(prompt.states[STATE_BYTES * first : STATE_BYTES * last])
            node.known[keys.identity] = made = (states, tuple(apart))
            self._grow(node, _known_size(made))
        self._make_room()

    def sweep(self, now: float, place: Place) -> None:
        """Forgets what was not used for long."""
        tree = self._trees.get(place)
        while tree and tree.order:
            node = next(iter(tree.order))
            if node.used_at >= now - self.idle_seconds:
                return
            self._drop(node)

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

    def _node(
        self, tree: _Tree, parent: _Node | None, digest: bytes, text: bytes, tokens: bytes
    ) -> _Node:
        after = (parent or tree).after
        node = after.get(digest)  # another request may have been sooner
        if node is None:
            node = after[digest] = _Node(tree, parent, digest, text, tokens)
            tree.order[node] = None
            tree.size += node.size
            self.bytes += node.size
        return node

    def _grow(self, node: _Node, size: int) -> None:
        node.size += size
        node.tree.size += size
        self.bytes += size

    def _drop(self, node: _Node) -> None:
        tree = node.tree
        del tree.order[node]
        above = node.above
        del above.after[node.digest]
        if above.last.get(node.head) is node:
            del above.last[node.head]
        tree.size -= node.size
        self.bytes -= node.size

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
                node = next(iter(oldest.order))
                sizes[most] -= node.size
                self._drop(node)
                self.dropped += 1
                if not oldest.order:
                    trees.remove(oldest)


def _use(tree: _Tree, path: Sequence[_Node], now: float) -> None:
    """All of these are in the tree."""
    put_behind = tree.order.move_to_end
    for node in reversed(path):
        node.used_at = now
        put_behind(node)
        node.above.last[node.head] = node


def _known(path: Sequence[_Node], keys: Keys) -> tuple[Known, int]:
    """Of the first pieces that have it, and how many those are."""
    identity = keys.identity
    having: list[tuple[bytes, tuple[bytes, ...]]] = []
    for node in path:
        if (found := node.known.get(identity)) is None:
            break
        having.append(found)
    states = b"".join([its for its, _ in having])
    apart = [key for _, its in having for key in its] if keys.unit_columns > 1 else keys.keys_of(states)
    return Known(states, apart), len(having)


def _known_size(known: tuple[bytes, tuple[bytes, ...]]) -> int:
    return _KNOWN_BYTES + len(known[0]) + 60 * len(known[1])
