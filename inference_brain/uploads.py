"""Bounds of a process that reads what strangers have uploaded: what it does to itself ends there."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MEMORY_BYTES: Final = 4 << 30
LOAD_SECONDS: Final = 60.0  # of a tokenizer, from the start of its process
LOAD_PROCESSOR_SECONDS: Final = 30
ROOT: Final = Path(__file__).parents[1]
_KEPT: Final = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")
_NICE: Final = 5
_FIRST_TO_GO: Final = "1000"  # where the machine has no memory left


def environment() -> Mapping[str, str]:
    """For such a process: without this one's secrets."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def bound_this_process() -> None:
    """Before it reads anything. Time is that of loading."""
    with contextlib.suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as file:
        file.write(_FIRST_TO_GO)
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    allow(LOAD_PROCESSOR_SECONDS)


def allow(seconds: int) -> None:
    """So much time of a processor from now on; then the kernel ends this process. That holds also when
    nobody is left who would kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + 1 + seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (until, hard))
