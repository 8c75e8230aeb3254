"""What an engine is to a manager: a command line, and where it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from swdriver_shim.adapters.join_config import JoinConfig
from workload_manager.spec import InstanceSpec

SOCKET: Final = Path("engine.sock")  # in the folder of the instance, where engine and manager are


@dataclass(frozen=True, slots=True)
class Programs:
    """The interpreters of engines: they may have environments of their own."""

    python: str
    vllm_python: str
    sglang_python: str


@dataclass(frozen=True, slots=True)
class Given:
    """What is there when an engine is started. `port`: a free one of the loopback interface.
    `stop_seconds`: how long it has to end, once it is told to."""

    spec: InstanceSpec
    folder: Path
    programs: Programs
    port: int
    stop_seconds: float
    weights: Path | None = None
    tokenizer: Path | None = None
    join: JoinConfig | None = None

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Launch:
    """`socket`: where it answers; None: at `origin`. `probe`: a path that it answers once it serves."""

    command: tuple[str, ...]
    origin: str
    socket: Path | None = None
    probe: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the manager's own


class CannotStart(Exception):
    """This engine can't be started as the specification has it. A sentence."""
