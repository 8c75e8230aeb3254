"""The names of LoRA adapters. Two that have other weights must never have an equal one."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Protocol

from swdriver_shim.adapters.weights import FileState, digest_of, files_in, states_of

TICK_NS = 10_000_000  # the time of a change may be the one of the kernel's last tick


class Lora(Protocol):
    """What is looked at of vLLM's `LoRARequest`."""

    lora_name: str
    lora_path: str


class AdapterNames:
    """The names of adapters, as they have been since this was made, before vLLM loads the first one.

    vLLM may load an adapter at any time, and again, and does not say when: once its files have changed
    nobody knows which of them a request is computed with, so it has no name until the engine is started
    again."""

    def __init__(self, *, are_fixed: bool = False) -> None:
        """`are_fixed`: somebody answers for it that other weights always have another path. Then those
        that are put there and loaded while vLLM runs have names, too."""
        self._since_ns = math.inf if are_fixed else time.time_ns() - TICK_NS
        self._known: dict[tuple[str, str], tuple[list[FileState], str]] = {}

    def name(self, lora: Lora) -> str | None:
        """None for an adapter whose weights nobody can tell: it has changed, or is no local folder."""
        known = self._known.get((lora.lora_name, lora.lora_path))
        try:
            folder = Path(lora.lora_path)
            files = files_in(folder)
            found = states_of(folder, files)
            if known is None:
                if any(file.changed_ns >= self._since_ns for file in found):
                    return None
                known = found, f"{lora.lora_name} {digest_of(files)}"
                found = states_of(folder, files)
                self._known[lora.lora_name, lora.lora_path] = known
        except OSError:
            return None
        before, name = known
        return name if found == before else None
