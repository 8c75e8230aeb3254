"""Engines that a manager can start, by kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from workload_manager.engines import command, emulator, sglang, vllm
from workload_manager.engines.base import Given, Launch
from workload_manager.spec import EngineKind

# How to start it. May write files to the folder. Raises OSError, and CannotStart.
LAUNCH: Final[dict[EngineKind, Callable[[Given], Launch]]] = {
    "command": command.launch,
    "emulator": emulator.launch,
    "sglang": sglang.launch,
    "vllm": vllm.launch,
}
