"""Tickets and rooms for tests of admission."""

from __future__ import annotations

from typing import Any

from inference_brain.admission import Room, Ticket
from inference_brain.desired import Limits

MODEL = "m"


class Rooms:
    """A capacity that a test sets."""

    def __init__(self, requests: int, prefill_tokens: int = 1 << 30) -> None:
        self.one = Room(requests, prefill_tokens)
        self.of: dict[str, Room] = {}

    def room(self, model: str) -> Room:
        return self.of.get(model, self.one)


def ticket(org: str = "acme", prompt: int = 100, answer: int = 100, **more: Any) -> Ticket:
    """Fields of `Limits` and of `Ticket` by their names; `priority` is the ticket's."""
    of_limits = {*Limits.__struct_fields__} - {"priority"}
    limits = Limits(**{name: more.pop(name) for name in list(more) if name in of_limits})
    given = {"model": MODEL, "prompt_tokens": prompt, "answer_tokens_max": answer, **more}
    return Ticket(org=org, limits=limits, **given)
