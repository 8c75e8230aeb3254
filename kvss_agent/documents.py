"""Documents that others send or have written: read within limits, and how one is refused.

Whoever only reads documents, such as a compile job, need not load what serves HTTP.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from telemetry import decoder as bounded_decoder

BODY: Final = bounded_decoder.Limits(64 << 20, 1 << 23)  # a prompt of four million tokens, at most

T = TypeVar("T")


def whole(pattern: str) -> str:
    r"""A pattern `^…$` for fields of documents. msgspec searches, where `$` also matches before a
    newline at the end. Without `\Z`, which a JSON schema does not know."""
    return rf"{pattern.removesuffix('$')}$(?!\n)"


class Invalid(Exception):
    """One sentence for everything that is wrong."""


class Conflict(Exception):
    """The request does not fit what is there now."""


def decode(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """A body, within the limits of documents. Raises Invalid."""
    try:
        return bounded_decoder.decode(raw, decoder, BODY)
    except bounded_decoder.Malformed as error:
        raise Invalid(str(error)) from error
