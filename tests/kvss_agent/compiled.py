"""The compiled mover, built for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvss_agent import native
from kvss_agent.native import Unavailable

COMPILER = os.environ.get("CC") or "cc"
STRICT = f"{COMPILER} -Wall -Wextra -Werror"


def built(directory: Path, compiler: str) -> Any:
    """A mover that this compiler has just made."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TIDEGATE_STATE_DIR", str(directory))
        patched.setenv("CC", compiler)
        patched.delenv("KVSS_NATIVE", raising=False)
        try:
            return native.require(build=True)
        except Unavailable as reason:
            if "there is no compiler" in str(reason) or "the headers of Python" in str(reason):
                pytest.skip(f"the native mover cannot be built here: {reason}")
            raise
