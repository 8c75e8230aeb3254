"""docs/tutorial.md as its reader goes through it, on a stack that is up."""

from __future__ import annotations

import sys
from typing import Final

from console.environment import PROJECT
from tests.documents import Shell, steps
from tests.stack.whole import Whole

TEXT: Final = (PROJECT / "docs" / "tutorial.md").read_text()


def follow(stack: Whole, token: str) -> None:
    """Go through it on this stack. `token`: what its reader gets on the page Tokens."""
    instead = {
        "http://127.0.0.1:8400": stack.address,
        "http://127.0.0.1:8440": stack.brain_address,
        "tgw_…": token,
        ".tidegate/": f"{stack.state}/",
        ".venv/bin/python": sys.executable,
    }
    first, *others = steps(TEXT)
    assert first.command == "make up", "which is what its reader has done"
    with Shell(instead, stack.environment) as shell:
        for step in others:
            shell.follow(step)
