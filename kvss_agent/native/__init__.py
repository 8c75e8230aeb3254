"""The compiled mover, where there is a compiler. Everything works without it, only slower.

A wheel brings it, if there was a compiler where the wheel was built. Elsewhere the C files beside this
are compiled once, into the state directory of a checkout or into the user's cache. Agents and drivers do
that in the background when they start (`selection.build_in_background`) and switch over when it is done.
Importing this never compiles anything. `python -m kvss_agent.native` builds it and prints the result.

`KVSS_NATIVE` decides who moves bytes: `auto`, the compiled mover where there is one and it is faster;
`off`, the Python mover; `require`, the compiled mover or none. `CC` is the compiler, by default `cc`.
"""

from __future__ import annotations

from kvss_agent.native.builder import Unavailable, build
from kvss_agent.native.loader import Choice, NativeMover, best, choice, load, require
from kvss_agent.native.selection import build_in_background, current, follow

__all__ = [
    "Choice",
    "NativeMover",
    "Unavailable",
    "best",
    "build",
    "build_in_background",
    "choice",
    "current",
    "follow",
    "load",
    "require",
]
