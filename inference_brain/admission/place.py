"""A place at a replica: what an admitted request has from its entry to its end."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from inference_brain.admission.pool import Pool, Waiting
from inference_brain.admission.ticket import Ticket


class Place:
    """One of a model's places. It is given back by `leave`, or at the end of a `with`; whatever happens
    then, nothing is left of it."""

    def __init__(self, pool: Pool, waiting: Waiting, made_room: Callable[[], None]) -> None:
        self._pool = pool
        self._waiting = waiting
        self._made_room = made_room
        self._is_left = False
        self.replica = ""

    @property
    def ticket(self) -> Ticket:
        return self._waiting.ticket

    @property
    def waited_seconds(self) -> float:
        return self._waiting.placed_at - self._waiting.entered_at

    def routed(self, replica: str) -> None:
        """It goes to this replica, or now to another one."""
        self.replica = replica

    def first_token(self) -> None:
        """Its answer has begun: the prompt is computed."""
        self._pool.first_token(self._waiting)
        self._made_room()

    def leave(self, answer_tokens: int = 0, computed_tokens: int | None = None) -> None:
        """It has ended, with so many tokens of answers. `computed_tokens`: of its prompt, those that
        were not cached; None: as the ticket says if there is an answer, else none. Does nothing the
        second time."""
        if self._is_left:
            return
        self._is_left = True
        if computed_tokens is None:
            computed_tokens = self.ticket.computed_tokens if answer_tokens else 0
        self._pool.leave(self._waiting, computed_tokens, answer_tokens)
        self._made_room()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()
