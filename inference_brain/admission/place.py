"""A place at a replica: what an admitted request has from its entry to its end."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, Protocol, Self

from inference_brain.admission.limits import Use
from inference_brain.admission.pool import Waiting
from inference_brain.admission.single_flight import Followed
from inference_brain.admission.ticket import Ticket


class Ended(NamedTuple):
    """What a request really was. `computed_tokens`: of its prompt, those that were not cached.
    `prompt_tokens`: all of them as the engine has said, 0 if it has not."""

    answer_tokens: int
    computed_tokens: int
    prompt_tokens: int


class Giver(Protocol):
    """Who gives places, and takes them back."""

    def routed(self, waiting: Waiting, replica: str) -> None: ...

    def first_token(self, waiting: Waiting, *, is_known: bool) -> None: ...

    def leave(self, waiting: Waiting, use: Use, ended: Ended) -> None: ...


class Place:
    """One of a model's places. It is given back by `leave`, or at the end of a `with`; whatever happens
    then, nothing is left of it."""

    def __init__(self, giver: Giver, waiting: Waiting, use: Use) -> None:
        self._giver = giver
        self._waiting = waiting
        self._use = use
        self._is_left = False
        self._has_first_token = False
        self.replica = ""

    @property
    def ticket(self) -> Ticket:
        return self._waiting.ticket

    @property
    def waited_seconds(self) -> float:
        return self._waiting.placed_at - self._waiting.entered_at

    @property
    def followed(self) -> Followed | None:
        """A replica that has just computed a prefix of it for another request. Its cache map may not say
        so yet."""
        return self._waiting.followed

    def routed(self, replica: str) -> None:
        """It goes to this replica, or now to another one."""
        self.replica = replica
        self._giver.routed(self._waiting, replica)

    def first_token(self, *, is_known: bool = True) -> None:
        """Its answer has begun: the prompt is computed. Once is enough. `is_known`: when that was; else
        it is expected to be so by now."""
        if not self._has_first_token and not self._is_left:
            self._has_first_token = True
            self._giver.first_token(self._waiting, is_known=is_known)

    def leave(
        self, answer_tokens: int = 0, computed_tokens: int | None = None, prompt_tokens: int = 0
    ) -> None:
        """It has ended, with so many tokens of answers. `computed_tokens`: of its prompt, those that
        were not cached; 0 if it failed; None: as the ticket says, if it was sent to a replica.
        `prompt_tokens`: as the engine has said; 0: it has not. Does nothing the second time."""
        if self._is_left:
            return
        self._is_left = True
        if computed_tokens is None:
            computed_tokens = self.ticket.computed_tokens if answer_tokens or self.replica else 0
        ended = Ended(answer_tokens, computed_tokens, prompt_tokens)
        self._giver.leave(self._waiting, self._use, ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()
