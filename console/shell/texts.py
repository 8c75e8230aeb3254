"""Text that is composed of other text, and has to fit."""

from __future__ import annotations


def cut(text: str, most: int) -> str:
    """Return `text`, or as much of it as fits into `most` characters, with an ellipsis at its end."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
