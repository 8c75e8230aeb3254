"""A request on its way through the brain: what is known of it, and where it goes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_128_digest

from inference_brain.admission import Followed
from inference_brain.api.requests import Chat, Completion, Generation
from inference_brain.choice import Choice
from inference_brain.desired import OrgSpec, ServedModel
from inference_brain.tokens.turns import Tokens
from inference_brain.upstream.fleet import Numbers, Replica, Roster
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import COLUMN_TOKENS, TAG_BYTES, Prompt, isolation_tag

CHARACTERS_PER_TOKEN: Final = 4  # of a prompt that is not tokenized here, about
MEDIUM_TOKENS: Final = 1024  # of an image or another medium, about
AFFINITY_COLUMNS: Final = 16  # that prompts have to share to belong together
AFFINITY_CHARACTERS: Final = AFFINITY_COLUMNS * COLUMN_TOKENS * CHARACTERS_PER_TOKEN


class NoReplica(Exception):
    """No replica can take the request. A sentence."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Asking:
    """A request on its way through the brain. `arrived` and all times of it are of a monotonic clock;
    `at` is in seconds since 1970. `tokens`: of its prompt, or of its first one; None where they are not
    known."""

    id: str
    org: OrgSpec
    model: ServedModel
    request: Generation
    arrived: float
    at: float
    deadline_seconds: float | None = None
    tokens: Tokens | None = None
    prompt_tokens: int = 0  # of all its prompts; an estimate if they are not known
    prompts: Mapping[ModelSpec, Prompt] = field(default_factory=dict)
    affinity: bytes = b""
    guess: Prompt | None = None  # for replicas without a driver
    followed: Followed | None = None  # where its prefix was computed just now
    preview: Preview | None = None

    def forget(self, tags: Collection[bytes]) -> None:
        """Columns with these tags were purged. The request goes on, and nothing tells its prompt."""
        prompts = [*self.prompts.values(), *([self.guess] if self.guess else [])]
        if found := [prompt for prompt in prompts if prompt.maker.tag in tags]:
            for prompt in found:
                prompt.forget()  # its request's ticket has the same list of keys
            self.prompts, self.guess = {}, None
        if found or self.affinity[:TAG_BYTES] in tags:
            self.affinity, self.preview = self.id.encode(), None


class Preview(NamedTuple):
    """Where a request would go when it came. `usable`: numbers of replicas in the roster. `decision`:
    how many had been made before."""

    choice: Choice
    roster: Roster
    usable: Numbers
    decision: int
    at: float
    seconds: float


class Routed(NamedTuple):
    """Where a request goes. `excluded`: replicas that were no candidates, and why."""

    replica: Replica
    choice: Choice
    seconds: float  # that the decision took
    excluded: Mapping[str, str]


def affinity(asking: Asking) -> bytes:
    """The key of the first columns: of all that prompts have, if they have fewer. Empty without a whole
    column."""
    prompt = next(iter(asking.prompts.values()), asking.guess)
    if prompt is None or not prompt.keys:
        return b""
    return prompt.maker.tag + prompt.keys[min(AFFINITY_COLUMNS, len(prompt.keys)) - 1]


def affinity_of_text(asking: Asking) -> bytes:
    """A key for prompts that have none of tokens: of their first characters."""
    request = asking.request
    text = ""
    if isinstance(request, Completion):
        text = str(request.prompts[0])[:AFFINITY_CHARACTERS]
    elif isinstance(request, Chat):
        for message in request.messages:
            text += str(message.get("content"))[:AFFINITY_CHARACTERS]
            if len(text) >= AFFINITY_CHARACTERS:
                break
    tag = tag_of(asking.org.name, asking.org.secret)
    return tag + xxh3_128_digest(tag + text[:AFFINITY_CHARACTERS].encode(errors="replace"))


def about(request: Generation) -> int:
    """How many tokens a prompt has that is not tokenized here."""
    characters = media = 0
    if isinstance(request, Completion):
        characters = sum(len(one) for one in request.prompts)
    elif isinstance(request, Chat):
        for message in request.messages:
            content = message.get("content")
            if isinstance(content, str):
                characters += len(content)
            elif content:
                texts = [one if isinstance(one, str) else one.get("text") for one in content]
                found = [text for text in texts if isinstance(text, str)]
                characters += sum(map(len, found))
                media += len(texts) - len(found)
        characters += len(msgspec.json.encode(request.tools or ()))
    return max(1, characters // CHARACTERS_PER_TOKEN + media * MEDIUM_TOKENS)


@lru_cache(maxsize=4096)
def tag_of(org: str, secret: bytes) -> bytes:
    """The isolation tag, as often as it is asked for. After a purge the cache has to be cleared."""
    return isolation_tag(org, secret)
