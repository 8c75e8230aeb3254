"""What is fuzzed: a function of bytes, and what it may raise. Everything else is a finding."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz.mutating import Mutate

CORPUS: Final = Path(__file__).with_name("corpus")
SECONDS_MAX: Final = 1.0  # of processor time, for one input
INPUT_BYTES_MAX: Final = 1 << 16


class TooSlow(Exception):
    """An input of a few kilobytes took longer than a decoder may."""


@dataclass(frozen=True, slots=True)
class Target:
    """`decode` may raise `refusals` and nothing else: not RecursionError, not MemoryError. What else it
    promises, that a value survives being written and read again, say, it asserts."""

    decode: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]
    mutate: Mutate | None = None  # beside the fuzzer's own ways

    def run(self, raw: bytes) -> bool:
        """Whether the input was one that means something. Raises what is a finding."""
        began = time.thread_time()
        try:
            self.decode(raw)
        except RecursionError:  # a RuntimeError, which nobody documents
            raise
        except self.refusals:
            means = False
        else:
            means = True
        if time.thread_time() - began > SECONDS_MAX:
            raise TooSlow(f"{time.thread_time() - began:.1f} s for {len(raw)} bytes")
        return means


def kept(name: str) -> list[Path]:
    """The corpus of a target, in the repository."""
    return sorted((CORPUS / name).glob("*"))


Targets = Mapping[str, Target]
