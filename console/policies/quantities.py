"""Times and sizes as people type them. Pure."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_TYPED: Final = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")
_SECONDS: Final = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
}
_BYTES: Final = {
    **dict.fromkeys(("", "b", "bytes"), 1),
    **{
        name: 1 << 10 * power
        for power, letter in enumerate("kmgtp", start=1)
        for name in (letter, f"{letter}ib")
    },
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
}
_TIMES_SHOWN: Final = ((86_400, "d"), (3600, "h"), (60, "min"))
_SIZES_SHOWN: Final = tuple((1 << 10 * power, f"{'KMGTP'[power - 1]}iB") for power in range(5, 0, -1))


class NotOne(ValueError):
    """What was typed is no such quantity, in a sentence."""


def seconds_of(text: str) -> int:
    """`10 min`, `2 h`, `90`. Raises NotOne."""
    return _read(text, _SECONDS, "Write a time as 90 s, 10 min, 2 h or 7 d.")


def bytes_of(text: str) -> int:
    """`64 GiB`, `1.5 TiB`, `4096`. Raises NotOne."""
    return _read(text, _BYTES, "Write a size as 512 MiB, 64 GiB or 1.5 TiB.")


def as_time(seconds: int) -> str:
    """In the largest unit that it is a whole number of: what `seconds_of` reads back."""
    return _write(seconds, _TIMES_SHOWN, "s")


def as_size(count: int) -> str:
    return _write(count, _SIZES_SHOWN, "bytes")


def _read(text: str, units: dict[str, int], sentence: str) -> int:
    found = _TYPED.fullmatch(text)
    size = units.get(found[2].lower()) if found else None
    if found is None or size is None:
        raise NotOne(sentence)
    amount = Decimal(found[1]) * size
    if amount != int(amount):
        raise NotOne(sentence)
    return int(amount)


def _write(amount: int, units: tuple[tuple[int, str], ...], smallest: str) -> str:
    for size, name in units:
        if amount and amount % size == 0:
            return f"{amount // size} {name}"
    return f"{amount} {smallest}"
