"""Where a stack keeps what is its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from console.environment import HOME
from console.stack.errors import sentences

PROBE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Folders:
    """The state directory of one stack; everything it writes is in there."""

    state: Path

    @classmethod
    def given(cls, variables: Mapping[str, str]) -> Folders:
        return cls(HOME / (variables.get("TIDEGATE_STATE_DIR") or ".tidegate"))

    @property
    def run(self) -> Path:
        """A file per running process."""
        return self.state / "run"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def status(self) -> Path:
        """What the supervisor last knew of its services, for `status`."""
        return self.state / "status"

    def make(self) -> None:
        """Make them, or say in a sentence why not: no permission, a full disk, a file in the way."""
        for path in (self.state, self.run, self.logs):
            with sentences("make a directory", path):
                path.mkdir(parents=True, exist_ok=True)
        for path in (self.run, self.logs):
            with sentences("close a directory to others", path):
                path.chmod(0o700)
        with sentences("write", self.state):
            probe = self.run / "probe"
            try:
                probe.write_bytes(b"\1" * PROBE_BYTES)
            finally:
                probe.unlink(missing_ok=True)
