"""Why something is not compiled."""

from __future__ import annotations


class Refused(Exception):
    """`reason`: a word for machines. `field`: of the spec, by its path."""

    def __init__(self, reason: str, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.field = field
        self.sentence = f"`{field}`: {sentence}" if field else sentence


def misconfigured(field: str, sentence: str) -> Refused:
    return Refused("Misconfigured", field, sentence)
