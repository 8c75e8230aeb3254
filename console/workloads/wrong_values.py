"""What msgspec says of a value that a field does not take, in words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_BOUNDS: Final = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def in_words(said: str, forms: Mapping[str, str]) -> str:
    """A sentence without its period. `forms`: what a pattern asks for, by the pattern."""
    if found := re.fullmatch(r"Expected `str` matching regex (.+)", said):
        words = next((words for pattern, words in forms.items() if repr(pattern) == found[1]), "")
        return f"It has to be {words}" if words else said
    if found := re.fullmatch(r"Expected `([a-z |]+)`, got `([a-z]+)`", said):
        wanted = [_KINDS.get(one, one) for one in found[1].split(" | ") if one != "null"]
        return f"It has to be {' or '.join(wanted)}, and is {_KINDS.get(found[2], found[2])}"
    if found := re.fullmatch(r"Expected `(?:int|float)` ([<>]=?) (\S+)", said):
        return f"It has to be {_BOUNDS[found[1]]} {found[2]}"
    if found := re.fullmatch(r"Expected `(str|array|object)` of length ([<>]=?) (\d+)", said):
        one, several = ("character", "characters") if found[1] == "str" else ("entry", "entries")
        return f"It has to have {_BOUNDS[found[2]]} {found[3]} {one if found[3] == '1' else several}"
    return said
