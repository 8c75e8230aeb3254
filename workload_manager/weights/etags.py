"""What an S3 object's ETag says of its bytes.

Of an object that was put as a whole it is their MD5. Of one that came in parts it is the MD5 of the MD5s
of the parts, with their number; the size of a part is not said, so the usual ones are tried.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
PARTS_MIB: Final = (5, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512, 1024)
READ_BYTES: Final = 4 * MIB
_ETAG: Final = re.compile(r'"?([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?"?')


def matches(path: Path, etag: str, check: Callable[[], None] = lambda: None) -> bool | None:
    """Whether a file is what its ETag says; None where that says nothing about it, as with parts of an
    unusual size. `check` may raise while it reads. Raises OSError."""
    found = _ETAG.fullmatch(etag)
    if found is None:
        return None
    size, parts = path.stat().st_size, int(found[2] or 0)
    if not parts:
        return _md5(path, 0, size, check).hexdigest() == found[1]
    for each in _sizes(size, parts):
        digests = b"".join(
            _md5(path, start, min(each, size - start), check).digest() for start in range(0, size, each)
        )
        if hashlib.md5(digests, usedforsecurity=False).hexdigest() == found[1]:
            return True
    return None


def _sizes(size: int, parts: int) -> Iterator[int]:
    """Usual sizes of a part, by which a file of this size has so many."""
    exact = math.ceil(size / parts)
    candidates = {each * MIB for each in PARTS_MIB} | {math.ceil(exact / MIB) * MIB, exact}
    yield from sorted(each for each in candidates if each and math.ceil(size / each) == parts)


def _md5(path: Path, start: int, size: int, check: Callable[[], None]) -> hashlib._Hash:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        file.seek(start)
        while size and (raw := file.read(min(READ_BYTES, size))):
            check()
            digest.update(raw)
            size -= len(raw)
    return digest
