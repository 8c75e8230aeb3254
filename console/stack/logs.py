"""A log file per service, which never grows beyond a bound."""

from __future__ import annotations

import io
from collections import defaultdict, deque
from datetime import UTC, datetime
from pathlib import Path

FILE_BYTES_MAX = 10 * 1024 * 1024  # and as much again in `<name>.log.1`
LAST_LINES = 20


class Logs:
    """Appends lines; a full file becomes `.1` and a new one begins."""

    def __init__(self, directory: Path, *, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        self.directory = directory
        self.lines_lost = 0  # which could not be written
        self._file_bytes_max = file_bytes_max
        self._files: dict[str, io.FileIO] = {}
        self._last: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=LAST_LINES))

    def path(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def write(self, name: str, line: str) -> None:
        """Add a line. A disk that is full must not stop what is running: the line is lost then."""
        if line.strip():
            self._last[name].append(line)
        try:
            file = self._open(name)
            file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ} {line}\n".encode())
            if file.tell() > self._file_bytes_max:
                self._rotate(name)
        except OSError:
            self.lines_lost += 1

    def last_lines(self, name: str) -> list[str]:
        """The last of what it said in this run, also if the disk took none of it."""
        return list(self._last.get(name, ()))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, name: str) -> io.FileIO:
        if name not in self._files:
            # Unbuffered: a line is either in the file or lost, and never half of it later.
            self._files[name] = self.path(name).open("ab", buffering=0)
        return self._files[name]

    def _rotate(self, name: str) -> None:
        self._files.pop(name).close()
        self.path(name).replace(self.path(name).with_suffix(".log.1"))
