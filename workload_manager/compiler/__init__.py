"""Compile jobs: what an engine will need, found and checked without one, in seconds."""

from __future__ import annotations

from workload_manager.compiler.errors import Refused
from workload_manager.compiler.spec import CompileSpec

__all__ = ["CompileSpec", "Refused"]
