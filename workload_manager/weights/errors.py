"""Why there are no weights."""

from __future__ import annotations


class WeightsError(Exception):
    """`reason`: a word for machines: `NotFound`, `Denied`, `Unreachable`, `Changed`, `Damaged`,
    `NoSpace`, `BadSource` or `Unreadable`."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence
