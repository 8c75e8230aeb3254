"""A log file per service, which never grows beyond a bound."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import IO

FILE_BYTES_MAX = 10 * 1024 * 1024  # and as much again in `<name>.log.1`
LAST_LINES = 20


class Logs:
    """Appends lines; a full file becomes `.1` and a new one begins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, IO[str]] = {}
        self._last: dict[str, str] = {}

    def path(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def write(self, name: str, line: str) -> None:
        """Add a line. A disk that is full must not stop what is running: the line is lost then."""
        if line.strip():
            self._last[name] = line.strip()
        try:
            file = self._open(name)
            file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ} {line}\n")
            file.flush()
            if file.tell() > FILE_BYTES_MAX:
                self._rotate(name)
        except OSError:
            self._last[name] = line.strip()

    def last_line(self, name: str) -> str:
        return self._last.get(name, "it said nothing")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, name: str) -> IO[str]:
        if name not in self._files:
            self._files[name] = self.path(name).open("a", encoding="utf-8", errors="replace")
        return self._files[name]

    def _rotate(self, name: str) -> None:
        self._files.pop(name).close()
        self.path(name).replace(self.path(name).with_suffix(".log.1"))
