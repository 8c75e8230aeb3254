"""What a Cluster Server starts in tests: the real compiler, and managers without an engine.

python managers.py compile|run --folder F
python managers.py spare
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
FAKE = ROOT / "tests" / "cluster_server" / "fake_manager.py"


def main(arguments: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    if arguments == ["spare"]:
        from workload_manager import spare

        return spare.wait(main)
    if arguments[0] == "compile":
        from workload_manager.compiler import command

        return command.main(arguments[1:])
    sys.argv[1:] = arguments
    runpy.run_path(str(FAKE), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
