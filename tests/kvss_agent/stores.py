"""Settings of tier 2."""

from __future__ import annotations

from pathlib import Path


def tier2(path: Path, cap_bytes: int = 64 << 20) -> dict[str, object]:
    return {"kind": "posix", "path": str(path), "cap_bytes": cap_bytes}
