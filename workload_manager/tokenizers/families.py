"""Tokenizers that are there beforehand: a folder with a folder for each family."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from workload_manager.tokenizers.archive import REQUIRED
from workload_manager.tokenizers.store import NotStored

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def families(folder: Path) -> Sequence[str]:
    """Their names, in order. None where there is no such folder."""
    return sorted(
        path.parent.name for path in folder.glob(f"*/{REQUIRED}") if _NAME.fullmatch(path.parent.name)
    )


def family(folder: Path, name: str) -> Path:
    """Raises NotStored."""
    path = folder / name
    if not _NAME.fullmatch(name) or not (path / REQUIRED).is_file():
        known = ", ".join(families(folder)) or "none"
        raise NotStored(f"There is no family of tokenizers named “{name[:50]}”; there are: {known}.")
    return path
