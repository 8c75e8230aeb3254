"""What schemathesis is told of the API's description before it makes requests of it."""

from __future__ import annotations

from typing import Any, Final

import schemathesis

ANY_TEXT: Final = r"^[^\x00]*$"
SAME: Final = r"^[^\x00]*(?![\s\S])"
LONG: Final = 10_000


@schemathesis.hook
def before_load_schema(_: schemathesis.HookContext, raw_schema: dict[str, Any]) -> None:
    """Write the pattern of long texts in another way. Of `[^x]*` and a length of at most 4,194,304
    schemathesis makes `[^x]{0,4194304}`, which takes a processor seconds to compile wherever it is
    used. The other way stays as it is, beside the length."""
    _rewrite(raw_schema)


def _rewrite(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("pattern") == ANY_TEXT and schema.get("maxLength", 0) > LONG:
            schema["pattern"] = SAME
        for part in schema.values():
            _rewrite(part)
    elif isinstance(schema, list):
        for part in schema:
            _rewrite(part)
