"""`python -m tests.chaos --seconds 600`: two of every process under load, killed in random order.

Prints what was seen; the exit code is 1 if a promise broke. Logs are in `.tidegate/chaos`.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from typing import Final

from console.environment import PROJECT
from tests.chaos.scene import chaos
from tests.chaos.storm import rage

LOGS: Final = PROJECT / ".tidegate" / "chaos"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    told = parser.parse_args(arguments)
    print(f"Seed {told.seed}: {told.seconds:g} s of kills.", flush=True)
    with chaos(LOGS / str(told.seed)) as scene:
        result = rage(scene, told.seconds, told.seed)
    print(result.table())
    print(f"{len(result.broken)} promises broke." if result.broken else "No promise broke.")
    return int(bool(result.broken))


if __name__ == "__main__":
    sys.exit(main())
