"""An agent that spills columns into a directory for as long as it lives. Started to be killed.

With a fourth argument its files have names before they are whole, as where a mount wants that."""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

from kvss_agent.tier2 import posix
from kvss_agent.tier2.index import Caps
from tests.kvss_agent.tier2.columns import address_of, opened, put

LENGTH = 1 << 20


async def spill_on_and_on(root: Path, cap: int, first: int) -> None:
    numbers = itertools.count(first)

    async def one_after_the_other() -> None:
        for number in numbers:
            print(number, await put(store, address_of(number), LENGTH), flush=True)

    async with opened(root, Caps(cap, cap)) as store:
        await asyncio.gather(*(one_after_the_other() for _ in range(6)))


def cannot(path: str) -> bool:
    return False


if __name__ == "__main__":
    if sys.argv[4:]:
        posix._can_be_nameless = cannot
    asyncio.run(spill_on_and_on(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
