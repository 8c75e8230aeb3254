"""What is kept of conversations, so that their earlier turns are neither tokenized nor hashed again.

A text is cut into pieces where `splits` allows it, and pieces are found by their digests, each below the
piece that it follows: so what is found is a prefix of the text, whatever conversation it was from. A
piece has its tokens and, for each of its org's keys that asked, what the columns in it are hashed to.
Orgs have trees of their own and never see each other's. Who has most gives way first, so that an org
has its fair share of the memory whatever others do; within an org the longest unused goes first.

For one thread. Texts are kept nowhere; tokens are, for as long as they are used.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Final, NamedTuple

from inference_brain.tokens.errors import HALF_A_CHARACTER, BadMessages
from inference_brain.tokens.splits import places
from swdriver_shim.keys import Keys, Known, Prompt

PIECE_BYTES_MIN: Final = 256  # so that a text of special tokens alone has not a piece for each
TREE_BYTES_MAX: Final = 256 << 20
IDLE_SECONDS: Final = 3600.0
MAKERS_MAX: Final = 4  # of keys, for each piece
DIGEST_BYTES: Final = 16
STATE_BYTES: Final = 32
_PIECE_BYTES: Final = 600  # what Python has for one, besides its tokens
_KNOWN_BYTES: Final = 180


class Piece(NamedTuple):
    """A part of a text that is tokenized by itself. `digest`: None for the last, which may go on."""

    start: int
    end: int
    digest: bytes | None


class Cut(NamedTuple):
    """A text in UTF-8, and its pieces: where each begins and ends in it."""

    raw: bytes
    pieces: list[Piece]

    def texts(self, first: int) -> list[str]:
        """Of the pieces from the one with this number on."""
        return [self.raw[one.start : one.end].decode() for one in self.pieces[first:]]


def cut(text: str, tokens: Sequence[bytes], before: Sequence[int] = ()) -> Cut:
    """Where a text is cut, before some of these tokens. What is cut off does not depend on what
    follows. `before`: tokens that the first piece gets besides its own. Raises BadMessages."""
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise BadMessages(HALF_A_CHARACTER) from None
    ends, last = [0], 0
    for place in places(raw, tokens, PIECE_BYTES_MIN):
        if place - last >= PIECE_BYTES_MIN:
            ends.append(place)
            last = place
    # With its length, so that no text begins with what another's tokens before it are.
    mixed = sha256(b"%d:" % len(before) + array("I", before).tobytes())
    made = []
    with memoryview(raw) as whole:
        for start, end in pairwise(ends):
            mixed.update(whole[start:end])
            made.append(Piece(start, end, mixed.digest()[:DIGEST_BYTES]))
            mixed = sha256()
    made.append(Piece(last, len(raw), None))
    return Cut(raw, made)


class _Node:
    __slots__ = ("after", "digest", "known", "parent", "size", "tokens", "total", "tree", "used_at")

    def __init__(self, tree: _Tree, parent: _Node | None, digest: bytes, tokens: bytes) -> None:
        self.tree = tree
        self.parent = parent
        self.digest = digest
        self.tokens = tokens
        self.total: int = (parent.total if parent else 0) + len(tokens) // 4
        self.after: dict[bytes, _Node] = {}
        # For each identity of keys: states of the units that end in this piece, and keys of their
        # columns where they are not the states' beginnings.
        self.known: dict[bytes, tuple[bytes, tuple[bytes, ...]]] = {}
        self.size = _PIECE_BYTES + len(tokens)
        self.used_at = 0.0


class _Tree:
    """Of one org and one tokenizer: the first pieces of its texts, and all by when they were used."""

    __slots__ = ("after", "order", "size")

    def __init__(self) -> None:
        self.after: dict[bytes, _Node] = {}
        # A piece is used with all before it, and they are put behind it: so the first has none below.
        self.order: OrderedDict[_Node, None] = OrderedDict()
        self.size = 0


class Tokens:
    """The tokens of a prompt. `reused`: how many of them were known from earlier prompts."""

    __slots__ = ("_path", "_turns", "ids", "reused")

    def __init__(self, turns: Turns, ids: array[int], reused: int, path: list[_Node]) -> None:
        self.ids = ids
        self.reused = reused
        self._turns = turns
        self._path = path

    def __len__(self) -> int:
        return len(self.ids)

    def prompt(self, keys: Keys, request: str = "") -> Prompt:
        """The prompt in these keys, which are of the org that asked. What earlier prompts had is not
        hashed again."""
        known, reached = _known(self._path, keys)
        made = keys.prompt(self.ids.tobytes(), request, known=known)
        self._turns.learn(self._path[reached:], keys, made)
        return made


class Turns:
    """What is kept of all orgs' conversations, at most so many bytes together."""

    def __init__(self, bytes_max: int = TREE_BYTES_MAX, idle_seconds: float = IDLE_SECONDS) -> None:
        self.bytes_max = bytes_max
        self.idle_seconds = idle_seconds
        self.bytes = 0
        self.dropped = 0  # pieces, because memory was short
        self._trees: dict[tuple[str, int], _Tree] = {}

    def find(self, org: str, tokenizer: int, pieces: Sequence[Piece], now: float) -> Found:
        """The longest prefix of these pieces that is known."""
        tree = self._trees.get((org, tokenizer))
        path: list[_Node] = []
        after = tree.after if tree else {}
        for piece in pieces:
            node = after.get(piece.digest) if piece.digest is not None else None
            if node is None:
                break
            path.append(node)
            after = node.after
        if tree:
            _use(tree, path, now)
        return Found(path, len(path))

    def add(
        self,
        org: str,
        tokenizer: int,
        pieces: Sequence[Piece],
        found: Found,
        new: Sequence[array[int]],
        now: float,
    ) -> Tokens:
        """Keeps the pieces that were not found, with their tokens, and puts all together. `new`: the
        tokens of each, in order."""
        tree = self._trees.get((org, tokenizer))
        if tree is None:
            tree = self._trees[org, tokenizer] = _Tree()
        ids = array("I", b"".join([node.tokens for node in found.path]))
        reused = len(ids)
        # What was found may have been dropped while the rest was tokenized: then nothing hangs on it.
        path = found.path if all(node in tree.order for node in found.path) else []
        is_whole = len(path) == len(found.path)
        for piece, tokens in zip(pieces[found.pieces :], new, strict=True):
            ids += tokens
            if is_whole and piece.digest is not None:
                path.append(self._node(tree, path[-1] if path else None, piece.digest, tokens))
        _use(tree, path, now)
        self.sweep(now, org, tokenizer)
        self._make_room()
        return Tokens(self, ids, reused, path)

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
            node.known[keys.identity] = made = (b"".join(prompt.states[first:last]), tuple(apart))
            self._grow(node, _known_size(made))
        self._make_room()

    def sweep(self, now: float, org: str, tokenizer: int) -> None:
        """Forgets what an org has not used for long."""
        tree = self._trees.get((org, tokenizer))
        while tree and tree.order:
            node = next(iter(tree.order))
            if node.used_at >= now - self.idle_seconds:
                return
            self._drop(node)

    def sweep_all(self, now: float) -> None:
        """For whoever calls it now and then: orgs that ask nothing any more are forgotten too."""
        for org, tokenizer in list(self._trees):
            self.sweep(now, org, tokenizer)
            if not self._trees[org, tokenizer].order:
                del self._trees[org, tokenizer]

    def forget(self, org: str | None = None, tokenizer: int | None = None) -> None:
        """Forget what is kept of an org, or of a tokenizer; of all without either."""
        for key in list(self._trees):
            if org in (None, key[0]) and tokenizer in (None, key[1]):
                tree = self._trees.pop(key)
                self.bytes -= tree.size
                tree.order.clear()

    def size_of(self, org: str) -> int:
        """Bytes kept of an org."""
        return sum(tree.size for key, tree in self._trees.items() if key[0] == org)

    def _node(self, tree: _Tree, parent: _Node | None, digest: bytes, tokens: array[int]) -> _Node:
        after = parent.after if parent else tree.after
        node = after.get(digest)  # another request may have been sooner
        if node is None:
            node = after[digest] = _Node(tree, parent, digest, tokens.tobytes())
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
        del (node.parent.after if node.parent else tree.after)[node.digest]
        tree.size -= node.size
        self.bytes -= node.size

    def _make_room(self) -> None:
        while self.bytes > self.bytes_max:
            sizes: dict[str, int] = {}
            for (org, _), tree in self._trees.items():
                sizes[org] = sizes.get(org, 0) + tree.size
            most = max(sizes, key=lambda one: sizes[one])
            trees = [tree for (org, _), tree in self._trees.items() if org == most and tree.order]
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


class Found(NamedTuple):
    """What is known of a text: its first pieces."""

    path: list[_Node]
    pieces: int


def _use(tree: _Tree, path: Sequence[_Node], now: float) -> None:
    for node in reversed(path):
        node.used_at = now
        if node in tree.order:
            tree.order.move_to_end(node)


def _known(path: Sequence[_Node], keys: Keys) -> tuple[Known, int]:
    """Of the first pieces that have it, and how many those are."""
    raw: list[bytes] = []
    apart: list[bytes] = []
    identity = keys.identity
    reached = 0
    for node in path:
        if (found := node.known.get(identity)) is None:
            break
        raw.append(found[0])
        apart += found[1]
        reached += 1
    joined = b"".join(raw)
    states = [joined[at : at + STATE_BYTES] for at in range(0, len(joined), STATE_BYTES)]
    return Known(states, apart if keys.unit_columns > 1 else keys.keys_of(states)), reached


def _known_size(known: tuple[bytes, tuple[bytes, ...]]) -> int:
    return _KNOWN_BYTES + len(known[0]) + 60 * len(known[1])
