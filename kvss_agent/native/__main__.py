"""`python -m kvss_agent.native`: build the compiled mover, or print the reason why not."""

from __future__ import annotations

import argparse
import sys

import kvss_agent.native as package
from kvss_agent.native import Unavailable, require


def main() -> int:
    """0 if there is a compiled mover, 1 if not."""
    argparse.ArgumentParser(
        prog="python -m kvss_agent.native",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    try:
        mover = require(build=True)
    except (Unavailable, ValueError) as reason:
        print(f"No compiled mover: {reason}", file=sys.stderr)
        return 1
    print(f"Compiled mover for {mover.levels()[0]}: {mover.__file__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
