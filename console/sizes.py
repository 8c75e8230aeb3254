"""Bytes as people read them, wherever the console tells of them. Pure; figures.js does the same.

In powers of 1024, which is how memory is bought, slots are aligned and policies are typed: a node with
512 GiB has 512 GiB on its page, in a plan, in an alert and on a chart.
"""

from __future__ import annotations

from typing import Final

_UNITS: Final = tuple((1 << 10 * power, f"{'KMGTPE'[power - 1]}iB") for power in range(6, 0, -1))


def size(count: float) -> str:
    """`1.5 TiB`: three digits are enough to decide by."""
    for unit, name in _UNITS:
        if abs(count) >= unit:
            amount = count / unit
            return f"{amount:.0f} {name}" if abs(amount) >= 100 else f"{amount:.3g} {name}"
    return f"{count:.3g} B" if abs(count) < 100 else f"{count:.0f} B"
