"""What operations of a template would make, checked and paid for before they make it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from inference_brain.tokens.budget import ITEM_CHARACTERS, Budget
from inference_brain.tokens.errors import TemplateTooCostly

WIDTH_MAX: Final = 10_000
INTEGER_BITS_MAX: Final = 4096
_HAS_LENGTH: Final = (str, list, tuple, dict)  # of which more is made of more
_NUMBER: Final = re.compile(r"\d+")
_OF_CONVERSION: Final = re.compile(r"%[#0\- +]*(\d+|\*)?(?:\.(\d+|\*))?")  # width and precision
_WITH_WIDTH: Final = frozenset({"center", "ljust", "rjust", "zfill"})


def pay_for(budget: Budget, made: object) -> None:
    """What is given to an operation, or what it has made."""
    if isinstance(made, _HAS_LENGTH):
        budget.spend(len(made))


def check_method(budget: Budget, name: str, text: str, arguments: Sequence[Any]) -> None:
    """Before a method of a string is called."""
    if name in _WITH_WIDTH and arguments:
        check_width(arguments[0])
    elif name == "replace" and len(arguments) >= 2:
        pay_for_replacing(budget, text, arguments[0], arguments[1])
    elif name == "join" and arguments:
        pay_for_joining(budget, text, arguments[0])


def pay_for_replacing(budget: Budget, text: str, old: Any, new: Any) -> None:
    budget.spend_on((old, new))
    times = text.count(str(old))
    budget.spend(len(text) + times * len(str(new)))


def pay_for_formatting(budget: Budget, form: str, given: Any) -> None:
    """Before `%` is applied. What is given by names may be taken with each of them."""
    if "%(" in form:  # a name may have anything in it, so all is taken for widths
        pay_for_widths(budget, [*_NUMBER.findall(form), *("*" for one in form if one == "*")])
    else:
        pay_for_widths(budget, [one for found in _OF_CONVERSION.findall(form) for one in found if one])
    before = budget.characters
    budget.spend_on(given)
    if isinstance(given, Mapping):
        budget.spend((before - budget.characters) * form.count("%("))


def pay_for_indenting(budget: Budget, text: Any, width: Any) -> None:
    if isinstance(text, str):
        each = len(width) if isinstance(width, str) else max(0, int(width))
        budget.spend(each * len(text.splitlines()))


def pay_for_joining(budget: Budget, between: str, parts: Any) -> None:
    """Of a text, each character is a part."""
    if isinstance(parts, str):
        budget.spend((len(between) + ITEM_CHARACTERS) * len(parts))
    elif isinstance(parts, list | tuple):
        budget.spend(len(between) * len(parts))
        budget.spend_on(parts)


def check_product(budget: Budget, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = abs(left).bit_length()
        made = bits + abs(right).bit_length() if operator == "*" else bits * abs(right)
        if made > INTEGER_BITS_MAX:
            raise TemplateTooCostly("The chat template computes too large a number")
    elif operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(times, int):
                budget.spend(len(one) * max(times, 0))


def check_width(value: Any) -> None:
    """Of so many blanks, or of what is put there instead."""
    width = len(value) if isinstance(value, str) else value
    if isinstance(width, int | float) and abs(width) > WIDTH_MAX:
        raise TemplateTooCostly(f"The chat template asks for a width or count above {WIDTH_MAX}")


def pay_for_spec(budget: Budget, spec: str) -> None:
    """Of `format`, once what is computed in it is known."""
    pay_for_widths(budget, _NUMBER.findall(spec))


def pay_for_widths(budget: Budget, widths: Sequence[str]) -> None:
    """`*`: one that is computed."""
    if any(one == "*" or len(one) > 4 for one in widths):
        raise TemplateTooCostly(f"The chat template asks for a width above {WIDTH_MAX}")
    budget.spend(sum(map(int, widths)))
