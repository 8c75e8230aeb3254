"""The names of LoRA adapters. Two that have other weights must never have an equal one."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import NamedTuple, Protocol

from swdriver_shim.adapters.weights import FileState, digest_of, files_in, links_to, states_in

TICK_NS = 10_000_000  # the time of a change may be the one of the kernel's last tick


class Lora(Protocol):
    """What is looked at of vLLM's `LoRARequest`."""

    lora_name: str
    lora_path: str


class _Known(NamedTuple):
    name: str
    links: list[Path]  # on the way to its folder
    states: list[FileState]


class AdapterNames:
    """The names of adapters, as they have been since this was made, before vLLM loads the first one.

    vLLM may load an adapter at any time, and again, and does not say when: once its files have changed
    nobody knows which of them a request is computed with, so it has no name until the engine is started
    again."""

    def __init__(self, *, are_fixed: bool = False) -> None:
        """`are_fixed`: somebody answers for it that other weights always have another path. Then those
        that are put there and loaded while vLLM runs have names, too."""
        self._since_ns = math.inf if are_fixed else time.time_ns() - TICK_NS
        self._known: dict[tuple[str, str], _Known] = {}

    def name(self, lora: Lora) -> str | None:
        """None for an adapter whose weights nobody can tell: it has changed, or is no local folder."""
        known = self._known.get((lora.lora_name, lora.lora_path))
        try:
            if known is None:
                folder = Path(lora.lora_path)
                links = links_to(folder)
                before = states_in(lora.lora_path, links)
                if any(file.changed_ns >= self._since_ns for file in before):
                    return None
                known = _Known(f"{lora.lora_name} {digest_of(files_in(folder))}", links, before)
                self._known[lora.lora_name, lora.lora_path] = known
            # A folder in whose place a link is put by now has other files.
            found = states_in(lora.lora_path, known.links)
        except OSError:
            return None
        return known.name if found == known.states else None
