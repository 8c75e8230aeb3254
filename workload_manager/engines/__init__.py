"""Engines that a manager can start, by kind."""

from __future__ import annotations

from typing import Final

from workload_manager.engines.base import Engine
from workload_manager.engines.command import CommandEngine
from workload_manager.engines.emulator import EmulatorEngine
from workload_manager.engines.sglang import SglangEngine
from workload_manager.engines.vllm import VllmEngine
from workload_manager.spec import EngineKind

ENGINES: Final[dict[EngineKind, Engine]] = {
    "command": CommandEngine(),
    "emulator": EmulatorEngine(),
    "sglang": SglangEngine(),
    "vllm": VllmEngine(),
}
