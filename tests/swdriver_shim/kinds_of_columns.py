"""Both kinds of columns, with compiled fields and with those in Python, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MemberDescriptorType
from typing import Any

import pytest

from swdriver_shim.cache import prefix_map
from swdriver_shim.cache.prefix_map import Column, Tail


def _based(on: type, one: type) -> type[Any]:
    """The class, with another base."""
    own = {
        name: value for name, value in vars(one).items() if not isinstance(value, MemberDescriptorType)
    }
    return type(one.__name__, (on,), own)


@contextmanager
def columns_with(fields: type) -> Iterator[None]:
    """Maps make columns with these fields."""
    with pytest.MonkeyPatch.context() as patch:
        column = _based(fields, Column)
        patch.setattr(prefix_map, "Column", column)
        patch.setattr(prefix_map, "Tail", _based(column, Tail))
        yield
