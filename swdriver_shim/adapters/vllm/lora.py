"""Which weights a folder or a file has. Two that have other weights must never have an equal name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

DIGITS = 32
_PART: Final = re.compile(r"-\d+-of-\d+$")  # of a file that was split, behind its name


class Lora(Protocol):
    """What is looked at of vLLM's `LoRARequest`."""

    lora_name: str
    lora_path: str


def digest_of(folder: Path) -> str:
    """Of the files in a folder, by their names, sizes and times. A copy that does not keep times is
    another one. Raises OSError."""
    return _digest_of(folder.iterdir())


def digest_of_file(file: Path) -> str:
    """As `digest_of` a folder with this file and those that vLLM loads with it: the other parts of one
    that was split, and projectors of images. Raises OSError."""
    whole = _PART.sub("", file.stem)
    return _digest_of(
        one for one in file.parent.iterdir() if _PART.sub("", one.stem) == whole or "mmproj" in one.name
    )


def _digest_of(paths: Iterable[Path]) -> str:
    files = [(file.name, file.stat()) for file in sorted(paths) if file.is_file()]
    said = repr([(name, found.st_size, found.st_mtime_ns) for name, found in files])
    return hashlib.sha256(said.encode()).hexdigest()[:DIGITS]


class AdapterNames:
    """The names of adapters, as they were when each was first served.

    vLLM may load an adapter anew, and does not say when: once its files have changed nobody knows which
    of them a request is computed with, so it has no name until the engine is started again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}

    def name(self, lora: Lora) -> str | None:
        """None for an adapter whose weights nobody can tell: it has changed, or is no local folder."""
        try:
            digest = digest_of(Path(lora.lora_path))
        except OSError:
            return None
        first = self._known.setdefault((lora.lora_name, lora.lora_path), digest)
        return f"{lora.lora_name} {first}" if first == digest else None
