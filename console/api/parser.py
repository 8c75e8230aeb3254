"""Bodies of requests: JSON by the one bounded decoder, so that nobody's body is deeper, longer or larger
in its numbers than what follows can hold."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja.errors import HttpError
from ninja.parser import Parser

from telemetry.decoder import DOCUMENT, Malformed, decode


class BoundedParser(Parser):
    def parse_body(self, request: HttpRequest) -> Any:
        """Raises Malformed, of which ninja makes an HttpError: see `sentence_of`."""
        return decode(request.body, object, DOCUMENT)


def sentence_of(error: HttpError) -> str:
    """What ninja says, and why a body could not be decoded, which it does not say."""
    if isinstance(error.__cause__, Malformed):
        return f"The body is not the JSON that is expected here: {error.__cause__}."
    return f"{error.message}."
