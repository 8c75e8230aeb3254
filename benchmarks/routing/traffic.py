"""Requests of a trace, for any number of replicas: their prompts as columns, and when they come."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from swdriver_shim.keys import COLUMN_TOKENS, Keys, Namespace, Prompt
from swdriver_shim.replay.emulator import prompt_tokens
from swdriver_shim.replay.traces import Request, read

ORGS: Final = 8
SEED: Final = 7
NAMESPACE: Final = Namespace("emulated", "1", "bf16", "one group")
# Of sessions of agents: how long they are followed, how long new ones begin, and the longest prompt.
LASTS_SECONDS: Final = 3600.0
STARTS_WITHIN: Final = 7200.0
TOKENS_MAX: Final = 200_000


@dataclass(slots=True, eq=False)
class Asking:
    """A request and its place in the run. `text`: what is sent to routers that read text; eight
    characters for each column, equal for equal columns."""

    number: int
    at: float
    request: Request
    keys: Keys
    sent: float = 0.0  # when it was placed
    _prompt: Prompt | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        return max(1, self.request.input_tokens)

    @property
    def output(self) -> int:
        return max(1, self.request.output_tokens)

    @property
    def prompt(self) -> Prompt:
        """Kept until `forget`: a prompt has a key for each of its columns."""
        if self._prompt is None:
            self._prompt = self.keys.prompt(prompt_tokens(self.request, self.number))
        return self._prompt

    def forget(self) -> None:
        self._prompt = None

    @property
    def columns(self) -> list[bytes]:
        return self.prompt.keys

    @property
    def text(self) -> str:
        tail = f"{self.number:08x}"[: 8 * (self.tokens % COLUMN_TOKENS) // COLUMN_TOKENS]
        return "".join([key[:4].hex() for key in self.columns]) + tail


def orgs() -> list[Keys]:
    return [
        Keys(f"org-{index}", hashlib.sha256(f"{SEED} {index}".encode()).digest(), NAMESPACE)
        for index in range(ORGS)
    ]


def conversation(folder: Path, count: int) -> list[Asking]:
    """The first requests of `conversation`, as they came; conversations belong to orgs by their hash."""
    found = []
    keys = orgs()
    for number, request in enumerate(read(folder / "conversation.jsonl")):
        if number >= count:
            break
        # Many rows have the same time, of which the trace keeps whole seconds only: spread over theirs.
        found.append(Asking(number, request.at_s, request, keys[hash_of(request.session) % ORGS]))
    return spread(found)


def spread(found: Sequence[Asking]) -> list[Asking]:
    """Requests with the same time come one after the other, until the next time."""
    groups: dict[float, list[Asking]] = {}
    for one in found:
        groups.setdefault(one.at, []).append(one)
    times = [*groups, max(groups) + 3.0]
    for begins, ends in itertools.pairwise(times):
        group = groups[begins]
        for place, one in enumerate(group):
            one.at = begins + (ends - begins) * place / len(group)
    return sorted(found, key=lambda one: one.at)


def agent_sessions(folder: Path, count: int, copies: int) -> list[Asking]:
    """Sessions of agents, each several times, with tokens of its own. Some have begun before, as if
    somebody had put the replicas there in the middle of a day. Of all that the first so many requests,
    without those that are longer than what engines are set up for."""
    rng = random.Random(SEED)
    requests = [one for one in read(folder / "agent-sessions") if one.input_tokens <= TOKENS_MAX]
    keys = orgs()
    made = []
    for copy in range(copies):
        begins = {
            session: rng.uniform(-LASTS_SECONDS, STARTS_WITHIN) for session in sessions_of(requests)
        }
        for request in requests:
            at = request.at_s + begins[request.session]
            if request.at_s > LASTS_SECONDS or not 0 <= at <= STARTS_WITHIN:
                continue
            other = Request(
                at,
                f"{request.session}/{copy}",
                tuple(block * copies + copy for block in request.blocks),
                request.block_tokens,
                request.input_tokens,
                request.output_tokens,
                request.source,
            )
            made.append((at, other))
    made.sort(key=lambda pair: pair[0])
    return [
        Asking(number, at, request, keys[hash_of(request.session) % ORGS])
        for number, (at, request) in enumerate(made[:count])
    ]


def sessions_of(requests: Sequence[Request]) -> list[str]:
    return list(dict.fromkeys(request.session for request in requests))


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{SEED}\0{text}".encode()).digest()[:8], "little")
